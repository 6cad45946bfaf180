"""Causal attention over rows that are cut into segments: packed documents, and completions behind a prompt that they share.

A segment attends to itself causally, and to some tokens before it in its row: a completion to its prompt. Queries of a segment are
the last of its keys, so this is causal attention aligned at the lower right, ``score_ij`` for ``j <= i + keys - queries``. All
segments of all rows are one call of FlashAttention for sequences of various lengths (Dao, arXiv 2307.08691). Keys that several
segments see are copied for each of them, and their gradients are added in a fixed order. Segments lie in their row one
behind the other, so queries stay where they are, and so do keys where no segment sees others. There is no mask: time and memory
are proportional to the pairs that see each other.

===================== ============================== ==================================
kernel                runs                           takes
===================== ============================== ==================================
flash, by lengths     ``_flash_attention_forward``   CUDA, float16 and bfloat16, head_dim up to 256, a multiple of 8
reference             plain torch                    CPU, every floating dtype
a mask                torch's attention              everything else
===================== ============================== ==================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

_aten = torch.ops.aten
_WIDEST = 256


class Segment(NamedTuple):
    """Tokens ``start`` to ``stop`` of a row, which see themselves causally, and ``kept`` tokens of the row from ``first`` on.

    Those come before ``start``; without any (``kept = 0``) the segment is a document of its own.
    """

    start: int
    stop: int
    first: int
    kept: int


class _Packed(NamedTuple):
    """The segments of all rows, one row after the other. Packed queries are the tokens, numbered through consecutive rows.

    Attributes:
        keys: int64 ``u``: the token of each packed key.
        query_ends, key_ends: int32 ``n + 1``: cumulative lengths.
        most_queries, most_keys: of a segment.
        own: int64 ``t``: the place of each token among the packed keys, in its own segment.
        shared: of each turn the packed keys ``w`` that segments see of others, and their tokens: no token twice in a turn.
            Without any, packed keys are the tokens too.
        no_random: uint64 ``2`` and ``0``: a state of random numbers for dropout, of which there is none.
    """

    keys: Tensor
    query_ends: Tensor
    key_ends: Tensor
    most_queries: int
    most_keys: int
    own: Tensor
    shared: tuple[tuple[Tensor, Tensor], ...]
    no_random: tuple[Tensor, Tensor]


class Segments:
    """The segments of the rows of a batch; every token is in one."""

    def __init__(self, rows: Sequence[Sequence[Segment]], length: int, device: torch.device) -> None:
        """Args:
        rows: the segments of each row, in order; of one row, if all rows have the same.
        length: tokens of a row.
        device: of the tensors that they are used with.

        Raises:
            ValueError: for segments that do not lie one behind the other, from a row's first token to its last.
        """
        for row in rows:
            ends = [0, *(one.stop for one in row)]
            if ends[-1] != length or any(one.start != end for one, end in zip(row, ends, strict=False)):
                raise ValueError(
                    f"segments {[(one.start, one.stop) for one in row]} of a row of {length} tokens: give them one behind the "
                    f"other, from 0 to {length}"
                )
        self.rows, self.length, self.device = tuple(tuple(row) for row in rows), length, device
        self._packed: _Packed | None = None
        self._seen: Tensor | None = None
        self._all: Segments | None = None

    @property
    def pairs(self) -> int:
        """Number of pairs of query and key that see each other."""
        return sum(
            (n := one.stop - one.start) * one.kept + n * (n + 1) // 2 for segments in self.rows for one in segments
        )

    def seen(self) -> Tensor:
        """Return the pairs that see each other, ``b s s`` bool: query, key."""
        if self._seen is None:
            seen = torch.zeros(len(self.rows), self.length, self.length, dtype=torch.bool)
            for row, segments in zip(seen, self.rows, strict=True):
                for start, stop, first, kept in segments:
                    row[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
                    row[start:stop, first : first + kept] = True
            self._seen = seen.to(self.device)
        return self._seen

    def of(self, rows: int) -> Segments:
        """Return the segments of this many rows.

        Raises:
            ValueError: for another number of rows than there are, unless there is one.
        """
        if rows == len(self.rows):
            return self
        if len(self.rows) != 1:
            raise ValueError(
                f"segments of {len(self.rows)} rows, for {rows}: give those of each row, or of one for all"
            )
        if self._all is None or len(self._all.rows) != rows:
            self._all = Segments(self.rows * rows, self.length, self.device)
        return self._all

    def packed(self) -> _Packed:
        """Return the segments of all rows, one row after the other."""
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> _Packed:
        keys, own, query_ends, key_ends = [], [], [0], [0]
        turns: list[tuple[list[Tensor], list[Tensor]]] = []
        for number, segments in enumerate(self.rows):
            base, users = number * self.length, dict[int, int]()  # how many segments have seen each prompt
            for start, stop, first, kept in segments:
                mine, before = torch.arange(start, stop) + base, torch.arange(first, first + kept) + base
                at = key_ends[-1]
                keys += [before, mine]
                own.append(torch.arange(at + kept, at + kept + stop - start))
                if kept:
                    turn = users[first] = users.get(first, -1) + 1
                    if turn == len(turns):
                        turns.append(([], []))
                    turns[turn][0].append(torch.arange(at, at + kept))
                    turns[turn][1].append(before)
                query_ends.append(query_ends[-1] + stop - start)
                key_ends.append(at + kept + stop - start)
        which, places = (torch.cat(parts).to(self.device) for parts in (keys, own))
        ends = [torch.tensor(found, dtype=torch.int32).to(self.device) for found in (query_ends, key_ends)]
        shared = tuple((torch.cat(a).to(self.device), torch.cat(b).to(self.device)) for a, b in turns)
        most = [max((stop - start for start, stop in pairwise(found)), default=0) for found in (query_ends, key_ends)]
        no_random = (
            torch.zeros(2, dtype=torch.uint64, device=self.device),
            torch.zeros(0, dtype=torch.uint64, device=self.device),
        )
        return _Packed(which, ends[0], ends[1], most[0], most[1], places, shared, no_random)


def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None = None) -> Tensor:
    """Attend within segments: ``b s heads d`` -> ``b s heads d``.

    Args:
        q: ``b s heads d``.
        k, v: ``b s kv_heads d``, kv_heads a divisor of heads.
        segments: of these rows.
        scale: of the scores; 1/√d by default.

    Raises:
        ValueError: for tensors of another batch than the segments'.
    """
    segments = segments.of(q.shape[0])
    if q.shape[1] != segments.length or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"segments of rows of {segments.length} tokens, for queries {list(q.shape)} and keys {list(k.shape)}: give all tokens"
        )
    if torch.is_autocast_enabled(q.device.type):
        wanted = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(wanted) for x in (q, k, v))
    else:
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _heads_first(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), segments, scale).transpose(1, 2)


def _heads_first(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend: ``b heads s d`` -> ``b heads s d``, one function to modes of torch as its own attention is."""
    if has_torch_function((q, k, v)):
        found: Tensor = handle_torch_function(_heads_first, (q, k, v), q, k, v, segments, scale)
        return found
    kernel = _kernel(q, v)
    if kernel is None:
        return _masked(q, k, v, segments, scale)
    kind = q.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        given = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = _Attention.apply(*given, segments.packed(), kernel, scale)
    return out.transpose(1, 2)


