"""Going on after a crash: with whatever ranks there are now."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.spec import format_value


def resize_data_axis(parallel: Mapping[str, Any], world_size: int) -> tuple[dict[str, Any], str]:
    """The spec for another number of ranks: the axis ``data`` grows or shrinks, all else stays.

    The global batch is the same then, and so is the loss curve: only who has which rows of it changes.

    Returns:
        The spec, and a sentence about it; empty if nothing had to change.

    Raises:
        SpecError: if the other axes do not divide the ranks.
    """
    spec = ParallelSpec.parse(dict(parallel))
    if "data" not in parallel or math.prod(spec.axes.values()) == world_size:
        return dict(parallel), ""
    before = int(parallel["data"])
    rest = math.prod(size for axis, size in spec.axes.items() if axis != "data")
    if world_size % rest:
        raise SpecError(
            f"parallel={format_value(dict(parallel))} on {world_size} ranks: all axes but data need a multiple of {rest} ranks. "
            f"Start {max(rest, world_size // rest * rest)}, or give another --parallel: the checkpoint loads under any"
        )
    fitted = {**parallel, "data": world_size // rest}
    return fitted, (
        f"the world size is {world_size} now: data={world_size // rest} in place of {before}; the global batch stays as it is"
    )
