"""Output, dQ, dK and dV of every mode, mask and dtype on 2, 4 and 8 ranks against attention on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequence_cases import NAMES, compare, problem

from meshfold.mesh import Mesh
from meshfold.mesh.testing import ranks
from meshfold.sequence import attention

MODES = ("ring", "ulysses", "ring_self")
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MASKS: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "full": dict(causal=False),
    "window": dict(causal=True, window=7),
    "window-both-sides": dict(causal=False, window=4),
    "documents": dict(causal=True, documents=(0, 5, 6, 19, 24)),
    "documents-full": dict(causal=False, documents=(0, 11, 24)),
    "documents-window": dict(causal=True, documents=(0, 13, 24), window=3),
}
modes = pytest.mark.parametrize("mode", MODES)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
masks = pytest.mark.parametrize("mask", MASKS)


@ranks(2)
def every_mask(mode: str, dtype: torch.dtype) -> None:
    for mask in MASKS.values():
        compare(Mesh({"seq": 2}), mode, dtype=dtype, **mask)


@pytest.mark.few(5)
@modes
@dtypes
def test_two_ranks(mode: str, dtype: torch.dtype) -> None:
    every_mask(mode, dtype)


@pytest.mark.parametrize("mode", ["ring", "ring_self"])
@ranks(2)
def test_a_second_derivative_is_refused(mode: str) -> None:
    """Behind a constant gradient, as that of a sum, too: it was silently without a part."""
    q, k, v = (torch.randn(1, 4, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, mesh=Mesh({"seq": 2}), mode=mode, length=8, causal=True)
    for gradient in torch.autograd.grad(out.sum(), (q, k, v), create_graph=True):
        with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with"):
            gradient.square().sum().backward(retain_graph=True)


@pytest.mark.few(6)
@modes
@masks
@ranks(4)
def test_four_ranks(mode: str, mask: str) -> None:
    for dtype in DTYPES:
        compare(Mesh({"seq": 4}), mode, dtype=dtype, **MASKS[mask])


@pytest.mark.few(2)
@dtypes
@ranks(4)
def test_ring_times_ulysses(dtype: torch.dtype) -> None:
    mesh = Mesh({"ring": 2, "ulysses": 2})
    for mask in MASKS.values():
        compare(mesh, "ring_ulysses", dtype=dtype, **mask)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["ring", "ulysses", "ring_self", "ring_ulysses"])
@ranks(8)
def test_eight_ranks(mode: str) -> None:
    meshes = [Mesh({"seq": 8})]
    if mode == "ring_ulysses":
        meshes = [Mesh({"ring": 4, "ulysses": 2}), Mesh({"ring": 2, "ulysses": 4})]
    for mesh in meshes:
        compare(mesh, mode, length=32, heads=8, causal=True)
        compare(mesh, mode, length=32, heads=8, causal=False, documents=(0, 3, 20, 32))


@pytest.mark.slow  # what eight ranks do for one dtype and two masks, for all
@pytest.mark.parametrize("mode", ["ring", "ulysses", "ring_self", "ring_ulysses"])
@dtypes
@ranks(8)
def test_eight_ranks_every_mask(mode: str, dtype: torch.dtype) -> None:
    mesh = Mesh({"ring": 4, "ulysses": 2} if mode == "ring_ulysses" else {"seq": 8})
    for mask in MASKS.values():
        compare(mesh, mode, heads=8, dtype=dtype, **mask)


@pytest.mark.few(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 5, 21, 23])
@ranks(4)
def test_lengths_that_do_not_divide(mode: str, length: int) -> None:
    """Also shorter than the ranks are many: some have padding alone."""
    mesh = Mesh({"seq": 4})
    compare(mesh, mode, length=length, causal=True)
    compare(mesh, mode, length=length, causal=False)
    compare(mesh, mode, length=length, causal=True, window=4)


@ranks(4)
def test_ring_times_ulysses_with_padding() -> None:
    mesh = Mesh({"ring": 2, "ulysses": 2})
    for length in (3, 21, 22):
        compare(mesh, "ring_ulysses", length=length)
        compare(mesh, "ring_ulysses", length=length, causal=False, order="contiguous")


@pytest.mark.few(1)
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@ranks(4)
def test_orders(order: str) -> None:
    for mode in MODES:
        for mask in MASKS.values():
            compare(Mesh({"seq": 4}), mode, order=order, **mask)


@pytest.mark.parametrize("kernel", ["flash", "reference"])
@ranks(2)
def test_kernels(kernel: str) -> None:
    for dtype in DTYPES:
        for mask in MASKS.values():
            compare(Mesh({"seq": 2}), "ring", kernel=kernel, dtype=dtype, **mask)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 1), (8, 2), (4, 4), (12, 3)])
@ranks(4)
def test_fewer_key_heads_than_ranks(heads: int, kv_heads: int) -> None:
    for mode in MODES:
        compare(Mesh({"seq": 4}), mode, heads=heads, kv_heads=kv_heads)


@ranks(2)
def test_values_of_another_width_and_a_scale() -> None:
    for mode in MODES:
        compare(Mesh({"seq": 2}), mode, d=8, dv=4)
        compare(Mesh({"seq": 2}), mode, d=4, dv=8, scale=0.7)


def test_axes_of_one_rank_are_plain_attention() -> None:
    for mode in (*MODES, "ring_ulysses"):
        for mask in MASKS.values():
            compare(Mesh({}), mode, **mask)
            compare(Mesh({"data": 1, "seq": 1}), mode, length=9, heads=3, kv_heads=1)


@ranks(4)
def test_other_axes_do_not_take_part() -> None:
    compare(Mesh({"data": 2, "seq": 2}), "ring")
    compare(Mesh({"seq": 2, "tensor": 2}), "ulysses")


@modes
@ranks(2)
def test_a_gradient_scaled_by_the_ranks_is_noticed(mode: str) -> None:
    """The comparison that all these tests rest on fails for each gradient that is 1/P of what it should be."""
    mesh = Mesh({"seq": 2})
    compare(mesh, mode)
    right = problem(24, 4, 2, 8, 8, 2, ())
    for i, name in enumerate(NAMES):
        wrong = right[4 + i].clone()
        right[4 + i].mul_(2.0)  # as if what is found were half of it
        with pytest.raises(AssertionError, match=f"{name} is off by 0.5"):
            compare(mesh, mode)
        right[4 + i].copy_(wrong)


@ranks(2)
def test_a_mode_of_ones_own() -> None:
    seen: dict[str, Any] = {}

    def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        seen.update(given)
        return q + v

    x = torch.ones(1, 3, 2, 4)
    mesh = Mesh({"seq": 2})
    assert torch.equal(attention(x, x, x, mesh=mesh, mode=mine, window=2), 2 * x)
    assert seen == dict(mesh=mesh, causal=True, window=2, documents=None, scale=None, length=6, dropout=0.0)
