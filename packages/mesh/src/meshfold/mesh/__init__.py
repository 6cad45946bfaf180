"""Named device meshes: spec, mesh, layout, collectives, parameter metadata, gradient norm, random numbers, launch."""

from meshfold.mesh import (
    moved,
    torch_version,  # noqa: F401  # first: it checks the version
)
from meshfold.mesh.collectives.operations import (
    Pending,
    Transfer,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    exchange_rows,
    receive,
    reduce_scatter,
    send,
    shift,
)
from meshfold.mesh.errors import (
    CollectiveError,
    LaunchError,
    LayoutError,
    MeshfoldError,
    SpecError,
    TokenError,
    did_you_mean,
)
from meshfold.mesh.garbage import collector_paused
from meshfold.mesh.group import Group
from meshfold.mesh.initialization.api import (
    build_on_meta,
    materialize,
    record_initialization,
    retrace_initialization,
)
from meshfold.mesh.layout import Layout
from meshfold.mesh.mesh import Mesh, MetaMesh
from meshfold.mesh.moved import redirect_imports
from meshfold.mesh.old_names import with_old_arguments, with_old_names
from meshfold.mesh.parameters.grad_norm import clip_gradient_values, clip_gradients, gradient_norm
from meshfold.mesh.parameters.parameter_meta import ParameterMeta, annotate, metadata
from meshfold.mesh.placement import Part, Placement, Rectangle
from meshfold.mesh.processes.environment import Environment
from meshfold.mesh.processes.groups import is_started
from meshfold.mesh.processes.launcher import launch
from meshfold.mesh.processes.process_group import Process, start
from meshfold.mesh.random.dropout import checkpoint_contexts, current_dropout_stream, dropout_stream
from meshfold.mesh.random.numbers import key_of
from meshfold.mesh.recording.comm_log import Entry, Log, moved_bytes, record
from meshfold.mesh.spec import ParallelSpec

moved.install()

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
    "MetaMesh",
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
    "collector_paused",
    "current_dropout_stream",
    "did_you_mean",
    "dropout_stream",
    "exchange_rows",
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
    "redirect_imports",
    "reduce_scatter",
    "retrace_initialization",
    "send",
    "shift",
    "start",
    "with_old_arguments",
    "with_old_names",
]
