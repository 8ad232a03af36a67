"""Build the wheel, install it into a new environment outside of the checkout, and run the demo from there.

The environment gets what a user installs: torch, fbgemm_gpu and torchrec in matching releases, and the wheel. It is
removed afterwards.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from setup import ROOT, install

# Of pandas and pyarrow the demo needs its data; the package does not.
DEMO_NEEDS = ("pandas", "pyarrow")


def build(folder: Path) -> Path:
    """Build the wheel into a folder; returns its path."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    return wheel


def missing_files(wheel: Path) -> list[str]:
    """List the modules of the checkout that the wheel lacks, and the folders in it that are not the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "dynamicemb").rglob("*.py")}
    strangers = {name.split("/")[0] for name in names} - {"dynamicemb"}
    return sorted(wanted - names) + sorted(name for name in strangers if not name.endswith(".dist-info"))


def main() -> None:
    """Do what the module says; exits with an error if something fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder / "dist")
        wrong = missing_files(wheel)
        if wrong:
            sys.exit(f"{wheel.name} lacks modules, or has what is none: {wrong}")
        print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB", flush=True)
        python = install(folder / "environment", (str(wheel), *DEMO_NEEDS))
        shutil.copytree(ROOT / "examples", folder / "examples")
        # Nothing of the checkout may be found by way of the environment.
        variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        place = "import dynamicemb; print(dynamicemb.__file__)"
        imported = subprocess.run(
            [str(python), "-c", place], cwd=folder, env=variables, check=True, capture_output=True, text=True
        ).stdout
        if not Path(imported.strip()).is_relative_to(folder):
            sys.exit(f"the environment imports {imported.strip()}, which is not the wheel's")
        subprocess.run([str(python), "-m", "dynamicemb.info"], cwd=folder, env=variables, check=True)
        demo = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        subprocess.run([*demo, "examples/movielens.py", "--epochs", "1"], cwd=folder, env=variables, check=True)
    print("the demo runs from the wheel")


if __name__ == "__main__":
    main()
