"""What a first user meets: the version, where warnings point, and messages that name the way out."""

from pathlib import Path

import pytest
import torch

import dynamicemb
from dynamicemb import DynamicEmbDump, DynamicEmbError, DynamicEmbLoad
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from dynamicemb.incremental_dump import incremental_dump
from tests.support.lookups import make_module, options


def test_the_version_is_that_of_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'version = "{dynamicemb.__version__}"' in text.splitlines()


@pytest.mark.parametrize("name", ["momentum", "eps", "max_gradient"])
def test_c27_a_warning_of_the_optimizer_points_at_the_line_that_makes_the_module(name: str) -> None:
    with pytest.warns(UserWarning, match=name) as recorded:
        BatchedDynamicEmbeddingTablesV2([options()], device="cpu", **{name: 0.5})
    assert [warning.filename for warning in recorded] == [__file__]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_c04_a_missing_gpu_is_named(device: str) -> None:
    with pytest.raises(ValueError, match=f"device='{device}': torch sees 0 CUDA devices; use device='cpu'"):
        BatchedDynamicEmbeddingTablesV2([options()], device=device)


def test_c04_decreasing_offsets_are_called_so_even_where_the_end_is_wrong() -> None:
    with pytest.raises(ValueError, match="offsets must not decrease, got 2 before 1 at position 2"):
        make_module()(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1]))


def test_the_folder_around_dumps_is_not_taken_for_one(tmp_path: Path) -> None:
    module = make_module()
    DynamicEmbDump(tmp_path / "monday", module)
    with (
        pytest.warns(UserWarning, match="no manifest.json"),
        pytest.raises(DynamicEmbError, match=r"holds no table 'model/.*it holds none; give the folder that .* wrote"),
    ):
        DynamicEmbLoad(tmp_path, module)


@pytest.mark.parametrize("first", [None, {"a": 1}, torch.nn.Linear(2, 2)])
def test_what_is_no_path_is_named_by_its_type(first: object) -> None:
    with pytest.raises(TypeError, match=f"^path must be a string or a path, got {type(first).__name__}$"):
        DynamicEmbDump(first, make_module())


def test_a_threshold_that_is_none_is_shown_in_a_few_words() -> None:
    with pytest.raises(ValueError, match="score_threshold must be an int >= 0") as caught:
        incremental_dump(make_module(), [torch.zeros(100)] * 100)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000
