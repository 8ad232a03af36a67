"""Averages of a model and its copies, which know parameters and buffers only: they are refused by name."""

from typing import TypeVar

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel

from dynamicemb.errors import UnsupportedOptionError

REMEDY = (
    "rows of dynamic tables are no parameters, so an average over copies of the model (AveragedModel, SWA, EMA) would "
    "leave them as they were when they were copied; average the dense layers only, for example "
    "AveragedModel(model.dense), and use the tables as they are"
)

Kind = TypeVar("Kind", bound=type)


def never_averaged(kind: Kind) -> Kind:
    """Make ``AveragedModel`` refuse models that hold a module of this class; a decorator.

    Raises:
        UnsupportedOptionError: by the constructor of ``AveragedModel``.
    """

    def check(parent: nn.Module, name: str, module: nn.Module) -> None:
        # None takes the place of a module that is removed.
        if isinstance(parent, AveragedModel) and isinstance(module, nn.Module):
            _check(module, kind)

    register_module_module_registration_hook(check)
    return kind


def _check(model: nn.Module, kind: type) -> None:
    for path, module in model.named_modules():
        # A sharded collection may have static tables only.
        if isinstance(module, kind) and getattr(module, "dynamic_embedding_modules", [module]):
            raise UnsupportedOptionError(
                f"AveragedModel: {f'{path!r} of ' if path else ''}the model holds dynamic tables; {REMEDY}"
            )
