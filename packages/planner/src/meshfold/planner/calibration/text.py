"""A measured machine as tables."""

from __future__ import annotations

import math

from meshfold.mesh.spec import format_bytes, format_table
from meshfold.planner.calibration.measure import Calibration
from meshfold.planner.machines import Host
from meshfold.planner.report import format_seconds


def calibration_table(found: Calibration) -> str:
    """Return matmuls by size, the device's other rates, links by kind with their errors, and what was not measured."""
    machine, reached, launches = found.machine, found.machine.efficiency, found.machine.launches
    sides = sorted({sample.side for sample in found.matmuls})
    precisions = list(dict.fromkeys(sample.precision for sample in found.matmuls))
    rates = {(sample.precision, sample.side): sample.rate for sample in found.matmuls}
    matmuls: list[list[str]] = [["matmuls, TFLOP/s", *(str(side) for side in sides)]]
    for precision in precisions:
        cells = (rates.get((precision, side)) for side in sides)
        matmuls.append([precision, *("" if rate is None else f"{rate / 1e12:.3g}" for rate in cells)])
    attention = ", ".join(
        f"{share:.2f} with heads of {size}, half of it with {reached.lag.get(size, 0):.0f} keys a query"
        for size, share in reached.attention.items()
    )
    named = ", ".join(f"{name.removeprefix('aten.')} {share:.2f}" for name, share in reached.by_name.items())
    narrow = [f"{share:.2f} from a side of {side:.0f}" for table in reached.by_side.values() for side, share in table]
    small = [
        f"{share:.2f} of {math.isqrt(int(size))}²" for table in reached.by_output.values() for size, share in table
    ]
    device = [
        ["memory", f"{format_bytes(machine.memory)}, {machine.memory_rate / 1e9:,.4g} GB/s copied"],
        ["matmuls in sequence", f"{_in_sequence(found):.2f} of the rate of one"],
        *([["narrow matmuls", ", ".join(narrow)]] if narrow else []),
        *([["results of weight gradients", ", ".join(small)]] if small else []),
        ["attention", f"{attention}, of these"],
        [
            "other operators",
            f"{reached.elementwise:.2f} of the rate of copies, a step of AdamW {reached.optimizer:.2f}; each takes "
            f"{_micro(reached.start)} more",
        ],
        *([["by name", named]] if named else []),
        [
            "launches",
            f"{_micro(launches.forward)} an operator, {_micro(launches.backward)} in a backward, one of our kernels "
            f"{_micro(launches.kernel_forward)} and {_micro(launches.kernel_backward)}, a parameter's step "
            f"{_micro(launches.parameter)}; a residual sum that a norm computes {_micro(launches.residual)} more; a layer of "
            f"experts {_micro(launches.experts_forward)} and {_micro(launches.experts_backward)} more; a unit under zero "
            f"{_micro(launches.unit)} more",
        ],
        [
            "host",
            f"{machine.host.up / 1e9:.3g} GB/s up, {machine.host.down / 1e9:.3g} down, "
            f"{machine.host.bandwidth / 1e9:.3g} memory; in steps of many chunks {machine.host.stepping / 1e9:.3g} for parameters "
            f"and {machine.host.moments / 1e9:.3g} for moments{_of_one(machine.host)}{_streaming(machine.host)}",
        ],
        ["disk", f"{machine.host.disk_read / 1e9:.3g} GB/s read, {machine.host.disk_write / 1e9:.3g} written"],
    ]
    parts = [format_table(matmuls, "<>"), format_table(device)]
    if found.messages:
        rows = [["collectives", "latency", "GB/s", "held-out error"]]
        for kind in dict.fromkeys(sample.kind for sample in found.messages):
            link = machine.collectives[kind]
            error = "" if math.isnan(link.error) else f"{100 * link.error:.0f} %"
            rows.append([kind, format_seconds(link.latency), f"{link.rate / 1e9:.3g}", error])
        parts.append(format_table(rows, "<>"))
        shares = reached.hidden_by_kind or {"collective": reached.hidden}
        kinds = ", ".join(f"{share:.0%} of {kind.replace('_', '-')}" for kind, share in shares.items())
        parts.append([f"matmuls that take as long hide {kinds}"])
    parts.append([f"not measured: {note}" for note in found.notes])
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _in_sequence(found: Calibration) -> float:
    """Return the rate of matmuls in sequence, of layers on a CPU, by that of the quickest square one of the usual precision."""
    usual = found.machine.usual_precision
    best = max(
        (sample.rate for sample in found.matmuls if sample.precision == usual), default=found.machine.flops[usual]
    )
    return found.machine.efficiency.matmuls * found.machine.flops[usual] / best


def _of_one(host: Host) -> str:
    """Return what one rank reaches alone, where that was measured."""
    if not host.stepping_of_one:
        return ""
    return f", of which one rank reaches {host.stepping_of_one / 1e9:.3g} and {host.moments_of_one / 1e9:.3g}"


def _streaming(host: Host) -> str:
    """Return the rates while devices step a part of the host's state, where that is faster."""
    if not host.streaming:
        return ""
    return (
        f"; while devices step {host.streaming / 1e9:.3g} of state that passes through them, the cores reach "
        f"{host.stepping_while_streaming / 1e9:.3g}"
    )


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.3g} µs"
