"""What the sharders of both collections share."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from dynamicemb.sharding.checks.params import check_fused_params, weights_of
from dynamicemb.sharding.checks.plan import checked_plan
from dynamicemb.sharding.planning.constraints import plan_for_our_tables


class DynamicSharder:
    """Shards a collection whose plan has dynamic tables; comes before TorchRec's class in the bases.

    Attributes:
        CONFIGS: the method of the collection that returns its embedding configs.
        TABLES: where the collection has its weights.
        missing_features_as_empty: read a feature that a batch lacks as one without ids.
    """

    CONFIGS: str
    TABLES: str
    missing_features_as_empty: bool
    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, Any] | None
    sharded_module_type: Any

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Make the sharded module; a collective on all ranks of `env`.

        Raises:
            TypeError: ``fused_params`` have a name that dynamic tables do not know.
            ValueError: an optimizer that static tables cannot use on the CPU, or a plan that contradicts itself.
        """
        params = checked_plan(params, getattr(module, self.CONFIGS)())
        params = plan_for_our_tables(params, module_fqn)
        check_fused_params(self.fused_params, params, weights_of(getattr(module, self.TABLES)), device)
        sharded = self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            **self.module_arguments(),
        )
        sharded.missing_features_as_empty = self.missing_features_as_empty
        return sharded

    def module_arguments(self) -> dict[str, Any]:
        """Return the arguments that the sharded module of one kind of collection takes alone."""
        return {}
