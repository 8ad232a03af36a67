"""``python -m dynamicemb.info``: versions, devices, and what is missing."""

import builtins
import importlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb import environment
from dynamicemb.environment import describe_environment, main, report
from dynamicemb.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_the_command_names_versions_devices_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    run = subprocess.run(
        [sys.executable, "-m", "dynamicemb.info"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split(maxsplit=1) for line in run.stdout.splitlines()]
    assert ["dynamicemb", __version__] in lines
    assert ["numba", metadata.version("numba")] in lines
    assert ["torch", metadata.version("torch")] in lines
    assert ["TRITON_INTERPRET", "1"] in lines
    assert "  cpu: " in run.stdout


def test_scripts_get_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["dynamicemb"] == __version__
    assert set(facts) == {"versions", "devices", "settings", "missing"}


def test_a_machine_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built, reason in ((None, "built without CUDA"), ("13.0", "built for CUDA 13.0 and sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", built)
        found = describe_environment()
        assert [line for line in found.missing if reason in line]
        assert len(found.devices) == 1


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found_version = metadata.version

    def version(name: str) -> str:
        if name in ("numba", "isal", "torchrec", "torchrec-cpu", "torchrec-nightly", "torchrec-nightly-cpu"):
            raise metadata.PackageNotFoundError(name)
        return found_version(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main([]) == 1
    text = capsys.readouterr().out
    assert "numba is not installed: pip install numba" in text
    assert "tables in TorchRec cannot be used: missing: torchrec" in text
    assert "isal is not installed" not in text
    assert text.count("not installed\n") == 3


def test_a_library_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = importlib.import_module

    def fail(name: str, *rest: Any) -> Any:
        if name == "fbgemm_gpu":
            raise OSError("libcudart.so: cannot open")
        return load(name, *rest)

    monkeypatch.setattr(environment.importlib, "import_module", fail)
    missing = describe_environment().missing
    assert "fbgemm_gpu is installed but does not load (OSError: libcudart.so: cannot open)" in missing


def test_a_torch_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def fail(name: str, *rest: Any, **more: Any) -> Any:
        if name == "torch" and rest and rest[0].get("__name__") == "dynamicemb.environment":
            raise ImportError("no libtorch")
        return load(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", fail)
    assert "torch does not load (no libtorch)" in describe_environment().missing


@pytest.mark.cuda
def test_gpus_are_named() -> None:
    text = report(describe_environment())
    assert f"cuda:0: {torch.cuda.get_device_name(0)}" in text
