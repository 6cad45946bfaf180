"""Attention over an MSA and its outer product mean (Algorithms 7, 8, 10 and 19 of AlphaFold 2), with OpenFold's parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.attention import attend_rows
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.overlap import begin
from meshfold.folding.axial.sizes import Sizes, rows_cost
from meshfold.folding.primitives import Attention, GlobalAttention, LayerNorm, Linear
from meshfold.folding.shapes import flat, flat_mask
from meshfold.mesh import collectives
from meshfold.mesh.collectives import bind_enter, bind_leave, take_block
from meshfold.tensor_parallel import CostEntry

MSA = {"s": 1, "r": 2}


class MSAAttention(nn.Module):
    """Attention within the rows of an MSA, with a pair bias if ``c_z`` is given.

    Attributes:
        axes: over which MSA and pair tensors are split.
    """

    def __init__(self, c_in: int, c_hidden: int, no_heads: int, c_z: int | None = None) -> None:
        """Args:
        c_in: channels of the MSA.
        c_hidden: channels of a head.
        no_heads: heads.
        c_z: channels of pairs; None: no pair bias.
        """
        super().__init__()
        self.layer_norm_m = LayerNorm(c_in)
        self.layer_norm_z = None if c_z is None else LayerNorm(c_z)
        self.linear_z = None if c_z is None else Linear(c_z, no_heads, bias=False, init="normal")
        self.mha = Attention(c_in, c_hidden, no_heads)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        return self.traffic_over(self.axes, sizes)

    def traffic_over(self, axes: Axes, sizes: Sizes) -> list[CostEntry]:
        """Return :meth:`traffic` for an MSA that lies over these axes."""
        line, keys = (sizes.msa(axes, layer.in_features) for layer in (self.mha.linear_q, self.mha.linear_o))
        bias = 0 if self.linear_z is None else sizes.pair(axes, self.mha.no_heads)
        return rows_cost(axes, line, keys, bias, sizes.wide)

    def forward(self, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``* s r c``, this rank's block; ``z``: ``* r r c_z``; ``mask``: ``* s r``, whole on every rank."""
        lead = m.shape[:-3]
        bias = None
        if z is not None and self.layer_norm_z is not None and self.linear_z is not None:
            bias = self.linear_z(self.layer_norm_z(flat(z, 3)))
        y = attend_rows(self.axes, self.mha, self.layer_norm_m, flat(m, 3), flat_mask(mask, lead, 2), bias)
        return y.view(*lead, *y.shape[1:])


class MSARowAttentionWithPairBias(MSAAttention):
    """Algorithm 7."""

    def __init__(self, c_m: int, c_z: int, c_hidden: int, no_heads: int) -> None:
        """See :class:`MSAAttention`."""
        super().__init__(c_m, c_hidden, no_heads, c_z)


class MSAColumnAttention(nn.Module):
    """Algorithm 8: attention within columns, which is row attention on the transposed MSA."""

    def __init__(self, c_m: int, c_hidden: int, no_heads: int) -> None:
        """See :class:`MSAAttention`."""
        super().__init__()
        self._msa_att = MSAAttention(c_m, c_hidden, no_heads)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        return self._msa_att.traffic_over(self.axes.turned, sizes)

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``* s r c``, this rank's block; ``mask``: ``* s r``, whole on every rank."""
        inner, lead = self._msa_att, m.shape[:-3]
        mask = flat_mask(mask, lead, 2)
        turned = None if mask is None else mask.transpose(1, 2)
        y = attend_rows(
            self.axes.turned, inner.mha, inner.layer_norm_m, flat(m, 3).transpose(1, 2), turned, None
        ).transpose(1, 2)
        return y.reshape(*lead, *y.shape[1:])


