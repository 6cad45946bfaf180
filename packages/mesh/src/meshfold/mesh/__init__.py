"""The ground floor of Meshfold: spec, mesh, layout, collectives, parameter metadata, norms, random numbers, launch."""

from meshfold.mesh.collectives import (
    Pending,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    receive,
    reduce_scatter,
    send,
    shift,
)
from meshfold.mesh.dropout_stream import checkpoint_contexts, current_dropout_stream, dropout_stream
from meshfold.mesh.environment import Environment
from meshfold.mesh.errors import (
    CollectiveError,
    LaunchError,
    LayoutError,
    MeshfoldError,
    SpecError,
    TokenError,
)
from meshfold.mesh.initialization import (
    build_on_meta,
    materialize,
    record_initialization,
    retrace_initialization,
)
from meshfold.mesh.launch import launch
from meshfold.mesh.layout import Layout
from meshfold.mesh.mesh import Group, Mesh
from meshfold.mesh.metadata import ParameterMeta, annotate, metadata
from meshfold.mesh.norms import clip_gradient_values, clip_gradients, gradient_norm
from meshfold.mesh.placement import Part, Placement, Rectangle
from meshfold.mesh.process_group import Process, is_started, start
from meshfold.mesh.random import key_of
from meshfold.mesh.recorder import Entry, Log, record
from meshfold.mesh.spec import ParallelSpec
from meshfold.mesh.traffic import moved_bytes

__all__ = [
    "CollectiveError",
    "Entry",
    "Environment",
    "Group",
    "LaunchError",
    "Layout",
    "LayoutError",
    "Log",
    "Mesh",
    "MeshfoldError",
    "ParallelSpec",
    "ParameterMeta",
    "Part",
    "Pending",
    "Placement",
    "Process",
    "Rectangle",
    "SpecError",
    "TokenError",
    "Transfer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "annotate",
    "barrier",
    "broadcast",
    "build_on_meta",
    "checkpoint_contexts",
    "clip_gradient_values",
    "clip_gradients",
    "current_dropout_stream",
    "dropout_stream",
    "gradient_norm",
    "is_started",
    "key_of",
    "launch",
    "materialize",
    "metadata",
    "moved_bytes",
    "receive",
    "record",
    "record_initialization",
    "reduce_scatter",
    "retrace_initialization",
    "send",
    "shift",
    "start",
]
