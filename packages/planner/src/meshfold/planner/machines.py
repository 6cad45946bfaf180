"""Nodes of equal devices: their rates, their memory, and the links that a collective uses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshfold.mesh import Mesh
from meshfold.planner.efficiency import OPTIMIZER as OPTIMIZER
from meshfold.planner.efficiency import Efficiency, Launches, Link
from meshfold.planner.node_groups import leaves_node, ranks_of_a_node

if TYPE_CHECKING:
    from meshfold.zero_gemini.planner import Machine as Rates


KINDS = ("gpu", "cpu")
"""Kinds of devices."""
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "H200": {"bf16": 989, "fp16": 989, "fp32": 67, "fp64": 67, "fp8": 1979},
    "H100": {"bf16": 989, "fp16": 989, "fp32": 67, "fp64": 67, "fp8": 1979},
    "A100": {"bf16": 312, "fp16": 312, "fp32": 19.5, "fp64": 19.5},
    "V100": {"fp16": 125, "bf16": 15.7, "fp32": 15.7, "fp64": 7.8},
}
"""TFLOP/s of dense matmuls by GPU and precision, from the data sheets (the H200 has the H100's chip)."""
# Seconds per element and core of an optimizer step in cache, by regime.
_CORE_SECONDS = {"A": 0.86e-9, "B": 0.95e-9, "C": 3.0e-9}


@dataclass(frozen=True, kw_only=True)
class Host:
    """The host of a node, shared by all of its devices.

    Attributes:
        memory: bytes.
        cores: of its processors.
        up: bytes a second from page-locked memory to one device, while all devices copy.
        down: the same from one device.
        both: the same in both directions at once, the sum.
        bandwidth: bytes a second of memory under all cores, reads and writes together.
        disk: bytes of a fast disk.
        disk_read: bytes a second.
        disk_write: bytes a second.
        stepping: bytes a second of memory in a training step whose state is there, while the cores write parameters and these are
            copied to devices, copies included. 0: not measured, ``bandwidth``.
        moments: the same while they write moments, and gradients are copied from devices too. 0: ``stepping``.
        stepping_of_one: most of ``stepping`` that one rank reaches with its cores, the others of a node at rest. 0: not measured,
            all of it.
        moments_of_one: the same of ``moments``.
        streaming: bytes a second of state, up and down together, that passes through all devices to be stepped while the cores step
            other state. 0: not measured, or no faster than the cores alone.
        stepping_while_streaming: ``stepping`` at that time.
    """

    memory: float
    cores: int
    up: float
    down: float
    both: float
    bandwidth: float
    disk: float
    disk_read: float
    disk_write: float
    stepping: float = 0.0
    moments: float = 0.0
    stepping_of_one: float = 0.0
    moments_of_one: float = 0.0
    streaming: float = 0.0
    stepping_while_streaming: float = 0.0

    def rank_rates(self, ranks: int) -> RankRates:
        """Return the rates of one of some ranks that share the host. Few ranks do not reach all that its memory gives to many."""
        streaming = min(self.streaming / ranks, self.both)  # of one device's link
        return RankRates(
            stepping=min((self.stepping or self.bandwidth) / ranks, self.stepping_of_one or math.inf),
            moments=min(self.moments / ranks, self.moments_of_one or math.inf),
            streaming=streaming,
            stepping_while_streaming=self.stepping_while_streaming * streaming / self.streaming if streaming else 0.0,
        )


@dataclass(frozen=True, kw_only=True)
class RankRates:
    """A rank's share of the rates of its :class:`Host` under the same names."""

    stepping: float
    moments: float
    streaming: float
    stepping_while_streaming: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal devices.

    Attributes:
        name: as users write it.
        devices: in a node.
        memory: bytes of a device.
        memory_rate: bytes a second of a device's memory, reads and writes together.
        host: of the node.
        flops: floating point operations a second of a large matmul, by precision; ``"fp8"`` where products in fp8 are faster.
        inside: bytes a second that a device sends inside its node, by the ring count of ``meshfold.mesh.recording.comm_log``.
        between: the same between nodes.
        latency: seconds of the smallest collective.
        source: where the numbers come from.
        kind: of the devices: ``"gpu"``, or ``"cpu"`` for ranks that compute on the host's cores.
        launches: seconds in which the host launches operators.
        pace: of a CPU, the seconds of matmuls that were timed beside its samples (:func:`meshfold.planner.calibration.pace_of`); 0:
            not measured. Beside other work they tell by how much the CPU is slower than the plan's.
        efficiency: shares of these rates that operators reach.
        collectives: kind to its link inside a node, where it was measured; others take ``latency`` and ``inside``.
        small_groups: the same of groups with fewer ranks than a node has, by their number: they reach another rate. A group takes
            the links of the smallest measured number that is no less than its own.
    """

    name: str
    devices: int
    memory: float
    memory_rate: float
    host: Host
    flops: dict[str, float]
    inside: float
    between: float
    latency: float
    source: str
    kind: str = "gpu"
    launches: Launches = field(default_factory=Launches)
    pace: float = 0.0
    efficiency: Efficiency = field(default_factory=Efficiency)
    collectives: Mapping[str, Link] = field(default_factory=dict)
    small_groups: Mapping[int, Mapping[str, Link]] = field(default_factory=dict)

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of the data sheet, by which MFU divides; without a data sheet those of a large matmul."""
        known = next((peaks for kind, peaks in PEAK_TFLOPS.items() if kind in self.name.upper()), None)
        return self.flops[precision] if known is None else 1e12 * known[precision]

    def message_seconds(self, kind: str, sent: float, rate: float, *, calls: int = 1, ranks: int = 0) -> float:
        """Return the seconds of collectives.

        Args:
            kind: as in ``meshfold.mesh.recording.comm_log``.
            sent: bytes that a rank sends in all calls.
            rate: :meth:`bandwidth` or :meth:`slowest` of their ranks.
            calls: number of collectives.
            ranks: that take part; 0: those of a node.
        """
        link = None
        if rate == self.inside:
            enough = [size for size in self.small_groups if size >= ranks > 0]
            links = self.small_groups[min(enough)] if enough else self.collectives
            link = links.get(kind) or self.collectives.get(kind)
        return (link or Link(latency=self.latency, rate=rate)).seconds(sent, calls)

    @property
    def usual_precision(self) -> str:
        """Precision in which attention and operators are measured: on a CPU that of most models there, on a GPU the quickest."""
        if self.kind == "cpu" and "fp32" in self.flops:
            return "fp32"
        return max((name for name in self.flops if name != "fp8"), key=lambda name: self.flops[name])

    def issue_seconds(self, kind: str) -> float:
        """Return the seconds in which a host begins a collective: those of the smallest, which come as fast as it issues them."""
        return self.message_seconds(kind, 0.0, self.inside)

    def shown_seconds(self, kind: str, seconds: float, rate: float) -> float:
        """Return the part of collectives' seconds that matmuls do not hide while both run.

        Inside a node it is measured. A byte that goes to another node costs a device as much as one inside, and a slower link takes
        longer for it: so it hides more of its seconds.

        Args:
            kind: of the collectives.
            seconds: that they take alone.
            rate: at which they send, as for :meth:`message_seconds`.
        """
        return self.efficiency.shown_of(kind) * seconds * min(1.0, rate / self.inside)

    def bandwidth(self, ranks: tuple[int, ...]) -> float:
        """Return the bytes a second that a rank sends in a collective of these ranks: the slowest link on the ring."""
        nodes = {rank // self.devices for rank in ranks}
        return self.inside if len(nodes) == 1 else self.between

    def reaches(self, ranks: Iterable[int]) -> bool:
        """Return True if the ranks are in one node, where copy engines reach each other's memory."""
        return len({rank // self.devices for rank in ranks}) == 1

    def slowest(self, mesh: Mesh, axes: tuple[str, ...], kind: str = "all_reduce") -> float:
        """Return the lowest bandwidth of the groups along the axes, which other ranks wait for; see :meth:`link_rate`."""
        return self.link_rate(tuple((name, mesh.size(name)) for name in mesh.names), axes, kind)

    def link_rate(self, sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...], kind: str = "all_reduce") -> float:
        """Return the bytes a second that a rank sends in a collective along axes.

        Every device has its share of its node's links to other nodes. A ring over several nodes uses the links of all of its ranks
        on a node, as NCCL does with one ring a link. In an all-to-all a rank sends only a part to other nodes. A message uses one
        link.

        Args:
            sizes: of all axes of a mesh, outermost first.
            axes: of the mesh, or factors of them.
            kind: of the collective.
        """
        if not leaves_node(self.devices, sizes, axes):
            return self.inside
        if kind in ("send", "receive"):
            return self.between
        together, ranks = ranks_of_a_node(self.devices, sizes, axes)
        links = ranks / max(1, ranks - together) if kind == "all_to_all" else together
        return min(self.inside, self.between * links) if links > 1 else self.between

    def rates(
        self,
        precision: str,
        *,
        mesh: Mesh,
        axes: tuple[str, ...],
        ranks: int,
    ) -> Rates:
        """Return one rank's share of a node: rates are divided by the ranks on it. The ranks share the host's memory and disk.

        Args:
            precision: of the model.
            mesh: the ranks.
            axes: those over which parameters are gathered and gradients summed.
            ranks: of the mesh on one node.
        """
        from meshfold.zero_gemini.optimizer import STREAMING_BYTES
        from meshfold.zero_gemini.planner import Machine as Rates

        host = self.host
        mine = host.rank_rates(ranks)
        return Rates(
            name=self.name,
            flops=self.flops[precision],
            gpu_memory=self.efficiency.optimizer * self.memory_rate,
            h2d=host.up,
            d2h=host.down,
            pcie_both=host.both,
            host_memory=mine.stepping,
            moments_memory=mine.moments,
            gpu_streaming=mine.streaming,
            host_memory_while_streaming=mine.stepping_while_streaming,
            streaming_bytes=STREAMING_BYTES if mine.streaming else 0,
            disk_read=host.disk_read / ranks,
            disk_write=host.disk_write / ranks,
            collective=self.slowest(mesh, axes),
            gpu_bytes=int(self.memory),
            host_bytes=int(host.memory),
            disk_bytes=int(host.disk),
            cpu_optimizer={regime: host.cores / ranks / cost for regime, cost in _CORE_SECONDS.items()},
        )


def __getattr__(name: str) -> Any:
    """Return :func:`find_machine` under its old name."""
    if name != "machine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from meshfold.planner.known_machines import find_machine

    warnings.warn("meshfold.planner.machines.machine is now find_machine", DeprecationWarning, stacklevel=2)
    return find_machine
