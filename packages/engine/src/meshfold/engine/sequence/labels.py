"""Labels of a split sequence: moved by one token while it is whole, dealt, and counted."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX
from meshfold.sequence import SequenceSharding, next_tokens

_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")  # transformers' names of losses token by token


def next_token_losses(model: nn.Module) -> list[nn.Module]:
    """The losses inside of a model that leave labels where they are once their attribute ``shifts`` is False."""
    return [m for m in model.modules() if getattr(m, "causal_lm_loss", False) and hasattr(m, "shifts")]


class Labels:
    """Labels of a model whose sequences are split.

    Attributes:
        kind: ``"moved"``, ``"shift_labels"`` (moved, and said so), ``"as they are"``; "" if the model's loss cannot be told that
            they are moved.
    """

    def __init__(self, model: nn.Module, written: str) -> None:
        """Args:
        model: whose loss it is.
        written: the spec, for messages.
        """
        self._written = written
        if not hasattr(type(model), "loss_function"):  # of the Hugging Face kind
            self.kind = "moved" if next_token_losses(model) else ""
            return
        said = getattr(model, "loss_type", None)
        takes_more = any(
            p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values()
        )
        moves = said in (None, "ForCausalLM") and takes_more
        self.kind = "as they are" if said in _UNSHIFTED else "shift_labels" if moves else ""

    @property
    def causal(self) -> bool:
        """Tell whether each token predicts the next one, as far as is known."""
        return self.kind in ("moved", "shift_labels")

    def require(self, name: str) -> None:
        """Raise a SpecError if the model called ``name`` cannot compute a loss of dealt labels."""
        if self.kind:
            return
        raise SpecError(
            f"{self._written}: the loss inside of {name} cannot be told that labels were moved by one token before they were dealt "
            "to ranks, which it cannot do on a part of a sequence. Let the model return logits and give Engine(..., loss_fn=...), "
            "which gets those of whole sequences; or let it call a module with the attribute causal_lm_loss = True that leaves "
            "labels where they are while its attribute shifts is False, as meshfold.models.loss.CausalLMLoss"
        )

    def moved(self, given: dict[str, Any]) -> Tensor | None:
        """Return what each token of whole sequences should predict: ``b length``; None if the model was given no labels."""
        if isinstance(moved := given.get("shift_labels"), Tensor):
            return moved
        labels = given.get("labels")
        if not isinstance(labels, Tensor):
            return None
        return labels if self.kind == "as they are" else next_tokens(labels, ignore_index=IGNORE_INDEX)

    def deal(self, given: dict[str, Any], dealt: SequenceSharding, rank: int, rows: int) -> Tensor | None:
        """Put this rank's labels in place of all.

        Returns:
            This rank's share of the targets that count, float64; None if the model was given no labels.

        Raises:
            SpecError: for labels that are not one a token.
        """
        names = ("labels", "shift_labels")
        found = {name: value for name in names if (value := given.pop(name, None)) is not None}
        if not found:
            return None
        self.require("the model")
        for name, value in found.items():
            if not isinstance(value, Tensor) or tuple(value.shape) != (rows, dealt.length):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise SpecError(
                    f"{self._written}: {name} {shape} for tokens {(rows, dealt.length)}: where a sequence is split, each token has "
                    "its own label"
                )
        moved = self.moved(found)
        assert moved is not None  # there are some
        mine = dealt.shard(moved, rank, pad=IGNORE_INDEX)
        given["labels"] = mine
        if self.kind == "shift_labels":
            given["shift_labels"] = mine
        if given.get("num_items_in_batch") is not None:  # the loss is a sum, divided already
            return torch.ones((), dtype=torch.float64, device=mine.device)
        return (mine != IGNORE_INDEX).sum().double() / (moved != IGNORE_INDEX).sum().clamp(min=1)
