"""Analysis of a model before it is changed: roles, heads, blocks, and the mode of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfold.mesh import Mesh
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.denoisers import is_denoiser
from meshfold.tensor_parallel.convert.heads import find_heads
from meshfold.tensor_parallel.convert.roles import WHOLE, classify
from meshfold.tensor_parallel.modes import Mode, outside_blocks
from meshfold.tensor_parallel.module_kinds import features


class Analysis:
    """A model analysed for a mode.

    Attributes:
        modules: all of them by full name, parents first.
        roles: of each module.
        vocabulary: words in the head, or in the token table of a model without one.
        flat: the model's own code works on ``m h``.
        heads: of each attention module that is split.
        lists: the lists of blocks.
        begins: the residual stream begins inside of the model, at an embedding, patches or a stem, or in a denoiser.
        by_sequences: the stream's tokens are split by whole sequences.
        only_blocks: tokens are split within sequences, only in the lists of blocks. Outside them the stream is whole, since the
            model's own code reads batch and length there.
        outer: the mode outside of the blocks.
        boundaries: of lists of blocks, or of the model (None): there the stream is split and gathered.
        stand_ins: attention whose code takes its width from its input, with the width of this rank's heads; found by
            :func:`.checks.check_analysis`.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        mode: Mode,
        rules: Mapping[str, str],
        *,
        blocks_apart: bool = False,
        adapted: bool = False,
    ) -> None:
        """Args:
        blocks_apart: each block splits and joins the stream separately.
        adapted: projections have adapters that read their input too.
        """
        self.model, self.mesh, self.mode, self.rules = model, mesh, mode, rules
        self.adapted = adapted
        self.modules = dict(model.named_modules())
        residual = mode.layout("residual")
        self.roles = classify(model, rules, splits_stream=mesh.size(*residual["m"], *residual["h"]) > 1)
        self.vocabulary = self._vocabulary()
        self.flat = bool(getattr(model, "flat_tokens", False))
        self.heads = {
            name: heads
            for name, module in self.modules.items()
            if not self._is_whole(name) and (heads := find_heads(name, module))
        }
        columns, rows = self.roles.named("column"), self.roles.named("row")
        self.lists = find_blocks(self.modules, columns, rows, one_by_one=blocks_apart)
        self.begins = any(self.roles.named(role) for role in ("embedding", "patch", "stem", "source")) or any(
            is_denoiser(module) for module in self.modules.values()
        )
        hidden = mode.layout("hidden")
        self.by_sequences = bool(hidden["m"]) or not residual["m"]
        self.only_blocks = self.begins and not self.flat and not self.by_sequences
        self.outer = outside_blocks(mode) if self.only_blocks else mode
        self.boundaries = self._boundaries()
        self.stand_ins: dict[str, int] = {}

    def mode_at(self, name: str) -> Mode:
        """Return the mode that applies at a module."""
        inside = not self.only_blocks or any(blocks.holds(name) for blocks in self.lists)
        return self.mode if inside else self.outer

    def flat_at(self, name: str) -> Boundary | None:
        """Return the boundary at which the stream that a module sees was flattened; None if it was not."""
        for blocks, boundary in self.boundaries:
            if boundary.flatten and (blocks is None or blocks.holds(name)):
                return boundary
        return None

    def children(self, name: str, role: str) -> list[str]:
        """Return the full names of a module's direct children of a role."""
        leaves = (f"{name}.{leaf}" if name else leaf for leaf, _ in self.modules[name].named_children())
        return [full for full in leaves if self.roles.role.get(full) == role]

    def needs_region(self, name: str) -> bool:
        """Return True if attention's own code would miscount its tokens where its layers gather their input themselves."""
        if name not in self.heads or self.flat:
            return False
        return self.mode_at(name).plans["column"].changes_tokens or self.flat_at(name) is not None

    def is_by_tokens(self, name: str) -> bool:
        """Return True if a linear layer is one of attention's that are computed by tokens (``Mode.attention``)."""
        attention = name.rpartition(".")[0]
        if attention not in self.heads or not self.mode_at(name).attention:
            return False
        return self.roles.role.get(name) in ("column", "row")

    def _is_whole(self, name: str) -> bool:
        """Return True if a module stays whole, or is inside one that stays whole."""
        whole = [name for role in WHOLE for name in self.roles.named(role)]
        return any(not kept or name == kept or name.startswith(f"{kept}.") for kept in whole)

    def _vocabulary(self) -> int:
        heads = [features(self.modules[name])[1] for name in self.roles.named("head")]
        tables: list[Any] = [self.modules[name] for name in self.roles.named("embedding")]
        return heads[0] if heads else max((table.num_embeddings for table in tables), default=0)

    def _boundaries(self) -> list[tuple[Blocks | None, Boundary]]:
        if self.only_blocks:
            return [(blocks, Boundary(self.mesh, self.mode, flatten=True)) for blocks in self.lists]
        if not self.begins:
            return [(None, Boundary(self.mesh, self.mode, flatten=not self.by_sequences and not self.flat))]
        return []


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A run of blocks in an nn.ModuleList or nn.Sequential.

    Attributes:
        name: full name of the list.
        members: the blocks by full name, those without a layer to split in between included.
    """

    name: str
    members: Mapping[str, nn.Module]

    @property
    def first(self) -> nn.Module:
        """The block where the stream enters."""
        return next(iter(self.members.values()))

    @property
    def last(self) -> nn.Module:
        """The block where it leaves."""
        return list(self.members.values())[-1]

    def holds(self, name: str) -> bool:
        """Return True if a module is one of the blocks or inside one."""
        return any(_lies_in(name, member) for member in self.members)


def find_blocks(
    modules: Mapping[str, nn.Module], columns: Sequence[str], rows: Sequence[str], *, one_by_one: bool = False
) -> list[Blocks]:
    """Find the outermost lists of blocks: each member with layers to split has column layers and the row layers after them.

    A list whose members are single layers, such as an MLP in an nn.Sequential, is not a list of blocks.

    Args:
        modules: all modules of the model by full name, parents first.
        columns: full names of the column layers.
        rows: full names of the row layers.
        one_by_one: return each block separately, as if it had its own list. A list in which a block occurs twice is
            always returned so, since it is left and entered again in between.
    """
    found: list[Blocks] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(blocks.holds(name) for blocks in found):
            continue
        members: dict[str, nn.Module] = {}
        for leaf, child in module._modules.items():
            if child is not None and all(child is not other for other in members.values()):
                members[f"{name}.{leaf}" if name else leaf] = child
        reads = [any(_lies_in(column, member) for column in columns) for member in members]
        writes = [any(_lies_in(row, member) for row in rows) for member in members]
        if reads != writes or not any(reads):
            continue
        holding = [i for i, holds in enumerate(reads) if holds]
        if one_by_one or len(members) < len(module._modules):
            names = list(members)
            found += [Blocks(name=names[i], members={names[i]: members[names[i]]}) for i in holding]
        else:
            names = list(members)[holding[0] : holding[-1] + 1]
            found.append(Blocks(name=name, members={n: members[n] for n in names}))
    return found


def _lies_in(name: str, member: str) -> bool:
    return name == member or name.startswith(f"{member}.")
