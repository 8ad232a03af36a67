"""What both sharded collections share: static tables stay TorchRec's business, dynamic ones are kept out of it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.embedding.construct import check_device
from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2
from dynamicemb.sharding.check_features import checked_features
from dynamicemb.sharding.constraints import is_dynamic
from dynamicemb.sharding.kernels import DynamicKernel


class WithDynamicTables:
    """What both sharded collections share; comes before TorchRec's class in the bases.

    Attributes:
        CONFIGS: attribute under which TorchRec keeps the embedding configs.
        PREFIX: where tables stand in a state_dict.
    """

    CONFIGS: str
    PREFIX: str
    _device: torch.device | None
    _env: ShardingEnv
    _lookups: list[Any]
    module_sharding_plan: dict[str, Any]

    @property
    def dynamic_embedding_modules(self) -> list[BatchedDynamicEmbeddingTablesV2]:
        """The dynamic tables of this rank. Dump and load find tables by this name, without knowing torchrec."""
        return [
            kernel.emb_module
            for lookup in self._lookups
            for kernel in lookup.modules()
            if isinstance(kernel, DynamicKernel)
        ]

    def dynamic_table_names(self) -> list[str]:
        """Return the names of the dynamic tables."""
        return [name for name, plan in self.module_sharding_plan.items() if is_dynamic(plan)]

    def checked(self, features: Any, weighted: bool = False) -> KeyedJaggedTensor:
        """Return a batch that was checked on all ranks."""
        names = [name for config in getattr(self, self.CONFIGS) for name in config.feature_names]
        # On a GPU the agreement would wait for the device in every step.
        device = check_device(self._device)
        agreeing = self._env.process_group if device.type == "cpu" else None
        return checked_features(features, names, weighted, device, agreeing)

    def reset_parameters(self) -> None:
        """Initialise static tables; rows of dynamic ones are initialised when their id comes."""
        with self._only_static_configs():
            super().reset_parameters()  # type: ignore[misc]

    @contextmanager
    def _only_static_configs(self) -> Iterator[None]:
        configs = getattr(self, self.CONFIGS)
        dynamic = set(self.dynamic_table_names())
        setattr(self, self.CONFIGS, [config for config in configs if config.name not in dynamic])
        try:
            yield
        finally:
            setattr(self, self.CONFIGS, configs)

    @staticmethod
    def _pre_state_dict_hook(module: Any, prefix: str = "", keep_vars: bool = False) -> None:
        module.warn_about_state_dict()
        super()._pre_state_dict_hook(module, prefix, keep_vars)  # type: ignore[misc]

    @staticmethod
    def _pre_load_state_dict_hook(module: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        module.drop_dynamic_weights(state_dict, prefix)
        super()._pre_load_state_dict_hook(module, state_dict, prefix, *args)  # type: ignore[misc]

    def drop_dynamic_weights(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Remove dense weights of dynamic tables from a state_dict that is about to be loaded."""
        found = []
        for name in self.dynamic_table_names():
            if state_dict.pop(f"{prefix}{self.PREFIX}.{name}.weight", None) is not None:
                found.append(name)
        # The constructor loads the unsharded module, whose dynamic tables are placeholders.
        if found and self.__dict__.get("_is_built"):
            warnings.warn(
                f"load_state_dict ignores the weights of dynamic tables {found}, whose rows stay as they are; "
                "import dense rows with insert() of dynamic_embedding_modules",
                UserWarning,
                stacklevel=4,
            )

    def warn_about_state_dict(self) -> None:
        """Say once that a state_dict holds no rows of dynamic tables."""
        names = self.dynamic_table_names()
        if names and not self.__dict__.get("_warned_about_state_dict"):
            self.__dict__["_warned_about_state_dict"] = True
            warnings.warn(
                f"state_dict() holds no rows of dynamic tables {names}; "
                "read them with export_keys_values() of dynamic_embedding_modules",
                UserWarning,
                stacklevel=4,
            )
