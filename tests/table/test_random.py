"""The random numbers themselves: Philox, table keys, the normal quantile, and what the streams look like."""

import math
import statistics

import numpy as np
import pytest
import torch
from numba import njit

from dynamicemb.table.cpu.initialize import initial_values, normal_quantile
from dynamicemb.table.cpu.philox import philox4x32, philox4x32_reference
from dynamicemb.table.initializers import InitializerTable, fnv1a64, table_key
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

ONES = 0xFFFFFFFF

# (key, counter, words): the known answers published with Random123.
KNOWN_ANSWERS = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@njit
def compiled_philox(key, counter):
    return philox4x32(key[0], key[1], counter[0], counter[1], counter[2], counter[3])


def philox_on_arrays(key, counter):
    return tuple(int(w) for w in compiled_philox(np.array(key, dtype=np.uint32), np.array(counter, dtype=np.uint32)))


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(key, counter, words):
    assert philox4x32_reference(key, counter) == words
    assert philox_on_arrays(key, counter) == words


def test_compiled_philox_equals_the_reference():
    rng = np.random.default_rng(1)
    for _ in range(500):
        words = [int(w) for w in rng.integers(0, 2**32, 6)]
        key, counter = tuple(words[:2]), tuple(words[2:])
        assert philox_on_arrays(key, counter) == philox4x32_reference(key, counter)


def test_the_worked_example_of_the_page():
    key, id_ = table_key(0, "user"), 12345678901234567
    words = [philox4x32_reference((key % 2**32, key >> 32), (id_ % 2**32, id_ >> 32, c2, 0)) for c2 in range(2)]
    assert words[0] == (0xA9EFF1B1, 0xC404A139, 0x2BDBD814, 0xA0A533ED)
    assert words[1] == (0x9696B5F8, 0xA5244F03, 0xB41EB0E4, 0x1726F6C0)
    args = [
        DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.UNIFORM, lower=-0.1, upper=0.3),
        DynamicEmbInitializerArgs(DynamicEmbInitializerMode.TRUNCATED_NORMAL, 0.0, 0.5, -1.0, 1.5),
        DynamicEmbInitializerArgs(DynamicEmbInitializerMode.TRUNCATED_NORMAL, 0.0, 1.0, 5.0, 6.0),
    ]
    uniform, wide, tail = InitializerTable.create(args, ["user"] * 3, 0, "cpu").params.tolist()
    assert np.array(uniform[:2], dtype=np.float32).view(np.uint32).tolist() == [0xBDCCCCCD, 0x3ECCCCCD]
    # erfc of another library may differ in the last bits.
    ends = [float.fromhex(x) for x in ("0x1.61de1f985b5dcp-10", "0x1.f3a9292ecee62p-1")]
    assert wide[:2] == [0.0, -0.5] and wide[2:4] == pytest.approx(ends, rel=1e-13) and wide[4:] == [-1.0, 1.5]
    ends = [float.fromhex(x) for x in ("0x1.0f30ef0092d57p-30", "0x1.32bafe3232f11p-22")]
    assert tail[:2] == [0.0, -1.0] and tail[2:4] == pytest.approx(ends, rel=1e-13) and tail[4:] == [5.0, 6.0]


def test_fnv1a64_gives_the_published_answers():
    assert fnv1a64("") == 0xCBF29CE484222325
    assert fnv1a64("a") == 0xAF63DC4C8601EC8C
    assert fnv1a64("foobar") == 0x85944171F73967E8


def test_table_key_is_pinned():
    assert table_key(0, "user") == 0x37543DE63AA9BAC7
    assert table_key(0xDEADBEEFCAFEBABE, "user") == 0xA51E45B88DF32EAD
    assert table_key(0, "item_é") == 0x42DB4FD22F4E7781
    assert table_key(0xDEADBEEFCAFEBABE, "item_é") == 0x1DB89DDD4195338B


def test_seed_counts_modulo_two_to_the_64():
    assert table_key(-1, "user") == table_key(2**64 - 1, "user")
    assert table_key(2**64 + 5, "user") == table_key(5, "user")


