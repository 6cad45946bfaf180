"""Load of every option of every chunk on every resource: bytes and seconds, before any overlap."""

from __future__ import annotations

import numpy as np

from meshfold.zero_gemini.planner.memory import gather_windows
from meshfold.zero_gemini.planner.options import PARAMETERS, SPLIT_STEP_ON_DEVICE, STATE, Floats
from meshfold.zero_gemini.planner.rates import Machine
from meshfold.zero_gemini.planner.workload import ChunkCost, Workload

TAIL = "tail"
"""the first word of the rows that are cycles through a chunk"""


class Loads:
    """Load of every option of every chunk on every resource; arrays are: chunk option."""

    def __init__(self, workload: Workload, machine: Machine, strategy: str) -> None:
        chunks, regime = workload.chunks, workload.regime
        self.workload, self.machine, self.regime = workload, machine, regime
        elems = np.array([chunk.elems for chunk in chunks], dtype=float)[:, None]
        train = np.array([chunk.trainable for chunk in chunks], dtype=float)[:, None]
        loads = np.array([_loads(chunk, workload) for chunk in chunks], dtype=float)
        off = np.array([state != "gpu" for state in STATE], dtype=float)
        streamed = np.array([home != "gpu" and workload.stage == 3 for home in PARAMETERS], dtype=float)
        disk = np.array([state == "disk" for state in STATE], dtype=float)
        self.elems = elems * train * off
        # streamed: loaded for each window; resident: refreshed once after the CPU's step
        refreshed = (off - streamed) * train
        self.up_again = regime.parameter * elems * streamed * loads[:, :1]
        self.up_forward = self.up_again + regime.parameter * elems * refreshed
        self.up_backward = regime.parameter * elems * streamed * loads[:, 1:]
        # Seconds of copies that compute waits for: of what the host steps, brought up at its first use.
        self.renewed = regime.parameter * self.elems / machine.h2d
        self.down = regime.gradient * self.elems
        self.disk = regime.state * elems * train * disk
        self.split = elems * train * (off - disk)
        self.cores, self.beside = self._dealt(strategy)
        # Share of the elements whose moments the cores write.
        self.moments = 1.0 if strategy == SPLIT_STEP_ON_DEVICE else self.cores
        self.gpu_step = regime.step * elems * train * (1 - off) / machine.gpu_memory
        self.forward = np.array([chunk.forward_seconds for chunk in chunks])
        self.backward = np.array([chunk.backward_seconds for chunk in chunks])
        self.first = np.array([chunk.forward[0] for chunk in chunks])
        self.done = np.array([chunk.backward[1] for chunk in chunks])
        recompute = np.array([layer.recompute_seconds for layer in workload.layers])
        self.recompute = np.stack([recompute, np.zeros_like(recompute)], axis=1)
        self.recompute_at = np.array([layer.last + 1 for layer in workload.layers])
        self.gather_forward, self.gather_backward, self.reduce = self._collectives()

    def _collectives(self) -> tuple[float, float, float]:
        """Seconds in which a rank receives parameters in the forward and in the backward, and sums gradients."""
        workload, half, ranks = self.workload, self.workload.forward_moments, self.workload.data_ranks
        forward = backward = reduced = 0
        for chunk in workload.chunks:
            uses = [first < half for first, _ in chunk.uses]
            if workload.stage == 3:
                forward += chunk.gathered_elems * sum(uses)
                backward += chunk.gathered_elems * (len(uses) - sum(uses))
            else:  # once, when they have been stepped
                forward += chunk.gathered_elems * chunk.trainable
            reduced += chunk.gathered_elems * chunk.trainable
        share = (ranks - 1) / ranks / self.machine.collective
        width = self.regime.parameter
        return width * forward * share, width * backward * share, self.regime.gradient * reduced * share

    def _dealt(self, strategy: str) -> tuple[float, float]:
        """The cores' share of what the host steps before a forward, and the host memory's bytes/s that they have then."""
        machine, regime = self.machine, self.regime
        if not machine.passage:
            return 1.0, machine.host_memory
        cores = machine.beside_passage / regime.first_pass
        passed = regime.first_pass if strategy == SPLIT_STEP_ON_DEVICE else regime.step
        # of what only the parameters come down of more goes up: no more than there is room for, beside the parameters
        most = machine.h2d / ((regime.step + regime.gradient) / 2 + regime.parameter)
        return cores / (cores + min(machine.passage / passed, most)), machine.beside_passage

    def out_of_place(self) -> tuple[Floats, Floats]:
        """Return, for speculative steps, the seconds that cores and device need together, and the elements that are the device's;
        chunk option."""
        machine, regime = self.machine, self.regime
        cores = (machine.beside_passage if machine.passage else machine.host_memory) / regime.out_of_place
        device = machine.passage / regime.step
        together = cores + device
        return self.elems / together, self.elems * device / together

    def cpu(self) -> Floats:
        """Seconds of arithmetic of the CPU step."""
        return self.cpu_of(self.regime.step * self.elems)

    def cpu_of(self, traffic: Floats) -> Floats:
        """The same for a pass that moves so many bytes of the step's."""
        rate = self.machine.cpu_optimizer.get(self.regime.name)
        seconds: Floats = traffic / self.regime.step / rate if rate else np.zeros_like(traffic)
        return seconds

    def disk_seconds(self) -> Floats:
        seconds: Floats = self.disk / self.machine.disk_read + self.disk / self.machine.disk_write
        return seconds

    def own(self) -> Floats:
        """Seconds of a chunk's own way down and up, which only others' work can hide; chunk option chunk."""
        way = self.down / self.machine.d2h + self.renewed
        latency: Floats = way[:, :, None] * np.eye(len(way))[:, None, :]
        return latency

    def copies_after(self) -> Floats:
        """Seconds of copies that compute waits for after a chunk's own in the forward; chunk option chunk."""
        later = self.first[None, :] > self.first[:, None]  # k j: j's forward is after k's
        copies: Floats = self.renewed[:, :, None] * later.T[:, None, :]
        return copies

    def tails(self, resource: str) -> list[str]:
        return [f"{TAIL} {resource} {chunk.name}" for chunk in self.workload.chunks]


def _loads(chunk: ChunkCost, workload: Workload) -> tuple[int, int]:
    """Return how often a streamed chunk is loaded in the forward, or ahead of it, and in the backward."""
    turn = workload.ready_from(workload.forward_moments)
    found = gather_windows(chunk, workload)
    forward = sum(first < turn or first == 0 for first, _ in found)
    return forward, len(found) - forward
