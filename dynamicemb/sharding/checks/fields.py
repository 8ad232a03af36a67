"""What becomes of every field of TorchRec's dataclasses where a table is dynamic.

A field that is not listed, of a release to come, is reported as idle once it is set, and
`tests/sharding/test_idle_fields.py` fails for it.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any

from dynamicemb.warn import warn


@dataclass(frozen=True)
class Fields:
    """The fields of one dataclass.

    Attributes:
        acts: what has an effect, or is refused where it contradicts something else.
        idle: what has none, and warns where it asks for something; the reason of each.
        refused: what raises where it asks for something; the reason of each.
    """

    acts: frozenset[str]
    idle: Mapping[str, str]
    refused: Mapping[str, str]

    def refuse(self, values: Any, title: str) -> None:
        """Raise for a field of an object that is refused.

        Args:
            values: the dataclass object.
            title: how messages name it.

        Raises:
            ValueError: as said.
        """
        for name, value in _asking(values).items():
            if name in self.refused:
                raise ValueError(f"{title} cannot have {name}={value!r}: {self.refused[name]}")

    def warn(self, values: Any, title: str) -> None:
        """Warn about the fields of an object that have no effect; arguments are those of `refuse`."""
        idle = {name: value for name, value in _asking(values).items() if name not in self.acts | self.refused.keys()}
        unknown = "no such field is known to dynamic tables; leave it"
        parts = [f"{name}={value} ({self.idle.get(name, unknown)})" for name, value in idle.items()]
        if parts:
            warn(f"{title} ignores {', '.join(parts)}")


def asks(value: Any) -> bool:
    """Say whether a setting asks for something; None, False and members called NONE do not."""
    return value is not None and value is not False and getattr(value, "name", None) != "NONE"


def _asking(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass object that ask for something."""
    given = {field: _value(values, field.name) for field in fields(values)}
    return {field.name: value for field, value in given.items() if _asks(field, value)}


def _asks(field: "Field[Any]", value: Any) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return asks(value) and (value is not default and value != default)


def _value(values: Any, name: str) -> Any:
    value = getattr(values, name)
    # A mark of a dynamic table may stand in the place of what was given.
    return getattr(value, "given", None) if name == "cache_params" and hasattr(value, "given") else value


# EmbeddingConfig and EmbeddingBagConfig.
CONFIG_FIELDS = Fields(
    acts=frozenset(
        {
            "data_type",
            "embedding_dim",
            "feature_names",
            "init_fn",
            "name",
            "num_embeddings",
            "pooling",
            "weight_init_max",
            "weight_init_min",
        }
    ),
    idle={
        "input_dim": "rows are found by id; leave it None",
        "need_pos": "positions come from a feature processor; leave it False",
        "num_embeddings_post_pruning": "rows are not pruned, but evicted or expire; leave it None",
        "stash_weights": "rows stay in the memory of their device; leave it False",
        "total_num_buckets": "dist_type of its options says which rank owns an id; leave it None",
        "virtual_table_eviction_policy": "score_strategy and ttl of its options say which ids go; leave it None",
    },
    refused={
        "enable_embedding_update": "DistributedModelParallel.write does not reach its rows; set it to False and write "
        "rows with insert() of dynamic_embedding_modules",
        "use_virtual_table": "a dynamic table takes every id without it; set it to False",
    },
)

# ParameterConstraints and DynamicEmbParameterConstraints.
CONSTRAINT_FIELDS = Fields(
    acts=frozenset(
        {
            "batch_sizes",
            "device_group",
            "dynamicemb_options",
            "feature_names",
            "is_weighted",
            "num_poolings",
            "output_dtype",
            "pooling_factors",
            "sharding_types",
            "stochastic_rounding",
            "use_dynamicemb",
        }
    ),
    idle={
        "bounds_check_mode": "every id is legal; leave it None",
        "cache_params": "rows are not cached; leave it None",
        "compute_kernels": "a dynamic table has a kernel of its own; leave it None",
        "enforce_hbm": "rows are not cached; leave it None",
        "key_value_params": "rows are in the memory of their device; leave it None",
        "min_partition": "a dynamic table is sharded by rows; leave it None",
        "use_virtual_table": "a dynamic table takes every id without it; leave it False",
    },
    refused={},
)

# ParameterSharding and DynamicEmbParameterSharding.
PLAN_FIELDS = Fields(
    acts=frozenset(
        {
            "compute_kernel",
            "customized_compute_kernel",
            "dist_type",
            "dynamicemb_options",
            "group",
            "output_dtype",
            "ranks",
            "sharding_spec",
            "sharding_type",
            "stochastic_rounding",
        }
    ),
    idle={name: CONSTRAINT_FIELDS.idle[name] for name in ("bounds_check_mode", "cache_params", "enforce_hbm")}
    | {"key_value_params": CONSTRAINT_FIELDS.idle["key_value_params"]},
    refused={},
)