def test_normal_quantile_is_as241():
    # The standard library implements the same algorithm; it may be compiled with fused multiply-add.
    probabilities = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 3001), 10.0 ** -np.arange(1.0, 307.0)])
    for p in probabilities:
        assert normal_quantile(p) == pytest.approx(statistics.NormalDist().inv_cdf(p), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("z", [-37.0, -20.0, -8.0, -5.5, -3.0, -1.0, -0.01, 0.0, 0.3, 2.0, 5.0])
def test_normal_quantile_inverts_the_distribution_function(z):
    assert normal_quantile(0.5 * math.erfc(-z / math.sqrt(2.0))) == pytest.approx(z, rel=1e-9, abs=1e-12)


def samples(mode, num_ids=4000, dim=64, **kwargs):
    args = DynamicEmbInitializerArgs(mode=mode, **kwargs)
    initializers = InitializerTable.create([args], ["user"], 3, "cpu")
    # Consecutive ids differ in few bits: the hardest case for a weak generator.
    return initial_values(initializers, 0, torch.arange(num_ids), dim).double().numpy()


def normal_cdf(x):
    return np.array([0.5 * math.erfc(-v / math.sqrt(2.0)) for v in x])


def kolmogorov_smirnov(values, cdf):
    """Return sqrt(n) times the largest distance between the empirical and the given distribution function."""
    values = np.sort(values)
    expected, n = cdf(values), len(values)
    above = np.max(np.arange(1, n + 1) / n - expected)
    below = np.max(expected - np.arange(n) / n)
    return math.sqrt(n) * max(above, below)


# P(sqrt(n) D > 1.95) = 0.001; the streams are fixed, so these never flake.
KS_BOUND = 1.95


def test_uniform_values_look_uniform():
    values = samples(DynamicEmbInitializerMode.UNIFORM, lower=-2.0, upper=4.0)
    n = values.size
    assert abs(values.mean() - 1.0) < 4 * math.sqrt(3.0 / n)
    assert abs(values.std() - math.sqrt(3.0)) < 4 * math.sqrt(3.0) * math.sqrt(0.2 / n)
    assert kolmogorov_smirnov(values.ravel()[:20000], lambda x: (x + 2.0) / 6.0) < KS_BOUND


def test_normal_values_look_normal():
    values = samples(DynamicEmbInitializerMode.NORMAL, mean=0.5, std_dev=2.0)
    n = values.size
    assert abs(values.mean() - 0.5) < 4 * 2.0 / math.sqrt(n)
    assert abs(values.std() - 2.0) < 4 * 2.0 / math.sqrt(2 * n)
    assert kolmogorov_smirnov(values.ravel()[:20000], lambda x: normal_cdf((x - 0.5) / 2.0)) < KS_BOUND


@pytest.mark.parametrize(("lower", "upper"), [(-1.0, 2.0), (-3.0, -1.0), (5.0, 6.0), (-30.0, -29.0), (30.0, 31.0)])
def test_truncated_normal_values_have_the_truncated_distribution(lower, upper):
    values = samples(DynamicEmbInitializerMode.TRUNCATED_NORMAL, 400, 50, lower=lower, upper=upper).ravel()
    sign = -1.0 if lower + upper > 0 else 1.0
    ends = normal_cdf(np.sort([sign * lower, sign * upper]))

    def cdf(x):
        below = (normal_cdf(sign * x) - ends[0]) / (ends[1] - ends[0])
        return below if sign > 0 else 1.0 - below

    assert values.min() >= lower and values.max() <= upper
    # 30 standard deviations out, float32 itself has few values where the density is high.
    assert len(np.unique(values)) > 15000
    assert kolmogorov_smirnov(values, cdf) < KS_BOUND


def test_columns_ids_and_tables_are_uncorrelated():
    args = DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL)
    initializers = InitializerTable.create([args, args], ["t_0", "t_1"], 0, "cpu")
    first, second = (initial_values(initializers, t, torch.arange(20000), 8).double().numpy() for t in range(2))
    bound = 5 / math.sqrt(20000)
    between_columns = np.corrcoef(first.T) - np.eye(8)
    between_tables = np.corrcoef(first.T, second.T)[:8, 8:]
    between_neighbours = np.corrcoef(first[:-1].T, first[1:].T)[:8, 8:]
    assert max(np.abs(c).max() for c in (between_columns, between_tables, between_neighbours)) < bound


def test_no_two_tables_share_a_stream():
    keys = {table_key(seed, f"t_{i}") for seed in range(100) for i in range(100)}
    assert len(keys) == 10000
