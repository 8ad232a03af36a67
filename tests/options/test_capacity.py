"""Capacity arithmetic, row sizes, initializer bounds, element types."""

import enum
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamicemb import dynamicemb_config as config
from dynamicemb.capacity import bucket_layout, growing_bucket_layout
from dynamicemb.dynamicemb_config import (
    MAX_BUCKET_CAPACITY,
    DynamicEmbDataType,
    DynamicEmbTableOptions,
    _sharded_table_bucket_layout,
    complete_initializer_args,
    get_constraint_capacity,
    get_sharded_table_capacity,
    get_table_row_bytes,
    get_table_value_bytes,
    row_bytes,
    state_offset_bytes,
)
from dynamicemb.table.layout import locate
from dynamicemb.types import DynamicEmbInitializerArgs, DynamicEmbInitializerMode

Mode = DynamicEmbInitializerMode
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BUCKETS = st.integers(1, 64).map(lambda n: 16 * n)


def table(num_embeddings=1000, dim=8, data_type="FP32"):
    return SimpleNamespace(num_embeddings=num_embeddings, embedding_dim=dim, data_type=data_type)


@pytest.mark.parametrize(
    ("rows", "world_size", "bucket", "capacity"),
    [(7, 1, 128, 128), (1001, 4, 128, 256), (1, 8, 16, 16), (128, 1, 128, 128), (129, 1, 128, 256)],
)
def test_sharded_capacity_examples(rows, world_size, bucket, capacity):
    assert get_sharded_table_capacity(table(rows), world_size, bucket) == capacity


