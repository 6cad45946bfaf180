"""Attention of one tile with its log-sum-exp, and its backward for a given output and log-sum-exp.

A flash backward takes the output and the log-sum-exp of a row. Given the *global* ones, of all keys, it returns this tile's exact
share of dQ, dK and dV. Ring attention needs no more than that. Autograd through a merge of partial results does not give it,
since the kernels' log-sum-exp has no gradient.

=========== =========================================== ==============================================
kernel      torch operation                             takes
=========== =========================================== ==============================================
flash       ``_scaled_dot_product_flash_attention``     CUDA, float16 and bfloat16, head_dim up to 256
flash       ``..._flash_attention_for_cpu``             CPU, every floating dtype
cudnn       ``_scaled_dot_product_cudnn_attention``     CUDA, float16 and bfloat16, head_dim up to 128
efficient   ``_scaled_dot_product_efficient_attention`` CUDA, float32 as well; repeats heads of keys
reference   plain torch                                 everything; memory: rows × columns of scores
=========== =========================================== ==============================================

Tensors are ``b s heads d``, keys and values ``b s kv_heads d`` with kv_heads a divisor of heads, log-sum-exps
``b heads s`` in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import LayoutError, did_you_mean

_aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]


class Pairs(NamedTuple):
    """Queries and the keys that they see in one tile, or in several of one shape.

    Attributes:
        q: ``b s heads d``.
        k, v: ``b t kv_heads d``.
        causal: query x sees keys 0 to x, with equally many keys and queries; otherwise each query sees all keys.
        scale: of the scores.
        kept: factors of the weights, ``b heads s t``, if some are dropped: only for the reference kernel.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    scale: float
    kept: Tensor | None = None


class Kernel(Protocol):
    """Attention of a tile."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        """Return the output ``b s heads d`` over only these keys, and its log-sum-exp ``b heads s``."""

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """Return the tile's share of dQ, dK, dV, for the output and log-sum-exp over all keys."""


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept and sent: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class Reference:
    """Plain torch; keeps the scores of a whole tile."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        scores = self._scores(x)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp_()
        if x.kept is not None:
            weights.mul_(x.kept.unflatten(1, weights.shape[1:3]))
        out = torch.einsum("bgrij,bjgd->bigrd", weights, x.v.to(scores.dtype))
        return out.flatten(2, 3).to(x.q.dtype), lse.flatten(1, 2)

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, _, scale, kept = x
        groups = (k.shape[2], -1)
        scores = self._scores(x)
        wide = scores.dtype
        weights = (scores - lse.unflatten(1, groups).unsqueeze(-1)).exp_()
        dout_wide = dout.to(wide)
        delta = (dout_wide * out).sum(-1).transpose(1, 2).unflatten(1, groups)
        grouped = dout_wide.unflatten(2, groups)
        dweights = torch.einsum("bigrd,bjgd->bgrij", grouped, v.to(wide))
        used = weights
        if kept is not None:
            kept = kept.unflatten(1, groups)
            used = weights * kept
            dweights.mul_(kept)
        dv = torch.einsum("bgrij,bigrd->bjgd", used, grouped)
        dscores = dweights.sub_(delta.unsqueeze(-1)).mul_(weights)
        dq = torch.einsum("bgrij,bjgd->bigrd", dscores, k.to(wide)).flatten(2, 3).mul_(scale)
        dk = torch.einsum("bgrij,bigrd->bjgd", dscores, q.to(wide).unflatten(2, groups)).mul_(scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, x: Pairs) -> Tensor:
        wide = accumulating(x.q.dtype)
        grouped = x.q.to(wide).unflatten(2, (x.k.shape[2], -1))
        scores = torch.einsum("bigrd,bjgd->bgrij", grouped, x.k.to(wide)).mul_(x.scale)
        if x.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.q.device).triu_(1)
            scores.masked_fill_(later, -torch.inf)
        return scores


class MetaKernel:
    """Meta tensors, as in plans: what a flash kernel returns, without its intermediate results.

    Attributes:
        count: called for each tile with its floating-point operations, masked pairs included, the size of a head, the share of
            the operations that kernels compute, and the number of its keys.
        computed: this share: a half where tiles stand for causal attention.
    """

    def __init__(self, computed: float = 1.0) -> None:
        self.count: Callable[[int, int, float, int], None] | None = None
        self.computed = computed

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        q, _, v, *_ = x
        self._tell(x, q.shape[-1] + v.shape[-1])
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=accumulating(q.dtype))
        return q.new_empty((*q.shape[:3], v.shape[-1])), lse

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # Five matmuls, including recomputed scores.
        self._tell(x, 3 * x.q.shape[-1] + 2 * x.v.shape[-1])
        return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)

    def _tell(self, x: Pairs, features: int) -> None:
        if self.count is not None:
            flop = 2 * x.q.shape[:3].numel() * x.k.shape[1] * features
            self.count(flop, x.q.shape[-1], 0.5 if x.causal else self.computed, x.k.shape[1])


class FlashCPU:
    """torch's flash attention on CPUs."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_turned(x.q, x.k, x.v), 0.0, x.causal, attn_mask=None, scale=x.scale
        )
        # torch 2.11 tells the compiler that it is float32 for float64, too.
        return out.transpose(1, 2), lse.to(torch.promote_types(out.dtype, torch.float32))

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # The kernel expects the log-sum-exp as its forward writes it: b s heads.
        written = lse.transpose(1, 2).contiguous().transpose(1, 2)
        return _back(
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *_turned(dout, x.q, x.k, x.v, out), written, 0.0, x.causal, attn_mask=None, scale=x.scale
            )
        )


