"""Small models to split: plain ones, written the ways people write them, and Hugging Face ones of random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HIDDEN, HEADS, VOCAB, POSITIONS = 16, 4, 37, 16


@dataclass
class Output:
    """What the plain language models return."""

    loss: Tensor | None
    logits: Tensor


class NextTokenLoss(nn.Module):
    """Mean cross entropy with the next token, over the labels that count."""

    causal_lm_loss = True
    label_smoothing, z_loss = 0.1, 1e-3

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).reshape(-1)
        counts = targets != -100
        rows = logits.reshape(-1, logits.shape[-1])
        total = F.cross_entropy(rows, targets, label_smoothing=self.label_smoothing, reduction="sum")
        return (total + self.z_loss * (rows.logsumexp(-1).square() * counts).sum()) / counts.sum().clamp(min=1)


# -- over a flat stream of tokens -----------------------------------------------------------------------------------


class FlatAttention(nn.Module):
    """``m h -> m h`` by one fused projection."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        heads, kv_heads = self.n_heads, self.n_kv_heads
        qkv = self.qkv(x).view(-1, seq_len, heads + 2 * kv_heads, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        return self.out(y.transpose(1, 2).reshape(-1, heads * self.head_dim))


class FlatMLP(nn.Module):
    """``m h -> m h``: GELU, or SwiGLU with gate and up in one projection."""

    def __init__(self, hidden: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.up = nn.Linear(hidden, 2 * inner if gated else inner, bias=not gated)
        self.down = nn.Linear(inner, hidden, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(x))


class FlatBlock(nn.Module):
    """A block of either."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, gated: bool, dropout: float = 0.0) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, eps=1e-6) if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(hidden), norm(hidden)
        self.attn = FlatAttention(hidden, heads, kv_heads, bias=not gated)
        self.mlp = FlatMLP(hidden, 3 * hidden if gated else 4 * hidden, gated)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seq_len: int) -> Tensor:
        x = x + self.dropout(self.attn(self.norm1(x), seq_len))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Flat(nn.Module):
    """GPT (LayerNorm, biases, learned positions, tied head) or Llama (RMSNorm, SwiGLU, GQA), on ``m h``."""

    flat_tokens = True

    def __init__(
        self,
        gated: bool,
        kv_heads: int = HEADS,
        dropout: float = 0.0,
        vocab: int = VOCAB,
        hidden: int = HIDDEN,
        heads: int = HEADS,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.positions = None if gated else nn.Embedding(POSITIONS, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(FlatBlock(hidden, heads, kv_heads, gated, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6) if gated else nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.loss = NextTokenLoss()
        if not gated:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        batch, seq_len = input_ids.shape
        x = self.embed(input_ids.reshape(-1))
        if self.positions is not None:
            x = x + self.positions(torch.arange(seq_len).repeat(batch))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, seq_len)
        logits = self.head(self.norm(x))
        if labels is not None:
            return Output(loss=self.loss(logits, labels), logits=logits)
        return Output(loss=None, logits=logits.view(-1, seq_len, logits.shape[-1]))


# -- over b s h -----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """``b s h -> b s h`` with the weights written out, and batch and length read off the input, as in a lecture."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, hidden // heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out_proj = nn.Linear(hidden, hidden)
        self.attn_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            project(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), float("-inf"))
        y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.out_proj(y.transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    """``b s h -> b s h``; dropout in the middle of the MLP too, by module and by function."""

    def __init__(self, hidden: int = HIDDEN, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attn = Attention(hidden, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * hidden, hidden)
        )
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.ln1(x)), self.dropout, self.training)
        return x + F.dropout(self.mlp(self.ln2(x)), p=self.dropout, training=self.training)


class Classic(nn.Module):
    """A decoder on ``b s h`` that returns its logits; positions expanded over the batch."""

    def __init__(
        self, dropout: float = 0.0, hidden: int = HIDDEN, heads: int = HEADS, sequential: bool = False
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, hidden)
        self.pos_emb = nn.Embedding(POSITIONS, hidden)
        blocks = [Block(hidden, heads, dropout) for _ in range(2)]
        self.blocks = nn.Sequential(*blocks) if sequential else nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(hidden)
        self.to_logits = nn.Linear(hidden, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        b, s = ids.shape
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(s).expand(b, s))
        if isinstance(self.blocks, nn.Sequential):
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.to_logits(self.ln_f(x))


