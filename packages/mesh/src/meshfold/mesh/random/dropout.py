"""Keys of dropout calls: the same under every layout, and again when a forward is recomputed.

    with dropout_stream(seed, step):
        loss = model(batch)               # a dropout layer asks next_draw(its name)

The mask itself is a function of (seed, key, global element index), see `meshfold.mesh.random.numbers`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshfold.mesh.errors import MeshfoldError
from meshfold.mesh.old_names import with_old_arguments
from meshfold.mesh.random.numbers import key_of


@dataclass(frozen=True, kw_only=True)
class TokenShards:
    """The tokens of every sequence that this rank has, which decide the elements it drops.

    Attributes:
        length: tokens of a whole sequence.
        index: ``local``, int64: which token of its sequence each of this rank's is.
    """

    length: int
    index: Tensor

    @property
    def local(self) -> int:
        """Tokens of a sequence that this rank has."""
        return self.index.shape[0]

    def numbers(self, tokens: Tensor) -> Tensor:
        """Convert token numbers within this rank's parts to numbers within whole sequences; int64."""
        index = self.index.to(tokens.device)
        return tokens // self.local * self.length + index[tokens % self.local]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Result of one dropout call's draw.

    Attributes:
        key: with the seed, determines the mask.
        call: how many calls of the name there were before it.
        seed, first_row, first_token, rows, token_shards: the stream's.
    """

    key: int
    call: int
    seed: int
    first_row: int
    first_token: int
    rows: int
    token_shards: TokenShards | None


class BatchRows(Protocol):
    """Rows of the global batch in a forward. Their numbers are computed when a dropout layer needs them."""

    @property
    def part(self) -> int:
        """Number that no other part of the batch has: it seeds torch's own generator."""

    @property
    def first_row(self) -> int:
        """Number of the first sequence."""

    @property
    def first_token(self) -> int:
        """Number of its first token."""

    @property
    def rows(self) -> int:
        """Sequences of the global batch; 0: as many as the forward is given."""


@dataclass(frozen=True, kw_only=True)
class KnownRows:
    """Rows whose numbers are known; see :class:`BatchRows`."""

    first_row: int = 0
    first_token: int = 0
    rows: int = 0

    @property
    def part(self) -> int:
        """The number of the first row."""
        return self.first_row


class DropoutStream:
    """The keys of one forward: counts the calls under each name.

    Attributes:
        seed: the seed that goes with every key.
        step: which forward this is, counted over the whole run (micro-batches and accumulation steps included).
        batch: which rows of the global batch this forward is given.
        token_shards: which tokens of each sequence it is given; None: all of them.
        repeats: a forward is repeated with it.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        calls: Mapping[str, int] | None = None,
        *,
        batch: BatchRows,
        token_shards: TokenShards | None = None,
    ) -> None:
        self.seed = seed
        self.step = step
        self.batch = batch
        self.token_shards = token_shards
        self.repeats = False
        self._calls = Counter(calls or {})
        self._calls_elsewhere = 0
        self._named: set[str] = set()

    @property
    def first_row(self) -> int:
        """Number, in the global batch, of the first sequence that this forward is given."""
        return self.batch.first_row

    @property
    def first_token(self) -> int:
        """Number, in the global batch, of its first token."""
        return self.batch.first_token

    @property
    def rows(self) -> int:
        """Sequences of the global batch; 0: as many as this forward is given."""
        return self.batch.rows

    def draw(self, name: str = "") -> Draw:
        """Draw for the next dropout call; its key is in [0, 2**63).

        Args:
            name: the module's name in the whole model. With it the key does not depend on the modules that ran before. Stages of a
                pipeline, which see only their own calls, then agree with the serial model.
        """
        call = self._calls[name]
        self._calls[name] = call + 1
        if self._calls_elsewhere:
            if name in self._named:
                raise MeshfoldError(
                    f"dropout of {name!r} is called more than once in a block that is in the model several times, and stages "
                    "of a pipeline cannot count its calls: give every call a dropout of its own, or every place a block of its own"
                )
            self._named.add(name)
            call += self._calls_elsewhere
        return Draw(
            key=key_of(f"dropout/{self.step}/{name}/{call}"),
            call=call,
            seed=self.seed,
            first_row=self.first_row,
            first_token=self.first_token,
            rows=self.rows,
            token_shards=self.token_shards,
        )

    def copy(self) -> DropoutStream:
        """Return an independent stream that continues from here."""
        made = DropoutStream(self.seed, self.step, self._calls, batch=self.batch, token_shards=self.token_shards)
        made._calls_elsewhere, made._named = self._calls_elsewhere, {*self._named}
        return made

    @contextmanager
    def after_calls_elsewhere(self, calls: int) -> Iterator[None]:
        """Count draws inside as if each name had been drawn ``calls`` times before, by other stages in the same forward."""
        before = self._calls_elsewhere, self._named
        self._calls_elsewhere, self._named = calls, set()
        try:
            yield
        finally:
            self._calls_elsewhere, self._named = before


_current: ContextVar[DropoutStream | None] = ContextVar("meshfold_dropout_stream", default=None)


_drawn: OrderedDict[tuple[int, str], Draw] = OrderedDict()
"""Draws of forwards, by name and a number of torch's CPU generator that was drawn with them.

