"""Dynamic embedding tables for TorchRec.

Options, strategies, admission, enums and errors are here, and ``DynamicEmbDump``, ``DynamicEmbLoad``, ``EmbOptimType``.
The other names that users need are in these modules::

    batched_dynamicemb_tables  BatchedDynamicEmbeddingTablesV2: tables on their own
    planner, get_planner       the planner and its constraints
    shard                      the sharders of EmbeddingCollection and EmbeddingBagCollection
    dump_load                  TableReport; get_dynamic_emb_module(model) lists the modules of tables in a model
    incremental_dump           changed rows as tensors; set_score and get_score of a model
"""

from typing import Any

from dynamicemb import optimizer as _optimizer
from dynamicemb.admission import FrequencyAdmissionStrategy, KVCounter, ProbabilityAdmissionStrategy
from dynamicemb.dynamicemb_config import (
    BATCH_SIZE_PER_DUMP,
    BUCKET_ALIGNMENT,
    DEMB_TABLE_ALIGN_SIZE,
    MAX_BUCKET_CAPACITY,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    ScoreStrategy,
    align_to_table_size,
    data_type_to_dtype,
    data_type_to_dyn_emb,
    dyn_emb_to_torch,
    get_sharded_table_capacity,
    get_table_value_bytes,
    string_to_evict_strategy,
    torch_to_dyn_emb,
)
from dynamicemb.errors import CheckpointCorruptError, DynamicEmbError, InsertFailedError, UnsupportedOptionError
from dynamicemb.optimizer import OptimizerArgs
from dynamicemb.types import AdmissionStrategy, Counter, DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from dynamicemb.version import __version__ as __version__

__all__ = [
    "BATCH_SIZE_PER_DUMP",
    "BUCKET_ALIGNMENT",
    "DEMB_TABLE_ALIGN_SIZE",
    "MAX_BUCKET_CAPACITY",
    "AdmissionStrategy",
    "CheckpointCorruptError",
    "Counter",
    "DumpHandle",
    "DynamicEmbCheckMode",
    "DynamicEmbDump",
    "DynamicEmbError",
    "DynamicEmbEvictStrategy",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbLoad",
    "DynamicEmbLoadPlanner",
    "DynamicEmbPoolingMode",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EmbOptimType",
    "FrequencyAdmissionStrategy",
    "InsertFailedError",
    "KVCounter",
    "OptimizerArgs",
    "ProbabilityAdmissionStrategy",
    "ScoreStrategy",
    "UnsupportedOptionError",
    "align_to_table_size",
    "data_type_to_dtype",
    "data_type_to_dyn_emb",
    "dyn_emb_to_torch",
    "get_sharded_table_capacity",
    "get_table_value_bytes",
    "import_static",
    "state_dict_without_rows",
    "string_to_evict_strategy",
    "torch_to_dyn_emb",
]


def __getattr__(name: str) -> Any:
    # Looking EmbOptimType up imports fbgemm_gpu, which takes seconds.
    if name == "EmbOptimType":
        return _optimizer.EmbOptimType
    # These bring the kernels along.
    if name in ("DumpHandle", "DynamicEmbDump", "DynamicEmbLoad", "DynamicEmbLoadPlanner", "state_dict_without_rows"):
        from dynamicemb import dump_load

        return getattr(dump_load, name)
    if name == "import_static":
        from dynamicemb.dump_load import import_static

        return import_static
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
