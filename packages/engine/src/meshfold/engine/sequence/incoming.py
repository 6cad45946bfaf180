"""Inputs under sequence parallelism: labels are shifted by one token, then each argument is cut to this rank's part."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from meshfold.engine.batches.packed import Documents, packed_documents
from meshfold.mesh import Mesh, SpecError
from meshfold.mesh.model_io import IGNORE_INDEX, branch_starts, ignore_document_starts
from meshfold.mesh.random import TokenShards, set_token_shards
from meshfold.sequence import SequenceSharding, next_tokens, positions_from_ids, sequence_mode, sequence_sharding

_TARGETS = ("targets", "target")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "use_cache", "cache_position")
_LAST_TOKENS = ("logits_to_keep", "num_logits_to_keep")


@dataclass(frozen=True, kw_only=True)
class Forward:
    """State of the current forward.

    Attributes:
        sharding: of its sequences.
        rows: of the batch.
        share: this rank's share of the targets that count, float64; None if the model was given no labels.
        documents: those packed into each row, which attention does not cross; None if rows are not packed.
    """

    sharding: SequenceSharding
    rows: int
    share: Tensor | None
    documents: Documents | None


class Incoming:
    """Cuts tokens, labels and positions; drops or refuses arguments that a part of a sequence cannot have."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, mode: str | Callable[..., object], labels: Labels, written: str
    ) -> None:
        """Args:
        model: to be called.
        mesh, mode: how sequences are sharded.
        labels: of the model.
        written: the spec, for messages.
        """
        self._mesh, self._mode, self._labels, self._written = mesh, mode, labels, written
        self._axes = sequence_mode(mode, mesh).axes
        parameters = inspect.signature(model.forward).parameters
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._names = [name for name, p in parameters.items() if p.kind in positional]
        self._caches = "use_cache" in parameters
        self._theirs = hasattr(type(model), "loss_function")  # a Hugging Face model
        self._number = positions_from_ids(model) if "position_ids" in parameters else None
        self._own = any(hasattr(module, "makes_masks") for module in model.modules())

    def take(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any], Forward]:
        """Return this rank's part of the model's arguments.

        Raises:
            SpecError: for arguments that cannot be cut.
        """
        names = [*self._names, *map(str, range(len(self._names), len(args)))][: len(args)]
        given = {**dict(zip(names, args, strict=True)), **kwargs}
        if "position_ids" in names:  # pass it by name: it may be replaced
            names = names[: names.index("position_ids")]
        tokens = next((x for x in given.values() if isinstance(x, Tensor) and _has_tokens(x)), None)
        if tokens is None:
            self._refuse(
                "the model was called without a tensor of ids [batch, tokens] or features [batch, tokens, ...], whose tokens "
                "could be split"
            )
        rows, length = tokens.shape[:2]
        sharding = sequence_sharding(length, self._mesh, self._mode)
        rank = self._mesh.index(*self._axes)
        self._refuse_parts(given)
        documents = self._documents(given, rows, length)
        self._drop_mask(given, length)
        share = self._labels.shard(given, sharding, rank, rows)
        if self._number is not None and given.get("position_ids") is None and not tokens.is_floating_point():
            given["position_ids"] = self._number(tokens)
        for name, value in given.items():
            along = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length
            if along and value.shape[0] in (1, rows) and name not in ("labels", "shift_labels"):
                given[name] = sharding.shard(value, rank)
        if self._caches:
            given["use_cache"] = False  # a cache of only this rank's tokens would be useless
        if training:
            set_token_shards(TokenShards(length=length, index=sharding.indices(rank, tokens.device)))
        now = Forward(sharding=sharding, rows=rows, share=share, documents=documents)
        return tuple(given.pop(name, None) for name in names), given, now

    def _refuse(self, why: str) -> NoReturn:
        raise SpecError(f"{self._written}: {why}")

    def _refuse_parts(self, given: Mapping[str, Any]) -> None:
        for name in _CACHES:
            if given.get(name) is not None and given[name] is not False:
                self._refuse(
                    f"the model was called with {name}, but a split sequence must pass through it in one forward: generate with "
                    "meshfold.models.generate, or with use_cache=False"
                )
        for name in _LAST_TOKENS:
            if given.get(name):
                self._refuse(
                    f"the model was called with {name}={given[name]!r}, but the last tokens are on another rank"
                )
        for name in _TARGETS:
            if isinstance(given.get(name), Tensor):
                self._refuse(f"the model was called with {name!r}: give unshifted labels as 'labels', or use a loss_fn")

    def _drop_mask(self, given: dict[str, Any], length: int) -> None:
        """Drop masks without effect; refuse the others."""
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            if mask.dim() != 2 or mask.shape[1] != length:
                self._refuse(
                    f"an attention_mask {list(mask.shape)} cannot be split with the tokens: leave it out, and pad on the right"
                )
            real = mask.bool()
            # In a causal model tokens do not see the padding after them.
            behind = self._labels.kind == "shift_labels" and bool((real[:, 1:] <= real[:, :-1]).all())
            targets = self._labels.moved(given)
            counted = targets is None or bool(((targets != IGNORE_INDEX) & ~real).any())
            if not bool(real.all()) and (counted or not behind):
                self._refuse(
                    "attention_mask hides tokens that count in the loss or that others see: pad on the right, with the label "
                    f"{IGNORE_INDEX}, or give sequences of one length"
                )
            given["attention_mask"] = None

    def _documents(self, given: dict[str, Any], rows: int, length: int) -> Documents | None:
        """Return the documents packed into each row; None if rows are not packed."""
        if not self._theirs and not self._own:
            return None
        masked = isinstance(given.get("attention_mask"), Tensor)
        positions = given.get("position_ids")
        if isinstance(positions, Tensor) and positions.dim() == 2 and bool(branch_starts(positions).any()):
            self._refuse(
                "position_ids go back to a token of their document, where a branch continues it (completions that share a "
                "prompt): give each of them a row, or a document, of its own"
            )
        try:
            found = packed_documents(given, rows, length)
        except SpecError as error:
            self._refuse(str(error))
        if found is None:
            return None
        if not self._labels.causal:
            self._refuse("position_ids that do not count the tokens from 0 are for causal models: leave them out")
        if masked:
            self._refuse(
                "position_ids restart at packed documents, but with an attention_mask transformers lets documents see each other: "
                "leave attention_mask out"
            )
        labels = given.get("labels")
        if self._own and isinstance(labels, Tensor) and labels.shape == (rows, length):
            given["labels"] = ignore_document_starts(labels, given["position_ids"])
        return found


