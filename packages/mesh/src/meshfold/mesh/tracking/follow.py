"""Tracks split dims through a model's own code during a forward, and refuses operations that would mix them.

Sharded layers mark the layouts of their results (:meth:`Tracker.mark`); every torch operation between them propagates these by a
rule, or by a trial if it has no rule. Within :func:`untracked`, where ranks communicate, nothing is tracked.

Gradients are checked as well. Backward gives each rank the gradient of its own piece, and a tensor that is the same on all ranks
needs the sum of these. Split layers do the sums that they need; a model's own code does not.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.mesh.errors import LayoutError
from meshfold.mesh.tracking import indexing, mixing, views
from meshfold.mesh.tracking.broadcast import alike, pointwise
from meshfold.mesh.tracking.call import Call, Rule, as_list, bind_arguments, tensors_in, written_tensors
from meshfold.mesh.tracking.dims import (
    ALIKE,
    Dims,
    Factor,
    MixesError,
    Split,
    any_split,
    axes_in,
    axes_of,
    is_split,
    is_whole,
    unknown_dims,
    whole,
)
from meshfold.mesh.tracking.probing import try_on_pieces
from meshfold.mesh.tracking.records import Records
from meshfold.mesh.tracking.rows import Rows
from meshfold.mesh.tracking.size_source import given_to

_LIKE = (
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like bernoulli fill zero alias detach "
    "lift_fresh native_dropout _fused_dropout normal uniform exponential random set_data"
)
_RULES: dict[str, Rule] = {
    **views.RULES,
    **mixing.RULES,
    **indexing.RULES,
    **dict.fromkeys(_LIKE.split(), alike),
    **dict.fromkeys(("_to_copy", "where", "lerp", "addcmul", "addcdiv", "dropout"), pointwise),
}
_NEW = (
    "new_empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty_strided",
    "sym_size",
    "size",
    "is_same_size",
    "record_stream",
    "resize",
)
_OURS = ("c10d", "_c10d_functional", "meshfold", "profiler", "prim", "inductor")


class Tracker(TorchDispatchMode):
    """One tracked forward.

    Attributes:
        module: names the module whose forward runs, for messages.
        remedy: what to write instead, from the axes.
        token_split: how the tokens of a sequence are split over ranks; None if they are not.
        local_tokens: tokens of a sequence that a rank has.
        moved: the dims that tokens had before layers moved them to other ranks, by the number of the move less 1.
        flat: the residual stream has its tokens in one dim, where the model's code expects two.
        random_axes: axes along which ranks have the same data, or parts of it, and may draw different random numbers.
        overlooked: ends of the names of files whose operations may mix shards: they count the rows that they have, and other
            results are not used.
        inferred: which size of the ``unflatten`` under way the user has left open.
        asked: the sizes of the current view, as written.
        rows: where tensors have the rows of the batch.
        makes_loss: a head runs for its loss, and returns that.
        wants_own_operations: True: fused kernels (meshfold.kernels.fuse) leave the operations to the model inside.
    """

    wants_own_operations = True

    def __init__(
        self,
        *,
        module: Callable[[], str] = str,
        remedy: Callable[[tuple[str, ...]], str] = lambda axes: "",
        parameter_dims: Callable[[Tensor], Dims | None] = lambda parameter: None,
        reads_shapes: Callable[[nn.Module], bool] = lambda module: False,
        made_later: Callable[
            [Tracker, nn.Module, Tensor, tuple[int, ...]], Dims | None
        ] = lambda tracker, module, x, shape: None,
        summed_later: Callable[
            [Tracker, nn.Module, Tensor, Dims], Iterable[str]
        ] = lambda tracker, module, x, layout: (),
    ) -> None:
        """Args:
        module, remedy: see above.
        parameter_dims: returns the layout of a parameter that is sharded; None for one that is whole.
        reads_shapes: returns True for a module that reads nothing but the shape of a floating-point input.
        made_later: returns the layout of the logits that a head will make; None if it must make them at once.
        summed_later: returns the axes along which ranks have parts of the gradient of such logits, which its head sums.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.records, self.rows = Records(parameter_dims, waiting=True), Rows(_RULES)
        self.module, self.remedy, self._reads_shapes = module, remedy, reads_shapes
        self._made_later, self._summed_later = made_later, summed_later
        self.token_split: Split | None = None
        self.local_tokens = 0
        self.inferred: int | None = None
        self.asked: list[int] | None = None
        self.flat = False
        self.moved: list[Dims] = []
        self.random_axes: tuple[str, ...] = ()
        self.overlooked: tuple[str, ...] = ()
        self._off = self._apart = 0
        self.makes_loss = False

    @property
    def is_off(self) -> bool:
        """True while operations are not tracked."""
        return self._off > 0

    def dims(self, tensor: Tensor) -> Dims:
        """Return the layout of a tensor."""
        return self.records.dims(tensor)

    def mark(self, tensor: Tensor, dims: Dims) -> None:
        """Set the layout of a tensor."""
        self.records.put(tensor, dims)

    def refuse(self, name: str, why: str, *tensors: Tensor, axes: tuple[str, ...] = ()) -> NoReturn:
        """Raise the LayoutError of an operation that mixes shards."""
        raise refusal(name, why, tensors, self.module(), self.remedy(axes))

    @contextmanager
    def untracked(self, *, rows: bool = False) -> Iterator[None]:
        """Context manager: operations are not tracked; with ``rows`` the batch's rows are followed all the same."""
        self._off += 1
        self._apart += not rows
        try:
            yield
        finally:
            self._off -= 1
            self._apart -= not rows

    @contextmanager
    def asking(self, sizes: list[int] | None) -> Iterator[None]:
        """Context manager: a view asks for these sizes, as the model's code writes them."""
        before, self.asked = self.asked, sizes
        try:
            yield
        finally:
            self.asked = before

    def _open_alike(self, operands: Iterable[Tensor]) -> None:
        """Mark dims of whole operands whose elements are all equal: transformers expands constants to a rank's rows."""
        for x in operands:
            dims = self.dims(x)
            if all(map(is_whole, dims)):
                alike = [n > 1 and self.records.is_alike(x, place) for place, n in enumerate(x.shape)]
                self.mark(x, _alike_at(alike, x.shape))

    def layout_later(self, head: nn.Module, x: Tensor, shape: tuple[int, ...]) -> Dims | None:
        """Return the layout of the logits of a shape that a head will make of rows ``... k``; None: it must make them at once."""
        return None if self.is_off else self._made_later(self, head, x, shape)

    def logits_of(self, rows: Tensor, words: int, run: Callable[[], Tensor]) -> Tensor:
        """Run a head on rows ``... k``, for ``words`` logits of each."""
        return (
            run() if self.is_off else self.as_one("linear", [rows], lambda: (*self.dims(rows)[:-1], whole(words)), run)
        )

    def moves_rows(self, x: Tensor, layout: Dims) -> bool:
        """Return True if logits of ``x`` with a layout have other rows than ``x`` on the same rank."""
        return not self.is_off and layout[:-1] != self.dims(x)[:-1]

    def gathered_later(self, head: nn.Module, x: Tensor, numbers: Tensor, layout: Dims) -> None:
        """Note the numbers ``... 1`` of the rows that a head gathers or moves for logits of ``x`` with a layout."""
        self.mark(numbers, (*layout[:-1], whole(1)))
        self.records.vary([numbers])
        self.records.sum_over([numbers], self._summed_later(self, head, x, layout))

    def loss_of(
        self, rows: Tensor, target: Tensor, kept: int | None, run: Callable[[], Tensor], parts: Tensor | None = None
    ) -> Tensor:
        """Run a head and its loss on rows ``m k`` and targets ``m``.

        Args:
            rows, target: the operands; rows that a head gathers are given by their numbers, ``m 1``.
            kept: None for a sum over rows; else the number of results of a row, stacked in front of them (0: not stacked).
            run: runs both.
            parts: the numbers of all rows that the head gathers: ranks have parts of their gradient.

        Raises:
            LayoutError: if rows and targets are split in different ways, or something else than tokens is summed.
        """

        def found() -> Dims:
            row, label = self.dims(rows)[0], self.dims(target)[0]
            left = indexing.loss_of_rows((row,), (label,), sums=kept is None)
            return left if not kept else (whole(kept), *left)

        self.makes_loss = True
        try:
            if self.is_off:
                with self.untracked():
                    return run()
            out = self.as_one("cross_entropy", [rows, target], found, run, rows=False)
            if parts is not None and (summed := self.records.summed(parts)):
                self.records.sum_over([out], summed)
            return out
        finally:
            self.makes_loss = False

    def as_one(
        self,
        name: str,
        operands: list[Tensor],
        found: Callable[[], Dims],
        run: Callable[[], Tensor],
        *,
        rows: bool = True,
    ) -> Tensor:
        """Run a call of several operations whose result has a known layout; ``rows``: its operations may be followed by rows.

        Raises:
            LayoutError: if it mixes a split dim.
        """
        try:
            dims = found()
        except MixesError as error:
            axes = dict.fromkeys(a for x in operands for dim in self.dims(x) for a in axes_of(dim))
            self._open_alike(operands)
            try:
                dims = found()
            except MixesError:
                self.refuse(name, str(error), *operands, axes=tuple(axes))
        varies = any(map(self.records.varies, operands))
        with self.untracked(rows=rows):
            out = run()
        if len(dims) != out.dim():
            raise AssertionError(f"{name} has {out.dim()} dims, not {len(dims)}")
        if varies:
            self.records.vary([out])
        check_gradients(self, name, operands, [dims], out)
        self.mark(out, dims)
        self.records.name(out)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = func.namespace in _OURS
        before = self.rows.before(func, args, kwargs, apart=ours or self._apart > 0)
        out = func(*args, **kwargs) if ours or self._off else self._followed(func, args, kwargs)
        if self._off and func is torch.ops.aten._to_copy.default:
            self.records.put(out, self.records.dims(args[0]))  # a hook casts a layer's input
        if before is not None:
            self.rows.after(before, out)
        return out

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = func._schema.name.rpartition("::")[2]
        given = bind_arguments(func, args, kwargs)
        operands = [x for value in given.values() for x in tensors_in(value)]
        known = [self.records.dims(x) for x in operands]
        if all(is_whole(dim) for dims in known for dim in dims):
            out = func(*args, **kwargs)
            self._pass_on(func, operands, out)
            check_gradients(self, name, operands, [], out)
            if name == "embedding":
                self._looked_up(given["indices"], out)
            return out
        into = written_tensors(func, given)
        if into and name.endswith("_") and not name.endswith("__"):
            name = name[:-1]
        layouts: dict[int, Dims] = {id(x): dims for x, dims in zip(operands, known, strict=True)}
        call = dict(
            function=func,
            name=name,
            given=given,
            is_alike=self.records.is_alike,
            inferred=self.inferred,
            asked=self.asked,
        )

        def dims_of(x: Tensor) -> Dims:
            return layouts.get(id(x)) or self.records.dims(x)

        if into:  # in-place calls are checked before they run
            found = self._found(Call(**call, out=into[0], dims_of=dims_of), operands)
            check_gradients(self, name, operands, found, into)
            out = func(*args, **kwargs)
            self._pass_on(func, operands, out)
            for x, dims in zip(into, found, strict=False):
                self.records.put_into_base(x, dims)
            return out
        out = func(*args, **kwargs)
        self._pass_on(func, operands, out)
        if name in _NEW:
            return out
        found = self._found(Call(**call, out=out, dims_of=dims_of), operands)
        check_gradients(self, name, operands, found, out)
        for x, dims in zip(as_list(out), found, strict=False):
            if isinstance(x, Tensor) and len(dims) == x.dim():
                self.records.put(x, dims)
        return out

    def _found(self, call: Call, operands: list[Tensor]) -> list[Dims]:
        rule = _RULES.get(call.name)
        if rule is None:
            rule = pointwise if torch.Tag.pointwise in call.function.tags else try_on_pieces
        try:
            return rule(call)
        except MixesError as error:
            if user_line()[0].endswith(self.overlooked or ("?",)):
                if (rows := indexing.by_every_row(call)) is not None:
                    return [rows]
                return [unknown_dims(x.shape) if isinstance(x, Tensor) else () for x in as_list(call.out)]
            if call.name == "select" and self._is_for_its_shape():
                number = call.number(call.given["dim"], len(call.first))
                return [(*call.first[:number], *call.first[number + 1 :])]
            split = [x for x in operands if any_split(call.dims_of(x))]
            axes = dict.fromkeys(
                a for x in split for d in call.dims_of(x) if is_split(d) for f in d if f.split for a in f.split.axes
            )
            raise refusal(call.name, str(error), operands, self.module(), self.remedy(tuple(axes))) from None

    def _is_for_its_shape(self) -> bool:
        """Return True if the model's code selects an element in a call that reads its shape alone, and gives it to nothing else."""
        frame = _user_frame()
        name = "" if frame is None else given_to(frame)
        module = None if frame is None or not name else getattr(frame.f_locals.get("self"), name, None)
        return isinstance(module, nn.Module) and self._reads_shapes(module)

    def _looked_up(self, ids: Tensor, out: Tensor) -> None:
        """Mark looked-up rows as equal along dims in which all ids are equal; they can serve as a shard."""
        alike = [self.records.is_alike(ids, place) for place in range(ids.dim())]
        if any(alike):
            self.records.put(out, _alike_at(alike, out.shape))

    def _pass_on(self, func: Any, operands: list[Tensor], out: Any) -> None:
        """Mark results of weights, a batch or random numbers as varying."""
        if torch.Tag.nondeterministic_seeded in func.tags or any(map(self.records.varies, operands)):
            self.records.vary(tensors_in(out))


