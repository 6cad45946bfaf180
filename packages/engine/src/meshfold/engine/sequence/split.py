"""Hooks around a model whose sequences are split.

Ranks along the sequence axes are given the same rows. On the way in, tokens, labels and positions are dealt as the mode
deals them; labels are moved by one token before, since a part of a sequence cannot know its next token. On the way out the
ranks' losses are put together to that of the whole sequences, or, without labels, outputs are gathered along the tokens. The
gradient of what comes out is summed over the ranks, as if each had used the whole for a loss of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from meshfold.engine.sequence.attention import Contexts, SplitAttention
from meshfold.engine.sequence.checks import check_mixing
from meshfold.engine.sequence.incoming import Forward, Incoming
from meshfold.engine.sequence.labels import Labels, next_token_losses
from meshfold.engine.sequence.outgoing import Outgoing
from meshfold.engine.world.world import World
from meshfold.mesh import LayoutError, SpecError
from meshfold.mesh.spec import SequenceSpec


class SplitSequence:
    """The hooks before and after a model's forward, and its attention between them."""

    def __init__(self, model: nn.Module, world: World, spec: SequenceSpec, *, own_loss: bool) -> None:
        """Args:
        model: this rank's part.
        world: where it lies.
        spec: the entry.
        own_loss: the engine has a ``loss_fn``.

        Raises:
            SpecError: for what the model cannot do on a part of a sequence, as far as it can be told.
        """
        written = world.spec.written or str(world.spec)
        labels = Labels(model, written)
        if not own_loss:
            labels.require(type(model).__name__)
        check_mixing(model, world)
        self._incoming = Incoming(model, world.mesh, spec.mode, labels, written)
        self._outgoing = Outgoing(world.mesh, spec.mode, written)
        self._now: Forward | None = None
        with ExitStack() as undo:
            for loss in next_token_losses(model):
                loss.__dict__["shifts"] = False
                undo.callback(loss.__dict__.update, shifts=True)
            undo.callback(
                model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True).remove
            )
            try:
                self._attention = SplitAttention(model, world, spec.mode)
            except LayoutError as error:
                raise SpecError(f"{written}: {error}") from error
            undo.callback(self._attention.close)
            undo.callback(model.register_forward_hook(self._after).remove)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Leave the model as it was."""
        self._undo.close()

    def repeated(self, contexts: Contexts) -> Contexts:
        """The contexts of a checkpoint with what repeated attention needs."""
        return self._attention.repeated(contexts)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, now = self._incoming.take(args, kwargs, training=module.training)
        self._attention.begin(now)
        self._now = now
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        now, self._now = self._now, None
        return output if now is None else self._outgoing.give(output, now)
