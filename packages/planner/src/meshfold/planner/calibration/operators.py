"""Shares of the memory's rate that operators without matmuls reach, by the bytes that plans count for them.

Not all of them are bound by memory: GELU and random bits need arithmetic, sums over rows use few blocks, a broadcast mask is read
element by element, and ``masked_fill`` is a copy and a change in place. The bytes that a plan counts, divided by a device's
seconds, cover all of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle

import torch

from meshfold.kernels import dropout, layer_norm
from meshfold.mesh.model_io import DryRun
from meshfold.planner.calibration.timing import Effort, MiB, device_seconds
from meshfold.planner.clock import Work

_COLUMNS = 1024
_HEADS = 16
_BYTES_ON_CPU = 4 * MiB
_SETS_ON_CPU = 16  # of three tensors, by turns: together no cache holds them, as no cache holds what a model keeps
_KEPT_ON_CPU = 12  # last results, as a model keeps its own: no cache holds the memory that they are written to
_MUCH = 0.1  # of all bytes; operators with less are casts of a few numbers


def operator_rates(device: torch.device, effort: Effort, dtype: torch.dtype) -> dict[str, float]:
    """Measure operators of transformers in a dtype; return bytes read and written a second, by the operator's name in plans."""
    found: dict[str, float] = {}
    kind = "gpu" if device.type == "cuda" else "cpu"
    sets = [calls_of(device, kind, effort, dtype) for _ in range(1 if kind == "gpu" else _SETS_ON_CPU)]
    for works, shadow in zip(zip(*sets, strict=True), calls_of(torch.device("meta"), kind, effort, dtype), strict=True):
        counts = moved(shadow, kind)
        whole = sum(counts.values())
        rate = whole / device_seconds(_by_turns(works, 0 if kind == "gpu" else _KEPT_ON_CPU), device, effort)
        found.update({name: rate for name, count in counts.items() if count > _MUCH * whole})
    return found


def _by_turns(works: Sequence[Callable[[], object]], kept: int) -> Callable[[], object]:
    """Return a call of one of them, each time the next, which keeps the last ``kept`` results."""
    turns, results = cycle(works), deque[object](maxlen=kept)
    return lambda: results.append(next(turns)())


def moved(work: Callable[[], object], kind: str) -> Mapping[str, int]:
    """Return the bytes that a plan counts for operators on meta tensors, by name.

    Args:
        work: runs them.
        kind: of the device that they stand for.
    """
    found: dict[str, int] = {}
    with DryRun() as run, Work.counted(run, kind=kind) as counter:
        work()
    for operator, count in counter.counts.items():
        found[operator.name] = found.get(operator.name, 0) + count * operator.bytes
    return found


def calls_of(device: torch.device, kind: str, effort: Effort, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Return calls of one operator each, and one of our norm with its backward.

    Their tensors are larger than a GPU's cache. Those of models that a CPU trains are not larger than its cache, so there they have
    a few MB, several sets are used by turns, and the last results are kept.
    """
    aten = torch.ops.aten
    size = effort.memory_bytes if kind == "gpu" else _BYTES_ON_CPU
    rows = max(_COLUMNS, size // _COLUMNS // dtype.itemsize // _COLUMNS * _COLUMNS)
    x, y, z = (torch.full((rows, _COLUMNS), 0.5, dtype=dtype, device=device) for _ in range(3))
    wide = x.float() if dtype.itemsize < 4 else x  # as models compute probabilities
    scores = x.view(-1, _COLUMNS, _COLUMNS)
    hidden = torch.ones(_COLUMNS, _COLUMNS, dtype=torch.bool, device=device).triu(1)
    weight, bias = (torch.ones(_COLUMNS, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    normed = x.detach().requires_grad_()
    by_head = x.view(-1, _COLUMNS, _HEADS, _COLUMNS // _HEADS).transpose(1, 2)

    def norm() -> object:
        return torch.autograd.grad(layer_norm(normed, weight, bias), (normed, weight, bias), y)

    works: list[Callable[[], object]] = [
        lambda: torch.add(x, y),
        lambda: torch.mul(x, 0.5),
        lambda: aten.gelu(x, approximate="tanh"),
        lambda: aten.gelu_backward(y, x, approximate="tanh"),
        lambda: torch.sum(x, 0),
        lambda: torch.cat((x, y, z), 1),
        lambda: by_head.contiguous(),
        lambda: scores.masked_fill(hidden, 0.0),
        lambda: torch.softmax(wide, -1),
        lambda: aten._softmax_backward_data(wide, wide, -1, wide.dtype),
        norm,
        lambda: dropout(x, 0.1, 1, 2),
    ]
    if dtype.itemsize < 4:
        works.append(lambda: x.to(torch.float32))
    if kind == "cpu":  # arithmetic takes longer there than memory, up to six times
        works += [
            lambda: torch.tanh(x),
            lambda: torch.exp(x),
            lambda: aten.silu(x),
            lambda: aten.silu_backward(y, x),
        ]
    return works
