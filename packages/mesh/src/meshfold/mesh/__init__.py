"""The ground floor of Meshfold: spec, mesh, layout, collectives, parameter metadata, norms, random numbers, launch."""

from meshfold.mesh.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    reduce_scatter,
    shift,
)
from meshfold.mesh.errors import CollectiveError, LaunchError, LayoutError, MeshfoldError, SpecError
from meshfold.mesh.layout import Layout
from meshfold.mesh.mesh import Group, Mesh
from meshfold.mesh.metadata import ParameterMeta, annotate, metadata
from meshfold.mesh.norms import clip_gradients, gradient_norm
from meshfold.mesh.placement import Part, Placement, Rectangle
from meshfold.mesh.recorder import Entry, Log, record
from meshfold.mesh.spec import ParallelSpec
from meshfold.mesh.traffic import moved_bytes

__all__ = [
    "CollectiveError",
    "Entry",
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
    "Rectangle",
    "SpecError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "annotate",
    "barrier",
    "broadcast",
    "clip_gradients",
    "gradient_norm",
    "metadata",
    "moved_bytes",
    "record",
    "reduce_scatter",
    "shift",
]
