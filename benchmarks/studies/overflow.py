"""How often an id finds its bucket full before the table is: ``python -m benchmarks.studies.overflow [--quick]``.

A table of C slots has C / b buckets of b slots, an id lives in the one its hash names. When n = L * C different ids
have come, X of them were of one bucket, X binomial with n trials of probability b / C. So

    P(the next id finds its bucket full) = P(X >= b)            ids lost so far = C / b * E[max(X - b, 0)]

Lost means: an id that had to be evicted (ids came over many steps) or failed (all came in one) while other buckets had
room. Both are counted in real tables here, and must equal what the placement rule says for the same ids.
"""

import argparse
import functools
import math
import warnings
from fractions import Fraction

import numpy as np
import torch
from numba import njit

from benchmarks.studies.markdown import markdown
from dynamicemb import DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.capacity import bucket_layout
from dynamicemb.dynamicemb_config import DynamicEmbPoolingMode
from dynamicemb.table.layout import fmix64, locate

CAPACITIES = (256, 512, 1024, 2048, 4096, 16384, 1 << 17, 1 << 20)
BUCKETS = (16, 128, 256, 512, 1024, 4096)
_CHECKED = ((256, 128), (1024, 16), (1024, 128), (4096, 128), (4096, 512), (4096, 1024), (1 << 17, 128))
LOADS = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0)


@functools.cache
def _log_factorials(n: int) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1, dtype=np.float64)))])


def overflow(num_ids: int, num_buckets: int, bucket: int) -> tuple[float, float]:
    """Return the probability that one more id finds its bucket full, and the expected number of ids lost so far."""
    if num_ids < bucket:
        return 0.0, 0.0
    if num_buckets == 1:
        return float(num_ids >= bucket), float(num_ids - bucket)
    p = 1 / num_buckets
    facts = _log_factorials(num_ids)
    # Beyond 40 standard deviations there is nothing that a double could hold.
    most = max(bucket, num_ids * p) + 40 * (num_ids * p) ** 0.5 + 100
    x = np.arange(bucket, min(num_ids, int(most)) + 1)
    log_pmf = facts[num_ids] - facts[x] - facts[num_ids - x] + x * np.log(p) + (num_ids - x) * np.log1p(-p)
    pmf = np.exp(log_pmf)
    return float(pmf.sum()), float(num_buckets * (pmf * (x - bucket)).sum())


