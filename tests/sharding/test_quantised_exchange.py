"""A codec for what ranks exchange is used for dynamic tables, forward and backward, or a warning says why not."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.sharded_model import Case, Table, build, exported, loss_of, make_batch, make_kjt, outputs_of

BAGS = Case(tables=(Table("t", ("f",), dim=32), Table("u", ("g",), dim=32)), pooled=True, batch_sizes=(4,))
UNEVEN = replace(BAGS, batch_sizes=(2, 5))
ROWS = replace(UNEVEN, pooled=False)
# The finest step of `Rounding`.
STEP = 1 / 256


class Rounding:
    """A codec that sends multiples of `STEP` as integers, and counts its calls."""

    def __init__(self) -> None:
        self.encoded = self.decoded = 0

    def encode(self, values: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        self.encoded += 1
        # Gloo's reduce-scatter, for equal batches, knows no 16-bit integers.
        return (values / STEP).round().to(torch.int32)

    def decode(self, values: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        self.decoded += 1
        return values.float() * STEP

    def calc_quantized_size(self, size: int, ctx: Any = None) -> int:
        return size

    @property
    def quantized_dtype(self) -> torch.dtype:
        return torch.int32

    def create_context(self) -> None:
        return None


def step_once(case: Case, rank: int, world_size: int, registry: Any) -> dict[str, Any]:
    """Train one step; return outputs and rows."""
    model = build(case, world_size, codecs=registry)
    outputs = outputs_of(case, model(make_kjt(make_batch(case, 0, rank), case)))
    before = {name: out.detach() for name, out in outputs.items()}
    loss_of(outputs).backward()
    return {"outputs": before, "rows": exported(model)}


def with_and_without(rank: int, world_size: int, case: Case) -> tuple[Any, Any, list[int]]:
    from torchrec.distributed.types import CommOp, QuantizedCommCodecs

    forward, backward = Rounding(), Rounding()
    codecs = QuantizedCommCodecs(forward=forward, backward=backward)  # type: ignore[arg-type]
    exchange = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER if case.pooled else CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="qcomm_codecs_registry")
        coded = step_once(case, rank, world_size, {exchange.name: codecs})
    calls = [forward.encoded, forward.decoded, backward.encoded, backward.decoded]
    return step_once(case, rank, world_size, None), coded, calls


@pytest.mark.distributed
@pytest.mark.parametrize("case", [BAGS, UNEVEN, ROWS], ids=["bags", "uneven bags", "rows"])
def test_c27_a_codec_is_used_forward_and_backward(ranks: RankPool, case: Case) -> None:  # noqa: F811
    for plain, coded, calls in ranks.run(2, with_and_without, case):
        assert calls == [1, 1, 1, 1]
        for name, out in coded["outputs"].items():
            steps = out / STEP
            assert torch.equal(steps, steps.round()) and bool(out.any())
            # Each of two ranks rounds once.
            assert float((out - plain["outputs"][name]).abs().max()) <= STEP + 1e-6
        changed = 0
        for name, rows in coded["rows"].items():
            for id_, row in rows.items():
                difference = float((row - plain["rows"][name][id_]).abs().max())
                # A few occurrences of an id, a learning rate of 0.1.
                assert difference <= 20 * 0.1 * STEP
                changed += difference > 0
        assert changed


def with_fbgemm_codecs(rank: int, world_size: int) -> list[float]:
    """Return how far FBGEMM's codecs move outputs of uneven batches, by precision."""
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs
    from torchrec.distributed.types import CommOp

    plain, distances = step_once(UNEVEN, rank, world_size, None)["outputs"], []
    for precision in (CommType.FP16, CommType.INT8):
        codecs = get_qcomm_codecs(QCommsConfig(precision, precision))
        coded = step_once(UNEVEN, rank, world_size, {CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: codecs})["outputs"]
        distances.append(max(float((coded[name] - out).abs().max()) for name, out in plain.items()))
    return distances


@pytest.mark.distributed
def test_c27_codecs_of_fbgemm_are_used_for_uneven_batches(ranks: RankPool) -> None:  # noqa: F811
    for half, byte in ranks.run(2, with_fbgemm_codecs):
        assert 0 < half < 1e-3
        assert half < byte < 0.1


def warnings_without_a_codec(rank: int, world_size: int, case: Case) -> list[str]:
    from torchrec.distributed.types import CommOp, QuantizedCommCodecs

    other = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL if case.pooled else CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        codecs = QuantizedCommCodecs(forward=Rounding(), backward=Rounding())  # type: ignore[arg-type]
        build(case, world_size, codecs={other.name: codecs})
    return [str(w.message) for w in caught if "qcomm_codecs_registry" in str(w.message)]


@pytest.mark.distributed
@pytest.mark.parametrize("case", [BAGS, ROWS], ids=["bags", "rows"])
def test_c27_codecs_for_other_exchanges_warn(ranks: RankPool, case: Case) -> None:  # noqa: F811
    exchange = "POOLED_EMBEDDINGS_REDUCE_SCATTER" if case.pooled else "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
    for (message,) in ranks.run(1, warnings_without_a_codec, case):
        assert "tables ['t', 'u'] travel by " + exchange in message
