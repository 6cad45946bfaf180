"""Samples of one device: matmuls by size and precision, attention, memory, an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
from torch.nn import functional

from meshfold.planner.calibration.fits import MatmulSample
from meshfold.planner.calibration.timing import Effort, MiB, Pace, call_seconds, device_seconds, mean_seconds

_MOST_ROWS = 64
_FEWER, _FEWER_ON_CPU = 4, 16  # tokens of attention's shorter sequences are so many times fewer: CPUs train short ones
_PACE_SIDE = 512
_LAYER_SIDE, _LAYER_BYTES, _MOST_SETS = (
    512,
    64 * MiB,
    64,
)  # of layers on a CPU: their tensors together are larger than its cache
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES["fp8"] = torch.float8_e4m3fn


def pace_of(device: torch.device, effort: Effort) -> Pace | None:
    """Return the pace of a CPU, by matmuls of a linear layer in fp32; None for a device whose speed other work does not change."""
    if device.type != "cpu":
        return None
    return Pace(three_matmuls(min(_PACE_SIDE, effort.sides[-1]), torch.float32, device), effort)


def matmul_samples(device: torch.device, effort: Effort, pace: Pace | None = None) -> list[MatmulSample]:
    """Measure square matmuls in every precision that the device multiplies, in the three layouts of training.

    Args:
        device: to measure.
        effort: sizes of the samples.
        pace: of a CPU: all samples are at its usual speed.
    """
    found: dict[tuple[str, int], float] = {}  # seconds, or by those of the pace's reference
    for precision, dtype in DTYPES.items():
        if precision == "fp8" and device.type != "cuda":  # elsewhere no faster than what it is cast to
            continue
        for side in effort.sides:
            try:
                work = three_matmuls(side, dtype, device)
                seconds = call_seconds(work, device, effort) if pace is None else pace.ratio(work)
            except RuntimeError:  # a precision that this device or build lacks, or a side that does not fit
                break
            found[precision, side] = seconds / 3
            if found[precision, side] * (1.0 if pace is None else pace.mark()) * 8 > effort.longest_s:
                break
    usual = 1.0 if pace is None else pace.usual
    return [
        MatmulSample(precision=precision, side=side, seconds=each * usual) for (precision, side), each in found.items()
    ]


def side_samples(best: float, device: torch.device, effort: Effort, dtype: torch.dtype) -> dict[int, float]:
    """Measure linear layers from ``side`` to four times as many features; return shares of ``best`` in FLOP/s, by side.

    Each is the mean of the forward, the input gradient and the weight gradient, with so many rows that ``side`` is
    the smallest side.
    """
    found = {}
    for side in effort.sides:
        if not effort.narrow[0] <= side <= effort.narrow[1]:
            continue
        shapes = ((effort.rows, side), (4 * side, side), (effort.rows, 4 * side))
        x, weight, dy = (torch.randn(shape, device=device).to(dtype) for shape in shapes)

        def run(x: torch.Tensor = x, weight: torch.Tensor = weight, dy: torch.Tensor = dy) -> None:
            functional.linear(x, weight)
            dy @ weight
            dy.t() @ x

        flop = 3 * 2 * effort.rows * 4 * side**2
        found[side] = min(1.0, flop / device_seconds(run, device, effort) / best)
    return found


def output_samples(best: float, device: torch.device, effort: Effort, dtype: torch.dtype) -> dict[int, float]:
    """Measure weight gradients of square layers by the elements of their result: share of ``best`` in FLOP/s."""
    found = {}
    for side in effort.square:
        x, dy = (torch.randn(effort.rows, side, device=device).to(dtype) for _ in range(2))

        def run(x: torch.Tensor = x, dy: torch.Tensor = dy) -> object:
            return dy.t() @ x

        found[side**2] = min(1.0, 2 * effort.rows * side**2 / device_seconds(run, device, effort) / best)
    return found


def three_matmuls(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Return a call of a linear layer's matmuls: output, gradient of the input, gradient of the weight.

    In fp8 all three read operands that lie along the dim that is summed: each is cast in the layout of its product.
    """
    if dtype == torch.float8_e4m3fn:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        one = torch.ones((), device=device)

        def run_in_fp8() -> None:
            for _ in range(3):
                torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return run_in_fp8
    x, weight, dy = (torch.randn(side, side, device=device).to(dtype) for _ in range(3))

    def run() -> None:
        functional.linear(x, weight)
        dy @ weight
        dy.t() @ x

    return run


def sustained_share(best: MatmulSample, device: torch.device, effort: Effort) -> float:
    """Return the share of one matmul's rate that many in sequence reach: clocks fall where power is limited."""
    run = three_matmuls(best.side, DTYPES[best.precision], device)
    calls = max(1, round(effort.steady_s / (3 * best.seconds)))
    run()
    return min(1.0, 3 * best.seconds / mean_seconds(run, device, calls))


