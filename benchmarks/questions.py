"""The questions that the results answer: which cases, in which words. The page and the pictures follow them."""

from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A few cases that are read together.

    Attributes:
        name: of its table in the page and of its picture.
        device: ``cpu`` or ``cuda``.
        title: the question.
        beside: what the times are divided by, in words.
        cases: case -> what it is, in words.
        pictured: whether there is a picture.
    """

    name: str
    device: str
    title: str
    beside: str
    cases: dict[str, str]
    pictured: bool = True


@dataclass(frozen=True)
class Times:
    """The medians of a line in ms; None where an engine did not run. On the CPU only the eager ones exist."""

    base_eager: float | None
    base_graph: float | None
    our_eager: float | None
    our_graph: float | None

    @classmethod
    def of(cls, line: Line) -> "Times":
        """Read a line of results."""
        engines = line["engines"]

        def ms(name: str) -> float | None:
            return engines[name]["ms"] if name in engines else None

        base, ours = line["baseline"], line["ours_eager"]
        base_graph = f"{base.removesuffix(' eager')} graph" if base.endswith(" eager") else ""
        return cls(ms(base), ms(base_graph), ms(ours), ms(line["ours"]) if line["ours"] != ours else None)

    @property
    def eager(self) -> float | None:
        """Ours eager to the baseline eager."""
        return _ratio(self.our_eager, self.base_eager)

    @property
    def graph_to_eager(self) -> float | None:
        """Ours in a graph to the baseline as its users run it."""
        return _ratio(self.our_graph, self.base_eager)

    @property
    def graph(self) -> float | None:
        """Both in a graph."""
        return _ratio(self.our_graph, self.base_graph)


def _ratio(ours: float | None, base: float | None) -> float | None:
    return None if ours is None or base is None else ours / base


def target_of(line: Line, eager: bool = False) -> float | None:
    """Return the ratio that our graph, or with ``eager`` our eager step beside a graph, is to reach; None for any."""
    if eager and line["ours_eager"] == line["ours"]:
        return None
    target: float | None = line["targets"].get(line["ours_eager"] if eager else line["ours"])
    return target


_TBE = "FBGEMM"
_PLAN = "the faster static plan"
_SMALLEST = "the smallest table"
_TORCHREC = {
    "mlperf": "MLPerf's bags",
    "one_id": "26 features of one id",
    "sequences": "10 sequences of 100 ids",
}
_MODES = {"train": "training", "eval": "evaluation"}
_POOLINGS = {"sequence": "sequence", "sum": "SUM"}
_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam"}
_IDS = {"64": "60 ids", "4100": "4,100 ids", "65k": "65 thousand ids", "1m": "1 million ids"}
_PLAIN = "the same step of plain tables"
_POLICIES = {
    "lfu": "LFU",
    "compound": "(TIMESTAMP, LFU)",
    "ttl": "`ttl` (nothing expires)",
    "admission": "admission at the second occurrence",
    "chance": "admission by chance, 0.5",
    "deterministic": "deterministic mode",
    "score_function": "a frequency that decays, beside LFU",
}

QUESTIONS = [
    Question(
        "training",
        "cuda",
        "How long does a training step take, beside FBGEMM's?",
        _TBE,
        {
            "a_sgd_train": "SGD",
            "a_adam_train": "Adam",
            "a_adagrad_train": "Adagrad",
            "a_rowwise_adagrad_train": "row-wise Adagrad",
            "a_new_ids_train": "SGD, 10 % new ids a step",
            "a_full_train": "SGD, full tables",
            "a_first_step": "SGD, first step of empty tables",
        },
    ),
    Question(
        "pooled",
        "cuda",
        "How long does a step with SUM over bags of 10 take, beside FBGEMM's?",
        _TBE,
        {
            "a_sum_sgd_train": "SGD",
            "a_sum_adam_train": "Adam",
            "a_sum_adagrad_train": "Adagrad",
            "a_sum_rowwise_adagrad_train": "row-wise Adagrad",
            "a_bf16_sum_train": "SGD, bf16",
            "a_sum_eval": "evaluation",
        },
    ),
    Question(
        "mix",
        "cuda",
        "How long does a step with SUM over bags of 1 to 100 ids take, beside FBGEMM's?",
        _TBE,
        {
            "a_mix_sgd_train": "SGD",
            "a_mix_adam_train": "Adam",
            "a_mix_rowwise_adagrad_train": "row-wise Adagrad",
            "a_mix_eval": "evaluation",
        },
    ),
    Question(
        "shapes",
        "cuda",
        "How long does a training step take with other widths, numbers of tables and dtypes?",
        _TBE,
        {
            "a_dim_16_train": "SGD, D = 16",
            "a_dim_64_train": "SGD, D = 64",
            "a_dim_256_train": "SGD, D = 256",
            "a_tables_1_train": "SGD, 1 table",
            "a_tables_100_train": "SGD, 100 tables",
            "a_bf16_sgd_train": "SGD, bf16",
            "a_bf16_adam_train": "Adam, bf16",
        },
    ),
    Question(
        "evaluation",
        "cuda",
        "How long does evaluation take, beside FBGEMM's?",
        _TBE,
        {
            "a_eval": "10 tables, D = 128",
            "a_dim_16_eval": "D = 16",
            "a_dim_64_eval": "D = 64",
            "a_dim_256_eval": "D = 256",
            "a_tables_1_eval": "1 table",
            "a_tables_100_eval": "100 tables",
            "a_bf16_eval": "bf16",
        },
    ),
    Question(
        "small",
        "cuda",
        "How long does a step of 4,096 ids take, beside FBGEMM's?",
        _TBE,
        {"small_train": "SGD", "small_sum_train": "SGD, SUM over bags of 10", "small_eval": "evaluation"},
    ),
    Question(
        "policies",
        "cuda",
        "What does it cost to choose the ids that stay?",
        _PLAIN,
        {f"a_full_{policy}": words for policy, words in _POLICIES.items()},
    ),
    Question("growth", "cuda", "What does growth cost?", _PLAIN, {"a_growth": "a table doubles"}, pictured=False),
    Question(
        "steps",
        "cpu",
        "How long does a step on the CPU take, beside FBGEMM's?",
        _TBE,
        {
            "sgd_train": "SGD",
            "adagrad_train": "Adagrad",
            "rowwise_adagrad_train": "row-wise Adagrad",
            "adam_train": "Adam, beside our SGD",
            "new_ids_train": "SGD, 10 % new ids a step",
            "sequence_train": "SGD, sequence",
            "batch_4096_train": "SGD, 4,096 ids",
            "batch_64_train": "SGD, 60 ids",
            "mix_train": "SGD, bags of 1 to 100 ids",
            "eval": "evaluation",
            "mix_eval": "evaluation, bags of 1 to 100 ids",
            "sequence_eval": "evaluation, sequence",
            "batch_4096_eval": "evaluation, 4,096 ids",
            "batch_64_eval": "evaluation, 60 ids",
        },
    ),
    Question(
        "policies",
        "cpu",
        "What does it cost to choose the ids that stay, on the CPU?",
        _PLAIN,
        {f"full_{policy}": words for policy, words in _POLICIES.items() if policy != "deterministic"},
    ),
    Question("growth", "cpu", "What does growth cost?", _PLAIN, {"growth": "a table doubles"}, pictured=False),
]


for _device, _prefix in (("cuda", ""), ("cpu", "cpu_")):
    QUESTIONS += [
        Question(
            "torchrec",
            _device,
            "How long does a step under TorchRec take, beside static tables?",
            _PLAN,
            {
                f"{_prefix}torchrec_{name}_{mode}": f"{words}, {what}"
                for name, words in _TORCHREC.items()
                for mode, what in _MODES.items()
            },
        ),
        Question(
            "host",
            _device,
            "How long is the host busy with an eager training step, beside FBGEMM's?",
            _TBE,
            {
                f"{_prefix}host_{pooling}_{optimizer}_{size}": f"{words}, {name}, {ids}"
                for pooling, words in _POOLINGS.items()
                for optimizer, name in _OPTIMIZERS.items()
                for size, ids in _IDS.items()
                if _device == "cuda" or (optimizer == "sgd" and size in ("64", "4100"))
            },
        ),
        Question(
            "size",
            _device,
            "How much longer does a step take in the largest table?",
            _SMALLEST,
            {
                f"{_prefix}size_dim_{dim}_{mode}": f"{words}, D = {dim}"
                for dim in ((16, 128) if _device == "cuda" else (16,))
                for mode, words in (("find", "evaluation"), ("train", "training"))
            },
        ),
    ]


def answered(question: Question, lines: list[Line]) -> list[tuple[str, Line]]:
    """Return words and line of each case of a question that has a result and a baseline, in the question's order."""
    by_case = {line["case"]: line for line in lines if line.get("baseline")}
    return [(words, by_case[case]) for case, words in question.cases.items() if case in by_case]
