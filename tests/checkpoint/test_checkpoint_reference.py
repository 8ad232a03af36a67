"""Dumps of the reference implementation load here, and ours without their manifest obey its format."""

import json
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.dynamicemb_config import DynamicEmbScoreStrategy, DynamicEmbTableOptions
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError
from tests.support.checkpoints import load_quietly, read_reference_files, records, shift_between, train, without_scores
from tests.support.lookups import bag_per_id, make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401

DUMPS = Path(__file__).parents[1] / "data" / "reference_dumps"
DIMS = {"users": 8, "items": 12}
# Folder: optimizer, strategy, state values of a row of dim d, the optimizer's numbers.
CASES: dict[str, tuple[str, str, Any, dict[str, float]]] = {
    "adam_step.ws1": ("adam", "STEP", lambda d: 2 * d, {"learning_rate": 0.1, "beta2": 0.99, "weight_decay": 0.01}),
    "adam_step.ws2": ("adam", "STEP", lambda d: 2 * d, {"learning_rate": 0.1, "beta2": 0.99, "weight_decay": 0.01}),
    "sgd_timestamp.ws1": ("sgd", "TIMESTAMP", lambda d: 0, {"learning_rate": 0.3}),
    "rowwise_lfu.ws1": ("exact_row_wise_adagrad", "LFU", lambda d: 1, {"learning_rate": 0.05, "eps": 1e-6}),
}


def module_for(case: str, **more: Any) -> BatchedDynamicEmbeddingTablesV2:
    optimizer, strategy, _, _ = CASES[case]
    tables = [
        DynamicEmbTableOptions(dim=dim, max_capacity=256, score_strategy=DynamicEmbScoreStrategy[strategy], **more)
        for dim in DIMS.values()
    ]
    return BatchedDynamicEmbeddingTablesV2(tables, list(DIMS), optimizer=optimizer, seed=1, device="cpu")


def expected(case: str) -> list[dict[str, np.ndarray]]:
    return [dict(np.load(path)) for path in sorted((DUMPS / case).glob("expected.rank_*.npz"))]


def evaluate(module: BatchedDynamicEmbeddingTablesV2, users: np.ndarray, items: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([users, items]))
    return module.eval()(ids, torch.arange(ids.numel() + 1)).detach().numpy()


@pytest.mark.parametrize("case", CASES)
def test_c24_dumps_of_the_reference_load(case: str) -> None:
    optimizer, strategy, state_dim, numbers = CASES[case]
    module = module_for(case)
    report = load_quietly(module, DUMPS / case, optim=True)
    for table, dim in DIMS.items():
        stored = read_reference_files(DUMPS / case, table, dim, state_dim(dim))
        exported = [(part[f"{table}_keys"], part[f"{table}_values"]) for part in expected(case)]
        rows = {int(i): row.tobytes() for ids, values in exported for i, row in zip(ids, values)}
        states = {int(i): row.tobytes() for i, row in zip(stored["ids"], stored["state"])}
        found = records(module, table)
        assert {i: weights for i, (weights, _, _) in found.items()} == rows
        assert {i: state for i, (_, state, _) in found.items()} == states
        scores = {int(i): int(score) for i, score in zip(stored["ids"], stored["scores"][:, 0])}
        if strategy == "TIMESTAMP":
            # Files have ages.
            assert len({found[i][2][0] + scores[i] for i in scores}) == 1
        else:
            assert {i: score for i, (_, _, (score,)) in found.items()} == scores
        assert report[table].num_rows == len(rows) and report[table].num_lost == report[table].num_repeated == 0
    for name, value in numbers.items():
        assert getattr(module.optimizer, name) == value
    module.tables.check_invariants()


@pytest.mark.parametrize("case", CASES)
def test_c24_evaluation_of_a_reference_dump_equals_what_it_computed(case: str) -> None:
    module = module_for(case)
    load_quietly(module, DUMPS / case)
    parts = expected(case)
    out = evaluate(module, parts[0]["eval_query_users"], parts[0]["eval_query_items"])
    # An id of another rank reads zeros.
    np.testing.assert_array_equal(out, sum(part["eval_out"] for part in parts))


def test_c10_steps_and_adams_count_go_on_after_a_reference_dump() -> None:
    module = module_for("adam_step.ws1")
    load_quietly(module, DUMPS / "adam_step.ws1", optim=True)
    assert module.get_score() == {"users": 5, "items": 5}
    ids = torch.tensor([3, 4])
    module(ids, torch.arange(3)).sum().backward()
    assert records(module, "users")[3][2] == (5,)
    assert int(module.tables.index.clock[3]) == 5


