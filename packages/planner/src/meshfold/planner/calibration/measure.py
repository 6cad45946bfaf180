"""Calibration of a machine: all ranks measure their devices at the same time, then all measure their links."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from meshfold.mesh import Group, Mesh, Process, SpecError, all_reduce, barrier
from meshfold.planner.calibration.fits import (
    MatmulSample,
    MessageSample,
    fit_links,
    matmul_rates,
    matmul_shares,
    rising,
    share_and_lag,
    typical_link,
)
from meshfold.planner.calibration.launches import measure_launches
from meshfold.planner.calibration.messages import KINDS, hidden_shares, message_samples, sizes_of
from meshfold.planner.calibration.operators import operator_rates
from meshfold.planner.calibration.samples import (
    DTYPES,
    attention_shares,
    layer_rates,
    matmul_samples,
    memory_rates,
    operator_start,
    output_samples,
    pace_of,
    row_shares,
    side_samples,
    sustained_share,
)
from meshfold.planner.calibration.timing import Effort, Pace
from meshfold.planner.efficiency import Efficiency, Link
from meshfold.planner.machines import Host, Machine
from meshfold.planner.suggestions.here import local_machine

_MOST_CORES = 8192  # that Linux is built for


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A measured machine.

    Attributes:
        machine: for plans.
        matmuls: samples; means over ranks.
        messages: samples inside a node, of the slowest rank.
        ranks: that took part.
        notes: numbers that were not measured, and the preset that they are from.
    """

    machine: Machine
    matmuls: tuple[MatmulSample, ...]
    messages: tuple[MessageSample, ...]
    ranks: int
    notes: tuple[str, ...]

    def samples(self) -> dict[str, Any]:
        """Return the samples as numbers for JSON."""
        return {
            "ranks": self.ranks,
            "torch": torch.__version__,
            "matmuls": [asdict(sample) for sample in self.matmuls],
            "messages": [asdict(sample) for sample in self.messages],
            "notes": list(self.notes),
        }


def calibrate(process: Process, effort: Effort, *, disk: Path | None = None, name: str | None = None) -> Calibration:
    """Measure the machine. All ranks of the job must call; all return the same.

    Args:
        process: this rank.
        effort: sizes of the samples.
        disk: a folder on the disk to measure; None leaves the preset's rates.
        name: of the machine; by default that of its GPU, and the ranks of a node.

    Raises:
        SpecError: if nodes have different numbers of ranks, and if no precision can be multiplied.
        DiskError: if the folder cannot be used.
    """
    device, local = process.device, process.environment.local_world_size
    nodes, rest = divmod(process.world_size, local)
    if rest:
        raise SpecError(f"{process.world_size} ranks on nodes of {local}: start as many ranks on every node")
    base = local_machine(local, device=device.type)
    mesh = Mesh({"node": nodes, "local": local})
    try:
        everyone, here, there = mesh.group("node", "local"), mesh.group("local"), mesh.group("node")
        barrier(everyone, device)
        pace = pace_of(device, effort)
        matmuls = _means(matmul_samples(device, effort, pace), effort.sides, everyone, device)
        if not matmuls:
            raise SpecError(f"no matmul runs on {device}: torch {torch.__version__} has no kernels for it")
        machine, notes = _of_devices(base, matmuls, everyone, device, effort, pace)
        messages = message_samples(here, device, effort) if here.size > 1 else []
        machine = _linked(machine, messages, notes)
        machine = replace(machine, small_groups=_small_groups(local, everyone, device, effort))
        if here.size > 1:
            machine = replace(machine, efficiency=_beside(machine.efficiency, hidden_shares(here, device, effort)))
        machine = replace(machine, launches=measure_launches(process, effort, everyone))
        if there.size > 1:
            between = typical_link(fit_links(message_samples(there, device, effort)))
            machine = replace(machine, between=min(between.rate, machine.inside))
        elif local > 1 or nodes == 1:
            notes.append(f"links between nodes: those of {base.name}")
        machine = replace(machine, host=_host(base.host, everyone, device, effort, disk, local, notes))
    finally:
        mesh.close()
    kind = torch.cuda.get_device_name(device).lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    machine = replace(
        machine, name=name or f"{kind}x{local}", source=f"measured by meshfold calibrate on {process.world_size} ranks"
    )
    return Calibration(
        machine=machine, matmuls=tuple(matmuls), messages=tuple(messages), ranks=process.world_size, notes=tuple(notes)
    )


