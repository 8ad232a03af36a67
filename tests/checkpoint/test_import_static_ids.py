"""Ids of rows that are not their numbers: given ones, and those of managed-collision modules."""

from typing import Any

import pytest
import torch

from dynamicemb import DynamicEmbScoreStrategy, import_static
from tests.checkpoint.test_import_static_tables import DIM, held, module, rows_of
from tests.support.checkpoints import records

N = 20
EXTREME = [-(2**63), 2**63 - 1, -1, 0, 2**62 + 3]
IDS = torch.tensor([*EXTREME, *range(100, 100 + N - len(EXTREME))])
WEIGHTS = {"embeddings.t.weight": rows_of(N)}


def by_id(tables: Any) -> dict[int, torch.Tensor]:
    ids, weights = tables.export_keys_values("t", "cpu")
    return dict(zip(ids.tolist(), weights, strict=True))


def assert_rows(tables: Any, rows: torch.Tensor, ids: torch.Tensor) -> None:
    found = by_id(tables)
    assert sorted(found) == sorted(ids.tolist())
    assert all(torch.equal(found[i], rows_of(N)[row]) for row, i in zip(rows.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("name", ["t", "model.t"])
def test_rows_get_the_ids_of_a_map(name: str) -> None:
    tables = module()
    report = import_static(tables, WEIGHTS, id_maps={name: IDS})["model"]["t"]
    assert_rows(tables, torch.arange(N), IDS)
    assert (report.num_rows, report.num_without_id) == (N, 0)


def test_rows_without_an_id_are_left_out() -> None:
    tables = module()
    rows = torch.tensor([19, 0, 7, 3], dtype=torch.int32)
    report = import_static(tables, WEIGHTS, id_maps={"t": (rows, IDS[:4])})["model"]["t"]
    assert_rows(tables, rows, IDS[:4])
    assert (report.num_rows, report.num_without_id, report.num_lost) == (N, 16, 0)
    empty = torch.empty(0, dtype=torch.int64)
    report = import_static(tables, WEIGHTS, id_maps={"t": (empty, empty)})["model"]["t"]
    assert report.num_without_id == N and not by_id(tables)


def test_unsigned_ids_keep_their_bits() -> None:
    tables = module()
    import_static(tables, WEIGHTS, id_maps={"t": IDS.view(torch.uint64)})
    assert_rows(tables, torch.arange(N), IDS)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (IDS[:-1], ValueError, r"id_maps\['t'\] must have an id for each of the 20 rows, got the shape \[19\]"),
        (
            IDS.clone().index_fill(0, torch.tensor([4, 9]), -1),
            ValueError,
            "id -1 is there more than once; give",
        ),
        (IDS.float(), TypeError, "ids must be int64"),
        (IDS.tolist(), TypeError, r"is a list of numbers; pass torch.as_tensor"),
        (IDS.numpy(), TypeError, "must be made of tensors"),
        ((torch.tensor([1, 1]), torch.tensor([5, 6])), ValueError, "row 1 is there more than once"),
        ((torch.tensor([1, 2]), torch.tensor([5, 5])), ValueError, "id 5 is there more than once"),
        ((torch.tensor([1, 20]), torch.tensor([5, 6])), ValueError, r"rows must be in 0..19, got 1..20"),
        ((torch.tensor([-1, 2]), torch.tensor([5, 6])), ValueError, r"rows must be in 0..19, got -1..2"),
        ((torch.tensor([1, 2]), torch.tensor([5])), ValueError, "rows and ids must be of one length"),
    ],
)
def test_wrong_maps_are_refused_before_the_table_changes(value: Any, error: type[Exception], message: str) -> None:
    tables = module()
    tables.insert("t", torch.tensor([-5]), torch.ones(1, DIM))
    with pytest.raises(error, match=message):
        import_static(tables, WEIGHTS, id_maps={"t": value})
    assert list(by_id(tables)) == [-5]


def test_maps_must_name_one_table() -> None:
    tables = module(names=("t", "u"))
    values = {**WEIGHTS, "embeddings.u.weight": rows_of(N)}
    with pytest.raises(ValueError, match=r"id_maps: 'x' names none of the tables .*\['model.t', 'model.u'\]"):
        import_static(tables, values, id_maps={"x": IDS})
    with pytest.raises(ValueError, match="'t' and 'model.t' are one table"):
        import_static(tables, values, id_maps={"model.t": IDS, "t": IDS})
    with pytest.raises(TypeError, match="id_maps must map"):
        import_static(tables, values, id_maps=[IDS])  # type: ignore[arg-type]
    import_static(tables, values, id_maps={"u": IDS})
    assert torch.equal(held(tables), rows_of(N)) and sorted(by_id(tables)) == list(range(N))


# Managed collisions

PATH = "mc._managed_collision_collection._managed_collision_modules.t."


