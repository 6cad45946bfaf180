"""Prompts that several completions share, computed once: whether a model can, and how many tokens that saves.

The completions of a pair, or of a group, lie behind their prompt in one row (:func:`meshfold.align.rows.pair_rows`,
:func:`meshfold.align.rows.group_rows`). Attention has to keep them apart, within segments
(:func:`meshfold.kernels.segment_attention`) or by a mask (:func:`meshfold.mesh.model_io.visible`). Models that take
neither keep a row, or a document, for each completion.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from meshfold.align.log_probs import TokenValues
from meshfold.align.records import Completion
from meshfold.align.rows import shared_tokens
from meshfold.engine import Engine
from meshfold.engine.batches import no_branches
from meshfold.mesh import SpecError

_MASKED = 3.0
"""time of attention with a mask for each score of causal attention without one, which computes half of them faster"""

What = Literal["pair", "group"]


class SharedPrompts:
    """Decision whether completions share their prompt, and count of the tokens of rows; ``str()`` is a sentence for a report.

    Attributes:
        on: prompts are computed once.
        why_not: the reason if they are not; "" if that was asked for.
        tokens: of rows so far, each counted once, padding left out.
        unshared_tokens: number of tokens of the same completions without sharing.
    """

    def __init__(self, asked: object, engine: Engine, what: What, *, longest: int) -> None:
        """Args:
            asked: True, False, or ``"auto"``: if the model can.
            engine: of the policy.
            what: completions of a row.
            longest: most tokens of a prompt with a completion.

        Raises:
            SpecError: for another value, or True for a model that cannot.
        """
        if not (isinstance(asked, bool) or asked == "auto"):
            raise SpecError(f"shared_prompt={asked!r}: use 'auto', True or False")
        self.why_not = "" if asked is False else (_why_not(engine, longest) or "")
        if asked is True and self.why_not:
            raise SpecError(f"shared_prompt=True, but {self.why_not}: write shared_prompt='auto' or False")
        self.on = asked is not False and not self.why_not
        self._what, self._asked = what, asked
        self._hidden, self._masked = _hidden(engine), _takes_mask(engine)
        self.tokens = self.unshared_tokens = 0

    def refuse(self, why: str) -> None:
        """Turn sharing off, for a reason that the trainer gives.

        Raises:
            SpecError: if sharing was asked for with True.
        """
        if self._asked is True:
            raise SpecError(f"shared_prompt=True, but {why}: write shared_prompt='auto' or False")
        if self._asked is not False:
            self.on, self.why_not = False, self.why_not or why

    def shares(self, groups: Sequence[Sequence[Completion]]) -> bool:
        """Return whether the completions of a step share their prompts, and count their tokens.

        ``"auto"`` shares among groups where that takes less time. Attention within segments always does
        (:func:`meshfold.kernels.segment_attention`); in a long row with a mask it may take more.
        """
        alone = [[len(one.ids) for one in group] for group in groups]
        together = [
            sum(sizes) - (len(group) - 1) * max(shared_tokens(group) - 1, 0)
            for group, sizes in zip(groups, alone, strict=True)
        ]
        on = self.on
        if on and self._asked == "auto" and self._what == "group" and self._masked:
            # A layer's linear maps take about 24 h² operations a token, its attention 2 s h for causal scores.
            h = self._hidden
            row = max(together)
            shared = sum(together) * (24 * h * h + 4 * _MASKED * row * h)
            on = shared < sum(size * (24 * h * h + 2 * size * h) for sizes in alone for size in sizes)
            self.why_not = "" if on else f"attention over rows of {row} tokens would take longer than the prompts do"
        self.tokens += sum(together) if on else sum(map(sum, alone))
        self.unshared_tokens += sum(map(sum, alone))
        return on

    def __str__(self) -> str:
        if not self.on or self.why_not:
            return f"prompts are computed for each completion{': ' if self.why_not else ''}{self.why_not}"
        if not self.unshared_tokens:
            return f"prompts are computed once per {self._what}"
        return (
            f"prompts are computed once per {self._what}: {self.tokens:,} tokens instead of {self.unshared_tokens:,} "
            f"({1 - self.tokens / self.unshared_tokens:.0%} saved)"
        )


def unfolded(values: TokenValues, batch: Mapping[str, Any]) -> tuple[TokenValues, dict[str, Any]]:
    """Return the values and the batch of groups with a row for each completion, as of rows that share nothing.

    Args:
        values: ``b s``.
        batch: with ``places``, ``b group length``; what else begins with ``b group`` gets rows too. Without ``places``
            it is returned as it is.
    """
    if "places" not in batch:
        return values, dict(batch)
    places: Tensor = batch["places"].to(batch["labels"].device)
    length = batch["labels"].shape[1]
    there = (places >= 0) & (places < length)
    at = torch.where(there, places, 0).flatten(1)

    def take(value: Tensor, fill: float) -> Tensor:
        found = value.to(at.device).gather(1, at).view(places.shape)
        return torch.where(there, found, fill).flatten(0, 1)

    made = {
        name: value.flatten(0, 1) if isinstance(value, Tensor) and value.shape[:2] == places.shape[:2] else value
        for name, value in batch.items()
        if name not in ("places", "labels", "input_ids", "position_ids")
    }
    made["labels"] = take(batch["labels"], -100)
    device = values.log_probs.device
    at, there = at.to(device), there.to(device)
    entropy = None if values.entropy is None else take(values.entropy, 0.0)
    return replace(values, log_probs=take(values.log_probs, 0.0), entropy=entropy), made


def _why_not(engine: Engine, longest: int) -> str | None:
    """Return why an engine's model cannot compute completions behind a shared prompt; None if it can."""
    model: Any = engine.model
    if engine.spec.sequence is not None:
        return "under 'sequence' attention keeps documents apart, and no branches of one"
    if any(hasattr(module, "makes_masks") for module in model.modules()):
        return None
    theirs: Any = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
    if theirs is None:
        return f"{type(model).__name__} makes no mask for completions of one prompt"
    if "position_ids" not in inspect.signature(type(theirs).forward).parameters:
        return f"{type(theirs).__name__} takes no position_ids"
    if getattr(theirs, "_is_stateful", False):
        return f"{type(theirs).__name__} has layers with a state that passes from token to token"
    return no_branches(theirs.config, longest)


def _takes_mask(engine: Engine) -> bool:
    """Return True if the attention of an engine's model gets a mask for completions of one prompt, and no segments."""
    modules = list(engine.model.modules())
    if any(hasattr(module, "makes_masks") for module in modules):
        return any(getattr(module, "window", None) is not None for module in modules)
    theirs: Any = next((module for module in modules if hasattr(type(module), "loss_function")), None)
    kind = getattr(getattr(theirs, "config", None), "_attn_implementation", None)
    return kind != "sdpa" or not getattr(theirs, "_supports_attention_backend", False)


def _hidden(engine: Engine) -> int:
    configs = (getattr(module, "config", None) for module in engine.model.modules())
    sizes = (getattr(c, "hidden_size", None) or getattr(c, "hidden", None) for c in configs if c is not None)
    return next((int(size) for size in sizes if size), 1)