def load_on_rank(rank: int, world_size: int, case: str) -> dict[str, Any]:
    module = module_for(case)
    report = load_quietly(module, DUMPS / case, optim=True)
    part = expected(case)[0]
    rows = {table: records(module, table) for table in DIMS}
    return {"rows": rows, "report": report, "out": evaluate(module, part["eval_query_users"], part["eval_query_items"])}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, 3])
def test_c23_a_reference_dump_of_two_ranks_loads_on_any_number(ranks: RankPool, world_size: int) -> None:  # noqa: F811
    case = "adam_step.ws2"
    alone = module_for(case)
    load_quietly(alone, DUMPS / case, optim=True)
    results = ranks.run(world_size, load_on_rank, case)
    for table in DIMS:
        parts = [result["rows"][table] for result in results]
        assert sum(map(len, parts)) == len(records(alone, table))
        assert {i: record for part in parts for i, record in part.items()} == records(alone, table)
        for rank, part in enumerate(parts):
            assert all((i % 2**64) % world_size == rank for i in part)
    if world_size == 2:
        for result, part in zip(results, expected(case)):
            np.testing.assert_array_equal(result["out"], part["eval_out"])


STRATEGIES = {
    "TIMESTAMP": (DynamicEmbScoreStrategy.TIMESTAMP, "KLru"),
    "STEP": (DynamicEmbScoreStrategy.STEP, "KCustomized"),
    "LFU": (DynamicEmbScoreStrategy.LFU, "KLfu"),
    "LFU, TIMESTAMP": ((DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.TIMESTAMP), "KLfu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_c24_our_dump_without_its_manifest_obeys_the_reference_format(
    tmp_path: Path, strategy: str, dtype: torch.dtype
) -> None:
    score_strategy, evict = STRATEGIES[strategy]
    columns = len(score_strategy) if isinstance(score_strategy, tuple) else 1
    tables = [
        DynamicEmbTableOptions(dim=dim, max_capacity=256, score_strategy=score_strategy, embedding_dtype=dtype)
        for dim in DIMS.values()
    ]
    module = BatchedDynamicEmbeddingTablesV2(tables, list(DIMS), optimizer="adam", seed=1, device="cpu")
    train(module, 3)
    module.dump(tmp_path / "d", optim=True)
    (tmp_path / "d" / "manifest.json").unlink()
    names = {path.name for path in (tmp_path / "d").iterdir()}
    items = ("emb_keys", "emb_values", "emb_scores", "emb_opt_values")
    assert names == {f"{t}_{item}.rank_0.world_size_1" for t in DIMS for item in items} | {
        f"{t}_opt_args.json" for t in DIMS
    }
    for table, dim in DIMS.items():
        stored = read_reference_files(tmp_path / "d", table, dim, 2 * dim, columns)
        assert stored["meta"] == {
            "opt_type": "adam",
            "lr": 0.01,
            "iters": 3,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.0,
            "evict_strategy": f"EvictStrategy.{evict}",
            "dist_type": "roundrobin",
            "step_score": {"STEP": 4, "LFU": 1}.get(strategy, 0),
        }
        found = records(module, table)
        assert stored["ids"].tolist() == list(found)
        assert [row.tobytes() for row in stored["values"]] == [weights for weights, _, _ in found.values()]
        assert [row.tobytes() for row in stored["state"]] == [state for _, state, _ in found.values()]
        scores = np.array([score for _, _, score in found.values()])
        if strategy == "TIMESTAMP":
            ages = stored["scores"][:, 0]
            assert (ages > 0).all() and len(set(ages + scores[:, 0])) == 1 and len(set(ages)) > 1
        else:
            np.testing.assert_array_equal(stored["scores"], scores)
    check_that_it_loads(module, tables, tmp_path / "d", columns)


def check_that_it_loads(
    module: BatchedDynamicEmbeddingTablesV2, tables: list[DynamicEmbTableOptions], folder: Path, columns: int
) -> None:
    """Load a dump of ``module`` without a manifest as one of the reference."""
    copy = BatchedDynamicEmbeddingTablesV2(tables, list(DIMS), optimizer="adam", seed=2, device="cpu")
    begin = time.time_ns()
    load_quietly(copy, folder, optim=True)
    for table in DIMS:
        before, after = records(module, table), records(copy, table)
        assert without_scores(before) == without_scores(after)
        for column in range(columns):
            shift_between(before, after, column)
        if columns == 2:
            # Nothing says when the dump was: its newest time becomes the present.
            assert begin <= max(score[1] for _, _, score in after.values()) <= time.time_ns()


def copied(tmp_path: Path, case: str) -> Path:
    return Path(shutil.copytree(DUMPS / case, tmp_path / case))


def test_c24_a_missing_manifest_is_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"has no manifest.json.*only the sizes"):
        module_for("adam_step.ws1").load(DUMPS / "adam_step.ws1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "users_emb_keys.rank_1.world_size_2").unlink(), "users_emb_keys.rank_1"),
        (lambda f: (f / "users_emb_values.rank_1.world_size_2").unlink(), "users_emb_values.rank_1"),
        (
            lambda f: (f / "users_emb_opt_values.rank_0.world_size_2").write_bytes(b"1234"),
            "users_emb_opt_values.rank_0",
        ),
        (lambda f: (f / "users_emb_scores.rank_0.world_size_2").unlink(), "users_emb_scores.rank_0"),
        (lambda f: (f / "users_emb_keys.rank_0.world_size_1").touch(), r"files of \[1, 2\]"),
        (lambda f: (f / "users_emb_keys.rank_0.world_size_2").write_bytes(b"123"), "users_emb_"),
        (
            lambda f: [
                p.rename(p.with_name(p.name.replace("size_2", "size_99999999999"))) for p in f.glob("users_emb*")
            ],
            "users_emb_keys.rank_2.world_size_99999999999",
        ),
        (lambda f: (f / "users_opt_args.json").write_text("[]"), "users_opt_args.json"),
        (lambda f: (f / "users_opt_args.json").write_text("{"), "users_opt_args.json"),
    ],
)
def test_c22_damage_that_sizes_show_is_noticed_without_a_manifest(tmp_path: Path, damage: Any, message: str) -> None:
    folder = copied(tmp_path, "adam_step.ws2")
    module = module_for("adam_step.ws2")
    train(module, 1)
    before = {table: records(module, table) for table in DIMS}
    damage(folder)
    with pytest.raises(CheckpointCorruptError, match=message):
        load_quietly(module, folder, optim=True)
    assert {table: records(module, table) for table in DIMS} == before


