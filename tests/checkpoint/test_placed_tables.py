"""Tables on some of the ranks: dumps, increments and counters reach any other placement (contract 21, 23, 26)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynamicemb import KVCounter
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.table.placement import Placement, Rule
from tests.support.checkpoints import records
from tests.support.lookups import make_module, options
from tests.support.ranks import RankError, RankPool, ranks  # noqa: F401

pytestmark = pytest.mark.distributed

DIM = 4
# Where tables are in a group of three ranks: two have different parts of "a" and one has none of it, and so on.
SCATTERED = {"a": (0, 2), "b": (1,), "c": (2, 0, 1)}
OTHERS = {"a": (1,), "b": (0, 1, 2), "c": (1, 2)}
ALONE = {"a": (0,), "b": (0,), "c": (0,)}
IDS = torch.tensor([-(2**63), -4, -1, 0, 1, 2, 3, 7, 10, 11, 12, 40, 41, 2**62, 2**63 - 1])


class Holder(nn.Module):
    """What a sharded collection shows of its dynamic tables."""

    def __init__(self, rank: int, placed: dict[str, tuple[int, ...]], dist_type: str) -> None:
        super().__init__()
        self.dynamic_table_placements = {
            name: Placement(Rule(dist_type, 100), of_table, ((0, DIM),)) for name, of_table in placed.items()
        }
        here = [name for name, of_table in placed.items() if rank in of_table]
        self.dynamic_embedding_modules = []
        if here:
            tables = [options(DIM, 256, dist_type=dist_type) for _ in here]
            self.dynamic_embedding_modules.append(make_module(tables, table_names=here, optimizer="adam"))

    def state_dict_ranks(self) -> Ranks:
        """Return the ranks over which the tables are spread."""
        return Ranks()


def rows_of(ids: torch.Tensor, shift: float) -> torch.Tensor:
    return (ids.remainder(1000).float()[:, None] + torch.arange(DIM)) * 0.5 + shift


def own(holder: Holder, name: str, ids: torch.Tensor, rank: int) -> torch.Tensor:
    return ids[holder.dynamic_table_placements[name].owns(ids, rank)]


def fill(holder: Holder, ids: torch.Tensor, rank: int, shift: float) -> None:
    """Insert ids on the ranks that own them."""
    for module in holder.dynamic_embedding_modules:
        for name in module.table_names:
            mine = own(holder, name, ids, rank)
            assert module.insert(name, mine, rows_of(mine, shift)).all()


def weights(holder: Holder) -> dict[str, dict[int, list[float]]]:
    """Return what this rank holds, by table and id."""
    found = {}
    for module in holder.dynamic_embedding_modules:
        module.tables.check_invariants()
        for name in module.table_names:
            found[name] = {
                key: torch.frombuffer(bytearray(row), dtype=torch.float32).tolist()
                for key, (row, *_) in records(module, name).items()
            }
    return found


def dump_and_reload(
    rank: int, world_size: int, folder: str, dist_type: str, placed: Any, later: Any, increment: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad

    model = nn.ModuleDict({"ebc": Holder(rank, placed, dist_type)})
    fill(model["ebc"], IDS, rank, 0.0)
    DynamicEmbDump(f"{folder}/0", model, optim=True)
    chain: Any = f"{folder}/0"
    if increment:
        fill(model["ebc"], IDS[3:6], rank, 7.0)
        for module in model["ebc"].dynamic_embedding_modules:
            for name in module.table_names:
                module.erase(name, IDS[7:9])
        DynamicEmbDump(f"{folder}/1", model, optim=True, base=chain)
        chain = [chain, f"{folder}/1"]
    copy = nn.ModuleDict({"ebc": Holder(rank, later, dist_type)})
    report = DynamicEmbLoad(chain, copy, optim=True)
    sizes = {name: of_table.num_rows for name, of_table in report["model.ebc"].items()}
    return weights(copy["ebc"]), sizes


def expected(increment: bool) -> dict[int, list[float]]:
    rows = dict(zip(IDS.tolist(), rows_of(IDS, 0.0).tolist(), strict=True))
    if increment:
        rows |= dict(zip(IDS[3:6].tolist(), rows_of(IDS[3:6], 7.0).tolist(), strict=True))
        for key in IDS[7:9].tolist():
            del rows[key]
    return rows


def check(found: list[dict[str, Any]], later: dict[str, tuple[int, ...]], dist_type: str, increment: bool) -> None:
    """Each id is on the rank that owns it, once, with its row; a rank without a part of a table has nothing."""
    for name, of_table in later.items():
        placement = Placement(Rule(dist_type, 100), of_table, ((0, DIM),))
        wanted = expected(increment)
        for rank, of_rank in enumerate(found):
            assert (name in of_rank) == (rank in of_table)
            ids = torch.tensor(sorted(wanted))
            mine = ids[placement.owns(ids, rank)].tolist()
            assert of_rank.get(name, {}) == {key: wanted[key] for key in mine}


@pytest.mark.parametrize("increment", [False, True], ids=["full", "chain"])
@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin", "continuous"])
@pytest.mark.parametrize("later", [SCATTERED, OTHERS, ALONE], ids=["same", "others", "alone"])
def test_c23_rows_reach_the_ranks_of_any_placement(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
    dist_type: str,
    later: dict[str, tuple[int, ...]],
    increment: bool,
) -> None:
    found = ranks.run(3, dump_and_reload, str(tmp_path), dist_type, SCATTERED, later, increment)
    check([rows for rows, _ in found], later, dist_type, increment)
    assert {tuple(sizes.values()) for _, sizes in found} == {(len(expected(increment)),) * 3}
    files = {path.name for path in (tmp_path / "0" / "model.ebc").iterdir()}
    assert "a_emb_keys.rank_1.world_size_2" in files and "b_emb_keys.rank_0.world_size_1" in files
    manifest = json.loads((tmp_path / "0" / "manifest.json").read_bytes().split(b"\n", 1)[1][len('"manifest": ') : -2])
    entry = manifest["collections"]["model.ebc"]["a"]
    assert manifest["format_version"] == 2 and manifest["world_size"] == 3
    assert entry["placement"]["ranks"] == [0, 2] and entry["placement"]["columns"] == [[0, DIM]]


def load_elsewhere(rank: int, world_size: int, folder: str, later: Any) -> dict[str, Any]:
    from dynamicemb import DynamicEmbLoad

    copy = nn.ModuleDict({"ebc": Holder(rank, later, "roundrobin")})
    DynamicEmbLoad(f"{folder}/0", copy)
    return weights(copy["ebc"])


def test_c23_scattered_tables_are_read_by_another_number_of_ranks(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
) -> None:
    ranks.run(3, dump_and_reload, str(tmp_path), "roundrobin", SCATTERED, SCATTERED, False)
    for world_size, later in ((1, ALONE), (2, {"a": (1, 0), "b": (1,), "c": (0,)})):
        check(ranks.run(world_size, load_elsewhere, str(tmp_path), later), later, "roundrobin", False)


def count_and_reload(rank: int, world_size: int, folder: str, placed: Any, later: Any) -> tuple[Any, Any]:
    """Count occurrences of ids that are not admitted, dump and load the counters; return both sides' counts."""
    from dynamicemb import DynamicEmbDump, DynamicEmbLoad, FrequencyAdmissionStrategy
    from tests.support.admitting import lengths_of

    def make(of_tables: Any) -> nn.Module:
        holder = Holder(rank, of_tables, "roundrobin")
        names = [name for name, of_table in of_tables.items() if rank in of_table]
        admitting = {"admit_strategy": FrequencyAdmissionStrategy(5), "admission_counter": KVCounter(64)}
        tables = [options(DIM, 256, dist_type="roundrobin", **admitting) for _ in names]
        holder.dynamic_embedding_modules = [make_module(tables, table_names=names)] if names else []
        return nn.ModuleDict({"ebc": holder})

    def counted(model: nn.Module) -> dict[str, dict[int, int]]:
        modules = model["ebc"].dynamic_embedding_modules
        return {name: lengths_of(module, t) for module in modules for t, name in enumerate(module.table_names)}

    model = make(placed)
    for module in model["ebc"].dynamic_embedding_modules:
        parts = [own(model["ebc"], name, IDS, rank).repeat(2) for name in module.table_names]
        offsets = torch.tensor([0, *(part.numel() for part in parts)]).cumsum(0)
        offsets = torch.cat([torch.arange(int(offsets[-1]) + 1)]) if len(parts) == 1 else offsets
        ids = torch.cat(parts)
        if len(parts) == 1:
            module(ids, offsets)
            continue
        width = max(part.numel() for part in parts)
        bounds = [0]
        for part in parts:
            bounds += [bounds[-1] + min(i + 1, part.numel()) for i in range(width)]
        module(ids, torch.tensor(bounds))
    before = counted(model)
    DynamicEmbDump(folder, model, counter=True)
    copy = make(later)
    DynamicEmbLoad(folder, copy, counter=True)
    return before, counted(copy)


