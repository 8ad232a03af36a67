"""A rank without samples: TorchRec and FBGEMM cannot do without.

TorchRec's sequence collections reshape by the batch size, and FBGEMM's bucketize of static row-wise tables fails on
GPUs for a batch of no samples. So such a rank sends one sample without ids, and drops its result.
"""

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def pad_empty_batch(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch of one sample without ids for a batch of none; other batches as they are."""
    if features.variable_stride_per_key():
        batch_size = max(features.stride_per_key(), default=0)
    else:
        batch_size = features.stride()
    if batch_size > 0:
        return features
    lengths = features.lengths().new_zeros(len(features.keys()))
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=lengths,
        stride=1,
        # Sums that are known spare the host of a GPU a wait.
        length_per_key=features.length_per_key_or_none(),
    )


def sequences_without_padding(outputs: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    """Return the outputs of a padded batch with no samples again; values keep their place in autograd."""
    return {
        name: JaggedTensor(
            values=jagged.values(),
            weights=jagged.weights_or_none(),
            lengths=torch.zeros_like(jagged.lengths())[:0],
        )
        for name, jagged in outputs.items()
    }


def bags_without_padding(pooled: KeyedTensor) -> KeyedTensor:
    """Return the outputs of a padded batch ``[1, total_D]`` with no samples again, ``[0, total_D]``."""
    return KeyedTensor(
        keys=pooled.keys(), length_per_key=pooled.length_per_key(), values=pooled.values()[:0], key_dim=1
    )