def test_c24_rebased_ids_of_continuous_routing_are_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path, "adam_step.ws2")
    for table in DIMS:
        meta = folder / f"{table}_opt_args.json"
        meta.write_text(meta.read_text().replace("roundrobin", "continuous"))
    with pytest.raises(DynamicEmbError, match="'continuous' routing by 2 ranks"):
        load_quietly(module_for("adam_step.ws2"), folder)


def test_c24_files_of_another_strategy_or_optimizer_are_refused_or_reset() -> None:
    module = module_for("rowwise_lfu.ws1")
    with pytest.raises(ValueError, match=r"Evict strategy mismatch.*KCustomized.*fresh_scores=True"):
        load_quietly(module, DUMPS / "adam_step.ws1")
    with pytest.raises(ValueError, match="opt_type is 'adam'.*optim=False"):
        load_quietly(module, DUMPS / "adam_step.ws1", optim=True, fresh_scores=True)
    load_quietly(module, DUMPS / "adam_step.ws1", fresh_scores=True)
    found = records(module, "users")
    assert len(found) == 44 and {score for _, _, score in found.values()} == {(1,)}
    assert {state for _, state, _ in found.values()} == {np.float32(0).tobytes()}


def test_c25_of_repeated_ids_in_a_foreign_dump_the_last_row_wins(tmp_path: Path) -> None:
    folder = copied(tmp_path, "adam_step.ws1")
    widths = {"keys": 8, "values": 32, "scores": 8, "opt_values": 64}
    for item, width in widths.items():
        path = folder / f"users_emb_{item}.rank_0.world_size_1"
        data = path.read_bytes()
        # The first id comes again at the end, with the row of the second one; once more in the same batch.
        path.write_bytes(data + (data[:width] if item == "keys" else data[width : 2 * width]))
    module = module_for("adam_step.ws1")
    report = load_quietly(module, folder, optim=True)
    ids = np.fromfile(folder / "users_emb_keys.rank_0.world_size_1", "<i8").tolist()
    found = records(module, "users")
    assert len(found) == 44 and found[ids[0]] == found[ids[1]]
    assert report["users"].num_repeated == 1 and report["items"].num_repeated == 0


