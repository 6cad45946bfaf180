"""The template pair stack (Algorithm 16 of AlphaFold 2), with OpenFold's parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes, join_cost, split_cost
from meshfold.folding.dropout import SharedDropout, name_dropouts
from meshfold.folding.evoformer import own_mask
from meshfold.folding.memory import add_update, own_tensor, run_block
from meshfold.folding.primitives import LayerNorm
from meshfold.folding.stack import Shapes, Stack
from meshfold.folding.transitions import Transition
from meshfold.folding.triangle import (
    TriangleAttention,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
)
from meshfold.tensor_parallel import CostEntry


class TemplatePairStackBlock(nn.Module):
    """A block of the template pair stack; each template is a sample of its own."""

    def __init__(
        self,
        c_t: int,
        c_hidden_tri_att: int,
        c_hidden_tri_mul: int,
        no_heads: int,
        pair_transition_n: int,
        dropout_rate: float,
        tri_mul_first: bool = False,
    ) -> None:
        """Args:
        c_t: channels.
        c_hidden_tri_att: channels of a head in triangle attentions.
        c_hidden_tri_mul: channels of edges in triangle multiplications.
        no_heads: heads.
        pair_transition_n: hidden width of the transition, in ``c_t``.
        dropout_rate: dropout of the updates but the transition's.
        tri_mul_first: triangle multiplications before attentions (AlphaFold-Multimer).
        """
        super().__init__()
        self.tri_mul_first = tri_mul_first
        self.dropout_row = SharedDropout(dropout_rate, "rows")
        self.dropout_col = SharedDropout(dropout_rate, "columns")
        self.tri_att_start = TriangleAttention(c_t, c_hidden_tri_att, no_heads)
        self.tri_att_end = TriangleAttention(c_t, c_hidden_tri_att, no_heads, starting=False)
        self.tri_mul_out = TriangleMultiplicationOutgoing(c_t, c_hidden_tri_mul)
        self.tri_mul_in = TriangleMultiplicationIncoming(c_t, c_hidden_tri_mul)
        self.pair_transition = Transition(c_t, pair_transition_n)
        self.axes: Axes = WHOLE

    def forward(
        self, z: Tensor, mask: Tensor | None = None, mask_transition: bool = True, in_place: bool = False
    ) -> Tensor:
        """``* t i j c -> * t i j c``, this rank's block; ``mask``: ``* t i j``, whole on every rank.

        ``in_place``: change ``z`` and return it; without gradients only.
        """
        made: Tensor = run_block(self.axes.memory, self._run, z, mask, mask_transition, in_place)
        return made

    def _run(self, z: Tensor, mask: Tensor | None, mask_transition: bool, in_place: bool) -> Tensor:
        multiply = ((self.tri_mul_out, self.dropout_row), (self.tri_mul_in, self.dropout_row))
        attend = ((self.tri_att_start, self.dropout_row), (self.tri_att_end, self.dropout_col))
        for update, dropout in (*multiply, *attend) if self.tri_mul_first else (*attend, *multiply):
            z = add_update(z, update, z, mask, dropout=dropout, in_place=in_place)
        own = own_mask(self.axes, mask, z) if mask_transition else None
        return add_update(z, self.pair_transition, z, own, in_place=in_place)


class TemplatePairStack(Stack):
    """Algorithm 16, on whole tensors, which every rank has: split before, joined after."""

    def __init__(
        self,
        c_t: int,
        c_hidden_tri_att: int,
        c_hidden_tri_mul: int,
        no_blocks: int,
        no_heads: int,
        pair_transition_n: int,
        dropout_rate: float,
        tri_mul_first: bool = False,
    ) -> None:
        """``no_blocks``: blocks; the rest as for :class:`TemplatePairStackBlock`."""
        super().__init__(
            c_t=c_t,
            c_hidden_tri_att=c_hidden_tri_att,
            c_hidden_tri_mul=c_hidden_tri_mul,
            no_blocks=no_blocks,
            no_heads=no_heads,
            pair_transition_n=pair_transition_n,
            dropout_rate=dropout_rate,
            tri_mul_first=tri_mul_first,
        )
        self.blocks = nn.ModuleList(
            TemplatePairStackBlock(
                c_t, c_hidden_tri_att, c_hidden_tri_mul, no_heads, pair_transition_n, dropout_rate, tri_mul_first
            )
            for _ in range(no_blocks)
        )
        name_dropouts(self)
        self.layer_norm = LayerNorm(c_t)

    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        b, t, r = sizes.batch, sizes.templates, sizes.residues
        return {"t": (b, t, r, r, self.config["c_t"])}, {"mask": (b, t, r, r)}

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        axes, t = self.axes, sizes.pair(self.axes, self.layer_norm.weight.numel())
        dims = [(axes.rows, sizes.residues), (axes.columns, sizes.residues)]
        return split_cost(axes, "t", t, *dims) + join_cost(axes, "t", t, *dims)

    def forward(self, t: Tensor, mask: Tensor | None = None, mask_transition: bool = True) -> Tensor:
        """``* t i j c -> * t i j c``, whole; ``mask``: ``* t i j`` (or 1 for all templates)."""
        r, samples = t.shape[-2], t.shape[:-3]
        templates = samples[-1] if samples else 1
        self.choose_memory(t, residues=r, templates=templates, batch=samples[:-1].numel())
        axes = self.axes
        if axes.is_split and mask is None:  # padding is told from the rest by the mask
            mask = t.new_ones(t.shape[:-1])
        t = own_tensor(axes.split(t, (-3, axes.rows), (-2, axes.columns)), t)
        in_place = not torch.is_grad_enabled()
        for block in self.blocks:
            t = block(t, mask, mask_transition, in_place)
        y: Tensor = self.layer_norm(axes.join(t, (-3, axes.rows, r), (-2, axes.columns, r)))
        return y
