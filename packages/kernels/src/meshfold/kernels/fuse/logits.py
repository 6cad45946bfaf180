"""Logits that were not computed: a stand-in for a head's output.

The usual operations of a loss on logits are recorded instead of run: casts, views and slices of rows, a scale, a soft cap.
Cross entropy is computed with the head. Whatever else a program does with them computes them as the head would have, once: with
their gradient if the head was called with gradients enabled, wherever they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.kernels.fuse.replaced import watcher
from meshfold.kernels.fuse.view_family import ViewFamily, writes
from meshfold.kernels.linear_cross_entropy import (
    Reduction,
    VocabularyShard,
    linear_cross_entropy,
    linear_log_probs,
)

if TYPE_CHECKING:
    from meshfold.kernels.fuse.heads import Head

Operands = tuple[Tensor, Tensor, Tensor | None]
Change = tuple[str, Any]  # "cast" with a dtype, "scale" with a number, "tanh" with None


class LazyLogits(Tensor):
    """Logits that were not computed: shape, dtype and device are known, everything else computes them."""

    head: Head
    rows: Tensor  # ``... k``: the head's input
    made_in: int  # number of the head's context
    records: bool  # made with gradients enabled
    family: ViewFamily  # views of the same logits
    changes: tuple[Change, ...]  # elementwise changes of the head's output, in order
    tracked_dims: tuple[Any, ...]  # of the head's output, for the mode that looked at its call; empty: as the rows
    waits_for_loss = True  # for modes that look at tensors: there is no memory to look at
    finish: tuple[Callable[[Tensor], Tensor], ...]  # applied after the changes, when the values are read
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
    ) -> LazyLogits:
        """Return the logits of rows ``... k`` as ``... v``."""
        records = records and torch.is_grad_enabled()
        made: LazyLogits = torch.Tensor._make_wrapper_subclass(
            LazyLogits,
            shape,
            dtype=dtype,
            device=rows.device,
            requires_grad=records and (rows.requires_grad or head.trains),
        )
        made.head, made.rows, made.changes, made.finish, made._computed = head, rows, changes, (), None
        made.made_in, made.tracked_dims = head.closed, tracked_dims
        made.records, made.family = records, family or ViewFamily(rows)
        return made

    def values(self) -> Tensor:
        """Return the logits, computed the first time."""
        self.family.check_views(self.head.name, self._computed)
        if self._computed is None:
            self._check_open()
            self.head.reads += 1
            infers = torch.is_inference_mode_enabled() and not self.records
            with torch.inference_mode(infers), torch.set_grad_enabled(self.records):
                self._computed = self._found()
            self.family.note_computed(self._computed)
        return self._computed

    def _found(self) -> Tensor:
        watched, rows = watcher(), self.rows
        if watched is None or self.head.marks_logits:
            found = self.head.logits(rows)
        else:
            found = watched.logits_of(rows, self.shape[-1], lambda: self.head.logits(rows))
        for what, by in self.changes:
            found = found.to(by) if what == "cast" else found * by if what == "scale" else found.tanh()
        for finish in self.finish:
            found = finish(found)
        return found

    def _loss(self, target: Tensor, kept: int | None, loss: Callable[[Operands], Tensor]) -> Tensor:
        """Run a loss with the head."""
        watched, rows = watcher(), self.rows
        self.family.check_views(self.head.name)
        with torch.set_grad_enabled(self.records and torch.is_grad_enabled()):
            if watched is None:
                return self.head.loss(rows, loss)
            return watched.loss_of(rows, target, kept, lambda: self.head.loss(rows, loss))

    def _check_open(self) -> None:
        """Raise a RuntimeError if the head's context has ended, since its weights may have changed, or its input has."""
        self.family.check_rows(self.head.name)
        if self.made_in != self.head.closed:
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

    def changed(self, what: str, by: Any) -> LazyLogits:
        """Return these logits with one more change."""
        dtype = by if what == "cast" else self.dtype
        return self._like(self.rows, tuple(self.shape), dtype, (*self.changes, (what, by)))

    def of_rows(self, take: Callable[[Tensor], Tensor]) -> LazyLogits | None:
        """Return the logits of the rows that ``take`` selects, with the same changes; None if rows differ in their changes."""
        if self.rows.shape[:-1] != self.shape[:-1]:
            return None  # a sharded layer has other rows in its output than in its input
        rows = take(self.rows)
        return self._like(rows, (*rows.shape[:-1], self.shape[-1]), self.dtype, self.changes, self.family)

    def _like(
        self,
        rows: Tensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        changes: tuple[Change, ...],
        family: ViewFamily | None = None,
    ) -> LazyLogits:
        made = LazyLogits.make(self.head, rows, shape, dtype, changes, self.tracked_dims, self.records, family)
        made.made_in = self.made_in
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
        vocabulary: VocabularyShard | None = None,
    ) -> Tensor:
        """Return the cross entropy of logits ``m v`` and targets ``m``, computed with the head; a mean over none is 0.

        It is in the dtype of its sums. ``vocabulary``: this rank's words; None: all.
        """
        self._check_open()
        scale, softcap = self.cap()
        words = vocabulary or self.head.gathered_words()

        def loss(operands: Operands) -> Tensor:
            rows, weight, bias = operands
            return linear_cross_entropy(
                rows,
                weight,
                target,
                bias,
                ignore_index=ignore_index,
                scale=scale,
                softcap=softcap,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                reduction=reduction,
                vocabulary=words,
            )

        return self._loss(target, 0 if reduction == "none" else None, loss)

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

        def found(operands: Operands) -> Tensor:
            rows, weight, bias = operands
            logs, entropies = linear_log_probs(
                rows,
                weight,
                target,
                bias,
                ignore_index=ignore_index,
                scale=scale / temperature,
                softcap=softcap,
                entropy=entropy,
                vocabulary=words,
            )
            return torch.stack([logs] if entropies is None else [logs, entropies])

        return self._loss(target, 2 if entropy else 1, found)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        first = args[0] if args else None
        if func in _FACTS or getattr(func, "__self__", None) in _PROPERTIES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **given)
        if isinstance(first, LazyLogits) and first._computed is None and not first.finish:
            handler = _HANDLERS.get(func)
            if handler is not None and (found := handler(first, *args[1:], **given)) is not None:
                return found
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


