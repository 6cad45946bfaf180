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
from meshfold.folding.memory import Parts, add_update, own_tensor, run_block, run_parts
from meshfold.folding.primitives import LayerNorm, run_positions
from meshfold.folding.stack import Shapes, Stack
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
            some = rows.narrow(1, first, size)
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
        return _split_and_join_cost(self.axes, sizes, self.c_s, self.c_z)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``z``, whole; arguments as for a block, whole."""
        axes, r = self.axes, s.shape[1]
        s = own_tensor(axes.split(s, (1, axes.all)), s)
        z = own_tensor(axes.split(z, (1, axes.rows), (2, axes.columns)), z)
        for block in self.blocks:
            s, z = block(s, z, mask, pair_mask, not torch.is_grad_enabled())
        return axes.join(s, (1, axes.all, r)), axes.join(z, (1, axes.rows, r), (2, axes.columns, r))


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

    def rows_of(self, residue_index: Tensor, pair_mask: Tensor) -> Tensor:
        """Return the rows of the table for this rank's block of pairs, ``b i j``; the first one is for masked pairs.

        Args:
            residue_index: positions along the sequence, ``b r``, whole on every rank.
            pair_mask: ``b r r``, likewise.
        """
        axes = self.axes
        rows, columns = (axes.take(residue_index, 1, names) for names in (axes.rows, axes.columns))
        distance = (columns.unsqueeze(1) - rows.unsqueeze(2)).clamp(-self.bins, self.bins) + self.bins + 1
        own = axes.take(axes.take(pair_mask, 1, axes.rows), 2, axes.columns)
        return distance.masked_fill(own == 0, 0)

    def forward(self, rows: Tensor) -> Tensor:
        """``b i j -> b i j c_z``."""
        y: Tensor = self.embedding(rows)
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

    def stack(self) -> EsmFoldStack:
        """Return blocks like these on the meta device: pass it to :func:`meshfold.folding.plan_memory`."""
        block: Any = self.blocks[0]
        widths = (
            block.seq_attention.o_proj.in_features // block.seq_attention.no_heads,
            block.tri_att_start.mha.c_hidden,
        )
        with torch.device("meta"):
            made = EsmFoldStack(len(self.blocks), self.c_s, self.c_z, *widths, dropout=block.drop.p)
        return made.train(self.training)

    def own_traffic(self, sizes: Sizes) -> list[CostEntry]:
        """Return the collectives of splitting, once, and of joining, in each pass."""
        return _split_and_join_cost(self.axes, sizes, self.c_s, self.c_z)

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
        positions = self.pairwise_positional_embedding.rows_of(residx, pair_mask)
        structure: dict[str, Any] = {}
        for number in range(passes):
            if self.on_recycle is not None:
                self.on_recycle(number, passes)
            last = number == passes - 1
            with nullcontext() if last else torch.no_grad():
                s = s_0 + self.recycle_s_norm(s.detach())
                z = self._first_pairs(z_0, z.detach(), bins, positions)
                for block in self.blocks:
                    s, z = block(s, z, mask, pair_mask, not torch.is_grad_enabled())
                whole_s = axes.join(s, (1, axes.all, r))
                whole_z = axes.join(z, (1, axes.rows, r), (2, axes.columns, r))
                inputs = {"single": self.trunk2sm_s(whole_s), "pair": self.trunk2sm_z(whole_z)}
                if not last:
                    del whole_s, whole_z  # the structure module and the next pass need room
                structure = self.structure_module(inputs, true_aa, mask.float())
                if not last:
                    bins = self._distance_bins(structure["positions"][-1][:, :, :3])
                    structure = {}
        structure["s_s"], structure["s_z"] = whole_s, whole_z
        return structure

    def _first_pairs(self, z_0: Tensor, recycled: Tensor, bins: Tensor, positions: Tensor) -> Tensor:
        """Return what the blocks get, this rank's block ``b i j c_z``, some rows at a time.

        Args:
            z_0: pairs that the trunk was called with.
            recycled: pairs of the pass before.
            bins: of distances in the structure of the pass before, ``b i j``.
            positions: rows of the table of positions, ``b i j``.
        """

        def compute(first: int, size: int) -> Tensor:
            before, pair, near, far = (x.narrow(1, first, size) for x in (z_0, recycled, bins, positions))
            y: Tensor = before + self.recycle_z_norm(pair) + self.recycle_disto(near)
            return y.add_(self.pairwise_positional_embedding(far))

        parts = Parts.of(self.axes.memory, z_0.shape[1], 4 * z_0[:, :1].numel() * z_0.element_size())
        return run_parts(parts, compute, 1)

    def _distance_bins(self, backbone: Tensor) -> Tensor:
        """Return the bins of the distances of Cβ atoms, this rank's block ``b i j``; ``backbone``: N, CA and C, ``b r 3 3``."""
        n, ca, c = backbone.unbind(-2)
        b, c = ca - n, c - ca
        cb = -0.58273431 * b.cross(c, dim=-1) + 0.56802827 * b - 0.54067466 * c + ca
        rows, columns = (self.axes.take(cb, 1, names) for names in (self.axes.rows, self.axes.columns))
        edges = torch.linspace(3.375, 21.375, self.recycle_bins - 1, device=cb.device) ** 2
        squares = (columns.unsqueeze(1) - rows.unsqueeze(2)).pow(2).sum(-1)
        return (squares.unsqueeze(-1) > edges).sum(-1)


def _split_and_join_cost(axes: Axes, sizes: Sizes, c_s: int, c_z: int) -> list[CostEntry]:
    r, s, z = sizes.residues, sizes.single(axes, c_s), sizes.pair(axes, c_z)
    one, two = [(axes.all, r)], [(axes.rows, r), (axes.columns, r)]
    entries = split_cost(axes, "s", s, *one) + split_cost(axes, "z", z, *two)
    return entries + join_cost(axes, "s", s, *one) + join_cost(axes, "z", z, *two)


def _on_blocks(module: nn.Module) -> nn.Module:
    """Mark a plain module that sees blocks, so that its gradients are summed."""
    module.axes = WHOLE  # type: ignore[assignment]
    return module
