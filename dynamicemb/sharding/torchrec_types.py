"""The collections of TorchRec that may have dynamic tables."""

from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

TORCHREC_TYPES: set[type[nn.Module]] = {EmbeddingBagCollection, EmbeddingCollection}