def test_c25_missing_state_of_a_foreign_dump_starts_at_the_initial_value(tmp_path: Path) -> None:
    folder = copied(tmp_path, "rowwise_lfu.ws1")
    for table in DIMS:
        (folder / f"{table}_emb_opt_values.rank_0.world_size_1").unlink()
    module = module_for("rowwise_lfu.ws1")
    with pytest.warns(UserWarning, match="no optimizer state.*initial state"):
        load_quietly(module, folder, optim=True)
    assert {state for _, state, _ in records(module, "users").values()} == {np.float32(0.1).tobytes()}


def test_c03_an_empty_foreign_dump_loads(tmp_path: Path) -> None:
    pair = (DynamicEmbScoreStrategy.LFU, DynamicEmbScoreStrategy.TIMESTAMP)
    for strategy in (DynamicEmbScoreStrategy.LFU, pair):
        tables = [DynamicEmbTableOptions(dim=4, max_capacity=64, score_strategy=strategy)]
        module = BatchedDynamicEmbeddingTablesV2(tables, ["a"], device="cpu")
        module.dump(tmp_path / "d", optim=True, allow_overwrite=True)
        (tmp_path / "d" / "manifest.json").unlink()
        module(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
        load_quietly(module, tmp_path / "d", optim=True)
        assert records(module, "a") == {}


STEPS = (DynamicEmbScoreStrategy.STEP, DynamicEmbScoreStrategy.CUSTOMIZED)


def scored(strategy: DynamicEmbScoreStrategy, *ids: int) -> Any:
    module = make_module([options(score_strategy=strategy)], optimizer="adam")
    if strategy is DynamicEmbScoreStrategy.CUSTOMIZED:
        module.set_score({"a": 7})
    module(*bag_per_id(ids)).sum().backward()
    return module


@pytest.mark.parametrize("strategy", STEPS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step_score", value) for value in (None, -1, "abc", 1.5, True, [], float("inf"))),
        *(("iters", value) for value in (None, 2**63, float("inf"), [])),
        *(("lr", value) for value in (None, "abc", 10**400)),
    ],
)
def test_c22_numbers_that_cannot_be_are_refused_before_a_table_changes(
    tmp_path: Path, strategy: DynamicEmbScoreStrategy, name: str, value: Any
) -> None:
    written, module = scored(strategy, 1, 2), scored(strategy, 5)
    written.dump(tmp_path / "d", optim=True)
    (tmp_path / "d" / "manifest.json").unlink()
    meta = tmp_path / "d" / "a_opt_args.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {name: value}))
    before, number = records(module, "a"), module.get_score()
    with pytest.raises(ValueError, match="table a: "):
        load_quietly(module, tmp_path / "d", optim=True)
    state = written.state_dict()
    described = json.loads(state["dynamic_tables.a.dynamic_table"])
    described["meta"][name] = value
    if name == "iters":
        described["entry"]["updates"] = 2**63
    state["dynamic_tables.a.dynamic_table"] = json.dumps(described)
    with pytest.raises(ValueError, match="table a: "):
        module.load_state_dict(state)
    assert records(module, "a") == before and module.get_score() == number


@pytest.mark.parametrize("strategy", STEPS)
def test_c24_unsigned_steps_and_custom_scores_end_where_ours_do(
    tmp_path: Path, strategy: DynamicEmbScoreStrategy
) -> None:
    scored(strategy, 1, 2).dump(tmp_path / "d", optim=True)
    (tmp_path / "d" / "manifest.json").unlink()
    meta = tmp_path / "d" / "a_opt_args.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"step_score": 2**64 - 1}))
    module = scored(strategy, 5)
    load_quietly(module, tmp_path / "d", optim=True)
    assert records(module, "a").keys() == {1, 2} and module.get_score() == {"a": 2**63 - 1}


@pytest.mark.parametrize("written", [*STEPS, DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU])
@pytest.mark.parametrize("strategy", STEPS)
def test_c10_with_fresh_scores_steps_and_custom_scores_go_on(
    tmp_path: Path, strategy: DynamicEmbScoreStrategy, written: DynamicEmbScoreStrategy
) -> None:
    scored(written, 1, 2).dump(tmp_path / "d")
    module = scored(strategy, 5)
    for _ in range(5):
        module(*bag_per_id([5]))
    number = module.get_score()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load(tmp_path / "d", fresh_scores=True)
    assert module.get_score() == number
    module(*bag_per_id([9]))
    scores = {i: score for i, (_, _, (score,)) in records(module, "a").items()}
    # What is touched after the load is not the first to go.
    assert scores.keys() == {1, 2, 9} and scores[9] >= max(scores[1], scores[2]) > 0
