"""What a user can see of a module while it trains: statistics, representation, profiler ranges, bucket loads."""

import copy
import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbCheckMode
from dynamicemb.table.index import INSERTED, MISSES
from dynamicemb.table.layout import locate
from dynamicemb.table.stats import TallyReader
from tests.support.lookups import NONE, SUM, bag_per_id, batch, make_module, options
from tests.support.tables import device_of, make_group, ranges, use_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import monitoring

# Statistics


def test_c04_the_name_of_a_table_is_no_argument_of_stats() -> None:
    with pytest.raises(TypeError, match=r"wait must be a bool, got 'a'; the statistics of one table are stats\(\)"):
        make_module([options()], device="cpu").stats("a")


@pytest.mark.usefixtures("tensors_on_device")
def test_stats_without_waiting_are_those_with(backend: str) -> None:
    module = make_module([options(capacity=16), options(capacity=32)], device=device_of(backend))
    use_backend(module.tables, backend)
    rng = np.random.default_rng(2)
    for number in range(8):
        ids = [rng.integers(-20, 20, size).tolist() for size in (12, 20)]
        output = module(*batch(ids[0], ids[1]))
        if number % 3:
            output.sum().backward()
        module.erase("b", torch.tensor(ids[1][:7]))
        module.insert("a", torch.arange(50 * number, 50 * number + 3), torch.zeros(3, 4))
    expected = module.stats()
    assert arrived_stats(module) == expected
    assert all(expected["a"][name] > 0 for name in ("hits", "misses", "inserted", "evicted"))
    assert expected["b"]["erased"] > 0 and 0 < expected["b"]["size"] < 32
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        # Also before anything was sent.
        assert twin.tables.tally_reader.latest() == module.tables.index.tallies.tolist()
        assert twin.stats(wait=False) == expected
        twin(*batch([], [77, 78]))
        assert arrived_stats(twin)["b"]["misses"] == expected["b"]["misses"] + 2
    assert module.stats(wait=False) == expected


def arrived_stats(module: BatchedDynamicEmbeddingTablesV2) -> dict[str, dict[str, float]]:
    """Return the statistics that were sent for just now, once they have arrived."""
    module.stats(wait=False)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return module.stats(wait=False)


@pytest.mark.cuda
def test_stats_without_waiting_never_wait() -> None:
    module = make_module([options(capacity=1024)], device="cuda")
    ids, offsets = (tensor.cuda() for tensor in bag_per_id(range(100)))
    module(ids, offsets).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            module(ids, offsets).sum().backward()
            seen = module.stats(wait=False)["a"]["hits"]
            text = repr(module)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen <= 500 and "ids" not in text
    torch.cuda.synchronize()
    assert module.stats(wait=False)["a"]["hits"] == 500


class SlowReader(TallyReader):
    """Reads tallies of the CPU as those of a GPU whose copies arrive when the test says so."""

    def __init__(self, tallies: torch.Tensor) -> None:
        super().__init__(SimpleNamespace(tallies=tallies, num_tables=len(tallies)))
        self._on_host = False
        self.events: list[SimpleNamespace] = []
        self.num_buffers = 0

    def _new_buffer(self) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((1, 8), -1)

    def _mark(self) -> SimpleNamespace:
        event = SimpleNamespace(arrived=False)
        event.query = lambda: event.arrived
        event.synchronize = lambda: setattr(event, "arrived", True)
        self.events.append(event)
        return event


def test_a_slow_gpu_neither_delays_the_first_copy_nor_loses_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tallies = torch.zeros(1, 8, dtype=torch.int64)
    reader = SlowReader(tallies)
    for step in range(1, 6):
        tallies[0, MISSES] = step
        reader.send()
    assert reader.latest()[0][MISSES] == 0
    reader.events[0].arrived = True
    assert reader.latest()[0][MISSES] == 1
    reader.events[4].arrived = True
    assert reader.latest()[0][MISSES] == 5
    for step in range(6, 20):
        tallies[0, MISSES] = step
        reader.send()
        reader.events[-1].arrived = True
        assert reader.latest()[0][MISSES] == step
    assert reader.num_buffers == 2


def test_values_that_were_waited_for_are_not_replaced_by_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tallies = torch.zeros(1, 8, dtype=torch.int64)
    reader = SlowReader(tallies)
    for step in (1, 2):
        tallies[0, MISSES] = step
        reader.send()
    tallies[0, MISSES] = 3
    assert reader.wait()[0][MISSES] == 3
    assert all(event.arrived for event in reader.events)
    assert reader.latest()[0][MISSES] == 3
    reader.send()
    assert reader.num_buffers == 2


def test_nothing_is_sent_or_asked_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    tallies = torch.zeros(1, 8, dtype=torch.int64)
    reader = SlowReader(tallies)
    tallies[0, INSERTED] = 3
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    reader.send()
    reader.events[0].arrived = True
    capturing[0] = True
    assert reader.latest()[0][INSERTED] == 0
    reader.send()
    assert len(reader.events) == 1
    capturing[0] = False
    assert reader.latest()[0][INSERTED] == 3


# Representation


def test_the_representation_is_one_line_with_sizes_the_host_knows() -> None:
    lfu = DynamicEmbScoreStrategy.LFU
    module = make_module([options(4, 64, score_strategy=lfu), options(8, 32, score_strategy=lfu)], optimizer="adam")
    module(*batch(range(16), [1, 1]))
    expected = "a: 64x4 LFU (16 ids, 25%), b: 32x8 LFU (1 ids, 3%), adam, SUM, device=cpu"
    assert repr(module) == f"BatchedDynamicEmbeddingTablesV2({expected})"


