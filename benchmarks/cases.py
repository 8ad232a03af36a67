"""What is measured: one case per line of the report."""

from fnmatch import fnmatch
from typing import Any

from benchmarks.engines import counting, dynamic_sgd, growing, grown, plain
from benchmarks.host.cases import CPU_HOST, GPU_HOST, HostCase
from benchmarks.sharded.cases import CPU_SHARDED, GPU_SHARDED, ShardedCase
from benchmarks.sizes.cases import CPU_SIZES, GPU_SIZES, SizeCase
from benchmarks.step_case import A_ROWS, Case, workload_a
from benchmarks.workloads import MLPERF_LENGTHS

AnyCase = Case | ShardedCase | HostCase | SizeCase

_GROWTH: dict[str, Any] = {
    "grows": True,
    "ours": growing,
    "baseline": grown,
    "note": "to the same step in tables that are large already",
}


def _policies(prefix: str, workload: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of cases that compare the policies, in full tables, with the plain one."""
    cases: list[dict[str, Any]] = [
        {"policy": policy, "baseline": plain, "note": "to the plain LRU step"}
        for policy in ("lfu", "compound", "ttl", "admission", "chance", "deterministic")
    ]
    cases.append({"policy": "score_function", "baseline": counting, "note": "to the LFU step", "target": 1.3})
    for case in cases:
        if case["policy"] == "deterministic":
            case["target"] = 1.5
        case |= {"name": f"{prefix}_{case['policy']}", **workload}
    return cases


CPU_CASES = [
    Case("sgd_train", target=1.5),
    Case("eval", train=False, target=2.5),
    Case("adagrad_train", optimizer="exact_adagrad", target=0.5),
    Case("rowwise_adagrad_train", optimizer="exact_row_wise_adagrad"),
    Case(
        "adam_train", optimizer="adam", baseline=dynamic_sgd, target=2.0, note="to our SGD: FBGEMM has no Adam on CPU"
    ),
    Case("new_ids_train", new_share=0.1, note="baseline trains known ids only"),
    Case("sequence_train", pooling="NONE", bag_length=1),
    Case("sequence_eval", pooling="NONE", bag_length=1, train=False),
    Case("batch_4096_train", num_ids=4096),
    Case("batch_4096_eval", num_ids=4096, train=False),
    Case("batch_64_train", num_ids=60, bag_length=3),
    Case("batch_64_eval", num_ids=60, bag_length=3, train=False),
    Case("mix_train", tables=26, rows=77_000, bag_lengths=MLPERF_LENGTHS),
    Case("mix_eval", tables=26, rows=77_000, bag_lengths=MLPERF_LENGTHS, train=False),
    # The CPU is always deterministic.
    *(Case(**case) for case in _policies("full", {"new_share": 0.1}) if case["policy"] != "deterministic"),
    Case("growth", tables=1, rows=1 << 19, new_share=0.1, num_ids=4096, capacity=1 << 21, **_GROWTH),
]

_SUM: dict[str, Any] = {"pooling": "SUM", "bag_length": 10}
_EVAL: dict[str, Any] = {"train": False}
_MIX: dict[str, Any] = {"tables": len(MLPERF_LENGTHS), "bag_lengths": MLPERF_LENGTHS, "pooling": "SUM"}
_BF16: dict[str, Any] = {"dtype": "bf16", "note": "FBGEMM has no bf16 rows on a GPU: its rows are fp16, outputs bf16"}
_SMALL: dict[str, Any] = {"num_ids": 4096, "loop": True, "target": 0.5, "eager_target": 1.0}
_KNOWN = "baseline trains known ids only"

GPU_CASES = [
    workload_a("a_sgd_train", target=0.60),
    workload_a("a_adam_train", optimizer="adam", target=0.62),
    workload_a("a_adagrad_train", optimizer="exact_adagrad"),
    workload_a("a_rowwise_adagrad_train", optimizer="exact_row_wise_adagrad"),
    workload_a("a_eval", **_EVAL, target=0.35),
    # The first step of an empty table, a tenth of the ids new, and full tables that evict about 180,000 ids a step: the
    # power law over 40 M ids for each table of 1.7 M rows.
    workload_a("a_first_step", capacity=0, cold=True, target=1.5, note=f"ours: empty tables; {_KNOWN}"),
    workload_a("a_new_ids_train", capacity=A_ROWS // 5, new_share=0.1, target=0.75, note=_KNOWN),
    workload_a("a_full_train", capacity=0, population=40_000_000, target=0.75, note="baseline: ids modulo rows"),
    workload_a("a_sum_sgd_train", **_SUM),
    workload_a("a_sum_adam_train", **_SUM, optimizer="adam"),
    workload_a("a_sum_adagrad_train", **_SUM, optimizer="exact_adagrad"),
    workload_a("a_sum_rowwise_adagrad_train", **_SUM, optimizer="exact_row_wise_adagrad"),
    workload_a("a_sum_eval", **_SUM, **_EVAL),
    workload_a("a_mix_sgd_train", **_MIX),
    workload_a("a_mix_adam_train", **_MIX, optimizer="adam"),
    workload_a("a_mix_rowwise_adagrad_train", **_MIX, optimizer="exact_row_wise_adagrad"),
    workload_a("a_mix_eval", **_MIX, **_EVAL),
    workload_a("a_growth", tables=1, rows=1 << 22, capacity=1 << 24, new_share=0.1, num_ids=4096, **_GROWTH),
    *(workload_a(**case) for case in _policies("a_full", {"capacity": 0, "population": 40_000_000})),
    workload_a("small_train", **_SMALL),
    workload_a("small_eval", **_SMALL, **_EVAL),
    workload_a("small_sum_train", **_SMALL, **_SUM),
    workload_a("a_dim_16_train", dim=16, target=1.0),
    workload_a("a_dim_16_eval", dim=16, **_EVAL, target=1.0),
    workload_a("a_dim_64_train", dim=64),
    workload_a("a_dim_64_eval", dim=64, **_EVAL),
    workload_a("a_dim_256_train", dim=256),
    workload_a("a_dim_256_eval", dim=256, **_EVAL),
    workload_a("a_tables_1_train", tables=1),
    workload_a("a_tables_1_eval", tables=1, **_EVAL),
    workload_a("a_tables_100_train", tables=100, target=1.0),
    workload_a("a_tables_100_eval", tables=100, **_EVAL, target=1.0),
    workload_a("a_bf16_sgd_train", **_BF16),
    workload_a(
        "a_bf16_adam_train",
        dtype="bf16",
        optimizer="adam",
        note="FBGEMM's Adam has no rows of 16 bits: its rows are fp32, outputs bf16",
    ),
    workload_a("a_bf16_eval", **_BF16, **_EVAL),
    workload_a("a_bf16_sum_train", **_BF16, **_SUM),
]

CASES: dict[str, list[AnyCase]] = {
    "cpu": [*CPU_CASES, *CPU_SHARDED, *CPU_HOST, *CPU_SIZES],
    "cuda": [*GPU_CASES, *GPU_SHARDED, *GPU_HOST, *GPU_SIZES],
}


def select(patterns: list[str], device: str) -> list[AnyCase]:
    """Return the cases of a device whose name matches one of the patterns (``*`` for anything); all for none.

    Raises:
        ValueError: a pattern that matches nothing.
    """
    cases = CASES[device]
    for pattern in patterns:
        if not any(fnmatch(case.name, pattern) for case in cases):
            names = ", ".join(case.name for case in cases)
            raise ValueError(f"no case of {device} matches {pattern!r}; there are {names}")
    return [case for case in cases if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns)]
