"""A spec as a table for people."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from meshfold.mesh.spec.text import format_table

if TYPE_CHECKING:
    from meshfold.mesh.spec.parallel import ParallelSpec


def table(spec: ParallelSpec) -> str:
    """Return one line for each dimension: name, ranks, axes, how; last the world size and the order of ranks."""
    rows = [("dimension", "ranks", "axes", "how")]
    others = (spec.pipeline, spec.sequence, spec.tensor, spec.zero)
    shown = [axis for axis in spec.axes if axis != "data" or spec.data != 1 or not any(others)]
    if "data" in shown:
        rows.append(("data", *_axes({"data": spec.axes["data"]}), _data(spec)))
    if spec.pipeline is not None:
        rows.append(("pipeline", *_axes(spec.pipeline.axes), _pipeline(spec)))
    if spec.sequence is not None:
        rows.append(("sequence", *_axes(spec.sequence.axes), _sequence(spec)))
    if spec.tensor is not None:
        overlap = "" if spec.tensor.overlap is None else f", overlap {spec.tensor.overlap}"
        rows.append(("tensor", *_axes(spec.tensor.axes), spec.tensor.mode_name + overlap))
    if spec.zero is not None:
        rows.append(("zero", "", "", _zero(spec)))
    order = f"rank order {' > '.join(shown)}, the last varies fastest" if shown else "one rank"
    rows.append(("world", str(spec.world_size), "", order))
    return "\n".join(format_table(rows, "<><"))


def _axes(axes: dict[str, int]) -> tuple[str, str]:
    return str(math.prod(axes.values())), " ".join(f"{name}={size}" for name, size in axes.items())


def _data(spec: ParallelSpec) -> str:
    return "1 until the world size is known" if spec.data is None else "each its own part of the batch"


def _pipeline(spec: ParallelSpec) -> str:
    if spec.pipeline is None:
        return ""
    counts = {key: getattr(spec.pipeline, key) for key in ("microbatches", "chunks", "waves")}
    given = [f"{key} {count}" for key, count in counts.items() if count is not None]
    return ", ".join([spec.pipeline.schedule_name, *given])


def _sequence(spec: ParallelSpec) -> str:
    if spec.sequence is None:
        return ""
    over = " over the axis tensor" if spec.sequence.mode == "megatron" else ""
    return spec.sequence.mode_name + over


def _zero(spec: ParallelSpec) -> str:
    if spec.zero is None:
        return ""
    zero = spec.zero
    parts = [f"stage {zero.stage}", f"placement {zero.placement}", f"regime {zero.regime}"]
    parts += [] if zero.reshard_after_forward else ["gathered from forward to backward"]
    parts += [] if zero.offload_path is None else [f"offload to {zero.offload_path}"]
    limits = ((zero.gpu_memory_limit, "GPU"), (zero.host_memory_limit, "host"))
    parts += [f"{where} at most {limit / 2**30:.3g} GiB" for limit, where in limits if limit is not None]
    shares = ((zero.offload_optim_frac, "optimizer state"), (zero.offload_param_frac, "parameters"))
    parts += [f"{share:.0%} of {what} on the host" for share, what in shares if share is not None]
    return ", ".join(parts)
