"""Whole models under sequence parallelism: loss and every gradient, summed over the axis, equal one process's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.mesh import Mesh, collectives
from meshfold.mesh.errors import LayoutError
from meshfold.mesh.testing import ranks
from meshfold.sequence import loss_share, next_tokens, sequence_parallel, shard_sequence

VOCAB, BATCH = 31, 2


class Tiny(nn.Module):
    """A model of nobody: it counts positions itself, once in a block that is checkpointed if asked."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.positions = nn.Embedding(VOCAB, 16), nn.Embedding(64, 16)
        self.block, self.head = TinyBlock(), nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        logits: Tensor = self.head(x)
        return logits


class Around(nn.Module):
    """A model of Hugging Face inside of one's own, which knows of no positions."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens, use_cache=False).logits
        return logits


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.01 * torch.arange(x.shape[1], device=x.device).unsqueeze(-1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def made(name: str) -> nn.Module:
    """A tiny model in float64, the same on every rank."""
    torch.manual_seed(0)
    size: dict[str, Any] = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, intermediate_size=24)
    heads: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2)
    if name == "Llama inside":
        return Around(made("Llama"))
    if name in ("Tiny", "Tiny recomputed"):
        return Tiny(recompute="recomputed" in name).double()
    if name.startswith("own"):
        from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

        if name == "own GPT":
            own: nn.Module = GPT(GPTConfig(vocab_size=VOCAB, hidden=16, layers=2, heads=4, max_positions=64))
        else:
            own = Llama(LlamaConfig(vocab_size=VOCAB, hidden=16, layers=2, heads=4, kv_heads=2))
        return own.double()
    import transformers as hf

    model: nn.Module
    if name == "Llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**size, **heads))
    elif name == "Qwen2":
        model = hf.Qwen2ForCausalLM(
            hf.Qwen2Config(**size, **heads, use_sliding_window=True, sliding_window=5, max_window_layers=1)
        )
    else:
        sizes: dict[str, Any] = dict(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64)
        model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))
    return model.double()


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def compare(name: str, mesh: Mesh, mode: str, length: int, documents: tuple[int, ...] | None = None) -> None:
    tokens = torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(5))
    targets = next_tokens(tokens, documents)

    serial = made(name)
    if documents is None:
        loss = F.cross_entropy(logits_of(serial, tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
    else:  # each document by itself
        total = torch.zeros((), dtype=torch.float64)
        for start, stop in pairwise(documents):
            logits = logits_of(serial, tokens[:, start:stop])
            part = targets[:, start:stop].flatten()
            total = total + F.cross_entropy(logits.flatten(0, 1), part, ignore_index=-100, reduction="sum")
        loss = total / (targets != -100).sum()
    loss.backward()

    model = made(name)
    mine = shard_sequence(tokens, mesh, mode)
    labels_here = shard_sequence(targets, mesh, mode, pad=-100)
    with sequence_parallel(model, mesh, mode, length=length, documents=documents):
        share = loss_share(logits_of(model, mine), labels_here, mesh, mode)
        share.backward()
    group = mesh.group("seq", "ring", "ulysses")
    whole = collectives.all_reduce(share.detach(), group)
    assert abs(float(whole - loss)) < 1e-9 * float(loss), f"loss {float(whole)} instead of {float(loss)}"
    largest = max(float(p.grad.abs().max()) for p in serial.parameters() if p.grad is not None)
    for (what, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        error = float((collectives.all_reduce(p.grad, group) - q.grad).abs().max()) / largest
        assert error < 1e-9, f"gradient of {what} is off by {error:.2g}"
    again = logits_of(model, tokens)  # removed: the model is what it was
    assert torch.equal(again, logits_of(made(name), tokens))


MODELS = ["Tiny", "Tiny recomputed", "own GPT", "own Llama", "Llama", "Llama inside", "GPT2", "Qwen2"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
@ranks(2)
def test_ring_on_two_ranks(name: str) -> None:
    compare(name, Mesh({"seq": 2}), "ring", 24)
    compare(name, Mesh({"seq": 2}), "ring", 21)  # with padding


@pytest.mark.few(2)
@pytest.mark.parametrize("name", MODELS)
@ranks(4)
def test_ring_on_four_ranks(name: str) -> None:
    compare(name, Mesh({"seq": 4}), "ring", 24)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["Tiny", "own GPT", "Qwen2"])
@ranks(4)
def test_the_other_modes(name: str) -> None:
    compare(name, Mesh({"seq": 4}), "ulysses", 24)
    compare(name, Mesh({"ring": 2, "ulysses": 2}), "ring_ulysses", 22)
    compare(name, Mesh({"seq": 4}), "ring_self", 24)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["Tiny", "own Llama", "Llama", "GPT2"])
@ranks(2)
def test_packed_documents(name: str) -> None:
    """Each document is what it is alone: its own positions, its own keys."""
    compare(name, Mesh({"seq": 2}), "ring", 20, (0, 7, 9, 20))


@ranks(2)
def test_hugging_face_loss_from_shifted_labels() -> None:
    mesh = Mesh({"seq": 2})
    tokens = torch.randint(VOCAB, (BATCH, 12), generator=torch.Generator().manual_seed(6))
    serial = made("Llama")
    loss = serial(input_ids=tokens, labels=tokens).loss
    model = made("Llama")
    targets = next_tokens(tokens)
    with sequence_parallel(model, mesh):
        mine = shard_sequence(tokens, mesh)
        labels_here = shard_sequence(targets, mesh, pad=-100)
        with pytest.raises(LayoutError, match="next_tokens"):
            model(input_ids=mine, labels=mine)
        count = (targets != -100).sum()
        out = model(input_ids=mine, labels=labels_here, shift_labels=labels_here, num_items_in_batch=count)
    whole = collectives.all_reduce(out.loss.detach(), mesh.group("seq"))
    assert float(whole) == pytest.approx(float(loss), rel=1e-6)


@ranks(2)
def test_batches_of_other_lengths() -> None:
    mesh, model = Mesh({"seq": 2}), made("Llama").eval()
    handle = sequence_parallel(model, mesh)
    for length in (8, 11):
        tokens = torch.arange(length).unsqueeze(0)
        handle.set_batch(length=length)
        got = logits_of(model, shard_sequence(tokens, mesh))
        wanted = shard_sequence(logits_of(made("Llama").eval(), tokens), mesh)
        real = shard_sequence(torch.ones(1, length), mesh).bool()
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-10, atol=1e-10)
    handle.remove()


def test_what_a_split_sequence_cannot_do_is_refused() -> None:
    mesh = Mesh({})
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    model = made("Llama")
    with sequence_parallel(model, mesh):
        with pytest.raises(LayoutError, match="attention_mask hides"):
            model(tokens, attention_mask=torch.tensor([[0, 1, 1, 1, 1, 1]]))
        model(tokens, attention_mask=torch.ones_like(tokens))
        with pytest.raises(LayoutError, match="tokens"):
            model()
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.self_attn.attention_dropout = 0.1  # type: ignore[union-attr]
    with sequence_parallel(model.train(), mesh), pytest.raises(LayoutError, match=r"dropout=0\.1"):
        model(tokens)
    own = made("own GPT")
    with sequence_parallel(own, mesh), pytest.raises(LayoutError, match="loss_share"):
        own(tokens, labels=tokens)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_of_the_models_own_has_to_be_explained() -> None:
    x = torch.randn(1, 2, 5, 8)
    model = Masked()
    with sequence_parallel(model, Mesh({})), pytest.raises(LayoutError, match="causal=True"):
        model(x)
    with sequence_parallel(model, Mesh({}), causal=True):
        got = model(x)
    torch.testing.assert_close(got, model(x))


class ByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize(
    "model",
    [
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True),
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval(),
    ],
    ids=["train", "eval"],
)
def test_attention_out_of_reach_is_refused(model: nn.Module) -> None:
    x = torch.randn(1, 4, 8)
    with (
        sequence_parallel(model, Mesh({})),
        torch.no_grad(),
        pytest.raises(LayoutError, match="MultiheadAttention"),
    ):
        model(x)
    model(x)


def test_attention_by_hand_is_noticed() -> None:
    x, model = torch.randn(1, 4, 8), ByHand()
    with sequence_parallel(model, Mesh({})), pytest.raises(LayoutError, match="saw only its own tokens"):
        model(x)
    model(x)


def test_an_error_in_a_forward_leaves_nothing_behind() -> None:
    model = made("Tiny")
    with sequence_parallel(model, Mesh({})):
        with pytest.raises(IndexError):
            model(torch.full((1, 4), VOCAB + 1))
        assert torch.equal(torch.arange(4), torch.tensor([0, 1, 2, 3]))
        out = F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3, attn_mask=torch.ones(2, 2).bool())
        assert out.shape == (1, 1, 2, 4)  # would be refused if attention were still replaced
        model(torch.zeros(1, 4, dtype=torch.int64))