class FlashCUDA:
    """torch's FlashAttention on GPUs."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            *_turned(x.q, x.k, x.v), 0.0, x.causal, False, scale=x.scale
        )
        return out.transpose(1, 2), lse

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # The random state is read only for dropout, but every version of torch takes two tensors.
        random = torch.empty((2,), dtype=torch.int64, device=x.q.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *_turned(dout, x.q, x.k, x.v, out),
            lse.contiguous(),
            None,
            None,
            x.q.shape[1],
            x.k.shape[1],
            0.0,
            x.causal,
            random,
            random,
            scale=x.scale,
        )
        return _back(gradients)


class CuDNN:
    """cuDNN's attention, through torch."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            *_turned(x.q, x.k, x.v), None, True, 0.0, x.causal, False, scale=x.scale
        )
        return out.transpose(1, 2), lse.squeeze(-1) if lse.dim() == 4 else lse

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        # torch caches the cuDNN graph by the strides of q, k and v, not of the output and its gradient: make those always
        # contiguous. The log-sum-exp has a last dim of one.
        random = torch.empty((1,), dtype=torch.int64, device=x.q.device)
        gradients = _aten._scaled_dot_product_cudnn_attention_backward(
            *_turned(dout.contiguous(), x.q, x.k, x.v, out.contiguous()),
            lse.contiguous().unsqueeze(-1),
            random,
            random,
            None,
            None,
            None,
            x.q.shape[1],
            x.k.shape[1],
            0.0,
            x.causal,
            scale=x.scale,
        )
        return _back(gradients)


class Efficient:
    """torch's memory-efficient attention on GPUs: for float32."""

    def forward(self, x: Pairs) -> tuple[Tensor, Tensor]:
        k, v = self._repeated(x)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            *_turned(x.q, k, v), None, True, 0.0, x.causal, scale=x.scale
        )
        return out.transpose(1, 2), lse[..., : x.q.shape[1]]

    def backward(self, x: Pairs, dout: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        heads = (x.k.shape[2], -1)
        k, v = self._repeated(x)
        # The kernel expects rows of log-sum-exp padded to 32, as its forward writes them; exp(... - inf) is 0.
        padded = F.pad(lse, (0, -x.q.shape[1] % 32), value=torch.inf).contiguous()
        random = torch.empty((1,), dtype=torch.int64, device=x.q.device)
        *gradients, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *_turned(dout, x.q, k, v),
            None,
            *_turned(out),
            padded,
            random,
            random,
            0.0,
            [True, True, True, False],
            x.causal,
            scale=x.scale,
        )
        dq, dk, dv = _back(gradients)
        return dq, dk.unflatten(2, heads).sum(3), dv.unflatten(2, heads).sum(3)

    def _repeated(self, x: Pairs) -> tuple[Tensor, Tensor]:
        times = x.q.shape[2] // x.k.shape[2]
        if times == 1:
            return x.k, x.v
        return x.k.repeat_interleave(times, dim=2), x.v.repeat_interleave(times, dim=2)


