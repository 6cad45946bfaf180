"""Errors of one rank that must be raised on all: else the others would wait for it for ever."""

from __future__ import annotations

import torch

from meshfold.checkpoint import CheckpointError
from meshfold.engine.world.world import World
from meshfold.mesh import all_reduce, broadcast

_LONGEST = 1000  # bytes of a message


def fail_together(world: World, error: Exception | None, what: str, *, name_rank: bool = True) -> None:
    """Raise on every rank what failed on any; all ranks must call, which makes it a barrier too.

    Args:
        world: the ranks.
        error: what failed on this one; None for nothing.
        what: could not be done, for the message.
        name_rank: say which rank it was.

    Raises:
        CheckpointError: the same on all ranks, with the message of the first that failed.
    """
    size, rank = world.mesh.world_size, world.mesh.rank
    if size == 1:  # without the device, which may be busy
        if error is not None:
            raise CheckpointError(f"{what}: {error}") from error
        return
    worst = torch.tensor(0 if error is None else size - rank, device=world.device)
    failed = size - int(all_reduce(worst, world.everyone, "max"))
    if failed == size:
        return
    text = torch.zeros(_LONGEST, dtype=torch.uint8, device=world.device)
    if failed == rank:
        said = list(str(error or "").encode()[:_LONGEST])
        text[: len(said)] = torch.tensor(said, dtype=torch.uint8)
    text = broadcast(text, world.everyone, failed)
    message = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
    raise CheckpointError(f"{what}: {f'rank {failed}: ' if name_rank else ''}{message}") from error


def agree(world: World, number: int) -> int:
    """Return the greatest number that a rank gives; all ranks must call."""
    if world.mesh.world_size == 1:
        return number
    return int(all_reduce(torch.tensor(number, device=world.device), world.everyone, "max"))
