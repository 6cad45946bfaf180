"""Initial weights: build a model without allocating it, then compute each rank's shards of its first values."""

from __future__ import annotations

from meshfold.mesh.initialization.api import (
    Tape,
    build_on_meta,
    materialize,
    record_initialization,
    retrace_initialization,
)
from meshfold.mesh.initialization.parameter_values import (
    FirstValues,
    Origin,
    coordinates_of,
    first_values,
    origin_of,
    set_origin,
)

__all__ = [
    "FirstValues",
    "Origin",
    "Tape",
    "build_on_meta",
    "coordinates_of",
    "first_values",
    "materialize",
    "origin_of",
    "record_initialization",
    "retrace_initialization",
    "set_origin",
]
