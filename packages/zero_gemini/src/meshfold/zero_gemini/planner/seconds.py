"""Seconds of a choice, as the largest of named sums.

Without clipping (source: design, section "Gemini, planned"), a step is one phase if each gradient has its own buffer on the host,
as with several micro-steps. It takes the largest of

    compute                 GPU compute, recompute, the GPU's own optimizer step, and copies that compute waits for
    h2d, d2h, pcie          bytes up / down / both over their rates
    host memory             (CPU step + both PCIe directions + disk traffic) bytes / host memory bandwidth
    cpu optimizer, disk, collectives
    tail k                  the cycle through chunk k, below

A stepped chunk k is due again at its next forward. Between its gradient and that use are the rest of the backward and the start of
the forward. This window must hold the CPU's work on all chunks whose gradient comes no earlier and which are due no later (the
condition of earliest-deadline-first scheduling). So a step is no shorter than the cycle

    forward from k on + backward until k's gradient + work of those chunks + k's own copies down and up

It is short if the earliest chunks, whose gradients come last and which are needed first, are stepped on the GPU.

If gradients go through a ring of buffers instead, backward waits for the step that frees one. At most the ring's contents are left
for the forward, and the plan assumes none. Such a step is two phases, a forward in which nothing is stepped and a backward with the
whole step in it.

Compute also waits for the part of a copy that is longer than the timesteps in which it is made: in the middle of a U-Net units have
many parameters and compute little.

In a forward after a step, chunks that the optimizer may still be stepping are not prefetched. Copies of chunks that the host steps
then alternate with compute: they are one sum.

With clipping a step has two phases, each the largest of its own sums. The forward includes the pass that writes new master weights:
``max(forward, (18 B · host elements + forward's h2d bytes) / host memory)`` in regime A. The backward includes the pass that writes
the moments. State on disk is stepped whole, 26 B an element, before the forward. If the device steps some of the host's
chunks by GPU streaming, both work until nothing is left. The shares of the cores and the device are proportional to their rates,
and only the cores' share leaves moments. If the backward has time for it, the device leaves its moments too. A third fewer bytes
then go through the host's memory before the forward, and the cores write all moments during the backward. With several micro-steps
per step, each later one adds a forward and a backward in which nothing is stepped. A speculative step takes (1 - q) of the first
form and q of the second, with the wasted step in its backward; q is the share of steps that clip. There too the device steps a
share of the host's chunks, in proportion to the rates of device and cores.

If only some chunks have shadow copies, the first ones have them (:mod:`meshfold.zero_gemini.planner.shadow_copies`). Such a step is
one phase. The cycle through a chunk without a copy begins at the norm, or at the first gradient of the copied chunks, whose steps
go before it.

Optimizers that step all chunks in one call hide nothing of it: a phase of its own between backward and forward
(``Workload.steps_at_once``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshfold.zero_gemini.planner.loads import Loads
from meshfold.zero_gemini.planner.memory import gradient_ring
from meshfold.zero_gemini.planner.options import (
    NONE,
    SPECULATIVE_STEP,
    SPLIT_STEP,
    SPLIT_STEP_ON_DEVICE,
    Bools,
    Builder,
    Floats,
    Table,
)
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.workload import Workload

TAIL = "tail"
"""The first word of the rows that are cycles through a chunk."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the step that takes ``weight`` times the largest of rows ``start … stop-1``."""

    name: str
    weight: float
    start: int
    stop: int


def seconds_table(workload: Workload, machine: Machine, strategy: str) -> tuple[Table, tuple[Phase, ...]]:
    """Return the sums and the phases of a strategy."""
    loads = Loads(workload, machine, strategy)
    build = Builder(len(workload.chunks), len(workload.layers))
    phases: list[Phase] = []

    def close(name: str, weight: float) -> None:
        start = phases[-1].stop if phases else 0
        phases.append(Phase(name=name, weight=weight, start=start, stop=len(build.names)))

    q = workload.clip_probability
    if workload.steps_at_once:
        _forward_alone(build, loads)
        close("forward", 1.0)
        _backward(build, loads, NONE)
        close("backward", 1.0)
        _step_alone(build, loads)
        close("optimizer", 1.0)
    elif strategy == NONE and gradient_ring(workload):
        _forward_alone(build, loads)
        close("forward", 1.0)
        _stepped_backward(build, loads)
        close("backward", 1.0)
    elif strategy == SPECULATIVE_STEP and workload.shadow_copies is not None:
        _partly_overlapped(build, loads)
        close("step", 1.0)
    elif strategy == NONE or (strategy == SPECULATIVE_STEP and q < 1):
        _overlapped(build, loads, strategy)
        close("step", 1.0 if strategy == NONE else 1 - q)
    in_halves = strategy in (SPLIT_STEP, SPLIT_STEP_ON_DEVICE) and not workload.steps_at_once
    if in_halves or (strategy == SPECULATIVE_STEP and q > 0):
        weight = q if strategy == SPECULATIVE_STEP else 1.0
        _forward(build, loads, strategy)
        close("forward", weight)
        _backward(build, loads, strategy)
        close("backward", weight)
    if workload.accumulation > 1:
        _again_forward(build, loads)
        close("later forwards", workload.accumulation - 1)
        _again_backward(build, loads)
        close("later backwards", workload.accumulation - 1)
    return build.table(), tuple(phases)