def _alike_at(alike: Sequence[bool], shape: Sequence[int]) -> Dims:
    """Return the layout of a whole tensor whose elements are equal along some of its first dims."""
    return tuple(
        (Factor(n, ALIKE),) if place < len(alike) and alike[place] and n > 1 else whole(n)
        for place, n in enumerate(shape)
    )


_TORCH = str(Path(torch.__file__).parent)
_MESHFOLD, _MODELS = "meshfold.", "meshfold.models"


def refusal(name: str, why: str, tensors: Sequence[Tensor], module: str, remedy: str) -> LayoutError:
    """Return the error that the user gets.

    Args:
        name: of the operation.
        why: it cannot be carried out on a rank's piece.
        tensors: its operands.
        module: full name of the module whose forward runs, and its class.
        remedy: what to write instead.
    """
    shapes = " and ".join(str(list(x.shape)) for x in tensors[:3] if x.dim())
    of = f" of {shapes} on each rank" if shapes else ""
    where = f"{module}: " if module else ""
    return LayoutError(
        f"{where}{_line()}: {name.strip('_')}{of} {why}. Each rank would compute it on its own shard alone, "
        f"which is not what the model computes. {remedy}"
    )


def _line() -> str:
    """Return the innermost source line outside torch and this project."""
    file, number = user_line()
    if not file:
        return "an operation"
    source = linecache.getline(file, number).strip()
    return f"{file}, line {number}: `{source}`" if source else f"{file}, line {number}"


