"""Any model's attention over a split sequence, without a file per model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.tracking import track_forwards, untracked
from meshfold.sequence import hugging_face
from meshfold.sequence.attention_call import (
    AttentionMode,
    AttentionSettings,
    Documents,
    ModeAroundModules,
    documents_by_row,
)
from meshfold.sequence.dropout import DrawDropout
from meshfold.sequence.layout_tracking import ShardedSequenceLayout
from meshfold.sequence.sharding import sequence_mode
from meshfold.sequence.token_shards import positions


class SequenceParallel:
    """Handle of a model that :func:`sequence_parallel` changed: ``remove()`` or the end of a ``with`` undoes the change."""

    def __init__(self, model: nn.Module, settings: AttentionSettings) -> None:
        self._settings = settings
        self._local = 0  # this rank's tokens in the last forward, for its recomputation
        self._attended = False  # in this forward; not a count, which would be a guard of compiled blocks
        self._signature = inspect.signature(model.forward)
        self._takes_positions = "position_ids" in self._signature.parameters
        self._numbers_itself = hugging_face.positions_from_ids(model) is not None
        self._shifts_labels = getattr(model, "loss_type", "") == "ForCausalLM" or any(
            getattr(module, "causal_lm_loss", False) and getattr(module, "shifts", True) for module in model.modules()
        )
        self._changes: list[Any] = []
        self._tracked = ShardedSequenceLayout(settings.mesh, sequence_mode(settings.mode, settings.mesh).axes)
        theirs = hugging_face.parts(model)
        self._swaps = theirs != [model]
        with ExitStack() as refused:  # undo the changes if the model is refused
            refused.callback(self.remove)
            self._changes.append(_Undo(track_forwards(model, self._tracked)))
            self._changes.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._changes.append(model.register_forward_hook(self._end))
            for part in theirs:
                self._changes.append(hugging_face.Registered(part, self._asked))
            masks = _NoMasks(model)
            self._changes.append(masks)
            if settings.window is None:
                self._settings = replace(settings, window=masks.window)
            if self._swaps:
                self._changes.append(ModeAroundModules(model, self._swap))
            refused.pop_all()

    def set_batch(self, *, length: int | None = None, documents: Documents | None = None) -> None:
        """Set ``length`` and ``documents`` for the batches from now on."""
        self._settings = self._settings.with_batch(length, documents)

    def again(self) -> AbstractContextManager[None]:
        """Return the context manager for repeating a part of the current forward that is not a module's own.

        For recomputation of activations; may be entered any number of times.
        """
        return _Again(self, self._settings, self._local)

    def remove(self) -> None:
        """Restore the model."""
        for change in self._changes:
            change.remove()
        self._changes.clear()

    def __enter__(self) -> SequenceParallel:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        tokens = next((x for x in given.values() if isinstance(x, Tensor) and x.dim() >= 2), None)
        if tokens is None:
            raise LayoutError(
                "sequence_parallel looks for this rank's tokens, [b, s] or [b, s, h], among the model's arguments, and there "
                "are none: call the model with a batch"
            )
        if self._shifts_labels and given.get("labels") is not None and given.get("shift_labels") is None:
            raise LayoutError(
                "the model shifts labels by one token, which is impossible in a shard of a sequence: shift them before sharding, "
                "by next_tokens(labels), and give the model shift_labels= and num_items_in_batch= as well (Hugging Face), or "
                "compute the loss from its logits by loss_share(logits, targets, mesh, mode)"
            )
        self._local, self._attended = tokens.shape[1], False
        self._tracked.mark_arguments(given.values(), self._local)
        if not self._takes_positions or given.get("position_ids") is not None:
            return None
        if self._numbers_itself:
            raise LayoutError(
                f"{type(model).__name__} numbers its tokens by its padding_idx, and has a part of a sequence here: give "
                "position_ids of the whole sequence, cut by shard_sequence"
            )
        return args, {**kwargs, "position_ids": self._positions(tokens.device)}

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._attended:
            raise LayoutError(
                f"{type(model).__name__} made no attention call that sequence_parallel could intercept, so each rank saw only its "
                "own tokens: let it call torch.nn.functional.scaled_dot_product_attention"
            )

    def _swap(self) -> AttentionMode:
        return AttentionMode(self._asked, self._counted, self._marked)

    def _asked(self) -> AttentionSettings:
        """Return the settings of a call of attention."""
        self._attended = True
        return self._settings

    def _counted(self, n: int) -> Tensor | None:
        """Return the positions for an arange of n tokens in a model without ``position_ids``."""
        if self._takes_positions or n != self._local:
            return None
        found = self._positions("cpu")
        if found.shape[0] > 1:
            raise LayoutError(
                "the model counts positions once for all rows, but rows have different documents: pack all rows alike"
            )
        return found[0]

    def _marked(self, positions: Tensor) -> Tensor:
        self._tracked.positions(positions)
        return positions

    def _positions(self, device: torch.device | str) -> Tensor:
        """Return the positions: ``rows local``, or ``1 local`` if all rows have the same."""
        s = self._settings
        length = s.length or self._local * s.mesh.size(*sequence_mode(s.mode, s.mesh).axes)
        rows: list[tuple[int, ...] | None] = [*documents_by_row(s.documents)]
        with untracked():
            made = torch.stack(
                [
                    positions(length, s.mesh, s.mode, order=s.order, documents=row, device=device)
                    for row in rows or [None]
                ]
            )
        self._tracked.positions(made)
        return made


class _Undo:
    """Handle whose ``remove`` calls a function."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


