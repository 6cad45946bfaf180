"""Causal attention over rows that are cut into segments: packed documents, and completions behind a prompt that they share.

A segment attends to itself causally, and to some tokens before it in its row: a completion to its prompt. Queries of a segment are
the last of its keys, so this is causal attention aligned at the lower right, ``score_ij`` for ``j <= i + keys - queries``. All
segments of all rows are one call of FlashAttention for sequences of various lengths (Dao, arXiv 2307.08691). Keys that several
segments see are copied for each of them, and their gradients are added in a fixed order. Segments lie in their row one
behind the other, so queries stay where they are, and so do keys where no segment sees others. There is no mask: time and memory
are proportional to the pairs that see each other.

Compiled code has attention as one operator of torch. It cannot hold segments, which differ from batch to batch, so it is given
their number.

===================== ============================== ==================================
kernel                runs                           takes
===================== ============================== ==================================
flash, by lengths     ``_flash_attention_forward``   CUDA, float16 and bfloat16, head_dim up to 256, a multiple of 8
reference             plain torch                    CPU, every floating dtype
a mask                torch's attention              everything else
===================== ============================== ==================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from meshfold.kernels.segments import PackedSegments, Segments, numbered_segments

_aten = torch.ops.aten
_WIDEST = 256


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
    if torch.is_autocast_enabled(q.device.type):
        wanted = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(wanted) for x in (q, k, v))
    else:
        q, k = q.to(v.dtype), k.to(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling() and not has_torch_function((q, k, v)):
        return _compiled(q, k, v, segments.number, scale)
    segments = _of_rows(segments, q, k)
    return _heads_first(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), segments, scale).transpose(1, 2)


def _of_rows(segments: Segments, q: Tensor, k: Tensor) -> Segments:
    """Return the segments of the rows of queries and keys.

    Raises:
        ValueError: for tensors of another batch than the segments'.
    """
    segments = segments.of(q.shape[0])
    if q.shape[1] != segments.length or k.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"segments of rows of {segments.length} tokens, for queries {list(q.shape)} and keys {list(k.shape)}: give all tokens"
        )
    return segments


def _heads_first(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Attend: ``b heads s d`` -> ``b heads s d``, one function to modes of torch as its own attention is."""
    if has_torch_function((q, k, v)):
        found: Tensor = handle_torch_function(_heads_first, (q, k, v), q, k, v, segments, scale)
        return found
    kernel = _kernel(q, v)
    if kernel is None:
        return _masked(q, k, v, segments.seen(), scale)
    with _without_autocast(q.device.type):
        given = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = _Attention.apply(*given, segments.packed(), kernel, scale)
    return out.transpose(1, 2)


_heads_first.is_attention = True  # type: ignore[attr-defined]


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _kernel(q: Tensor, v: Tensor) -> _Kernel | None:
    """Return what attends over packed segments; None if nothing takes such tensors."""
    if q.device.type == "cpu":
        return REFERENCE
    d, half = q.shape[-1], (torch.float16, torch.bfloat16)
    takes = q.is_cuda and torch.version.hip is None and v.shape[-1] == d and d <= _WIDEST and not d % 8
    if takes and q.dtype in half and _runs_flash(q.device):
        return FLASH
    return None


def _runs_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 8


_runs_flash._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not trace it


def _masked(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    # On GPUs the kernel that takes a mask needs as many key heads as query heads; the fallback would store all scores.
    times = q.shape[1] // k.shape[1]
    if times > 1:
        k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), scale=scale)


class _Attention(torch.autograd.Function):
    """Gathers keys of the segments, attends, and adds up their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: PackedSegments, kernel: _Kernel, scale: float
    ) -> Tensor:
        out, lse = _output(q, k, v, packed, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.packed, ctx.kernel, ctx.scale = packed, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, *dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *_gradients(dout[0], q, k, v, out, lse, ctx.packed, ctx.kernel, ctx.scale), None, None, None


def _output(
    q: Tensor, k: Tensor, v: Tensor, packed: PackedSegments, kernel: _Kernel, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output ``b s heads d`` and the log-sum-exp of the scores ``heads t``."""
    found, lse = kernel.forward(q.flatten(0, 1), *_gathered(k, v, packed), packed, scale)
    return found.view(*q.shape[:3], -1), lse


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    packed: PackedSegments,
    kernel: _Kernel,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = q.flatten(0, 1), *_gathered(k, v, packed), out.flatten(0, 1), lse
    dq, *others = kernel.backward(dout.flatten(0, 1), *given, packed, scale)
    dk, dv = (_added(x, packed).view(like.shape) for x, like in zip(others, (k, v), strict=True))
    return dq.view(q.shape), dk, dv


