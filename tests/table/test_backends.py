"""Both backends export the kernels of the protocol, with its signatures."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamicemb.table import backends
from dynamicemb.table.backends import Kernels, kernels_for
from dynamicemb.table.index import FAILED, INSERTED
from tests.support.tables import make_group

PROTOCOL = {name: value for name, value in vars(Kernels).items() if isinstance(value, staticmethod)}


def exported(backend: str) -> Any:
    if backend == "cpu":
        from dynamicemb.table import cpu

        return backends._exported(cpu)
    from dynamicemb.table import triton

    return backends._exported(triton)


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


def test_a_backend_has_the_kernels_of_the_protocol_and_no_other(backend: str) -> None:
    kernels = exported(backend)
    assert len(PROTOCOL) == 19
    assert set(vars(kernels)) == set(PROTOCOL)
    for name, function in PROTOCOL.items():
        assert parameters(getattr(kernels, name)) == parameters(function.__func__), name


def test_annotations_of_the_twins_agree() -> None:
    cpu, triton = exported("cpu"), exported("triton")
    for name in PROTOCOL:
        ours = [inspect.signature(getattr(kernels, name)).parameters.values() for kernels in (cpu, triton)]
        first, second = ({p.name: p.annotation for p in found} for found in ours)
        assert first | {"scratch": None} == second | {"scratch": None}, name


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="there are no table kernels for meta; use torch.device"):
        kernels_for(torch.device("meta"))


def test_new_ids_get_slots_and_full_buckets_fail(backend: str, device: torch.device) -> None:
    group = make_group(backend, [32, 16])
    kernels = exported(backend) if backend != "interpret" else exported("triton")
    step = group.begin_step()
    ids = torch.tensor([5, -1, 2**62, *range(100, 120), 7], device=device)
    ranges = torch.tensor([0, 3, 24], device=device)
    rows = kernels.place(group.index, ids, ranges)
    # 21 ids for the 16 slots of the second table, none of which may go.
    assert (rows[:3] >= 0).all() and int((rows[3:] >= 0).sum()) == 16
    assert len(set(rows[rows >= 0].tolist())) == 19
    found = kernels.find(group.index, ids, ranges, False)
    assert torch.equal(found, rows)
    counters = group.index.tallies
    assert counters[:, INSERTED].tolist() == [3, 16] and counters[:, FAILED].tolist() == [0, 5]
    nothing = torch.zeros(3, dtype=torch.int64, device=device)
    assert kernels.place(group.index, ids[:0], nothing).shape == (0,)
    step.finish()


def launched_kernels() -> list[tuple[str, int]]:
    """List the kernels of Triton that start with a program's number, and how many parameters each has."""
    folder = Path(backends.__file__).parent / "triton"
    found = []
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                assert any("jit" in ast.unparse(decorator) for decorator in node.decorator_list), node.name
                found.append((node.name, len(node.args.args)))
    return found


def test_no_kernel_has_more_than_24_parameters() -> None:
    kernels = launched_kernels()
    assert len(kernels) > 15
    assert [kernel for kernel in kernels if kernel[1] > 24] == []
