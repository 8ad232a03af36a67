"""A model that contains dynamic tables compiles: the graph breaks around the lookup."""

import torch
from torch import nn

from dynamicemb import DynamicEmbTableOptions
from dynamicemb.batched_dynamicemb_tables import BatchedDynamicEmbeddingTablesV2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        options = [DynamicEmbTableOptions(dim=8, max_capacity=128)]
        self.tables = BatchedDynamicEmbeddingTablesV2(options, ["t"], learning_rate=0.1, seed=1)
        self.dense = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(ids, offsets)).relu()


def train(compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    call = torch.compile(model, backend="eager") if compiled else model
    for step in range(3):
        call(torch.arange(step, step + 6), torch.tensor([0, 2, 4, 6])).sum().backward()
    ids, weights = model.tables.export_keys_values("t", "cpu")
    return weights[ids.argsort()], model.dense.weight.grad


def test_compiled_model_trains_like_eager() -> None:
    for eager, compiled in zip(train(False), train(True), strict=True):
        assert torch.equal(eager, compiled)
