"""Inputs that several fp8 products share: cast once, or by the kernel that makes them, with the bits of casts apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold import kernels as K
from meshfold.kernels import fp8

RECIPE = K.FP8_RECIPES["rowwise"]


class Counted:
    """Counts the casts, by shape of the matrix, while it is open."""

    def __enter__(self) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        self._own = own = fp8.to_fp8

        def to_fp8(x: Tensor, **given: object) -> K.Fp8Tensor:
            seen.append(tuple(x.shape))
            return own(x, **given)  # type: ignore[arg-type]

        fp8.to_fp8 = to_fp8  # type: ignore[assignment]
        return seen

    def __exit__(self, *_: object) -> None:
        fp8.to_fp8 = self._own


class Reader(nn.Module):
    """A block: norm, three products of its result, a gate with one product."""

    def __init__(self, *, makes_sum: bool, centred: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(32, 64).bfloat16() * 0.1 for _ in range(3))
        self.down = nn.Parameter(torch.randn(64, 32).bfloat16() * 0.1)
        self.scale = nn.Parameter(torch.rand(64).bfloat16() + 0.5)
        self.norm_source, self.gate_source = K.Fp8Source(), K.Fp8Source()
        self.product = K.bind_fp8_matmul(RECIPE)
        self.makes_sum, self.centred = makes_sum, centred

    def forward(self, x: Tensor) -> Tensor:
        shift = (None,) if self.centred else ()
        if self.makes_sum:
            norm: Callable[..., tuple[Tensor, Tensor]] = K.add_layer_norm if self.centred else K.add_rms_norm
            y, x = norm(x, x.detach(), self.scale, *shift, source=self.norm_source)
        else:
            y = (K.layer_norm if self.centred else K.rms_norm)(x, self.scale, *shift, source=self.norm_source)  # type: ignore[operator]
        q, k, v = (self.product(y, w) for w in self.weights)
        inner = K.swiglu2(q, k)
        inner = K.swiglu(torch.cat([inner, v], -1), source=self.gate_source)
        return x + self.product(inner, self.down)


def run(block: Reader, x: Tensor, recompute: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
    assert isinstance(y, Tensor)
    found = torch.autograd.grad(y.float().square().sum(), (x, *block.parameters()))
    return [y.detach(), *found]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("makes_sum", "centred"), [(False, False), (True, False), (False, True), (True, True)])
def test_shared_casts_have_the_bits_of_casts_apart(makes_sum: bool, centred: bool, recompute: bool) -> None:
    block = Reader(makes_sum=makes_sum, centred=centred)
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with K.casts_apart(), Counted() as apart:
        wanted = run(block, x, recompute)
    for step in range(3):
        x = x + step  # another input, perhaps in the same memory
        with K.casts_apart():
            wanted = run(block, x, recompute)
        with Counted() as shared:
            found = run(block, x, recompute)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        forwards = 2 if recompute else 1
        # Of x: twice less in each forward and twice less in backward; from the second forward on two kernels write operands.
        saved = 2 * forwards + 2 + 2 * (forwards if step else forwards - 1)
        assert len(apart) - len(shared) == saved, (step, len(apart), len(shared))
    assert (block.norm_source.readers, block.norm_source.fuses) == (3, True)
    assert (block.gate_source.readers, block.gate_source.fuses) == (1, True)


def test_an_input_that_has_changed_is_cast_again() -> None:
    product, w = K.bind_fp8_matmul(RECIPE), torch.randn(32, 64).bfloat16()
    x = torch.randn(16, 64).bfloat16()
    before = product(x, w)
    x.mul_(3.0)
    after = product(x, w)
    assert torch.equal(after, K.fp8_output(x, w, RECIPE)) and not torch.equal(after, before)
    with Counted() as seen:  # another recipe, and a part of the input, have casts of their own
        K.bind_fp8_matmul(K.FP8_RECIPES["tensorwise"])(x, w)
        product(x[:8], w)
    assert seen.count((16, 64)) == 1 and seen.count((8, 64)) == 1


def test_operands_are_released_when_all_readers_have_had_them() -> None:
    from meshfold.kernels import fp8_inputs

    block = Reader(makes_sum=False, centred=False)
    x = torch.randn(16, 64).bfloat16()
    for _ in range(2):
        run(block, x, False)
    assert fp8_inputs._forward is None and fp8_inputs._backward is None


def test_a_result_that_no_product_reads_is_not_cast() -> None:
    source, x = K.Fp8Source(), torch.randn(16, 64).bfloat16()
    for _ in range(3):
        with Counted() as seen:
            K.rms_norm(x, None, source=source)
            K.rms_norm(x, None, source=K.Fp8Source())  # the next one
        assert not seen
    assert source.readers == 0 and not source.writes
