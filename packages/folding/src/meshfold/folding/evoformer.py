"""The Evoformer (Algorithm 6 of AlphaFold 2) and the extra-MSA stack (Algorithm 18), with OpenFold's parameter names.

Blocks take and return blocks of this rank; stacks take and return whole tensors (see
:func:`meshfold.folding.parallelize_folding`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes, join_cost, split_cost
from meshfold.folding.dropout import SharedDropout, name_dropouts
from meshfold.folding.memory import add_update, own_tensor, run_block
from meshfold.folding.msa import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttentionWithPairBias,
    OuterProductMean,
)
from meshfold.folding.primitives import Linear
from meshfold.folding.shapes import flat_mask
from meshfold.folding.stack import Shapes, Stack
from meshfold.folding.state_names import accept_names
from meshfold.folding.transitions import Transition
from meshfold.folding.triangle import (
    TriangleAttention,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
    own_pair_mask,
)
from meshfold.tensor_parallel import CostEntry

OPENFOLD_1 = {
    "core.msa_transition.": "msa_transition.",
    "core.outer_product_mean.": "outer_product_mean.",
    "core.": "pair_stack.",
}


class PairStack(nn.Module):
    """The pair half of a block: two triangle multiplications, two triangle attentions, a transition."""

    def __init__(
        self,
        c_z: int,
        c_hidden_mul: int,
        c_hidden_pair_att: int,
        no_heads_pair: int,
        transition_n: int,
        pair_dropout: float,
        *,
        transition: type[nn.Module] = Transition,
        biased: bool = True,
        transposed_bias: bool = False,
    ) -> None:
        """Args:
        c_z: channels of pairs.
        c_hidden_mul: channels of edges in triangle multiplications.
        c_hidden_pair_att: channels of a head in triangle attentions.
        no_heads_pair: heads there.
        transition_n: hidden width of the transition, in ``c_z``.
        pair_dropout: dropout of the updates but the transition's.
        transition: class of the transition, called with (c_z, transition_n).
        biased: give linear layers a bias (AlphaFold 2; AlphaFold 3 has none).
        transposed_bias: see :class:`.TriangleAttention`.
        """
        super().__init__()
        self.tri_mul_out = TriangleMultiplicationOutgoing(c_z, c_hidden_mul, biased=biased)
        self.tri_mul_in = TriangleMultiplicationIncoming(c_z, c_hidden_mul, biased=biased)
        self.tri_att_start = TriangleAttention(c_z, c_hidden_pair_att, no_heads_pair, biased=biased)
        self.tri_att_end = TriangleAttention(
            c_z, c_hidden_pair_att, no_heads_pair, starting=False, biased=biased, transposed_bias=transposed_bias
        )
        self.pair_transition = transition(c_z, transition_n)
        self.ps_dropout_row_layer = SharedDropout(pair_dropout, "rows")
        self.ps_dropout_column_layer = SharedDropout(pair_dropout, "columns")
        self.axes: Axes = WHOLE

    def forward(
        self, z: Tensor, pair_mask: Tensor | None = None, mask_transition: bool = True, in_place: bool = False
    ) -> Tensor:
        """``* i j c -> * i j c``, this rank's block; ``pair_mask``: ``* i j``, whole on every rank.

        ``in_place``: change ``z`` and return it; without gradients only.
        """
        rows, columns = self.ps_dropout_row_layer, self.ps_dropout_column_layer
        z = add_update(z, self.tri_mul_out, z, pair_mask, dropout=rows, in_place=in_place)
        z = add_update(z, self.tri_mul_in, z, pair_mask, dropout=rows, in_place=in_place)
        z = add_update(z, self.tri_att_start, z, pair_mask, dropout=rows, in_place=in_place)
        z = add_update(z, self.tri_att_end, z, pair_mask, dropout=columns, in_place=in_place)
        own = own_mask(self.axes, pair_mask, z) if mask_transition else None
        return add_update(z, self.pair_transition, z, own, in_place=in_place)


def own_mask(axes: Axes, mask: Tensor | None, x: Tensor) -> Tensor | None:
    """Return this rank's block of a whole mask ``* s r`` or ``* i j``, for ``x`` with one more dim."""
    lead = x.shape[:-3]
    own = own_pair_mask(axes, flat_mask(mask, lead, 2))
    return None if own is None else own.view(x.shape[:-1])