class Encoder(Classic):
    """The same without a head: the residual stream comes out."""

    def __init__(self) -> None:
        super().__init__()
        del self.to_logits

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)


class GatedMLP(nn.Module):
    """Two projections that read one input."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, 3 * hidden)
        self.down = nn.Linear(3 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class ResidualMLP(GatedMLP):
    """The same with the input used once more, beside the projections."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * torch.tanh(x)


class FusedAttention(nn.Module):
    """One projection for queries, keys and values; batch and length read off the input."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.head_dim = HEADS, HIDDEN // HEADS
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.c_attn(x).view(b, s, 3, self.n_head, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, s, -1))


class AllInOne(nn.Module):
    """Norms, attention and MLP in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.ln1, self.ln2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class CrossAttention(nn.Module):
    """Queries of the stream, keys and values of its reverse: two inputs for three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        context = x.flip(1)
        q, k, v = (
            project.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj(x), self.k_proj(context), self.v_proj(context))
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Images to classes: patches by a convolution, blocks, the mean of the patches, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, HIDDEN, kernel_size=2, stride=2)
        self.pos = nn.Embedding(8, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = x + self.pos(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Router(nn.Module):
    """A layer that no rule knows, after a layer of one's own that is as wide as the stream: kept whole by a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(x @ self.mix)) + x.mean(1, keepdim=True)


class WithRouter(Classic):
    """A model with a layer to keep whole between its blocks."""

    def __init__(self) -> None:
        super().__init__(sequential=True)
        self.blocks = nn.Sequential(Block(), Router(), Block())


def mlp() -> nn.Sequential:
    """Two layers told apart by shape alone."""
    return nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, HIDDEN))


# -- Hugging Face ---------------------------------------------------------------------------------------------------


def hugging_face(kind: str, *, vocab: int = 101, layers: int = 2, **settings: Any) -> nn.Module:
    """OPT, GPT-2, Llama, Qwen2, Qwen3 or GPT-NeoX, small, with random weights and no dropout unless settings say so."""
    import transformers as t

    common = dict(vocab_size=vocab, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "opt":
        config = t.OPTConfig(
            **common,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=32,
            word_embed_proj_dim=32,
            **{"dropout": 0.0, **settings},
        )
        return t.OPTForCausalLM(config)
    if kind == "gpt2":
        none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = t.GPT2Config(**common, n_embd=32, n_layer=layers, n_head=4, n_positions=32, **{**none, **settings})
        return t.GPT2LMHeadModel(config)
    if kind == "neox":
        config = t.GPTNeoXConfig(
            **common,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            **settings,
        )
        return t.GPTNeoXForCausalLM(config)
    config_of, model_of = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM),
        "qwen3": (t.Qwen3Config, t.Qwen3ForCausalLM),
    }[kind]
    config = config_of(
        **common,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=32,
        **{"num_key_value_heads": 2, "tie_word_embeddings": kind == "qwen2", **settings},
    )
    return model_of(config)


def exact_reference(model: nn.Module) -> nn.Module:
    """Let a Hugging Face model in float64 compute its norms and its loss in float64 too, not in float32."""

    def loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1))

    model.loss_function = loss
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return model


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


LANGUAGE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": partial(Flat, gated=False),
    "llama": partial(Flat, gated=True, kv_heads=2),
    "llama with one key/value head": partial(Flat, gated=True, kv_heads=1),
    "classic": Classic,
    "classic in a Sequential": partial(Classic, sequential=True),
}
PARTS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "gated mlp": GatedMLP,
    "gated mlp with a residual inside": ResidualMLP,
    "attention": Attention,
    "fused attention": FusedAttention,
    "block": Block,
}
UNUSUAL: dict[str, Callable[[], nn.Module]] = {"all in one": AllInOne, "cross-attention": CrossAttention}
"""What can be split where attention has the stream's tokens."""
