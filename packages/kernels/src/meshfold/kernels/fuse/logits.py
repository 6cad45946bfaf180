"""Logits that were not computed: a stand-in for a head's output.

The usual operations of a loss on logits are recorded instead of run: casts, views and slices of rows, a scale, a soft cap.
Cross entropy is computed with the head. Whatever else a program does with them computes them as the head would have, once: with
their gradient if the head was called with gradients enabled, wherever they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshfold.kernels.fuse.logit_operations import FACTS, HANDLERS, PROPERTIES
from meshfold.kernels.fuse.replaced import watcher
from meshfold.kernels.fuse.split_rows import SplitRows, target_weights
from meshfold.kernels.fuse.view_family import ViewFamily, writes
from meshfold.kernels.inputs import compute_dtype
from meshfold.kernels.linear_cross_entropy import (
    Reduction,
    VocabularyShard,
    linear_cross_entropy,
    linear_log_probs,
)

if TYPE_CHECKING:
    from meshfold.kernels.fuse.heads import Head

Operands = tuple[Tensor, Tensor, Tensor | None]
Loss = Callable[[Operands, Tensor], Tensor]  # of a head's operands, and targets
Change = tuple[str, Any]  # "cast" with a dtype, "scale" with a number, "tanh" with None


def in_backward() -> bool:
    """Return True in a backward of torch, which computes again what was checkpointed."""
    return torch._C._current_graph_task_id() != -1


def _refuse_gradient(name: str, gradient: Tensor | None) -> None:
    """Raise a RuntimeError: a stand-in gets a gradient only from code that calls no function of torch with it."""
    if gradient is not None:
        raise RuntimeError(
            f"a torch.autograd.Function, or a checkpoint with use_reentrant=True, was given the logits of {name}, which wait for "
            "their loss: it returns their gradient to nobody, and nothing before them would train. Give it logits.clone(), or have "
            "them computed at once with kernels=dict(loss=False)"
        )


class LazyLogits(Tensor):
    """Logits that were not computed: shape, dtype and device are known, everything else computes them."""

    head: Head
    rows: Tensor  # ``... k``: the head's input
    gathered: SplitRows | None  # where rows are gathered; None: these are logits of the rows that the head is given
    numbers: Tensor | None  # ``... 1``: of these logits among all rows, where rows are gathered
    moved: Tensor | None  # ``... 1``: stands for the rows of these logits where a mode looks, and the head moves rows
    views: tuple[Callable[[Tensor], Tensor], ...]  # from the rows of the head's output to those of these logits, there
    made_in: tuple[int, int]  # numbers of the head's context, see ``closed`` and ``ended`` there
    records: bool  # made with gradients enabled
    family: ViewFamily  # views of the same logits
    changes: tuple[Change, ...]  # elementwise changes of the head's output, in order
    tracked_dims: tuple[Any, ...]  # of the head's output, for the mode that looked at its call; empty: as the rows
    waits_for_loss = True  # for modes that look at tensors: there is no memory to look at
    finish: tuple[Callable[[Tensor], Tensor], ...]  # applied after the changes, when the values are read
    used: bool  # by a view, a cast or a loss, which does not read these values
    _computed: Tensor | None

    @staticmethod
    def make(
        head: Head,
        rows: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        changes: tuple[Change, ...],
        tracked_dims: tuple[Any, ...],
        records: bool = True,
        family: ViewFamily | None = None,
        split: SplitRows | None = None,
    ) -> LazyLogits:
        """Return the logits of rows ``... k`` as ``... v``; ``split``: how the rows lie of a head that gathers them."""
        records = records and torch.is_grad_enabled()
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits,
            shape,
            dtype=dtype,
            device=rows.device,
            requires_grad=records and (rows.requires_grad or head.trains),
        )
        made.head, made.rows, made.changes, made.finish, made._computed = head, rows, changes, (), None
        made.made_in, made.tracked_dims = (head.closed, head.ended), tracked_dims
        made.records, made.family, made.used = records, family or ViewFamily(rows), False
        made.gathered, made.numbers, made.views = split, None if split is None else split.numbers, ()
        made.moved = None
        with torch._C.DisableTorchFunctionSubclass():
            if made.requires_grad:
                made.register_hook(partial(_refuse_gradient, head.name))
        return made

    def values(self) -> Tensor:
        """Return the logits, computed the first time."""
        self.family.check_views(self.head.name, self._computed)
        if self._computed is None:
            self._check_open()
            infers = torch.is_inference_mode_enabled() and not self.records
            with torch.inference_mode(infers), torch.set_grad_enabled(self.records):
                self._computed = self._found()
            self.family.note_computed(self._computed)
        return self._computed

    def _found(self) -> Tensor:
        watched, rows = watcher(), self.rows
        if watched is None or self.head.marks_logits:
            found = self.head.read(rows)
        else:
            found = watched.logits_of(rows, self.shape[-1], lambda: self.head.read(rows))
        for view in self.views:
            found = view(found)
        for what, by in self.changes:
            found = found.to(by) if what == "cast" else found * by if what == "scale" else found.tanh()
        for finish in self.finish:
            found = finish(found)
        return found

    def _loss(self, target: Tensor, ignore_index: int, kept: int | None, loss: Loss) -> Tensor:
        """Run a loss with the head; ``kept``: as for :meth:`Watcher.loss_of`."""
        watched, split, numbers, self.used = watcher(), self.gathered, self.numbers, True
        self.family.check_views(self.head.name)
        self.head.meet_for_loss(target.numel())
        if split is None or numbers is None:
            rows, parts = self.rows if self.moved is None else self.moved, None

            def run() -> Tensor:
                return self.head.loss(self.rows, lambda operands: loss(operands, target))

        else:
            rows, parts = numbers, split.numbers
            split.meet(target.numel())

            def run() -> Tensor:
                labels = split.labels(numbers, target, ignore_index)
                found = self.head.loss(self.rows, lambda operands: loss(operands, labels))
                return split.add_up(found) if kept is None else split.of_rows(numbers, found)

        with torch.set_grad_enabled(self.records and torch.is_grad_enabled()):
            return run() if watched is None else watched.loss_of(rows, target, kept, run, parts)

    def _check_open(self) -> None:
        """Raise a RuntimeError if the head's context has ended, since its weights may have changed, or its input has."""
        self.family.check_rows(self.head.name)
        closed, ended = self.made_in
        if closed != self.head.closed or (ended != self.head.ended and not in_backward()):
            raise RuntimeError(
                f"logits of {self.head.name} are read after their loss was computed, and were never stored: read them where the "
                "loss is computed (in loss_fn; in a loop of your own before engine.step()), or have them computed with "
                "kernels=dict(loss=False)"
            )

    def finished(self, shape: tuple[int, ...], finish: Callable[[Tensor], Tensor]) -> LazyLogits:
        """Return what ``finish`` makes of these logits, of a shape; carried out once the values are read."""
        made = self._like(self.rows, shape, self.dtype, self.changes)
        made.finish = (*self.finish, finish)
        return made

    def joined(self, split: SplitRows, join: Callable[[Tensor], Tensor]) -> LazyLogits | None:
        """Return the logits of all rows, of which these are a rank's; None for a part of the rows that the head gathers.

        Args:
            split: how all rows are split over ranks.
            join: gathers these logits, once values are read.
        """
        inner = self.gathered
        if self.finish or self.moved is not None or (inner is not None and self.numbers is not inner.numbers):
            return None
        shape = (*split.numbers.shape[:-1], self.shape[-1])
        made = self._like(self.rows, shape, self.dtype, self.changes)
        made.gathered = split if inner is None else split.around(inner)
        made.numbers, made.views = split.numbers, (*self.views, join)
        return made

    def changed(self, what: str, by: Any) -> LazyLogits:
        """Return these logits with one more change."""
        dtype = by if what == "cast" else self.dtype
        return self._like(self.rows, tuple(self.shape), dtype, (*self.changes, (what, by)))

    def of_rows(self, take: Callable[[Tensor], Tensor]) -> LazyLogits | None:
        """Return the logits of the rows that ``take`` selects, with the same changes; None if rows differ in their changes."""
        if self.numbers is not None:
            numbers = take(self.numbers)
            shape = (*numbers.shape[:-1], self.shape[-1])
            made = self._like(self.rows, shape, self.dtype, self.changes, self.family)
            made.numbers, made.views = numbers, (*self.views, take)
            return made
        if self.rows.shape[:-1] != self.shape[:-1]:
            return None  # a sharded layer has other rows in its output than in its input
        rows = take(self.rows)
        made = self._like(rows, (*rows.shape[:-1], self.shape[-1]), self.dtype, self.changes, self.family)
        made.moved = None if self.moved is None else take(self.moved)
        return made

    def _like(
        self,
        rows: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        changes: tuple[Change, ...],
        family: ViewFamily | None = None,
    ) -> LazyLogits:
        self.used = True
        made = LazyLogits.make(
            self.head, rows, shape, dtype, changes, self.tracked_dims, self.records, family, self.gathered
        )
        made.made_in, made.numbers, made.views, made.moved = self.made_in, self.numbers, self.views, self.moved
        return made

    def cap(self) -> tuple[float, float]:
        """Return (scale, soft cap) of the changes, ``softcap * tanh(scale * logits / softcap)``; cap 0 for none."""
        scale, cap, bounded = 1.0, 0.0, False
        for what, by in self.changes:
            if what == "tanh":
                bounded = True
            elif what == "scale" and bounded:
                cap = (cap or 1.0) * by
            elif what == "scale":
                scale *= by
        if not bounded:
            return scale, 0.0
        cap = cap or 1.0
        return scale * cap, cap

    def cross_entropy(self, target: Tensor, **options: Any) -> Tensor:
        """Return :meth:`loss` in the dtype of the logits."""
        return self.loss(target, **options).to(self.dtype)

    def loss(
        self,
        target: Tensor,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        class_weights: Tensor | None = None,
        vocabulary: VocabularyShard | None = None,
    ) -> Tensor:
        """Return the cross entropy of logits ``m v`` and targets ``m``, computed with the head; a mean over none is 0.

        It is in the dtype of its sums.

        Args:
            class_weights: ``v``, factors of the losses by their targets, without a gradient; a mean divides by their sum.
            vocabulary: this rank's words; None: all.
        """
        self._check_open()
        scale, softcap = self.cap()
        words = vocabulary or self.head.gathered_words()
        split = self.gathered is not None

        def loss(operands: Operands, targets: Tensor) -> Tensor:
            rows, weight, bias = operands
            weights, dtype = None, compute_dtype(rows)
            if class_weights is not None or (split and reduction == "mean"):
                weights = target_weights(targets, ignore_index, class_weights, dtype)
            if weights is not None and reduction == "mean":  # over the rows of all ranks
                total = target_weights(target, ignore_index, class_weights, dtype).sum()
                weights = weights / torch.where(total > 0, total, 1.0)
            return linear_cross_entropy(
                rows,
                weight,
                targets,
                bias,
                ignore_index=ignore_index,
                scale=scale,
                softcap=softcap,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                reduction="sum" if weights is not None and reduction == "mean" else reduction,
                row_weights=weights,
                vocabulary=words,
            )

        return self._loss(target, ignore_index, 0 if reduction == "none" else None, loss)

    def log_probs(
        self,
        target: Tensor,
        *,
        ignore_index: int = -100,
        temperature: float = 1.0,
        entropy: bool = False,
        vocabulary: VocabularyShard | None = None,
    ) -> Tensor | None:
        """Return the log-probabilities of targets ``m``, and with ``entropy`` the entropies, computed with the head.

        Args:
            target: ``m`` for logits ``m v``.
            ignore_index: target of a row that does not count: both are 0 there.
            temperature: divides the logits.
            entropy: find the entropies too.
            vocabulary: the words of the head where ranks share them.

        Returns:
            ``1 m``, or ``2 m`` with the entropies second; None for a soft cap under a temperature, which must be computed.
        """
        self._check_open()
        scale, softcap = self.cap()
        if softcap and temperature != 1.0:
            return None
        words = vocabulary or self.head.gathered_words()

        def found(operands: Operands, targets: Tensor) -> Tensor:
            rows, weight, bias = operands
            logs, entropies = linear_log_probs(
                rows,
                weight,
                targets,
                bias,
                ignore_index=ignore_index,
                scale=scale / temperature,
                softcap=softcap,
                entropy=entropy,
                vocabulary=words,
            )
            return torch.stack([logs] if entropies is None else [logs, entropies])

        return self._loss(target, ignore_index, 2 if entropy else 1, found)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        first = args[0] if args else None
        if func in FACTS or getattr(func, "__self__", None) in PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if isinstance(first, LazyLogits) and first._computed is None and not first.finish:
            handler = HANDLERS.get(func)
            if handler is not None and (found := handler(first, *args[1:], **given)) is not None:
                return found
        if isinstance(first, LazyLogits) and first.used and func in (Tensor.register_hook, Tensor.retain_grad):
            raise RuntimeError(
                f"{func.__name__} of the logits of {first.head.name} after a view or a loss of them was taken, which wait for "
                "their loss and would not pass it their gradient: call it before, or have the logits computed at once with "
                "kernels=dict(loss=False)"
            )
        args, given = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.values, (args, given))
        if isinstance(first, LazyLogits) and writes(func):
            first.family.keep_written(first.values())
        return func(*args, **given)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func} was called below torch's functions on logits that were not computed: write kernels='off', or "
            "kernels=dict(loss=False), which computes them"
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self._computed is not None:
            return repr(self._computed)
        return f"LazyLogits(size={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.values().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)
