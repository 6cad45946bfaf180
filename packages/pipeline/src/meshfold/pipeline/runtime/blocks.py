"""The repeated blocks of a model: where they are, how many each stage gets, and one module object per position.

Stages and gates count positions in the list. A module that occurs twice in it, or in it and elsewhere in the model, is replaced
there by another module object with the same parameters and buffers. Its weights are then tied, as an embedding and a head may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfold.mesh import LayoutError


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A run of blocks in an nn.ModuleList, nn.Sequential or nn.ModuleDict.

    Attributes:
        name: full name of the list.
        container: the list.
        keys: the blocks' names in it, in order.
        aliases: other full names of the list.
    """

    name: str
    container: nn.Module
    keys: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def members(self) -> tuple[nn.Module, ...]:
        """The present blocks."""
        return tuple(self.container.get_submodule(key) for key in self.keys)

    def index_of(self, name: str) -> int | None:
        """Return the index of the block that a parameter or module lies in, by its full name; None if it lies in none."""
        for path in (self.name, *self.aliases):
            front = f"{path}." if path else ""
            key = name.removeprefix(front).split(".", 1)[0]
            if name.startswith(front) and key in self.keys:
                return self.keys.index(key)
        return None


def find_blocks(model: nn.Module, name: str | None = None) -> Blocks:
    """Return the list with the most parameters whose members are of one class, from the first of that class to the last.

    An nn.ModuleDict is used only if there is no other list. A module may occur at several positions.

    Args:
        model: any module; lists inside lists are ignored.
        name: full name of the list to take instead.

    Raises:
        LayoutError: if no list is found, or ``name`` is no list.
    """
    found = _lists_of(model, name, nn.ModuleList, nn.Sequential) or _lists_of(model, name, nn.ModuleDict)
    if found:
        return max(found, key=lambda entry: entry[0])[1]
    if name is not None:
        raise LayoutError(
            f"blocks={name!r} of {type(model).__name__} is not an nn.ModuleList or nn.Sequential of blocks with parameters"
        )
    raise LayoutError(
        f"{type(model).__name__} has no nn.ModuleList or nn.Sequential of repeated blocks, so it cannot be cut "
        f"into stages: put its layers into an nn.ModuleList"
    )


def _lists_of(model: nn.Module, name: str | None, *classes: type[nn.Module]) -> list[tuple[int, Blocks]]:
    """Return the lists of repeated blocks, or only the one with this name, each with its number of parameters."""
    found: list[tuple[int, Blocks]] = []
    for path, module in model.named_modules():
        if name is not None and path != name:
            continue
        if not isinstance(module, classes):
            continue
        members = {key: child for key, child in module._modules.items() if child is not None}
        sizes = {key: sum(p.numel() for p in child.parameters()) for key, child in members.items()}
        kinds = {key: type(child) for key, child in members.items()}
        common = Counter(kinds[key] for key, size in sizes.items() if size).most_common(1)
        if not common or (common[0][1] < 2 and name is None):
            continue
        places = [place for place, key in enumerate(sizes) if kinds[key] is common[0][0] and sizes[key]]
        keys = tuple(sizes)[places[0] : places[-1] + 1]
        names = (other for other, one in model.named_modules(remove_duplicate=False) if one is module)
        aliases = tuple(other for other in names if other != path)
        size = sum(sizes[key] for key in keys)
        found.append((size, Blocks(name=path, container=module, keys=keys, aliases=aliases)))
    return found


def balance_blocks(costs: Sequence[float], stages: int, *, before: float = 0.0, after: float = 0.0) -> list[int]:
    """Return how many blocks each stage gets: the most expensive stage is as cheap as possible, the others are even.

    Args:
        costs: of every block, in any unit of time.
        stages: how many; each gets one block at least.
        before: cost of the code before the blocks, in the first stage.
        after: cost of the code after them, in the last.

    Raises:
        LayoutError: for more stages than blocks, or a cost that is negative.
    """
    count = len(costs)
    if stages > count:
        fitting = f"pipeline={count} with chunks=1" if count > 1 else "leave pipeline out"
        raise LayoutError(
            f"{count} blocks cannot be cut into {stages} stages: each stage has at least one. Use a deeper model, or {fitting}"
        )
    if min((*costs, before, after)) < 0:
        raise LayoutError(f"a negative cost among {[*costs, before, after]}: costs are times")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def cost_of(stage: int, first: int, last: int) -> float:
        return sums[last] - sums[first] + before * (stage == 0) + after * (stage == stages - 1)

    # best[n]: the least cost of the first n blocks in `stage + 1` stages. The first pass finds the lowest cost of the most
    # expensive stage; the second minimises the sum of squares within that limit, to even out the rest.
    limit = float("inf")
    cuts: list[list[int]] = []
    for even in (False, True):
        best = [0.0] + [float("inf")] * count
        cuts = []
        for stage in range(stages):
            following, begins = [float("inf")] * (count + 1), [0] * (count + 1)
            for last in range(stage + 1, count + 1):
                for first in range(stage, last):
                    cost = cost_of(stage, first, last)
                    if cost > limit * (1 + 1e-9):
                        continue
                    value = best[first] + cost * cost if even else max(best[first], cost)
                    if value < following[last]:
                        following[last], begins[last] = value, first
            best = following
            cuts.append(begins)
        if not even:
            limit = best[count]
    counts, last = [], count
    for begins in reversed(cuts):
        counts.append(last - begins[last])
        last = begins[last]
    return counts[::-1]


def separate_repeated_blocks(model: nn.Module, blocks: Blocks) -> list[int]:
    """Make each position's block a separate module object, in place. Return for each position the first one with the same block."""
    lists = {path for path, module in model.named_modules(remove_duplicate=False) if module is blocks.container}
    places = {f"{path}.{key}" if path else key for path in lists for key in blocks.keys}
    stands = Counter(module for path, module in model.named_modules(remove_duplicate=False) if path not in places)
    first: dict[nn.Module, int] = {}
    same = []
    for index, key in enumerate(blocks.keys):
        block = blocks.container._modules[key]
        assert block is not None  # a block has parameters or is called
        same.append(first.setdefault(block, index))
        if stands[block]:
            blocks.container._modules[key] = shallow_twin(block)
        stands[block] += 1
    return same


def shallow_twin(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Return another module object with the same parameters, buffers and attributes, submodules included."""
    made = {} if made is None else made
    if module not in made:
        if "_orig_mod" in module._modules:
            kind = type(module._modules["_orig_mod"]).__name__
            raise LayoutError(
                f"a compiled {kind} is in the model several times: write block.compile() instead of torch.compile(block)"
            )
        twin = made[module] = object.__new__(type(module))
        for name, value in module.__dict__.items():
            twin.__dict__[name] = _own(value)
        twin._compiled_call_impl = None  # it is bound to the original module
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else shallow_twin(child, made)
    return made[module]


def _own(value: Any) -> Any:
    """Copy an attribute that is a dict, so that each of the two modules has its own parameters and hooks."""
    return value.copy() if isinstance(value, dict) else value
