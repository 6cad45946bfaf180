"""Exchange between tokens and heads around attention whose linear layers have whole weights (``attention="tokens"``).

A rank multiplies its own tokens by the whole weights of queries, keys and values. One all-to-all gives it all tokens of its
heads, and another returns the output of attention to the ranks of the tokens. As in DeepSpeed Ulysses (Jacobs et al., arXiv
2309.14509), with the ranks of the tensor axis::

    q k v   [m/p, n]  ->  [m, n/p]      behind the projections
    out     [m, n/p]  ->  [m/p, n]      in front of the output projection

A rank sends ``(p - 1)/p`` of its block, 1/p of what an all-gather of the tensor would send.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshfold.mesh import LayoutError, Mesh, Part
from meshfold.mesh.collectives import bind_exchange
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.modes import split_evenly


class HeadExchange(OnMesh):
    """The exchange of one layer: tensors of two dims, tokens and features.

    Where there are fewer key/value heads than ranks, each is sent to all ranks whose query heads read it.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], features: int, parts: Sequence[Part] = ()) -> None:
        """Args:
            mesh, axes: whose ranks share tokens and heads.
            features: of all heads together.
            parts: of the features, such as queries, keys and values, each split by heads; none: one part.

        Raises:
            LayoutError: for a part that cannot be split into this many blocks.
        """
        self.mesh, self.ranks = mesh, mesh.size(*axes)
        self.parts = tuple(parts) or (Part(features),)
        for part in self.parts:
            split_evenly(part.size * part.repeat, axes, mesh, f"a part of {part.size} of attention's features")
        if sum(part.size for part in self.parts) != features:
            raise LayoutError(
                f"the parts {tuple(part.size for part in self.parts)} of attention's features do not make up its {features}"
            )
        self._exchange = bind_exchange(mesh, 0, 0, axes)

    def to_heads(self, x: Tensor) -> Tensor:
        """``[m/p, n] -> [m, n/p]``: from this rank's tokens to this rank's heads."""
        if self.ranks == 1:
            return x
        blocks = []
        for part, piece in zip(self.parts, x.split([part.size for part in self.parts], 1), strict=True):
            block = piece.reshape(x.shape[0], self.ranks // part.repeat, -1)
            blocks.append(block.repeat_interleave(part.repeat, 1) if part.repeat > 1 else block)
        # Pack contiguously per destination rank.
        sent = torch.cat([block.movedim(1, 0) for block in blocks], 2)
        return self._exchange(sent).flatten(0, 1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """``[m, n/p] -> [m/p, n]``: from this rank's heads to this rank's tokens; of one part."""
        if self.ranks == 1:
            return x
        arrived = self._exchange(x.reshape(self.ranks, -1, x.shape[1]))
        return arrived.movedim(0, 1).flatten(1, 2)
