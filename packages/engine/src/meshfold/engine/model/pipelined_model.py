"""The spec's entry ``pipeline``: this rank's stages of the engine's model, and the steps that run a batch through all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint.state import modules_with_extra_state
from meshfold.engine.batches import batch as batches
from meshfold.engine.batches.loss import LossCalls, leave_out_targets
from meshfold.engine.batches.observed_mean import check_microbatches
from meshfold.engine.batches.parameter_reads import ParameterReads
from meshfold.engine.batches.shown import called, explain_failure
from meshfold.engine.model.carried_sums import carry_routing_sums
from meshfold.engine.precision import Precision
from meshfold.engine.sequence import local_length
from meshfold.engine.sequence.checks import check_mixing
from meshfold.engine.world import PIPE, World
from meshfold.mesh import LayoutError, SpecError, all_reduce
from meshfold.mesh.model_io import is_encoder_decoder, loss_mean
from meshfold.mesh.parameters import uncompiled_name
from meshfold.mesh.spec import format_value, signature_mismatch
from meshfold.tensor_parallel import without_outer_ranks
from meshfold.tensor_parallel.convert import row_multiple

if TYPE_CHECKING:
    from meshfold.engine.states.protocols import States
    from meshfold.pipeline import Costs, Pipeline
    from meshfold.pipeline.runtime import Microbatch, Replicas


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """The engine's settings that a pipeline needs.

    Attributes:
        loss_fn: of the engine.
        example: a small batch to call the model with once, on meta tensors; None: token ids.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None = None
    example: Any = None

    def called(
        self, model: nn.Module, device: torch.device, precision: Precision
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the example's arguments for the whole model, before it is cast; None if there is none.

        Checked under every spec, so that mistakes do not show only under those with ``pipeline``.

        Raises:
            SpecError: for anything but a batch that the model can be called with.
        """
        if self.example is None:
            return None
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), precision.dtype)
        own_loss, aligned = self.loss_fn is not None, not is_encoder_decoder(model)
        by_name = batches.takes_ids_by_name(model)
        work = batches.prepare_batch(
            self.example, device, dtype, own_loss=own_loss, aligned=aligned, ids_by_name=by_name
        )
        signature = signature_mismatch(model.forward, *work.args, **work.kwargs)
        if signature is not None:
            raise SpecError(
                f"example: {type(model).__name__} takes {signature}, but would be called with "
                f"{called(work.args, work.kwargs)}: give a batch such as train_step gets"
            )
        return work.args, work.kwargs


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The tensors of the whole model, recorded before it was cut.

    Attributes:
        first: every name of the state dict, in order, to the first name of its tensor.
        parameters: first names of the parameters.
        extra: names of extra state of modules.
    """

    first: dict[str, str]
    parameters: frozenset[str]
    extra: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """Take the inventory of a model, real or meta."""
        seen: dict[Tensor, str] = {}
        first = {}
        extra = modules_with_extra_state(model)
        for name, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and uncompiled_name(name) not in extra:
                first[uncompiled_name(name)] = seen.setdefault(value, uncompiled_name(name))
        parameters = {seen[p] for p in model.parameters() if p in seen}
        return cls(first=first, parameters=frozenset(parameters), extra=tuple(extra))

    def called_here(self, names: Sequence[str]) -> dict[str, str]:
        """Return this rank's names of tensors by their first names in the whole model."""
        found: dict[str, str] = {}
        for name in names:
            found.setdefault(self.first[uncompiled_name(name)], name)
        return found


class PipelinedModel:
    """A model in stages.

    Attributes:
        pipeline: runs them.
        inventory: the whole model's tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        precision: Precision,
        settings: PipelineSettings,
        fill: Callable[[nn.Module], None],
    ) -> None:
        """Args:
        model: sharded over the tensor axes, real or on the meta device; it is cut in place.
        world: where it lies; its spec has ``pipeline``.
        precision: of floating inputs.
        settings: the engine's.
        fill: materialises the remaining parts on the device.

        Raises:
            SpecError: if it cannot be cut so.
        """
        from meshfold.pipeline import ExampleError, PartitionConfig, Pipeline, ScheduleError

        spec = world.spec.pipeline
        if spec is None:
            raise SpecError("this spec has no entry pipeline")
        check_mixing(model, world)
        self._world, self._loss_fn = world, settings.loss_fn
        self._link = link = _StatesLink()
        self._measures = spec.schedule == "auto"
        self._looks = True
        self._mean, self._name = loss_mean(model), type(model).__name__
        self._ids_by_name = batches.takes_ids_by_name(model)
        self.inventory = Inventory.of(model)
        carry = carry_routing_sums(model, world, precision.dtype)
        example = settings.called(model, world.device, precision)
        free = callable(spec.schedule) or spec.schedule_name in ("interleaved", "auto")
        try:
            self.pipeline: Pipeline = Pipeline(
                model,
                world.mesh,
                schedule=spec.schedule,  # type: ignore[arg-type]
                microbatches=spec.microbatches,
                chunks=spec.chunks if free else None,
                waves=spec.waves,
                loss_fn=None if settings.loss_fn is None else partial(_loss, settings.loss_fn, ParameterReads()),
                partition=PartitionConfig(axis=PIPE, example=example, device=world.device, fill=fill),
                reduce=link.complete,
                replicas=_replicas(world, precision, link.shapes_only),
            )
            carry(self.pipeline)
        except ExampleError as error:
            raise SpecError(
                f"pipeline={spec.to_dict()}: {error.what}. Give Engine(..., example=batch): a small batch as for "
                "train_step; its values do not matter"
            ) from error
        except (LayoutError, ScheduleError) as error:
            raise SpecError(f"pipeline={format_value(spec.to_dict())}: {error}") from error

    def attach(self, states: States) -> None:
        """Report complete gradients to these states from now on."""
        self._link.states = states

    def blocks(self) -> dict[str, nn.Module]:
        """Return the repeated blocks that this rank has, by name."""
        return self.pipeline.partition.named_blocks()

    def step(self, works: Sequence[Microbatch], scale: Tensor) -> Tensor:
        """Run forward and backward of this data coordinate's batch; return its mean loss, float64, on every rank of the pipeline.

        Args:
            works: from :meth:`look_ahead`, the same on all of them.
            scale: factor of the gradients.
        """
        try:
            with self._looking(works):
                return self.pipeline.run(works, scale=scale)
        except RuntimeError as error:
            explain_failure(error, self._link.states, in_stages=True)
            raise

    def assess(self, batch: batches.Batch) -> Tensor:
        """Return the mean loss of this data coordinate's batch in eval mode, without gradients."""
        works = self.microbatches(batch)
        with self._looking(works):
            return self.pipeline.assess(works)

    @contextmanager
    def _looking(self, works: Sequence[Microbatch]) -> Iterator[None]:
        """Observe the loss in its first call."""
        if not self._looks:
            yield
            return
        self._looks = False
        with LossCalls(parts="micro-batches", exact=False) as calls:
            yield
        if self._loss_fn is None and self._world.mode is None and self._world.spec.sequence is None:
            check_microbatches(calls, works, self._mean, self._name)

    def look_ahead(self, batch: batches.Batch) -> list[Microbatch]:
        """Return the micro-batches of the next step. All ranks must call.

        Under schedule ``auto``, once: measure the stages on a batch, and choose the best order for these times. Ranks with the
        same stage use the slowest of their times, so that all make the same choice. Then the states may run trial forwards.
        """
        works = self.microbatches(batch)
        if self._measures:
            self._measures = False
            self.pipeline.replan(_slowest(self.pipeline.measure_work(works[0]), self._world))
        if self._link.states is not None:
            self._link.states.look_at(self.pipeline, works)
        return works

    def microbatches(self, batch: batches.Batch) -> list[Microbatch]:
        """Return the batch in micro-batches, each in the form in which the engine calls a model."""
        # Split in units of the rows that the tensor mode needs, so that it adds no filler rows.
        length = local_length(batch.tokens // batch.rows, self._world)
        works = self.pipeline.split(batch.given, unit=row_multiple(self.pipeline.module, length))
        found = []
        for work in works:
            kwargs = {**leave_out_targets(work.kwargs, self.pipeline.module, self._loss_fn)}
            args = work.args
            if self._ids_by_name and isinstance(batch.given, Tensor):
                kwargs["input_ids"], *_ = args
                args = ()
            elif not self._ids_by_name and "input_ids" in kwargs and not args:
                args = (kwargs.pop("input_ids"),)
            found.append(replace(work, args=args, kwargs=kwargs))
        return found


class _StatesLink:
    """Passes calls of a pipeline on to the states, which are made after it.

    Attributes:
        states: None until they are made.
    """

    def __init__(self) -> None:
        self.states: States | None = None

    def complete(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Report parameters whose gradients are complete."""
        if self.states is not None:
            self.states.complete([parameter for _, parameter in named])

    @contextmanager
    def shapes_only(self) -> Iterator[None]:
        """Context manager around forwards that need only shapes."""
        with without_outer_ranks(), nullcontext() if self.states is None else self.states.shapes_only():
            yield


def _loss(loss_fn: Callable[[Any, Any], Tensor] | None, reads: ParameterReads, output: Any, given: Any) -> Tensor:
    """Return the model's own loss, or that of ``loss_fn``."""
    whole = batches.Batch(args=(), kwargs={}, given=given, rows=1, targets=None)
    with reads.in_first_call():
        return batches.loss_of(output, whole, loss_fn)


def _replicas(world: World, precision: Precision, around_trial: Callable[[], AbstractContextManager[None]]) -> Replicas:
    """Return how pipelines must stay in step with their replicas: under ZeRO stage 3 a stage gathers its parameters from the
    other data ranks, and in fp8 it may reduce an amax over them.
    """
    from meshfold.pipeline.runtime import Replicas

    zero = world.spec.zero
    if (zero is None or zero.stage < 3) and precision.fp8 is None:
        return Replicas()
    group, device = world.data_group, world.device

    def agree(count: int) -> int:
        return int(all_reduce(torch.tensor([count], device=device), group, "max"))

    return Replicas(agree_on_count=agree, around_trial=around_trial)


def check_own_loop(pipelined: PipelinedModel | None, what: str) -> None:
    """Check that a user's own loop can call forward and backward separately.

    Args:
        pipelined: the engine's model, if it is in stages.
        what: the call.

    Raises:
        SpecError: if it is.
    """
    if pipelined is not None:
        raise SpecError(
            f"{what} under pipeline: forwards and backwards of micro-batches interleave, so your training loop "
            "cannot call them separately. Call engine.train_step(batch), and engine.eval_step(batch) to evaluate"
        )


def _slowest(costs: Costs, world: World) -> Costs:
    """Return the largest measured costs, the same on all ranks."""
    columns = [costs.forward, costs.backward_input, costs.backward_weight]
    table = torch.tensor(columns, dtype=torch.float64, device=world.device)
    table = all_reduce(table, world.everyone, "max")
    forward, backward_input, backward_weight = table.tolist()
    return replace(costs, forward=forward, backward_input=backward_input, backward_weight=backward_weight)