def _overlapped(build: Builder, loads: Loads, strategy: str) -> None:
    """Add one phase: the host's chunks are stepped during the backward."""
    machine, regime, down, step = loads.machine, loads.regime, loads.down, loads.regime.step * loads.elems
    through = np.zeros_like(loads.elems)
    if strategy == SPECULATIVE_STEP:
        seconds, through = loads.out_of_place()
        step = seconds * machine.host_memory
    up, back = (regime.step + regime.gradient) / 2 * through, (regime.step - regime.gradient) / 2 * through
    _throughout(build, loads, step=step, through=(up, back))
    first, done = loads.first, loads.done
    before = done[None, :] <= done[:, None]  # k j: j's gradient is not after k's
    inside = (first[None, :] <= first[:, None]) & (done[None, :] >= done[:, None])
    path = loads.forward_from_use() + loads.backward_to_gradient()
    on_gpu = (loads.gpu_step + loads.waits_backward)[:, :, None] * before.T[:, None, :]
    fresh = regime.parameter * loads.elems
    copies = loads.copies_after(loads.renewed if loads.starts is None else loads.first_uploads)
    host = np.maximum((step + fresh + down + loads.disk_traffic()) / machine.host_memory, loads.cpu())
    for resource, work in (("host", host), ("disk", loads.disk_seconds())):
        chunk = on_gpu + work[:, :, None] * inside.T[:, None, :] + copies + loads.own()
        build.add(*_tails(loads, resource), base=path, chunk=chunk, layer=loads.recompute_to_gradient())


def _partly_overlapped(build: Builder, loads: Loads) -> None:
    """Add one phase: the host's chunks with a shadow copy are stepped during the backward, the others in halves after it."""
    machine, regime, copied = loads.machine, loads.regime, loads.copied
    seconds, through = loads.out_of_place()
    speculative = seconds * copied * machine.host_memory
    # The cores' rate during streaming was measured with the upload of stepped parameters included.
    split = loads.split * ~copied
    within = np.minimum(loads.up_forward, regime.parameter * split * (machine.gpu_streaming > 0))
    first = (loads.first_halves() - within + regime.step * (loads.elems - loads.split)) * ~copied
    moments = regime.second_pass * loads.moments * split
    if machine.moments_memory:
        moments = moments * machine.host_memory / machine.moments_memory
    passed, halved = through * copied, (1 - loads.cores) * split
    up, back = (regime.step + regime.gradient) / 2 * (passed + halved), (regime.step - regime.gradient) / 2 * passed
    _throughout(build, loads, step=speculative + first + moments, through=(up, back))
    due, done = loads.first, loads.done
    sooner = due[None, :] <= due[:, None]  # [k, j]: j is due no later than k
    inside = sooner & (done[None, :] >= done[:, None])
    traffic = (regime.parameter * loads.elems + loads.down + loads.disk_traffic()) / machine.host_memory
    ours = np.maximum(speculative / machine.host_memory + traffic, loads.cpu()) * copied
    others = np.maximum(first / machine.host_memory + traffic, np.maximum(loads.cpu_of(first), loads.disk_seconds()))
    others = others * ~copied
    copies = loads.copies_after(loads.renewed if loads.starts is None else loads.first_uploads)
    forward, gradient, recompute = loads.forward_from_use(), loads.backward_to_gradient(), loads.recompute_to_gradient()
    has_copy: Bools = np.any(copied, axis=1)

    def add(resource: str, of: Bools, base: Floats, chunk: Floats, layer: Floats) -> None:
        """Add the tails of some chunks; ``layer``: of each, or one of all."""
        names = [name for name, chosen in zip(_tails(loads, resource), of, strict=True) if chosen]
        build.add(*names, base=base[of], chunk=chunk[..., of], layer=np.broadcast_to(layer, recompute.shape)[..., of])

    stepped = ours[:, :, None] * inside.T[:, None, :] + copies + loads.own()
    add("host", has_copy, forward + gradient, stepped, recompute)
    after = others[:, :, None] * sooner.T[:, None, :] + copies + loads.own()
    add("norm", ~has_copy, forward + loads.backward.sum(), after, loads.recompute[..., None])
    if has_copy.any():  # all their steps between the first of their gradients and the steps of the others
        begin = int(np.flatnonzero(has_copy)[done[has_copy].argmin()])
        since = recompute[..., begin : begin + 1]
        add("copies", ~has_copy, forward + gradient[begin], after + ours[:, :, None], since)


