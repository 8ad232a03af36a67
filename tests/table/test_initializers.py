"""Initial values: pinned numbers, a plain reference, independence of order, every byte of a row, refused arguments."""

import math
import statistics

import numpy as np
import pytest
import torch

from dynamicemb.table.cpu.initialize import initial_values, initialize
from dynamicemb.table.cpu.philox import philox4x32_reference
from dynamicemb.table.initializers import InitializerTable, table_key
from dynamicemb.table.rows import RowFormat, RowStore
from dynamicemb.types import DynamicEmbInitializerArgs as Args
from dynamicemb.types import DynamicEmbInitializerMode as Mode

SEEDS = (0, 0xDEADBEEFCAFEBABE)
NAMES = ("user", "item_é")
IDS = (0, -1, -(2**63), 2**63 - 1, 12345678901234567)
INITIALIZERS = {
    "uniform": Args(mode=Mode.UNIFORM, lower=-0.1, upper=0.3),
    "normal": Args(mode=Mode.NORMAL, mean=0.25, std_dev=0.1),
    "truncated": Args(mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=0.5, lower=-1.0, upper=1.5),
    "tail": Args(mode=Mode.TRUNCATED_NORMAL, mean=0.0, std_dev=1.0, lower=5.0, upper=6.0),
    "constant": Args(mode=Mode.CONSTANT, value=0.1),
    "debug": Args(mode=Mode.DEBUG),
}