def managed(ids: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a module that sorts has, with ids for some rows."""
    raw, mapping = torch.full((N,), 2**63 - 1), torch.empty(N, dtype=torch.int64)
    rest = torch.tensor([row for row in range(N) if row not in rows.tolist()], dtype=torch.int64)
    order = ids.argsort()
    raw[: ids.numel()], mapping[: ids.numel()], mapping[ids.numel() :] = ids[order], rows[order], rest
    return {
        "mc._embedding_module.embeddings.t.weight": rows_of(N),
        f"{PATH}_mch_sorted_raw_ids": raw,
        f"{PATH}_mch_remapped_ids_mapping": mapping,
        f"{PATH}_mch_counts": torch.ones(N, dtype=torch.int64),
        f"{PATH}_output_segments_tensor": torch.full((1025,), -1),
        f"{PATH}_current_iter_tensor": torch.tensor([7]),
    }


class Holder(torch.nn.Module):
    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.mc = tables


def test_rows_get_the_ids_that_a_module_gave_them() -> None:
    tables = module()
    rows, ids = torch.tensor([4, 19, 0, 2]), torch.tensor([-7, 2**62, 5, -(2**63)])
    report = import_static(Holder(tables), managed(ids, rows))["model.mc"]["t"]
    assert_rows(tables, rows, ids)
    assert (report.num_rows, report.num_without_id, report.num_repeated) == (N, 16, 0)
    # A map of the user's own goes before.
    import_static(Holder(tables), managed(ids, rows), id_maps={"t": IDS})
    assert_rows(tables, torch.arange(N), IDS)


@pytest.mark.parametrize("names", [("LFU",), ("TIMESTAMP", "LFU"), ("LFU", "TIMESTAMP"), ("TIMESTAMP",)])
def test_counts_of_a_module_are_those_of_its_ids(names: tuple[str, ...]) -> None:
    parts = tuple(DynamicEmbScoreStrategy[name] for name in names)
    tables = module(score_strategy=parts if len(parts) > 1 else parts[0])
    rows, ids = torch.tensor([4, 19, 0]), torch.tensor([7, 5, 6])
    values = managed(ids, rows)
    # By ascending ids; a free place has a count of none.
    values[f"{PATH}_mch_counts"][:3] = torch.tensor([50, 60, 0])
    import_static(Holder(tables), values)
    scores = {i: dict(zip(names, record[2], strict=True)) for i, record in records(tables, "t").items()}
    if "LFU" in names:
        assert {i: of_id["LFU"] for i, of_id in scores.items()} == {5: 50, 6: 60, 7: 1}
    if "TIMESTAMP" in names:
        assert len({of_id["TIMESTAMP"] for of_id in scores.values()}) == 1
    values[f"{PATH}_mch_counts"] = torch.ones(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="has 3 counts for 20 ids"):
        import_static(Holder(tables), values)


def test_rows_get_the_ids_of_a_module_that_hashes() -> None:
    tables = module()
    identities = torch.full((N, 1), -1)
    rows, ids = torch.tensor([4, 19, 0]), torch.tensor([2**63 - 1, 9, 0])
    identities[rows, 0] = ids
    values = {
        "model.mc._embedding_bag_collection.embedding_bags.t.weight": rows_of(N),
        f"model.{PATH}_hash_zch_identities": identities,
        f"model.{PATH}_hash_zch_bucket": torch.tensor([[2]]),
    }
    report = import_static(Holder(tables), values)["model.mc"]["t"]
    assert_rows(tables, rows, ids)
    assert (report.num_without_id, report.num_repeated) == (17, 0)
    # An id that is there twice is its last row.
    identities[11, 0] = 9
    report = import_static(Holder(tables), values)["model.mc"]["t"]
    assert_rows(tables, rows, ids)
    assert (report.num_without_id, report.num_repeated) == (16, 1)


def test_a_module_of_another_collection_is_not_asked() -> None:
    tables = module()
    values = managed(torch.tensor([5]), torch.tensor([5]))
    values["plain.embeddings.t.weight"] = rows_of(N)
    names = {"model.mc": {"t": "plain.embeddings.t.weight"}}
    assert import_static(Holder(tables), values, table_names=names)["model.mc"]["t"].num_without_id == 0
    # One that stands elsewhere serves a managed collection, if no other is there.
    moved = {key.replace("mc._managed", "over._managed"): value for key, value in values.items()}
    report = import_static(Holder(tables), moved, table_names={"model.mc": {"t": list(moved)[0]}})
    assert report["model.mc"]["t"].num_without_id == N - 1
    both = {**values, **moved}
    for key in [key for key in both if key.startswith("mc._managed")]:
        both[f"third{key[2:]}"] = both.pop(key)
    with pytest.raises(ValueError, match="may have the raw ids of mc._embedding_module"):
        import_static(Holder(tables), both, table_names={"model.mc": {"t": list(moved)[0]}})


def test_a_managed_table_without_raw_ids_is_refused() -> None:
    tables = module()
    values = {key: value for key, value in managed(IDS[:3], torch.arange(3)).items() if key.endswith(".weight")}
    with pytest.raises(ValueError, match="its raw ids are missing; .* or id_maps"):
        import_static(Holder(tables), values)
    import_static(Holder(tables), values, id_maps={"t": IDS})
    assert_rows(tables, torch.arange(N), IDS)


@pytest.mark.parametrize("damage", ["missing", "short", "outside", "twice"])
def test_damaged_modules_are_refused(damage: str) -> None:
    tables = module()
    values = managed(torch.tensor([5, 6]), torch.tensor([5, 8]))
    key = f"{PATH}_mch_remapped_ids_mapping"
    message = {
        "missing": "is missing",
        "short": "must be as many",
        "outside": "outside of",
        "twice": "row 5 is there more",
    }
    if damage == "missing":
        del values[key]
    elif damage == "short":
        values[key] = values[key][:-1]
    else:
        values[key][1] = {"outside": N, "twice": 5}[damage]
    with pytest.raises(ValueError, match=message[damage]):
        import_static(Holder(tables), values)
