"""A model's own code on split tokens: exact, or refused with its line. Never wrong in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh, collectives
from meshfold.mesh.errors import LayoutError
from meshfold.mesh.testing import ranks
from meshfold.sequence import loss_share, next_tokens, sequence_parallel, shard_sequence

VOCAB, HIDDEN, LENGTH = 31, 8, 16

Code = Callable[[Tensor], Tensor]


def by_hand(x: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2)).softmax(-1) @ x


def averaged(x: Tensor) -> Tensor:
    weights = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return weights @ x


def convolved(x: Tensor) -> Tensor:
    kernel = torch.ones(HIDDEN, HIDDEN, 3, dtype=x.dtype)
    return F.conv1d(x.transpose(1, 2), kernel, padding=1).transpose(1, 2)


TABLE: dict[str, tuple[Code, str]] = {
    # name: code on the stream ``b s h``, and how its refusal is quoted
    "shift": (lambda x: F.pad(x[:, :-1], (0, 0, 1, 0)), "x[:, :-1]"),
    "shift by cat": (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), "x[:, 1:]"),
    "roll": (lambda x: x.roll(1, 1), "x.roll(1, 1)"),
    "first": (lambda x: x - x[:, :1], "x[:, :1]"),
    "last": (lambda x: x - x[:, -1].unsqueeze(1), "x[:, -1]"),
    "every other": (lambda x: x.clone()[:, ::2].repeat_interleave(2, 1), "x.clone()[:, ::2]"),
    "mean": (lambda x: x - x.mean(1, keepdim=True), "x.mean(1"),
    "max": (lambda x: x - x.amax(1, keepdim=True), "x.amax(1"),
    "softmax": (lambda x: x.softmax(1), "x.softmax(1)"),
    "cumsum": (lambda x: x.cumsum(1), "x.cumsum(1)"),
    "flip": (lambda x: x.flip(1), "x.flip(1)"),
    "sort": (lambda x: x.sort(1).values, "x.sort(1)"),
    "argmax": (lambda x: x * x.argmax(1, keepdim=True), "x.argmax(1"),
    "conv": (lambda x: convolved(x), "F.conv1d("),
    "pool": (lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2), "F.max_pool1d("),
    "attention by hand": (by_hand, "x @ x.transpose(1, 2)"),
    "weights of places": (averaged, "weights @ x"),
    "einsum": (lambda x: torch.einsum("bsh,bth->bst", x, x) @ x, "torch.einsum("),
    "batch norm": (
        lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
        "F.batch_norm(",
    ),
    "layer norm of all": (lambda x: F.layer_norm(x, x.shape[1:]), "F.layer_norm(x, x.shape[1:])"),
    "windows": (lambda x: x.unfold(1, 2, 2).mean(-1).repeat_interleave(2, 1), "x.unfold(1"),
    "pairs": (lambda x: x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2), "x.unflatten(1"),
    "index": (lambda x: x[:, torch.zeros(x.shape[1], dtype=torch.int64)], "x[:, torch.zeros("),
    "unknown": (lambda x: torch.fft.fft(x, dim=1).real, "torch.fft.fft(x, dim=1)"),
    "size": (lambda x: x / x.shape[1], "x / x.shape[1]"),
    "all": (lambda x: x - x.mean(), "x.mean()"),
    # token by token
    "norm": (lambda x: F.rms_norm(x, (HIDDEN,)) + x.softmax(-1) + F.normalize(x, dim=-1), ""),
    "heads": (lambda x: x.view(x.shape[0], x.shape[1], 2, -1).flip(2).flatten(2), ""),
    "flat": (lambda x: (x.reshape(-1, HIDDEN) @ torch.ones(HIDDEN, HIDDEN, dtype=x.dtype)).view_as(x), ""),
    "halves": (lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1) * x.cumsum(-1), ""),
    "positions": (lambda x: x * torch.arange(x.shape[1], dtype=x.dtype).sin()[:, None], ""),
    "chosen": (lambda x: x.masked_fill(x > 0, 0.5), ""),
    "router": (lambda x: routed(x), ""),
}


def routed(x: Tensor) -> Tensor:
    """Each token by one of two experts."""
    flat = x.reshape(-1, HIDDEN)
    expert = (flat.sum(-1) > 0).long()
    out = torch.zeros_like(flat)
    for number in range(2):
        (mine,) = torch.where(expert == number)
        out.index_add_(0, mine, (number + 1.5) * flat[mine].tanh())
    return out.view_as(x)


class Model(nn.Module):
    """One call of attention, and code of its own beside it."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = (
            nn.Embedding(VOCAB, HIDDEN),
            nn.Linear(HIDDEN, 3 * HIDDEN),
            nn.Linear(HIDDEN, VOCAB),
        )
        self.code = code

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits: Tensor = self.head(x + self.code(x))
        return logits


