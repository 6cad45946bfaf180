"""``torch.autocast`` in a model's forward: split layers compute what torch's own do there, within its precision."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tensor_parallel_checks import CASES, alone, mesh_of, seeded, whole_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import CausalLMLoss, find_mode, parallelize
from meshfold.tensor_parallel.layers.norm import LayerNorm, RMSNorm

WORDS, HIDDEN = 16, 16
FOUR = CASES[4][:6]
EPS = torch.finfo(torch.bfloat16).eps
autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y: Tensor = self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(HIDDEN), nn.RMSNorm(HIDDEN), Heads()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Attention(nn.Module):
    """Torch's own, split by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    """Casts in its forward, as a user writes it."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(WORDS, HIDDEN), block()
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        with autocast():
            logits: Tensor = self.head(self.norm(self.block(self.embed(ids))))
            return logits


@ranks(4)
def test_losses_and_gradients_are_those_of_torchs_autocast() -> None:
    ids = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(0))
    for block in (Block, Attention):
        serial = seeded(lambda: Model(block), torch.float32)  # noqa: B023
        logits = serial(ids)
        F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        exact = copy.deepcopy(serial).double()
        exact.zero_grad()
        wide = exact(ids)  # float64 is not cast
        F.cross_entropy(wide.flatten(0, 1), ids.flatten()).backward()
        for mode, axes in FOUR:
            model, mesh = copy.deepcopy(serial), mesh_of(axes)
            model.zero_grad()
            parallelize(model, mesh, mode)
            found = model(ids)
            assert found.dtype == logits.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), wide, rtol=0, atol=float(8 * EPS * wide.abs().max()))
            F.cross_entropy(found.float().flatten(0, 1), ids.flatten()).backward()
            got = whole_gradients(model, mesh)
            for name, parameter in serial.named_parameters():
                reference = exact.get_parameter(name).grad
                assert parameter.grad is not None and reference is not None
                # No further from the exact gradient than torch's own autocast gets, to a factor.
                off = (got[name].double() - reference).abs().max()
                theirs = (parameter.grad.double() - reference).abs().max()
                assert off <= 4 * theirs + 2 * EPS * reference.abs().max(), f"{name}, {mode} on {axes}"


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_add_up_in_float32(kind: type[nn.Module], dtype: torch.dtype) -> None:
    """And return what torch's do."""
    norm = kind(512)
    x = (torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) + 3).to(dtype)
    ours: type[LayerNorm | RMSNorm] = LayerNorm if kind is nn.LayerNorm else RMSNorm
    made = ours.convert(norm, norm.eps, alone(), find_mode("1d"))
    with autocast():
        found, wanted = made(x), norm(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)


def test_the_loss_of_split_logits_is_that_of_float32() -> None:
    logits = torch.randn(2, 5, WORDS, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(10).view(2, 5) % WORDS
    wanted = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    loss = CausalLMLoss(alone(), find_mode("1d"), WORDS)
    with autocast():
        torch.testing.assert_close(loss(logits, shift_labels=labels), wanted)
