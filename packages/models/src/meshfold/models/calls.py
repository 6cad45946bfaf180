"""Calls of a model for rows of one token each: of a module, or of a pipeline of its stages.

Stages of a pipeline get a batch whole, since its rows are few and attention knows them by their places. A pipeline runs layers on
placeholders too, to learn what its stages exchange. Attention must then leave the pool alone (:attr:`ModelCalls.looks`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh.collectives import shared_errors


class ModelCalls:
    """A model, and how it is called.

    Attributes:
        module: the model, or this rank's part of it.
        staged: it is a pipeline.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        """Args:
        model: a module, or a pipeline of its stages.
        device: of the ids.
        """
        self.staged = not isinstance(model, nn.Module)
        self.module: nn.Module = model.module if self.staged else model
        self._model, self._device = model, device
        self._options = {} if getattr(self.module, "caches_keys", False) else {"use_cache": False}

    @property
    def looks(self) -> bool:
        """True while a pipeline runs layers only to learn shapes."""
        return self.staged and bool(self._model.looks)

    def logits(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits ``b s v`` of ids ``b s``, the same on all ranks; ``positions``: ``b s``."""
        given = dict(self._options) if positions is None else {**self._options, "position_ids": positions}
        output = self._model.whole(ids, **given) if self.staged else self._model(ids, **given)
        logits: Tensor = getattr(output, "logits", output)
        return logits

    def rehearse(self, ids: Tensor, positions: Tensor) -> None:
        """Run this rank's layers on any values, for their shapes; stages exchange nothing."""
        if self.staged:
            self._model.forward_alone(ids, position_ids=positions, **self._options)
        else:
            self.logits(ids, positions)

    def agreed(self) -> AbstractContextManager[None]:
        """Return a context manager: an error of one stage inside of it is an error of all."""
        staged = self.staged
        return shared_errors(self._model.mesh.group(self._model.axis), self._device) if staged else nullcontext()
