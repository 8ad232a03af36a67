"""What this machine has for the package: versions, devices, settings, and what is missing."""

import argparse
import importlib
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from dynamicemb.host_memory import available_host_memory
from dynamicemb.version import __version__
from dynamicemb.versions import find_mismatch, installed_version

OK = 0
MISSING = 1

# Distributions beside torch, fbgemm_gpu and torchrec; isal is of use and not needed.
_LIBRARIES = ("triton", "numba", "numpy", "rich", "tqdm", "isal")
_OPTIONAL = {"isal"}
_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "DEMB_DETERMINISM_MODE",
    "DYNAMICEMB_CSTM_SCORE_CHECK",
    "NUMBA_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TRITON_INTERPRET",
)
_GIB = 2**30


@dataclass(frozen=True)
class Environment:
    """What a bug report should say about a machine.

    Attributes:
        versions: by package; None where a package is not installed.
        devices: one line for each device that tables can live on.
        settings: environment variables that change what the package does, where they are set.
        missing: one sentence for each thing that will not work.
    """

    versions: dict[str, str | None]
    devices: list[str]
    settings: dict[str, str]
    missing: list[str]


def describe_environment() -> Environment:
    """Look at this machine; imports torch, fbgemm_gpu and torchrec where they are installed."""
    triple = {package: installed_version(package) for package in ("torch", "fbgemm_gpu", "torchrec")}
    libraries = {name: _version(name) for name in _LIBRARIES}
    versions = {"dynamicemb": __version__, "python": platform.python_version(), **triple, **libraries}
    missing = [
        f"{name} is not installed: pip install {name}"
        for name, version in libraries.items()
        if version is None and name not in _OPTIONAL
    ]
    missing += _missing_of_torchrec(triple)
    devices = [_cpu()]
    try:
        devices += _gpus(missing)
    except ImportError as error:
        missing.append(f"torch does not load ({error})")
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    return Environment(versions, devices, settings, missing)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _missing_of_torchrec(triple: dict[str, str | None]) -> list[str]:
    problem = find_mismatch(triple)
    if problem:
        return [f"tables in TorchRec cannot be used: {problem}; the README has the versions that belong together"]
    found = []
    for package in ("fbgemm_gpu", "torchrec"):
        try:
            importlib.import_module(package)
        except Exception as error:
            found.append(f"{package} is installed but does not load ({type(error).__name__}: {error})")
    return found


def _cpu() -> str:
    memory = available_host_memory()
    free = "unknown" if memory is None else f"{memory / _GIB:.1f} GiB"
    return f"cpu: {platform.machine()}, {len(os.sched_getaffinity(0))} cores for this process, {free} of memory free"


def _gpus(missing: list[str]) -> list[str]:
    """Describe the GPUs that torch sees; says in ``missing`` why there are none."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} and sees no GPU"
        missing.append(f"tables on a GPU cannot be used: {reason}")
        return []
    lines = []
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        lines.append(
            f"cuda:{number}: {found.name}, compute capability {found.major}.{found.minor}, "
            f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free, CUDA {torch.version.cuda}"
        )
    return lines


def report(found: Environment) -> str:
    """Return what was found as text."""
    width = max(map(len, [*found.versions, *found.settings]))
    lines = ["versions"]
    lines += [f"  {name:{width}}  {version or 'not installed'}" for name, version in found.versions.items()]
    lines += ["devices", *(f"  {line}" for line in found.devices)]
    if found.settings:
        lines += ["settings", *(f"  {name:{width}}  {value}" for name, value in found.settings.items())]
    lines += ["what does not work here", *(f"  {line}" for line in found.missing or ["nothing"])]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(
        "python -m dynamicemb.info",
        description="Show versions, devices, settings and what is missing, for a bug report. Exit status: 1 if tables "
        "in TorchRec cannot be used on this machine, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print the same for scripts")
    options = parser.parse_args(arguments)
    found = describe_environment()
    sys.stdout.write((json.dumps(asdict(found), indent=1) if options.json else report(found)) + "\n")
    # A machine without a GPU is no fault.
    return MISSING if [line for line in found.missing if not line.startswith("tables on a GPU")] else OK
