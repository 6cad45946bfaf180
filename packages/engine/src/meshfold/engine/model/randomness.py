"""The random numbers of one micro-step: a function of seed, step and place in the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshfold.engine.batches.shares import Shares
from meshfold.mesh.random import dropout_stream, key_of


@contextmanager
def randomness(
    seed: int, step: int, shares: Shares, device: torch.device, *, torch_too: bool
) -> Iterator[None]:
    """Draw dropout for one forward and backward.

    Args:
        seed: of the run.
        step: micro-step, counted over the whole run.
        shares: where this data coordinate's rows lie in the global batch, which decides what they drop.
        device: of torch's generator.
        torch_too: seed torch's own generators for the time being, for dropout that draws from them. It then depends
            on how many data coordinates there are, and can only be repeated.
    """
    with dropout_stream(seed, step, batch=shares):
        if not torch_too:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(key_of(f"dropout/{seed}/{step}/{shares.index}"))
            yield
