"""Samples of one device: matmuls by size and precision, attention, memory, an optimizer step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from statistics import median

import torch
from torch.nn import functional

from meshfold.planner.calibration.fits import MatmulSample

MiB = 2**20
_MOST_ROWS = 64
_MOST_QUEUED = 300  # calls of up to three launches: a device queues about a thousand, then the host waits
_LAYER_SIDE, _LAYER_BYTES, _MOST_SETS = (
    512,
    64 * MiB,
    64,
)  # of layers on a CPU: their tensors together are larger than its cache
_CLOCK_HZ = 2e9  # at least as fast as a GPU counts the cycles that it waits
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
DTYPES["fp8"] = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes of samples.

    Attributes:
        sides: of square matmuls, rising.
        longest_s: seconds of a matmul above which no larger ones are measured.
        window_s: least seconds of one timing.
        repeats: timings of each sample; the fastest counts, since other work on a machine only slows it down.
        steady_s: seconds of matmuls in sequence.
        narrow: the smallest and the largest of ``sides`` for which narrow products are measured.
        rows: of these products.
        tokens: of attention's longer sequences; shorter ones have a quarter of them.
        attention_s: least seconds of one attention and its backward.
        memory_bytes: of a copy.
        message_bytes: of collectives' blocks, rising.
        beside_s: least seconds of collectives beside matmuls.
        layers: of the model that measures launches.
        steps: of it, each of two micro-steps.
        warm_up: steps that are not timed, before those that are.
        disk_bytes: of the file that measures a disk.
        host: measure copies to a GPU and the host's memory.
    """

    sides: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    longest_s: float = 0.25
    window_s: float = 0.02
    repeats: int = 5
    steady_s: float = 2.0
    narrow: tuple[int, int] = (256, 4096)
    square: tuple[int, ...] = (256, 512, 768, 1024, 1280, 1536, 2048)
    rows: int = 16384
    tokens: int = 2048
    attention_s: float = 0.004
    memory_bytes: int = 256 * MiB
    message_bytes: tuple[int, ...] = (*(1024 * 4**n for n in range(5)), *(MiB * 2**n for n in range(9)))
    beside_s: float = 0.4
    layers: int = 24
    steps: int = 20
    warm_up: int = 4
    disk_bytes: int = 1024 * MiB
    host: bool = True


TINY = Effort(
    sides=(16, 32, 64),
    window_s=0.0,
    repeats=1,
    steady_s=0.0,
    narrow=(16, 32),
    square=(16, 24),
    rows=64,
    tokens=32,
    attention_s=0.0,
    memory_bytes=MiB,
    message_bytes=(256, 1024, 4096, 16384),
    beside_s=0.0,
    layers=1,
    steps=1,
    warm_up=0,
    disk_bytes=MiB,
    host=False,
)
"""Sizes to try the command with; too small for meaningful rates."""