_heads_first.is_attention = True  # type: ignore[attr-defined]


def _kernel(q: Tensor, v: Tensor) -> _Kernel | None:
    """Return what attends over packed segments; None if nothing takes such tensors."""
    if q.device.type == "cpu":
        return REFERENCE
    d, half = q.shape[-1], (torch.float16, torch.bfloat16)
    takes = q.is_cuda and torch.version.hip is None and v.shape[-1] == d and d <= _WIDEST and not d % 8
    if takes and q.dtype in half and _runs_flash(q.device):
        return FLASH
    return None


@cache
def _runs_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 8


def _masked(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    # On GPUs the kernel that takes a mask needs as many key heads as query heads; the fallback would store all scores.
    times = q.shape[1] // k.shape[1]
    if times > 1:
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=segments.seen().unsqueeze(1), scale=scale)


class _Attention(torch.autograd.Function):
    """Gathers keys of the segments, attends, and adds up their gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: _Packed, kernel: _Kernel, scale: float) -> Tensor:
        found, lse = kernel.forward(q.flatten(0, 1), *_gathered(k, v, packed), packed, scale)
        out = found.view(*q.shape[:3], -1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.kernel, ctx.scale = packed, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        packed: _Packed = ctx.packed
        given = q.flatten(0, 1), *_gathered(k, v, packed), out.flatten(0, 1), lse
        dq, *others = ctx.kernel.backward(dout[0].flatten(0, 1), *given, packed, ctx.scale)
        dk, dv = (_added(x, packed).view(like.shape) for x, like in zip(others, (k, v), strict=True))
        return dq.view(q.shape), dk, dv, None, None, None


def _gathered(k: Tensor, v: Tensor, packed: _Packed) -> tuple[Tensor, Tensor]:
    """``b s kv_heads d`` -> ``u kv_heads d``"""
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    return (k.index_select(0, packed.keys), v.index_select(0, packed.keys)) if packed.shared else (k, v)


def _added(x: Tensor, packed: _Packed) -> Tensor:
    """Add up gradients of packed keys: ``u kv_heads d`` -> ``t kv_heads d``. No token comes twice in one addition."""
    if not packed.shared:
        return x
    own = x.index_select(0, packed.own)
    # One addition rounds once in any dtype; of more, only the last is to round to a narrow one.
    total = own if len(packed.shared) == 1 else own.to(torch.promote_types(x.dtype, torch.float32))
    for places, tokens in packed.shared:
        total.index_add_(0, tokens, x.index_select(0, places).to(total.dtype))
    return total.to(x.dtype)


class _Kernel(Protocol):
    """Attention of packed segments: q ``t heads d``, k and v ``u kv_heads d``; log-sum-exps ``heads t`` in float32 or wider."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: _Packed, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output ``t heads d`` and the log-sum-exp of the scores."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: _Packed, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of packed queries and keys."""


class _Flash:
    """torch's FlashAttention for sequences of various lengths. Its causal mask is at the lower right of queries and keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: _Packed, scale: float) -> tuple[Tensor, Tensor]:
        ends, most = (packed.query_ends, packed.key_ends), (packed.most_queries, packed.most_keys)
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *ends, *most, 0.0, True, False, scale=scale)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: _Packed, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ends, most = (packed.query_ends, packed.key_ends), (packed.most_queries, packed.most_keys)
        given = (dout.contiguous(), q, k, v, out, lse)
        dq, dk, dv = _aten._flash_attention_backward(*given, *ends, *most, 0.0, True, *packed.no_random, scale=scale)
        return dq, dk, dv