def _mean(values: Sequence[float], everyone: Group, device: torch.device) -> list[float]:
    """Return the means over all ranks."""
    total = all_reduce(torch.tensor(values, dtype=torch.float64, device=device), everyone)
    return [float(value) / everyone.size for value in total.tolist()]


def _means(
    samples: Sequence[MatmulSample], sides: Sequence[int], everyone: Group, device: torch.device
) -> list[MatmulSample]:
    """Return the samples that all ranks have, with their mean seconds: a slower rank may have stopped at a smaller size."""
    table = {(sample.precision, sample.side): sample.seconds for sample in samples}
    keys = [(precision, side) for precision in DTYPES for side in sides]
    seconds = _mean([table.get(key, math.nan) for key in keys], everyone, device)
    return [
        MatmulSample(precision=precision, side=side, seconds=one)
        for (precision, side), one in zip(keys, seconds, strict=True)
        if not math.isnan(one)
    ]


def _of_devices(
    base: Machine,
    matmuls: Sequence[MatmulSample],
    everyone: Group,
    device: torch.device,
    effort: Effort,
    pace: Pace | None,
) -> tuple[Machine, list[str]]:
    """Return the machine with rates of devices, and notes."""
    flops = matmul_rates(matmuls)
    if pace is not None:  # what a CPU's layers reach; a GPU's are measured by their sides
        layers = layer_rates(matmuls, pace, effort)
        flops = dict(zip(layers, _mean([*layers.values()], everyone, device), strict=True))
    shares = matmul_shares(matmuls, flops)
    on_gpu = device.type == "cuda"
    most = "bf16" if on_gpu and "bf16" in flops else replace(base, flops=flops).usual_precision
    best = max((sample for sample in matmuls if sample.precision == most), key=lambda sample: sample.rate)
    memory = memory_rates(device, effort)
    sustained = sustained_share(best, device, effort) if pace is None else 1.0
    attention = attention_shares(sustained * flops[most], device, effort, DTYPES[most], pace)
    if pace is None:  # a GPU cuts products into tiles, so narrow ones are slower
        sides = side_samples(best.rate, device, effort, DTYPES[most])
        outputs = output_samples(best.rate, device, effort, DTYPES[most])
    else:
        sides, outputs = row_shares(flops[most], pace, effort, DTYPES[most]), {}
    operators = operator_rates(device, effort, DTYPES[most])
    start = operator_start(device, effort)
    usual = 0.0 if pace is None else pace.usual
    copy, elementwise, optimizer, sustained, start, usual = _mean(
        [memory.copy, memory.elementwise, memory.optimizer, sustained, start, usual], everyone, device
    )
    of_heads = {
        size: share_and_lag(dict(zip(by_keys, _mean([*by_keys.values()], everyone, device), strict=True)))
        for size, by_keys in attention.items()
    }
    of_sides = rising(zip(sides, _mean([*sides.values()], everyone, device), strict=True))
    of_outputs = rising(zip(outputs, _mean([*outputs.values()], everyone, device), strict=True))
    rates = dict(zip(operators, _mean([*operators.values()], everyone, device), strict=True))
    absent = [precision for precision in base.flops if precision not in flops]
    notes = [f"matmuls in {', '.join(absent)}: those of {base.name}"] if absent else []
    return replace(
        base,
        memory=base.memory if device.type == "cuda" else _host_bytes(base.host.memory) / base.devices,
        memory_rate=copy,
        flops={**base.flops, **flops},
        pace=usual,
        efficiency=Efficiency(
            matmuls=sustained,
            by_flop=shares,
            by_side={most: of_sides} if of_sides else {},
            by_output={most: of_outputs} if of_outputs else {},
            attention={size: share for size, (share, _) in of_heads.items()},
            lag={size: lag for size, (_, lag) in of_heads.items()},
            elementwise=elementwise / copy,
            by_name={name: rate / copy for name, rate in rates.items()},
            optimizer=optimizer / copy,
            start=start,
        ),
    ), notes


def _beside(reached: Efficiency, shares: Mapping[str, float]) -> Efficiency:
    """Return the shares of a machine with those of collectives that matmuls hide; kinds that were not measured take the mean."""
    if not shares:
        return reached
    return replace(reached, hidden=fmean(shares.values()), hidden_by_kind=dict(shares))


