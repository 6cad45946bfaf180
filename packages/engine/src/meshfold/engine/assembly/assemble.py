"""Turn the user's model into this rank's sharded one, on its device and in its precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from meshfold.engine.assembly.initial_values import InitialValues, read_folder, share
from meshfold.engine.checkpoints.model_state import ModelState
from meshfold.engine.checkpoints.pipelined_state import PipelinedState
from meshfold.engine.experts import give_own_tokens, share_routing_sums, split_experts
from meshfold.engine.folding import split_folding, sum_over_axial_axes
from meshfold.engine.model.checks import (
    check_model,
    refuse_complex,
    refuse_layers,
    refuse_unmade,
    require_trained,
    warn_of_split_batches,
)
from meshfold.engine.model.fp8_weights import fp8_gathered
from meshfold.engine.model.own_casts import keep_dtypes
from meshfold.engine.model.pipelined_model import PipelinedModel, PipelineSettings
from meshfold.engine.model.roots import split_roots
from meshfold.engine.model.weight_source import Loaded
from meshfold.engine.optimizers import of_any_stage
from meshfold.engine.optimizers.roles import note_roles, pass_roles_on
from meshfold.engine.precision import Masters, Precision, cast_rest, other_dtypes
from meshfold.engine.states.protocols import States
from meshfold.engine.states.replicated import PlainStates
from meshfold.engine.world import World
from meshfold.mesh import LayoutError, SpecError, annotate
from meshfold.mesh.initialization import (
    InitTrace,
    ParameterInit,
    build_on_meta,
    find_value_source,
    materialize,
    retrace_initialization,
)
from meshfold.mesh.parameters import metadata_on
from meshfold.tensor_parallel import Linear, Report, parallelize
from meshfold.tensor_parallel.convert import check_rules

if TYPE_CHECKING:
    from meshfold.engine.assembly.arguments import Arguments
    from meshfold.engine.model.recompute import RecomputedBlocks


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """A model ready to train.

    Attributes:
        model: this rank's part; under ``zero`` its parameters may still be on the meta device.
        parameters: those that are trained, by name, each tensor once.
        values: makes the initial values of a parameter that is still on the meta device.
        report: what tensor parallelism did; None if the model was left whole.
        torch_dropout: whether dropout is torch's own, which draws from its random state.
        pipelined: runs a model in stages; ``model`` has this rank's. None without a pipeline.
        loaded: how a folder's weights matched the model; None without a folder.
    """

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    values: ParameterInit | None
    report: Report | None
    torch_dropout: bool
    pipelined: PipelinedModel | None = None
    loaded: Loaded | None = None

    def whole_state(self, states: States, world: World) -> ModelState:
        """Return the state of the whole model; this rank holds a part of it."""
        if self.pipelined is None:
            return ModelState(self.model, states, world)
        return PipelinedState(self.model, states, world, self.pipelined.inventory)


def assemble(
    model: nn.Module | Callable[[], nn.Module],
    world: World,
    precision: Precision,
    seed: int,
    rules: Mapping[str, str] | None,
    stages: PipelineSettings | None = None,
    *,
    roots: Sequence[str] | None = None,
) -> Assembled:
    """Shard the model, cut it into stages, initialise it, move it to the device and cast it.

    A function's model is built without allocating it; then each rank fills its own blocks from the seed. A module gets rank 0's
    weights, whatever the other ranks have, and is then cut. A module on the meta device is treated like a function.

    Args:
        model: the user's, as for one device.
        world: the ranks.
        precision: of the parameters.
        seed: of initial values.
        rules: roles of submodules by full name, for tensor parallelism.
        stages: settings for the entry ``pipeline``.
        roots: names of submodules that tensor parallelism splits separately, if the module's own forward is not called; None: the
            whole model.

    Raises:
        SpecError: if ``model`` is neither, or its sizes do not fit the spec.
    """
    check_model(model)
    built, trace, seed = _unsplit(model, seed)
    refuse_complex(built)
    keep_dtypes(built)
    refuse_layers(built, world, precision)
    warn_of_split_batches(built, world)
    if built is model:
        share(built, world)
    folder = read_folder(model, built, world)
    report, torch_dropout = _split(built, world, rules, roots)
    values = InitialValues.of(trace, seed, folder, world)

    note_roles(built)
    pipelined, stages = None, stages or PipelineSettings()
    if world.pipelined:
        pipelined = PipelinedModel(built, world, precision, stages, values.fill)
    else:
        stages.called(built, world.device, precision)
        values.fill(built)
    _set_sum_axes(built, world)
    named = built.named_parameters() if pipelined is None else pipelined.pipeline.named_parameters()
    parameters = {name: p for name, p in named if p.requires_grad}
    in_chunks = world.spec.zero is not None
    cast_rest(built, precision, set(built.parameters()) if in_chunks else set(parameters.values()))
    return Assembled(
        model=built,
        parameters=parameters,
        values=values.parameters if in_chunks else None,
        report=report,
        torch_dropout=torch_dropout,
        pipelined=pipelined,
        loaded=None if folder is None else folder.report,
    )


def _unsplit(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, InitTrace | None, int]:
    """Return the whole model, the trace of its initialization (None if it has its values), and the trace's seed."""
    if not isinstance(model, nn.Module):
        return *build_on_meta(lambda: _checked(model)), seed
    refuse_unmade(model)
    if any(p.is_meta for p in model.parameters()):
        origin = find_value_source(model)  # built under zero_gemini's ShardedInit
        return (model, retrace_initialization(model), seed) if origin is None else (model, origin.trace, origin.seed)
    if (origin := find_value_source(model, buffers=True)) is not None:
        # Weights were loaded inside ShardedInit, but tables that are in no file are still missing.
        materialize(model, origin.trace, seed=origin.seed, device="cpu", parameters=False)
    return model, None, seed


