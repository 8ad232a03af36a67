"""Send every distinct id of a table once, with the number of its occurrences."""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def deduplicate(
    features: KeyedJaggedTensor, features_per_table: list[int], with_counts: bool
) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Keep one occurrence of every id per table.

    Args:
        features: ids ``[N]`` of F features and B samples; features of a table are beside each other.
        features_per_table: number of features of each table, sum F.
        with_counts: attach the number of occurrences as weights, see `pack_counts`. Attached to an empty batch too.

    Returns:
        ``(unique, reverse)``: ids ``[U]``, spread evenly over the bags of their table so that it stays a valid input,
        and i64 ``[N]``, which unique id an occurrence is.

    Example::

        one table, two features, B = 2, lengths [2, 0, 1, 1], ids [7, 5, 7, 7]
        -> ids [5, 7], lengths [1, 1, 0, 0], reverse [1, 0, 1, 1], counts [1, 3]

    Host sync: one per table on a GPU (`torch.unique`).
    """
    values, lengths, counts, reverse = [], [], [], []
    ids = features.values()
    length_per_key = features.length_per_key()
    batch_size = features.stride()
    first_feature, begin, num_unique = 0, 0, 0
    for num_features in features_per_table:
        end = begin + sum(length_per_key[first_feature : first_feature + num_features])
        unique, inverse, count = torch.unique(ids[begin:end], return_inverse=True, return_counts=True)
        values.append(unique)
        reverse.append(inverse + num_unique)
        counts.append(count)
        lengths.append(_spread(unique.numel(), num_features * batch_size, features.lengths()))
        num_unique += unique.numel()
        first_feature, begin = first_feature + num_features, end
    deduplicated = KeyedJaggedTensor(
        keys=features.keys(),
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        weights=pack_counts(torch.cat(counts)) if with_counts else None,
        stride=batch_size,
    )
    return deduplicated, torch.cat(reverse)


def _spread(num_ids: int, num_bags: int, like: torch.Tensor) -> torch.Tensor:
    """Return ``num_bags`` lengths that differ by at most one and sum to ``num_ids``; no ids need no bags."""
    share, rest = divmod(num_ids, num_bags) if num_bags else (0, 0)
    lengths = torch.full((num_bags,), share, dtype=like.dtype, device=like.device)
    lengths[:rest] += 1
    return lengths


def pack_counts(counts: torch.Tensor) -> torch.Tensor:
    """Return i64 counts as float64 with the same bits: FBGEMM's permutations move floating weights only.

    Nothing computes with the result, so that counts stay exact at any size.
    """
    return counts.to(torch.int64).view(torch.float64)


def unpack_counts(weights: torch.Tensor) -> torch.Tensor:
    """Return the i64 counts that `pack_counts` got."""
    return weights.view(torch.int64)
