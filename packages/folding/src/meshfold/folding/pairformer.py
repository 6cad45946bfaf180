"""The Pairformer (Algorithms 17 and 24 of AlphaFold 3), with the parameter names of OpenFold 3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.attention import pair_bias
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.residues import attend_residues, attend_residues_cost, send_bias
from meshfold.folding.axial.sizes import Sizes, join_cost, split_cost
from meshfold.folding.dropout import name_dropouts
from meshfold.folding.evoformer import PairStack
from meshfold.folding.memory import add_update, own_tensor, run_block
from meshfold.folding.primitives import Attention, LayerNorm, Linear
from meshfold.folding.shapes import flat, flat_mask
from meshfold.folding.stack import Shapes, Stack
from meshfold.folding.transitions import SwiGLUTransition
from meshfold.tensor_parallel import CostEntry


class AttentionPairBias(nn.Module):
    """Attention over a single representation with a bias of pairs, Algorithm 24 without conditioning."""

    def __init__(self, c_s: int, c_z: int, c_hidden: int, no_heads: int) -> None:
        """Args:
        c_s, c_z: channels of the single representation and of pairs.
        c_hidden: channels of a head.
        no_heads: heads.
        """
        super().__init__()
        self.layer_norm_a = LayerNorm(c_s)
        self.layer_norm_z = LayerNorm(c_z)
        self.linear_z = Linear(c_z, no_heads, bias=False, init="normal")
        self.mha = Attention(c_s, c_hidden, no_heads, biased=False, q_bias=True)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes
        keys = sizes.single(axes, self.mha.linear_o.in_features)
        return attend_residues_cost(axes, sizes.pair(axes, self.mha.no_heads), keys)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update: ``* r c_s``, r over all axes; ``z``: this rank's block; ``mask``: ``* r``, whole on every rank.

        ``into``: what the update is added to, in place, and returned; without gradients only.
        """
        lead, axes = s.shape[:-2], self.axes
        s, mask = flat(s, 2), flat_mask(mask, lead, 1)
        coming = send_bias(axes, pair_bias(axes.memory, self.layer_norm_z, self.linear_z, flat(z, 3)))
        x = self.layer_norm_a(s)
        q, k, v, logits = self.mha.project(x)
        y = self.mha.output(attend_residues(axes, q, k, v, coming, mask), x, logits)
        y = y.view(*lead, *y.shape[1:])
        return y if into is None else into.add_(y)


class PairFormerBlock(nn.Module):
    """A block of the Pairformer."""

    def __init__(
        self,
        c_s: int,
        c_z: int,
        c_hidden_pair_bias: int,
        no_heads_pair_bias: int,
        c_hidden_mul: int,
        c_hidden_pair_att: int,
        no_heads_pair: int,
        transition_n: int,
        pair_dropout: float,
    ) -> None:
        """Args:
        c_s, c_z: channels of the single representation and of pairs.
        c_hidden_pair_bias: channels of a head in the attention over residues.
        no_heads_pair_bias: heads there.
        c_hidden_mul: channels of edges in triangle multiplications.
        c_hidden_pair_att: channels of a head in triangle attentions.
        no_heads_pair: heads there.
        transition_n: hidden width of transitions, in channels.
        pair_dropout: dropout of the pair updates but the transition's.
        """
        super().__init__()
        self.pair_stack = PairStack(
            c_z,
            c_hidden_mul,
            c_hidden_pair_att,
            no_heads_pair,
            transition_n,
            pair_dropout,
            transition=SwiGLUTransition,
            biased=False,
            transposed_bias=True,
        )
        self.attn_pair_bias = AttentionPairBias(c_s, c_z, c_hidden_pair_bias, no_heads_pair_bias)
        self.single_transition = SwiGLUTransition(c_s, transition_n)
        self.axes: Axes = WHOLE

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        single_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        mask_transitions: bool = True,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the next single representation and pair tensor.

        Args:
            s: ``* r c_s``, this rank's residues, split over all axes.
            z: ``* r r c_z``, this rank's block.
            single_mask: ``* r``, whole on every rank and without padding; None: all count, and nothing is padded.
            pair_mask: ``* r r``, likewise.
            mask_transitions: multiply transitions by the masks.
            in_place: change ``s`` and ``z`` and return them; without gradients only.
        """
        made: tuple[Tensor, Tensor] = run_block(
            self.axes.memory, self._run, s, z, single_mask, pair_mask, mask_transitions, in_place
        )
        return made

    def _run(
        self,
        s: Tensor,
        z: Tensor,
        single_mask: Tensor | None,
        pair_mask: Tensor | None,
        mask_transitions: bool,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        z = self.pair_stack(z, pair_mask, mask_transitions, in_place)
        s = add_update(s, self.attn_pair_bias, s, z, single_mask, in_place=in_place)
        own = None
        if mask_transitions and single_mask is not None:
            mask = flat_mask(single_mask, s.shape[:-2], 1)
            assert mask is not None
            own = self.axes.take(mask, 1, self.axes.all).view(s.shape[:-1])
        return add_update(s, self.single_transition, s, own, in_place=in_place), z


class PairFormerStack(Stack):
    """Algorithm 17 on whole tensors: each rank takes its block before it, and all ranks gather the result."""

    def __init__(self, no_blocks: int, c_s: int, c_z: int, **sizes: Any) -> None:
        """``no_blocks``: blocks; the rest as for :class:`PairFormerBlock`."""
        super().__init__(no_blocks=no_blocks, c_s=c_s, c_z=c_z, **sizes)
        self.c_s, self.c_z = c_s, c_z
        self.blocks = nn.ModuleList(PairFormerBlock(c_s, c_z, **sizes) for _ in range(no_blocks))
        name_dropouts(self)

    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        b, r = sizes.batch, sizes.residues
        tensors: Shapes = {"s": (b, r, self.c_s), "z": (b, r, r, self.c_z)}
        return tensors, {"single_mask": (b, r), "pair_mask": (b, r, r)}

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        axes, r = self.axes, sizes.residues
        s, z = sizes.single(axes, self.c_s), sizes.pair(axes, self.c_z)
        one, two = [(axes.all, r)], [(axes.rows, r), (axes.columns, r)]
        entries = split_cost(axes, "s", s, *one) + split_cost(axes, "z", z, *two)
        return entries + join_cost(axes, "s", s, *one) + join_cost(axes, "z", z, *two)

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        single_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        mask_transitions: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``z``, whole; arguments as for a block, whole."""
        r = s.shape[-2]
        self.choose_memory(z, residues=r, batch=s.shape[:-2].numel())
        axes = self.axes
        if axes.is_split:  # padding is told from the rest by the masks
            single_mask = s.new_ones(s.shape[:-1]) if single_mask is None else single_mask
            pair_mask = z.new_ones(z.shape[:-1]) if pair_mask is None else pair_mask
        s = own_tensor(axes.split(s, (-2, axes.all)), s)
        z = own_tensor(axes.split(z, (-3, axes.rows), (-2, axes.columns)), z)
        in_place = not torch.is_grad_enabled()
        for block in self.blocks:
            s, z = block(s, z, single_mask, pair_mask, mask_transitions, in_place)
        return axes.join(s, (-2, axes.all, r)), axes.join(z, (-3, axes.rows, r), (-2, axes.columns, r))