class MSAColumnGlobalAttention(nn.Module):
    """Algorithm 19: one query a column, the mean over its sequences.

    Ranks that share a column's sequences sum their parts of the mean and of the softmax, ``b r h d`` numbers. No sequence is
    exchanged.
    """

    def __init__(self, c_in: int, c_hidden: int, no_heads: int, eps: float = 1e-10) -> None:
        """Args:
        c_in: channels of the MSA.
        c_hidden: channels of a head.
        no_heads: heads.
        eps: added to the number of sequences in the mean.
        """
        super().__init__()
        self.eps = eps
        self.layer_norm_m = LayerNorm(c_in)
        self.global_attention = GlobalAttention(c_in, c_hidden, no_heads)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes, heads = self.axes, self.global_attention
        mesh = axes.mesh
        if mesh.size(*axes.rows) == 1:
            return []
        residues = sizes.batch * axes.padded(sizes.residues) // mesh.size(*axes.columns)
        mean = residues * heads.linear_q.in_features * sizes.itemsize
        largest = residues * heads.no_heads * sizes.itemsize * sizes.wide

        def sums(phase: str, operand: str, block_bytes: int) -> CostEntry:
            axes_, size = mesh.spanned(*axes.rows), mesh.size(*axes.rows)
            return CostEntry(phase, "all_reduce", operand, axes_, size, block_bytes)

        sides = (("forward", ""), ("backward", "d"))
        parts = (("mean", mean), ("softmax", largest * (heads.c_hidden + 1)))
        return [sums("forward", "max", largest)] + [
            sums(phase, d + operand, block_bytes) for phase, d in sides for operand, block_bytes in parts
        ]

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``* s r c``, this rank's block; ``mask``: ``* s r``, whole on every rank."""
        lead, axes, heads = m.shape[:-3], self.axes, self.global_attention
        m, mask = flat(m, 3), flat_mask(mask, lead, 2)
        if mask is None:
            mask = m.new_ones(
                m.shape[0], m.shape[1] * axes.mesh.size(*axes.rows), m.shape[2] * axes.mesh.size(*axes.columns)
            )
        columns = axes.take(mask, 2, axes.columns)  # b s r, every sequence of this rank's residues
        counts = columns.to(m.dtype).sum(1)
        own = axes.take(columns, 1, axes.rows).unsqueeze(-1)
        wide = torch.promote_types(m.dtype, torch.float32)
        padding = axes.padded(columns.shape[1]) - columns.shape[1]
        bias = take_block(functions.key_bias_of(columns.transpose(1, 2), wide, padding), axes.mesh, 2, axes.rows)
        m = self.layer_norm_m(m)
        q = self._sum((m * own).sum(1)) / (counts + self.eps).unsqueeze(-1)
        q = (heads.linear_q(q) * heads.c_hidden**-0.5).unflatten(-1, (heads.no_heads, heads.c_hidden))
        k, v = heads.linear_k(m), heads.linear_v(m)  # b s r d
        logits = torch.einsum("brhd,bsrd->brhs", q, k).to(wide) + bias.unsqueeze(2)
        with torch.no_grad():
            largest = collectives.all_reduce(logits.amax(-1, keepdim=True), axes.mesh.group(*axes.rows), "max")
        weights = (logits - largest).exp()
        part = torch.cat((torch.einsum("brhs,bsrd->brhd", weights, v.to(wide)), weights.sum(-1, keepdim=True)), -1)
        total = self._sum(part)
        out = (total[..., :-1] / total[..., -1:]).to(m.dtype)
        y: Tensor = heads.linear_o(functions.gate(out.flatten(-2).unsqueeze(1), heads.linear_g(m)))
        return y.view(*lead, *y.shape[1:])

    def _sum(self, x: Tensor) -> Tensor:
        """Sum over the ranks that share the sequences; they use the sum in different ways, so its gradient is summed too."""
        mesh, rows = self.axes.mesh, self.axes.rows
        return bind_enter(mesh, rows)(bind_leave(mesh, rows)(x))


class OuterProductMean(nn.Module):
    """Algorithm 10: ``z_ij += W(mean_s a_si ⊗ b_sj)``.

    A matmul over sequences: ranks bring whole columns of a for their own i, and of b for their own j.
    """

    def __init__(self, c_m: int, c_z: int, c_hidden: int, *, biased: bool = True, eps: float = 1e-3) -> None:
        """Args:
        c_m: channels of the MSA.
        c_z: channels of pairs.
        c_hidden: channels of a and of b.
        biased: give ``linear_1`` and ``linear_2`` a bias (AlphaFold 2; AlphaFold 3 has none).
        eps: added to the number of sequences in the mean.
        """
        super().__init__()
        self.eps = eps
        self.layer_norm = LayerNorm(c_m)
        self.linear_1 = Linear(c_m, c_hidden, bias=biased)
        self.linear_2 = Linear(c_m, c_hidden, bias=biased)
        self.linear_out = Linear(c_hidden**2, c_z, init="final")
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        factor = sizes.msa(self.axes, self.linear_1.out_features)
        moves = (("b", "s r:columns"), ("a", "s r:rows"))
        return [
            entry
            for operand, target in moves
            for entry in self.axes.move("s:rows r:columns", target, MSA).cost(operand, factor)
        ]

    def forward(self, m: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update of pairs: ``* s r c_m -> * i j c_z``, blocks; ``mask``: ``* s r``, whole on every rank."""
        lead, axes = m.shape[:-3], self.axes
        m, mask = self.layer_norm(flat(m, 3)), flat_mask(mask, lead, 2)
        b = self.linear_2(m)
        if mask is None:
            norm: Tensor | float = m.shape[1] * axes.mesh.size(*axes.rows) + self.eps
            coming = begin(axes.move("s:rows r:columns", "s r:columns", MSA), b)
            a = self.linear_1(m)
        else:
            own = axes.take(axes.take(mask, 1, axes.rows), 2, axes.columns).unsqueeze(-1)
            coming = begin(axes.move("s:rows r:columns", "s r:columns", MSA), b * own)
            a = self.linear_1(m) * own
            rows, columns = axes.take(mask, 2, axes.rows), axes.take(mask, 2, axes.columns)
            norm = torch.einsum("bsi,bsj->bij", rows.to(m.dtype), columns.to(m.dtype)).unsqueeze(-1) + self.eps
        a = begin(axes.move("s:rows r:columns", "s r:rows", MSA), a).wait()
        linear = self.linear_out
        z = functions.outer_products(a, coming.wait(), linear.weight, linear.bias) / norm
        return z.view(*lead, *z.shape[1:])
