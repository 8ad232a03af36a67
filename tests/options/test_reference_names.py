"""Names and import paths of NVIDIA's package are here, or are listed as missing with the reason."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dynamicemb.dump_load import check_emb_collection_modules, get_dynamic_emb_module
from tests.support.lookups import make_module, options
from tests.support.ranks import RankPool, ranks  # noqa: F401
from tests.support.reference_names import LAZY, LEFT_OUT, PROVIDED, WITHOUT_TORCHREC

ROOT = Path(__file__).resolve().parents[2]

# Each module is the first of the package that its process imports. Forked: torch is imported once.
FRESH_IMPORTS = """
import importlib, json, os, sys, traceback
provided, light, lazy = json.load(sys.stdin)

def in_child(module, names, forbidden):
    pid = os.fork()
    if pid == 0:
        try:
            found = importlib.import_module(module)
            for name in names:
                getattr(found, name)
            loaded = [name for name in forbidden if name in sys.modules]
            assert not loaded, f"{module} imports {loaded}"
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]

import torch
failed = [m for m in light if in_child(m, [n for n in provided[m] if n not in lazy], ["torchrec", "fbgemm_gpu"])]
import torchrec, fbgemm_gpu
failed += [m for m in provided if in_child(m, provided[m], [])]
sys.exit(f"cannot import {failed}" if failed else 0)
"""


@pytest.mark.parametrize("module", PROVIDED)
def test_names_that_users_import_are_here(module: str) -> None:
    found = importlib.import_module(module)
    names = PROVIDED[module].split()
    assert [name for name in names if not hasattr(found, name)] == []
    assert len(set(names)) == len(names)
    if hasattr(found, "__all__"):
        assert set(names) <= set(found.__all__)
        assert set(found.__all__) <= set(dir(found))


def test_every_path_can_be_imported_first_and_options_need_no_torchrec() -> None:
    provided = {module: names.split() for module, names in PROVIDED.items()}
    told = json.dumps([provided, sorted(WITHOUT_TORCHREC), sorted(LAZY)])
    result = subprocess.run(
        [sys.executable, "-c", FRESH_IMPORTS], input=told, capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 0, result.stderr


def test_what_is_left_out_is_not_here_and_has_a_reason() -> None:
    for module, names in LEFT_OUT.items():
        there = importlib.util.find_spec(module) is not None
        for name, reason in names.items():
            assert len(reason.split()) > 5, (module, name)
            assert not reason.endswith("."), (module, name)
            assert name not in PROVIDED.get(module, "").split()
            if name == "*":
                assert not there, f"{module} is here: move its names to PROVIDED"
            elif there:
                assert not hasattr(importlib.import_module(module), name), f"{module}.{name} is here"


def test_the_page_about_moving_names_what_is_left_out() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `")]
    for module, names in LEFT_OUT.items():
        for name, reason in names.items():
            short = module.removeprefix("dynamicemb.")
            shown = f"`{short}`" if name == "*" else f"`{short}.{name}`"
            assert any(shown in cell and why.strip() == reason for cell, why in rows), (shown, reason)


def test_constants_have_the_documented_values() -> None:
    from dynamicemb import capacity, dynamicemb_config, types, utils

    assert types.MAX_BUCKET_CAPACITY == dynamicemb_config.MAX_BUCKET_CAPACITY == 2**63 - 1
    assert types.BUCKET_ALIGNMENT == types.DEMB_TABLE_ALIGN_SIZE == capacity.BUCKET_ALIGNMENT == 16
    assert utils.DTYPE_NUM_BYTES == {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}
    assert utils.TORCHREC_TYPES == {EmbeddingBagCollection, EmbeddingCollection}
    assert utils.torch_to_dyn_emb(torch_dtype=torch.float16) is dynamicemb_config.DynamicEmbDataType.Float16
    with pytest.raises(AttributeError, match="no attribute 'TORCHREC'"):
        utils.TORCHREC  # noqa: B018


def test_the_long_paths_have_the_same_classes() -> None:
    from dynamicemb import planner, shard
    from dynamicemb.planner import planner as long_planner
    from dynamicemb.shard import embedding, embeddingbag

    for short, long in ((planner, long_planner), (shard, embedding), (shard, embeddingbag)):
        assert all(getattr(short, name) is getattr(long, name) for name in long.__all__)


def test_modules_of_tables_are_found_in_a_model_and_in_its_parts() -> None:
    first, second = (make_module([options(capacity=16)], device="cpu") for _ in range(2))
    inner = nn.ModuleList([second])
    model = nn.ModuleDict({"a": first, "b": inner, "again": first})
    found: list[Any] = [None]
    assert check_emb_collection_modules(model, found) is found
    assert found == [None, first, second]
    visited = {id(first)}
    assert check_emb_collection_modules(module=model, ret_list=[], visited=visited) == [second]
    assert visited == {id(first), id(second)}
    assert check_emb_collection_modules(model, [], visited) == []
    assert check_emb_collection_modules(inner, []) == [second]
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got \[\]"):
        check_emb_collection_modules([], [])


# The classes of a sharded collection, by the names of the reference implementation


def describe_parts(rank: int, world_size: int, pooled: bool) -> list[bool]:
    from dynamicemb import batched_dynamicemb_compute_kernel as kernels
    from dynamicemb.planner import rw_sharding
    from tests.support.sharded_collection import constraint, shard

    lookup_class, sharding_class = rw_sharding.GroupedEmbeddingsLookup, rw_sharding.RwSequenceDynamicEmbeddingSharding
    kernel_class, kind, collection_class = kernels.BatchedDynamicEmbedding, EmbeddingConfig, EmbeddingCollection
    prefix = []
    if pooled:
        lookup_class = rw_sharding.GroupedPooledEmbeddingsLookup
        sharding_class = rw_sharding.RwPooledDynamicEmbeddingSharding
        kernel_class, kind, collection_class = (
            kernels.BatchedDynamicEmbeddingBag, EmbeddingBagConfig, EmbeddingBagCollection,
        )  # fmt: skip
        prefix = ["embedding_bags."]
    configs = [kind(name="t", num_embeddings=64, embedding_dim=8, feature_names=["f"])]
    built = shard(configs, {"t": constraint()})
    collection = built.collection
    lookup = getattr(collection._lookups[0], "module", collection._lookups[0])
    (kernel,) = lookup._emb_modules
    # As a collection of the user's own would use the classes.
    infos = type(collection).create_grouped_sharding_infos(
        collection_class(configs, device=torch.device("meta")), collection.module_sharding_plan, *prefix, {"seed": 1}
    )
    env = ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    (tables,) = infos.values()
    sharding = sharding_class(tables, env, torch.device("cpu"))
    ids = KeyedJaggedTensor(["f"], torch.tensor([3, -4, 3]), lengths=torch.tensor([1, 1, 1]))
    rows = sharding.create_lookup()(sharding.create_input_dist()(ids).wait().wait()).view(3, 8)
    return [
        isinstance(lookup, lookup_class),
        isinstance(kernel, kernel_class),
        isinstance(kernel.fused_optimizer, kernels.DynamicEmbeddingFusedOptimizer),
        check_emb_collection_modules(lookup, []) == built.modules == get_dynamic_emb_module(built.model),
        bool((rows != 0).all() and (rows[0] == rows[2]).all() and (rows[0] != rows[1]).all()),
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("pooled", [False, True])
def test_parts_of_a_sharded_collection_are_of_the_documented_classes(ranks: RankPool, pooled: bool) -> None:  # noqa: F811
    assert ranks.run(1, describe_parts, pooled) == [[True] * 5]
