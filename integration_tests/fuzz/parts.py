"""The parts of random models, written as torch users write them: attention, MLPs, norms, recurrent and convolutional layers.

Every class is made from a JSON-like description. What a part is called, and how it does what it does, is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Description = Mapping[str, Any]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "silu in place": lambda: nn.SiLU(inplace=True),
}


class HandNorm(nn.Module):
    """A norm that a user wrote: RMS or with a mean, its scale under a name of its own."""

    def __init__(self, size: int, name: str = "weight", *, mean: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.name, self.mean, self.eps = name, mean, eps
        self.register_parameter(name, nn.Parameter(1 + 0.1 * torch.randn(size)))

    def forward(self, x: Tensor) -> Tensor:
        if self.mean:
            x = x - x.mean(-1, keepdim=True)
        found: Tensor = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * getattr(self, self.name)
        return found


def norm(kind: str, size: int) -> nn.Module:
    """A norm over the last dim, or none."""
    made: dict[str, Callable[[], nn.Module]] = {
        "layer": lambda: nn.LayerNorm(size),
        "layer no bias": lambda: nn.LayerNorm(size, bias=False),
        "layer plain": lambda: nn.LayerNorm(size, elementwise_affine=False),
        "layer eps": lambda: nn.LayerNorm(size, eps=1e-2),
        "rms": lambda: nn.RMSNorm(size),
        "rms eps": lambda: nn.RMSNorm(size, eps=1e-3),
        "rms plain": lambda: nn.RMSNorm(size, elementwise_affine=False),
        "hand rms": lambda: HandNorm(size),
        "hand rms scale": lambda: HandNorm(size, "scale"),
        "hand layer": lambda: HandNorm(size, "gain", mean=True),
        "none": nn.Identity,
    }
    return made[kind]()


NORMS = (
    "layer",
    "layer",
    "layer no bias",
    "layer plain",
    "layer eps",
    "rms",
    "rms eps",
    "rms plain",
    "hand rms",
    "hand rms scale",
    "hand layer",
    "none",
)

PROJECTIONS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "fairseq": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "bert": ("query", "key", "value", "dense"),
    "short": ("wq", "wk", "wv", "wo"),
    "diffusers": ("to_q", "to_k", "to_v", "to_out"),
    "letters": ("q", "k", "v", "o"),
    "odd": ("lin_a", "lin_b", "lin_c", "lin_d"),
}
FUSED = {
    "timm": ("qkv", "proj"),
    "gpt2": ("c_attn", "c_proj"),
    "flash": ("Wqkv", "out_proj"),
    "odd": ("mix", "unmix"),
}


class Attention(nn.Module):
    """Self-attention by ``nn.Linear`` projections, fused or apart, with scores by hand or by torch's function."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.of, self.hidden = dict(of), hidden
        heads, kv = int(of["heads"]), int(of.get("kv_heads", of["heads"]))
        size = hidden // heads
        known = of.get("known", "num_heads") if heads == kv else "head_dim"
        if known in ("num_heads", "n_head", "heads"):
            setattr(self, known, heads)
        elif known == "head_dim":
            self.head_dim = size
        self.known = known
        self.count = None if known in ("num_heads", "n_head", "heads", "head_dim") else (heads,)
        bias = bool(of.get("bias", True))
        if of.get("fused"):
            first, last = FUSED[of["names"]]
            self.names: tuple[str, ...] = (first, last)
            setattr(self, first, nn.Linear(hidden, 3 * hidden, bias=bias))
        else:
            self.names = PROJECTIONS[of["names"]]
            for name, wide in zip(self.names[:3], (heads, kv, kv), strict=True):
                setattr(self, name, nn.Linear(hidden, wide * size, bias=bias))
        self.groups = heads // kv
        setattr(self, self.names[-1], nn.Linear(hidden, hidden, bias=bias))
        if of.get("head_norm"):
            self.q_norm, self.k_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        if of.get("dropout_module"):
            self.attn_drop = nn.Dropout(0.0)

    def split(self, x: Tensor) -> Tensor:
        """``b t (n d)`` as ``b n t d``."""
        b, t, _ = x.shape
        if self.known == "head_dim":
            return x.view(b, t, -1, self.head_dim).transpose(1, 2)
        if self.count is not None:  # nothing but a tuple tells how many heads there are
            return x.reshape(b, t, -1, self.hidden // self.count[0]).transpose(1, 2)
        return x.view(b, t, getattr(self, self.known), -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        if self.of.get("fused"):
            q, k, v = getattr(self, self.names[0])(x).chunk(3, dim=-1)
        else:
            q, k, v = (getattr(self, name)(x) for name in self.names[:3])
        q, k, v = self.split(q), self.split(k), self.split(v)
        if self.of.get("head_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)
        causal = bool(self.of.get("causal", True))
        if self.of.get("how") == "hand":
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            if causal:
                mask = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
                scores = scores.masked_fill(~mask, float("-inf"))
            weights = F.softmax(scores, dim=-1)
            if self.of.get("dropout_module"):
                weights = self.attn_drop(weights)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        y = y.transpose(1, 2)
        merge = self.of.get("merge", "flatten")
        y = y.flatten(2) if merge == "flatten" else y.reshape(b, t, d if merge == "hidden" else -1)
        found: Tensor = getattr(self, self.names[-1])(y)
        return found


class Multihead(nn.Module):
    """``nn.MultiheadAttention`` inside a module, batch first or sequence first."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.of = dict(of)
        self.attn = nn.MultiheadAttention(
            hidden, int(of["heads"]), bias=bool(of.get("bias", True)), batch_first=bool(of.get("batch_first"))
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = None
        if self.of.get("causal"):
            t = x.shape[1] if self.of.get("batch_first") else x.shape[0]
            mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        found: Tensor = self.attn(x, x, x, attn_mask=mask, need_weights=bool(self.of.get("weights")))[0]
        return found


MLP_NAMES = {
    "llama": ("up_proj", "down_proj"),
    "gpt2": ("c_fc", "c_proj"),
    "timm": ("fc1", "fc2"),
    "neox": ("dense_h_to_4h", "dense_4h_to_h"),
    "torch": ("linear1", "linear2"),
    "odd": ("expand", "contract"),
}


class MLP(nn.Module):
    """Two linear layers and an activation."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.of, self.names = dict(of), MLP_NAMES[of["names"]]
        wide, bias = int(of["wide"]), bool(of.get("bias", True))
        setattr(self, self.names[0], nn.Linear(hidden, wide, bias=bias))
        self.act = ACTIVATIONS[of.get("act", "gelu")]()
        self.drop = float(of.get("drop", 0.0))
        if of.get("inner_norm"):
            self.inner_norm = nn.LayerNorm(wide)
        setattr(self, self.names[1], nn.Linear(wide, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, self.names[0])(x)
        y = F.gelu(y) if self.of.get("functional") else self.act(y)
        if self.of.get("inner_norm"):
            y = self.inner_norm(y)
        if self.drop:
            y = F.dropout(y, self.drop, self.training)
        found: Tensor = getattr(self, self.names[1])(y)
        return found


GATED_NAMES = {
    "llama": ("gate_proj", "up_proj", "down_proj"),
    "meta": ("w1", "w3", "w2"),
    "t5": ("wi_0", "wi_1", "wo"),
}


class Gated(nn.Module):
    """A gated MLP: gate and up apart, or fused and cut in two."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.of, wide, bias = dict(of), int(of["wide"]), bool(of.get("bias", False))
        if of.get("fused"):
            self.gate_up_proj = nn.Linear(hidden, 2 * wide, bias=bias)
            self.down_proj = nn.Linear(wide, hidden, bias=bias)
            return
        self.names = GATED_NAMES[of["names"]]
        for name in self.names[:2]:
            setattr(self, name, nn.Linear(hidden, wide, bias=bias))
        setattr(self, self.names[2], nn.Linear(wide, hidden, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        if self.of.get("fused"):
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            y: Tensor = self.down_proj(F.silu(gate) * up)
            return y
        gate, up, down = (getattr(self, name) for name in self.names)
        found: Tensor = down(F.silu(gate(x)) * up(x))
        return found


class Recurrent(nn.Module):
    """An LSTM or GRU over the tokens."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        made = nn.LSTM if of["cell"] == "lstm" else nn.GRU
        both = bool(of.get("both_ways"))
        self.rnn = made(
            hidden,
            hidden // 2 if both else hidden,
            num_layers=int(of.get("layers", 1)),
            batch_first=bool(of.get("batch_first")),
            bidirectional=both,
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.rnn(x)[0]
        return found


class TokenConv(nn.Module):
    """A convolution over the tokens, whole or of each channel, causal or not."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.causal = bool(of.get("causal"))
        groups = hidden if of.get("depthwise") else 1
        self.conv = nn.Conv1d(hidden, hidden, 3, padding=0 if self.causal else 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        found: Tensor = self.conv(F.pad(y, (2, 0)) if self.causal else y).transpose(1, 2)
        return found


class OneLinear(nn.Module):
    """A single linear layer of the stream, under an odd name."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.name = str(of["name"])
        setattr(self, self.name, nn.Linear(hidden, hidden, bias=bool(of.get("bias", True))))
        self.act = ACTIVATIONS[of.get("act", "tanh")]()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.act(getattr(self, self.name)(x))
        return found


class OwnParameters(nn.Module):
    """Bare parameters on the stream: a scale and a shift, or a matrix."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.how = str(of["how"])
        self.gamma = nn.Parameter(0.5 + 0.1 * torch.randn(hidden))
        if self.how == "shift":
            self.beta = nn.Parameter(0.1 * torch.randn(hidden))
        if self.how in ("matmul", "einsum"):
            self.mix = nn.Parameter(torch.randn(hidden, hidden) / math.sqrt(hidden))
        if self.how == "scalar":
            self.alpha = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "matmul":
            return (x @ self.mix) * self.gamma
        if self.how == "einsum":
            return torch.einsum("...h,hk->...k", x, self.mix) * self.gamma
        if self.how == "shift":
            return torch.addcmul(self.beta, x, self.gamma)
        return x * self.gamma * self.alpha if self.how == "scalar" else x * self.gamma


class Experts(nn.Module):
    """A mixture that weighs all of its experts: a router and a list of MLPs."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, int(of["experts"]), bias=False)
        self.experts = nn.ModuleList(MLP(hidden, of) for _ in range(int(of["experts"])))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + weights[..., number : number + 1] * expert(x)
        return out


class Adapted(nn.Module):
    """A linear layer that is frozen, and two small matrices beside it."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, hidden)
        self.base.requires_grad_(False)
        rank = int(of.get("rank", 2))
        self.lora_a, self.lora_b = nn.Linear(hidden, rank, bias=False), nn.Linear(rank, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.lora_b(self.lora_a(x)) * 2.0
        return found


class Counted(nn.Module):
    """A layer with buffers: one that is in the state dict and one that is not."""

    table: Tensor
    scale: Tensor

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.register_buffer("table", 1 + 0.1 * torch.arange(float(hidden)))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x * self.table) * self.scale
        return found
