"""Stages of any model with a repeated block: which rank keeps which parameters, and how its stages run.

Blocks are divided by cost. Modules that run before the blocks go to the first stage, and modules that run after them to the last.
Modules between two blocks go to the earlier block's stage. A forward of the model on meta tensors shows when each runs. A parameter
that stages of several ranks use is kept by all of them (a tie). Everything else is dropped, so a model on the meta device is never
whole anywhere: cut it, then give it its values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, annotate, with_old_names
from meshfold.mesh.parameters import metadata_on
from meshfold.pipeline.runtime.blocks import Blocks, balance_blocks, find_blocks, separate_repeated_blocks
from meshfold.pipeline.runtime.forward_analysis import Example, analyze_forward, some_tokens
from meshfold.pipeline.runtime.partial_forward import PartialForward
from meshfold.pipeline.runtime.placeholders import AbsentBlock, AbsentParameter, set_absent_dtype
from meshfold.pipeline.runtime.stage_assignment import StageAssignment


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Options for cutting a model into stages, running them, and giving them their first values.

    Attributes:
        axis: of the mesh, along which the stages lie.
        example: arguments to call the model with, once, to observe the code before its blocks; None: some token ids.
        device: where stages run; None: where the model's weights are, else the current GPU or the CPU.
        dtype: of the weights of a model that a function makes, or that is on the meta device; None: as it makes them.
        seed: of the first values of these.
        fill: gives the rank's part of a model on the meta device its values and its device, instead of dtype and seed.
        block_costs: time of the code before the blocks, of every block, and of the code after them, in any unit; None: estimated by
            the elements of the matrices that a token meets.
        layers: how many blocks each stage gets, instead of costs.
        blocks: full name of the list of blocks, where it is not the one with most parameters.
    """

    axis: str = "pipe"
    example: Example | None = None
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None
    seed: int = 0
    fill: Callable[[nn.Module], None] | None = None
    block_costs: Sequence[float] | None = None
    layers: Sequence[int] | None = None
    blocks: str | None = None


@dataclass(frozen=True, kw_only=True)
class Tie:
    """A parameter that several ranks keep.

    Attributes:
        name: its first name in the model.
        ranks: coordinates on the pipeline axis of those that keep it, ascending.
    """

    name: str
    ranks: tuple[int, ...]


