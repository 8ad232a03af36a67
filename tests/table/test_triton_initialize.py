"""Initial values from Triton: every byte of the rows as numba writes them, normal values to 1e-6."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dynamicemb.table import cpu
from dynamicemb.table import triton as gpu
from dynamicemb.table.cpu.philox import philox4x32_reference
from dynamicemb.table.initializers import InitializerTable
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.table.triton.philox import philox4x32
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode
from tests.conftest import reason_to_skip

Mode = DynamicEmbInitializerMode
EXACT = {
    "uniform": DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=-0.1, upper=0.3),
    "subnormal": DynamicEmbInitializerArgs(mode=Mode.UNIFORM, lower=-1e-39, upper=3e-39),
    "constant": DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=0.1),
    "debug": DynamicEmbInitializerArgs(mode=Mode.DEBUG),
}
NORMAL = {
    "normal": DynamicEmbInitializerArgs(mode=Mode.NORMAL, mean=0.25, std_dev=0.1),
    "truncated": DynamicEmbInitializerArgs(mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=0.5, lower=-1.0, upper=1.5),
    "tail": DynamicEmbInitializerArgs(mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=1.0, lower=5.0, upper=6.0),
}
INT64 = np.iinfo(np.int64)
IDS = [0, -1, 1, INT64.min, INT64.max, 12345678901234567, -100000, 99999]


@pytest.fixture(params=["interpret", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels run, interpreted or compiled."""
    if reason := reason_to_skip(request.param):
        pytest.skip(f"{request.param}: {reason}")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@triton.jit