# fp32 bit patterns of columns 0..5, one line per id of IDS.
GOLDEN = {
    ("uniform", 0, 0): (
        "3e0ff838 3e675640 3e44e48e bd841764 3e88bf5f bd43ab0d",
        "3e52f174 3e3abb40 3e626316 3ceb92e4 3e60e298 bd4ee727",
        "3e26864e 3d3432fa bdbf043a 3c28bd80 3cf1d0a4 3e51d16a",
        "3e3a7dfc 3e20eef0 3d0bea52 3e980413 3e9036c6 3d881eb9",
        "3e297fe8 3e533a9c bd00e766 3e1aa1ec 3e0a8abc 3e21d3b2",
    ),
    ("uniform", 0, 1): (
        "3d34e8fa bad15740 3dd701f9 3e54ec78 bd1c277a 3e0c200e",
        "bd3005a0 3d485952 3e66251c 3e790928 3e756550 bd0d3b9a",
        "bd90a3a6 3e64789e bdc18090 3e149a10 3e55f768 3e1dfb78",
        "3e49fc8c 3e298128 3d9dcef7 3e622ece 3cf72d44 3e3d93a6",
        "3e789bfc 3e690fec 3e1e5fba 3da638dd 3d8a8f59 3e496b54",
    ),
    ("uniform", 1, 0): (
        "bd4b9647 bd916fed 3e7b5d78 3e75ae32 3e8288c5 3de3d117",
        "3e160c5e 3dea9481 3e8bc7e8 3e993a88 3e253a28 3bec3160",
        "3e275872 bcd579b4 3d6091d2 3c860ec0 3e1972d8 bb9d1760",
        "3e84bfab 3c0585b0 3e4f76dc 3e8e221b bcddd9b4 3dc9ecc1",
        "3e377c80 3e726b12 3dc89b6d 3e5d413c 3e1a9fda 3e6870d6",
    ),
    ("uniform", 1, 1): (
        "3c2f7a30 3d8f499d 3e49a0ea 3e8a5b61 bdbc7c23 bda0f84a",
        "3de49e87 3e139f5a bd053526 3d73603a 3d5653b2 3e542b6c",
        "3d9e7281 3db07041 bda80b96 bc1789e8 3e3f0bf4 3d6fa632",
        "3d177a62 3e15abfa 3e673b40 3be563d0 3e97e607 3dbec8d3",
        "3d94ee77 3d9d2617 bd9cf5f6 3d969b03 3e930cb8 3e516082",
    ),
    ("normal", 0, 0): (
        "3e947090 3e212f99 3ea269e3 3e9576c8 3e8e7811 3e8f8507",
        "3e6b7d92 3e37e873 3e625dc4 3e9e8a3e 3e987229 3e980e06",
        "3e44216a 3ea43120 3e50db25 3f08375e 3e85e9af 3dcd59b0",
        "3e4aab57 3e3d15d7 3ecb974f 3e78a59a 3e64e2bf 3e87e276",
        "3e849042 3e23c074 3df451fe 3debb428 3e3f63b4 3e2c9cc5",
    ),
    ("normal", 0, 1): (
        "3e81d5b9 3ec91f6b 3e875bcf 3e0a82f9 3db4c024 3e13cbbf",
        "3de71523 3ec8ab36 3e94bf82 3e4c88ec 3e8f18c0 3e9917be",
        "3ea98f2a 3d14f950 3ce39a1c 3d73aba0 3e4f9283 3e4894b3",
        "3e5755d9 3e3c6146 3e950f10 3e043bf1 3e5c7e7b 3dd57503",
        "3e8bf36b 3e4c5dc1 3e22eb3c 3e8e2ff2 3e78fffe 3df2488d",
    ),
    ("normal", 1, 0): (
        "3edda4c1 3eadd97c 3e9043ed 3e531c3b 3e4eb832 3e77356c",
        "3e1ddef9 3e69302f 3e93230f 3e7f905d 3e755384 3eaeef25",
        "3e92a009 3eaaee53 3e5c21ab 3ec439ac 3e83bcaa 3eb187e8",
        "3e79f11f 3e978861 3ea3e81f 3e65a3c8 3d863956 3e821543",
        "3e97b023 3e3738eb 3e8f2aa7 3e0a63ef 3e9455f5 3e25e555",
    ),
    ("normal", 1, 1): (
        "3ddb9980 3ea54c2a 3ea34954 3e5c5c16 3f03a299 3eaf44b8",
        "3e27288f 3e361ef3 3dc980ba 3eb97d2c 3e88069a 3de53bef",
        "3e007ba4 3e8e17a6 3e927811 3efe39f8 3e3d8382 3e995d19",
        "3e0fce2f 3e1c92a0 3e78cd4e 3ea098f2 3e72d966 3e80b5a7",
        "3e040e60 3e97b707 3d02dc17 3eb146fb 3e80ea74 3e65f465",
    ),
    ("truncated", 0, 0): (
        "bde4a447 bed445a3 be90fee2 3f2d3bac bf21d5d2 3f10ebb1",
        "beaafd92 be7e33d4 bec9c6e1 3e75f279 bec6a8bc 3f151287",
        "be3a61c8 3e419d0a 3f8689a8 3e9c87bd 3e7345f1 bea8d8ae",
        "be7d5fff be283a4c 3e632015 bf702eaa bf3f5776 3defa466",
        "be4422ec beab8978 3ef5be36 be1404dd bdc2baea be2b1d47",
    ),
    ("truncated", 0, 1): (
        "3e4107a4 3eb3a3a1 baefe0eb beaecb52 3f036673 bdcc9943",
        "3f0a017e 3e312a77 bed1b66d befd2f6d bef44369 3efd522c",
        "3f3a11f8 bece274e 3f8b35ea be00e406 beb0cff4 be1ebb66",
        "be9a3bea be442701 3dabf590 bec959e9 3e70fb3c be840bbe",
        "befc1fc9 bed803c3 be1ffd32 3d91eb6d 3de7fb22 be993207",
    ),
    ("truncated", 1, 0): (
        "3f13d4af 3f3af3ae bf0187a2 bef4f34c bf0e9433 bcabb60d",
        "be05761e bcfe8c11 bf2cb9ff bf7bef94 be362630 3ea267e0",
        "be3d1105 3ee8a23f 3e1da208 3e913b8d be103f97 3eba1953",
        "bf150e8c 3ea09b71 bea46616 bf361fb6 3eeb101f 3c910e89",
        "be7309af beed2e19 3ca12f41 bebf3ddc be13fe42 bed6a94d",
    ),
    ("truncated", 1, 1): (
        "3e9bc13e 3dd92c4f be999410 bf277677 3f826b09 3f4e3d01",
        "bcb58911 bdfb9aa9 3ef85d11 3e0e9fe7 3e25dd16 bead5769",
        "3da9fa77 3d64d9ed 3f58d418 3ec34dea be869ea6 3e1196ac",
        "3e5969b0 be044549 bed40b74 3ea2cdae bf6f258c 3d0cc0c6",
        "3dc78dcf 3dae015a 3f48d079 3dc256ee bf4dc544 bea80259",
    ),
    ("tail", 0, 0): (
        "40a3182f 40a1411d 40a1ead5 40ae24f8 40a086f0 40ac002c",
        "40a1a371 40a2207f 40a15870 40a6d056 40a15f95 40ac4da0",
        "40a290d0 40a627d3 40b69526 40a7b819 40a6c778 40a1a90c",
        "40a221c8 40a2b154 40a69281 40a00c38 40a049c7 40a54c25",
        "40a27fc7 40a1a206 40aa76ad 40a2d6c4 40a33a89 40a2ac16",
    ),
    ("tail", 0, 1): (
        "40a62602 40a86203 40a40e7d 40a199a1 40ab0b4b 40a33070",
        "40ab8185 40a5f50e 40a146b3 40a0f059 40a100a2 40aab824",
        "40af2d42 40a14e94 40b776c3 40a2fb70 40a1947c 40a2c2c1",
        "40a1d096 40a27fc0 40a4ee4f 40a15968 40a6bfe4 40a2114a",
        "40a0f23f 40a13910 40a2c06e 40a4cb59 40a5414f 40a1d37d",
    ),
    ("tail", 1, 0): (
        "40ac365a 40af3fc0 40a0e603 40a0ff5b 40a0bba4 40a3e065",
        "40a2f291 40a3c896 40a06dd0 40a002db 40a2984d 40a7e27f",
        "40a28c19 40aa078f 40a5ba1d 40a76818 40a2dde7 40a89305",
        "40a0a8a9 40a7d576 40a1b4d4 40a05a98 40aa1bf2 40a43efb",
        "40a23204 40a10e14 40a443f3 40a170fb 40a2d6d1 40a13bf5",
    ),
    ("tail", 1, 1): (
        "40a7b28a 40a52c84 40a1d26b 40a0798f 40b5cedc 40b0deae",
        "40a3dd8d 40a30179 40aa8d37 40a58dd0 40a5d2c5 40a19d5c",
        "40a4eba0 40a4a1e7 40b1ca8a 40a8d9ff 40a2097d 40a5967e",
        "40a67324 40a2f4df 40a1419b 40a7e563 40a00d21 40a46978",
        "40a5140c 40a4f115 40b06806 40a50cdc 40a03322 40a1ab3f",
    ),
}
CONSTANT_GOLDEN = "3dcccccd"
DEBUG_GOLDEN = ("00000000", "47c34f80", "46bd0000", "47940f80", "47070700")