def user_line() -> tuple[str, int]:
    """Return the file and number of that line; an empty name if no line is known."""
    frame = _user_frame()
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        ours = module.startswith(_MESHFOLD) and not module.startswith(_MODELS)
        if not ours and not file.startswith((_TORCH, "<")):
            return frame
        frame = frame.f_back
    return None


def check_gradients(found: Tracker, name: str, operands: Sequence[Tensor], results: Sequence[Dims], out: Any) -> None:
    """Check that all operands that require a gradient get the one they expect: the whole gradient, or one term of its sum.

    Args:
        found: the tracker; its records describe the operands before the call.
        name: of the operation.
        operands: its tensors.
        results: how its results lie; empty: as tensors that are whole.
        out: these results.

    Raises:
        LayoutError: for an operand that would get a part and is whole.
    """
    wanting = [x for x in operands if x.requires_grad] if torch.is_grad_enabled() else []
    made = [x for x in tensors_in(out) if x.is_floating_point() or x.is_complex()]
    if not wanting or not made:
        return
    # All parameters' gradients are summed over the token axes.
    token_axes = () if found.token_split is None else found.token_split.axes
    summed = frozenset[str]().union(*map(found.records.summed, wanting))
    axes = {axis for dims in results for axis in axes_in(dims)} - {*token_axes}
    for x in wanting:
        if missing := sorted((axes | summed) - axes_in(found.dims(x)) - found.records.summed(x)):
            found.refuse(
                name,
                f"combines a tensor {list(x.shape)} that needs a gradient and is the same on every rank with one that differs "
                f"along {', '.join(missing)}: each rank would get only a part of the gradient",
                *operands,
                axes=tuple(missing),
            )
    if summed - axes:
        found.records.sum_over(made, summed - axes)
