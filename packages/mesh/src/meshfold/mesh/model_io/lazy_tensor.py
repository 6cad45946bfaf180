"""Sharded tensors that are gathered when the program reads them.

:func:`lazy_gather` returns a stand-in for a whole tensor that most programs never read, such as logits returned with a loss. Its
shape, dtype and device are known, casts are deferred, and gradients pass. The first operation that needs values gathers the shards,
and all ranks must run it. Until then it takes no memory.

A collective that only one rank calls hangs, or is matched with the next call of the others. So the ranks first wait in the store
until all have arrived. With a watchdog (:mod:`meshfold.mesh.watchdog`) a rank that will not arrive is known within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from meshfold.mesh.collectives.wide_copies import wide_contiguous
from meshfold.mesh.errors import CollectiveError, LaunchError
from meshfold.mesh.mesh import Mesh
from meshfold.mesh.processes import groups
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.recording.flight_recorder import Call, shortened
from meshfold.mesh.recording.program_line import own_line
from meshfold.mesh.tracking import untracked
from meshfold.mesh.watchdog.rank_errors import report_errors

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.alias.default)


@dataclass(frozen=True, kw_only=True)
class ShardedOutput:
    """Layout of a model output that ranks hold in shards.

    Attributes:
        what: the tensor in words, for messages.
        mesh, axes: over which it is split.
        shape: of the whole.
        whole: gathers it from this rank's shard; a collective.
        piece: the adjoint: this rank's piece of the gradient of the whole.
    """

    what: str
    mesh: Mesh
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    whole: Callable[[Tensor], Tensor]
    piece: Callable[[Tensor], Tensor]


def lazy_gather(piece: Tensor, pieces: ShardedOutput) -> Tensor:
    """Return a stand-in for the whole tensor. All ranks that have a shard must call, and later read it together.

    Gradients come back through ``pieces.piece``.
    """
    join = torch.compiler.disable(_Join.apply) if torch.compiler.is_compiling() else _Join.apply
    found: Tensor = join(piece, pieces)
    return found


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that is not gathered yet; else the tensor. Nothing is communicated."""
    while isinstance(tensor, LazyTensor):
        tensor = tensor.held.here
    return tensor


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, pieces: ShardedOutput) -> Tensor:
        ctx.pieces = pieces
        return _Values(pieces, piece.detach(), (piece.dtype,)).shown()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.pieces.piece(grad), None


class _Values:
    """Values of a lazy tensor, gathered when they are first read.

    Attributes:
        here: this rank's piece; the whole tensor once it was read.
        read: whether it was read.
    """

    def __init__(self, pieces: ShardedOutput, piece: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        """Args:
        pieces: how the pieces make up the whole.
        piece: this rank's piece.
        dtypes: the pieces' dtype, followed by the casts to apply in order.
        """
        self.here, self.read = piece, False
        self._pieces, self._dtypes = pieces, dtypes

    def shown(self) -> LazyTensor:
        """Return a tensor that has these values."""
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor, self._pieces.shape, dtype=self._dtypes[-1], device=self.here.device
        )
        made.held = self
        return made

    def cast(self, dtype: torch.dtype) -> _Values:
        """Return unread values with one more cast."""
        return _Values(self._pieces, self.here, (*self._dtypes, dtype))

    def whole(self) -> Tensor:
        """Return the values; all ranks that have a shard must call."""
        if not self.read:
            piece = self.here.held.whole() if isinstance(self.here, LazyTensor) else self.here
            meet_to_read(self._pieces.what, self._pieces.mesh, self._pieces.axes)
            # Not an inference tensor, even if read without gradients: it may be trained on later.
            with torch.inference_mode(False), torch.no_grad(), untracked():
                whole = wide_contiguous(self._pieces.whole(piece))
                for dtype in self._dtypes:
                    whole = whole.to(dtype)
            self.here, self.read = whole, True
        return self.here

    def __str__(self) -> str:
        pieces = self._pieces
        count = pieces.mesh.size(*pieces.axes)
        return f"{pieces.what}: a piece on each of {count} ranks, put together when they are read"