def test_c12_counters_reach_the_ranks_of_another_placement(ranks: RankPool, tmp_path: Path) -> None:  # noqa: F811
    found = ranks.run(3, count_and_reload, str(tmp_path / "d"), SCATTERED, OTHERS)
    for side in (0, 1):
        for name in SCATTERED:
            together: dict[int, int] = {}
            for of_rank in found:
                counts = of_rank[side].get(name, {})
                assert not together.keys() & counts.keys()
                together |= counts
            assert together == dict.fromkeys(IDS.tolist(), 2)


def refused(rank: int, world_size: int, folder: str) -> list[str]:
    from dynamicemb import DynamicEmbDump

    messages = []
    for placed, named in (({"a": (0,)}, {"a": (1,)}), ({"a": (0, 1)}, {"a": (0, 5)})):
        holder = Holder(rank, placed, "roundrobin")
        holder.dynamic_table_placements = {
            name: Placement(Rule(), of_table, ((0, DIM),)) for name, of_table in named.items()
        }
        try:
            DynamicEmbDump(folder, nn.ModuleDict({"ebc": holder}))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_c21_a_placement_that_is_not_that_of_the_tables_is_refused_on_all_ranks(
    ranks: RankPool,  # noqa: F811
    tmp_path: Path,
) -> None:
    for messages in ranks.run(2, refused, str(tmp_path / "d")):
        assert "gives rank 0 no part of it, but a module has one" in messages[0]
        assert "placement names rank 5 of 2 ranks" in messages[1]
    assert not (tmp_path / "d").exists()
