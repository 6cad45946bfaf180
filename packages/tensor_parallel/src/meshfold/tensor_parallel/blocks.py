"""The lists of blocks of a model: what repeats, from the first block that is split to the last."""

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
        """Whether a module is one of the blocks or lies in one."""
        return any(name == member or name.startswith(f"{member}.") for member in self.members)


def find_blocks(modules: Mapping[str, nn.Module], split: Sequence[str]) -> list[Blocks]:
    """The outermost lists whose members hold layers that are split.

    Args:
        modules: all modules of the model by full name, parents first.
        split: full names of the column and row layers.
    """
    found: list[Blocks] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            blocks.holds(name) for blocks in found
        ):
            continue
        members = {f"{name}.{leaf}" if name else leaf: child for leaf, child in module.named_children()}
        holding = [
            i
            for i, member in enumerate(members)
            if any(s == member or s.startswith(f"{member}.") for s in split)
        ]
        if holding:
            names = list(members)[holding[0] : holding[-1] + 1]
            found.append(Blocks(name=name, members={n: members[n] for n in names}))
    return found
