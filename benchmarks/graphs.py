"""The same step, captured in a CUDA graph and replayed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.engines import Engine, not_prepared
from benchmarks.workloads import Batch

_WARM_UP_STEPS = 3


def captured(engine: Engine, batch: Batch) -> Engine:
    """Return an engine that copies a batch's ids to a fixed place and replays the captured step.

    The copy is part of its step. Offsets and gradients are the same in all batches of a case. FBGEMM's Adam counts
    steps on the host, so its replays repeat one count: the same work, but not the same training.

    Args:
        engine: whose step to capture. It shares module and tables with the new one.
        batch: gives the shapes; it trains before the capture, unless tables are new for every step.

    Returns:
        An engine of the same name.
    """
    make_tables = engine.prepare
    if make_tables is None:
        return replace(engine, step=_capture(engine, batch, _WARM_UP_STEPS))

    def prepare(twin: Engine, batch: Batch) -> None:
        make_tables(twin, batch)
        # Captured is not run: the tables are still empty afterwards.
        twin.step = _capture(twin, batch, 0)
        torch.cuda.synchronize()

    return replace(engine, step=not_prepared, module=None, prepare=prepare)


@dataclass(frozen=True)
class _Replay:
    """A captured step.

    Attributes:
        graph: of the step.
        source: the field of a batch with the ids that it reads.
        fixed: the batch it was captured with; its ids are overwritten before every replay.
        step: the step itself. The graph reads its tables, and ``fixed``, by address alone: they must live on.
    """

    graph: torch.cuda.CUDAGraph
    source: str
    fixed: Batch
    step: Callable[[Batch], None]

    def __call__(self, batch: Batch) -> None:
        getattr(self.fixed, self.source).copy_(getattr(batch, self.source))
        self.graph.replay()


def _capture(engine: Engine, batch: Batch, warm_up_steps: int) -> _Replay:
    source, step = engine.source, engine.step
    fixed = replace(batch, **{source: getattr(batch, source).clone()})
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up_steps):
            step(fixed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(fixed)
    return _Replay(graph, source, fixed, step)