# Profiler


def recorded_ranges(step) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    names = [(event.time_range.start, event.name) for event in profile.events()]
    return [name.removeprefix("dynamicemb::") for _, name in sorted(names) if name.startswith("dynamicemb::")]


@pytest.mark.parametrize("pooling", [SUM, NONE])
@pytest.mark.usefixtures("tensors_on_device")
def test_a_profiler_sees_the_phases_of_a_step(backend: str, pooling) -> None:
    module = make_module(device=device_of(backend), pooling_mode=pooling)
    use_backend(module.tables, backend)
    tensors = bag_per_id([1, 2, 1])

    def step() -> None:
        module(*tensors).sum().backward()

    step()
    assert recorded_ranges(step) == ["check", "find_or_insert", "read", "update"]
    module.eval()
    read = ["find_and_read"] if pooling is NONE else ["find", "read"]
    assert recorded_ranges(lambda: module(*tensors)) == ["check", *read]


def test_a_profiler_sees_the_plan_of_check_mode_error() -> None:
    module = make_module([options(safe_check_mode=DynamicEmbCheckMode.ERROR)])
    assert recorded_ranges(lambda: module(*bag_per_id([1]))) == ["check", "plan", "find_or_insert", "read"]


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.profiler, "record_function", fail)
    make_module()(*bag_per_id([1, 2])).sum().backward()


# Bucket loads


@pytest.mark.usefixtures("tensors_on_device")
def test_bucket_loads_count_the_ids_of_every_bucket(backend: str) -> None:
    group = make_group(backend, [16, 16 * 5])
    ids = torch.arange(-30, 30)
    step = group.begin_step()
    rows, _ = group.find_or_insert(ids, ranges(0, 60))
    step.finish()
    resident = ids[rows >= 0].cpu().numpy()
    erased = torch.from_numpy(resident[:9]).to(ids.device)
    assert group.erase(1, erased) == 9
    buckets, _, _ = locate(resident[9:], 5, 1)
    expected = np.bincount(np.bincount(buckets, minlength=5), minlength=17)
    loads = group.bucket_loads(1)
    assert loads.device.type == "cpu" and loads.tolist() == expected.tolist()
    assert group.bucket_loads(0).tolist() == [1] + [0] * 16


def test_bucket_loads_of_a_module_are_asked_by_name() -> None:
    module = make_module([options(capacity=32), options(capacity=16)])
    module(*batch([], range(20)))
    assert module.bucket_loads("b").tolist() == [0] * 16 + [1]
    with pytest.raises(ValueError, match="'c'"):
        module.bucket_loads("c")


# The example's callback


class Scalars(dict):
    """A writer that keeps everything, by tag and step."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert (tag, step) not in self
        self[tag, step] = value


def test_the_example_logs_every_statistic_to_any_writer() -> None:
    modules = [make_module([options(), options()]), make_module(table_names=["other"])]
    writer = Scalars()
    logger = monitoring.TableLogger(modules, writer, every=2)
    for step in range(1, 6):
        modules[0](*batch([1, 2, step], [7])).sum().backward()
        logger(step)
    logger.finish(5)
    stats = modules[0].stats()["a"]
    assert {tag for tag, step in writer if step == 5 and tag.startswith("tables/a/")} == {
        f"tables/a/{name}" for name in (*stats, "hit_rate")
    }
    assert {step for _, step in writer} == {2, 4, 5}
    assert all(writer[f"tables/a/{name}", 5] == value for name, value in stats.items())
    # Steps 1 and 2: [1, 2, 1], [1, 2, 2] after an empty table; from then on only the third id is new.
    assert [writer["tables/a/hit_rate", step] for step in (2, 4, 5)] == [0.5, 4 / 6, 2 / 3]
    assert writer["tables/other/size", 4] == 0 and ("tables/other/hit_rate", 4) not in writer
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        monitoring.TableLogger(modules, writer, every=0)


def test_the_example_writes_json_lines_without_tensorboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    writer = monitoring.open_writer(tmp_path / "run")
    writer.add_scalar("tables/a/load", 0.25, 3)
    writer.add_scalar("tables/a/size", 16, 3)
    writer.close()
    lines = (tmp_path / "run" / "scalars.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 3, "tag": "tables/a/load", "value": 0.25} and len(lines) == 2


def test_the_example_describes_and_draws_bucket_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (
        monitoring.fullest(torch.tensor([1, 0, 3, 1])) == "5 buckets of 3 slots: 2 ids at the median, 3 at most, 1 full"
    )
    module = make_module([options(capacity=128), options(capacity=32)])
    module(*batch(range(100), []))
    loads = monitoring.bucket_loads([module])
    assert loads.keys() == {"a", "b"} and int((loads["a"] * torch.arange(17)).sum()) == module.stats()["a"]["size"]
    assert monitoring.fullest(loads["b"]) == "2 buckets of 16 slots: 0 ids at the median, 0 at most, 0 full"
    pytest.importorskip("matplotlib")
    picture = tmp_path / "new" / "loads.png"
    assert monitoring.plot_bucket_loads(loads, picture) and picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not monitoring.plot_bucket_loads(loads, tmp_path / "none.png")
