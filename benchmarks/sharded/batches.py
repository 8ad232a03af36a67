"""Batches of a sharded case, the same for everyone who is compared."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.sharded.cases import ShardedCase
from benchmarks.workloads import draw_ranks

_SEED = 7
# Ids of a bag while tables are filled, and of a batch of each table.
_FILL_LENGTH = 64
_FILL_IDS = {"cpu": 65_536, "cuda": 1 << 18}


def draw(case: ShardedCase, count: int, rank: int, device: torch.device) -> list[KeyedJaggedTensor]:
    """Return so many random batches of a rank.

    Ranks of the power law are spread over the ids by a permutation of each table: an id's number says nothing about
    where its row is.
    """
    order = torch.Generator(device).manual_seed(_SEED)
    spread = [torch.randperm(rows, generator=order, device=device) for rows in case.rows]
    random = torch.Generator(device).manual_seed(_SEED + 1 + rank)
    lengths = torch.tensor(case.lengths, device=device).repeat_interleave(case.batch_size)
    batches = []
    for _ in range(count):
        drawn = [
            ids[draw_ranks(case.alpha, ids.numel(), case.batch_size * length, random)]
            for ids, length in zip(spread, case.lengths, strict=True)
        ]
        batches.append(KeyedJaggedTensor(keys=case.features, values=torch.cat(drawn), lengths=lengths))
    return batches


def fresh(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch as a data loader would give it: without the sums of lengths that a first use leaves in it.

    TorchRec waits for the device to learn them, in every step of a user.
    """
    return KeyedJaggedTensor(keys=batch.keys(), values=batch.values(), lengths=batch.lengths(), stride=batch.stride())


def filling(case: ShardedCase, device: torch.device) -> list[KeyedJaggedTensor]:
    """Return batches that have every id of every table once; a table that is done has empty bags."""
    batches = []
    for begin in range(0, max(case.rows), _FILL_IDS[case.device]):
        ends = [min(rows, begin + _FILL_IDS[case.device]) for rows in case.rows]
        parts = [torch.arange(min(begin, end), end, device=device) for end in ends]
        bags = max(1, -(-max(part.numel() for part in parts) // _FILL_LENGTH))
        starts = torch.arange(bags, device=device) * _FILL_LENGTH
        lengths = [(part.numel() - starts).clamp(0, _FILL_LENGTH) for part in parts]
        batches.append(KeyedJaggedTensor(keys=case.features, values=torch.cat(parts), lengths=torch.cat(lengths)))
    return batches
