"""Collectives by pushes: blocks go by copy engine into memory of the peers, flags say what has arrived, one kernel sums.

NCCL's kernels take multiprocessors from simultaneous matmuls; a push takes none. See :mod:`~meshfold.mesh.collectives.push.epochs`
for the protocol, :mod:`~meshfold.mesh.collectives.push.gpu` for what carries it between GPUs, and
:mod:`~meshfold.mesh.collectives.push.host` between CPUs.
"""

from __future__ import annotations

from meshfold.mesh.collectives.push.channel import Channel, Exchange
from meshfold.mesh.collectives.push.channels import (
    LARGEST_SLOT_BYTES,
    bytes_of_channel,
    channel,
    channel_bytes,
    why_not,
)
from meshfold.mesh.collectives.push.epochs import sources, targets
from meshfold.mesh.collectives.push.part_sums import sum_parts
from meshfold.mesh.collectives.push.peer_memory import PeerMemory, peer_memory
from meshfold.mesh.collectives.push.pushed import (
    all_gather_push,
    pushes,
    reduce_scatter_push,
    reduce_scatter_push_squares,
)

__all__ = [
    "LARGEST_SLOT_BYTES",
    "Channel",
    "Exchange",
    "PeerMemory",
    "all_gather_push",
    "bytes_of_channel",
    "channel",
    "channel_bytes",
    "peer_memory",
    "pushes",
    "reduce_scatter_push",
    "reduce_scatter_push_squares",
    "sources",
    "sum_parts",
    "targets",
    "why_not",
]
