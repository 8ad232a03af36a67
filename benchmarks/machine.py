"""Where a result comes from: hardware, versions, commit, date, load."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

_PACKAGES = {"torch": "torch", "numba": "numba", "triton": "triton", "fbgemm": "fbgemm_gpu"}


def describe(device: str, commit: str | None = None) -> dict[str, Any]:
    """Return the fields that every line of results carries.

    Args:
        device: ``cpu`` or ``cuda``.
        commit: of the sources, where git cannot say.
    """
    versions = {field: _version(package) for field, package in _PACKAGES.items()}
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or commit_of(Path(__file__).resolve().parent.parent),
        **(_describe_gpu() if device == "cuda" else {}),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "python": platform.python_version(),
        **versions,
    }


def default_name(device: str) -> str:
    """Return the name of the result files: that of the GPU in lower case without its vendor, or ``cpu``."""
    if device == "cpu":
        return "cpu"
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "_")


def load() -> float:
    """Return how many processes wanted a core in the last minute, this one included."""
    return round(os.getloadavg()[0], 2)


def _describe_gpu() -> dict[str, Any]:
    return {"gpu": torch.cuda.get_device_name(), "driver": _driver(), "cuda": torch.version.cuda}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, and whether benchmarks or package have changed since; ``unknown`` without."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git(
            "status", "--porcelain", "--untracked-files=no", "--", "benchmarks", ":!benchmarks/results", "dynamicemb"
        )
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    vector = next((flag for flag in ("avx512f", "avx2") if flag in flags), "")
    return " ".join(part for part in (names[0] if names else platform.machine(), vector) if part)