def _throughout(build: Builder, loads: Loads, *, step: Floats, through: tuple[Floats, Floats]) -> None:
    """Add the sums of a forward and a backward that are one phase; arguments as of :func:`_beside`."""
    compute = loads.forward.sum() + loads.backward.sum()
    exposed = loads.gpu_step + np.maximum(loads.first_uploads, loads.waits_forward) + loads.waits_backward
    build.add("compute", base=compute, chunk=exposed, layer=loads.recompute)
    _beside(build, loads, up=loads.up_forward + loads.up_backward, step=step, disk=loads.disk, through=through)
    build.add("collectives", base=loads.gather_forward + loads.gather_backward + loads.reduce)


def _beside(
    build: Builder,
    loads: Loads,
    *,
    up: Floats,
    step: Floats,
    disk: Floats,
    memory: float = 0.0,
    through: tuple[Floats, Floats] | tuple[float, float] = (0.0, 0.0),
) -> None:
    """Add the work that overlaps with a backward: copies both ways, the host's step, disk; bytes by (chunk, option).

    ``memory``: host memory's bytes/s meanwhile; 0: the usual rate. ``through``: bytes up and down for the device's share of
    the step; their host memory traffic is part of ``step``.
    """
    machine, down = loads.machine, loads.down
    memory = memory or machine.host_memory
    build.add("h2d", chunk=(up + through[0]) / machine.h2d)
    build.add("d2h", chunk=(down + through[1]) / machine.d2h)
    build.add("pcie", chunk=(up + down + through[0] + through[1]) / machine.pcie_both)
    build.add("host memory", chunk=(step + up + down + loads.disk_traffic(disk)) / memory)
    build.add("cpu optimizer", chunk=loads.cpu_of(step))
    build.add("disk", chunk=loads.disk_seconds(disk))


def _forward_alone(build: Builder, loads: Loads) -> None:
    """Add a forward after a backward that stepped: it only copies the results up."""
    machine, up = loads.machine, loads.up_forward
    build.add("compute", base=loads.forward.sum(), chunk=np.maximum(loads.renewed, loads.waits_forward))
    build.add("h2d", chunk=up / machine.h2d)
    build.add("host memory", chunk=up / machine.host_memory)
    build.add("collectives", base=loads.gather_forward)


def _step_alone(build: Builder, loads: Loads) -> None:
    """Add a step that nothing hides: of the chunks in memory, then of those on disk, read and written beside their steps."""
    step = loads.regime.step * loads.elems
    build.add("compute", chunk=loads.gpu_step)
    build.add("host memory", chunk=(step + loads.disk_traffic()) / loads.machine.host_memory)
    build.add("cpu optimizer", chunk=loads.cpu())
    build.add("disk", chunk=loads.disk_seconds())
    in_memory = loads.regime.step * loads.split / loads.machine.host_memory
    build.add(f"{TAIL} optimizer", chunk=in_memory + loads.disk_seconds())


def _stepped_backward(build: Builder, loads: Loads) -> None:
    """Add a backward that waits for the CPU's steps, because there are few gradient buffers."""
    machine, down, step = loads.machine, loads.down, loads.regime.step * loads.elems
    on_gpu = loads.gpu_step + loads.waits_backward
    build.add("compute", base=loads.backward.sum(), chunk=on_gpu, layer=loads.recompute)
    _beside(build, loads, up=loads.up_backward, step=step, disk=loads.disk)
    build.add("collectives", base=loads.gather_backward + loads.reduce)
    done = loads.done
    before = done[None, :] <= done[:, None]  # k j: j's gradient is not after k's
    after = done[None, :] >= done[:, None]  # [k, j]: j's gradient, and so its step, is not before k's
    on_gpu_before = on_gpu[:, :, None] * before.T[:, None, :]
    host = np.maximum((step + down + loads.disk_traffic()) / machine.host_memory, loads.cpu())
    arriving = (down / machine.d2h)[:, :, None] * np.eye(len(done))[:, None, :]
    for resource, work in (("host", host), ("disk", loads.disk_seconds())):
        chunk = on_gpu_before + work[:, :, None] * after.T[:, None, :] + arriving
        build.add(
            *_tails(loads, resource),
            base=loads.backward_to_gradient(),
            chunk=chunk,
            layer=loads.recompute_to_gradient(),
        )


