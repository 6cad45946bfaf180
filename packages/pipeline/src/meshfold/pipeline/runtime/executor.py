"""Runs a program: a rank's list of actions, sends and receives, from left to right.

A receive is posted at its position in the list, and the action that uses it waits for it. A send must end before its memory is
reused. Each direction has its own process group, so that activations and gradients never wait for each other. Shapes are known in
advance, so only the tensors are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import Group, Mesh, Transfer, collectives
from meshfold.pipeline.runtime.microbatch import Microbatch
from meshfold.pipeline.runtime.stage import Stage
from meshfold.pipeline.runtime.transfer_plan import Slots, TransferPlan
from meshfold.pipeline.scheduling.actions import Action, Op
from meshfold.pipeline.scheduling.communication import Program, Receive, ReduceGradients, Send, Step

Key = tuple[str, int, int]
"""kind of a message, stage that needs it, micro-batch"""


class Channels:
    """Point-to-point messages along the pipeline axis."""

    def __init__(self, mesh: Mesh, axis: str) -> None:
        """Args:
        mesh: all ranks of the axis must make their channels.
        axis: of the pipeline.
        """
        self.index, self.size = mesh.index(axis), mesh.size(axis)
        self._up, self._down = mesh.channel(f"{axis} up", axis), mesh.channel(f"{axis} down", axis)
        self._sent: list[Transfer] = []
        self._warm: set[tuple[int, int]] = set()

    def send(self, tensor: Tensor, target: int) -> None:
        """Send to a rank of the axis. Returns at once; the tensor is kept until it has been sent."""
        self._sent = [transfer for transfer in self._sent if not transfer.done]
        self._sent.append(collectives.send(tensor, self._way(self.index, target), target))

    def receive(self, out: Tensor, source: int) -> Transfer:
        """Post a receive from a rank of the axis."""
        return collectives.receive(out, self._way(source, self.index), source)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for transfer in self._sent:
            transfer.wait()
        self._sent.clear()

    def open(self, pairs: set[tuple[int, int]], device: torch.device) -> None:
        """Connect every pair (source, target) once, in an order that all ranks share: NCCL connects two ranks at their
        first message, and both wait for it."""
        for source, target in sorted(pairs - self._warm):
            word = torch.zeros(1, device=device)
            if source == self.index:
                self.send(word, target)
                self.finish()
            elif target == self.index:
                self.receive(word, source).wait()
        self._warm |= pairs

    def _way(self, source: int, target: int) -> Group:
        return self._up if source < target else self._down


@dataclass
class Peaks:
    """Peak counts on a rank.

    Attributes:
        microbatches: pairs of stage and micro-batch between F and the gradient of the weights.
        graphs: those between F and the gradient of the input.
    """

    microbatches: int = 0
    graphs: int = 0

    def record(self, stages: Sequence[Stage]) -> None:
        """Update the peaks from all stages of a rank."""
        self.microbatches = max(self.microbatches, sum(len(stage.kept) for stage in stages))
        self.graphs = max(self.graphs, sum(len(stage.live) for stage in stages))


@dataclass
class Executor:
    """Runs programs on one rank.

    Attributes:
        stages: this rank's, by number.
        stage_ranks: the rank of every stage.
        channels: to the others.
        device: of received tensors.
        together: compute the weight gradients of consecutive W actions together.
        reduce: called with a stage once the gradients of its weights are complete.
        peaks: of the last program.
    """

    stages: Mapping[int, Stage]
    stage_ranks: tuple[int, ...]
    channels: Channels
    device: torch.device
    together: bool = False
    reduce: Callable[[int], None] | None = None
    peaks: Peaks = field(default_factory=Peaks)

    def run(
        self,
        program: Program,
        works: Sequence[Microbatch],
        plans: Sequence[TransferPlan],
        scale: float | Tensor = 1.0,
    ) -> Tensor | None:
        """Run this rank's steps; the gradients are in ``.grad`` afterwards.

        Args:
            program: for as many micro-batches as ``works`` has.
            works: the micro-batches, the same on all ranks of the axis.
            plans: what travels, for each.
            scale: factor of the gradients, not of the loss.

        Returns:
            The batch's loss, float64, on the rank of the last stage; None elsewhere.
        """
        self.peaks = Peaks()
        step = _Step(self, works, plans, scale)
        self.channels.open(_pairs(program), self.device)
        steps = program.ranks[self.channels.index]
        try:
            at = 0
            while at < len(steps):
                at += step.take(steps, at)
                self.peaks.record(list(self.stages.values()))
        except BaseException:
            for stage in self.stages.values():
                stage.clear()
                stage.queue.clear()
            raise
        self.channels.finish()
        return step.loss

    def evaluate(
        self, program: Program, works: Sequence[Microbatch], plans: Sequence[TransferPlan]
    ) -> list[Any | None]:
        """Run a program of forwards only, without gradients; return the model's outputs on the rank of the last stage."""
        step = _Step(self, works, plans, 1.0, training=False)
        self.channels.open(_pairs(program), self.device)
        with torch.no_grad():
            for at in range(len(program.ranks[self.channels.index])):
                step.take(program.ranks[self.channels.index], at)
        self.channels.finish()
        return step.outputs