def layer_rates(samples: Sequence[MatmulSample], pace: Pace, effort: Effort) -> dict[str, float]:
    """Return the FLOP/s of linear layers that train on a CPU, by precision.

    Operands are no squares and no cache holds them. The rate is by up to a quarter another one than that of square matmuls, less
    with some precisions and more with others.

    Args:
        samples: of square matmuls; layers have half as many features as a precision's largest, at most 512, and four times as many.
        pace: gives the speed.
        effort: sizes of the samples.
    """
    found = {}
    for precision in dict.fromkeys(one.precision for one in samples):
        largest = max(one.side for one in samples if one.precision == precision)
        narrow = min(largest // 2, _LAYER_SIDE)
        run, flop = _layers(narrow, narrow, DTYPES[precision])
        found[precision] = flop / (pace.ratio(run, effort.steady_s) * pace.usual)
    return found


def row_shares(rate: float, pace: Pace, effort: Effort, dtype: torch.dtype) -> dict[int, float]:
    """Measure linear layers that train on a CPU with few rows, such as those of micro-batches: shares of ``rate`` by rows.

    Args:
        rate: of layers with as many rows as features, in FLOP/s.
        pace: gives the speed.
        effort: sizes of the samples.
        dtype: of all.
    """
    narrow = min(effort.sides[-1] // 2, _LAYER_SIDE)
    found = {narrow: 1.0}
    for rows in (narrow // 8, narrow // 4, narrow // 2):
        run, flop = _layers(rows, narrow, dtype)
        found[rows] = min(1.0, flop / (pace.ratio(run, effort.steady_s / 2) * pace.usual) / rate)
    return found


def _layers(rows: int, narrow: int, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """Return a call of two MLPs of a CPU, each of two linear layers, forward and backward, and its FLOP.

    One has four times as many features inside, as GPT's, the other 11/4 times, as Llama's: a CPU's products are slower where sides
    are powers of two. Layers are of other tensors in every call, as in a model.

    Args:
        rows: of their inputs.
        narrow: features of the inputs.
        dtype: of all.
    """
    widths = (4 * narrow, 11 * narrow // 4)
    each = (rows + 2 * narrow) * (2 * narrow + sum(widths)) * dtype.itemsize
    turns = cycle(
        [
            [
                [
                    torch.ones(shape).to(dtype)
                    for shape in ((rows, narrow), (rows, wide), (wide, narrow), (narrow, wide))
                ]
                for wide in widths
            ]
            for _ in range(min(_LAYER_BYTES // each + 1, _MOST_SETS))
        ]
    )

    def run() -> None:
        for x, hidden, up, down in next(turns):
            functional.linear(x, up)
            functional.linear(hidden, down)
            hidden @ up
            x @ down
            hidden.t() @ x
            x.t() @ hidden

    return run, 6 * 2 * rows * narrow * sum(widths)


def attention_shares(
    rate: float, device: torch.device, effort: Effort, dtype: torch.dtype, pace: Pace | None = None
) -> dict[int, dict[int, float]]:
    """Measure causal attention, forward and backward, by the size of a head and the mean number of keys a query.

    There are enough sequences to keep the device busy for longer than the host needs to launch the operators.

    Args:
        rate: of matmuls in sequence, in FLOP/s.
        device: to measure.
        effort: sizes of the samples.
        dtype: of all tensors.
        pace: of a CPU, at whose usual speed ``rate`` was measured.

    Returns:
        Shares of ``rate`` in FLOP/s, masked pairs not counted.
    """
    found: dict[int, dict[int, float]] = {}
    for head_dim in (64, 128):
        for tokens in (effort.tokens // (_FEWER_ON_CPU if pace else _FEWER), effort.tokens):
            heads, rows, seconds = 512 // head_dim, 1, 0.0
            while not seconds or (seconds < effort.attention_s and rows < _MOST_ROWS):
                rows = 2 * rows if seconds else 1
                run = _attention(rows, tokens, heads, head_dim, dtype, device)
                seconds = device_seconds(run, device, effort) if pace is None else pace.ratio(run) * pace.usual
            # Two matmuls forward and five backward, of which causal masking leaves half of the pairs.
            flop = 7 * 2 * rows * heads * tokens**2 * head_dim / 2
            found.setdefault(head_dim, {})[tokens // 2] = flop / seconds / rate
    return found


def _attention(
    rows: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Return a call of attention and its backward, with heads in one row of memory a token, as a model's products make them."""
    shape = (rows, tokens, heads, head_dim)
    q, k, v, dy = (torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(4))
    for each in (q, k, v):
        each.requires_grad_()

    def run() -> None:
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(y, (q, k, v), dy)

    return run


def operator_start(device: torch.device, effort: Effort) -> float:
    """Return the seconds that a device takes for an operator with almost no work, of many in a full queue.

    0 on a CPU, where the host runs an operator as it launches it.
    """
    if device.type != "cuda":
        return 0.0
    x = torch.zeros(1024, device=device)
    out = torch.empty_like(x)
    return device_seconds(lambda: torch.add(x, x, out=out), device, effort)


@dataclass(frozen=True, kw_only=True)
class MemoryRates:
    """Bytes a second, reads and writes together.

    Attributes:
        copy: of a plain copy.
        elementwise: of sums, activations and norms of a model.
        optimizer: of a fused AdamW step.
    """

    copy: float
    elementwise: float
    optimizer: float


def memory_rates(device: torch.device, effort: Effort) -> MemoryRates:
    """Measure the device's memory."""
    count = effort.memory_bytes // 4
    x, y, out = (torch.zeros(count, device=device) for _ in range(3))
    copy = 2 * effort.memory_bytes / call_seconds(lambda: out.copy_(x), device, effort)
    rows = x.view(-1, 1024)
    weight = torch.ones(1024, device=device)
    works: tuple[tuple[int, Callable[[], object]], ...] = (
        (3, lambda: torch.add(x, y, out=out)),
        (2, lambda: functional.gelu(x)),
        (2, lambda: functional.layer_norm(rows, (1024,), weight, weight)),
    )
    spent = sum(call_seconds(work, device, effort) for _, work in works)
    elementwise = sum(passes for passes, _ in works) * effort.memory_bytes / spent
    parameter = torch.nn.Parameter(x)
    parameter.grad = y
    adam = torch.optim.AdamW([parameter], lr=0.0, fused=True)
    adam.step()
    optimizer = 7 * effort.memory_bytes / call_seconds(adam.step, device, effort)
    return MemoryRates(copy=copy, elementwise=elementwise, optimizer=optimizer)