def create(args, names=("user",), seed=0):
    return InitializerTable.create(list(args), list(names), seed, "cpu")


def bits(values):
    return values.contiguous().view(torch.int32)


def reference(args, seed, name, id_, column):
    """Return one initial value as docs/random.md describes it, in plain Python."""
    key, word = table_key(seed, name), id_ % 2**64
    counter = (word % 2**32, word >> 32, column // 4, 0)
    x = philox4x32_reference((key % 2**32, key >> 32), counter)
    j, f32 = column % 4, np.float32
    if args.mode is Mode.CONSTANT:
        return f32(args.value)
    if args.mode is Mode.DEBUG:
        return f32(id_ % 100000)
    if args.mode is Mode.UNIFORM:
        lower, upper = f32(args.lower), f32(args.upper)
        return lower + (upper - lower) * (f32(x[j] >> 8) * f32(2.0**-24))
    if args.mode is Mode.NORMAL:
        u, v = ((w + 0.5) * 2.0**-32 for w in x[j // 2 * 2 : j // 2 * 2 + 2])
        turn = math.sin if j % 2 else math.cos
        return f32(args.mean + args.std_dev * (math.sqrt(-2.0 * math.log(u)) * turn(2.0 * math.pi * v)))
    a, b, std = (args.lower - args.mean) / args.std_dev, (args.upper - args.mean) / args.std_dev, args.std_dev
    if a + b > 0:
        a, b, std = -b, -a, -std
    low, high = (0.5 * math.erfc(-z / math.sqrt(2.0)) for z in (a, b))
    z = statistics.NormalDist().inv_cdf(low + (high - low) * ((x[j] + 0.5) * 2.0**-32))
    return f32(min(max(args.mean + std * z, args.lower), args.upper))


@pytest.mark.parametrize("kind", ["uniform", "normal", "truncated", "tail"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_pinned(kind, seed, name):
    values = initial_values(create([INITIALIZERS[kind]], [name], seed), 0, torch.tensor(IDS), 6)
    lines = [" ".join(f"{word & 0xFFFFFFFF:08x}" for word in row) for row in bits(values).tolist()]
    assert tuple(lines) == GOLDEN[kind, SEEDS.index(seed), NAMES.index(name)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_constant_and_debug_values_are_pinned(seed, name):
    table = create([INITIALIZERS["constant"], INITIALIZERS["debug"]], [name, name], seed)
    ids = torch.tensor(IDS)
    constant, debug = (bits(initial_values(table, t, ids, 6)) for t in range(2))
    assert {f"{word:08x}" for word in constant.flatten().tolist()} == {CONSTANT_GOLDEN}
    assert tuple(f"{word:08x}" for word in debug[:, 0].tolist()) == DEBUG_GOLDEN
    assert (debug == debug[:, :1]).all()


@pytest.mark.parametrize("kind", INITIALIZERS)
@pytest.mark.parametrize("dim", [1, 3, 64, 100])
def test_values_equal_the_plain_reference(kind, dim):
    args = INITIALIZERS[kind]
    values = initial_values(create([args], ["item_é"], 5), 0, torch.tensor(IDS), dim).numpy()
    expected = np.array([[reference(args, 5, "item_é", id_, column) for column in range(dim)] for id_ in IDS])
    # log, sin and cos of two libraries may differ in the last bit of a float64: then one value in 10**8 rounds apart.
    assert np.count_nonzero(values != expected) == 0


def test_uniform_is_not_fused():
    lower, span = np.float32(-0.1), np.float32(0.3) - np.float32(-0.1)
    key = table_key(0, "user")
    words = [philox4x32_reference((key % 2**32, key >> 32), (i, 0, 0, 0))[0] for i in range(200)]
    u = np.array([w >> 8 for w in words], dtype=np.float32) * np.float32(2.0**-24)
    # The float64 product of two float32 is exact, so this rounds once, as a fused multiply-add does.
    fused = (np.float64(lower) + np.float64(span) * u.astype(np.float64)).astype(np.float32)
    values = initial_values(create([INITIALIZERS["uniform"]]), 0, torch.arange(200), 1)[:, 0].numpy()
    assert np.array_equal(values, lower + span * u)
    assert np.count_nonzero(values != fused) > 10
    assert values[3].tobytes() != fused[3].tobytes()


@pytest.mark.parametrize("kind", INITIALIZERS)
def test_c05_values_depend_on_neither_order_nor_batch(kind):
    table = create([INITIALIZERS[kind]], seed=11)
    ids = torch.randint(-(2**63), 2**63 - 1, (500,), generator=torch.Generator().manual_seed(1))
    whole = initial_values(table, 0, ids, 37)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    assert torch.equal(initial_values(table, 0, ids[order], 37), whole[order])
    for i in range(0, 500, 97):
        assert torch.equal(initial_values(table, 0, ids[i : i + 1], 37)[0], whole[i])
    assert torch.equal(initial_values(table, 0, ids, 64)[:, :37], whole)
    assert initial_values(table, 0, ids[:0], 37).shape == (0, 37)


def test_c05_values_do_not_depend_on_the_other_tables():
    table = create(INITIALIZERS.values(), INITIALIZERS.keys(), 3)
    for t, (kind, args) in enumerate(INITIALIZERS.items()):
        alone = initial_values(create([args], [kind], 3), 0, torch.tensor(IDS), 9)
        assert torch.equal(initial_values(table, t, torch.tensor(IDS), 9), alone)


def test_uniform_stays_within_its_bounds_after_rounding():
    for lower, upper in [(-1.0, 3 * 2.0**-25), (1.0, 1.0 + 2.0**-23), (-1e-40, 1e-40), (3.0, 3.0), (-1.7e38, 1.7e38)]:
        values = initial_values(create([Args(mode=Mode.UNIFORM, lower=lower, upper=upper)]), 0, torch.arange(2000), 8)
        assert values.min() >= np.float32(lower) and values.max() <= np.float32(upper)


def test_missing_bounds_mean_zero_and_one_and_arguments_are_not_changed():
    for mode in (Mode.UNIFORM, Mode.TRUNCATED_NORMAL):
        args = Args(mode=mode)
        values = initial_values(create([args]), 0, torch.arange(100), 8)
        assert values.min() >= 0.0 and values.max() <= 1.0 and values.std() > 0.2
        assert args.lower is None and args.upper is None


def test_normal_without_deviation_is_the_mean():
    ids = torch.arange(10)
    assert (initial_values(create([Args(mode=Mode.NORMAL, mean=2.0, std_dev=0.0)]), 0, ids, 5) == 2.0).all()


# Mixed dims: alone in a block, odd (a 2-byte gap in half rows), whole blocks, not whole blocks.
FORMATS = [RowFormat(1, 0), RowFormat(3, 3), RowFormat(64, 1), RowFormat(100, 200), RowFormat(5, 2), RowFormat(2, 7)]


def row_as_bytes(store, row, t):
    """Return a row's bytes, found without the kernel's address rule."""
    chunk = store.chunks[t]
    skip = -chunk.data_ptr() % 64
    size = int(store.row_bytes[t])
    start = skip + (row - store.first_rows[t]) * size
    return chunk[start : start + size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_c09_every_byte_of_new_rows_is_written_and_no_other(dtype):
    store = RowStore([40] * 6, FORMATS, dtype, torch.device("cpu"))
    for chunk in store.chunks:
        chunk.fill_(0xA5)
    table = create(INITIALIZERS.values(), INITIALIZERS.keys(), 3)
    state_values = torch.tensor([0.0, 0.5, 0.1, -1.0, 3.0, 7.0])
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(-(2**63), 2**63 - 1, (6 * 40,), generator=generator)
    tables = torch.arange(6, dtype=torch.int32).repeat_interleave(40)
    first_rows = torch.tensor(store.first_rows, dtype=torch.int32)[tables.long()]
    rows = first_rows + torch.arange(40, dtype=torch.int32).repeat(6)
    order = torch.randperm(240, generator=generator)
    skipped = order[:50]
    given = rows.clone()
    given[skipped] = -1
    initialize(store, table, given[order], ids[order], tables[order], state_values)
    for i in range(240):
        t, row_format = int(tables[i]), FORMATS[tables[i]]
        content = row_as_bytes(store, int(rows[i]), t)
        if given[i] < 0:
            assert (content == 0xA5).all()
            continue
        weights = initial_values(table, t, ids[i : i + 1], row_format.dim)[0].to(dtype)
        expected = torch.zeros(content.numel(), dtype=torch.uint8)
        expected[: weights.nbytes] = weights.view(torch.uint8)
        state = torch.full((row_format.num_state,), float(state_values[t])).view(torch.uint8)
        start = row_format.state_offset(dtype)
        expected[start : start + state.numel()] = state
        assert torch.equal(content, expected)


def test_nothing_to_initialise_is_fine():
    store = RowStore([8], [RowFormat(4, 0)], torch.float32, torch.device("cpu"))
    empty = torch.empty(0, dtype=torch.int32)
    initialize(store, create([Args()]), empty, empty.long(), empty, torch.zeros(1))


INF = float("inf")


@pytest.mark.parametrize(
    ("mode", "fields", "words"),
    [
        (Mode.UNIFORM, {"lower": 1.0, "upper": 0.5}, "lower"),
        (Mode.UNIFORM, {"lower": 2.0}, "lower"),
        (Mode.UNIFORM, {"lower": -INF, "upper": 0.5}, "lower"),
        (Mode.UNIFORM, {"lower": 0.0, "upper": float("nan")}, "upper"),
        (Mode.UNIFORM, {"lower": -3e38, "upper": 3e38}, "upper - lower"),
        (Mode.NORMAL, {"std_dev": -1.0}, "std_dev"),
        (Mode.NORMAL, {"mean": 1e39}, "mean"),
        (Mode.TRUNCATED_NORMAL, {"lower": 0.5, "upper": 0.5}, "no probability"),
        (Mode.TRUNCATED_NORMAL, {"lower": 50.0, "upper": 60.0}, "no probability"),
        (Mode.TRUNCATED_NORMAL, {"lower": 1.0, "upper": -1.0}, "lower"),
        (Mode.TRUNCATED_NORMAL, {"std_dev": 0.0}, "std_dev"),
        (Mode.CONSTANT, {"value": INF}, "value"),
    ],
)
def test_bad_arguments_are_refused_by_name(mode, fields, words):
    args = Args(mode=mode)
    # Assigned later, they pass by the checks of the constructor.
    for field, value in fields.items():
        setattr(args, field, value)
    with pytest.raises(ValueError, match=words) as error:
        create([args], ["clicks"])
    assert "'clicks'" in str(error.value)


def test_arguments_of_the_wrong_type_are_refused_by_name():
    args = Args()
    args.lower = "0"
    with pytest.raises(TypeError, match="'clicks'.*lower"):
        create([args], ["clicks"])


def test_one_name_per_initializer():
    with pytest.raises(ValueError, match="names"):
        create([Args(), Args()], ["a"])


def test_no_tables_gives_empty_tensors():
    table = create([], [])
    assert table.modes.shape == (0,) and table.params.shape == (0, 6) and table.keys.shape == (0,)
