"""Tracking of split dims while a model's own code runs, so that nothing is silently computed on a shard.

See :mod:`meshfold.mesh.tracking.follow`.
"""

from meshfold.mesh.tracking.active import (
    TrackedLayout,
    part_of_model,
    set_tracked_layout,
    tracked_layout,
    tracker,
    untracked,
    without_tracking,
)
from meshfold.mesh.tracking.dims import (
    ALIKE,
    ROWS,
    Dim,
    Dims,
    Factor,
    Split,
    axes_in,
    axes_of,
    block,
    is_open,
    is_split,
    is_split_first,
    is_unknown,
    is_whole,
    normal,
    size_of,
    whole,
    whole_dims,
)
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.rows import ROWS_INNERMOST, TOKENS_EXCHANGED
from meshfold.mesh.tracking.uncompiled import uncompiled
from meshfold.mesh.tracking.watch import TrackingHooks, track_forwards

__all__ = [
    "ALIKE",
    "ROWS",
    "ROWS_INNERMOST",
    "TOKENS_EXCHANGED",
    "Dim",
    "Dims",
    "Factor",
    "Split",
    "TrackedLayout",
    "Tracker",
    "TrackingHooks",
    "axes_in",
    "axes_of",
    "block",
    "is_open",
    "is_split",
    "is_split_first",
    "is_unknown",
    "is_whole",
    "normal",
    "part_of_model",
    "set_tracked_layout",
    "size_of",
    "track_forwards",
    "tracked_layout",
    "tracker",
    "uncompiled",
    "untracked",
    "whole",
    "whole_dims",
    "without_tracking",
]
