"""States of Adam for flat parameters: one dataclass for each format, checked once at construction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from meshfold.kernels import float_bits
from meshfold.kernels.inputs import check_flat

BLOCK = float_bits.QUANTIZED_BLOCK
_SIGNED, _UNSIGNED = float_bits.SIGNED_CODE, float_bits.UNSIGNED_CODE
_COPIES = (torch.bfloat16, torch.float16)


class _FloatMoments:
    """Moments in floating point, as they are."""

    exp_avg: Tensor
    exp_avg_sq: Tensor

    def moment(self, name: str) -> Tensor:
        """Return ``exp_avg`` or ``exp_avg_sq`` as float32 ``n``, in a new tensor."""
        value: Tensor = getattr(self, name)
        return value.to(torch.float32, copy=True)

    def load_moment(self, name: str, value: Tensor) -> None:
        """Set ``exp_avg`` or ``exp_avg_sq`` from ``n`` numbers on any device, in place."""
        getattr(self, name).copy_(value)

    def zero_moments(self) -> None:
        """Set both moments to zero, in place."""
        self.exp_avg.zero_()
        self.exp_avg_sq.zero_()


class _SplitMaster:
    """A master weight in two planes."""

    hi: Tensor
    lo: Tensor

    @property
    def weights(self) -> Tensor:
        """The weights that the model computes with."""
        return self.hi

    def master(self, *, copy: bool = False) -> Tensor:
        """Return the float32 parameter, always in a new tensor."""
        return float_bits.join_master(self.hi, self.lo)

    def load_master(self, values: Tensor) -> None:
        """Set the parameter from float32 ``n`` on any device, which splits it, in place."""
        hi, lo = float_bits.split_master(values)
        self.hi.copy_(hi)
        self.lo.copy_(lo)


@dataclass(frozen=True, kw_only=True)
class WholeState(_FloatMoments):
    """A float32 parameter and its moments: 12 bytes a parameter, 14 with a copy in low precision.

    All tensors are flat, contiguous, of ``n`` elements and on one device.

    Attributes:
        parameter: float32.
        exp_avg: float32, the first moment.
        exp_avg_sq: float32, the second moment.
        copy: None, or a bfloat16 or float16 tensor that each step also writes the parameter to, rounded to nearest.
    """

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    copy: Tensor | None = None

    def __post_init__(self) -> None:
        check_flat("parameter", self.parameter, (torch.float32,))
        check_flat("exp_avg", self.exp_avg, (torch.float32,), self.parameter)
        check_flat("exp_avg_sq", self.exp_avg_sq, (torch.float32,), self.parameter)
        if self.copy is not None:
            check_flat("copy", self.copy, _COPIES, self.parameter)

    @classmethod
    def of(cls, parameter: Tensor, copy: torch.dtype | None = None) -> WholeState:
        """Return the state before the first step; ``parameter`` itself is stepped in place."""
        check_flat("parameter", parameter, (torch.float32,))
        return cls(
            parameter=parameter,
            exp_avg=torch.zeros_like(parameter, requires_grad=False),
            exp_avg_sq=torch.zeros_like(parameter, requires_grad=False),
            copy=None if copy is None else parameter.detach().to(copy),
        )

    @property
    def weights(self) -> Tensor:
        """The weights of the model: the copy, or else the parameter."""
        return self.parameter if self.copy is None else self.copy

    def master(self, *, copy: bool = False) -> Tensor:
        """Return the float32 parameter, in a new tensor if ``copy``."""
        return self.parameter.clone() if copy else self.parameter

    def load_master(self, values: Tensor) -> None:
        """Set the parameter and its copy from float32 ``n`` on any device, in place."""
        self.parameter.copy_(values)
        self.weights.copy_(values)


@dataclass(frozen=True, kw_only=True)
class SplitState(_SplitMaster, _FloatMoments):
    """A master weight in two planes, and moments: regime A with float32 moments, regime B with bfloat16 ones.

    A has 12 bytes per parameter and steps bit for bit like :class:`WholeState`; B has 8, and rounds stored moments
    stochastically. All tensors are flat, contiguous, of ``n`` elements and on one device.

    Attributes:
        hi: bfloat16, the master rounded half up: the parameter that the model computes with.
        lo: int16, what ``hi`` lacks; see :func:`~meshfold.kernels.adam.split_master`.
        exp_avg: float32 or bfloat16, the first moment.
        exp_avg_sq: of the same dtype, the second moment.
    """

    hi: Tensor
    lo: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __post_init__(self) -> None:
        check_flat("hi", self.hi, (torch.bfloat16,))
        check_flat("lo", self.lo, (torch.int16,), self.hi)
        check_flat("exp_avg", self.exp_avg, (torch.float32, torch.bfloat16), self.hi)
        check_flat("exp_avg_sq", self.exp_avg_sq, (self.exp_avg.dtype,), self.hi)

    @classmethod
    def of(cls, master: Tensor, moments: torch.dtype = torch.float32) -> SplitState:
        """Return the state before the first step, from float32 masters ``n`` (which are not changed)."""
        hi, lo = float_bits.split_master(master)
        return cls(hi=hi, lo=lo, exp_avg=zeros(hi, moments), exp_avg_sq=zeros(hi, moments))


@dataclass(frozen=True, kw_only=True)
class QuantizedState(_SplitMaster):
    """Regime C: a master weight in two planes and 8-bit moments, 6.03 bytes a parameter.

    Blocks of 256 elements share a float32 scale: their largest magnitude divided by the code's. The codes are
    :class:`~meshfold.kernels.float_bits.Minifloat`: ``exp_avg`` a sign, 4 bits of exponent and 3 of mantissa, ``exp_avg_sq`` 4 and
    4 bits; both are rounded stochastically. If codes were rounded to the nearest, an ``exp_avg_sq`` whose gradient shrank would
    never fall. One step changes it by a share of 1 - beta2 = 0.001, which is less than half the distance of codes, as in the 8-bit
    Adam that this follows (Dettmers et al., arXiv 2110.02861, block-wise quantization). An ``exp_avg_sq`` that is not 0 never
    becomes 0, so no step is divided by only eps. If gradients are a few thousand times smaller than the largest of their block,
    steps are shorter than Adam's. A moment that is not finite makes its block's moments NaN.

    Attributes:
        hi: bfloat16 ``n``, the master rounded half up: the parameter that the model computes with.
        lo: int16 ``n``, what ``hi`` lacks.
        exp_avg: uint8 ``n``, codes of the first moment.
        exp_avg_scale: float32 ``ceil(n / 256)``.
        exp_avg_sq: uint8 ``n``, codes of the second moment.
        exp_avg_sq_scale: float32 ``ceil(n / 256)``.
    """

    hi: Tensor
    lo: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor

    def __post_init__(self) -> None:
        check_flat("hi", self.hi, (torch.bfloat16,))
        check_flat("lo", self.lo, (torch.int16,), self.hi)
        blocks = -(-self.hi.numel() // BLOCK)
        for name in ("exp_avg", "exp_avg_sq"):
            check_flat(name, getattr(self, name), (torch.uint8,), self.hi)
            check_flat(f"{name}_scale", getattr(self, f"{name}_scale"), (torch.float32,), self.hi, blocks)

    @classmethod
    def of(cls, master: Tensor) -> QuantizedState:
        """Return the state before the first step, from float32 masters ``n`` (which are not changed)."""
        hi, lo = float_bits.split_master(master)
        blocks = -(-hi.numel() // BLOCK)
        return cls(
            hi=hi,
            lo=lo,
            exp_avg=zeros(hi, torch.uint8),
            exp_avg_scale=zeros(hi, torch.float32, blocks),
            exp_avg_sq=zeros(hi, torch.uint8),
            exp_avg_sq_scale=zeros(hi, torch.float32, blocks),
        )

    def moment(self, name: str) -> Tensor:
        """Return ``exp_avg`` or ``exp_avg_sq`` as float32 ``n``, in a new tensor."""
        return self.decoded(name, getattr(self, name), getattr(self, f"{name}_scale"))

    @staticmethod
    def decoded(name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """``n, ceil(n / 256) -> n``: a moment as float32, of its codes and scales, on any device."""
        code = _SIGNED if name == "exp_avg" else _UNSIGNED
        q = codes.to(torch.int64)
        magnitude = q & 127 if code is _SIGNED else q
        value = float_bits.decode(magnitude, scale.repeat_interleave(BLOCK)[: q.numel()], code)
        return torch.where(q > 127, -value, value) if code is _SIGNED else value

    def load_moment(self, name: str, value: Tensor) -> None:
        """Set ``exp_avg`` or ``exp_avg_sq`` from ``n`` numbers on any device, rounded to nearest, in place."""
        value = value.to(self.hi.device, torch.float32)
        code = _SIGNED if name == "exp_avg" else _UNSIGNED
        blocks = functional.pad(value.abs(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
        scale, inverse = float_bits.scales(blocks.amax(1), code)
        half = torch.full_like(blocks, 0x8000, dtype=torch.int64)
        q = float_bits.encode(blocks, inverse.unsqueeze(1), half, code).view(-1)[: value.numel()]
        q = q + 128 * value.signbit() if code is _SIGNED else torch.maximum(q, (value > 0).to(q.dtype))
        getattr(self, name).copy_(q)
        getattr(self, f"{name}_scale").copy_(scale)

    def zero_moments(self) -> None:
        """Set both moments to zero, in place."""
        for tensor in (self.exp_avg, self.exp_avg_scale, self.exp_avg_sq, self.exp_avg_sq_scale):
            tensor.zero_()


AdamState = WholeState | SplitState | QuantizedState
"""State of Adam for one flat parameter: in float32, in two 16-bit halves, or quantised to 8 bits."""


def zeros(like: Tensor, dtype: torch.dtype, size: int | None = None) -> Tensor:
    """Return zeros on the device of ``like``, by default with as many elements."""
    return torch.zeros(like.numel() if size is None else size, dtype=dtype, device=like.device)
