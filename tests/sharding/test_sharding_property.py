"""Drawn collections: whatever is sharded, over however many ranks, trains as TorchRec's unsharded collection does.

`--draws 3000` draws more of them. A failure prints the simplest draw that fails as an expression; keep it in a test:
``run(ranks, [Draw(...)], DRAW_LIMIT_S)``.
"""

from functools import partial

import pytest

from tests.support.drawn_collections import ASPECTS, ROW_WISE, STATIC_BAGS, Draw, Part, check, draw, simplest, train_all
from tests.support.ranks import GpuRanks, RankError, RankPool, gpu_ranks, ranks  # noqa: F401
from tests.support.sharded_model import Table

pytestmark = pytest.mark.distributed

# Aspects that are not drawn.
LEFT_OUT: frozenset[str] = frozenset()
DRAWS_PER_JOB = 10
# One after the other; the more ranks, the more can go wrong.
WORLD_SIZES = (2, 3, 1, 3, 2)
# A draw takes a tenth of a second.
JOB_LIMIT_S, DRAW_LIMIT_S = 200.0, 60.0
SIMPLIFY_S = 90.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "job" in metafunc.fixturenames:
        jobs = range(-(-metafunc.config.getoption("--draws") // DRAWS_PER_JOB))
        metafunc.parametrize("job", jobs, ids=[f"{job}-{WORLD_SIZES[job % len(WORLD_SIZES)]}-ranks" for job in jobs])


def drawn(job: int, device: str = "cpu") -> list[Draw]:
    world_size = WORLD_SIZES[job % len(WORLD_SIZES)]
    seeds = range(job * DRAWS_PER_JOB, (job + 1) * DRAWS_PER_JOB)
    return [draw(seed, world_size, ASPECTS - LEFT_OUT, device) for seed in seeds]


def run(pool: RankPool | GpuRanks, draws: list[Draw], time_limit_s: float) -> None:
    """Train draws of one world size in one job and check each."""
    results = pool.run(draws[0].world_size, train_all, draws, time_limit_s=time_limit_s)
    for one, *of_ranks in zip(draws, *results, strict=True):
        check(one, of_ranks)


def failure(pool: RankPool | GpuRanks, one: Draw) -> Exception | AssertionError | None:
    """Return what goes wrong with a draw."""
    try:
        run(pool, [one], DRAW_LIMIT_S)
    except (AssertionError, RankError, TimeoutError) as error:
        return error
    return None


def check_all(pool: RankPool | GpuRanks, draws: list[Draw]) -> None:
    try:
        run(pool, draws, JOB_LIMIT_S)
    except (AssertionError, RankError, TimeoutError) as of_job:
        for one in draws:
            error = failure(pool, one)
            if error is not None:
                simple, error = simplest(partial(failure, pool), one, error, SIMPLIFY_S)
                text = f"drawn with seed {one.seed} for {one.world_size} ranks; the simplest that fails:\n{simple!r}"
                raise AssertionError(f"{text}\n{error}") from None
        raise AssertionError("the draws fail together only") from of_job


def test_c02_c03_c15_c17_drawn_collections_equal_the_unsharded(ranks: RankPool, job: int) -> None:  # noqa: F811
    check_all(ranks, drawn(job))


@pytest.mark.cuda
def test_c02_c03_c15_c17_drawn_collections_equal_the_unsharded_on_gpus(gpu_ranks: GpuRanks, job: int) -> None:  # noqa: F811
    check_all(gpu_ranks, drawn(job, "cuda"))


def test_a_draw_prints_as_the_expression_that_makes_it() -> None:
    for seed in range(50):
        one = draw(seed, 3)
        assert eval(repr(one), {"Draw": Draw, "Part": Part, "Table": Table}) == one


def test_draws_reach_what_they_are_for() -> None:
    draws = [draw(seed, 3) for seed in range(300)]
    tables = [(one, table) for one in draws for table in one.tables]
    assert {table.sharding for one, table in tables if one.pooled} == {None, *STATIC_BAGS}
    assert {table.pooling for _, table in tables} == {"sum", "mean"}
    assert {one.weighted for one in draws} == {False, True, "trained"} and {one.dedup for one in draws} == {False, True}
    readers = [[table.sharding is None for table in one.readers(f)] for one in draws for f in one.case.features]
    assert any(sum(dynamic) > 1 for dynamic in readers) and any(True in d and False in d for d in readers)
    parts = [part for one in draws for parts in one.steps for part in parts]
    assert any(part.batch_size == 0 for part in parts) and any(part.longest == 0 for part in parts)
    assert any(part.ids != part.lengths for part in parts) and any(part.offsets for part in parts)
    assert any(one.steps[0][0].keys != one.steps[1][0].keys for one in draws)
    assert any(table.sharding in ROW_WISE and table.pooling == "mean" for _, table in tables)


def test_a_draw_without_an_aspect_does_not_have_it() -> None:
    for seed in range(300):
        one = draw(seed, 3, frozenset())
        assert one.weighted != "trained"
        assert [part.keys for part in one.steps[0]] == [part.keys for part in one.steps[1]]
        for parts in one.steps:
            assert len({(part.ids, part.lengths) for part in parts}) == 1
        assert not any(table.sharding in ROW_WISE and table.pooling == "mean" for table in one.tables)


def test_the_simplest_draw_that_fails_is_found() -> None:
    error = RankError("a feature of two tables")

    def fails(one: Draw) -> Exception | None:
        return error if any(len(one.readers(feature)) > 1 for feature in one.case.features) else None

    one = next(d for d in (draw(seed, 3) for seed in range(99)) if fails(d) and len(d.tables) > 3)
    found, its = simplest(fails, one, error, 60.0)
    assert its is error and fails(found)
    assert [len(table.features) for table in found.tables] == [1, 1] and found.world_size == len(found.steps) == 1
    assert not found.weighted and not found.dedup and found.steps[0][0] == Part(found.tables[0].features)