torch's recomputation restores that generator when it repeats a forward, in any order and thread of backward."""
_MOST_DRAWN = 1 << 16


class _Use:
    """Makes a copy of an rng stream current in this thread; entered again, it restarts at the same call.

    In a forward, torch's CPU generator starts at the stream's position; a recomputation does not change it. It is restored after
    both.
    """

    def __init__(self, stream: DropoutStream, *, repeats: bool = False) -> None:
        self._stream, self._repeats = stream, repeats
        self._open: list[tuple[Token[DropoutStream | None], Tensor]] = []

    def __enter__(self) -> DropoutStream:
        stream = self._stream.copy()
        stream.repeats = self._repeats
        self._open.append((_current.set(stream), torch.get_rng_state()))
        if not self._repeats:
            place = f"torch/{stream.seed}/{stream.step}/{stream.batch.part}"
            torch.default_generator.manual_seed(key_of(place))
        return stream

    def __exit__(self, *error: object) -> None:
        token, state = self._open.pop()
        _current.reset(token)
        torch.set_rng_state(state)


@with_old_arguments({"dealt": "token_shards"})
def dropout_stream(
    seed: int,
    step: int,
    *,
    first_row: int = 0,
    first_token: int = 0,
    rows: int = 0,
    batch: BatchRows | None = None,
    token_shards: TokenShards | None = None,
) -> AbstractContextManager[DropoutStream]:
    """Draw the keys of one forward, from the first call on. Streams nest: the inner one counts on its own.

    Args:
        seed: of the run.
        step: which forward this is, counted over the whole run.
        first_row: number, in the global batch, of the first sequence that this forward is given: with data
            parallelism, the sequences of the data coordinates before this one.
        first_token: number, in the global batch, of its first token.
        rows: sequences of the global batch, which locate the sequences of a model that takes tokens first; 0: as many as this
            forward is given.
        batch: these three, where they are not known before something asks for them.
        token_shards: which tokens of each sequence this forward is given; None: all of them.
    """
    known = KnownRows(first_row=first_row, first_token=first_token, rows=rows)
    return _Use(DropoutStream(seed, step, batch=batch or known, token_shards=token_shards))


def current_dropout_stream() -> DropoutStream:
    """Return the stream that dropout layers take their keys from.

    Raises:
        MeshfoldError: outside of every ``with dropout_stream(...)``.
    """
    stream = _current.get()
    if stream is None:
        raise MeshfoldError(
            "dropout in training mode needs the number of the step, so that every rank drops the same elements: "
            "run the forward inside `with dropout_stream(seed, step):`, or call model.eval()"
        )
    return stream


def after_calls_elsewhere(calls: int) -> AbstractContextManager[None]:
    """Tell the current stream, if any, that other ranks made ``calls`` calls of each name drawn inside."""
    stream = _current.get()
    return nullcontext() if stream is None or not calls else stream.after_calls_elsewhere(calls)


def set_token_shards(token_shards: TokenShards | None) -> None:
    """Tell the current stream, if any, which tokens of each sequence its forward is given."""
    stream = _current.get()
    if stream is not None:
        stream.token_shards = token_shards


def next_dropout_draw(name: str = "") -> Draw:
    """Draw for the next dropout call of the current stream; see `DropoutStream.draw`.

    A forward that a checkpoint of torch repeats in backward draws what it drew the first time.

    Raises:
        MeshfoldError: outside of every stream; for one that is repeated with another random state.
    """
    with torch._C.DisableTorchFunction():
        place = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    repeated = torch._C._current_graph_task_id() != -1  # True in backward
    if repeated and (place, name) in _drawn:
        return _drawn[place, name]
    stream = current_dropout_stream()
    if repeated and not stream.repeats:
        raise MeshfoldError(
            "backward repeats a forward with dropout without the random state that it had: write "
            "checkpoint(..., preserve_rng_state=True), which is the default, or leave the checkpoint out"
        )
    made = stream.draw(name)
    if not repeated:
        _drawn[place, name] = made
        if len(_drawn) > _MOST_DRAWN:
            _drawn.popitem(last=False)
    return made


def checkpoint_contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return the ``context_fn`` of torch.utils.checkpoint.checkpoint: recomputing a forward draws its keys again.

    >>> from torch.utils.checkpoint import checkpoint
    >>> # y = checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts, preserve_rng_state=False)
    """
    stream = _current.get()
    if stream is None:
        return nullcontext(), nullcontext()
    return nullcontext(), _Use(stream.copy(), repeats=True)
