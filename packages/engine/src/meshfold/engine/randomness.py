"""The random numbers of one micro-step: a function of seed, step and data coordinate, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from meshfold.mesh.dropout_stream import dropout_stream
from meshfold.mesh.random import key_of


@contextmanager
def randomness(
    seed: int, step: int, data_index: int, device: torch.device, *, torch_too: bool
) -> Iterator[None]:
    """Draw dropout for one forward and backward.

    Args:
        seed: of the run.
        step: micro-step, counted over the whole run.
        data_index: the data coordinate: other rows drop other elements.
        device: of torch's generator.
        torch_too: seed torch's own generators for the time being, for dropout that draws from them.
    """
    own = seed if data_index == 0 else key_of(f"data/{seed}/{data_index}")
    with dropout_stream(own, step):
        if not torch_too:
            yield
            return
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(key_of(f"dropout/{own}/{step}"))
            yield
