"""The blocks of ESMFold's trunk (Lin et al. 2023, doi:10.1126/science.ade2574), with transformers' parameter names.

Blocks take and return blocks of this rank; the stack takes and returns whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding import functions
from meshfold.folding.axial.attention import pair_bias
from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.residues import (
    attend_residues,
    attend_residues_cost,
    gather_residues_cost,
    residue_pairs,
    send_bias,
)
from meshfold.folding.axial.sizes import Sizes, join_cost, split_cost
from meshfold.folding.dropout import ResidueDropout, SharedDropout, name_dropouts
from meshfold.folding.memory import Parts, add_update, own_tensor, run_block, run_parts, some_lines
from meshfold.folding.primitives import LayerNorm
from meshfold.folding.stack import Shapes, Stack
from meshfold.folding.transitions import run_positions
from meshfold.folding.triangle import (
    TriangleAttention,
    TriangleMultiplicationIncoming,
    TriangleMultiplicationOutgoing,
)
from meshfold.tensor_parallel import CostEntry


class SequenceToPair(nn.Module):
    """Pairs of products and differences of residues, projected."""

    def __init__(self, c_s: int, c_hidden: int, c_z: int) -> None:
        """Args:
        c_s: channels of the single representation.
        c_hidden: channels of each factor.
        c_z: channels of pairs.
        """
        super().__init__()
        self.layernorm = LayerNorm(c_s)
        self.proj = nn.Linear(c_s, 2 * c_hidden)
        self.o_proj = nn.Linear(2 * c_hidden, c_z)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        return gather_residues_cost(self.axes, "pairs", sizes.single(self.axes, self.proj.out_features))

    def forward(self, s: Tensor, into: Tensor | None = None) -> Tensor:
        """``b r c_s -> b i j c_z``: this rank's residues to its block of pairs, some rows at a time.

        ``into``: what the result is added to, in place, and returned; without gradients only.
        """
        columns, rows = self.proj(self.layernorm(s)).chunk(2, -1)
        rows, columns = residue_pairs(self.axes, rows, columns)
        numbers = 2 * self.o_proj.in_features + self.o_proj.out_features
        line = rows.shape[0] * columns.shape[2] * numbers * s.element_size()

        def compute(first: int, size: int) -> Tensor:
            some = some_lines(rows, 1, first, size)
            y: Tensor = self.o_proj(torch.cat((columns * some, columns - some), -1))
            return y

        return run_parts(Parts.of(self.axes.memory, rows.shape[1], line), compute, 1, into)


class PairToSequence(nn.Module):
    """The bias that attention over residues has from pairs."""

    def __init__(self, c_z: int, no_heads: int) -> None:
        """Args:
        c_z: channels of pairs.
        no_heads: heads.
        """
        super().__init__()
        self.layernorm = LayerNorm(c_z)
        self.linear = nn.Linear(c_z, no_heads, bias=False)
        self.axes: Axes = WHOLE

    def forward(self, z: Tensor) -> Tensor:
        """``b i j c_z -> b i j h``."""
        return pair_bias(self.axes.memory, self.layernorm, self.linear, z)


class SequenceAttention(nn.Module):
    """Gated attention over residues; queries, keys and values of a head lie together in ``proj``."""

    def __init__(self, c_s: int, no_heads: int) -> None:
        """Args:
        c_s: channels of the single representation.
        no_heads: heads.
        """
        super().__init__()
        self.no_heads = no_heads
        self.proj = nn.Linear(c_s, 3 * c_s, bias=False)
        self.o_proj = nn.Linear(c_s, c_s)
        self.g_proj = nn.Linear(c_s, c_s)
        self.axes: Axes = WHOLE

    def traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return every collective of forward and backward."""
        axes = self.axes
        return attend_residues_cost(axes, sizes.pair(axes, self.no_heads), sizes.single(axes, self.o_proj.in_features))

    def forward(self, x: Tensor, pair_bias: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the update: ``b r c_s``, this rank's residues.

        Args:
            x: the normalised single representation, ``b r c_s``.
            pair_bias: ``b i j h``, this rank's block.
            mask: ``b r``, whole on every rank.
        """
        coming = send_bias(self.axes, pair_bias)
        q, k, v = self.proj(x).unflatten(-1, (self.no_heads, -1)).chunk(3, -1)
        out = attend_residues(self.axes, q, k, v, coming, mask).flatten(-2)
        y: Tensor = self.o_proj(functions.gate(out, self.g_proj(x)))
        return y


class PositionMLP(nn.Sequential):
    """``W(relu(V(norm(x))))``, some positions at a time; its last layer is the dropout that its caller applies."""

    def __init__(self, c: int, c_hidden: int, dropout: nn.Module) -> None:
        """Args:
        c: channels.
        c_hidden: channels between the layers.
        dropout: of the result.
        """
        super().__init__(LayerNorm(c), nn.Linear(c, c_hidden), nn.ReLU(), nn.Linear(c_hidden, c), dropout)
        self.numbers = 2 * (c + c_hidden)
        self.axes: Axes = WHOLE

    def forward(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """``.. c -> .. c``; ``into``: what the result is added to, in place, and returned; without gradients only."""
        return run_positions(self.axes.memory, self._update, x, None, self.numbers, into)

    def _update(self, x: Tensor) -> Tensor:
        norm, widen, relu, narrow, _ = self
        y: Tensor = narrow(relu(widen(norm(x))))
        return y


class ResidueMLP(nn.Module):
    """``x + dropout(mlp(x))``, for residues and for pairs."""

    def __init__(self, c: int, c_hidden: int, dropout: nn.Module) -> None:
        """See :class:`PositionMLP`."""
        super().__init__()
        self.mlp = PositionMLP(c, c_hidden, dropout)

    def forward(self, x: Tensor, in_place: bool = False) -> Tensor:
        """``.. c -> .. c``; ``in_place``: change ``x`` and return it; without gradients only."""
        return add_update(x, self.mlp, x, dropout=self.mlp[4], in_place=in_place)


class EsmFoldBlock(nn.Module):
    """A block of the trunk: attention over residues, then a pair stack."""

    def __init__(self, c_s: int, c_z: int, head_width_s: int, head_width_z: int, dropout: float) -> None:
        """Args:
        c_s, c_z: channels of the single representation and of pairs.
        head_width_s, head_width_z: channels of a head in the attentions over each.
        dropout: dropout of what is not shared along a dim; twice as much of what is.
        """
        super().__init__()
        heads_s, heads_z = c_s // head_width_s, c_z // head_width_z
        self.layernorm_1 = LayerNorm(c_s)
        self.sequence_to_pair = SequenceToPair(c_s, c_z // 2, c_z)
        self.pair_to_sequence = PairToSequence(c_z, heads_s)
        self.seq_attention = SequenceAttention(c_s, heads_s)
        self.tri_mul_out = TriangleMultiplicationOutgoing(c_z, c_z)
        self.tri_mul_in = TriangleMultiplicationIncoming(c_z, c_z)
        self.tri_att_start = TriangleAttention(c_z, head_width_z, heads_z)
        self.tri_att_end = TriangleAttention(c_z, head_width_z, heads_z, starting=False)
        self.mlp_seq = ResidueMLP(c_s, 4 * c_s, ResidueDropout(dropout))
        self.mlp_pair = ResidueMLP(c_z, 4 * c_z, SharedDropout(dropout, "nothing"))
        self.drop = ResidueDropout(dropout)
        self.row_drop = SharedDropout(2 * dropout, "columns")
        self.col_drop = SharedDropout(2 * dropout, "rows")
        self.axes: Axes = WHOLE

    def forward(
        self,
        s: Tensor,
        z: Tensor,
        mask: Tensor | None = None,
        pair_mask: Tensor | None = None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the next single representation and pair tensor.

        Args:
            s: ``b r c_s``, this rank's residues, split over all axes.
            z: ``b r r c_z``, this rank's block.
            mask: ``b r``, whole on every rank and without padding; None: all count, and nothing is padded.
            pair_mask: ``b r r``, likewise.
            in_place: change ``s`` and ``z`` and return them; without gradients only.
        """
        made: tuple[Tensor, Tensor] = run_block(self.axes.memory, self._run, s, z, mask, pair_mask, in_place)
        return made

    def _run(
        self, s: Tensor, z: Tensor, mask: Tensor | None, pair_mask: Tensor | None, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        bias = self.pair_to_sequence(z)
        s = s + self.drop(self.seq_attention(self.layernorm_1(s), bias, mask))
        del bias
        s = self.mlp_seq(s, in_place)
        z = add_update(z, self.sequence_to_pair, s, in_place=in_place)
        z = add_update(z, self.tri_mul_out, z, pair_mask, dropout=self.row_drop, in_place=in_place)
        z = add_update(z, self.tri_mul_in, z, pair_mask, dropout=self.col_drop, in_place=in_place)
        z = add_update(z, self.tri_att_start, z, pair_mask, dropout=self.row_drop, in_place=in_place)
        z = add_update(z, self.tri_att_end, z, pair_mask, dropout=self.col_drop, in_place=in_place)
        return s, self.mlp_pair(z, in_place)


class EsmFoldStack(Stack):
    """The blocks of a trunk on whole tensors: what a plan of its memory counts."""

    def __init__(
        self, no_blocks: int, c_s: int, c_z: int, head_width_s: int, head_width_z: int, dropout: float = 0.0
    ) -> None:
        """``no_blocks``: blocks; the rest as for :class:`EsmFoldBlock`."""
        sizes: dict[str, Any] = dict(head_width_s=head_width_s, head_width_z=head_width_z, dropout=dropout)
        super().__init__(no_blocks=no_blocks, c_s=c_s, c_z=c_z, **sizes)
        self.c_s, self.c_z = c_s, c_z
        self.blocks = nn.ModuleList(EsmFoldBlock(c_s, c_z, **sizes) for _ in range(no_blocks))
        name_dropouts(self)

    def shapes(self, sizes: Sizes) -> tuple[Shapes, Shapes]:
        b, r = sizes.batch, sizes.residues
        tensors = {"s": (b, r, self.c_s), "z": (b, r, r, self.c_z)}
        return tensors, {"mask": (b, r), "pair_mask": (b, r, r)}

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting and joining."""
        return split_and_join_cost(self.axes, sizes, self.c_s, self.c_z)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``z``, whole; arguments as for a block, whole."""
        axes, r = self.axes, s.shape[1]
        s = own_tensor(axes.split(s, (1, axes.all)), s)
        z = own_tensor(axes.split(z, (1, axes.rows), (2, axes.columns)), z)
        for block in self.blocks:
            s, z = block(s, z, mask, pair_mask, not torch.is_grad_enabled())
        return axes.join(s, (1, axes.all, r)), axes.join(z, (1, axes.rows, r), (2, axes.columns, r))


def split_and_join_cost(axes: Axes, sizes: Sizes, c_s: int, c_z: int) -> list[CostEntry]:
    """Return the collectives of splitting and joining a single representation and pairs."""
    r, s, z = sizes.residues, sizes.single(axes, c_s), sizes.pair(axes, c_z)
    one, two = [(axes.all, r)], [(axes.rows, r), (axes.columns, r)]
    entries = split_cost(axes, "s", s, *one) + split_cost(axes, "z", z, *two)
    return entries + join_cost(axes, "s", s, *one) + join_cost(axes, "z", z, *two)