def _gathered(k: Tensor, v: Tensor, packed: PackedSegments) -> tuple[Tensor, Tensor]:
    """``b s kv_heads d`` -> ``u kv_heads d``"""
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    return (k.index_select(0, packed.keys), v.index_select(0, packed.keys)) if packed.shared else (k, v)


def _added(x: Tensor, packed: PackedSegments) -> Tensor:
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

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSegments, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output ``t heads d`` and the log-sum-exp of the scores."""

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: PackedSegments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dQ, dK and dV of packed queries and keys."""


class _Flash:
    """torch's FlashAttention for sequences of various lengths. Its causal mask is at the lower right of queries and keys."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSegments, scale: float) -> tuple[Tensor, Tensor]:
        ends, most = (packed.query_ends, packed.key_ends), (packed.most_queries, packed.most_keys)
        out, lse, *_ = _aten._flash_attention_forward(q, k, v, *ends, *most, 0.0, True, False, scale=scale)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: PackedSegments,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ends, most = (packed.query_ends, packed.key_ends), (packed.most_queries, packed.most_keys)
        given = (dout.contiguous(), q, k, v, out, lse)
        dq, dk, dv = _aten._flash_attention_backward(*given, *ends, *most, 0.0, True, *packed.no_random, scale=scale)
        return dq, dk, dv


class _Reference:
    """Plain torch, segment by segment, in float32 or wider."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSegments, scale: float) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=wide)
        for mine, theirs in _spans(packed):
            scores = _scores(q[mine], k[theirs], scale)
            lse[:, mine] = scores.logsumexp(-1).flatten(0, 1)
            weights = scores.softmax(-1)
            out[mine] = torch.einsum("grij,jgd->igrd", weights, v[theirs].to(wide)).flatten(1, 2).to(q.dtype)
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        packed: PackedSegments,
        scale: float,
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


def _spans(packed: PackedSegments) -> Iterator[tuple[slice, slice]]:
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


# -- in compiled code ------------------------------------------------------------------------------------------


def _compiled(q: Tensor, k: Tensor, v: Tensor, number: Tensor, scale: float) -> Tensor:
    """Attend within the segments of a number: ``b s heads d`` -> ``b s heads d``."""
    if _kernel(q, v) is None:
        seen: Tensor = _seen_numbered(q, k, number)
        return _masked(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, scale).transpose(1, 2)
    out: Tensor = _attend_numbered(q, k, v, number, scale)[0]
    return out


def _found(number: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[PackedSegments, _Kernel]:
    """Return the packed segments of a number, and the kernel for tensors, which one takes."""
    segments, kernel = numbered_segments(number), _kernel(q, v)
    if kernel is None:
        raise ValueError(f"no kernel takes queries of {q.dtype} on {q.device} with {q.shape[-1]} elements a head")
    return _of_rows(segments, q, k).packed(), kernel


@torch.library.custom_op("meshfold::segments_seen", mutates_args=())
def _seen_numbered(q: Tensor, k: Tensor, number: Tensor) -> Tensor:
    # Compiled code may write into what an operator returns.
    return _of_rows(numbered_segments(number), q, k).seen().clone()


@_seen_numbered.register_fake
def _(q: Tensor, k: Tensor, number: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], k.shape[1], dtype=torch.bool)


@torch.library.custom_op("meshfold::segment_attention", mutates_args=())
def _attend_numbered(q: Tensor, k: Tensor, v: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    with _without_autocast(q.device.type):
        out, lse = _output(q, k, v, *_found(number, q, k, v), scale)
    return out.contiguous(), lse.contiguous()


@_attend_numbered.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    return out, q.new_empty(q.shape[2], q.shape[0] * q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.custom_op("meshfold::segment_attention_gradients", mutates_args=())
def _gradients_numbered(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    with _without_autocast(q.device.type):
        dq, dk, dv = _gradients(dout, q, k, v, out, lse, *_found(number, q, k, v), scale)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_gradients_numbered.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, number, out, lse = ctx.saved_tensors
    return *_gradients_numbered(dout, q, k, v, out, lse, number, ctx.scale), None, None


_attend_numbered.register_autograd(_backward, setup_context=_save)
