"""Construction of an engine's parts from its arguments: ranks, model, states, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshfold.engine.assembly.arguments import Arguments
from meshfold.engine.assembly.assemble import Assembled, assemble, dropout_settings, make_states
from meshfold.engine.batches.weight_gradients import WeightGradients
from meshfold.engine.captured_step import CapturedSteps, check_capture
from meshfold.engine.checkpoints.model_state import ModelState
from meshfold.engine.experts import check_fp8_dispatch, dispatch_in_fp8
from meshfold.engine.forward import Forward
from meshfold.engine.model import recompute as recomputation
from meshfold.engine.model.checks import NoCopies
from meshfold.engine.model.compile_blocks import CompiledBlocks
from meshfold.engine.model.fp8_layers import Fp8Layers, check_fp8, use_fp8
from meshfold.engine.model.ownership import AsGiven, check_free, claim
from meshfold.engine.model.pipelined_model import PipelineSettings
from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.engine.optimizers import OWN_SCALER, StepGuard, scheduler_of
from meshfold.engine.sequence import split_sequence
from meshfold.engine.sequence.checks import check_given
from meshfold.engine.states.protocols import States
from meshfold.engine.world import World, join_world, watch_over
from meshfold.kernels.fuse import FusedModel, fuse
from meshfold.mesh import ParallelSpec
from meshfold.mesh.watchdog import report_errors

if TYPE_CHECKING:
    from meshfold.engine.zero.captured_step import CapturedZeroSteps

_BY_HAND = (
    "was called by hand, and the engine has the gradients: call engine.step() after engine.backward(loss), which sums them over "
    "the ranks, unscales, clips and steps, or engine.train_step(batch), which does all of it"
)


@dataclass(frozen=True, kw_only=True)
class Built:
    """The parts of an engine.

    Attributes:
        world: the running processes, as a mesh.
        part: this rank's part of the model.
        blocks: the blocks that backward recomputes; None if none is.
        fused: the fused kernels in it; None if none were asked for.
        fp8: the linear layers that multiply in fp8; None if none was asked to.
        compiled: description of what is compiled; None if nothing is.
        states: its master weights, their gradients and the optimizer's state.
        step_guard: allows only the engine to step the optimizer.
        lr_scheduler: of the optimizer; None if none was given.
        forward: calls the model.
        model_state: of the whole model, as checkpoints have it.
        captured: captures and replays micro-steps; None if they are not captured.
        captured_zero: the same under ``zero``.
    """

    world: World
    part: Assembled
    blocks: RecomputedBlocks | None
    fused: FusedModel | None
    fp8: Fp8Layers | None
    compiled: CompiledBlocks | None
    states: States
    step_guard: StepGuard
    lr_scheduler: Any
    forward: Forward
    model_state: ModelState
    captured: CapturedSteps | None
    captured_zero: CapturedZeroSteps | None


@report_errors  # outermost: errors are reported before the watchdog closes
def build(
    engine: object,
    model: nn.Module | Callable[[], nn.Module],
    parallel: Mapping[str, object] | ParallelSpec,
    asked: Arguments,
    opened: ExitStack,
    *,
    device: torch.device | str | None,
    rules: Mapping[str, str] | None,
    recompute: str | None,
    example: Any,
) -> Built:
    """Build an engine's parts; all ranks must call. On an error the module is restored.

    Args:
        engine: trains the model.
        model, parallel, device, rules, recompute, example: see :class:`meshfold.engine.Engine`.
        asked: the other arguments, checked.
        opened: receives what must be closed, also if a later part cannot be built.

    Raises:
        SpecError: for an invalid model, or one that does not work under this spec.
    """
    given = opened.enter_context(AsGiven(model))  # restored last
    world = join_world(parallel, device, limit_s=asked.watchdog)
    opened.callback(watch_over(world, asked.watchdog, asked.compare).close)
    opened.callback(world.mesh.close)
    recompute = recomputation.check_recompute(recompute, world.spec)
    _check_with(world, model, asked)

    # This rank's part of the model: split, given its first values, in place.
    stages = PipelineSettings(loss_fn=asked.loss_fn, example=example)
    part = assemble(model, world, asked.precision, asked.seed, rules, stages)
    if part.pipelined is not None:
        opened.callback(part.pipelined.pipeline.close)
    layers = _change_layers(part, world, asked, recompute, opened)
    if asked.cuda_graph:
        check_capture(world, drops=dropout_settings(part.model), recomputes=layers.blocks is not None)

    # Its master weights, gradients and optimizer state, and what works on them.
    schedulers: list[Any] = []

    def settled(optimizer: torch.optim.Optimizer | None) -> None:
        schedulers.append(scheduler_of(asked.lr_scheduler, optimizer))
        given.forget()

    states = make_states(part, world, asked, layers.blocks, recompute, settled)
    opened.callback(states.close)
    if layers.fp8 is not None and layers.fp8.weights is not None:
        layers.fp8.weights.watch(layers.compiled)
    opened.callback(NoCopies(part.model, world).close)
    step_guard = StepGuard(states.optimizer, _BY_HAND, scaler=OWN_SCALER)
    opened.callback(step_guard.close)
    if states.optimizer is not None:
        opened.callback(claim(part.model, engine, in_chunks=world.spec.zero is not None).close)
    second_derivatives = asked.compile is None and not world.pipelined  # elsewhere torch or stages refuse them
    weight_gradients = WeightGradients(states.trained if second_derivatives else (), world)
    opened.callback(weight_gradients.close)
    forward = Forward(
        part.model,
        world,
        asked.precision,
        states,
        pipelined=part.pipelined,
        loss_fn=asked.loss_fn,
        logits=None if layers.fused is None else layers.fused.logits,
        weight_gradients=weight_gradients,
    )
    captured, captured_zero = None, None
    if asked.cuda_graph:
        captured, captured_zero = _captures(forward, states, part.model, world, layers.blocks, opened)
    return Built(
        world=world,
        part=part,
        blocks=layers.blocks,
        fused=layers.fused,
        fp8=layers.fp8,
        compiled=layers.compiled,
        states=states,
        step_guard=step_guard,
        lr_scheduler=schedulers[0],
        forward=forward,
        model_state=part.whole_state(states, world),
        captured=captured,
        captured_zero=captured_zero,
    )


def _check_with(world: World, model: nn.Module | Callable[[], nn.Module], asked: Arguments) -> None:
    """Check arguments that depend on the spec or the device, before the model is changed.

    Raises:
        SpecError: for one that does not work here.
    """
    if asked.compile is not None:
        asked.compile.check(world.spec)
    if asked.precision.fp8 is not None:
        check_fp8(world, asked.precision.fp8)
        if asked.precision.fp8.dispatch:
            check_fp8_dispatch(world)
    if asked.make_optimizer is not None:
        check_free(model)
    if isinstance(model, nn.Module):
        check_given(model, world, own_loss=asked.loss_fn is not None)


@dataclass(frozen=True, kw_only=True)
class _ChangedLayers:
    """Changes to layers, each None if it was not asked for; the attributes are those of :class:`Built`."""

    fp8: Fp8Layers | None
    compiled: CompiledBlocks | None
    fused: FusedModel | None
    blocks: RecomputedBlocks | None


def _change_layers(
    part: Assembled, world: World, asked: Arguments, recompute: str | None, opened: ExitStack
) -> _ChangedLayers:
    """Use fp8, compile, split the sequence, fuse and recompute: what is first works inside of what follows."""
    fp8 = _in_fp8(part.model, asked, world, opened)
    compiled = None
    if asked.compile is not None:  # modes and checkpoints go around a graph, not into it
        stages_blocks = None if part.pipelined is None else part.pipelined.blocks()
        compiled = CompiledBlocks(asked.compile, part.model, world.spec, stages_blocks)
        opened.callback(compiled.close)
    sequence = split_sequence(part.model, world, own_loss=asked.loss_fn is not None)
    if sequence is not None:
        opened.callback(sequence.close)
    fused = None if asked.kernels is None else fuse(part.model, **asked.kernels)
    if fused is not None:
        opened.callback(fused.close)
        if part.pipelined is not None and fused.logits is not None:
            part.pipelined.pipeline.defer_logits(fused.logits)
    in_graphs = compiled if _recomputes_in_graphs(part.model, world.spec, asked) else None
    blocks = recomputation.recompute_blocks(recompute, part.model, sequence, part.pipelined, in_graphs)
    if blocks is not None:
        opened.callback(blocks.close)
    return _ChangedLayers(fp8=fp8, compiled=compiled, fused=fused, blocks=blocks)


def _recomputes_in_graphs(model: nn.Module, spec: ParallelSpec, asked: Arguments) -> bool:
    """Return True if compiled blocks may recompute in their graphs: they have no dropout and send no messages.

    Nor in CUDA graphs: torch's graphs save the state of random numbers for attention, without dropout too.
    """
    if asked.compile is None or asked.cuda_graph:
        return False
    sends = spec.tensor is not None or spec.sequence is not None or spec.expert is not None or spec.axial is not None
    return not sends and not dropout_settings(model)


def _in_fp8(model: nn.Module, asked: Arguments, world: World, opened: ExitStack) -> Fp8Layers | None:
    """Let linear layers multiply, and experts be sent tokens, in fp8, if that was asked for."""
    if asked.precision.fp8 is None:
        return None
    layers = use_fp8(model, asked.precision.fp8, world, accumulation=asked.accumulation)
    opened.callback(layers.close)
    if asked.precision.fp8.dispatch:
        dispatch_in_fp8(model)
    return layers


def _captures(
    forward: Forward,
    states: States,
    model: nn.Module,
    world: World,
    blocks: RecomputedBlocks | None,
    opened: ExitStack,
) -> tuple[CapturedSteps | None, CapturedZeroSteps | None]:
    """Return what captures micro-steps, and what does so under ``zero``; at most one of them."""
    if world.spec.zero is not None:
        # Only here: an engine without zero runs without the package meshfold-zero-gemini.
        from meshfold.engine.zero.captured_step import CapturedZeroSteps
        from meshfold.engine.zero.states import ZeroStates

        assert isinstance(states, ZeroStates)
        of_zero = CapturedZeroSteps(forward, states, model, world.device, blocks)
        opened.callback(of_zero.close)
        return None, of_zero
    if states.reducer is None:
        return None, None
    captured = CapturedSteps(forward, states.reducer, model, world.device)
    opened.callback(captured.close)
    return captured, None
