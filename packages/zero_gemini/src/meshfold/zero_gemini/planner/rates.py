"""Rates and capacities of a machine: the numbers a plan is made from.

>>> from dataclasses import replace
>>> small = replace(H200, name="H200, 40 GiB of it", gpu_bytes=40 * GiB)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from meshfold.mesh import SpecError, with_old_names

KiB, MiB, GiB = 2**10, 2**20, 2**30
_MAY_BE_NONE = ("disk_bytes", "gpu_streaming", "host_memory_while_streaming", "streaming_bytes", "moments_memory")
_OLD_NAMES = {
    "passage": "gpu_streaming",
    "beside_passage": "host_memory_while_streaming",
    "passage_bytes": "streaming_bytes",
}


@with_old_names(_OLD_NAMES, arguments=_OLD_NAMES)
@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of one rank's share of a machine. Rates are per second; all of them must be above zero.

    Raises:
        SpecError: for a rate or a size that is not above zero.
    """

    name: str
    flops: float
    """FLOP/s that a step reaches, not the peak."""
    gpu_memory: float
    """bytes/s of a fused element-wise step on the GPU, reads and writes together."""
    h2d: float
    """bytes/s from pinned host memory to the GPU, nothing in the other direction."""
    d2h: float
    """bytes/s from the GPU to pinned host memory."""
    pcie_both: float
    """bytes/s, the sum of both directions at once."""
    host_memory: float
    """bytes/s of host memory under all threads, reads and writes together (triad)."""
    disk_read: float
    """bytes/s with direct I/O."""
    disk_write: float
    """bytes/s with direct I/O."""
    collective: float
    """bytes/s that a rank receives in an all-gather or reduce-scatter (bus bandwidth)."""
    gpu_bytes: int
    """bytes of GPU memory."""
    host_bytes: int
    """bytes of host memory."""
    disk_bytes: int
    """bytes of disk for optimizer state; 0: no disk."""
    gpu_streaming: float = 0.0
    """bytes/s of host state, up and down together, that the GPU steps while the CPU steps other chunks; 0: no GPU streaming."""
    host_memory_while_streaming: float = 0.0
    """bytes/s of host memory for the CPU's steps at that time, with the copies of stepped parameters to the GPU."""
    moments_memory: float = 0.0
    """bytes/s of host memory during a backward in which the cores step moments; 0: ``host_memory``."""
    streaming_bytes: int = 0
    """bytes of GPU memory of the buffer for GPU streaming."""
    cpu_optimizer: Mapping[str, float] = field(default_factory=dict)
    """elements/s of a CPU optimizer step in cache, by regime; a missing one is limited only by host memory."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 0 if entry.name in _MAY_BE_NONE else 1
            if isinstance(value, int | float) and not value >= least:
                raise SpecError(f"machine {self.name!r}: {entry.name}={value!r} must be at least {least}")
        if self.gpu_streaming and not self.host_memory_while_streaming:
            raise SpecError(
                f"machine {self.name!r}: gpu_streaming={self.gpu_streaming!r} says nothing without host_memory_while_streaming"
            )
        for regime, rate in self.cpu_optimizer.items():
            if not rate > 0:
                raise SpecError(f"machine {self.name!r}: cpu_optimizer[{regime!r}]={rate!r} must be above 0")

    def without_streaming(self) -> Machine:
        """Return the machine whose GPU steps no state of the host, and keeps no buffer for that."""
        return replace(self, gpu_streaming=0.0, host_memory_while_streaming=0.0, streaming_bytes=0)

    def seconds(self, flop: float) -> float:
        """Return the seconds that the GPU takes for ``flop`` floating-point operations."""
        return flop / self.flops


H200 = Machine(
    name="one H200, 16 cores",
    flops=629e12,  # OPT-6.7B with recomputation: 472 TFLOP/s counting 6·N·tokens in 1.43 s; 8·N·tokens are executed
    gpu_memory=3.47e12,
    h2d=55.5e9,
    d2h=55.4e9,
    pcie_both=101.6e9,
    host_memory=141e9,
    disk_read=3.4e9,
    disk_write=2.3e9,
    collective=325e9,  # four GPUs, NCCL rings, 1 GiB
    gpu_bytes=139 * GiB,
    host_bytes=125 * GiB,
    disk_bytes=60 * GiB,
    # Measured in cache: 0.86, 0.95 and 3.0 ns per element and core, 16 cores. Host memory is the limit except in regime C.
    cpu_optimizer={"A": 18.6e9, "B": 16.8e9, "C": 5.3e9},
)
"""Measured on one H200 with 16 cores of its host."""
