"""A launch by the compiled kernel is that of Triton: the same kernel, the same arguments."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from meshfold.kernels import _triton
from meshfold.kernels._triton import Prepared, cdiv, launch


class _OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    device = SimpleNamespace(index=0)  # type: ignore[assignment]


def _on_gpu(dtype: torch.dtype, start: int = 0) -> Tensor:
    return torch.zeros(64, dtype=dtype)[start:].as_subclass(_OnGpu)


@triton.jit
def _scale(x, y, rows, factor, WIDE: tl.constexpr, UNUSED: tl.constexpr = 0):  # type: ignore[no-untyped-def]
    at = tl.arange(0, WIDE)
    tl.store(y + at, tl.load(x + at) * factor, mask=at < rows)


class _Kernel:
    """A kernel of Triton that notes its launches, by Triton and by its compiled form."""

    pre_run_hooks: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.arg_names, self.params = _scale.arg_names, _scale.params
        self.slow: list[tuple[Any, ...]] = []
        self.fast: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **settings: Any) -> Any:
            self.slow.append((grid, arguments, settings))
            return SimpleNamespace(run=lambda *given: self.fast.append(given), function=7, packed_metadata="metadata")

        return run


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11 + device, raising=False)
    monkeypatch.setattr(_triton, "_compiled", {})
    return _Kernel()


def test_later_launches_call_the_compiled_kernel_with_addresses(kernel: _Kernel) -> None:
    x, y, other = (_on_gpu(torch.float32) for _ in range(3))
    launch(kernel, (3,), x, x, y, 5, 0.5, WIDE=64, UNUSED=1, num_warps=4)
    assert kernel.slow == [((3,), (x, y, 5, 0.5), dict(WIDE=64, UNUSED=1, num_warps=4))] and not kernel.fast
    launch(kernel, (2, 4), x, other, y, 7, 2.5, WIDE=64, UNUSED=1, num_warps=4)
    assert len(kernel.slow) == 1
    given = (2, 4, 1, 11, 7, "metadata", None, None, None, other.data_ptr(), y.data_ptr(), 7, 2.5, 64, 1)
    assert kernel.fast == [given]
    launch(kernel, (0,), x, x, y, 5, 0.5, WIDE=64, UNUSED=1, num_warps=4)
    assert len(kernel.slow) == len(kernel.fast) == 1


@pytest.mark.parametrize(
    "change",
    [
        dict(num_warps=8),
        dict(WIDE=32),
        dict(rows=1),
        dict(rows=16),
        dict(rows=1 << 40),
        dict(x=_on_gpu(torch.bfloat16)),
    ],
)
def test_another_kind_of_argument_is_compiled_by_triton(kernel: _Kernel, change: dict[str, Any]) -> None:
    first = dict(x=_on_gpu(torch.float32), rows=5, WIDE=64, num_warps=4)
    for given in (first, first | change, first):
        x, rows, WIDE, warps = (given[name] for name in ("x", "rows", "WIDE", "num_warps"))
        launch(kernel, (1,), first["x"], x, first["x"], rows, 0.5, WIDE=WIDE, UNUSED=0, num_warps=warps)
    assert len(kernel.slow) == 2 and len(kernel.fast) == 1


def test_what_cannot_be_told_apart_goes_through_triton(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x = _on_gpu(torch.float32)
    for _ in range(2):
        launch(kernel, (1,), x, x, torch.zeros(8), 5, 0.5, WIDE=64, UNUSED=0)  # a tensor of the host
        launch(kernel, (1,), x, x, x, 5, 0.5, WIDE=64)  # a constant with a default
        launch(kernel, (1,), x, x, x, 5, 0.5, 64, UNUSED=0)  # a constant among the arguments
    assert len(kernel.slow) == 6 and not kernel.fast
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    for _ in range(2):
        launch(kernel, (1,), x, x, x, 5, 0.5, WIDE=64, UNUSED=0)  # a profiler sees it
    assert len(kernel.slow) == 8 and not kernel.fast


def test_a_prepared_launch_looks_at_addresses_only(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (_on_gpu(torch.float32) for _ in range(2))
    prepared = Prepared(kernel, (3,), (5, 0.5), WIDE=64, UNUSED=1, num_warps=4)
    prepared.run(x, x)
    assert kernel.slow == [((3,), (x, x, 5, 0.5), dict(WIDE=64, UNUSED=1, num_warps=4))] and not kernel.fast
    monkeypatch.setattr(_triton, "_kind", None)  # nothing else is looked at
    for first, second in ((x, y), (y, x)):
        prepared.run(first, second)
        given = (3, 1, 1, 11, 7, "metadata", None, None, None, first.data_ptr(), second.data_ptr(), 5, 0.5, 64, 1)
        assert kernel.fast[-1] == given
    assert len(kernel.slow) == 1 and len(kernel.fast) == 2


def test_a_prepared_launch_goes_through_triton_where_the_compiled_kernel_is_another(
    kernel: _Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, odd, host = _on_gpu(torch.float32), _on_gpu(torch.float32, 1), torch.zeros(64)
    prepared = Prepared(kernel, (1,), (5, 0.5), WIDE=64, UNUSED=1)
    prepared.run(odd, x)  # compiled for another address: not kept
    prepared.run(x, x)
    prepared.run(x, x)
    assert len(kernel.slow) == 2 and len(kernel.fast) == 1
    prepared.run(x, odd)
    prepared.run(x, host)
    assert len(kernel.slow) == 4 and len(kernel.fast) == 1
    with monkeypatch.context() as patch:
        patch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
        prepared.run(x, x)  # a profiler sees it
    assert len(kernel.slow) == 5
    prepared.run(x, x)
    assert len(kernel.slow) == 5 and len(kernel.fast) == 2
    Prepared(kernel, (0,), (5, 0.5), WIDE=64, UNUSED=1).run(x, x)
    assert len(kernel.slow) == 5 and len(kernel.fast) == 2


def test_kinds_tell_apart_all_that_triton_compiles_for() -> None:
    numbers: list[Any] = [
        *(sign * (1 << bit) + more for bit in (0, 4, 31, 32, 62) for sign in (1, -1) for more in (-1, 0, 1))
    ]
    numbers += [1 << 63, 48, 0.0, 1.0, 2.5, True, False, None]
    tensors = [_on_gpu(dtype, start) for dtype in (torch.float32, torch.bfloat16, torch.uint8) for start in (0, 1, 16)]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(_scale.signature, _scale.params, backend)
    compiled: dict[object, object] = {}
    for x, rows in product(tensors, numbers):
        found = _triton._kind(_scale, 0, (x, x, rows, 0.5), dict(WIDE=64, UNUSED=0, num_warps=4))
        assert found is not None
        _, special, _ = bind(x, x, rows, 0.5, WIDE=64, UNUSED=0, num_warps=4)
        assert compiled.setdefault(found[0], special) == special
    assert len(compiled) > 40


def test_cdiv() -> None:
    assert [cdiv(size, 4) for size in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
