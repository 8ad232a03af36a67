"""Warnings name the line of the user, however deep inside of the package they arise."""

import sys
import warnings

# Through these users call this package; ``dataclasses.replace`` runs the checks of options.
_PACKAGES = {"dataclasses", "dynamicemb", "torch", "torchrec", "fbgemm_gpu"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn about the innermost line that is neither of this package nor of torch, torchrec or FBGEMM."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)
