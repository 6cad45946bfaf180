"""The entry ``sequence`` of the spec: a model gets whole sequences, each rank computes its own tokens, and outputs
are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from meshfold.engine.world import World
from meshfold.mesh import ParallelSpec

if TYPE_CHECKING:
    from meshfold.engine.sequence.split import SplitImage, SplitSequence

__all__ = ["counted_attention", "local_length", "split_sequence"]


def split_sequence(model: nn.Module, world: World, *, own_loss: bool) -> SplitSequence | SplitImage | None:
    """Split a model's sequences over ranks if the spec asks for it; return None if not.

    Args:
        model: this rank's part, tensor parallelism done.
        world: where it lies.
        own_loss: the engine has a ``loss_fn``.

    Raises:
        SpecError: if the model does something that is not possible on a part of a sequence.
    """
    spec = world.spec.sequence
    if spec is None or spec.size == 1:  # also of Megatron's mode
        return None
    from meshfold.engine.sequence.split import SplitImage, SplitSequence
    from meshfold.sequence import find_image_model

    of_images = find_image_model(model)
    if of_images is not None:
        return SplitImage(of_images, world, spec)
    return SplitSequence(model, world, spec, own_loss=own_loss)


def local_length(length: int, world: World) -> int:
    """Return the tokens per rank of a sequence, padding included."""
    spec = world.spec.sequence
    if spec is None or spec.size == 1:
        return length
    from meshfold.sequence import sequence_sharding

    return sequence_sharding(length, world.mesh, spec.mode).local


@contextmanager
def counted_attention(spec: ParallelSpec, count: Callable[[int, int, float, int], None]) -> Iterator[None]:
    """Report the operations of attention over split sequences, for meta tensors, as :meth:`DryRun.add_attention` takes them."""
    if spec.sequence is None or spec.sequence.size == 1:
        yield
        return
    from meshfold.sequence import count_attention_flops

    with count_attention_flops(count):
        yield
