"""Tracking of split dims while a model's own code runs, so that nothing is computed on a shard in silence.

See :mod:`meshfold.mesh.tracking.follow`.
"""

from meshfold.mesh.tracking.active import Lies, lies, part_of_model, say, tracker, untracked, unwatched
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
    is_unknown,
    is_whole,
    leads,
    normal,
    size_of,
    whole,
    whole_dims,
)
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.rows import EXCHANGED, TURNED
from meshfold.mesh.tracking.watch import Watched, watch

__all__ = [
    "ALIKE",
    "EXCHANGED",
    "ROWS",
    "TURNED",
    "Dim",
    "Dims",
    "Factor",
    "Lies",
    "Split",
    "Tracker",
    "Watched",
    "axes_in",
    "axes_of",
    "block",
    "is_open",
    "is_split",
    "is_unknown",
    "is_whole",
    "leads",
    "lies",
    "normal",
    "part_of_model",
    "say",
    "size_of",
    "tracker",
    "untracked",
    "unwatched",
    "watch",
    "whole",
    "whole_dims",
]
