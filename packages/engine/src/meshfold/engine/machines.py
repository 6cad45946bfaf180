"""Machines by name, for estimates: what a device computes and what its links carry."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.errors import nearest


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nodes of equal devices.

    Attributes:
        name: what users write.
        devices: in a node.
        memory: bytes of a device.
        flops: floating point operations a second of a large matmul, by precision.
        inside: bytes a second that a device sends inside its node, by the ring count of ``meshfold.mesh.traffic``.
        between: the same between nodes.
        latency: seconds a collective takes however small it is.
        source: where the numbers come from.
    """

    name: str
    devices: int
    memory: float
    flops: dict[str, float]
    inside: float
    between: float
    latency: float
    source: str

    def bandwidth(self, ranks: tuple[int, ...]) -> float:
        """Bytes a second that a rank sends in a collective of these ranks: the slowest link on the ring."""
        nodes = {rank // self.devices for rank in ranks}
        return self.inside if len(nodes) == 1 else self.between

    def slowest(self, mesh: Mesh, axes: tuple[str, ...]) -> float:
        """The bandwidth of the group along the axes that has it worst; other ranks wait for that one."""
        return min(self.bandwidth(tuple(ranks)) for ranks in mesh.groups(*axes))


def _gpu(
    name: str,
    *,
    memory_gib: float,
    peak: dict[str, float],
    share: float,
    inside: float,
    between: float,
    source: str,
) -> Machine:
    """A node of 8 GPUs: peaks in TFLOP/s and the share of them that matmuls reach, links in GB/s."""
    return Machine(
        name=name,
        devices=8,
        memory=memory_gib * 2**30,
        flops={precision: share * tera * 1e12 for precision, tera in peak.items()},
        inside=inside * 1e9,
        between=between * 1e9,
        latency=15e-6,
        source=source,
    )


_SHEET = "data sheet: matmuls at 0.7 of the peak, links at 0.75 of theirs"
MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        _gpu(
            "h200x8", memory_gib=139, peak={"bf16": 787, "fp16": 787, "fp32": 50, "fp64": 50}, share=1.0,
            inside=320, between=40, source="measured: bf16 matmul, NCCL on NVLink; the rest from the data sheet",
        ),
        _gpu(
            "h100x8", memory_gib=79, peak={"bf16": 989, "fp16": 989, "fp32": 67, "fp64": 67}, share=0.7,
            inside=337, between=37, source=_SHEET,
        ),
        _gpu(
            "a100x8", memory_gib=79, peak={"bf16": 312, "fp16": 312, "fp32": 19.5, "fp64": 19.5}, share=0.7,
            inside=225, between=19, source=_SHEET,
        ),
        _gpu(
            "v100x8", memory_gib=31, peak={"fp16": 125, "bf16": 15.7, "fp32": 15.7, "fp64": 7.8}, share=0.7,
            inside=112, between=9, source=_SHEET,
        ),
        Machine(
            name="laptop", devices=8, memory=16 * 2**30,
            flops={"fp32": 1e11, "fp64": 5e10, "bf16": 5e10, "fp16": 5e10}, inside=1e9, between=1e8, latency=3e-4,
            source="rough: eight processes that share a CPU, gloo",
        ),
    )
}  # fmt: skip


def machine(name: str) -> Machine:
    """A machine by name.

    Raises:
        SpecError: for an unknown name.
    """
    if name not in MACHINES:
        raise SpecError(
            f"there is no machine {name!r}.{nearest(name, MACHINES)} Known: {', '.join(MACHINES)}"
        )
    return MACHINES[name]
