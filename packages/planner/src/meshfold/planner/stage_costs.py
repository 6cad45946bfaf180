"""Costs of one rank's pipeline stages for a micro-batch, measured on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshfold.engine.states import GradientReducer
from meshfold.mesh import Entry, Log, Mesh
from meshfold.mesh.model_io import DryRun, saved_for_backward
from meshfold.pipeline import Action, Op, Pipeline
from meshfold.pipeline.runtime import Microbatch, Stage
from meshfold.planner.clock import Work
from meshfold.planner.machines import Machine
from meshfold.planner.step_bytes import StepBytes

_KEY = 0


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Costs of one stage for one micro-batch.

    Attributes:
        number: of the stage, counted over the whole model.
        rank: its coordinate on the pipeline axis.
        blocks: how many of the repeated blocks it has.
        work: of F, B and W.
        entries: collectives of F, B and W.
        activation_bytes: kept from F to B; the last stage's include logits.
        waiting_bytes: kept from B to W if W is separate: inputs of linear layers, and gradients of their outputs.
        peaks: most bytes alive in F, B and W beyond those alive at their start, without gradients of weights.
        sent: bytes of every tensor that is sent to the next stage, and whose gradient is sent back.
        received: the same from the stage before.
    """

    number: int
    rank: int
    blocks: int
    work: tuple[Work, Work, Work]
    entries: tuple[tuple[Entry, ...], ...]
    activation_bytes: int
    waiting_bytes: int
    peaks: tuple[int, int, int]
    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def flops(self) -> tuple[int, int, int]:
        """FLOP of F, B and W: matmuls and attention."""
        forward, backward, weight = (work.flop for work in self.work)
        return forward, backward, weight

    def seconds(self, machine: Machine, mesh: Mesh, precision: str, exchanged: int = 0) -> tuple[float, float, float]:
        """Return the times of F, B and W: of their operators and of collectives over axes other than the pipeline's, one after the
        other, or of launching them.

        Args:
            machine: of the stage.
            mesh: of the spec.
            precision: of compute.
            exchanged: tensors that F sends to other ranks and gets from them; as many gradients are B's. A GPU's host issues them.
        """
        found = []
        for number, (work, sent) in enumerate(zip(self.work, self.entries, strict=True)):
            waits = sum(
                machine.message_seconds(
                    entry.kind,
                    float(entry.bytes),
                    machine.slowest(mesh, entry.axes, entry.kind),
                    ranks=entry.group_size,
                )
                for entry in sent
                if entry.group_size > 1
            )
            issued = (
                exchanged * machine.issue_seconds("send") if number < 2 and machine.kind == "gpu" else 0.0
            )  # F's and B's
            phases = work.phases(machine, precision).waiting(waits, 0.0)
            found.append(max(phases.device, phases.host + issued))
        forward, backward, weight = found
        return forward, backward, weight


def stage_costs(
    pipeline: Pipeline, work: Microbatch, log: Log, stand_in: DryRun, reducer: GradientReducer | None, kind: str = "gpu"
) -> list[StageCosts]:
    """Run F, B and W of this rank's stages once each.

    Args:
        pipeline: of a model on the meta device.
        work: the micro-batch.
        log: an active recording; its entries are removed.
        stand_in: context in which the model's code runs.
        reducer: collects the gradients of the weights; None: they are dropped.
        kind: of the device.
    """
    found = []
    for stage in pipeline.stages.values():
        log.entries.clear()
        found.append(_costs_of(pipeline, stage, work, log, stand_in, reducer, kind))
    log.entries.clear()
    return found


def _costs_of(
    pipeline: Pipeline,
    stage: Stage,
    work: Microbatch,
    log: Log,
    stand_in: DryRun,
    reducer: GradientReducer | None,
    kind: str,
) -> StageCosts:
    plan = pipeline.plan_of(work)
    log.entries.clear()
    done: list[Work] = []
    ends = [0]
    memory, peaks = StepBytes(reducer, kind=kind), list[int]()

    def counted(phase: str, action: Callable[[], object]) -> None:
        log.phase = phase
        before = Work.of(counter)
        _, there = memory.take_others()
        action()
        peaks.append(memory.take_others()[0] - there)
        done.append(Work.of(counter).minus(before))
        ends.append(len(log.entries))

    given = stage.random_inputs(plan, pipeline.device)
    batch = [leaf for leaf in tree_leaves((work.args, work.kwargs)) if isinstance(leaf, Tensor)]
    # One counter for all three: what a kernel's forward keeps for its backward is counted by the forward's counter.
    with Work.counted(stand_in, memory, kind=kind) as counter:
        with saved_for_backward([*pipeline.parameters(), *batch]) as saved:
            counted("forward", lambda: stage.forward(_KEY, work, plan, given))
        for tensor in given:  # kept until its gradient arrives, even if autograd frees it
            saved.add(tensor)
        counted("backward", lambda: stage.backward_input(_KEY, stage.random_gradients(plan, pipeline.device)))
        waiting = stage.queue.held_bytes
        counted("backward", lambda: stage.backward_weight(_KEY))
    forward, backward, weight = done
    return StageCosts(
        number=stage.number,
        rank=pipeline.partition.rank,
        blocks=stage.stop - stage.first,
        work=(forward, backward, weight),
        entries=tuple(tuple(log.entries[a:b]) for a, b in pairwise(ends)),
        activation_bytes=saved.bytes,
        waiting_bytes=waiting,
        peaks=(peaks[0] + sum(tensor.nbytes for tensor in given), peaks[1], peaks[2]),
        sent=tuple(slot.dtype.itemsize * prod(slot.shape) for slot in stage.outputs(plan)),
        received=tuple(slot.dtype.itemsize * prod(slot.shape) for slot in stage.inputs(plan)),
    )


def peak_beside_state(actions: Sequence[Action], stages: Sequence[StageCosts], gradients: int) -> tuple[int, int]:
    """Return the peak bytes of a rank besides weights and optimizer state: of gradients, and of all else.

    Args:
        actions: the rank's.
        stages: of the whole model, in order.
        gradients: bytes of the rank's, which exist from the first backward on.
    """
    held, there = 0, 0
    most = (0, 0)
    for action in actions:
        stage = stages[action.stage]
        forward, backward, weight = stage.peaks
        kept, waiting = stage.activation_bytes, stage.waiting_bytes
        if action.op is not Op.F:
            there = gradients
        if action.op is Op.F:
            peak, change = forward, kept
        elif action.op is Op.B:
            peak, change = backward, waiting - kept
        elif action.op is Op.W:
            peak, change = weight, -waiting
        else:
            peak, change = max(backward, weight + waiting - kept), -kept
        most = max(most, (there, held + max(peak, change)), key=sum)
        held += change
    return most