def _turned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Transpose ``b s heads d -> b heads s d``, with features contiguous in memory."""
    return tuple((t if t.stride(-1) == 1 else t.contiguous()).transpose(1, 2) for t in tensors)


def _back(gradients: Sequence[Tensor]) -> Gradients:
    dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    return dq, dk, dv


REFERENCE = Reference()
META_KERNEL, CAUSAL_META_KERNEL = MetaKernel(), MetaKernel(computed=0.5)
_ON: Mapping[tuple[str, str], Kernel] = {
    ("flash", "cpu"): FlashCPU(),
    ("flash", "meta"): META_KERNEL,
    ("flash", "cuda"): FlashCUDA(),
    ("cudnn", "cuda"): CuDNN(),
    ("efficient", "cuda"): Efficient(),
}
NAMES = ("auto", "flash", "cudnn", "efficient", "reference")
_WIDEST = {"flash": 256, "cudnn": 128, "efficient": 256}


@contextmanager
def count_attention_flops(count: Callable[[int, int, float, int], None]) -> Iterator[None]:
    """Context manager: call ``count`` for each tile of meta tensors with its floating-point operations, masked pairs included, the
    size of a head, and the share of the operations that kernels compute."""
    META_KERNEL.count = CAUSAL_META_KERNEL.count = count
    try:
        yield
    finally:
        META_KERNEL.count = CAUSAL_META_KERNEL.count = None


def choose(name: str, q: Tensor, k: Tensor, v: Tensor, shapes: int = 1) -> Kernel:
    """Return the kernel for these tensors.

    Args:
        name: "auto", "flash", "cudnn", "efficient" or "reference". "auto" is cuDNN on Hopper and later GPUs if tiles have few
            shapes (cuDNN builds a graph for each, torch's FlashAttention does not), otherwise flash. For float32 on GPUs it is
            efficient. It is the reference if no kernel supports the call: float64 on GPUs, or values of another head_dim than keys.
        q, k, v: ``b s heads d``.
        shapes: how many different shapes of tiles there will be.

    Raises:
        LayoutError: for an unknown name, or a kernel that cannot take these tensors.
    """
    if name not in NAMES:
        raise LayoutError(
            f"kernel={name!r}: it must be one of {', '.join(map(repr, NAMES))}.{did_you_mean(str(name), NAMES)}"
        )
    if name == "reference":
        return REFERENCE
    if name == "auto":
        few = shapes <= 4 and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] >= 9
        for candidate in ("cudnn", "flash", "efficient") if few else ("flash", "efficient"):
            if not why_not(candidate, q, v):
                return _ON[candidate, q.device.type]
        return REFERENCE
    if reason := why_not(name, q, v):
        raise LayoutError(f"kernel={name!r} {reason}: write kernel='auto', which takes what fits")
    return _ON[name, q.device.type]


def why_not(name: str, q: Tensor, v: Tensor) -> str:
    """Return the reason why a kernel cannot take these tensors; "" if it can."""
    device, d = q.device.type, q.shape[-1]
    if (name, device) not in _ON:
        return f"does not run on {device}"
    if v.shape[-1] != d:
        return f"wants values of the head_dim of keys, and they have {v.shape[-1]} and {d}"
    if device == "cuda":
        dtypes = [torch.float16, torch.bfloat16] + [torch.float32] * (name == "efficient")
        if q.dtype not in dtypes:
            return f"takes {', '.join(str(dtype) for dtype in dtypes)}, not {q.dtype}"
        if d > _WIDEST[name] or d % 8:
            return f"takes a head_dim up to {_WIDEST[name]} that is a multiple of 8, not {d}"
        if name == "cudnn" and not torch.backends.cudnn.is_available():
            return "needs cuDNN, which is not there"
    return ""
