"""The trunk of ESMFold: blocks, recycling and the structure module, with transformers' parameter names.

:func:`meshfold.folding.adopt_models` puts it in the place of transformers' own trunk, with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.folding.axial.axes import WHOLE, Axes
from meshfold.folding.axial.sizes import Sizes, join_cost
from meshfold.folding.dropout import name_dropouts
from meshfold.folding.esmfold import EsmFoldBlock, EsmFoldStack, split_and_join_cost
from meshfold.folding.memory import Parts, run_parts
from meshfold.folding.primitives import LayerNorm
from meshfold.folding.stack import Chooser
from meshfold.folding.structure_rows import PairRows, output_channels, run_structure_module
from meshfold.tensor_parallel import CostEntry


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

    Pair tensors are split while blocks run, from one recycle to the next. The structure module sees whole tensors, on every rank,
    unless ``keeps_rows``.

    Attributes:
        keeps_rows: without gradients, the structure module sees the rows of pairs that each rank has, and ``s_z`` of the result is
            a :class:`.PairRows`: no rank ever has whole pairs.
        chooser: returns chunks and recomputation for the sizes of a batch, as of a :class:`.Stack`; None: those of ``axes``.
        on_recycle: called before each pass with its number, from 0, and how many there are.
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
        self.keeps_rows = False
        self.chooser: Chooser | None = None
        self._planned: list[EsmFoldStack] = []  # a list, so that it is no child
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
        if not self.keeps_rows:
            return split_and_join_cost(self.axes, sizes, self.c_s, self.c_z)
        axes, r = self.axes, sizes.residues
        module: Any = self.structure_module
        found = join_cost(axes, "s", sizes.single(axes, self.c_s), (axes.all, r))
        found += join_cost(axes, "z", sizes.pair(axes, self.c_z), (axes.columns, r))
        lines = sizes.batch * axes.padded(r) // axes.mesh.size(*axes.rows)
        for _ in range(module.config.num_blocks):
            wide = max(sizes.itemsize, 4) * output_channels(module.ipa)
            found += join_cost(axes, "points", lines * wide, (axes.rows, r))
        return found

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
        self._choose_memory(pair_feats)
        s_0 = axes.split(seq_feats, (1, axes.all))
        z_0 = self._split_pairs(pair_feats)
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
                if self.keeps_rows and not torch.is_grad_enabled():
                    structure = self._structure_of_rows(z, whole_s, true_aa, mask)
                else:
                    whole_z = axes.join(z, (1, axes.rows, r), (2, axes.columns, r))
                    inputs = {"single": self.trunk2sm_s(whole_s), "pair": self.trunk2sm_z(whole_z)}
                    if not last:
                        del whole_s, whole_z  # the structure module and the next pass need room
                    structure = self.structure_module(inputs, true_aa, mask.float())
                if not last:
                    bins = self._distance_bins(structure["positions"][-1][:, :, :3])
                    structure = {}  # the next pass needs room
        if "s_z" not in structure:
            structure["s_s"], structure["s_z"] = whole_s, whole_z
        return structure

    def _structure_of_rows(self, z: Tensor, whole_s: Tensor, types: Tensor, mask: Tensor) -> dict[str, Any]:
        """Return what the structure module returns for this rank's block of pairs, and the last representations."""
        axes = self.axes
        rows = PairRows(axes.join(z, (2, axes.columns, mask.shape[1])), axes)
        single = self.trunk2sm_s(whole_s)
        found = run_structure_module(self.structure_module, single, rows, self.trunk2sm_z, types, mask.float())
        return {**found, "s_s": whole_s, "s_z": rows}

    def _split_pairs(self, pairs: Tensor) -> Tensor:
        """Return this rank's block of pairs ``b r r c``; of an expanded number the same number."""
        axes = self.axes
        if any(pairs.stride()):
            return axes.split(pairs, (1, axes.rows), (2, axes.columns))
        padded = axes.padded(pairs.shape[1])
        lines, columns = (padded // axes.mesh.size(*names) for names in (axes.rows, axes.columns))
        return pairs[:1, :1, :1, :1].expand(pairs.shape[0], lines, columns, pairs.shape[3])

    def _choose_memory(self, z: Tensor) -> None:
        """Take the settings that :attr:`chooser` returns for pairs ``b r r c_z``; nothing without one."""
        if self.chooser is None:
            return
        if not self._planned:
            self._planned.append(self.stack())
        self._planned[0].axes = self.axes
        settings = self.chooser(self._planned[0], z, dict(residues=z.shape[1], batch=z.shape[0]))
        if self.axes.memory != settings:
            axes = replace(self.axes, memory=settings)
            split: list[Any] = [module for module in self.modules() if isinstance(getattr(module, "axes", None), Axes)]
            for module in split:
                module.axes = axes

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


def _on_blocks(module: nn.Module) -> nn.Module:
    """Mark a plain module that sees blocks, so that its gradients are summed."""
    module.axes = WHOLE  # type: ignore[assignment]
    return module
