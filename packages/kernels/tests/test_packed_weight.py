"""Weights in codes: the formula, element by element, and a layer that makes its weight of them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from meshfold.kernels import (
    PackedWeight,
    keep_packed,
    largest_magnitudes,
    pack_weight,
    packed_weight_of,
    two_a_byte,
)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_a_weight_is_its_code_less_zero_times_scale(bits: int, groups: int) -> None:
    random = torch.Generator().manual_seed(bits + groups)
    n, k = 5, 24
    levels = torch.randint(0, 1 << bits, (n, k), generator=random)
    zero = torch.randint(0, 1 << bits, (n, groups), generator=random)
    scale = torch.rand(n, groups, generator=random)
    columns = torch.randperm(k, generator=random)
    codes = two_a_byte(levels.to(torch.uint8)) if bits == 4 else (levels - 128).to(torch.int8)
    given = zero.to(torch.uint8) if bits == 4 else (zero - 128).to(torch.int16)
    packed = PackedWeight(codes=codes, scale=scale, zero=given, columns=columns)
    assert packed.shape == (n, k) and packed.group == k // groups
    found = packed.unpack(torch.float32)
    for i in range(n):
        for j in range(k):
            group = j // (k // groups)
            assert found[i, columns[j]] == (levels[i, j] - zero[i, group]).float() * scale[i, group]
    middle = PackedWeight(codes=codes, scale=scale).unpack(torch.float32)
    wanted = (levels - (8 if bits == 4 else 128)).float() * scale.repeat_interleave(k // groups, 1)
    assert torch.equal(middle, wanted)


def test_a_layer_keeps_its_weight_packed() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 6)
    packed = pack_weight(layer.weight.detach(), "int4", 16, largest_magnitudes(layer.weight.detach(), "int4", 16))
    keep_packed(layer, packed, torch.float32)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), nn.functional.linear(x, packed.unpack(torch.float32), layer.bias))
    assert list(layer.state_dict()) == ["bias"] and [name for name, _ in layer.named_parameters()] == ["bias"]
    known = packed_weight_of(copy.deepcopy(layer))
    assert known is not None and torch.equal(known.codes, packed.codes) and known.bytes == 6 * 16 + 6 * 2 * 4
    assert packed_weight_of(nn.Linear(2, 2)) is None