class _Step:
    """The messages and the loss of one run."""

    def __init__(
        self,
        interpreter: Executor,
        works: Sequence[Microbatch],
        plans: Sequence[TransferPlan],
        scale: float | Tensor,
        *,
        training: bool = True,
    ) -> None:
        self._of, self._works, self._plans, self._scale = interpreter, works, plans, scale
        self._training = training
        self.outputs: list[Any | None] = [None] * len(works)
        self._coming: dict[Key, list[Transfer]] = {}
        self._here: dict[Key, list[Tensor]] = {}  # results of this rank, kept for it or to be sent
        self.loss: Tensor | None = None

    def take(self, steps: Sequence[Step], at: int) -> int:
        """Run the step at an index; return how many were run."""
        try:
            return self._do(steps, at)
        except Exception as error:
            error.add_note(f"in {_described(steps[at])}")
            raise

    def _do(self, steps: Sequence[Step], at: int) -> int:
        match steps[at]:
            case Send() as step:
                for tensor in self._here.pop((step.kind, step.stage, step.microbatch)):
                    self._of.channels.send(tensor, step.peer)
            case Receive() as step:
                self._coming[step.kind, step.stage, step.microbatch] = [
                    self._of.channels.receive(
                        torch.empty(slot.shape, dtype=slot.dtype, device=self._of.device), step.peer
                    )
                    for slot in self._slots(step)
                ]
            case ReduceGradients(stage):
                if self._of.reduce is not None:
                    self._of.reduce(stage)
            case Action(Op.F, stage, microbatch):
                self._forward(self._of.stages[stage], microbatch)
            case Action(Op.W, stage, microbatch):
                keys = self._following(steps, at) if self._of.together else [microbatch]
                self._of.stages[stage].backward_weight(*keys)
                return len(keys)
            case Action(op, stage, microbatch):
                self._backward(self._of.stages[stage], microbatch, op)
        return 1

    def _forward(self, stage: Stage, key: int) -> None:
        received = self._take("activation", stage.number, key) if stage.first else []
        if not self._training:
            output, _ = stage.run(self._works[key], self._plans[key], received)
            if stage.is_last:
                self.outputs[key] = output
            else:
                self._here["activation", stage.number + 1, key] = output
            return
        outputs, loss = stage.forward(key, self._works[key], self._plans[key], received)
        if loss is None:
            self._here["activation", stage.number + 1, key] = outputs
            return
        weight = self._works[key].weight.to(loss.device)
        share = torch.where(weight > 0, weight * loss.double(), 0.0)  # the mean over no targets may be NaN
        self.loss = share if self.loss is None else self.loss + share

    def _backward(self, stage: Stage, key: int, op: Op) -> None:
        if stage.is_last:
            gradients = [(self._works[key].weight * self._scale).to(self._of.device)]
        else:
            gradients = self._take("gradient", stage.number, key)
        found = (stage.backward_input if op is Op.B else stage.backward)(key, gradients)
        if stage.first:
            self._here["gradient", stage.number - 1, key] = found

    def _take(self, kind: str, stage: int, key: int) -> list[Tensor]:
        """Return a stage's input, made on this rank or received."""
        if (kind, stage, key) in self._here:
            return self._here.pop((kind, stage, key))
        return [transfer.wait() for transfer in self._coming.pop((kind, stage, key))]

    def _slots(self, step: Receive) -> Slots:
        stage, plan = self._of.stages[step.stage], self._plans[step.microbatch]
        return stage.inputs(plan) if step.kind == "activation" else stage.outputs(plan)

    def _following(self, steps: Sequence[Step], at: int) -> list[int]:
        """Return the micro-batches of consecutive W of one stage."""
        first, keys = steps[at], []
        for step in steps[at:]:
            match step:
                case Action(Op.W, stage, microbatch) if stage == first.stage:
                    keys.append(microbatch)
                case _:
                    break
        return keys


_WORK = {
    Op.F: "the forward",
    Op.B: "the gradient of the input",
    Op.W: "the gradient of the weights",
    Op.BW: "the backward",
}


def _described(step: Step) -> str:
    """Describe a step for an error message: ``the forward of stage 1 on micro-batch 0 (1F0)``."""
    match step:
        case Action(op, stage, microbatch):
            return f"{_WORK[op]} of stage {stage} on micro-batch {microbatch} ({step})"
        case Send(kind, stage, microbatch, peer):
            return f"sending the {kind} for stage {stage} of micro-batch {microbatch} to rank {peer} of it"
        case Receive(kind, stage, microbatch, peer):
            return f"receiving the {kind} for stage {stage} of micro-batch {microbatch} from rank {peer} of it"
        case _:
            return str(step)


def _pairs(program: Program) -> set[tuple[int, int]]:
    """Return the pairs (source, target) of ranks that exchange messages."""
    return {(rank, step.peer) for rank, steps in enumerate(program.ranks) for step in steps if isinstance(step, Send)}