def _philox_kernel(words_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x0, x1, x2, x3 = philox4x32(
        tl.load(words_ptr + i).to(tl.uint32), tl.load(words_ptr + N + i).to(tl.uint32),
        tl.load(words_ptr + 2 * N + i).to(tl.uint32), tl.load(words_ptr + 3 * N + i).to(tl.uint32),
        tl.load(words_ptr + 4 * N + i).to(tl.uint32), tl.load(words_ptr + 5 * N + i).to(tl.uint32),
    )  # fmt: skip
    tl.store(out_ptr + i, x0.to(tl.int64))
    tl.store(out_ptr + N + i, x1.to(tl.int64))
    tl.store(out_ptr + 2 * N + i, x2.to(tl.int64))
    tl.store(out_ptr + 3 * N + i, x3.to(tl.int64))


def test_philox_gives_the_published_words(device: torch.device) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (6, 64))
    words[:, 0] = 0
    words[:, 1] = 2**32 - 1
    words[:, 2] = [0xA4093822, 0x299F31D0, 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    out = torch.empty(4, 64, dtype=torch.int64, device=device)
    _philox_kernel[(1,)](torch.from_numpy(words).to(device), out, N=64)
    expected = [philox4x32_reference(tuple(w[:2]), tuple(w[2:])) for w in words.T.tolist()]
    assert out.T.tolist() == [list(x) for x in expected]
    assert [f"{x:08x}" for x in out[:, 0].tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


class Rows:
    """The same rows twice, filled with a pattern: numba's and Triton's."""

    def __init__(self, args: list, formats: list[RowFormat], dtype: torch.dtype, device: torch.device, capacity: int):
        names = [f"t{t}" for t in range(len(args))]
        self.formats, self.dtype, self.device, self.capacity = formats, dtype, device, capacity
        self.sides = []
        for kernels, place in ((cpu, torch.device("cpu")), (gpu, device)):
            store = RowStore([capacity] * len(args), formats, dtype, place)
            for chunk in store.chunks:
                chunk.fill_(0xA5)
            self.sides.append((kernels, store, InitializerTable.create(args, names, 11, place)))

    def initialize(self, rows: torch.Tensor, ids: torch.Tensor, tables: torch.Tensor) -> None:
        states = torch.arange(len(self.formats), dtype=torch.float32) + 0.5
        for kernels, store, initializers in self.sides:
            batch = [x.to(store.device) for x in (rows, ids, tables, states)]
            kernels.initialize(store, initializers, *batch)

    def chunks(self, table: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.capacity, -1)
        return tuple(store.chunks[table].cpu().view(shape) for _, store, _ in self.sides)


def batch(rng: np.random.Generator, tables: int, capacity: int, first_rows: list[int]) -> tuple[torch.Tensor, ...]:
    """Return rows, ids and tables: about half of every table's rows, and rows -1, in random order."""
    rows, owners = [], []
    for t in range(tables):
        taken = rng.permutation(capacity)[: capacity // 2] + first_rows[t]
        rows += [*taken, -1]
        owners += [t] * (len(taken) + 1)
    order = rng.permutation(len(rows))
    ids = np.where(
        rng.random(order.size) < 0.3, rng.choice(IDS, order.size), rng.integers(INT64.min, INT64.max, order.size)
    )
    return (
        torch.tensor(rows, dtype=torch.int32)[order],
        torch.from_numpy(ids),
        torch.tensor(owners, dtype=torch.int32)[order],
    )


SHAPES = [
    [(1, 0), (3, 1), (4, 4), (7, 2)],
    [(128, 256), (12, 1), (33, 33), (5, 0)],
    [(300, 1), (2, 0), (257, 9), (9, 3)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c05_every_byte_is_the_cpus_and_no_other_is_written(
    device: torch.device, dtype: torch.dtype, shape: list[tuple[int, int]]
) -> None:
    capacity = 3000 if device.type == "cuda" else 8
    formats = [RowFormat(*s) for s in shape]
    both = Rows(list(EXACT.values()), formats, dtype, device, capacity)
    for seed in range(3 if device.type == "cuda" else 1):
        both.initialize(*batch(np.random.default_rng(seed), 4, capacity, both.sides[0][1].first_rows))
    for t in range(4):
        expected, actual = both.chunks(t)
        assert torch.equal(actual, expected), list(EXACT)[t]
        assert (expected == 0xA5).all(1).any()


@pytest.mark.parametrize("kind", NORMAL)
def test_c05_normal_values_are_the_cpus_to_1e_6(device: torch.device, kind: str) -> None:
    capacity = 20000 if device.type == "cuda" else 16
    both = Rows([NORMAL[kind]], [RowFormat(61, 2)], torch.float32, device, capacity)
    both.initialize(*batch(np.random.default_rng(0), 1, capacity, [0]))
    expected, actual = (chunk.contiguous().view(torch.float32) for chunk in both.chunks(0))
    written = ~(both.chunks(0)[0] == 0xA5).all(1)
    assert torch.allclose(actual[written], expected[written], rtol=1e-6, atol=0)
    # Two libraries differ in the last bit of float64: next to nothing after rounding to float32.
    assert (actual[written] != expected[written]).float().mean() < 1e-5
    assert torch.equal(*(chunk[~written] for chunk in both.chunks(0)))


def test_modes_may_be_mixed_in_one_tile(device: torch.device) -> None:
    args = [*EXACT.values(), *NORMAL.values()]
    both = Rows(args, [RowFormat(8, 1)] * len(args), torch.float32, device, 16)
    both.initialize(*batch(np.random.default_rng(1), len(args), 16, both.sides[0][1].first_rows))
    for t in range(len(args)):
        expected, actual = (chunk.contiguous().view(torch.float32) for chunk in both.chunks(t))
        if t < len(EXACT):
            assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
        else:
            assert torch.allclose(actual, expected, rtol=1e-6, atol=0)


def test_nothing_to_initialise(device: torch.device) -> None:
    both = Rows([EXACT["uniform"]], [RowFormat(4, 0)], torch.float32, device, 16)
    none = torch.zeros(0, dtype=torch.int32)
    both.initialize(none, torch.zeros(0, dtype=torch.int64), none)
    assert all((chunk == 0xA5).all() for chunk in both.chunks(0))
