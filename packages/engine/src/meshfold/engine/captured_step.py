"""Forward and backward of a micro-step as CUDA graphs: one per form of batch, replayed for every later batch of that form.

A small model computes faster than the host can launch its kernels. A CUDA graph launches all of them at once. The first
micro-steps with a form of batch run as usual, on the stream of the graph. They compile and tune kernels, and do the model's
one-time checks. The next one is captured and replayed. Inputs are copied into the captured tensors. Gradients come out in the
graph's own tensors, which go to the buckets as if they had just arrived.

Collectives are not captured: data ranks sum the gradients after the replay. On a CPU nothing can be captured, and the same
steps run one by one, with the same inputs and the same buckets.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshfold.engine.errors import TrainingError
from meshfold.engine.model.mask_choice import masks_by_shape
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import LossMean

if TYPE_CHECKING:
    from meshfold.engine.batches.batch import Batch
    from meshfold.engine.forward import Forward
    from meshfold.engine.states.bucket import BucketGradients
    from meshfold.engine.states.data_parallel import GradientReducer
    from meshfold.engine.world import World

WARM_UP = 3
"""Micro-steps with a form of batch before one is captured."""
MOST_GRAPHS = 8
"""Forms of batch that are captured. Each has its own gradients and activations."""


def check_capture(world: World, *, drops: Sequence[str], recomputes: bool) -> None:
    """Check that micro-steps can be captured, as the engine's argument ``cuda_graph`` asks.

    Args:
        world: whose spec it is.
        drops: the model's probabilities of dropout, as ``config.attn_pdrop=0.1``.
        recomputes: backward recomputes activations, which is captured under ``zero`` only.

    Raises:
        SpecError: where a replay would compute something else than the step.
    """
    entries = ("pipeline", "tensor", "sequence", "axial", "expert", "zero")
    found = next((entry for entry in entries if getattr(world.spec, entry, None) is not None), None)
    alone = found == "zero" and world.mesh.world_size == 1
    if found == "zero" and not alone:
        raise SpecError(
            f"cuda_graph=True under zero on {world.mesh.world_size} ranks: collectives are not captured: leave cuda_graph out, "
            "or train on one GPU"
        )
    if found is not None and not alone:
        raise SpecError(
            f"cuda_graph=True under {found}: a graph needs weights and collectives at fixed addresses: leave cuda_graph "
            "out, or write parallel=dict(data=...) alone"
        )
    if drops:
        shown = ", ".join([*drops[:4], *(["..."] if len(drops) > 4 else [])])
        raise SpecError(
            f"cuda_graph=True for a model with dropout ({shown}): a graph would drop the same elements in every step. Set these to "
            "0, or leave cuda_graph out"
        )
    if recomputes and not alone:
        raise SpecError(
            "cuda_graph=True with recompute: a recomputed forward cannot be captured. Leave one of them out"
        )


class CapturedSteps:
    """The graphs of a model's micro-steps, by form of batch."""

    def __init__(self, forward: Forward, reducer: GradientReducer, model: nn.Module, device: torch.device) -> None:
        """Args:
        forward: calls the model.
        reducer: takes its gradients.
        model: whose micro-steps are captured.
        device: where they run.
        """
        self._forward, self._reducer, self._model, self._device = forward, reducer, model, device
        self._graphs: dict[Hashable, _MicroStep] = {}
        self._seen: Counter[Hashable] = Counter()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._places: tuple[int, ...] = ()

    def form_to_replay(self, work: Batch) -> Hashable | None:
        """Record a micro-step with this batch; return the batch's form if a graph for it can be replayed, else None."""
        places = tuple(tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers()))
        if places != self._places:  # somebody has moved the weights
            self._graphs.clear()
            self._places = places
        form = form_of(work, self._model.modules())
        self._seen[form] += 1
        if form in self._graphs:
            return form
        if len(self._graphs) >= MOST_GRAPHS:
            if len(self._graphs) == MOST_GRAPHS and self._seen[form] == WARM_UP + 1:
                warnings.warn(
                    f"cuda_graph=True: this is a batch of another shape than the {MOST_GRAPHS} that were captured, and runs "
                    "without a graph: pad batches to a few lengths",
                    stacklevel=5,
                )
            return None
        return form if self._seen[form] > WARM_UP else None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context manager of a micro-step that is not replayed, on the stream on which others are captured."""
        if self._stream is None:
            with masks_by_shape():
                yield
            return
        outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outer)
        with torch.cuda.stream(self._stream), masks_by_shape():
            yield
        outer.wait_stream(self._stream)

    def run(self, form: Hashable, work: Batch, count: Tensor, weight: Tensor, *, more: bool) -> Tensor:
        """Replay the micro-step with a batch, after capturing it if it is the first; inside ``States.backward``.

        Args:
            form: from :meth:`form_to_replay`.
            work: the batch, on the device.
            count: its targets that count: a scalar.
            weight: factor of the micro-step's mean loss before backward: a scalar float64.
            more: another micro-step adds to these gradients before they are used.

        Returns:
            The mean loss of the batch: a scalar float64.

        Raises:
            TrainingError: if the model cannot be captured.
        """
        if form not in self._graphs:
            self._graphs[form] = self._capture(work, count, weight)
        loss, gradients = self._graphs[form].run(work, count, weight)
        self._reducer.put(gradients, keep=more)
        return loss.clone()

    def close(self) -> None:
        """Free the graphs with their memory."""
        self._graphs.clear()

    def _capture(self, work: Batch, count: Tensor, weight: Tensor) -> _MicroStep:
        inputs = Inputs.like(work, count, weight)

        def step() -> _Results:
            with self._reducer.set_aside(), masks_by_shape():
                loss = self._forward.loss(inputs.work, Counted(inputs.count))
                (loss * inputs.weight).backward()
                return loss.detach(), self._reducer.take()

        if self._stream is None:
            return _MicroStep(inputs, step)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may copy batches and saves meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                loss, gradients = step()
        except RuntimeError as error:
            raise TrainingError(
                f"cuda_graph=True: forward and backward of {type(self._model).__name__} cannot be captured: "
                f"{str(error).strip().splitlines()[0]} A graph cannot contain what waits for the device (tensor.item(), "
                "a branch on a tensor's value, a mask that is looked at) or copies from the host: change the model, or leave "
                "cuda_graph out"
            ) from error

        def replay() -> _Results:
            graph.replay()
            return loss, gradients

        return _MicroStep(inputs, replay)


def form_of(work: Batch, modules: Iterable[nn.Module]) -> Hashable:
    """Return what graphs differ by: shapes and dtypes of tensors, all other values, and the modules in training mode."""
    leaves, tree = pytree.tree_flatten((work.args, work.kwargs, work.given, work.targets))
    each = tuple((leaf.shape, leaf.dtype, leaf.stride()) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
    return each, str(tree), work.name, tuple(module.training for module in modules)


@dataclass(frozen=True)
class Counted:
    """Count of targets in a tensor that a graph reads, in place of :class:`meshfold.engine.batches.sharding.Shares`."""

    count: Tensor

    def recount(self, mean: LossMean, ignored: int) -> None:
        """Raises:
        TrainingError: always; the micro-steps before have seen what the loss ignores.
        """
        raise TrainingError(
            f"cuda_graph=True: the loss ignores targets {ignored} now, and did not before: leave cuda_graph out"
        )


@dataclass(frozen=True)
class Inputs:
    """The tensors that a graph reads.

    Attributes:
        work: the batch, of tensors of its own.
        count, weight: scalars.
    """

    work: Batch
    count: Tensor
    weight: Tensor

    @classmethod
    def like(cls, work: Batch, count: Tensor, weight: Tensor) -> Inputs:
        """Copy a micro-step's inputs; a tensor that is in a batch twice stays one."""
        own: dict[Tensor, Tensor] = {}
        made = pytree.tree_map_only(
            Tensor, lambda each: own.setdefault(each, each.clone()), (work.args, work.kwargs, work.given, work.targets)
        )
        args, kwargs, given, targets = made
        return cls(replace(work, args=args, kwargs=kwargs, given=given, targets=targets), count.clone(), weight.clone())

    def fill(self, work: Batch, count: Tensor, weight: Tensor) -> None:
        """Copy another micro-step's inputs of the same form into these."""
        mine, theirs = (
            list(pytree.tree_leaves((each.args, each.kwargs, each.given, each.targets))) for each in (self.work, work)
        )
        pairs = {
            own: given for own, given in zip(mine, theirs, strict=True) if isinstance(own, Tensor)
        }  # each tensor once
        for own, given in (*pairs.items(), (self.count, count), (self.weight, weight)):
            own.copy_(given)


_Results = tuple[Tensor, "Sequence[BucketGradients | None]"]
"""The mean loss of a micro-step, and its gradients in every bucket."""


@dataclass(frozen=True)
class _MicroStep:
    """A micro-step that reads tensors of its own.

    Attributes:
        inputs: those tensors.
        replay: runs it: one launch of a graph, or kernel by kernel on a CPU.
    """

    inputs: Inputs
    replay: Callable[[], _Results]

    def run(self, work: Batch, count: Tensor, weight: Tensor) -> _Results:
        """Run it with other inputs of the same form."""
        self.inputs.fill(work, count, weight)
        return self.replay()
