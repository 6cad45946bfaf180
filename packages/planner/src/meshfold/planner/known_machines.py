"""Machines by name: data sheets, measured nodes, nodes of papers."""

from __future__ import annotations

from dataclasses import replace

from meshfold.mesh import SpecError, did_you_mean
from meshfold.planner.efficiency import Efficiency
from meshfold.planner.machines import PEAK_TFLOPS, Host, Machine


def _gpu(
    name: str,
    *,
    memory_gib: float,
    memory_tb: float,
    peak: dict[str, float],
    share: float,
    inside: float,
    between: float,
    host: Host,
    source: str,
    hidden: float = 1.0,
) -> Machine:
    """Return a node of eight GPUs: peaks in TFLOP/s and the share of them that matmuls reach, memory in TB/s, links in GB/s; the
    share of collectives that matmuls hide, where it was measured."""
    return Machine(
        name=name,
        devices=8,
        memory=memory_gib * 2**30,
        memory_rate=memory_tb * 1e12,
        host=host,
        flops={precision: share * tera * 1e12 for precision, tera in peak.items()},
        inside=inside * 1e9,
        between=between * 1e9,
        latency=15e-6,
        source=source,
        efficiency=Efficiency(hidden=hidden),
    )


def _host(
    *,
    memory_gib: float,
    cores: int,
    pcie: tuple[float, float, float],
    bandwidth: float,
    disk_tb: float,
    disk: tuple[float, float],
) -> Host:
    """Return a host: PCIe (up, down, both), memory and disk (read, write) in GB/s."""
    up, down, both = (1e9 * rate for rate in pcie)
    return Host(
        memory=memory_gib * 2**30,
        cores=cores,
        up=up,
        down=down,
        both=both,
        bandwidth=bandwidth * 1e9,
        disk=disk_tb * 1e12,
        disk_read=disk[0] * 1e9,
        disk_write=disk[1] * 1e9,
    )


_SHEET = "data sheet: matmuls at 0.7 of the peak, memory and links at 0.75 to 0.9 of theirs; host and disk rough"
_H100, _A100, _V100 = (PEAK_TFLOPS[name] for name in ("H100", "A100", "V100"))
_H200: dict[str, float] = {"bf16": 787, "fp16": 787, "fp32": 50, "fp64": 50, "fp8": 1550}  # measured
_HOSTS = {
    # One GPU with 16 cores, measured: copies, triad, direct I/O in blocks of 16 MiB.
    "h200": _host(memory_gib=125, cores=16, pcie=(55.5, 55.4, 101.6), bandwidth=141, disk_tb=0.064, disk=(3.4, 2.3)),
    # DGX: two sockets of 8 channels DDR5-4800, DDR4-3200 (EPYC) and of 4 channels DDR4-2400, at three quarters.
    "h200x8": _host(memory_gib=2000, cores=112, pcie=(46.8, 36.5, 80), bandwidth=460, disk_tb=30, disk=(40, 20)),
    "a100x8": _host(memory_gib=1000, cores=128, pcie=(24, 24, 42), bandwidth=300, disk_tb=15, disk=(20, 10)),
    "v100x8": _host(memory_gib=500, cores=40, pcie=(12, 12, 21), bandwidth=115, disk_tb=7, disk=(5, 3)),
    "laptop": _host(memory_gib=16, cores=8, pcie=(5, 5, 8), bandwidth=20, disk_tb=0.5, disk=(1.5, 1)),
}


