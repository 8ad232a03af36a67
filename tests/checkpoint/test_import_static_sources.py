"""Files and folders that static tables come from, read row by row, whole and damaged."""

import io
import pickle
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dynamicemb import CheckpointCorruptError, DynamicEmbError, import_static
from dynamicemb.checkpoint.ranks import Ranks
from dynamicemb.checkpoint.static.folder import StoredPiece, entries_of_folder
from dynamicemb.checkpoint.static.matrix import matrix_of
from dynamicemb.checkpoint.static.row_ids import RowIds
from dynamicemb.checkpoint.static.stream import Stream
from tests.checkpoint.test_import_static_tables import DIM, as_static, held, module, rows_of, train

# The folders of these tests are written and read by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def saved(path: Path, **more: Any) -> str:
    """Write a folder with a table that was trained with Adagrad."""
    first = module("exact_adagrad")
    train(first, range(4))
    weights, state = as_static(first, 20, "ebc.")
    dcp.save({"model": weights, "optim": state, **more}, checkpoint_id=str(path / "step"))
    return str(path / "step")


class Holder(torch.nn.Module):
    def __init__(self, tables: torch.nn.Module) -> None:
        super().__init__()
        self.ebc = tables


def test_a_folder_has_rows_and_state(tmp_path: Path) -> None:
    folder = saved(tmp_path, step=torch.tensor(4), name="run")
    first = module("exact_adagrad")
    train(first, range(4))
    weights, state = as_static(first, 20, "ebc.")
    from_folder, from_memory = module("exact_adagrad"), module("exact_adagrad")
    report = import_static(Holder(from_folder), Path(folder))
    import_static(Holder(from_memory), weights, state)
    assert report["model.ebc"]["t"].has_state
    for a, b in zip(train(from_folder, range(4, 8)), train(from_memory, range(4, 8)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("number", [{"t.iter": torch.tensor([4])}, {"step": torch.tensor(4.0)}])
def test_a_folder_may_have_the_steps_of_adam(tmp_path: Path, number: dict[str, torch.Tensor]) -> None:
    first = module("adam")
    train(first, range(4))
    weights, state = as_static(first, 20, "ebc.")
    counted = {"state": {key: items | number for key, items in state["state"].items()}}
    dcp.save({"model": weights, "optim": state}, checkpoint_id=str(tmp_path / "without"))
    dcp.save({"model": weights, "optim": counted}, checkpoint_id=str(tmp_path / "with"))
    tables = module("adam")
    with pytest.raises(ValueError, match="pass step="):
        import_static(Holder(tables), tmp_path / "without")
    import_static(Holder(tables), tmp_path / "with")
    assert all(torch.equal(a, b) for a, b in zip(train(tables, range(4, 8)), train(first, range(4, 8)), strict=True))


def test_a_file_of_plain_tensors(tmp_path: Path) -> None:
    first = module("exact_adagrad")
    train(first, range(4))
    weights, state = as_static(first, 20, "ebc.")
    torch.save({"model": weights, "optim": state}, tmp_path / "both.pt")
    torch.save(weights, tmp_path / "weights.pt")
    torch.save(state, tmp_path / "state.pt")
    whole, apart = module("exact_adagrad"), module("exact_adagrad")
    assert import_static(Holder(whole), tmp_path / "both.pt")["model.ebc"]["t"].has_state
    import_static(Holder(apart), tmp_path / "weights.pt", tmp_path / "state.pt")
    assert all(torch.equal(a, b) for a, b in zip(train(whole, range(4)), train(apart, range(4)), strict=True))
    torch.save(first, tmp_path / "module.pt")
    with pytest.raises(ValueError, match="no file of plain tensors .* load it yourself"):
        import_static(Holder(whole), tmp_path / "module.pt")
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not a state_dict"):
        import_static(Holder(whole), tmp_path / "list.pt")


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is nothing at"):
        import_static(module(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no file '.metadata'"):
        import_static(module(), tmp_path)
    with pytest.raises(ValueError, match="is a URL"):
        import_static(module(), "s3://bucket/run")
    (tmp_path / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(CheckpointCorruptError, match="metadata of a checkpoint"):
        import_static(module(), tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "at least .* bytes, got no file"),
        ("short", "at least .* bytes"),
        ("header", "a tensor for model.ebc"),
    ],
)
def test_a_damaged_folder_is_refused_before_the_table_changes(tmp_path: Path, damage: str, message: str) -> None:
    folder = saved(tmp_path)
    (file,) = Path(folder).glob("*.distcp")
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "header":
        file.write_bytes(bytes(len(data)))
    tables = module("exact_adagrad")
    tables.insert("t", torch.tensor([-5]), torch.ones(1, DIM))
    with pytest.raises(CheckpointCorruptError, match=f"distcp.*{message}"):
        import_static(Holder(tables), folder)
    assert tables.contains("t", torch.tensor([-5])).all()


def test_a_folder_that_cannot_be_read_later_leaves_an_empty_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    tables = module("exact_adagrad")
    import_static(Holder(tables), folder)

    def fail(*args: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr("dynamicemb.checkpoint.static.matrix.Part.read", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            import_static(Holder(tables), folder)
    assert tables.stats()["t"]["size"] == 0
    import_static(Holder(tables), folder)
    assert tables.stats()["t"]["size"] == 20


def test_tensors_of_extensions_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = Path(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["zstd"]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(DynamicEmbError, match="written with the extensions"):
        import_static(Holder(module("exact_adagrad")), folder)


def test_a_folder_is_read_without_the_whole_table_in_memory(tmp_path: Path) -> None:
    weights = rows_of(200_000, 16)
    dcp.save(
        {"embeddings.t.weight": weights, "other": torch.zeros(3, 4)}, checkpoint_id=str(tmp_path / "big"), no_dist=True
    )
    (entry,) = [e for key, e in entries_of_folder(str(tmp_path / "big")).by_key.items() if key.startswith("emb")]
    matrix = matrix_of(entry, [entry.described], 200_000, Ranks(), "t")
    stream = Stream([matrix], RowIds(200_000), torch.zeros_like, Ranks())
    seen, largest = [], 0
    for block in stream.blocks():
        tracemalloc.start()
        _, ids, (rows,) = stream.exchange(block, stream.read(block))
        largest = max(largest, tracemalloc.get_traced_memory()[1], block.num_rows * 64)
        tracemalloc.stop()
        assert torch.equal(rows, weights[ids])
        seen.append(ids)
    assert torch.equal(torch.cat(seen), torch.arange(200_000)) and len(seen) == 4
    # The bytes of a block, of 12.8 MB in all.
    assert largest < 5_000_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_folders_of_all_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = rows_of(20).to(dtype)
    # A view of a larger tensor is written as it is seen.
    dcp.save(
        {"embeddings.t.weight": torch.cat([weights, weights + 1], 1)[:, :DIM]},
        checkpoint_id=str(tmp_path / "s"),
        no_dist=True,
    )
    tables = module()
    import_static(tables, str(tmp_path / "s"))
    assert torch.equal(held(tables), weights.float())


def test_a_piece_is_found_inside_a_larger_storage_and_file(tmp_path: Path) -> None:
    rows, stream = rows_of(20), io.BytesIO()
    torch.save(rows[3:7], stream)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(b"before" + stream.getvalue() + b"behind")
    place = SimpleNamespace(offset=6, length=len(stream.getvalue()))
    piece = StoredPiece(path, place, "t", (10, 0), (4, DIM))
    piece.check()
    assert torch.equal(piece.read(11, 13), rows[4:6]) and piece.read(12, 12).shape == (0, DIM)
    with pytest.raises(CheckpointCorruptError, match="a contiguous tensor of shape .5, 4. for t"):
        StoredPiece(path, place, "t", (10, 0), (5, DIM)).check()
    path.write_bytes(b"before" + stream.getvalue()[:800])
    with pytest.raises(CheckpointCorruptError, match="bytes for t"):
        piece.read(10, 14)