def _split(
    model: nn.Module, world: World, rules: Mapping[str, str] | None, roots: Sequence[str] | None
) -> tuple[Report | None, bool]:
    """Split layers over the ranks. Return what tensor parallelism did, and whether dropout is torch's own."""
    dropout = has_dropout(model)
    mixtures = split_experts(model, world)
    if roots is None:
        report = _shard(model, world, rules, dropout)
        torch_dropout = dropout and report is None
    else:
        report, torch_dropout = split_roots(
            model, roots, rules, lambda root, own: _shard(root, world, own, has_dropout(root)), has_dropout
        )
    split_folding(model, world)
    give_own_tokens(mixtures, world)
    share_routing_sums(model, world)
    return report, torch_dropout


def _set_sum_axes(model: nn.Module, world: World) -> None:
    """Note on each parameter the axes that its gradient is summed over: the data axes, unless a layer needs others."""
    for parameter in model.parameters():
        meta = metadata_on(parameter, world.mesh)
        if not meta.own_sum_axes:
            annotate(parameter, replace(meta, sum_axes=world.outer_axes))
    _sum_by_tokens_apart(model, world)
    sum_over_axial_axes(model, world)


def make_states(
    built: Assembled,
    world: World,
    asked: Arguments,
    blocks: RecomputedBlocks | None,
    recompute: str | None,
    settled: Callable[[torch.optim.Optimizer | None], None],
) -> States:
    """Make weights, gradients and optimizer state as the spec says: whole on every data rank, or in chunks.

    ``blocks``: those that recompute their activations, under ``recompute="auto"`` if a plan does not keep them. ``settled``: called
    with the optimizer after all checks, before weights go into chunks.

    Raises:
        SpecError: for an optimizer of a fully frozen model; a single stage may be frozen.
    """
    precision, make = asked.precision, asked.make_optimizer
    if make is not None:
        require_trained(built.model, len(built.parameters), world)
        make = of_any_stage(make) if world.pipelined else make
    states: States
    if world.spec.zero is None:
        masters = Masters(built.parameters.values(), precision, other_dtypes(built.model, precision))
        pass_roles_on({p: masters.of(p) for p in built.parameters.values()})
        trains = make is not None or world.device.type == "meta"  # plans are always for training
        states = PlainStates(built.parameters, masters, world, make, trains=trains)
        settled(states.optimizer)
    else:
        from meshfold.engine.zero.states import ZeroStates

        states = ZeroStates(
            built.model,
            world,
            precision,
            make,
            accumulation=asked.accumulation,
            seed=asked.seed,
            values=built.values,
            blocks=blocks if recompute == "auto" else None,
            recomputes=blocks is not None,
            looks_at_all=asked.looks_at_all,
            names={} if built.pipelined is None else built.pipelined.inventory.first,
            fp8_weights=fp8_gathered(built.model, precision.fp8, world.spec.zero),
            settled=settled,
        )
    if built.pipelined is not None:
        built.pipelined.attach(states)
    return states


