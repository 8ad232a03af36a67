"""Check that torch, fbgemm_gpu and torchrec belong together before anything of them is used.

The three are released as a set; a wrong mix fails late and obscurely (an undefined symbol, a missing operator).
"""

import importlib
import re
from importlib import metadata

# torch 2.m goes with fbgemm_gpu 1.(m - 5) and torchrec 1.(m - 5).
_MINOR_DISTANCE = 5
_OLDEST_TORCH_MINOR = 11
_MATCHING = "torch 2.11/2.12/2.13/2.14 <-> fbgemm_gpu 1.6/1.7/1.8/1.9 <-> torchrec 1.6/1.7/1.8/1.9"

# The names under which a package is distributed, the plain one first.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "fbgemm_gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-rocm", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu"),
    "torchrec": ("torchrec", "torchrec-cpu", "torchrec-nightly", "torchrec-nightly-cpu"),
}


def check_versions() -> None:
    """Raise unless the installed torch, fbgemm_gpu and torchrec match and load.

    Raises:
        ImportError: names the versions found and the ones that match.
    """
    found = {package: installed_version(package) for package in _DISTRIBUTIONS}
    problem = find_mismatch(found)
    if problem:
        raise ImportError(_message(problem, found))
    for package in ("fbgemm_gpu", "torchrec"):
        try:
            importlib.import_module(package)
        except Exception as error:
            reason = f"{package} is installed but does not load ({type(error).__name__}: {error})"
            raise ImportError(_message(reason, found)) from error


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if there is none."""
    for distribution in _DISTRIBUTIONS[package]:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def find_mismatch(found: dict[str, str | None]) -> str | None:
    """Say what is wrong with the versions found, None if they match.

    Args:
        found: version per package ``torch``, ``fbgemm_gpu``, ``torchrec``; None if missing.
    """
    missing = [package for package, version in found.items() if version is None]
    if missing:
        return f"missing: {', '.join(missing)}"
    torch_release = _release(found["torch"])
    if torch_release is None or torch_release[0] != 2 or torch_release[1] < _OLDEST_TORCH_MINOR:
        return f"torch 2.{_OLDEST_TORCH_MINOR} or newer is needed"
    wanted = (1, torch_release[1] - _MINOR_DISTANCE)
    wrong = [package for package in ("fbgemm_gpu", "torchrec") if _release(found[package]) != wanted]
    if wrong:
        return f"torch {found['torch']} needs {' and '.join(f'{name} {wanted[0]}.{wanted[1]}' for name in wrong)}"
    return None


def _release(version: str | None) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _message(problem: str, found: dict[str, str | None]) -> str:
    versions = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
    return (
        f"dynamicemb's TorchRec layer cannot be used: {problem}. Found {versions}. Matching sets: {_MATCHING}. "
        "On a machine without a GPU install fbgemm-gpu-cpu first and torchrec with --no-deps: "
        "torchrec's metadata asks for the CUDA build."
    )
