"""NF4: codes against a search over all levels, bytes against those of bitsandbytes, gradients against the unpacked weight."""

from __future__ import annotations

import pytest
import torch

from meshfold.kernels.nf4 import LEVELS, NF4_BLOCK, Nf4Linear, pack_nf4, packed_bytes, unpack_nf4

# What bitsandbytes 0.50 makes of torch.linspace(-1, 1, 64) * 3: 32 bytes of codes; then its scale, 3.0.
GOLDEN = "00000111111112222233344445556667788899aaabbbccccddddeeeeeeefffff00004040"


def weights(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, n)[:, None]


def test_every_element_gets_the_nearest_of_sixteen_levels() -> None:
    w = weights(7, 3 * NF4_BLOCK)
    found = unpack_nf4(pack_nf4(w), 3 * NF4_BLOCK)
    blocks = w.unflatten(1, (-1, NF4_BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True)
    distance = (blocks.unsqueeze(-1) / scales.unsqueeze(-1) - torch.tensor(LEVELS)).abs()
    wanted = torch.tensor(LEVELS)[distance.argmin(-1)] * scales
    assert torch.equal(found, wanted.flatten(1))
    assert float((found.unflatten(1, (-1, NF4_BLOCK)) - blocks).abs().div(scales).max()) <= 0.16  # half the widest gap


def test_what_is_on_a_level_comes_back_and_zeros_stay() -> None:
    w = torch.zeros(2, 2 * NF4_BLOCK)
    w[1, :16] = torch.tensor(LEVELS) * 5
    packed = pack_nf4(w)
    assert packed.shape == (2, packed_bytes(2 * NF4_BLOCK)) == (2, NF4_BLOCK + 8)
    assert torch.equal(unpack_nf4(packed, 2 * NF4_BLOCK), w)
    assert torch.equal(pack_nf4(unpack_nf4(packed, 2 * NF4_BLOCK)), packed)
    assert unpack_nf4(packed, 2 * NF4_BLOCK, torch.bfloat16).dtype == torch.bfloat16


def test_bytes_are_those_of_bitsandbytes() -> None:
    packed = pack_nf4(torch.linspace(-1, 1, 64)[None] * 3)[0]
    assert bytes(packed.tolist()).hex() == GOLDEN


def test_rows_are_packed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(9, NF4_BLOCK)
    whole = pack_nf4(w)
    monkeypatch.setattr("meshfold.kernels.nf4._AT_ONCE", 2 * NF4_BLOCK)
    assert torch.equal(pack_nf4(w), whole)
    assert torch.equal(pack_nf4(w[4:6]), whole[4:6])
    with pytest.raises(ValueError, match="a row of 65 elements cannot be packed: NF4 takes multiples of 64"):
        pack_nf4(torch.zeros(2, 65))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_a_layer_multiplies_with_what_its_codes_stand_for(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(NF4_BLOCK, 5)
    layer = Nf4Linear.of(linear)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == []
    x = weights(3, NF4_BLOCK).to(dtype).requires_grad_()
    layer(x).sum().backward()
    twin = x.detach().clone().requires_grad_()
    w = unpack_nf4(layer.weight, NF4_BLOCK, dtype)
    wanted = twin @ w.t() + linear.bias.detach().to(dtype)
    wanted.sum().backward()
    assert torch.equal(layer(x), wanted)
    assert torch.equal(x.grad, twin.grad)  # type: ignore[arg-type]
