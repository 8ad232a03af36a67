"""What tables hold, for tests of dumps: records per id, and the files of the reference format read by its rules."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from tests.support.lookups import bag_per_id, make_module, options

# Bits of weights, bits of state, scores in the user's order.
Record = tuple[bytes, bytes, tuple[int, ...]]
Records = dict[int, Record]


def records(module: BatchedDynamicEmbeddingTablesV2, table: str) -> Records:
    """Return everything a table holds, per id."""
    group = module.tables
    t = group.names.index(table)
    slots = group.scan(t)
    weights, state = group.read(t, group.index.rows[slots])
    ids, scores = module.export_scores(table, "cpu")
    assert torch.equal(ids, group.index.keys[slots].cpu())
    scores = scores.reshape(ids.numel(), -1 if ids.numel() else 1).tolist()
    rows = zip(ids.tolist(), weights.cpu().numpy(), state.cpu().numpy(), scores, strict=True)
    return {i: (w.tobytes(), s.tobytes(), tuple(score)) for i, w, s, score in rows}


def without_scores(found: Records) -> dict[int, tuple[bytes, bytes]]:
    return {i: (weights, state) for i, (weights, state, _) in found.items()}


def shift_between(before: Records, after: Records, column: int = 0) -> int:
    """Return by how much a column of scores is greater in ``after``, which must be the same for all ids."""
    assert before.keys() == after.keys()
    shifts = {after[i][2][column] - before[i][2][column] for i in before}
    assert len(shifts) == 1, f"scores moved by {sorted(shifts)[:5]}"
    return shifts.pop()


def trained(num_steps: int = 4, num_ids: int = 30, seed: int = 0, **arguments: Any) -> BatchedDynamicEmbeddingTablesV2:
    """Return a module that has trained on ids of both signs, with tables "a" and "b" or fewer, see `num_tables`."""
    num_tables, more = arguments.pop("num_tables", 2), arguments.pop("options", {})
    tables = [options(**{"dim": 5, "capacity": 256, **more}) for _ in range(num_tables)]
    module = make_module(tables, **{"optimizer": "adam", **arguments})
    train(module, num_steps, num_ids, seed)
    return module


def train(module: BatchedDynamicEmbeddingTablesV2, num_steps: int, num_ids: int = 30, seed: int = 0) -> list[float]:
    """Train on random ids, the same for the same seed; return the losses."""
    generator = torch.Generator().manual_seed(seed)
    extreme = torch.tensor([-(2**63), 2**63 - 1, 0, -1, -4])
    losses = []
    for _ in range(num_steps):
        near = torch.randint(-40, 40, (num_ids - 5,), generator=generator)
        ids = torch.cat([near, extreme]).repeat(module.feature_num).tolist()
        out = module(*bag_per_id(ids))
        loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() + (out**2).sum()
        loss.backward()
        losses.append(float(loss.detach()))
    return losses


def read_reference_files(folder: Path, table: str, dim: int, state_dim: int, columns: int = 1) -> dict[str, Any]:
    """Read a table by the rules of the reference format alone, without our code.

    Returns ``ids``, ``values``, ``scores``, ``state`` over all ranks, and ``meta``.
    """
    files = sorted(folder.glob(f"{table}_emb_keys.rank_*.world_size_*"))
    world_size = int(files[0].name.rsplit("_", 1)[1])
    assert {f.name for f in files} == {f"{table}_emb_keys.rank_{r}.world_size_{world_size}" for r in range(world_size)}
    parts: dict[str, list[np.ndarray]] = {"ids": [], "values": [], "scores": [], "state": []}
    for rank in range(world_size):
        suffix = f".rank_{rank}.world_size_{world_size}"
        keys = np.fromfile(folder / f"{table}_emb_keys{suffix}", "<i8")
        parts["ids"].append(keys)
        parts["values"].append(np.fromfile(folder / f"{table}_emb_values{suffix}", "<f4").reshape(len(keys), dim))
        parts["scores"].append(np.fromfile(folder / f"{table}_emb_scores{suffix}", "<i8").reshape(len(keys), columns))
        state = np.fromfile(folder / f"{table}_emb_opt_values{suffix}", "<f4")
        parts["state"].append(state.reshape(len(keys), state_dim))
    meta = json.loads((folder / f"{table}_opt_args.json").read_text())
    return {name: np.concatenate(arrays) for name, arrays in parts.items()} | {"meta": meta}


def load_quietly(module: BatchedDynamicEmbeddingTablesV2, *args: Any, **kwargs: Any) -> Any:
    """Load without the warning that there is no manifest."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no manifest.json")
        return module.load(*args, **kwargs)
