"""Initial weights: build a model without allocating it, then compute each rank's shards of its first values."""

from __future__ import annotations

from meshfold.mesh.initialization.api import (
    InitTrace,
    build_on_meta,
    materialize,
    record_initialization,
    retrace_initialization,
)
from meshfold.mesh.initialization.parameter_values import (
    ParameterInit,
    TracedInit,
    ValueSource,
    find_value_source,
    make_needed,
    parameter_init,
    set_value_source,
    shard_coordinates,
)

__all__ = [
    "InitTrace",
    "ParameterInit",
    "TracedInit",
    "ValueSource",
    "build_on_meta",
    "find_value_source",
    "make_needed",
    "materialize",
    "parameter_init",
    "record_initialization",
    "retrace_initialization",
    "set_value_source",
    "shard_coordinates",
]