class _Reference:
    """Plain torch, segment by segment, in float32 or wider."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: _Packed, scale: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=wide)
        for mine, theirs in _spans(packed):
            scores = _scores(q[mine], k[theirs], scale)
            lse[:, mine] = scores.logsumexp(-1).flatten(0, 1)
            weights = scores.softmax(-1)
            out[mine] = torch.einsum("grij,jgd->igrd", weights, v[theirs].to(wide)).flatten(1, 2).to(q.dtype)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packed: _Packed, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, groups = lse.dtype, (k.shape[1], -1)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for mine, theirs in _spans(packed):
            weights = (_scores(q[mine], k[theirs], scale) - lse[:, mine].unflatten(0, groups).unsqueeze(-1)).exp_()
            grouped = dout[mine].to(wide).unflatten(1, groups)
            delta = (grouped * out[mine].to(wide).unflatten(1, groups)).sum(-1).permute(1, 2, 0)
            dv[theirs] = torch.einsum("grij,igrd->jgd", weights, grouped).to(v.dtype)
            dscores = torch.einsum("igrd,jgd->grij", grouped, v[theirs].to(wide))
            dscores.sub_(delta.unsqueeze(-1)).mul_(weights).mul_(scale)
            dq[mine] = torch.einsum("grij,jgd->igrd", dscores, k[theirs].to(wide)).flatten(1, 2).to(q.dtype)
            queries = q[mine].to(wide).unflatten(1, groups)
            dk[theirs] = torch.einsum("grij,igrd->jgd", dscores, queries).to(k.dtype)
        return dq, dk, dv


def _spans(packed: _Packed) -> Iterator[tuple[slice, slice]]:
    """Yield the packed queries and keys of each segment."""
    ends = [found.tolist() for found in (packed.query_ends, packed.key_ends)]
    for i in range(len(ends[0]) - 1):
        yield slice(ends[0][i], ends[0][i + 1]), slice(ends[1][i], ends[1][i + 1])


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """``n heads d``, ``m kv_heads d`` -> ``kv_heads heads/kv_heads n m``, -inf where a key comes later."""
    wide = torch.promote_types(q.dtype, torch.float32)
    n, m = q.shape[0], k.shape[0]
    scores = torch.einsum("igrd,jgd->grij", q.to(wide).unflatten(1, (k.shape[1], -1)), k.to(wide)).mul_(scale)
    later = torch.ones(n, m, dtype=torch.bool, device=q.device).triu_(m - n + 1)
    return scores.masked_fill_(later, -torch.inf)


REFERENCE, FLASH = _Reference(), _Flash()
