"""The trunk of ESMFold (Lin et al. 2023, doi:10.1126/science.ade2574) on blocks, with transformers' parameter names.

:func:`meshfold.folding.adopt_models` puts it in the place of transformers' own trunk, with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding import functions
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
from meshfold.folding.primitives import LayerNorm
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

    def forward(self, s: Tensor) -> Tensor:
        """``b r c_s -> b i j c_z``: this rank's residues to its block of pairs."""
        columns, rows = self.proj(self.layernorm(s)).chunk(2, -1)
        rows, columns = residue_pairs(self.axes, rows, columns)
        y: Tensor = self.o_proj(torch.cat((columns * rows, columns - rows), -1))
        return y


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

    def forward(self, z: Tensor) -> Tensor:
        """``b i j c_z -> b i j h``."""
        y: Tensor = self.linear(self.layernorm(z))
        return y


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


class ResidueMLP(nn.Module):
    """``x + dropout(W(relu(V(norm(x)))))``, for residues and for pairs."""

    def __init__(self, c: int, c_hidden: int, dropout: nn.Module) -> None:
        """Args:
        c: channels.
        c_hidden: channels between the layers.
        dropout: applied to the update.
        """
        super().__init__()
        self.mlp = nn.Sequential(LayerNorm(c), nn.Linear(c, c_hidden), nn.ReLU(), nn.Linear(c_hidden, c), dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``.. c -> .. c``."""
        y: Tensor = x + self.mlp(x)
        return y


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
        self, s: Tensor, z: Tensor, mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the next single representation and pair tensor.

        Args:
            s: ``b r c_s``, this rank's residues, split over all axes.
            z: ``b r r c_z``, this rank's block.
            mask: ``b r``, whole on every rank and without padding; None: all count, and nothing is padded.
            pair_mask: ``b r r``, likewise.
        """
        bias = self.pair_to_sequence(z)
        s = s + self.drop(self.seq_attention(self.layernorm_1(s), bias, mask))
        s = self.mlp_seq(s)
        z = z + self.sequence_to_pair(s)
        z = z + self.row_drop(self.tri_mul_out(z, pair_mask))
        z = z + self.col_drop(self.tri_mul_in(z, pair_mask))
        z = z + self.row_drop(self.tri_att_start(z, pair_mask))
        z = z + self.col_drop(self.tri_att_end(z, pair_mask))
        return s, self.mlp_pair(z)


class RelativePosition(nn.Module):
    """Embedding of the distance of two residues along the sequence."""

    def __init__(self, bins: int, c_z: int) -> None:
        """Args:
        bins: distances beyond so many residues are alike.
        c_z: channels of pairs.
        """
        super().__init__()
        self.bins = bins
        self.embedding = nn.Embedding(2 * bins + 2, c_z)
        self.axes: Axes = WHOLE

    def forward(self, residue_index: Tensor, pair_mask: Tensor) -> Tensor:
        """Return this rank's block ``b i j c_z``. The first row of the table is for masked pairs.

        Args:
            residue_index: positions along the sequence, ``b r``, whole on every rank.
            pair_mask: ``b r r``, likewise.
        """
        axes = self.axes
        rows, columns = (axes.take(residue_index, 1, names) for names in (axes.rows, axes.columns))
        distance = (columns.unsqueeze(1) - rows.unsqueeze(2)).clamp(-self.bins, self.bins) + self.bins + 1
        own = axes.take(axes.take(pair_mask, 1, axes.rows), 2, axes.columns)
        y: Tensor = self.embedding(distance.masked_fill(own == 0, 0))
        return y


class EsmFoldTrunk(nn.Module):
    """The trunk of ESMFold: blocks, recycling and the structure module, on whole tensors, which every rank has.

    Pair tensors are split while blocks run, from one recycle to the next. The structure module sees whole tensors, on every rank.
    """

    def __init__(
        self,
        blocks: list[EsmFoldBlock],
        c_s: int,
        c_z: int,
        *,
        position_bins: int,
        max_recycles: int,
        structure_module: nn.Module,
        trunk2sm_s: nn.Linear,
        trunk2sm_z: nn.Linear,
    ) -> None:
        """Args:
        blocks: the blocks.
        c_s, c_z: channels of the single representation and of pairs.
        position_bins: residues along the sequence that are told apart.
        max_recycles: passes if a call does not say how many.
        structure_module: called with a dict of the single representation and pairs, residue types and a mask, all whole.
        trunk2sm_s, trunk2sm_z: from the channels of the trunk to those of the structure module.
        """
        super().__init__()
        self.c_s, self.c_z, self.max_recycles = c_s, c_z, max_recycles
        self.pairwise_positional_embedding = RelativePosition(position_bins, c_z)
        self.blocks = nn.ModuleList(blocks)
        self.recycle_bins = 15
        self.recycle_s_norm = _on_blocks(LayerNorm(c_s))
        self.recycle_z_norm = _on_blocks(LayerNorm(c_z))
        self.recycle_disto = _on_blocks(nn.Embedding(self.recycle_bins, c_z))
        self.structure_module = structure_module
        self.trunk2sm_s = trunk2sm_s
        self.trunk2sm_z = trunk2sm_z
        self.on_recycle: Callable[[int, int], None] | None = None
        name_dropouts(self)
        self.axes: Axes = WHOLE

    def set_chunk_size(self, chunk_size: int | None) -> None:
        """Do nothing: attention is computed in parts as it is. transformers' trunk has this method."""

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting, once, and of joining, in each pass."""
        axes, r = self.axes, sizes.residues
        s, z = sizes.single(axes, self.c_s), sizes.pair(axes, self.c_z)
        one, two = [(axes.all, r)], [(axes.rows, r), (axes.columns, r)]
        entries = split_cost(axes, "s", s, *one) + split_cost(axes, "z", z, *two)
        return entries + join_cost(axes, "s", s, *one) + join_cost(axes, "z", z, *two)

    def forward(
        self,
        seq_feats: Tensor,
        pair_feats: Tensor,
        true_aa: Tensor,
        residx: Tensor,
        mask: Tensor,
        no_recycles: int | None,
    ) -> dict[str, Any]:
        """Return what the structure module returns, and the last ``s_s`` and ``s_z``, whole.

        Args:
            seq_feats: single representation, ``b r c_s``.
            pair_feats: pairs, ``b r r c_z``.
            true_aa: residue types, ``b r``.
            residx: positions along the sequence, ``b r``.
            mask: ``b r``: 1 for a residue that counts.
            no_recycles: passes after the first, of which only the last has gradients; None: ``max_recycles`` passes.

        Raises:
            ValueError: if that is no pass.
        """
        axes, r = self.axes, seq_feats.shape[1]
        passes = self.max_recycles if no_recycles is None else no_recycles + 1
        if passes < 1:
            given = (
                f"max_recycles={passes} in the configuration" if no_recycles is None else f"no_recycles={no_recycles}"
            )
            raise ValueError(f"{given}: the trunk needs at least one pass; give no_recycles from 0 up")
        pair_mask = mask.unsqueeze(2) * mask.unsqueeze(1)
        s_0 = axes.split(seq_feats, (1, axes.all))
        z_0 = axes.split(pair_feats, (1, axes.rows), (2, axes.columns))
        s, z = torch.zeros_like(s_0), torch.zeros_like(z_0)
        bins = torch.zeros(z_0.shape[:-1], device=z_0.device, dtype=torch.int64)
        structure: dict[str, Any] = {}
        for number in range(passes):
            if self.on_recycle is not None:
                self.on_recycle(number, passes)
            with nullcontext() if number == passes - 1 else torch.no_grad():
                s = s_0 + self.recycle_s_norm(s.detach())
                z = z_0 + self.recycle_z_norm(z.detach()) + self.recycle_disto(bins)
                z = z + self.pairwise_positional_embedding(residx, pair_mask)
                for block in self.blocks:
                    s, z = block(s, z, mask, pair_mask)
                whole_s = axes.join(s, (1, axes.all, r))
                whole_z = axes.join(z, (1, axes.rows, r), (2, axes.columns, r))
                inputs = {"single": self.trunk2sm_s(whole_s), "pair": self.trunk2sm_z(whole_z)}
                structure = self.structure_module(inputs, true_aa, mask.float())
                structure["s_s"], structure["s_z"] = whole_s, whole_z
                if number < passes - 1:
                    bins = self._distance_bins(structure["positions"][-1][:, :, :3])
        return structure

    def _distance_bins(self, backbone: Tensor) -> Tensor:
        """Return the bins of the distances of Cβ atoms, this rank's block ``b i j``; ``backbone``: N, CA and C, ``b r 3 3``."""
        n, ca, c = backbone.unbind(-2)
        b, c = ca - n, c - ca
        cb = -0.58273431 * b.cross(c, dim=-1) + 0.56802827 * b - 0.54067466 * c + ca
        rows, columns = (self.axes.take(cb, 1, names) for names in (self.axes.rows, self.axes.columns))
        edges = torch.linspace(3.375, 21.375, self.recycle_bins - 1, device=cb.device) ** 2
        squares = (columns.unsqueeze(1) - rows.unsqueeze(2)).pow(2).sum(-1)
        return (squares.unsqueeze(-1) > edges).sum(-1)


def _on_blocks(module: nn.Module) -> nn.Module:
    """Mark a plain module that sees blocks, so that its gradients are summed."""
    module.axes = WHOLE  # type: ignore[assignment]
    return module