@pytest.mark.parametrize(
    ("rows", "world_size", "capacity"),
    [
        # One bucket holds as many ids as slots; 86 rows of a rank are the first whose 129 slots need a second bucket.
        (1, 1, 128),
        (128, 1, 128),
        (129, 1, 256),
        (170, 1, 256),
        (171, 1, 384),
        (85 * 8, 8, 128),
        (86 * 8, 8, 256),
        (1024, 8, 256),
        (4096, 1, 6144),
        (5000, 1, 6144),
        (6145, 1, 6272),
        (10**6, 1, 1_000_064),
    ],
)
def test_small_tables_have_slots_to_spare_where_the_bucket_is_left_open(rows, world_size, capacity):
    assert get_sharded_table_capacity(table(rows), world_size, None) == capacity
    assert bucket_layout(-(-rows // world_size), None, world_size) == (capacity // 128, 128)


def test_spare_slots_of_a_table_that_grows_are_those_of_its_last_size():
    assert growing_bucket_layout(1000, 1000, None) == (12, 12, 128)
    assert growing_bucket_layout(500, 1000, None) == (6, 12, 128)
    assert growing_bucket_layout(100, 100, None, 2) == (2, 2, 128)
    assert growing_bucket_layout(1000, None, None) == (8, None, 128)
    # What was rounded, and has a bucket, is not rounded again.
    assert growing_bucket_layout(6 * 128, 12 * 128, 128) == (6, 12, 128)


@pytest.mark.parametrize("rows", [129, 200, 300, 1000, 1707, 4096])
def test_c03_as_many_ids_as_rows_find_a_place_in_a_small_table(rows):
    num_buckets, bucket = bucket_layout(rows, None)
    lost = 0
    for seed in range(20):
        ids = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, rows)
        lost += np.maximum(np.bincount(locate(ids, num_buckets, 8)[0], minlength=num_buckets) - bucket, 0).sum()
    # 0.0007 a table are expected at most.
    assert lost == 0


def test_single_bucket_examples():
    assert _sharded_table_bucket_layout(table(1001), 4, MAX_BUCKET_CAPACITY) == (1, 256)
    assert _sharded_table_bucket_layout(table(99), 1, MAX_BUCKET_CAPACITY) == (1, 112)


@given(st.integers(1, 10**12), st.integers(1, 1024), BUCKETS | st.just(MAX_BUCKET_CAPACITY))
def test_capacity_holds_every_row_and_wastes_less_than_a_bucket(rows, world_size, bucket):
    num_buckets, effective = _sharded_table_bucket_layout(table(rows), world_size, bucket)
    capacity = get_sharded_table_capacity(table(rows), world_size, bucket)
    share = (rows + world_size - 1) // world_size
    assert capacity == num_buckets * effective
    assert effective % 16 == 0
    if bucket == MAX_BUCKET_CAPACITY:
        assert (num_buckets, share <= capacity < share + 16) == (1, True)
    else:
        assert (effective, share <= capacity < share + bucket) == (bucket, True)


@pytest.mark.parametrize("bucket", [0, -16, 8, 100, MAX_BUCKET_CAPACITY - 1])
def test_bad_bucket_capacity_raises(bucket):
    for call in (
        lambda: get_sharded_table_capacity(table(), 1, bucket),
        lambda: DynamicEmbTableOptions(bucket_capacity=bucket),
        lambda: get_constraint_capacity(2**20, torch.float32, 8, "sgd", bucket),
    ):
        with pytest.raises(ValueError, match=f"bucket_capacity.*16.*{bucket}"):
            call()


@pytest.mark.parametrize("world_size", [0, -1])
def test_bad_world_size_raises(world_size):
    with pytest.raises(ValueError, match=f"world_size.*{world_size}"):
        get_sharded_table_capacity(table(), world_size, 128)


def test_align_to_table_size():
    assert [config.align_to_table_size(n) for n in (-5, 0, 1, 16, 17)] == [16, 16, 16, 16, 32]
    assert [config.align_to_table_size(n, alignment=10) for n in (0, 10, 11)] == [10, 10, 20]


@pytest.mark.parametrize(
    ("dtype", "dim", "num_state", "offset", "total"),
    [
        (torch.float32, 128, 0, 512, 512),
        (torch.float32, 128, 256, 512, 1536),
        (torch.float32, 128, 1, 512, 528),
        (torch.float32, 1, 0, 4, 16),
        (torch.float32, 5, 5, 20, 48),
        (torch.bfloat16, 3, 1, 8, 16),
        (torch.float16, 1, 3, 4, 16),
        (torch.bfloat16, 128, 256, 256, 1280),
        (torch.float16, 7, 0, 16, 16),
    ],
)
def test_row_bytes_examples(dtype, dim, num_state, offset, total):
    assert state_offset_bytes(dtype, dim) == offset
    assert row_bytes(dtype, dim, num_state) == total


@given(st.sampled_from(DTYPES), st.integers(1, 2048), st.integers(0, 4096))
def test_row_holds_weights_and_aligned_state_without_waste(dtype, dim, num_state):
    offset, total = state_offset_bytes(dtype, dim), row_bytes(dtype, dim, num_state)
    assert offset % 4 == 0
    assert dim * dtype.itemsize <= offset < dim * dtype.itemsize + 4
    assert total % 16 == 0
    assert offset + 4 * num_state <= total < offset + 4 * num_state + 16


@pytest.mark.parametrize(
    ("data_type", "optimizer", "per_row"),
    [
        ("FP32", "sgd", 4 * 6),
        ("FP32", "adam", 4 * 18),
        ("FP32", "exact_adagrad", 4 * 12),
        ("FP32", "exact_row_wise_adagrad", 4 * 6 + 16),
        ("BF16", "adam", 2 * 18),
        ("FP16", "exact_row_wise_adagrad", 2 * 6 + 16),
    ],
)
def test_value_bytes_are_the_nominal_ones(data_type, optimizer, per_row):
    assert get_table_value_bytes(table(1001, 6, data_type), optimizer, 4, 128) == per_row * 256 * 4
    # What options take that leave the bucket open, too.
    assert get_table_value_bytes(table(1001, 6, data_type), optimizer, 4) == per_row * 384 * 4
    assert get_table_value_bytes(table(99, 6, data_type), optimizer, 1, MAX_BUCKET_CAPACITY) == per_row * 112


@given(
    st.sampled_from(["FP32", "FP16", "BF16"]),
    st.sampled_from(["sgd", "adam", "exact_adagrad", "exact_row_wise_adagrad"]),
    st.integers(1, 256).map(lambda n: 8 * n),
)
def test_nominal_and_real_bytes_differ_only_by_the_width_of_state(data_type, optimizer, dim):
    nominal = get_table_value_bytes(table(1000, dim, data_type), optimizer, 2, 128)
    real = get_table_row_bytes(table(1000, dim, data_type), optimizer, 2, 128)
    wide_state = {"adam": 2 * dim, "exact_adagrad": dim}.get(optimizer, 0)
    extra = 0 if data_type == "FP32" else 2 * wide_state
    assert real == nominal + extra * 512 * 2


@given(st.integers(0, 2**24), st.sampled_from(DTYPES), st.integers(1, 64), BUCKETS)
def test_constraint_capacity_fits_and_is_maximal(memory, dtype, dim, bucket):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = get_constraint_capacity(memory, dtype, dim, "adam", bucket)
    row = row_bytes(dtype, dim, 2 * dim)
    assert rows % bucket == 0
    assert (rows + bucket) * row > memory
    if caught:
        assert rows == bucket
        assert bucket * row > memory
        assert str(memory) in str(caught[0].message)
    else:
        assert bucket <= rows
        assert rows * row <= memory


def test_constraint_capacity_of_a_single_bucket():
    assert get_constraint_capacity(50 * 512, torch.float32, 128, "sgd", MAX_BUCKET_CAPACITY) == 48


def test_open_uniform_bounds_are_filled_from_the_table_size():
    args = DynamicEmbInitializerArgs()
    filled = complete_initializer_args(args, embedding_config=table(400))
    assert (filled.lower, filled.upper) == (-0.05, 0.05)
    assert (args.lower, args.upper) == (None, None)
    filled = complete_initializer_args(args)
    assert (filled.lower, filled.upper) == (0.0, 1.0)


def test_given_uniform_bounds_are_kept():
    filled = complete_initializer_args(DynamicEmbInitializerArgs(lower=-3.0), embedding_config=table(400))
    assert (filled.lower, filled.upper) == (-3.0, 0.05)
    closed = DynamicEmbInitializerArgs(lower=-1.0, upper=1.0)
    assert complete_initializer_args(closed, embedding_config=table(400)) is closed
    with pytest.raises(ValueError, match=r"lower=2.0, upper=0.05"):
        complete_initializer_args(DynamicEmbInitializerArgs(lower=2.0), embedding_config=table(400))


@pytest.mark.parametrize("mode", [m for m in Mode if m is not Mode.UNIFORM])
def test_other_initializers_are_left_alone(mode):
    args = DynamicEmbInitializerArgs(mode=mode)
    assert complete_initializer_args(args, embedding_config=table()) is args


def test_data_types_by_member_and_by_name():
    expected = {
        "FP32": torch.float32,
        "FP16": torch.float16,
        "BF16": torch.bfloat16,
        "INT64": torch.int64,
        "INT32": torch.int32,
        "INT8": torch.int8,
        "UINT8": torch.uint8,
    }
    members = enum.Enum("DataType", {name: name for name in expected})
    for name, dtype in expected.items():
        assert config.data_type_to_dtype(name) is config.data_type_to_dtype(members(name)) is dtype
        assert config.dyn_emb_to_torch(config.data_type_to_dyn_emb(members(name))) is dtype
    for bad in ("INT4", None, torch.float32):
        with pytest.raises(ValueError, match="data_type.*FP32"):
            config.data_type_to_dtype(bad)


def test_data_types_of_torchrec():
    data_types = pytest.importorskip("torchrec.types").DataType
    assert config.data_type_to_dtype(data_types.BF16) is torch.bfloat16
    assert config.data_type_to_dtype(data_types.FP32) is torch.float32


@pytest.mark.parametrize("member", DynamicEmbDataType)
def test_element_types_round_trip(member):
    assert config.torch_to_dyn_emb(config.dyn_emb_to_torch(member)) is member
    size = torch.empty(1, dtype=member.value).element_size()
    assert config.dtype_to_bytes(member.value) == size


def test_bad_element_types_raise():
    with pytest.raises(ValueError, match="complex64"):
        config.torch_to_dyn_emb(torch.complex64)
    with pytest.raises(TypeError, match="'float32'"):
        config.dtype_to_bytes("float32")
    with pytest.raises(TypeError, match="torch.float32"):
        config.dyn_emb_to_torch(torch.float32)