def _checked(function: Callable[[], nn.Module]) -> nn.Module:
    made = function()
    if not isinstance(made, nn.Module):
        raise SpecError(f"model={function!r} made {type(made).__name__}: the function must return an nn.Module")
    refuse_unmade(made)
    return made


def dropout_settings(model: nn.Module) -> list[str]:
    """Return the model's probabilities of dropout above 0, in modules and configurations, as ``config.attn_pdrop=0.1``."""
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            found[f"{path}.p={module.p:g}".removeprefix(".")] = None
        for where, place in ((path, module), ("config", getattr(module, "config", None))):
            for name, value in getattr(place, "__dict__", {}).items():
                if "drop" in name and isinstance(value, float) and value > 0:
                    found[f"{where}.{name}={value:g}".removeprefix(".")] = None
    return [*found]


def has_dropout(model: nn.Module) -> bool:
    """Return True if the model has dropout: a module, or a probability in a module or a configuration."""
    return bool(dropout_settings(model))


def _shard(model: nn.Module, world: World, rules: Mapping[str, str] | None, dropout: bool) -> Report | None:
    """Apply tensor parallelism, if the spec asks for it.

    Without a tensor entry the model is not changed, unless it has dropout: mode 1d on one rank makes it drop the same elements
    as every other spec. A model that mode 1d cannot place keeps torch's dropout.
    """
    tensor = world.spec.tensor
    if tensor is not None:
        lowering = tensor.overlap or "gather"
        try:
            report = parallelize(
                model,
                world.mesh,
                world.mode,  # type: ignore[arg-type]
                rules=rules,
                lowering=lowering,
                blocks_apart=world.pipelined,
            )
        except LayoutError as error:
            raise SpecError(f"{world.spec.written or world.spec}: {error}") from error
        if tensor.chosen:
            report.notes.append(f"overlap='auto' chose {tensor.chosen}")
        return report
    if rules is not None:
        try:
            check_rules(model, rules)  # report wrong rules under every spec, even if nothing is split
        except LayoutError as error:
            raise SpecError(str(error)) from error
    if dropout:
        try:
            return parallelize(model, world.mesh, "1d", rules=rules)
        except LayoutError:
            return None
    return None


def _sum_by_tokens_apart(model: nn.Module, world: World) -> None:
    """Let the gradients of weights that each rank multiplies with its own tokens be summed together with the data axes: in
    buckets or chunks, overlapped with backward, once a step.
    """
    for module in model.modules():
        tokens = module.sum_gradients_apart() if isinstance(module, Linear) else ()
        if tokens:
            axes = tuple(axis for axis in world.mesh.names if axis in (*world.outer_axes, *tokens))
            for parameter in module.parameters(recurse=False):
                meta = metadata_on(parameter, world.mesh)
                annotate(parameter, replace(meta, sum_axes=axes, own_sum_axes=True))