class MSABlock(nn.Module):
    """The base of Evoformer and extra-MSA blocks, which differ in the attention within columns."""

    def __init__(
        self,
        c_m: int,
        c_z: int,
        c_hidden_msa_att: int,
        c_hidden_opm: int,
        c_hidden_mul: int,
        c_hidden_pair_att: int,
        no_heads_msa: int,
        no_heads_pair: int,
        transition_n: int,
        msa_dropout: float,
        pair_dropout: float,
        opm_first: bool = False,
    ) -> None:
        """Args:
        c_m, c_z: channels of the MSA and of pairs.
        c_hidden_msa_att: channels of a head in attention over the MSA.
        c_hidden_opm: channels of each factor of the outer product mean.
        c_hidden_mul: channels of edges in triangle multiplications.
        c_hidden_pair_att: channels of a head in triangle attentions.
        no_heads_msa, no_heads_pair: heads of the two.
        transition_n: hidden width of transitions, in channels.
        msa_dropout, pair_dropout: dropout of the updates of each.
        opm_first: begin with the outer product mean (AlphaFold-Multimer).
        """
        super().__init__()
        self.opm_first = opm_first
        self.msa_att_row = MSARowAttentionWithPairBias(c_m, c_z, c_hidden_msa_att, no_heads_msa)
        self.msa_att_col = self.column_attention(c_m, c_hidden_msa_att, no_heads_msa)
        self.msa_dropout_layer = SharedDropout(msa_dropout, "rows")
        self.msa_transition = Transition(c_m, transition_n)
        self.outer_product_mean = OuterProductMean(c_m, c_z, c_hidden_opm)
        self.pair_stack = PairStack(c_z, c_hidden_mul, c_hidden_pair_att, no_heads_pair, transition_n, pair_dropout)
        self.axes: Axes = WHOLE
        accept_names(self, OPENFOLD_1)

    column_attention: type[nn.Module]

    def forward(
        self,
        m: Tensor,
        z: Tensor,
        msa_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        mask_transitions: bool = True,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the next MSA and pair tensors.

        Args:
            m: ``* s r c_m``, this rank's block.
            z: ``* r r c_z``, this rank's block.
            msa_mask: ``* s r``, whole on every rank and without padding; None: all count, and nothing is padded.
            pair_mask: ``* r r``, likewise.
            mask_transitions: multiply transitions by the masks, which DeepMind's code does not.
            in_place: change ``m`` and ``z`` and return them; without gradients only.
        """
        made: tuple[Tensor, Tensor] = run_block(
            self.axes.memory, self._run, m, z, msa_mask, pair_mask, mask_transitions, in_place
        )
        return made

    def _run(
        self,
        m: Tensor,
        z: Tensor,
        msa_mask: Tensor | None,
        pair_mask: Tensor | None,
        mask_transitions: bool,
        in_place: bool,
    ) -> tuple[Tensor, Tensor]:
        if self.opm_first:
            z = add_update(z, self.outer_product_mean, m, msa_mask, in_place=in_place)
        m = add_update(m, self.msa_att_row, m, z, msa_mask, dropout=self.msa_dropout_layer, in_place=in_place)
        m = add_update(m, self.msa_att_col, m, msa_mask, in_place=in_place)
        own = own_mask(self.axes, msa_mask, m) if mask_transitions else None
        m = add_update(m, self.msa_transition, m, own, in_place=in_place)
        if not self.opm_first:
            z = add_update(z, self.outer_product_mean, m, msa_mask, in_place=in_place)
        return m, self.pair_stack(z, pair_mask, mask_transitions, in_place)


class EvoformerBlock(MSABlock):
    """A block of the Evoformer."""

    column_attention = MSAColumnAttention


class ExtraMSABlock(MSABlock):
    """A block for many sequences, with global attention within columns."""

    column_attention = MSAColumnGlobalAttention


class _Stack(Stack):
    """Blocks one after another on whole tensors, which every rank has: split before, joined after."""

    block: type[MSABlock]

    def __init__(self, no_blocks: int, c_m: int, c_z: int, **sizes: Any) -> None:
        """``no_blocks``: blocks; the rest as for :class:`MSABlock`."""
        super().__init__(no_blocks=no_blocks, c_m=c_m, c_z=c_z, **sizes)
        self.c_m, self.c_z = c_m, c_z
        self.blocks = nn.ModuleList(self.block(c_m, c_z, **sizes) for _ in range(no_blocks))
        name_dropouts(self)

    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        b, s, r = sizes.batch, sizes.sequences, sizes.residues
        tensors: Shapes = {"m": (b, s, r, self.c_m), "z": (b, r, r, self.c_z)}
        return tensors, {"msa_mask": (b, s, r), "pair_mask": (b, r, r)}

    joins_msa = True

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        axes, r = self.axes, sizes.residues
        m, z = sizes.msa(axes, self.c_m), sizes.pair(axes, self.c_z)
        msa, pair = [(axes.rows, sizes.sequences), (axes.columns, r)], [(axes.rows, r), (axes.columns, r)]
        entries = split_cost(axes, "m", m, *msa) + split_cost(axes, "z", z, *pair)
        if self.joins_msa:
            entries += join_cost(axes, "m", m, *msa)
        return entries + join_cost(axes, "z", z, *pair)

    def run(
        self, m: Tensor, z: Tensor, msa_mask: Tensor | None, pair_mask: Tensor | None, mask_transitions: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the blocks' MSA, whole if the stack returns it, and pair tensors, whole."""
        s, r = m.shape[-3:-1]
        self.choose_memory(z, residues=r, sequences=s, batch=m.shape[:-3].numel())
        axes = self.axes
        if axes.is_split:  # padding is told from the rest by the masks
            msa_mask = m.new_ones(m.shape[:-1]) if msa_mask is None else msa_mask
            pair_mask = z.new_ones(z.shape[:-1]) if pair_mask is None else pair_mask
        m, z = (own_tensor(axes.split(x, (-3, axes.rows), (-2, axes.columns)), x) for x in (m, z))
        in_place = not torch.is_grad_enabled()
        for block in self.blocks:
            m, z = block(m, z, msa_mask, pair_mask, mask_transitions, in_place)
        if self.joins_msa:
            m = axes.join(m, (-3, axes.rows, s), (-2, axes.columns, r))
        return m, axes.join(z, (-3, axes.rows, r), (-2, axes.columns, r))


class EvoformerStack(_Stack):
    """Algorithm 6."""

    block = EvoformerBlock

    def __init__(self, no_blocks: int, c_m: int, c_z: int, c_s: int, **sizes: Any) -> None:
        """Args:
        no_blocks: blocks.
        c_m, c_z, c_s: channels of the MSA, of pairs and of the single representation.
        sizes: the rest of :class:`MSABlock`'s arguments.
        """
        super().__init__(no_blocks, c_m, c_z, **sizes)
        self.config["c_s"] = c_s
        self.linear = Linear(c_m, c_s)

    def forward(
        self,
        m: Tensor,
        z: Tensor,
        msa_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        mask_transitions: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``m``, ``z`` and the single representation ``* r c_s``, whole; arguments as for a block, whole."""
        m, z = self.run(m, z, msa_mask, pair_mask, mask_transitions)
        return m, z, self.linear(m[..., 0, :, :])


class ExtraMSAStack(_Stack):
    """Algorithm 18."""

    block = ExtraMSABlock
    joins_msa = False

    def forward(
        self,
        m: Tensor,
        z: Tensor,
        msa_mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        mask_transitions: bool = True,
    ) -> Tensor:
        """Return ``z``, whole; arguments as for a block, whole."""
        return self.run(m, z, msa_mask, pair_mask, mask_transitions)[1]
