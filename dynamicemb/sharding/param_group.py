"""The param group that learning rate schedulers find in the fused optimizer of a group of tables."""

from collections.abc import Iterator, MutableMapping
from dataclasses import fields
from typing import Any

from torch import nn

from dynamicemb.embedding.optimizer_settings import CHANGEABLE, OptimizerSettings
from dynamicemb.optimizer import OptimizerArgs

# What torch and TorchRec call the settings of an optimizer. A group has none of them but ``lr``.
_SETTINGS = {field.name for field in fields(OptimizerArgs)} | {"betas", "amsgrad", "dampening", "nesterov"}


class TableParamGroup(MutableMapping[str, Any]):
    """A param group whose ``lr`` is the learning rate of the tables itself, not a copy of it.

    What is set here trains, and is saved, from then on; what a load or ``set_learning_rate`` sets is read here. Other
    keys, such as a scheduler's ``initial_lr``, are kept for who set them.

    Args:
        settings: of the tables' optimizer.
    """

    def __init__(self, settings: OptimizerSettings) -> None:
        self._settings = settings
        self._others: dict[str, Any] = {"params": []}

    def show_params(self, params: list[nn.Parameter]) -> None:
        """Set what the group lists as its parameters."""
        self._others["params"] = params

    def __getitem__(self, key: str) -> Any:
        return self._settings.learning_rate if key == "lr" else self._others[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "lr":
            self._settings.replace_learning_rate(value)
            return
        if key in _SETTINGS:
            raise ValueError(
                f"param group: {key}={value!r} would have no effect, of the settings only 'lr' is read; {_remedy(key)}"
            )
        self._others[key] = value

    def __delitem__(self, key: str) -> None:
        if key in ("lr", "params"):
            raise ValueError(f"param group: {key!r} cannot be removed from the group of dynamic tables")
        del self._others[key]

    def __iter__(self) -> Iterator[str]:
        yield "params"
        yield "lr"
        yield from (key for key in self._others if key != "params")

    def __len__(self) -> int:
        return len(self._others) + 1

    def __repr__(self) -> str:
        return repr(dict(self))


def _remedy(key: str) -> str:
    if key == "learning_rate":
        return "set 'lr'"
    if key in CHANGEABLE or key == "betas":
        return "use update_hyper_parameters of the optimizer, which knows beta1, beta2, eps and weight_decay"
    return "give it in fused_params when the model is sharded"
