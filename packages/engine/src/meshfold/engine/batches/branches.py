"""Branches in batches of transformers' models: completions that continue the first tokens of their document.

With positions alone such a model takes a branch for a document of its own. Models of transformers whose attention is ``sdpa``
get the positions instead of a mask, as ``b 1 1 s`` integers. They attend within segments
(:func:`meshfold.kernels.segment_attention`). Others get a mask ``b 1 s s``. Models of our own find branches themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshfold.engine.batches.batch import Batch
from meshfold.kernels import Segment, Segments, segment_attention
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import branch_starts, keep_on_host, segments_of, visible

_SEGMENTS = "_meshfold_segments"


class BranchMask:
    """Mask, or positions in its place, that a model of transformers is given for branches."""

    def __init__(self, model: nn.Module) -> None:
        """Args:
        model: says whether it needs anything.
        """
        theirs: Any = next((m for m in model.modules() if hasattr(type(m), "loss_function")), None)
        self._config = getattr(theirs, "config", None)
        self._registry = bool(getattr(theirs, "_supports_attention_backend", False))

    def add(self, batch: Any, work: Batch, dtype: torch.dtype) -> Batch:
        """Return a batch with an attention_mask if it has branches: positions ``b 1 1 s``, or a mask ``b 1 s s``.

        Args:
            batch: as the user gave it, still on the host where it was.
            work: as the model is called with it, on the device.
            dtype: of a mask that is added to scores.

        Raises:
            SpecError: for branches in a model whose attention would not keep to them.
        """
        positions = work.kwargs.get("position_ids")
        if not isinstance(positions, Tensor) or work.kwargs.get("attention_mask") is not None:
            return work
        given = batch.get("position_ids") if isinstance(batch, Mapping) else None
        looked_at = given if isinstance(given, Tensor) else positions
        keep_on_host(positions, looked_at)  # so that nothing waits for the device
        if self._config is None:
            return work
        if looked_at.dim() != 2 or looked_at.is_meta or not bool(branch_starts(looked_at).any()):
            return work
        if (why := no_branches(self._config, int(looked_at.max()) + 1)) is not None:
            raise SpecError(
                f"position_ids go back to a token of their document, where a branch continues it, but {why}: give each "
                "completion a row of its own, as with shared_prompt=False"
            )
        if self._config._attn_implementation == "eager":  # it adds the mask
            seen = visible(positions)[:, None]
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
        elif self._registry:
            _register()
            mask = positions[:, None, None].contiguous()
            mask.__dict__[_SEGMENTS] = _segments(positions)
        else:
            mask = visible(positions)[:, None]
        added = dict(attention_mask=mask)
        form = {**work.given, **added} if isinstance(work.given, Mapping) else work.given
        return replace(work, kwargs={**work.kwargs, **added}, given=form)  # stages of a pipeline read the second


def no_branches(config: Any, length: int) -> str | None:
    """Return why a model of transformers cannot compute branches of a document; None if it can.

    Args:
        config: the model's.
        length: tokens of the longest document with one of its branches.
    """
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation={attention!r} takes no mask of tokens (load the model with attn_implementation='sdpa')"
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    if kinds:
        return f"its layers of {', '.join(kinds)} take no mask of tokens"
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ("sliding_attention",))
    window = getattr(config, "sliding_window", None) if windowed else None
    if window is not None and window < length and getattr(config, "use_sliding_window", True):
        return f"its attention has a window of {window} tokens for documents of {length}, which the mask would replace"
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "rotary") == "alibi":
        return "its attention counts distances by places in the row (alibi)"
    return None


def _segments(positions: Tensor) -> Segments:
    rows = [[Segment(*one) for one in row] for row in segments_of(positions)]
    return Segments(rows, positions.shape[1], positions.device)


def _register() -> None:
    """Let the function ``sdpa`` of transformers' registry take positions ``b 1 1 s`` in the place of a mask, once a process."""
    registry: Any = cast(
        Any, sys.modules["transformers.modeling_utils"]
    ).ALL_ATTENTION_FUNCTIONS  # of the model's class
    before = registry["sdpa"]
    if getattr(before, "takes_positions", False):
        return

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as ``sdpa`` does: ``b heads s d`` -> ``b s heads d``."""
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype not in (torch.int64, torch.int32):
            found: tuple[Tensor, Tensor | None] = before(module, query, key, value, attention_mask, *args, **others)
            return found
        within = _within_segments if _known_segments(attention_mask) is None else _attend
        return within(module, query, key, value, attention_mask, *args, **others), None

    attend.takes_positions = True  # type: ignore[attr-defined]
    registry["sdpa"] = attend


def _known_segments(positions: Tensor) -> Segments | None:
    found: Segments | None = getattr(
        positions, _SEGMENTS, None
    )  # not by __dict__: torch.compile reads attributes alone
    return found


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> Tensor:
    """Attend within segments: ``b heads s d``, positions ``b 1 1 s`` -> ``b s heads d``.

    Raises:
        SpecError: for attention that is not causal, or of another kind.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = [name for name in ("softcap", "position_bias", "s_aux", "cache") if others.get(name) is not None]
    if dropout or not causal or unknown:
        what = "dropout of its weights" if dropout else ", ".join(unknown) or "tokens that see later ones"
        raise SpecError(
            f"position_ids go back to a token of their document, but attention of {type(module).__name__} has {what}: give each "
            "completion a row of its own, as with shared_prompt=False"
        )
    segments = _known_segments(positions)
    if segments is None:  # rows of the batch, as of a micro-batch
        segments = positions.__dict__[_SEGMENTS] = _segments(positions[:, 0, 0])
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return segment_attention(q, k, v, segments, scaling)


_within_segments = torch.compiler.disable(_attend)