def made(code: Code) -> nn.Module:
    torch.manual_seed(0)
    return Model(code).double()


def verdict(code: Code, mesh: Mesh, mode: str) -> str:
    """``"exact"``, or the refusal; fails for what is neither."""
    tokens = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    targets = next_tokens(tokens)
    serial, model = made(code), made(code)
    loss = F.cross_entropy(serial(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    mine, labels_here = shard_sequence(tokens, mesh, mode), shard_sequence(targets, mesh, mode, pad=-100)
    with sequence_parallel(model, mesh, mode):
        try:
            logits = model(mine)
        except LayoutError as error:
            return str(error)
        share = loss_share(logits, labels_here, mesh, mode)
        share.backward()
    group = mesh.group("seq", "ring", "ulysses")
    whole = collectives.all_reduce(share.detach(), group)
    assert abs(float(whole - loss)) < 1e-9 * float(loss), f"loss {float(whole)} instead of {float(loss)}"
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert float((collectives.all_reduce(p.grad, group) - q.grad).abs().max()) < 1e-9
    return "exact"


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
@ranks(2)
def test_code_on_split_tokens(mode: str) -> None:
    mesh = Mesh({"seq": 2})
    for name, (code, quoted) in TABLE.items():
        found = verdict(code, mesh, mode)
        if not quoted:
            assert found == "exact", f"{name}: {found}"
        else:
            assert quoted in found and __file__ in found, f"{name}: {found}"
            assert "use a spec without sequence" in found, f"{name}: {found}"


@ranks(2)
def test_learned_positions_of_its_own_are_refused() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.places = Model(torch.tanh), nn.Parameter(torch.zeros(1, LENGTH, VOCAB))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens) + self.places[:, : tokens.shape[1]]

    for without_gradients in (False, True):
        mesh, model = Mesh({"seq": 2}), Placed()
        tokens = torch.zeros(2, LENGTH // 2, dtype=torch.int64)
        with (
            sequence_parallel(model, mesh, "ring"),
            torch.set_grad_enabled(not without_gradients),
            pytest.raises(LayoutError, match=r"self\.places\[:, : tokens\.shape\[1\]\]"),
        ):
            model(tokens)


@ranks(2)
def test_attention_to_something_else_than_the_split_tokens_is_refused() -> None:
    class Crossed(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            q = x.unflatten(-1, (2, -1))  # ``b s heads d``, where torch wants the heads first
            return self.head(F.scaled_dot_product_attention(q, q, q).flatten(2))

    mesh, model = Mesh({"seq": 2}), Crossed(torch.tanh)
    with (
        sequence_parallel(model, mesh, "ring"),
        pytest.raises(LayoutError, match="dim 2 is not the split dim of tokens"),
    ):
        model(torch.zeros(2, 2, dtype=torch.int64))


@ranks(2)
def test_attention_of_one_head_without_a_dim_for_it_is_told_what_to_write() -> None:
    class Single(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(F.scaled_dot_product_attention(x, x, x))

    mesh, model = Mesh({"seq": 2}), Single(torch.tanh)
    with (
        sequence_parallel(model, mesh, "ring"),
        pytest.raises(LayoutError, match=r"for one head pass query\.unsqueeze\(1\)"),
    ):
        model(torch.zeros(2, 2, dtype=torch.int64))