# Functions and properties that need no values.
_FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_contiguous,
    torch.is_floating_point,
    torch.numel,
    torch.is_complex,
}
_PROPERTIES = tuple(
    getattr(Tensor, name)
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_cuda",
        "is_meta",
        "is_cpu",
        "is_leaf",
        "layout",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
    )
)


def _cast(logits: LazyLogits, dtype: Any = None, *rest: Any, **given: Any) -> LazyLogits | None:
    """``Tensor.to`` and ``Tensor.type`` with only a dtype."""
    if rest or set(given) - {"dtype"}:
        return None
    dtype = given.get("dtype", dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return logits if dtype == logits.dtype else logits.changed("cast", dtype)


def _cast_to(dtype: torch.dtype) -> Callable[..., LazyLogits | None]:
    return lambda logits, *args, **given: None if args or given else _cast(logits, dtype)


def _view(logits: LazyLogits, *shape: Any, **given: Any) -> LazyLogits | None:
    """``Tensor.view`` and ``reshape`` that keep the last dim."""
    if given:
        return None
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype) or not sizes or len(sizes) < 2:
        return None
    words, lead = logits.shape[-1], [int(size) for size in sizes[:-1]]
    count = math.prod(logits.shape[:-1])
    if lead.count(-1) == 1 and sizes[-1] == words:
        known = math.prod(size for size in lead if size != -1)
        if not known or count % known:
            return None
        lead[lead.index(-1)] = count // known
    elif sizes[-1] not in (-1, words) or -1 in lead:
        return None
    if math.prod(lead) != count:
        return None
    return logits.of_rows(lambda rows: rows.reshape(*lead, rows.shape[-1]))


def _flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> LazyLogits | None:
    ndim = logits.ndim
    start, end = start_dim % ndim, end_dim % ndim
    return None if end >= ndim - 1 else logits.of_rows(lambda rows: rows.flatten(start, end))


def _index(logits: LazyLogits, index: Any) -> LazyLogits | None:
    """Slices of the rows; the vocabulary stays whole."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or isinstance(entry, slice) for entry in entries):
        return None
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        middle = (slice(None),) * (logits.ndim - len(entries) + 1)
        entries = (*entries[:at], *middle, *entries[at + 1 :])
    if len(entries) == logits.ndim:
        last = entries[-1]
        if last not in (
            slice(None),
            slice(0, None),
            slice(None, logits.shape[-1]),
            slice(0, logits.shape[-1]),
        ):
            return None
        entries = entries[:-1]
    return logits.of_rows(lambda rows: rows[entries])


def _same(logits: LazyLogits, **given: Any) -> LazyLogits | None:
    return None if given else logits


def _times(logits: LazyLogits, other: Any) -> LazyLogits | None:
    return logits.changed("scale", float(other)) if isinstance(other, int | float) else None


def _over(logits: LazyLogits, other: Any) -> LazyLogits | None:
    return logits.changed("scale", 1.0 / other) if isinstance(other, int | float) and other else None


def _tanh(logits: LazyLogits) -> LazyLogits | None:
    return logits.changed("tanh", None) if not any(what == "tanh" for what, _ in logits.changes) else None


def _cross_entropy(
    input: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if weight is not None or size_average is not None or reduce is not None or input.head.is_followed:
        return None
    if input.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    if target.shape[0] != input.shape[0] or reduction not in ("mean", "sum", "none"):
        return None  # torch raises its own error
    return input.cross_entropy(
        target,
        ignore_index=ignore_index,
        reduction=reduction,  # checked
        label_smoothing=label_smoothing,
    )


_HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.float: _cast_to(torch.float32),
    Tensor.double: _cast_to(torch.float64),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.to: _cast,
    Tensor.type: _cast,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.contiguous: _same,
    Tensor.__getitem__: _index,
    Tensor.mul: _times,
    Tensor.__mul__: _times,
    Tensor.__rmul__: _times,
    torch.mul: _times,
    Tensor.div: _over,
    Tensor.__truediv__: _over,
    torch.div: _over,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
}