@with_old_names({"home": "stage_ranks"})
@dataclass(frozen=True, kw_only=True)
class Partition:
    """This rank's stages of a model.

    Attributes:
        model: the remaining parts; names are those of the whole model.
        partial_forward: runs parts of it.
        blocks: the repeated block.
        bounds: stage s has the blocks from bounds[s] to bounds[s + 1], excluded.
        stage_ranks: the rank of every stage, on the pipeline axis.
        rank: this rank's coordinate on it.
        ties: parameters that this rank keeps and others keep as well.
        names: first name in the whole model by every name that is left.
        users: this rank's stages that use a parameter that it keeps, by its first name.
        weights: parameters, or their stand-ins, outside the blocks and all gated modules: module and name in it.
        outside_blocks: all of those outside the blocks, the same on all ranks.
    """

    model: nn.Module
    partial_forward: PartialForward
    blocks: Blocks
    bounds: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    rank: int
    ties: tuple[Tie, ...]
    names: dict[str, str]
    users: dict[str, set[int]]
    weights: tuple[tuple[nn.Module, str], ...]
    outside_blocks: tuple[tuple[nn.Module, str], ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """This rank's stages."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == self.rank)

    def parameter(self, name: str) -> nn.Parameter:
        """Return a kept parameter by its first name in the whole model."""
        here = next(left for left, first in self.names.items() if first == name)
        return self.model.get_parameter(here)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's parameters, each tensor once, by its first name in the whole model."""
        return [(self.names[name], parameter) for name, parameter in self.model.named_parameters()]

    def named_blocks(self) -> dict[str, nn.Module]:
        """Return the repeated blocks that this rank keeps, by full name."""
        prefix = f"{self.blocks.name}." if self.blocks.name else ""
        here = [i for stage in self.stages for i in range(self.bounds[stage], self.bounds[stage + 1])]
        return {f"{prefix}{self.blocks.keys[i]}": self.partial_forward.blocks[i] for i in here}

    def set_absent_dtype(self, dtype: torch.dtype) -> None:
        """Set the dtype of all stand-ins for absent floating-point parameters, without asking other ranks."""
        set_absent_dtype(self.outside_blocks, dtype)

    def loose(self) -> list[Tensor]:
        """Return the current tensors of ``weights``."""
        return [getattr(module, name) for module, name in self.weights]

    def __str__(self) -> str:
        lines = [f"{len(self.blocks)} blocks of {self.blocks.name or 'the model'} in {len(self.stage_ranks)} stages"]
        for stage, rank in enumerate(self.stage_ranks):
            ends = " and what is before them" * (stage == 0) + " and what is behind them" * (
                stage == len(self.stage_ranks) - 1
            )
            lines.append(
                f"stage {stage} on rank {rank}: blocks {self.bounds[stage]} to {self.bounds[stage + 1] - 1}{ends}"
            )
        lines += [f"{tie.name} is kept by ranks {', '.join(map(str, tie.ranks))}" for tie in self.ties]
        return "\n".join(lines)


def partition_model(model: nn.Module, mesh: Mesh, stage_ranks: Sequence[int], config: PartitionConfig) -> Partition:
    """Keep this rank's stages of a model, in place.

    Args:
        model: with real or meta weights, sharded over other axes or not; the same on every rank.
        mesh: has the axis of the pipeline.
        stage_ranks: the rank of every stage, on that axis.
        config: how to cut; None as a device is the CPU.

    Raises:
        LayoutError: for a model that cannot be cut so.
    """
    axis = config.axis
    place = torch.device(config.device or "cpu")
    found = find_blocks(model, config.blocks)
    around = _around(model, found)
    _check_not_compiled(around)
    same = separate_repeated_blocks(model, found)
    beside, containers = _beside(found, around)
    weights = tuple(
        (module, name) for module in (*around, *containers) for name, p in module._parameters.items() if p is not None
    )
    partial_forward = PartialForward(found.members, beside, same=same)
    given = config.example or some_tokens(model, mesh, axis, place)
    look = analyze_forward(model, partial_forward, beside, weights, given, place, _with_shared_buffers(model, found))
    before = {name for name, behind in look.uses.items() if -1 in behind}
    bounds = _bounds(model, found, before, len(stage_ranks), config)
    look.check(bounds, found.name)
    rank = mesh.index(axis)
    assigned = StageAssignment.of(found, look, bounds, stage_ranks)
    partial_forward.forms.check([assigned.blocks_of(rank) for rank in range(max(stage_ranks) + 1)])
    _check_buffers(model, look.changed, assigned.ranks_of)

    stages: dict[Tensor, set[int]] = {}  # that use a parameter
    firsts: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages.setdefault(parameter, set()).update(assigned.stages_of(name))
        firsts.setdefault(parameter, name)
    ranks_of = {kept: tuple(sorted({stage_ranks[stage] for stage in using})) for kept, using in stages.items()}
    ties = _annotate(ranks_of, firsts, mesh, axis)
    slots = _slots(model)
    places = tuple(slot for name, slot in slots if found.index_of(name) is None)

    _remove_blocks(partial_forward, found, assigned, rank)

    def used() -> bool:
        return partial_forward.run is not None and partial_forward.run.inside

    # A module may have several names; only one of them is in the stage.
    _remove_parameters(model, {slot for name, slot in slots if rank in assigned.ranks_of(name)}, place, used)
    names = {name: firsts[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}
    users = {
        firsts[parameter]: {stage for stage in using if stage_ranks[stage] == rank}
        for parameter, using in stages.items()
        if firsts[parameter] in names.values()
    }
    return Partition(
        model=model,
        partial_forward=partial_forward,
        blocks=found,
        bounds=tuple(bounds),
        stage_ranks=tuple(stage_ranks),
        rank=rank,
        ties=tuple(ties),
        names=names,
        users=users,
        weights=weights,
        outside_blocks=places,
    )


def _remove_blocks(partial_forward: PartialForward, blocks: Blocks, assigned: StageAssignment, rank: int) -> None:
    """Put stand-ins in the place of all blocks that other ranks have."""
    here, outside = assigned.blocks_of(rank), assigned.called_outside(rank)
    for index, block in enumerate(partial_forward.blocks):
        if index not in here:
            absent = AbsentBlock(block, outside)
            partial_forward.replace_block(index, absent)
            blocks.container._modules[blocks.keys[index]] = absent


def _annotate(
    ranks_of: Mapping[Tensor, tuple[int, ...]], names: Mapping[Tensor, str], mesh: Mesh, axis: str
) -> list[Tie]:
    """Note on the parameters of this rank which ranks of the pipeline have them; return those that several have."""
    ties = []
    for parameter, ranks in ranks_of.items():
        if mesh.index(axis) in ranks:
            tied = len(ranks) > 1
            if tied:
                ties.append(Tie(name=names[parameter], ranks=ranks))
            tie = names[parameter] if tied else ""
            annotate(parameter, replace(metadata_on(parameter, mesh), tie=tie, only_at={axis: ranks}))
    return ties


def _remove_parameters(
    model: nn.Module, here: Container[tuple[nn.Module, str]], device: torch.device, used: Callable[[], bool]
) -> None:
    """Put stand-ins in the place of all parameters but those that are ``here``."""
    for path, module in model.named_modules():
        for leaf, value in list(module._parameters.items()):
            if value is not None and (module, leaf) not in here:
                del module._parameters[leaf]
                full = f"{path}.{leaf}" if path else leaf
                module.__dict__[leaf] = AbsentParameter.of(value, full, device, used)


def _with_shared_buffers(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the blocks that share a buffer with other modules."""
    places: dict[Tensor, set[int | None]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        places.setdefault(buffer, set()).add(blocks.index_of(name))
    shared = {index for found in places.values() if len(found) > 1 for index in found if index is not None}
    return [blocks.members[index] for index in shared]


def _check_buffers(model: nn.Module, changed: set[Tensor], ranks_of: Callable[[str], set[int]]) -> None:
    """Refuse a buffer that the forward changes and that several ranks have, since each would change its own copy."""
    ranks: dict[Tensor, set[int]] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer in changed:
            ranks.setdefault(buffer, set()).update(ranks_of(name))
            if len(ranks[buffer]) > 1:
                raise LayoutError(
                    f"the forward changes the buffer {name!r}, but its module is in stages on several ranks, each of which "
                    "would change its own copy: use a separate module in every place, or fewer stages"
                )


def _slots(model: nn.Module) -> list[tuple[str, tuple[nn.Module, str]]]:
    """Map every full name of every parameter to its module and its name there."""
    return [
        (f"{path}.{leaf}" if path else leaf, (module, leaf))
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf, value in module._parameters.items()
        if value is not None
    ]


def _around(model: nn.Module, blocks: Blocks) -> list[nn.Module]:
    """Return the list of blocks and the modules that contain it."""
    return [module for module in model.modules() if blocks.container in module.modules()]


def _beside(blocks: Blocks, around: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the largest callable modules that have parameters and no block, and the containers around them."""
    found: list[nn.Module] = []
    containers: list[nn.Module] = []
    waiting = [
        child
        for module in around
        for key, child in module._modules.items()
        if child is not None and child not in around and not (module is blocks.container and key in blocks.keys)
    ]
    waiting.reverse()
    while waiting:
        module = waiting.pop()
        if module in found or module in containers or next(module.parameters(), None) is None:
            continue
        if type(module).forward is nn.Module.forward:
            containers.append(module)
            waiting += reversed([*module.children()])
        else:
            found.append(module)
    return found, containers


def _check_not_compiled(around: Sequence[nn.Module]) -> None:
    """Refuse a model compiled by torch.compile: stages leave its forward in the middle."""
    for module in around:
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            name = type(module._modules.get("_orig_mod", module)).__name__
            raise LayoutError(
                f"{name} is compiled as a whole, but a stage runs a part of its forward: compile the blocks instead of the model, "
                "as in: for block in model.blocks: block.compile()"
            )


def _bounds(
    model: nn.Module,
    blocks: Blocks,
    before: set[str],
    stages: int,
    config: PartitionConfig,
) -> list[int]:
    costs, layers = config.block_costs, config.layers
    counts = list(layers) if layers is not None else []
    if layers is None:
        times = estimate(model, blocks, before) if costs is None else list(costs)
        if len(times) != len(blocks) + 2:
            raise LayoutError(
                f"{len(times)} costs for {len(blocks)} blocks: give (before, one for each block, after), "
                f"{len(blocks) + 2} in all"
            )
        counts = balance_blocks(times[1:-1], stages, before=times[0], after=times[-1])
    elif len(counts) != stages or sum(counts) != len(blocks) or min(counts) < 1:
        raise LayoutError(
            f"layers={tuple(counts)} for {stages} stages of {len(blocks)} blocks: give each stage at least one, "
            f"{len(blocks)} in all"
        )
    return [sum(counts[:stage]) for stage in range(stages + 1)]


def estimate(model: nn.Module, blocks: Blocks, before: set[str]) -> list[float]:
    """Estimate the cost of a token (before, in, and after the blocks): elements of the matrices that it is multiplied with.

    A lookup in a table costs nothing; a head that shares the table costs its product.
    """
    times = [0.0] * (len(blocks) + 2)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Embedding) or type(module).__name__ == "Embedding":
            continue
        for leaf, parameter in module._parameters.items():
            if parameter is None or parameter.dim() < 2:
                continue
            name = f"{path}.{leaf}" if path else leaf
            index = blocks.index_of(name)
            place = 0 if name in before else len(times) - 1
            times[place if index is None else index + 1] += parameter.numel()
    return times
