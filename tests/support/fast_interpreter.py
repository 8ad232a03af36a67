"""What Triton's interpreter does at every call of a kernel, and of every function that a kernel calls, done once.

Tests in the interpreter take half the time for it. Nothing that a kernel computes changes.
"""

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class PatchOnce:
    """Stands for the interpreter's ``_patch_lang``, which exchanges the functions of the language that a kernel sees.

    The interpreter does so for each call and takes it back after that of a kernel. Where all kernels are interpreted,
    nobody wants the functions back: they are exchanged by the first call of a module that sees the language under other
    names than those before.
    """

    def __init__(self) -> None:
        self.patch = interpreter._patch_lang
        self.patched: set[int] = set()
        # By the names that a module of kernels sees, which live as long as they are here.
        self.known: dict[int, dict[str, Any]] = {}

    def __call__(self, function: Any) -> Any:
        names = function.__globals__
        if id(names) not in self.known:
            seen = {id(value) for value in names.values() if value is tl or value is tl.core}
            if not seen or seen - self.patched:
                self.patch(function)
                self.patched |= seen
            self.known[id(names)] = names
        # To be taken back: nothing.
        return interpreter._LangPatchScope()


class NumpyTypes:
    """Stands for the interpreter's ``_get_np_dtype``, which makes a table of all types for each tensor."""

    def __init__(self) -> None:
        self.ask = interpreter._get_np_dtype
        self.known: dict[str, Any] = {}

    def __call__(self, kind: Any) -> Any:
        scalar = kind.scalar
        if type(scalar) is not tl.dtype:
            return self.ask(kind)
        if scalar.name not in self.known:
            self.known[scalar.name] = self.ask(scalar)
        return self.known[scalar.name]


def install() -> None:
    """Change the interpreter of this process, in which no kernel may be compiled."""
    interpreter._patch_lang = PatchOnce()
    interpreter._get_np_dtype = NumpyTypes()
