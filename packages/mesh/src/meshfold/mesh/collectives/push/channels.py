"""The channels of this process: a group's ranks open one together when they first push, or learn why they cannot."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshfold.mesh.collectives.operations import all_gather_object
from meshfold.mesh.collectives.push import epochs
from meshfold.mesh.collectives.push.channel import Channel
from meshfold.mesh.collectives.push.transport import FLAG_BYTES, MOST_RANKS, Transport
from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.group import Group
from meshfold.mesh.processes import groups
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.comm_log import unrecorded

PIECE_SLOT_BYTES = 64 * 2**20
"""Bytes of a slot of the channel for messages of any size: larger ones go in pieces of a slot's ``1/ranks``."""

LARGEST_SLOT_BYTES = 2**30
"""The largest slot: blocks that need a larger one go in pieces, or by other means."""

T = TypeVar("T")
_channels: dict[tuple[str, str, int, bool], Channel | str] = {}
_ranks: dict[str, tuple[int, ...]] = {}  # of the groups that have asked, by name
_made_in: Any = None  # the world of the channels


def channel(group: Group, device: torch.device, block_bytes: int | None = None) -> Channel | None:
    """Return a channel of a group, opened at the first call; None if its ranks cannot push to each other.

    All ranks of the group must call, in the same order of groups and sizes. None too while a CUDA graph is captured: a
    replay would raise the flags of the captured call again.

    Args:
        group: of more than one rank.
        device: where the blocks are.
        block_bytes: the least room for a block; None: a channel for pieces of messages.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if block_bytes is not None and block_bytes * group.size > LARGEST_SLOT_BYTES:
        return None
    found = _find(group, device, block_bytes)
    return None if isinstance(found, str) else found


def why_not(group: Group, device: torch.device) -> str:
    """Return why the ranks of a group cannot push to each other; empty if they can. All of them must call."""
    found = _find(group, device, None)
    return found if isinstance(found, str) else ""


def bytes_of_channel(slot_bytes: int = PIECE_SLOT_BYTES) -> int:
    """Return the bytes of each rank's memory that a channel takes; by default one for pieces of messages."""
    return epochs.SLOTS * slot_bytes + FLAG_BYTES


def channel_bytes(reaches: Callable[[tuple[int, ...]], bool] | None = None) -> int:
    """Return the bytes of this rank's memory that its channels take. On a GPU torch's allocator does not count them.

    Args:
        reaches: in a simulated world: tells from the ranks of a group whether they would reach each other's memory. The channels
            that were asked for count as opened if so.
    """
    if _made_in is None or _made_in is not groups.world_key():
        return 0
    total = 0
    for (name, _, slot_bytes, _), found in _channels.items():
        would = groups.is_simulated() and reaches is not None and reaches(_ranks[name])
        total += bytes_of_channel(slot_bytes) * (would or isinstance(found, Channel))
    return total


def _find(group: Group, device: torch.device, block_bytes: int | None) -> Channel | str:
    world = groups.world_key()
    global _made_in
    if _made_in is not world:
        _channels.clear()
        _ranks.clear()
        _made_in = world
    size = PIECE_SLOT_BYTES if block_bytes is None else _rounded(block_bytes * group.size)
    # Apart, as the flags of one stream only grow: collectives in pieces release slots on a stream of their own.
    key = (group.name, device.type, size, block_bytes is None)
    found = _channels.get(key)
    if found is None:
        _ranks[group.name] = tuple(group.ranks)
        found = _channels[key] = _open(group, device, size)
    return found


def _rounded(slot_bytes: int) -> int:
    """Round up, so that calls of about the same size share a channel."""
    return max(1 << 20, 1 << (slot_bytes - 1).bit_length())


def _open(group: Group, device: torch.device, slot_bytes: int) -> Channel | str:
    transport = open_together(group, device, "a push channel", lambda: _transport(group, device, slot_bytes))
    return transport if isinstance(transport, str) else Channel(transport)


def open_together(group: Group, device: torch.device, what: str, make: Callable[[], T]) -> T | str:
    """Call ``make`` on all ranks of a group, for memory that all of them reach; return the first reason against it instead, if any.

    All ranks of the group must call.

    Args:
        group: of more than one rank.
        device: of the memory.
        what: is made.
        make: makes it; a RuntimeError is a reason.
    """
    if world_reason := _unsuited(group):
        return world_reason
    made: T | None = None
    with unrecorded():
        here = _reason(group, device)
        reason = _agreed(group, device, here)
        if not reason:
            try:
                with flight_recorder.meeting(
                    f"the opening of {what}", group.ranks, group.ranks[group.index], group.name
                ):
                    made = make()
            except MeshfoldError:
                raise
            except RuntimeError as error:
                here = f"{type(error).__name__}: {error}"
            reason = _agreed(group, device, here)
    return reason if reason or made is None else made


def _unsuited(group: Group) -> str:
    """Return why no group of this kind pushes, without asking its other ranks."""
    if groups.is_simulated():
        return "the ranks are simulated"
    if group.size > MOST_RANKS:
        return f"a channel has flags for {MOST_RANKS} ranks, and the group has {group.size}"
    return ""


def _reason(group: Group, device: torch.device) -> str:
    places = all_gather_object([_host(), device.index or 0], group, device)
    if len({host for host, _ in places}) > 1:
        return "the ranks are on several hosts"
    if device.type == "cuda":
        from meshfold.mesh.collectives.push import gpu

        return gpu.missing([number for _, number in places], device)
    if device.type == "cpu":
        from meshfold.mesh.collectives.push import host

        return host.missing()
    return f"there is no transport between devices of type {device.type!r}"


def _host() -> str:
    """Return a value that only ranks of the same running machine share."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _agreed(group: Group, device: torch.device, reason: str) -> str:
    """Return the first reason that any rank has."""
    return next((found for found in all_gather_object(reason, group, device) if found), "")


def _transport(group: Group, device: torch.device, slot_bytes: int) -> Transport:
    if device.type == "cuda":
        from meshfold.mesh.collectives.push.gpu import GpuTransport

        return GpuTransport(group, slot_bytes, device)
    from meshfold.mesh.collectives.push.host import HostTransport

    return HostTransport(group, slot_bytes)
