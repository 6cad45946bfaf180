"""Sharded layers: each holds this rank's blocks and communicates according to its plan."""

from meshfold.tensor_parallel.layers.embedding import Embedding, PatchEmbedding, PositionEmbedding
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.layers.log_probs import log_probs
from meshfold.tensor_parallel.layers.loss import CausalLMLoss, cross_entropy
from meshfold.tensor_parallel.layers.norm import LayerNorm, RMSNorm
from meshfold.tensor_parallel.layers.vocabulary import checked

__all__ = [
    "CausalLMLoss",
    "Embedding",
    "LayerNorm",
    "Linear",
    "PatchEmbedding",
    "PositionEmbedding",
    "RMSNorm",
    "checked",
    "cross_entropy",
    "log_probs",
]
