"""What a first user meets: the version, where warnings point, and messages that name the way out."""

from pathlib import Path

import pytest
import torch

import dynamicemb
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2
from tests.lookups import make_module, options


def test_the_version_is_that_of_the_project() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
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
