"""Attention over an MSA and its outer product mean (Algorithms 7, 8, 10 and 19 of AlphaFold 2), with OpenFold's parameter names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.attention import attend_rows, pair_bias
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.overlap import begin, redistribute
from meshfold.folding.axial.sizes import Sizes, rows_cost
from meshfold.folding.memory import Parts, run_parts, some_lines
from meshfold.folding.primitives import Attention, GlobalAttention, LayerNorm, Linear
from meshfold.folding.shapes import flat, flat_mask, flat_target
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

    def forward(
        self, m: Tensor, z: Tensor | None = None, mask: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Return the update, some rows at a time: ``* s r c``, this rank's block.

        Args:
            m: ``* s r c``, this rank's block.
            z: ``* r r c_z``, likewise.
            mask: ``* s r``, whole on every rank.
            into: what the update is added to, in place, and returned; without gradients only. It may be ``m``.
        """
        lead, axes = m.shape[:-3], self.axes
        bias = None
        if z is not None and self.layer_norm_z is not None and self.linear_z is not None:
            bias = pair_bias(axes.memory, self.layer_norm_z, self.linear_z, flat(z, 3))
        target = flat_target(into, 3)
        y = attend_rows(axes, self.mha, self.layer_norm_m, flat(m, 3), flat_mask(mask, lead, 2), bias, into=target)
        return y.view(*lead, *y.shape[1:]) if into is None else into


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

    def forward(self, m: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update: ``* s r c``, this rank's block; ``mask`` and ``into``: see :class:`MSAAttention`."""
        inner, lead = self._msa_att, m.shape[:-3]
        mask = flat_mask(mask, lead, 2)
        turned = None if mask is None else mask.transpose(1, 2)
        target = flat_target(into, 3)
        target = None if target is None else target.transpose(1, 2)
        rows = flat(m, 3).transpose(1, 2)
        y = attend_rows(self.axes.turned, inner.mha, inner.layer_norm_m, rows, turned, None, into=target)
        y = y.transpose(1, 2)
        return y.reshape(*lead, *y.shape[1:]) if into is None else into


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

    def forward(self, m: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update, some columns at a time: ``* s r c``, this rank's block; arguments as for :class:`MSAAttention`."""
        lead, axes = m.shape[:-3], self.axes
        m, mask = flat(m, 3), flat_mask(mask, lead, 2)
        if mask is None:
            mask = m.new_ones(
                m.shape[0], m.shape[1] * axes.mesh.size(*axes.rows), m.shape[2] * axes.mesh.size(*axes.columns)
            )
        columns = axes.take(mask, 2, axes.columns)  # b s r, every sequence of this rank's residues

        def compute(first: int, size: int) -> Tensor:
            return self._attend(some_lines(m, 2, first, size), columns.narrow(2, first, size))

        y = run_parts(self.column_parts(m), compute, 2, flat_target(into, 3))
        return y.view(*lead, *y.shape[1:]) if into is None else into

    def column_parts(self, m: Tensor) -> Parts:
        """Return the parts of a block ``b s r c``, in residues."""
        b, s, r, c = m.shape
        heads = self.global_attention
        numbers = 3 * c + 4 * heads.c_hidden + 3 * heads.no_heads * heads.c_hidden + 4 * heads.no_heads
        return Parts.of(self.axes.memory, r, b * s * numbers * m.element_size())

    def _attend(self, m: Tensor, columns: Tensor) -> Tensor:
        """Return the update of some residues: ``b s r c``; ``columns``: their mask, with the sequences of every rank."""
        axes, heads = self.axes, self.global_attention
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
        return y

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

    def forward(self, m: Tensor, mask: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Return the update of pairs: ``* s r c_m -> * i j c_z``, blocks; ``mask``: ``* s r``, whole on every rank.

        ``into``: what the update is added to, in place, and returned; without gradients only.
        """
        lead, axes = m.shape[:-3], self.axes
        m, mask = flat(m, 3), flat_mask(mask, lead, 2)
        rows, columns = (axes.move("s:rows r:columns", target, MSA) for target in ("s r:rows", "s r:columns"))
        factor = self._factors(m)
        if mask is None:
            norm: Tensor | float = m.shape[1] * axes.mesh.size(*axes.rows) + self.eps
            coming = begin(columns, factor(self.linear_2))
            a = factor(self.linear_1)
        else:
            own = axes.take(axes.take(mask, 1, axes.rows), 2, axes.columns).unsqueeze(-1)
            coming = begin(columns, factor(self.linear_2) * own)
            a = factor(self.linear_1) * own
            one, two = (axes.take(mask, 2, some).to(m.dtype) for some in (axes.rows, axes.columns))
            norm = torch.einsum("bsi,bsj->bij", one, two).unsqueeze(-1) + self.eps
        a = redistribute(rows, a)
        linear, target = self.linear_out, flat_target(into, 3)
        z = functions.outer_products(
            a, coming.wait(), linear.weight, linear.bias, norm, memory=axes.memory, into=target
        )
        return z.view(*lead, *z.shape[1:]) if into is None else into

    def _factors(self, m: Tensor) -> Callable[[nn.Module], Tensor]:
        """Return what computes a factor from its linear layer, some sequences at a time: ``b s r u``."""
        b, s, r, c = m.shape
        parts = Parts.of(self.axes.memory, s, b * r * (2 * c + self.linear_1.out_features) * m.element_size())
        if parts.is_whole:
            normalised = self.layer_norm(m)
            return lambda layer: layer(normalised)

        def factor(layer: nn.Module) -> Tensor:
            def compute(first: int, size: int) -> Tensor:
                made: Tensor = layer(self.layer_norm(m.narrow(1, first, size)))
                return made

            return run_parts(parts, compute, 1)

        return factor
