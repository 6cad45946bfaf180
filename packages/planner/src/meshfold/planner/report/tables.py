"""A plan as text: a picture of the mesh, and tables of a rank's memory, traffic and waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshfold.mesh.spec import format_bytes, format_table
from meshfold.planner.estimates import Estimate, StepSpeed, Times
from meshfold.planner.machines import Machine

_WIDTH = 100
_MOST = 8  # rows, columns and blocks before an ellipsis


def mesh_picture(axes: Mapping[str, int]) -> str:
    """Draw ranks by their coordinates: the last axis across, the one before it down, the others block by block.

    >>> print(mesh_picture(dict(data=2, row=2, col=2)))
    data 0          data 1
           col             col
            0 1             0 1
    row 0   0 1     row 0   4 5
    row 1   2 3     row 1   6 7
    """
    sizes = {name: size for name, size in axes.items() if size > 1} or {"data": 1}
    *outer, across = sizes
    down = outer.pop() if outer else ""
    rows, columns = sizes.get(down, 1), sizes[across]
    blocks = [_block(outer, sizes, number, down, rows, across, columns) for number in _some(_count(outer, sizes))]
    return _beside(blocks)


def _block(
    outer: Sequence[str],
    sizes: Mapping[str, int],
    number: int | None,
    down: str,
    rows: int,
    across: str,
    columns: int,
) -> list[str]:
    """Return the lines of one grid of ranks; None stands for omitted blocks."""
    if number is None:
        return ["..."]
    places, rest = [], number
    for name in reversed(outer):
        rest, place = divmod(rest, sizes[name])
        places.append(f"{name} {place}")
    title = ["  ".join(reversed(places))] if outer else []
    width = len(str(_count(outer, sizes) * rows * columns - 1))
    margin = max(len(f"{down} {rows - 1}") if down else 0, 0)
    label = f"{across:<{width}}"
    header = " ".join(("..." if c is None else str(c)).rjust(width) for c in _some(columns))
    lines = [*title, f"{'':<{margin}}   {label}".rstrip(), f"{'':<{margin}}   {header}"]
    for row in _some(rows):
        if row is None:
            lines.append("...")
            continue
        first = (number * rows + row) * columns
        ranks = " ".join(("..." if c is None else str(first + c)).rjust(width) for c in _some(columns))
        lines.append(f"{f'{down} {row}' if down else '':<{margin}}   {ranks}")
    return lines


def _beside(blocks: list[list[str]]) -> str:
    """Arrange blocks side by side, up to the page width."""
    width = max(len(line) for block in blocks for line in block) + 4
    each = max(1, _WIDTH // width)
    parts = []
    for start in range(0, len(blocks), each):
        row = blocks[start : start + each]
        height = max(map(len, row))
        padded = [[*block, *[""] * (height - len(block))] for block in row]
        parts.append(
            "\n".join("".join(line.ljust(width) for line in lines).rstrip() for lines in zip(*padded, strict=True))
        )
    return "\n\n".join(parts)


def _some(count: int) -> list[int | None]:
    """Return all numbers below ``count``, or the first and last of many with None between them."""
    return list(range(count)) if count <= _MOST else [*range(_MOST - 2), None, count - 1]


def _count(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    count = 1
    for name in axes:
        count *= sizes[name]
    return count


def memory_table(found: Estimate) -> str:
    """Return a table of what rank 0 holds."""
    memory = found.memory
    zero = found.spec.zero is not None
    share = found.local_parameters / found.parameters if found.parameters else 1.0
    note = f"{found.local_parameters:,} of {found.parameters:,} ({share:.1%})"
    if zero:
        note = f"of {found.local_parameters:,}, in chunks: what stays and what is gathered at the peak"
    kept = (
        "and everything else that computing needs"
        if zero
        else "and everything else then: attention without scores, cuBLAS, buffers"
    )
    none = "" if memory.gradients else "none yet in the first forward, when memory peaks"
    rows = [
        ("parameters", memory.parameters, note),
        ("master weights", memory.masters, ""),
        ("gradients", memory.gradients, none),
        ("optimizer state", memory.optimizer, "master weights with it" if zero else ""),
        ("activations", memory.activations, kept),
        ("push channels", memory.channels, "memory that peers write"),
    ]
    lines = [
        f"{name:<17}{format_bytes(size):>12}  {note}".rstrip()
        for name, size, note in rows
        if size or (note and note == none)
    ]
    lines.append(f"{'together':<17}{format_bytes(memory.total):>12}")
    others = (
        ("host", memory.host, "of memory, for all ranks there"),
        ("disk", memory.disk, "for all ranks there"),
    )
    lines += [f"{name:<17}{format_bytes(size):>12}  {note}" for name, size, note in others if size]
    title = "a rank holds" if found.pipeline is None else "the fullest rank of the pipeline holds"
    placed = ", with everything on its device" if zero and found.refusal else ""
    title = f"{title}{placed}, at its peak"
    return "\n".join([title, *lines])


def traffic_table(found: Estimate) -> str:
    """Return a table of what rank 0 sends in an optimizer step."""
    if not found.traffic:
        return "a rank moves nothing"
    rows = [("phase", "collective", "axes", "ranks", "calls", "a rank sends")]
    rows += [
        (e.phase, e.kind, ",".join(e.axes), str(e.ranks), f"{e.calls:,}", format_bytes(e.bytes)) for e in found.traffic
    ]
    rows.append(("together", "", "", "", f"{sum(e.calls for e in found.traffic):,}", format_bytes(found.moved)))
    lines = [f"a rank moves in a step of {found.tokens:,} tokens", *format_table(rows, "<<<>")]
    if any(e.phase == "weights" for e in found.traffic):
        lines.append(
            f"critical, as the next product waits for it: {format_bytes(found.critical)}; hideable, gradients and parameters: "
            f"{format_bytes(found.hideable)}"
        )
    return "\n".join(lines)


def verdict_line(found: Estimate, speed: StepSpeed, machine: Machine, *, fits: bool) -> str:
    """``fits: 72.31 GiB of 79.00 GiB a device; 1.59 s a step, 41,300 tokens/s, MFU 46% on h100x8``"""
    most = found.memory.total if found.pipeline is None else max(memory.total for memory in found.pipeline.memory)
    words = "fits" if fits else "does NOT fit"
    room = f"{words}: {format_bytes(most)} of {format_bytes(machine.memory)} a device"
    if not speed.tokens_per_second or (found.spec.zero is not None and found.refusal):
        return room
    return (
        f"{room}; {format_seconds(speed.seconds)} a step, {speed.tokens_per_second:,.0f} tokens/s, MFU {speed.mfu:.0%} "
        f"on {machine.name}"
    )


def time_table(found: Estimate, times: Times, machine: Machine, nodes: int) -> str:
    """Return a table of the time of a step."""
    fits = found.memory.total <= machine.memory
    turn = "as fast as the host launches operators" if times.waits_for_host else "operators in turn"
    lines = [
        f"a step takes, on {machine_line(machine, nodes)}",
        f"{'compute':<17}{format_seconds(times.compute):>12}  {found.flops / 1e12:,.3g} TFLOP a rank, {turn}",
        f"{'tensor traffic':<17}{format_seconds(times.tensor):>12}",
        f"{'optimizer':<17}{format_seconds(times.optimizer):>12}",
        f"{'data traffic':<17}{format_seconds(times.data):>12}  may run during backward",
        total_row(times.overlapped, times.apart, found.tokens),
        f"{'memory':<17}{format_bytes(machine.memory):>12}  a device: {'it fits' if fits else 'it does NOT fit'}",
    ]
    return "\n".join(lines)


def machine_line(machine: Machine, nodes: int) -> str:
    """``h200x8, 2 nodes of 8 devices (where its numbers are from)``"""
    of = f"{nodes} node{'s' if nodes > 1 else ''} of {machine.devices} device{'s' if machine.devices > 1 else ''}"
    return f"{machine.name}, {of} ({machine.source})"


def total_row(least: float, most: float, tokens: int) -> str:
    """Return the row of a whole step: smallest and largest seconds, and tokens per second; one number if both print the same."""
    slow, fast = f"{tokens / most:,.0f}", f"{tokens / least:,.0f}"
    row = f"{'together':<17}{format_seconds(least):>12}  "
    if slow == fast:
        return f"{row}{fast} tokens/s"
    return f"{row}to {format_seconds(most)}: {slow} to {fast} tokens/s"


def format_seconds(value: float) -> str:
    """``1.23 ms``"""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