def best_seconds(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the seconds of one call: the fastest of several timings, after a warm-up."""
    work()
    once = _timed(work, device, 1)
    calls = max(1, min(1000, math.ceil(effort.window_s / once)))
    return min(_timed(work, device, calls) for _ in range(effort.repeats))


def _timed(work: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the seconds of a call, the mean of several in a row."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    wait(device)
    return max(time.perf_counter() - begin, 1e-9) / calls


def device_seconds(work: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Return the device's seconds for one call when the host is ahead of it: the fastest of several timings."""
    if device.type != "cuda":
        return best_seconds(work, device, effort)
    work()
    once = _timed(work, device, 1)
    calls = max(1, min(_MOST_QUEUED, math.ceil(effort.window_s / once)))
    return min(_queued(work, device, calls, calls * once) for _ in range(effort.repeats))


def _queued(work: Callable[[], object], device: torch.device, calls: int, ahead_s: float) -> float:
    """Return the device's seconds of a call, the mean of several that start once the host has launched them all."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(math.ceil(ahead_s * _CLOCK_HZ))
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return max(float(begin.elapsed_time(end)) / 1e3, 1e-9) / calls


def wait(device: torch.device) -> None:
    """Wait until the device has done all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_samples(device: torch.device, effort: Effort) -> list[MatmulSample]:
    """Measure square matmuls in every precision that the device multiplies, in the three layouts of training."""
    found = []
    for precision, dtype in DTYPES.items():
        if precision == "fp8" and device.type != "cuda":  # elsewhere no faster than what it is cast to
            continue
        for side in effort.sides:
            try:
                seconds = _matmul_seconds(side, dtype, device, effort)
            except RuntimeError:  # a precision that this device or build lacks, or a side that does not fit
                break
            found.append(MatmulSample(precision=precision, side=side, seconds=seconds))
            if seconds * 8 > effort.longest_s:
                break
    return found


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


def _three_matmuls(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
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


def _matmul_seconds(side: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    return best_seconds(_three_matmuls(side, dtype, device), device, effort) / 3


def sustained_share(best: MatmulSample, device: torch.device, effort: Effort) -> float:
    """Return the share of one matmul's rate that many in sequence reach: clocks fall where power is limited.

    On a CPU it is that of a model's layers, whose operands no cache holds and whose results are wide (:func:`_share_of_layers`).
    """
    run = _three_matmuls(best.side, DTYPES[best.precision], device)
    if device.type == "cpu":
        return _share_of_layers(run, best.side, DTYPES[best.precision], effort)
    calls = max(1, round(effort.steady_s / (3 * best.seconds)))
    run()
    return min(1.0, 3 * best.seconds / _timed(run, device, calls))


def _share_of_layers(squares: Callable[[], object], side: int, dtype: torch.dtype, effort: Effort) -> float:
    """Return the rate of two linear layers, forward and backward, by that of three square matmuls of a CPU.

    Both are timed by turns, since a shared host's speed changes within seconds; the median of the turns counts. Layers are of other
    tensors in every turn, as in a model.

    Args:
        squares: computes the three.
        side: of them.
        dtype: of all.
        effort: seconds of it all.
    """
    narrow, device = min(side, _LAYER_SIDE), torch.device("cpu")
    wide = 4 * narrow
    each = 2 * narrow * (narrow + wide) * dtype.itemsize
    shapes = ((narrow, narrow), (narrow, wide), (wide, narrow), (narrow, wide))
    sets = [[torch.ones(shape).to(dtype) for shape in shapes] for _ in range(min(_LAYER_BYTES // each + 1, _MOST_SETS))]

    def layers(x: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        functional.linear(x, up)
        functional.linear(hidden, down)
        hidden @ up
        x @ down
        hidden.t() @ x
        x.t() @ hidden

    work = 6 * narrow * narrow * wide / (3 * side**3)
    shares: list[float] = []
    turns, begin = cycle(sets), time.perf_counter()
    while not shares or time.perf_counter() - begin < effort.steady_s:
        squares()  # into the cache
        seconds = _timed(squares, device, 1)
        shares.append(work * seconds / _timed(partial(layers, *next(turns)), device, 1))
    return min(1.0, median(shares))


def attention_shares(
    rate: float, device: torch.device, effort: Effort, dtype: torch.dtype
) -> dict[int, dict[int, float]]:
    """Measure causal attention, forward and backward, by the size of a head and the mean number of keys a query.

    There are enough sequences to keep the device busy for longer than the host needs to launch the operators.

    Returns:
        Shares of ``rate`` in FLOP/s, masked pairs not counted.
    """
    found: dict[int, dict[int, float]] = {}
    for head_dim in (64, 128):
        for tokens in (effort.tokens // 4, effort.tokens):
            heads, rows, seconds = 512 // head_dim, 1, 0.0
            while not seconds or (seconds < effort.attention_s and rows < _MOST_ROWS):
                rows = 2 * rows if seconds else 1
                run = _attention(rows, tokens, heads, head_dim, dtype, device)
                seconds = device_seconds(run, device, effort)
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
    copy = 2 * effort.memory_bytes / best_seconds(lambda: out.copy_(x), device, effort)
    rows = x.view(-1, 1024)
    weight = torch.ones(1024, device=device)
    works: tuple[tuple[int, Callable[[], object]], ...] = (
        (3, lambda: torch.add(x, y, out=out)),
        (2, lambda: functional.gelu(x)),
        (2, lambda: functional.layer_norm(rows, (1024,), weight, weight)),
    )
    spent = sum(best_seconds(work, device, effort) for _, work in works)
    elementwise = sum(passes for passes, _ in works) * effort.memory_bytes / spent
    parameter = torch.nn.Parameter(x)
    parameter.grad = y
    adam = torch.optim.AdamW([parameter], lr=0.0, fused=True)
    adam.step()
    optimizer = 7 * effort.memory_bytes / best_seconds(adam.step, device, effort)
    return MemoryRates(copy=copy, elementwise=elementwise, optimizer=optimizer)