def lost_by_rule(ids: np.ndarray, num_buckets: int, bucket: int) -> int:
    """Return how many of these different ids find no place, by the package's own rule."""
    counts = np.bincount(locate(ids, num_buckets, bucket // 16)[0], minlength=num_buckets)
    return int(np.maximum(counts - bucket, 0).sum())


def lost_in_table(ids: np.ndarray, num_rows: int, bucket: int | None, batch: int) -> tuple[int, int]:
    """Return how many ids a real table evicted and how many failed, when these ids come ``batch`` at a time.

    ``bucket`` is the table's ``bucket_capacity``: with None it may have slots to spare.
    """
    options = DynamicEmbTableOptions(dim=4, max_capacity=num_rows, bucket_capacity=bucket)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = BatchedDynamicEmbeddingTablesV2(
            [options], table_names=["t"], pooling_mode=DynamicEmbPoolingMode.NONE, device="cpu", seed=1
        )
    num_buckets, size = bucket_layout(num_rows, bucket)
    assert module.tables.capacities == [num_buckets * size]
    with torch.no_grad():
        for part in torch.from_numpy(ids).split(batch):
            module(part, torch.arange(part.numel() + 1))
    stats = module.stats()["t"]
    assert stats["size"] == ids.size - stats["evicted"] - stats["failed"]
    return int(stats["evicted"]), int(stats["failed"])


@njit
def _lost_with_second_bucket(first, second, num_buckets, bucket, emptier):
    """Place ids that have a second bucket; ``emptier`` takes the emptier one at once, else only when the first is full.

    Returns:
        how many are lost, and how many live in their second bucket.
    """
    counts = np.zeros(num_buckets, np.int64)
    lost = 0
    elsewhere = 0
    for i in range(first.size):
        a, b = first[i], second[i]
        use_second = counts[b] < counts[a] if emptier else counts[a] >= bucket
        place = b if use_second else a
        if counts[place] >= bucket:
            lost += 1
            continue
        counts[place] += 1
        elsewhere += use_second
    return lost, elsewhere


def second_bucket(ids: np.ndarray, num_buckets: int, bucket: int, emptier: bool) -> tuple[int, int]:
    """Return ``_lost_with_second_bucket`` of ids; the second bucket is of the id mixed twice, and never the first."""
    h = fmix64(ids)
    first = ((h >> np.uint64(20)) % np.uint64(num_buckets)).astype(np.int64)
    step = 1 + ((fmix64(h) >> np.uint64(20)) % np.uint64(max(num_buckets - 1, 1))).astype(np.int64)
    return _lost_with_second_bucket(first, (first + step) % num_buckets, num_buckets, bucket, emptier)


def random_ids(count: int, seed: int) -> np.ndarray:
    """Return different ids from all of int64."""
    ids = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)
    assert np.unique(ids).size == count
    return ids


def theory() -> None:
    """Print both numbers for all capacities, buckets and loads."""
    for what, column in (("P(the next id finds its bucket full)", 0), ("Share of the ids lost so far", 1)):
        rows = []
        for bucket in BUCKETS:
            for capacity in (c for c in CAPACITIES if c >= bucket):
                cells = []
                for load in LOADS:
                    value = overflow(round(load * capacity), capacity // bucket, bucket)[column]
                    cells.append(f"{value / (load * capacity if column else 1):.2g}")
                rows.append([bucket, capacity, *cells])
        print(markdown(what, ["bucket", "capacity", *(f"load {load}" for load in LOADS)], rows))


def check(trials: int, most: int) -> None:
    """Print expectation, the placement rule on random and consecutive ids, and real tables, side by side."""
    rows = []
    for capacity, bucket in [
        (256, 128),
        (1024, 16),
        (1024, 128),
        (4096, 128),
        (4096, 512),
        (4096, 1024),
        (1 << 17, 128),
    ]:
        if capacity > most:
            continue
        for load in (0.9, 1.0):
            num_ids, buckets = round(load * capacity), capacity // bucket
            _, expected = overflow(num_ids, buckets, bucket)
            repetitions = min(max(5, trials * 256 // capacity), 2000)
            drawn = [lost_by_rule(random_ids(num_ids, seed), buckets, bucket) for seed in range(repetitions)]
            runs = [lost_by_rule(np.arange(num_ids) + (k << 32), buckets, bucket) for k in range(repetitions)]
            error = np.std(drawn, ddof=1) / len(drawn) ** 0.5
            ids = random_ids(num_ids, 0)
            # Whatever is lost over many small steps is evicted; of one step's ids nothing may be evicted, so they fail.
            small, whole = lost_in_table(ids, capacity, bucket, 8), lost_in_table(ids, capacity, bucket, num_ids)
            assert small == (drawn[0], 0) and whole == (0, drawn[0]), (small, whole, drawn[0])
            means = [f"{expected:.2f}", f"{np.mean(drawn):.2f} +- {error:.2f}", f"{np.mean(runs):.2f}"]
            rows.append([capacity, bucket, load, *means, small[0], whole[1], drawn[0]])
    header = ["capacity", "bucket", "load", "expected lost", "random ids", "consecutive ids"]
    header += ["table, 8 ids a step: evicted", "table, one step: failed", "rule, same ids"]
    print(markdown("Ids lost: theory, rule, tables", header, rows))


def choices(capacity: int, trials: int) -> None:
    """Print what a second bucket would lose, and buckets of twice the size in its place; means of some sequences."""
    lines = []
    for bucket in (16, 128):
        for load in LOADS[1:]:
            num_ids, buckets = round(load * capacity), capacity // bucket
            counts = np.zeros((trials, 2, 2))
            for seed in range(trials):
                ids = random_ids(num_ids, seed)
                counts[seed] = [second_bucket(ids, buckets, bucket, emptier) for emptier in (False, True)]
            shares = [f"{lost:.2g} ({elsewhere:.2g})" for lost, elsewhere in counts.mean(0) / num_ids]
            fewer = [overflow(num_ids, capacity // size, size)[1] / num_ids for size in (bucket, 2 * bucket)]
            lines.append([bucket, load, *(f"{share:.2g}" for share in fewer), *shares])
    header = [
        "bucket",
        "load",
        "one bucket",
        "one of twice the size",
        "second when the first is full",
        "emptier of two",
    ]
    print(markdown(f"Share lost (share living in the second bucket), capacity {capacity}", header, lines))


def with_headroom(num_rows: int, factor: Fraction, bucket: int = 128) -> int:
    """Return the buckets of a table that has ``factor`` slots for each of its rows."""
    return math.ceil(num_rows * factor / bucket)


def headroom(trials: int) -> None:
    """Print what is lost when a table has more slots than the rows that were asked for; buckets of 128."""
    header = [
        "slots per row",
        "ids per row",
        "worst of 129 to 4096 rows",
        *(f"{rows} rows" for rows in CAPACITIES[-3:]),
    ]
    lines = []
    for factor in (Fraction(1), Fraction(5, 4), Fraction(4, 3), Fraction(3, 2), Fraction(2)):
        for load in (0.9, 1.0):
            sizes = [*range(129, 4097), *CAPACITIES[-3:]]
            lost = [overflow(round(load * n), with_headroom(n, factor), 128)[1] for n in sizes]
            worst = max(range(len(sizes) - 3), key=lost.__getitem__)
            cells = [f"{lost[worst]:.2g} ({sizes[worst]} rows)", *(f"{value:.2g}" for value in lost[-3:])]
            lines.append([f"{float(factor):.3g}", load, *cells])
    print(markdown("Ids lost, expected, when so many ids per row have come", header, lines))
    spare_slots(trials)


def spare_slots(trials: int) -> None:
    """Print what real tables lose of as many ids as rows, with buckets of 128 and with the size left open."""
    lines = []
    for num_rows in (128, 200, 384, 1000, 2048, 4096, 16384):
        cells: list[object] = [num_rows]
        for bucket in (128, None):
            num_buckets, size = bucket_layout(num_rows, bucket)
            losses = np.zeros((trials, 2))
            for seed in range(trials):
                ids = random_ids(num_rows, seed)
                losses[seed] = [sum(lost_in_table(ids, num_rows, bucket, batch)) for batch in (64, num_rows)]
            worst = f"{int(losses.max())} of {num_rows}"
            cells += [num_buckets * size, f"{losses[:, 0].mean():.3g}", f"{losses[:, 1].mean():.3g}", worst]
        lines.append(cells)
    header = ["rows"]
    for name in ("128", "None"):
        header += [f"bucket_capacity={name}: slots", "64 ids a step", "all ids in one", "worst"]
    print(
        markdown(f"Ids lost by real tables, mean and worst of {trials}, when as many ids as rows come", header, lines)
    )


def ranks() -> None:
    """Print what is lost when a table's rows are spread over ranks: a rank is one more part that can be full."""
    lines = []
    for num_rows, world_size in ((1024, 8), (4096, 8), (4096, 32)):
        share = num_rows // world_size
        buckets = world_size * with_headroom(share, Fraction(3, 2))
        for load in (0.9, 1.0):
            num_ids = round(load * num_rows)
            parts = ((world_size * max(share // 128, 1), min(share, 128)), (world_size, share), (buckets, 128))
            lines.append([num_rows, world_size, load, *(f"{overflow(num_ids, *part)[1]:.2g}" for part in parts)])
    header = ["rows", "ranks", "load", "buckets of 128", "a rank's share in one bucket", "1.5 slots per row"]
    print(markdown("Ids lost, expected, when ids are spread over ranks by a hash", header, lines))


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no large tables")
    quick = parser.parse_args().quick
    theory()
    check(50 if quick else 8000, 4096 if quick else 1 << 17)
    choices(1 << 12, 20 if quick else 400)
    choices(1 << 14 if quick else 1 << 20, 5)
    ranks()
    headroom(4 if quick else 40)


if __name__ == "__main__":
    main()