def _has_tokens(value: Tensor) -> bool:
    """Return True if a tensor's second dim may be the tokens; in a floating-point matrix it is the features."""
    return value.dim() > 2 or (value.dim() == 2 and not value.is_floating_point())


_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")  # losses in transformers whose labels are not shifted


def next_token_losses(model: nn.Module) -> list[nn.Module]:
    """Return the losses inside of a model that leave labels where they are once their attribute ``shifts`` is False."""
    return [m for m in model.modules() if getattr(m, "causal_lm_loss", False) and hasattr(m, "shifts")]


class Labels:
    """Labels under sequence parallelism.

    Attributes:
        kind: ``"moved"``, ``"shift_labels"`` (moved, and passed as such), ``"as they are"``; "" if the model's loss cannot take
            moved labels.
    """

    def __init__(self, model: nn.Module, written: str) -> None:
        """Args:
        model: whose loss it is.
        written: the spec, for messages.
        """
        self._written = written
        if not hasattr(type(model), "loss_function"):  # not a Hugging Face model
            self.kind = "moved" if next_token_losses(model) else ""
            return
        said = getattr(model, "loss_type", None)
        takes_more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(model.forward).parameters.values())
        moves = said in (None, "ForCausalLM") and takes_more
        self.kind = "as they are" if said in _UNSHIFTED else "shift_labels" if moves else ""

    @property
    def causal(self) -> bool:
        """Return True if each token predicts the next one, as far as known."""
        return self.kind in ("moved", "shift_labels")

    def require(self, name: str) -> None:
        """Raise a SpecError if the model called ``name`` cannot compute a loss of labels that are split over ranks."""
        if self.kind:
            return
        raise SpecError(
            f"{self._written}: the loss inside {name} would shift labels within a part of a sequence; they must be shifted before "
            "the split, and the loss cannot be told so. Let the model return logits and give Engine(..., loss_fn=...), which gets "
            "whole sequences; or let it call a module with the attribute causal_lm_loss = True that does not shift labels while "
            "its attribute shifts is False, such as meshfold.models.loss.CausalLMLoss"
        )

    def moved(self, given: dict[str, Any]) -> Tensor | None:
        """Return what each token of whole sequences should predict: ``b length``; None if the model was given no labels."""
        if isinstance(moved := given.get("shift_labels"), Tensor):
            return moved
        labels = given.get("labels")
        if not isinstance(labels, Tensor):
            return None
        return labels if self.kind == "as they are" else next_tokens(labels, ignore_index=IGNORE_INDEX)

    def shard(self, given: dict[str, Any], sharding: SequenceSharding, rank: int, rows: int) -> Tensor | None:
        """Replace all labels by this rank's.

        Returns:
            This rank's share of the targets that count, float64; None if the model was given no labels.

        Raises:
            SpecError: unless there is one label per token.
        """
        names = ("labels", "shift_labels")
        found = {name: value for name in names if (value := given.pop(name, None)) is not None}
        if not found:
            return None
        self.require("the model")
        for name, value in found.items():
            if not isinstance(value, Tensor) or tuple(value.shape) != (rows, sharding.length):
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise SpecError(
                    f"{self._written}: {name} {shape} for tokens {(rows, sharding.length)}: with a split sequence, give one label "
                    "per token"
                )
        moved = self.moved(found)
        assert moved is not None  # labels were given
        mine = sharding.shard(moved, rank, pad=IGNORE_INDEX)
        given["labels"] = mine
        if self.kind == "shift_labels":
            given["shift_labels"] = mine
        if given.get("num_items_in_batch") is not None:  # the loss is a sum, already divided
            return torch.ones((), dtype=torch.float64, device=mine.device)
        return (mine != IGNORE_INDEX).sum().double() / (moved != IGNORE_INDEX).sum().clamp(min=1)