_NODES = (
    _gpu(
        "h200x8",
        memory_gib=139,
        memory_tb=4.24,
        peak=_H200,
        share=1.0,
        inside=320,
        between=40,
        host=_HOSTS["h200x8"],
        source="measured: bf16 matmul, memory, NCCL on NVLink; the rest from the data sheet, host and disk rough",
        hidden=0.62,  # measured of gathers, sums and both: 0.60 to 0.67 on two and on four GPUs
    ),
    _gpu(
        "h100x8",
        memory_gib=79,
        memory_tb=2.9,
        peak=_H100,
        share=0.7,
        inside=337,
        between=37,
        host=_HOSTS["h200x8"],
        source=_SHEET,
        hidden=0.57,  # measured of gathers: 0.54 on two GPUs, 0.57 and 0.59 on four
    ),
    _gpu(
        "a100x8",
        memory_gib=79,
        memory_tb=1.7,
        peak=_A100,
        share=0.7,
        inside=225,
        between=19,
        host=_HOSTS["a100x8"],
        source=_SHEET,
    ),
    _gpu(
        "v100x8",
        memory_gib=31,
        memory_tb=0.8,
        peak=_V100,
        share=0.7,
        inside=112,
        between=9,
        host=_HOSTS["v100x8"],
        source=_SHEET,
    ),
)
_LAPTOP = Machine(
    name="laptop",
    devices=8,
    memory=16 * 2**30,
    memory_rate=2e10,
    host=_HOSTS["laptop"],
    flops={"fp32": 1e11, "fp64": 5e10, "bf16": 5e10, "fp16": 5e10},
    inside=1e9,
    between=1e8,
    latency=3e-4,
    source="rough: eight processes that share a CPU, gloo",
    kind="cpu",
)

# Machines of papers: Frontera's nodes of four Quadro RTX 5000 over InfiniBand FDR (Optimus, Tesseract), and Piz Daint's of one P100
# over Aries (Li et al. 2021, arXiv 2105.13120).
_OF_PAPERS = (
    replace(
        _gpu(
            "rtx5000x4",
            memory_gib=15.5,
            memory_tb=0.36,
            peak={"fp16": 89.2, "bf16": 11.2, "fp32": 11.2, "fp64": 0.35},
            share=0.7,
            inside=9,
            between=1.3,
            host=_host(memory_gib=128, cores=16, pcie=(9, 9, 16), bandwidth=90, disk_tb=0.2, disk=(0.5, 0.4)),
            source=_SHEET,
        ),
        devices=4,
    ),
    replace(
        _gpu(
            "piz-daint",
            memory_gib=15.5,
            memory_tb=0.55,
            peak={"fp16": 18.7, "bf16": 9.3, "fp32": 9.3, "fp64": 4.7},
            share=0.7,
            inside=8,
            between=8,
            host=_host(memory_gib=64, cores=12, pcie=(9, 9, 16), bandwidth=45, disk_tb=0.001, disk=(0.5, 0.4)),
            source=_SHEET,
        ),
        devices=1,
    ),
)


def _one_gpu(node: Machine) -> Machine:
    """Return one GPU of a node of eight with an eighth of the host, as rented. The H200's was measured."""
    if node.name == "h200x8":
        host, source = _HOSTS["h200"], "measured, with 16 cores of its host"
    else:
        whole = node.host
        eighth = {key: getattr(whole, key) / 8 for key in ("memory", "bandwidth", "disk", "disk_read", "disk_write")}
        host, source = replace(whole, cores=whole.cores // 8, **eighth), node.source
    return replace(node, name=node.name.removesuffix("x8"), devices=1, host=host, source=source)


MACHINES: dict[str, Machine] = {one.name: one for one in (*_NODES, *map(_one_gpu, _NODES), *_OF_PAPERS, _LAPTOP)}


def find_machine(name: str) -> Machine:
    """Return the machine of a name, or of a file that ``meshfold calibrate`` has written.

    Args:
        name: a key of :data:`MACHINES`, or a path that ends in ``.json``.

    Raises:
        SpecError: for an unknown name, and a file that cannot be read.
    """
    if name not in MACHINES and name.endswith(".json"):
        from meshfold.planner.machine_files import read_machine

        return read_machine(name)
    if name not in MACHINES:
        raise SpecError(
            f"there is no machine {name!r}.{did_you_mean(name, MACHINES)} Known: {', '.join(MACHINES)}; or the .json file "
            "that meshfold calibrate writes"
        )
    return MACHINES[name]


def unlimited_machine() -> Machine:
    """Return a machine with unlimited memory, to estimate a spec without checking that it fits."""
    known, plenty = MACHINES["h200x8"], 2.0**60
    host = replace(known.host, memory=plenty, disk=plenty)
    return replace(known, name="a machine with enough memory", memory=plenty, host=host)
