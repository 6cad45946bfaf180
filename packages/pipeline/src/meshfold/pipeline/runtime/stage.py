"""Stages: consecutive blocks of the model on one rank, the tensors that each micro-batch holds in them, and the cutting of a model.

F keeps the graph. B releases it and keeps x and dy of every linear layer. W computes their weight gradients. Nothing is
computed twice. Other parameters (norms, tables) get their gradients in B, exactly as in one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from meshfold.kernels import gradients_in_backward
from meshfold.kernels.fuse import DeferredLogits, LazyLogits
from meshfold.mesh import (
    LayoutError,
    Mesh,
    MeshfoldError,
    SpecError,
    build_on_meta,
    dropout_stream,
    materialize,
    retrace_initialization,
)
from meshfold.mesh.initialization import find_value_source, shard_coordinates
from meshfold.mesh.model_io import local_shard
from meshfold.mesh.parameters import WeightGradQueue, gradient_scope
from meshfold.mesh.random import DropoutStream, current_dropout_stream
from meshfold.pipeline.runtime.carried import Carried, carried_slots
from meshfold.pipeline.runtime.deferred_linear import defer_weight_gradients
from meshfold.pipeline.runtime.forward_analysis import bypassed
from meshfold.pipeline.runtime.microbatch import Microbatch, Replicas
from meshfold.pipeline.runtime.parameter_walks import without_parameter_walks
from meshfold.pipeline.runtime.partition import Partition, PartitionConfig, partition_model
from meshfold.pipeline.runtime.placeholders import agree_on_dtypes, signature
from meshfold.pipeline.runtime.side_effects import preserved_buffers
from meshfold.pipeline.runtime.transfer_plan import Slots, TransferPlan

LossOf = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Live:
    """Tensors of one micro-batch that are held from F to B."""

    inputs: list[Tensor]
    outputs: list[tuple[GradientEdge, torch.dtype] | None]


class Stage:
    """One stage of a cut model.

    Attributes:
        number: counted over the whole model.
        queue: where its weight gradients wait.
        live: micro-batches between F and B.
        kept: micro-batches between F and W.
        logits: deferred logits of the last stage, which are never whole; None: all are computed.
        carried: numbers sent along with the stream; None without.
    """

    def __init__(self, partition: Partition, number: int, queue: WeightGradQueue, loss_of: LossOf) -> None:
        """Args:
        partition: the model.
        number: which of this rank's stages.
        queue: of the whole model; its keys are (stage, micro-batch).
        loss_of: a scalar from the model's output and the micro-batch in the user's form.
        """
        self.number, self.queue = number, queue
        self.first, self.stop = partition.bounds[number], partition.bounds[number + 1]
        self.is_last = number == len(partition.stage_ranks) - 1
        self._partition, self._loss_of = partition, loss_of
        self._held: dict[int, _Live] = {}
        self.kept: set[int] = set()
        self._looked_at = False
        self.logits: DeferredLogits | None = None
        self.carried: Carried | None = None

    @property
    def live(self) -> tuple[int, ...]:
        """Micro-batches between F and B."""
        return tuple(self._held)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that the stage uses."""
        return (p for name, p in self._partition.named_parameters() if self.number in self._partition.users[name])

    def inputs(self, plan: TransferPlan) -> Slots:
        """Return the slots of the stage's input."""
        return (*plan.into(self.first), *carried_slots(self.carried, self.first)) if self.first else ()

    def outputs(self, plan: TransferPlan) -> Slots:
        """Return the slots of the stage's output."""
        return () if self.is_last else (*plan.into(self.stop), *carried_slots(self.carried, self.stop))

    def random_inputs(self, plan: TransferPlan, device: torch.device) -> list[Tensor]:
        """Return random tensors in the shape of the stage's input."""
        return _random(self.inputs(plan), device)

    def random_gradients(self, plan: TransferPlan, device: torch.device) -> list[Tensor]:
        """Return random gradients of the stage's output; 1 for the loss, in the last stage."""
        return [torch.ones((), device=device)] if self.is_last else _random(self.outputs(plan), device)

    def run(self, work: Microbatch, plan: TransferPlan, received: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Run the forward; return the stage's output, or the model's; and the input leaves that backward fills."""
        model, partial_forward = self._partition.model, self._partition.partial_forward
        beside: list[Tensor] = []
        if self.first and carried_slots(self.carried, self.first):
            *received, numbers = received
            beside = [numbers.detach().requires_grad_(torch.is_grad_enabled())]
        if self.carried is not None:
            self.carried.arrive(beside[0] if beside else None, self.first)
        with dropout_of(work):
            output, inputs = partial_forward.forward(
                lambda: model(*work.args, **work.kwargs), plan, self.first, self.stop, received
            )
        if self.carried is not None and not self.is_last and carried_slots(self.carried, self.stop):
            output = [*output, torch.cat([*beside, self.carried.leave(self.first, self.stop)])]
        return output, [*inputs, *beside]

    def forward(
        self, key: int, work: Microbatch, plan: TransferPlan, received: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Run F of micro-batch ``key``; return the stage's output, and the loss in the last stage.

        Raises:
            MeshfoldError: if the output has an unexpected shape.
            LayoutError: if a placeholder for a tensor of another stage was used.
        """
        loss = None
        with self._loss_waits():
            looks, self._looked_at = not self._looked_at, True
            with without_parameter_walks(self._partition.model) if looks else nullcontext():
                output, inputs = self.run(work, plan, received)
                if looks:
                    self._check_values(output, received)
                if self.is_last:
                    loss = self._loss_of(output, work.given)
                    output = [loss]
                    if looks and not work.weight.is_meta and bool(work.weight):
                        self._check_values(loss.view(1), received)
        if loss is None:
            self._check(output, plan)
        # Keep graph edges, not tensors, so that a sent tensor can be freed here.
        edges = [(get_gradient_edge(t), t.dtype) if t.requires_grad else None for t in output]
        self._held[key] = _Live(inputs=inputs, outputs=edges)
        self.kept.add(key)
        return [tensor.detach() for tensor in output], None if loss is None else loss.detach()

    @contextmanager
    def _loss_waits(self) -> Iterator[None]:
        """Context manager around F that defers the last stage's logits to their loss.

        If the loss is computed in F, the gradient of the head's weight is held until B. At most one micro-batch holds such a
        gradient: the others compute it in B, from recomputed logits. In most schedules the last stage's B directly follows F.
        """
        with ExitStack() as opened:
            if self.is_last and self.logits is not None:
                opened.enter_context(self.logits.waiting())
            if self.is_last and self._held:
                opened.enter_context(gradients_in_backward())
            yield

    def backward_input(self, key: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run B of micro-batch ``key``: compute the gradients of the input from those of the output."""
        with self.queue.collecting((self.number, key)):
            return self._backward(key, gradients)

    def backward_weight(self, *keys: int) -> None:
        """Run W of micro-batches after their B, in this order."""
        self.queue.compute(*((self.number, key) for key in keys))
        self.kept.difference_update(keys)

    def backward(self, key: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Run B and W at once: the same numbers, and memory is released layer by layer."""
        found = self._backward(key, gradients)
        self.kept.discard(key)
        return found

    def clear(self) -> None:
        """Forget all micro-batches, after an aborted step."""
        self._held.clear()
        self.kept.clear()

    def _backward(self, key: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        if key not in self._held:
            raise MeshfoldError(f"stage {self.number} has no forward of micro-batch {key}: run it before its backward")
        live = self._held.pop(key)
        pairs = [
            (output[0], gradient.to(output[1]))
            for output, gradient in zip(live.outputs, gradients, strict=True)
            if output is not None
        ]
        if pairs:
            with gradient_scope():
                torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        return [torch.zeros_like(x) if x.grad is None else x.grad for x in live.inputs]

    def _check_values(self, output: Any, received: Sequence[Tensor]) -> None:
        """Check the first micro-batch: NaN from finite inputs means that the stage used a tensor that was not sent."""
        leaves = [leaf.rows if isinstance(leaf, LazyLogits) else leaf for leaf in tree_leaves(output)]
        made = [local_shard(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel()]
        if not received or any(tensor.is_meta for tensor in (*made, *received)):
            return
        lost = [tensor for tensor in made if tensor.is_floating_point() and bool(tensor.isnan().all())]
        if lost and all(bool(tensor.isfinite().all()) for tensor in received):
            why = bypassed(self._partition.blocks.name, f"block {self.first}")
            raise LayoutError(f"stage {self.number} returns only NaN for finite inputs: {why}")

    def _check(self, output: Sequence[Tensor], plan: TransferPlan) -> None:
        for tensor, slot in zip(output, self.outputs(plan), strict=True):
            if tuple(tensor.shape) != slot.shape or tensor.dtype != slot.dtype:
                raise MeshfoldError(
                    f"stage {self.number} returns {tuple(tensor.shape)} of {tensor.dtype} where {slot.shape} of "
                    f"{slot.dtype} was expected: blocks must keep the shape and dtype of their input"
                )


def _random(slots: Slots, device: torch.device) -> list[Tensor]:
    return [torch.randn(slot.shape, dtype=slot.dtype, device=device) for slot in slots]


def dropout_of(work: Microbatch) -> AbstractContextManager[object]:
    """Enter the dropout stream of a micro-batch, if one is active: its rows get the masks that they have in the whole batch."""
    try:
        stream: DropoutStream = current_dropout_stream()
    except MeshfoldError:
        return nullcontext()
    return dropout_stream(
        stream.seed,
        stream.step,
        first_row=stream.first_row + work.first_row,
        first_token=stream.first_token + work.first_token,
        rows=stream.rows or work.rows,
        token_shards=stream.token_shards,
    )


def loss_in(output: Any, given: Any, loss_fn: Callable[[Any, Any], Tensor] | None) -> Tensor:
    """Return the scalar loss in a model's output, or the result of ``loss_fn`` on it.

    Raises:
        SpecError: if there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss_fn is not None:
        loss = loss_fn(output, given)
    elif loss is None and isinstance(output, Tensor):
        loss = output
    if not isinstance(loss, Tensor) or loss.dim():
        raise SpecError(
            f"the model returned {type(output).__name__} without a scalar loss: return an output with .loss, or give "
            f"loss_fn=lambda output, batch: ..."
        )
    return loss


@dataclass(frozen=True, kw_only=True)
class StagedModel:
    """A model in stages, ready to run.

    Attributes:
        partition: what this rank keeps.
        stages: this rank's, by number, ascending.
        device: where they run.
    """

    partition: Partition
    stages: dict[int, Stage]
    device: torch.device

    @property
    def module(self) -> nn.Module:
        """The model, reduced to this rank's stages."""
        return self.partition.model


def stage_model(
    model: nn.Module | Callable[[], nn.Module],
    mesh: Mesh,
    stage_ranks: Sequence[int],
    config: PartitionConfig,
    *,
    batched_weights: bool = False,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
) -> StagedModel:
    """Cut a model in place, materialise the rest, and split off its weight gradients.

    Args:
        model, mesh, batched_weights, loss_fn: as of :class:`meshfold.pipeline.Pipeline`.
        stage_ranks: the rank of every stage, on the axis.
        config: how to cut, and the values.

    Raises:
        LayoutError: for a model that cannot be cut.
        SpecError: if ``model`` is not a model, or for ``fill`` with a function that makes one.
    """
    fill, seed = config.fill, config.seed
    built, trace, seed = _built(model, seed) if fill is None else (model, None, seed)
    if not isinstance(built, nn.Module):
        raise SpecError(f"fill=... goes with a module on the meta device, and model is {model!r}")
    place = _device(config.device, built)
    found = partition_model(built, mesh, stage_ranks, replace(config, device=place))
    if fill is not None:
        fill(built)
    elif trace is not None:
        materialize(
            built,
            trace,
            seed=seed,
            device=place,
            dtype=config.dtype,
            placement_of=lambda name, tensor: shard_coordinates(tensor),
        )
    else:
        built.to(place)
    queue = defer_weight_gradients(built, batched=batched_weights)
    loss_of = partial(loss_in, loss_fn=loss_fn)
    stages = {number: Stage(found, number, queue, loss_of) for number in found.stages}
    return StagedModel(partition=found, stages=stages, device=place)


def _built(model: nn.Module | Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Any, int]:
    """Return (the model, its trace if it is on the meta device, the seed of its values)."""
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise SpecError(f"model={model!r}: an nn.Module, or a function without arguments that makes one")
        return (*build_on_meta(model), seed)
    if not any(p.is_meta for p in model.parameters()):
        return model, None, seed
    origin = find_value_source(model)
    return (model, retrace_initialization(model), seed) if origin is None else (model, origin.trace, origin.seed)


def _device(device: torch.device | str | None, model: nn.Module) -> torch.device:
    if device is not None:
        return torch.device(device)
    first = next((p.device for p in model.parameters() if not p.is_meta), None)
    if first is not None:
        return first
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class TransferPlans:
    """Plans by shape, each made when its shape is first seen, by running the model's forward on meta tensors.

    Attributes:
        looks: such a forward runs.
    """

    def __init__(self, staged: StagedModel, mesh: Mesh, axis: str, replicas: Replicas) -> None:
        """Args:
        staged: the model.
        mesh: where it lies.
        axis: of the pipeline; all its ranks must ask for the first plan.
        replicas: the other pipelines.
        """
        self._staged, self._mesh, self._axis, self._replicas = staged, mesh, axis, replicas
        self._known: dict[object, TransferPlan] = {}
        self.looks = False

    def of(self, work: Microbatch) -> TransferPlan:
        """Return the plan for a micro-batch of this shape."""
        partition = self._staged.partition
        if not self._known:  # dtypes may have changed since the model was cut
            agree_on_dtypes(partition.outside_blocks, self._mesh.group(self._axis), self._staged.device)
        module = self._staged.module
        key = (module.training, signature(work.args, work.kwargs))
        if key not in self._known:
            with self._replicas.around_trial(), preserved_buffers(module), self._looking():
                plan = partition.partial_forward.look(lambda: module(*work.args, **work.kwargs), partition.loose())
            plan.check(partition.bounds, partition.blocks.name)
            self._known[key] = plan
        return self._known[key]

    @contextmanager
    def _looking(self) -> Iterator[None]:
        self.looks = True
        try:
            yield
        finally:
            self.looks = False
