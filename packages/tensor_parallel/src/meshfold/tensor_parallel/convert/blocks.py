"""Lists of blocks: the repeated part of a model, from the first block that is split to the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn


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
        """The block that the stream enters by."""
        return next(iter(self.members.values()))

    @property
    def last(self) -> nn.Module:
        """The block that it leaves by."""
        return list(self.members.values())[-1]

    def holds(self, name: str) -> bool:
        """Return True if a module is one of the blocks or lies in one."""
        return any(_lies_in(name, member) for member in self.members)


def find_blocks(
    modules: Mapping[str, nn.Module], columns: Sequence[str], rows: Sequence[str], *, one_by_one: bool = False
) -> list[Blocks]:
    """Find the outermost lists of blocks: each member with layers to split has column layers and the row layers behind.

    A list whose members are single layers, such as an MLP in an nn.Sequential, is no list of blocks.

    Args:
        modules: all modules of the model by full name, parents first.
        columns: full names of the column layers.
        rows: full names of the row layers.
        one_by_one: return each block by itself, as if it had a list of its own. A list in which a block stands twice is
            always returned so: it is left and entered again in between.
    """
    found: list[Blocks] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            blocks.holds(name) for blocks in found
        ):
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