def _forward(build: Builder, loads: Loads, strategy: str) -> None:
    """Add the forward with each chunk's CPU step just before its use; the GPU steps once the norm is known."""
    machine, regime = loads.machine, loads.regime
    halves = strategy in (SPLIT_STEP, SPLIT_STEP_ON_DEVICE)
    split = loads.split if halves else np.zeros_like(loads.split)
    step = regime.step * (loads.elems - split) + (loads.first_halves() if halves else 0.0)
    cpu = loads.cpu_of(step) if halves else loads.cpu()
    up = loads.up_forward
    # The cores' rate during streaming was measured with the upload of stepped parameters included.
    within = regime.parameter * split * (machine.gpu_streaming > 0)
    fresh, more = regime.parameter * loads.elems - within, up - np.minimum(up, within)
    through = (regime.step + regime.gradient) / 2 * (1 - loads.cores) * split
    renewed = np.maximum(loads.renewed, loads.waits_forward)
    build.add("compute", base=loads.forward.sum(), chunk=loads.gpu_step + renewed)
    build.add("h2d", chunk=(up + through) / machine.h2d)
    build.add("host memory", chunk=(step + more + loads.disk_traffic()) / machine.host_memory)
    build.add("cpu optimizer", chunk=cpu)
    build.add("disk", chunk=loads.disk_seconds())
    build.add("collectives", base=loads.gather_forward)
    first = loads.first
    path = loads.forward_from_use()
    earlier = (first[None, :] <= first[:, None]).T[:, None, :]
    host = np.maximum((step + fresh + loads.disk_traffic()) / machine.host_memory, cpu)
    for resource, work in (("host", host), ("disk", loads.disk_seconds())):
        chunk = work[:, :, None] * earlier + loads.copies_after(loads.renewed) + loads.own()
        build.add(*_tails(loads, resource), base=path, chunk=chunk)


def _backward(build: Builder, loads: Loads, strategy: str) -> None:
    """Add the backward of a step that clips, with the last step's moments or with a speculative step that will be dropped."""
    regime = loads.regime
    step, disk, memory = np.zeros_like(loads.elems), np.zeros_like(loads.elems), 0.0
    if strategy in (SPLIT_STEP, SPLIT_STEP_ON_DEVICE):
        step, memory = regime.second_pass * loads.moments * loads.split, loads.machine.moments_memory
    elif strategy == SPECULATIVE_STEP:
        step, disk = regime.step * loads.elems, loads.disk
    build.add("compute", base=loads.backward.sum(), chunk=loads.waits_backward, layer=loads.recompute)
    _beside(build, loads, up=loads.up_backward, step=step, disk=disk, memory=memory)
    build.add("collectives", base=loads.gather_backward + loads.reduce)


def _again_forward(build: Builder, loads: Loads) -> None:
    """Add the forward of a later micro-step, without optimizer steps."""
    machine, up = loads.machine, loads.up_again
    build.add("compute", base=loads.forward.sum(), chunk=loads.waits_forward)
    build.add("h2d", chunk=up / machine.h2d)
    build.add("host memory", chunk=up / machine.host_memory)
    build.add("collectives", base=loads.gather_forward if loads.workload.stage == 3 else 0.0)


def _again_backward(build: Builder, loads: Loads) -> None:
    """Add the backward of a later micro-step: the sum of gradients is fetched, added to and sent back."""
    machine, up, down = loads.machine, loads.up_backward + loads.down, loads.down
    build.add("compute", base=loads.backward.sum(), chunk=loads.waits_backward, layer=loads.recompute)
    build.add("h2d", chunk=up / machine.h2d)
    build.add("d2h", chunk=down / machine.d2h)
    build.add("pcie", chunk=(up + down) / machine.pcie_both)
    build.add("host memory", chunk=(up + down) / machine.host_memory)
    build.add("collectives", base=loads.gather_backward + (0.0 if loads.workload.sums_once else loads.reduce))


def _tails(loads: Loads, resource: str) -> list[str]:
    """Return the name of each chunk's tail on a resource."""
    return [f"{TAIL} {resource} {chunk.name}" for chunk in loads.workload.chunks]