class _NoMasks:
    """Switches off the causal masks of modules that make them for whole sequences (``makes_masks = True``).

    Attributes:
        window: the window of these masks; None if they have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._masks = [module for module in model.modules() if getattr(module, "makes_masks", False)]
        windows = {getattr(module, "window", None) for module in self._masks}
        if len(windows) > 1:
            raise LayoutError(
                f"the model's masks have the windows {sorted(map(str, windows))}, but attention over a split sequence has one "
                "for all layers: use the same window everywhere"
            )
        self.window: int | None = next(iter(windows), None)
        for module in self._masks:
            module.__dict__["makes_masks"] = False

    def remove(self) -> None:
        """Restore the modules."""
        for module in self._masks:
            module.__dict__["makes_masks"] = True


class _Again:
    """A repeated part of a forward, with its original batch."""

    def __init__(self, parallel: SequenceParallel, settings: AttentionSettings, local: int) -> None:
        self._parallel, self._batch = parallel, (settings, local)
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        now = self._parallel._settings, self._parallel._local
        with ExitStack() as stack:
            stack.callback(self._say, *now)
            self._say(*self._batch)
            if self._parallel._swaps:
                stack.enter_context(self._parallel._swap())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()

    def _say(self, settings: AttentionSettings, local: int) -> None:
        self._parallel._settings, self._parallel._local = settings, local


def sequence_parallel(
    model: nn.Module,
    mesh: Mesh,
    mode: str | Callable[..., object] = "ring",
    *,
    causal: bool | None = None,
    window: int | None = None,
    documents: Documents | None = None,
    length: int | None = None,
    order: str | None = None,
    kernel: str = "auto",
    draw: DrawDropout | None = None,
) -> SequenceParallel:
    """Let the model compute on this rank's tokens and attend to the whole sequence, from now on or inside a ``with``.

    Models of Hugging Face's transformers get an attention through its registry; in every other model
    ``torch.nn.functional.scaled_dot_product_attention`` is replaced inside of its forward, activation checkpointing included. Each
    rank's positions are passed as ``position_ids`` if the model takes them. Otherwise ``torch.arange(n)`` for the n tokens of the
    rank counts the right positions in its forward.

    Call the model with tokens sharded by :func:`meshfold.sequence.shard_sequence`. Labels have to be moved by one token
    before they are sharded. Gradients of the parameters are to be summed over the sequence axes.

    Args:
        model: any module with self-attention; its attention dropout must be 0 unless ``draw`` is given.
        mesh, mode, order, kernel: as in :func:`meshfold.sequence.attention`.
        causal: None: the model decides at each call; if given, it replaces the model's own masks.
        window: None: the model's own (Hugging Face's ``sliding_window``, our models' ``window``).
        documents: cumulative lengths of packed documents, one for all rows, or one for each row (then rows attend one after
            another). Positions restart at each document.
        length: tokens of the whole sequence if it does not divide evenly; ``set_batch`` changes it for other batches.
        draw: returns the dropout of each attention call with dropout; called with queries ``b heads s d`` and the share.

    Raises:
        LayoutError: for an unknown mode or a mesh that does not fit; in the forward, for anything that
            attention over a split sequence cannot do.
    """
    sequence_mode(mode, mesh)
    return SequenceParallel(
        model,
        AttentionSettings(
            mesh=mesh,
            mode=mode,
            causal=causal,
            window=window,
            documents=documents,
            length=length,
            order=order,
            kernel=kernel,
            draw=draw,
        ),
    )
