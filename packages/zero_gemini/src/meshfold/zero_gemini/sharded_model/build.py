"""Construction of Gemini's parts: a model's parameters, their layout, and their stepper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels import Fp8Weight
from meshfold.mesh import Group, Mesh
from meshfold.mesh.parameters import ROLE, copy_parameter_hooks
from meshfold.zero_gemini.chunks.layout import ChunkSpec, ShardSlice
from meshfold.zero_gemini.chunks.parameter_table import (
    ParameterFacts,
    lay_out_members,
    members_of,
    parameter_facts,
)
from meshfold.zero_gemini.errors import Faults, MemoryPlanError
from meshfold.zero_gemini.optimizer import AdamStepper, DiskSettings, GeneralStepper, Stepper
from meshfold.zero_gemini.optimizer.dispatch import adam_regime, optimizer_kind
from meshfold.zero_gemini.optimizer.interface import StepsAtOnce
from meshfold.zero_gemini.optimizer.whole_parameter import WholeStepper

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def take_parameters(
    model: nn.Module,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype | None,
    other: Mapping[Tensor, torch.dtype],
    in_fp8: Mapping[Tensor, Fp8Weight],
) -> tuple[dict[str, ParameterFacts], dict[str, Tensor]]:
    """Return the facts about a model's parameters and their initial values, by name; meta parameters become real.

    Args:
        model: its meta parameters are replaced by real ones, still without elements.
        mesh: the ranks, whose tensor axes split parameters.
        device: of the parameters that replace those on meta.
        dtype: compute dtype of the model; None keeps each parameter's.
        other: compute dtypes of parameters that differ from it.
        in_fp8: parameters that are gathered in fp8, with what multiplies them.
    """
    first = {name: p.detach() for name, p in model.named_parameters()}
    facts = parameter_facts(model, mesh, dtype, other, in_fp8)
    _replace_meta(model, device)
    here = dict(model.named_parameters())
    return {name: replace(one, parameter=here[name]) for name, one in facts.items()}, first


def lay_out_parameters(
    facts: Mapping[str, ParameterFacts], mesh: Mesh, **sizes: Any
) -> Iterator[tuple[Group, Sequence[ChunkSpec], list[list[ShardSlice]]]]:
    """Yield the group, the chunks and this rank's slices of each, for every set of axes that gradients are summed over.

    Args:
        facts: the parameters.
        mesh: the ranks.
        sizes: of chunks, as for :func:`meshfold.zero_gemini.chunks.parameter_table.lay_out_members`.
    """
    for axes, layout in lay_out_members(members_of(facts), mesh, **sizes):
        group = mesh.group(*axes)
        yield group, layout.chunks, [layout.shard_slices(chunk, group.index) for chunk in layout.chunks]


@dataclass(frozen=True, kw_only=True)
class MadeStepper:
    """Stepper of shards, with its settings.

    Attributes:
        stepper: steps the shards.
        group_names: names of the parameters in each of the optimizer's groups.
        regime: of Adam's state.
    """

    stepper: Stepper
    group_names: list[list[str]]
    regime: str


def make_stepper(
    make: MakeOptimizer,
    facts: Mapping[str, ParameterFacts],
    *,
    master_dtype: torch.dtype | None,
    regime: str,
    seed: int,
    disk: DiskSettings | None,
    faults: Faults,
) -> MadeStepper:
    """Return the stepper of an optimizer that is made from stand-in parameters: full shapes, no memory.

    Raises:
        MemoryPlanError: for a regime that this optimizer does not have, or one that cannot run on chunks.
    """
    trained = {name: one for name, one in facts.items() if one.kind.trained}
    stand_ins = {name: nn.Parameter(torch.empty((), device="cpu").expand(one.shape)) for name, one in trained.items()}
    for name, stand_in in stand_ins.items():
        if hasattr(trained[name].parameter, ROLE):
            setattr(stand_in, ROLE, getattr(trained[name].parameter, ROLE))
    # torch refuses an optimizer without parameters, as for a stage whose layers are all frozen.
    made = make(list(stand_ins.values()) or [nn.Parameter(torch.empty(0))])
    looked_at = (trained or facts).values()
    kind = optimizer_kind(made, {(one.kind.dtype, master_dtype or one.kind.dtype) for one in looked_at})
    names = {parameter: name for name, parameter in stand_ins.items()}
    groups = [[names[p] for p in group["params"] if p in names] for group in made.param_groups]
    with_state = bool(made.state)
    made.state.clear()
    stepper: Any
    if kind == "adam":
        regime, seed = adam_regime(made, regime, seed)
        stepper = AdamStepper(made, regime, seed, disk, faults)
        return MadeStepper(stepper=stepper, group_names=groups, regime=regime)
    if regime != "A":
        dtypes = {one.kind.dtype for one in trained.values()}
        raise MemoryPlanError(
            f"regime {regime!r} is how Adam keeps its state, and the optimizer is {type(made).__name__} "
            f"(in {', '.join(map(str, dtypes))}): use adamw or adam with precision='bf16', or regime='A'"
        )
    if kind == "matrices":
        stepper = WholeStepper(
            made,
            master_dtype,
            metas={name: one.meta for name, one in trained.items()},
            shapes={name: one.shape for name, one in trained.items()},
            with_state=with_state,
        )
    else:
        stepper = GeneralStepper(made, master_dtype, with_state=with_state, disk=disk, faults=faults)
    return MadeStepper(stepper=stepper, group_names=groups, regime=regime)


def give_parameters(stepper: Stepper, group_names: Sequence[Sequence[str]]) -> None:
    """Replace the stand-in parameters in the optimizer's groups by this rank's parameters."""
    for group, names in zip(stepper.optimizer.param_groups, group_names, strict=True):
        found = (stepper.optimizer_parameter(name) for name in names)
        group["params"] = [parameter for parameter in found if parameter is not None]
    if isinstance(stepper, StepsAtOnce):
        stepper.begin()


def _replace_meta(model: nn.Module, device: torch.device) -> None:
    """Replace meta parameters by real ones, still empty; tied parameters stay tied."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty(0, dtype=parameter.dtype, device=device)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    made[parameter].__dict__.update(parameter.__dict__)
                    copy_parameter_hooks(parameter, made[parameter])
                module._parameters[name] = made[parameter]