def _small_groups(local: int, everyone: Group, device: torch.device, effort: Effort) -> dict[int, dict[str, Link]]:
    """Return the links of groups of 2, 4, ... neighbours inside a node, fewer than all: all groups of a size send at once."""
    found: dict[int, dict[str, Link]] = {}
    for size in (2**power for power in range(1, local.bit_length())):
        if size >= local or local % size:
            break
        mesh = Mesh({"groups": everyone.size // size, "few": size})
        try:
            samples = message_samples(mesh.group("few"), device, effort)
        finally:
            mesh.close()
        known = {(one.kind, one.sent): one.seconds for one in samples}
        keys = [(kind, sent) for kind in KINDS for sent in sizes_of(kind, size, effort)]
        seconds = _mean(
            [known.get(key, math.nan) for key in keys], everyone, device
        )  # a slower group may have stopped earlier
        links = fit_links(
            [
                MessageSample(kind=kind, sent=sent, seconds=one)
                for (kind, sent), one in zip(keys, seconds, strict=True)
                if not math.isnan(one)
            ]
        )
        found[size] = _with_same(links)
    return found


def _with_same(links: dict[str, Link]) -> dict[str, Link]:
    """Return links with those of kinds that are sent as others are."""
    return {**links, "send": links["shift"], "exchange_rows": links["all_to_all"]}


def _linked(machine: Machine, messages: Sequence[MessageSample], notes: list[str]) -> Machine:
    """Return the machine with links inside a node."""
    if not messages:
        notes.append(f"links of ranks: those of {machine.name}, since one rank has none (--ranks 2 measures them)")
        return machine
    links = _with_same(fit_links(messages))
    usual: Link = typical_link(links)
    return replace(
        machine, latency=usual.latency, inside=usual.rate, collectives=links, between=min(machine.between, usual.rate)
    )


def _host(
    host: Host,
    everyone: Group,
    device: torch.device,
    effort: Effort,
    disk: Path | None,
    local: int,
    notes: list[str],
) -> Host:
    """Return the host with measured copies, memory and disk, which all ranks use at the same time."""
    host = replace(host, memory=_host_bytes(host.memory), cores=_cores(everyone, device))
    if effort.host:
        from meshfold.zero_gemini.machine_rates import HostInUse, measure_host_in_use, measure_machine

        rates = measure_machine(device, everyone=everyone)
        barrier(everyone, device)
        used = measure_host_in_use(device)
        up, down, both, bandwidth, stepping, moments, streaming, beside = _mean(
            [
                rates.h2d,
                rates.d2h,
                rates.pcie_both,
                rates.host_memory,
                used.parameters,
                used.moments,
                rates.gpu_streaming,
                rates.host_memory_while_streaming,
            ],
            everyone,
            device,
        )
        host = replace(host, up=up, down=down, both=both, bandwidth=bandwidth * local)
        host = replace(host, stepping=stepping * local, moments=moments * local)
        host = replace(host, streaming=streaming * local, stepping_while_streaming=beside * local)
        if local > 1:
            barrier(everyone, device)
            alone = (
                measure_host_in_use(device) if everyone.index % local == 0 else HostInUse(parameters=0.0, moments=0.0)
            )
            stepping, moments = _mean([alone.parameters, alone.moments], everyone, device)  # of one rank on every node
            host = replace(host, stepping_of_one=stepping * local, moments_of_one=moments * local)
    else:
        notes.append("copies to the host and its memory: not measured")
    if disk is None:
        notes.append("disk: not measured (--disk FOLDER measures it)")
        return host
    from meshfold.zero_gemini.nvme import bench, free_bytes

    found = bench(disk, effort.disk_bytes)
    read, write = _mean([found.read_bytes_per_s, found.write_bytes_per_s], everyone, device)
    return replace(host, disk_read=read * local, disk_write=write * local, disk=float(free_bytes(disk) or host.disk))


def _host_bytes(otherwise: float) -> float:
    """Return the bytes of memory that this process's control group may use, or those of the host."""
    from meshfold.zero_gemini.machine_rates import UNLIMITED_BYTES, available_host_bytes, present_host_bytes

    limit = available_host_bytes()
    return float(limit if limit < UNLIMITED_BYTES else present_host_bytes() or otherwise)


def _cores(everyone: Group, device: torch.device) -> int:
    """Return the cores of a node that its ranks may use, all of them together."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    mine = os.sched_getaffinity(0)
    found = torch.zeros(_MOST_CORES, dtype=torch.float64, device=device)
    found[[*mine]] = 1.0
    return int(all_reduce(found, everyone, op="max").sum())