class LazyTensor(Tensor):
    """Stand-in for a tensor; operations on it use its values. Made by :func:`lazy_gather`."""

    held: _Values

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor):
            if func in _SAME:
                return first.held.shown()
            if func is _aten._to_copy.default and not first.held.read and _only_casts(given):
                return first.held.cast(given["dtype"]).shown()
        shown: dict[int, LazyTensor] = {}

        def whole(tensor: LazyTensor) -> Tensor:
            values = tensor.held.whole()
            shown[id(values)] = tensor
            return values

        args, given = tree_map_only(LazyTensor, whole, (args, given))
        found = func(*args, **given)
        # In-place operations return their argument.
        return tree_map_only(Tensor, lambda one: shown.get(id(one), one), found)

    def _plain(self) -> Tensor:
        """Return the values as a plain torch tensor."""
        return self.view(self.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        if self.held.read:  # printing must not communicate: only one rank may print
            return repr(self._plain())
        return f"tensor(..., size={tuple(self.shape)}, dtype={self.dtype}; {self.held})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain().__dlpack__(*args, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """See :meth:`torch.Tensor.numpy`; gathers the values."""
        return self._plain().numpy(force=force)

    def tolist(self) -> Any:
        """See :meth:`torch.Tensor.tolist`; gathers the values."""
        return self._plain().tolist()

    def data_ptr(self) -> int:
        """See :meth:`torch.Tensor.data_ptr`; gathers the values."""
        return self._plain().data_ptr()


def _only_casts(given: dict[str, Any]) -> bool:
    return {name for name, value in given.items() if value not in (None, False)} == {"dtype"}


_times: dict[tuple[str, tuple[int, ...]], int] = {}  # number of meetings of these ranks for this, in this world
_lines: dict[tuple[int, ...], str] = {}  # of the last loss that these ranks met for
_of_world: Any = None


@report_errors
def meet_to_read(what: str, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Wait until all ranks along some axes read the same tensor; return at once for one rank or in a simulated world.

    Args:
        what: is read, in words.
        mesh, axes: the ranks have a shard each along these.

    Raises:
        CollectiveError: if one of them does not come.
    """
    if len(ranks := _ranks(mesh, axes)) > 1:
        _meet(f"read {what}", ranks, lambda: (f"{what} cannot be read at {own_line()}", "read"), 0)


@report_errors
def meet_for_loss(what: str, rows: int, mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Wait until all ranks along some axes compute a loss of the same tensor; return at once as :func:`meet_to_read`.

    Args:
        what: the loss is of, in words.
        rows: of the loss; ranks that meet have the same number.
        mesh, axes: the ranks have a shard each along these.

    Raises:
        CollectiveError: if one of them does not come.
    """
    if len(ranks := _ranks(mesh, axes)) == 1:
        return
    line = own_line()

    def said() -> tuple[str, str]:
        before = _lines.get(ranks, line)
        also = "" if before == line else f" (the one before was at {before})"
        return f"a loss of {what} cannot be computed at {line}{also}", "compute"

    # A rank that reads alone is looked at first: its line is the one to change.
    _meet(f"compute a loss of {rows} rows of {what}", ranks, said, 1)
    _lines[ranks] = line


def _ranks(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    return mesh.once(("ranks", axes), lambda: tuple(mesh.first_rank + rank for rank in mesh.ranks_along(*axes)))


def _meet(purpose: str, ranks: tuple[int, ...], said: Callable[[], tuple[str, str]], patience: int) -> None:
    """Wait until ranks meet.

    Args:
        purpose: they meet to do this.
        ranks: more than one.
        said: what fails if not all come, and the verb for it.
        patience: looks at ranks that do not come, before it fails.
    """
    global _of_world
    if _of_world is not groups.world_key():
        _times.clear()
        _lines.clear()
        _of_world = groups.world_key()
    before, name = _times.get((purpose, ranks), 0), f"{purpose}/{'-'.join(map(str, ranks))}"
    looks = count()
    try:
        with flight_recorder.meeting(f"a meeting to {purpose}", ranks, groups.rank_and_world_size()[0], name) as call:
            groups.meet_members(
                ranks,
                f"{name}/{before + 1}",
                lambda: _look(call) if next(looks) >= patience else None,
                f"{name}/{before}" if before else "",
            )
    except (CollectiveError, LaunchError) as error:
        fails, verb = said()
        raise CollectiveError(
            f"{fails}: ranks {shortened(ranks)} have one shard each, so all of them must {verb} it, and not all do.\n{error}\n"
            f"{verb.capitalize()} it on all ranks and use the result on one: move the line above its 'if rank == 0:'"
        ) from None
    _times[purpose, ranks] = before + 1


def _look(call: Call | None) -> None:
    away = None if call is None else call.stays_away()
    if away is not None:
        raise CollectiveError(away)
