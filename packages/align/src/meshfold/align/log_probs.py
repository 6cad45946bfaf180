"""Log-probabilities of a batch's labels out of an engine's model: in every spec, and without logits.

A model that is given labels calls its own loss with its logits, which wait for it and are never held
(:mod:`meshfold.kernels.fuse`); under ``tensor`` this rank has some of the words, under ``sequence`` some of the tokens, under
``pipeline`` the last stage alone has any. :class:`TokenLogProbs` replaces that loss: it computes a number for each token
instead of their mean, and gathers the numbers of whole sequences on every rank of the stage: ``b s`` numbers, not ``b s v``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.collectives import gather
from meshfold.mesh.model_io import IGNORE_INDEX
from meshfold.mesh.tracking import untracked
from meshfold.tensor_parallel import log_probs


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Log-probabilities of the tokens of some rows, and entropies.

    Attributes:
        log_probs: ``b s``, of each label at its own place; 0 where the label does not count, and for the first token of a row.
        entropy: ``b s``, of the distribution that the label was drawn from, in nats; None if it was not asked for.
    """

    log_probs: Tensor
    entropy: Tensor | None = None


class TokenLogProbs:
    """Replacement of a model's own loss, until it is closed.

    Attributes:
        temperature: divides the logits.
        entropy: find entropies too.
    """

    def __init__(self, engine: Engine, *, temperature: float = 1.0, entropy: bool = False) -> None:
        """Args:
            engine: whose model it is; a causal language model.
            temperature, entropy: see above.

        Raises:
            SpecError: if the model has no loss of its own that it calls with its logits.
        """
        self.temperature, self.entropy = temperature, entropy
        self._found: deque[Tensor] = deque()  # of each forward, b s_local of 1 or 2 kinds, until its loss asks for it
        self._mesh, self._sequence = engine.mesh, engine.spec.sequence
        self._close: list[Any] = []
        model = engine.model
        losses = [m for m in model.modules() if getattr(m, "causal_lm_loss", False)]
        if len(losses) == 1:
            self._take_module(losses[0])
        elif (theirs := next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)) is not None:
            self._take_function(theirs)  # transformers' model, which peft's may have around it
        else:
            raise SpecError(
                f"{type(model).__name__} has no loss to take log-probabilities from: give a causal language model "
                "of meshfold.models or transformers, or let it call a module with the attribute causal_lm_loss = True"
            )

    def close(self) -> None:
        """Give the model its own loss back."""
        while self._close:
            self._close.pop()()

    def forget(self) -> None:
        """Drop the results of interrupted forwards."""
        self._found.clear()

    def take(self, labels: Tensor) -> TokenValues:
        """Return what the last forward, or the first that was not taken, found for labels ``b s``."""
        found = self._found.popleft()[:, : len(labels)]  # a tensor mode may have filled up the rows
        length = labels.shape[1]
        if self._sequence is not None:
            from meshfold.sequence import sequence_mode, sequence_sharding

            axes = sequence_mode(self._sequence.mode, self._mesh).axes
            sharding = sequence_sharding(length, self._mesh, self._sequence.mode)
            found = sharding.join(gather(found, self._mesh, 2, axes), 2)
        at_label = F.pad(found[..., :-1], (1, 0))  # a row's place t predicts the label at t + 1
        return TokenValues(log_probs=at_label[0], entropy=at_label[1] if len(at_label) > 1 else None)

    def _take_module(self, loss: nn.Module) -> None:
        """Replace the forward of a module (logits, labels)."""
        mesh = getattr(loss, "mesh", None)
        split: dict[str, Any] = {} if mesh is None else dict(mesh=mesh, mode=loss.mode, vocab_size=loss.vocab_size)

        def forward(
            logits: Tensor, labels: Tensor | None = None, *, shift_labels: Tensor | None = None, **_: Any
        ) -> Tensor:
            moved = shift_labels if shift_labels is not None else labels
            assert moved is not None
            if shift_labels is None and loss.shifts:
                moved = _next(moved)
            return self._find(logits, moved, split)

        loss.__dict__["forward"] = forward
        self._close.append(lambda: loss.__dict__.pop("forward"))

    def _take_function(self, model: nn.Module) -> None:
        """Replace ``model.loss_function`` of transformers."""
        before: Any = model.loss_function
        sharded = getattr(before, "sharded", None)
        split: dict[str, Any] = (
            {} if sharded is None else dict(mesh=sharded.mesh, mode=sharded.mode, vocab_size=sharded.vocab_size)
        )

        def loss_function(
            logits: Tensor, labels: Tensor | None = None, *_: Any, shift_labels: Tensor | None = None, **__: Any
        ) -> Tensor:
            moved = shift_labels
            if moved is None:
                assert labels is not None
                moved = _next(labels)
            return self._find(logits, moved, split)

        model.loss_function = loss_function  # type: ignore[assignment]
        self._close.append(lambda: setattr(model, "loss_function", before))

    def _find(self, logits: Tensor, targets: Tensor, split: dict[str, Any]) -> Tensor:
        """Compute the log-probabilities of a forward, and return a loss of 0 in the place of the model's."""
        if not logits.is_meta:  # a trial, which shapes alone are wanted of
            with untracked():  # ranks communicate here
                flat = targets.reshape(-1)
                found = log_probs(logits, flat, temperature=self.temperature, entropy=self.entropy, **split)
                self._found.append(found.view(-1, *targets.shape))
        return torch.zeros((), dtype=torch.float64, device=logits.device)


def _next(labels: Tensor) -> Tensor:
    return F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
