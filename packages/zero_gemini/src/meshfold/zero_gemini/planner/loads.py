"""Load of every option of every chunk on every resource, which :mod:`meshfold.zero_gemini.planner.seconds` adds up."""

from __future__ import annotations

import numpy as np

from meshfold.zero_gemini.planner.memory import device_steps_halves, gather_windows, has_shadow_copy
from meshfold.zero_gemini.planner.options import PARAMETERS, STATE, Floats
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.workload import ChunkCost, Workload


class Loads:
    """Load of every option of every chunk on every resource; arrays are: chunk option."""

    def __init__(self, workload: Workload, machine: Machine, strategy: str) -> None:
        chunks, regime = workload.chunks, workload.regime
        self.workload, self.machine, self.regime = workload, machine, regime
        elems = np.array([chunk.elems for chunk in chunks], dtype=float)[:, None]
        train = np.array([chunk.trainable for chunk in chunks], dtype=float)[:, None]
        loads = np.array([_times_loaded(chunk, workload) for chunk in chunks], dtype=float)
        off = np.array([state != "gpu" for state in STATE], dtype=float)
        streamed = np.array([placement != "gpu" and workload.stage == 3 for placement in PARAMETERS], dtype=float)
        disk = np.array([state == "disk" for state in STATE], dtype=float)
        self.elems = elems * train * off
        # streamed: loaded for every window; resident: refreshed once after the CPU's step
        refreshed = (off - streamed) * train
        self.up_again = regime.parameter * elems * streamed * loads[:, :1]
        self.up_forward = self.up_again + regime.parameter * elems * refreshed
        self.up_backward = regime.parameter * elems * streamed * loads[:, 1:]
        # Seconds of copies that compute waits for: chunks stepped on the host, uploaded at their first use.
        self.renewed = regime.parameter * self.elems / machine.h2d
        self.down = regime.gradient * self.elems
        self.disk = regime.state * elems * train * disk
        self.split = elems * train * (off - disk)
        self.copied = has_shadow_copy(workload, strategy)
        halves = device_steps_halves(workload, strategy)
        self.cores, self.beside = self._host_share(halves=halves)
        # Fraction of elements whose moments the cores write.
        self.moments = 1.0 if halves else self.cores
        self.gpu_step = regime.step * elems * train * (1 - off) / machine.gpu_memory
        self.forward = np.array([chunk.forward_seconds for chunk in chunks])
        self.backward = np.array([chunk.backward_seconds for chunk in chunks])
        self.first = np.array([chunk.forward[0] for chunk in chunks])
        self.done = np.array([c.backward[1] if c.reduced_in is None else c.reduced_in for c in chunks])
        timesteps = workload.timestep_seconds
        self.starts: Floats | None = None if timesteps is None else np.concatenate([[0.0], np.cumsum(timesteps)])
        waits = np.array([self._waits(chunk) for chunk in chunks])
        self.waits_forward, self.waits_backward = waits[:, :1] * streamed, waits[:, 1:] * streamed
        # The same for copies of what the host has stepped long before.
        self.renewed_ahead = self.waits_forward + refreshed * np.array(
            [[self._late(chunk, workload.ready_from(chunk.forward[0]), chunk.forward[0])] for chunk in chunks]
        )
        # With a single rank, a step that ends well before the forward is uploaded ahead of its use, so nothing waits for it.
        ahead = self.copied & (workload.data_ranks == 1)
        self.first_uploads: Floats = np.where(ahead, self.renewed_ahead, self.renewed)
        recompute = np.array([layer.recompute_seconds for layer in workload.layers])
        self.recompute = np.stack([recompute, np.zeros_like(recompute)], axis=1)
        self.recompute_at = np.array([layer.last + 1 for layer in workload.layers])
        self.gather_forward, self.gather_backward, self.reduce = self._collectives()

    def forward_from_use(self) -> Floats:
        """Return the seconds of compute from each chunk's first use to the end of the forward."""
        if self.starts is None:
            later = self.first[None, :] >= self.first[:, None]  # [k, j]: j's forward is not before k's
            found: Floats = later @ self.forward
            return found
        until_end: Floats = self.starts[self.workload.forward_timesteps] - self.starts[self.first]
        return until_end

    def backward_to_gradient(self) -> Floats:
        """Return the seconds of compute from the start of the backward until each chunk's gradient is complete."""
        if self.starts is None:
            before = self.done[None, :] <= self.done[:, None]  # k j: j's gradient is not after k's
            found: Floats = before @ self.backward
            return found
        since_turn: Floats = self.starts[self.done + 1] - self.starts[self.workload.forward_timesteps]
        return since_turn

    def recompute_to_gradient(self) -> Floats:
        """Return the seconds of recompute from the backward's start until each chunk's gradient is complete: layer kept chunk."""
        before = self.recompute_at[:, None] <= self.done[None, :]
        found: Floats = self.recompute[:, :, None] * before[:, None, :]
        return found

    def _waits(self, chunk: ChunkCost) -> tuple[float, float]:
        """Return the seconds of a streamed chunk's copies that the timesteps in which they are made do not hide: in the forward,
        and in the backward."""
        waits = [0.0, 0.0]
        for begin, _ in gather_windows(chunk, self.workload):
            use = min(first for first, _ in chunk.uses if first >= begin)
            waits[use >= self.workload.forward_timesteps] += self._late(chunk, begin, use)
        return waits[0], waits[1]

    def _late(self, chunk: ChunkCost, begin: int, use: int) -> float:
        """Return the seconds by which a chunk's copy is longer than the timesteps from its beginning to its use."""
        if self.starts is None:
            return 0.0
        copy = self.regime.parameter * chunk.elems / self.machine.h2d
        return max(0.0, copy - float(self.starts[use] - self.starts[begin]))

    def _collectives(self) -> tuple[float, float, float]:
        """Return a rank's seconds of gathering parameters in forward and in backward, and of reducing gradients."""
        workload, half = self.workload, self.workload.forward_timesteps
        forward = backward = reduced = 0.0
        width, rate = self.regime.parameter, self.machine.collective
        for chunk in workload.chunks:
            uses = [first < half for first, _ in chunk.uses]
            others = chunk.gathered_elems - chunk.elems  # received from the ranks that share the chunk
            if workload.stage == 3 and chunk.fp8:  # a byte for each operand; a recomputed forward reads its own again
                forward += others * sum(uses) / width
                backward += others * (len(uses) - sum(uses)) * (chunk.fp8 if workload.recomputed else 1) / width
            elif workload.stage == 3:
                forward += others * sum(uses)
                backward += others * (len(uses) - sum(uses))
            else:  # once, after the step
                forward += others * chunk.trainable
            reduced += workload.collected(chunk) * others * chunk.trainable
        return width * forward / rate, width * backward / rate, reduced / rate

    def first_halves(self) -> Floats:
        """Return the host-memory bytes of the first halves of the host's steps, at the cores' rate without streaming."""
        bytes_: Floats = self.regime.first_pass * self.cores * self.split * self.machine.host_memory / self.beside
        return bytes_

    def _host_share(self, *, halves: bool) -> tuple[float, float]:
        """Return the cores' fraction of the host's steps before a forward, and their host-memory bytes/s during it."""
        machine, regime = self.machine, self.regime
        if not machine.gpu_streaming:
            return 1.0, machine.host_memory
        cores = machine.host_memory_while_streaming / regime.first_pass
        passed = regime.first_pass if halves else regime.step
        # Uploads limit the device's share: for each element its state and gradient, and a stepped parameter.
        most = machine.h2d / ((regime.step + regime.gradient) / 2 + regime.parameter)
        return cores / (cores + min(machine.gpu_streaming / passed, most)), machine.host_memory_while_streaming

    def out_of_place(self) -> tuple[Floats, Floats]:
        """Return, for speculative steps, the seconds that cores and device need together, and the elements that are the device's;
        chunk option."""
        machine, regime = self.machine, self.regime
        cores = (
            machine.host_memory_while_streaming if machine.gpu_streaming else machine.host_memory
        ) / regime.out_of_place
        device = machine.gpu_streaming / regime.step
        together = cores + device
        return self.elems / together, self.elems * device / together

    def cpu(self) -> Floats:
        """Return the seconds of arithmetic of the CPU step."""
        return self.cpu_of(self.regime.step * self.elems)

    def cpu_of(self, traffic: Floats) -> Floats:
        """Return the seconds of arithmetic of a pass that moves ``traffic`` bytes."""
        rate = self.machine.cpu_optimizer.get(self.regime.name)
        seconds: Floats = traffic / self.regime.step / rate if rate else np.zeros_like(traffic)
        return seconds

    def disk_seconds(self, disk: Floats | None = None) -> Floats:
        """Return the seconds of reading and writing each chunk's state on disk: chunk option; ``disk``: its bytes."""
        disk = self.disk if disk is None else disk
        seconds: Floats = self.regime.disk_reads * disk / self.machine.disk_read + disk / self.machine.disk_write
        return seconds

    def disk_traffic(self, disk: Floats | None = None) -> Floats:
        """Return the bytes of host memory that reading and writing state on disk moves; arguments as of :meth:`disk_seconds`."""
        traffic: Floats = (self.regime.disk_reads + 1) * (self.disk if disk is None else disk)
        return traffic

    def own(self) -> Floats:
        """Return the seconds of a chunk's own copies down and up, which only other chunks' work can hide; chunk option chunk."""
        way = self.down / self.machine.d2h + self.renewed
        latency: Floats = way[:, :, None] * np.eye(len(way))[:, None, :]
        return latency

    def copies_after(self, waits: Floats) -> Floats:
        """Return the seconds of copies that compute waits for after a chunk's own in the forward; chunk option chunk.

        ``waits``: for its own, by chunk and option.
        """
        later = self.first[None, :] > self.first[:, None]  # [k, j]: j's forward is after k's
        copies: Floats = waits[:, :, None] * later.T[:, None, :]
        return copies


def _times_loaded(chunk: ChunkCost, workload: Workload) -> tuple[int, int]:
    """Return how often a streamed chunk is loaded in or before the forward, and in the backward."""
    turn = workload.ready_from(workload.forward_timesteps)
    found = gather_windows(chunk, workload)
    forward = sum(first < turn or first == 0 for first, _ in found)
    return forward, len(found) - forward
