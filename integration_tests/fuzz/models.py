"""Whole models from a description: what comes in, blocks in some container, norms, a head, and what goes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.fuzz import parts
from integration_tests.fuzz.parts import Description
from integration_tests.fuzz.streams import STEPS

PARTS: dict[str, Callable[[int, Description], nn.Module]] = {
    "attention": parts.Attention,
    "multihead": parts.Multihead,
    "mlp": parts.MLP,
    "gated": parts.Gated,
    "recurrent": parts.Recurrent,
    "conv": parts.TokenConv,
    "linear": parts.OneLinear,
    "own": parts.OwnParameters,
    "experts": parts.Experts,
    "adapted": parts.Adapted,
    "counted": parts.Counted,
}


class Step(nn.Module):
    """Functional code on the stream."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.step = str(of["step"])

    def forward(self, x: Tensor) -> Tensor:
        return STEPS[self.step](x)


def sequential(hidden: int, of: Description) -> nn.Module:
    """``nn.Sequential(Linear, activation, Linear)`` as it stands."""
    wide = int(of["wide"])
    act = parts.ACTIVATIONS[of.get("act", "gelu")]()
    return nn.Sequential(nn.Linear(hidden, wide), act, nn.Linear(wide, hidden))


def encoder_layer(hidden: int, of: Description) -> nn.Module:
    """torch's own layer of a transformer."""
    return nn.TransformerEncoderLayer(
        hidden,
        int(of["heads"]),
        int(of["wide"]),
        dropout=0.0,
        activation=str(of.get("act", "relu")),
        batch_first=bool(of.get("batch_first")),
        norm_first=bool(of.get("norm_first")),
    )


def decoder_layer(hidden: int, of: Description) -> nn.Module:
    """torch's own layer of a decoder, which attends to what came in as well."""
    return nn.TransformerDecoderLayer(
        hidden, int(of["heads"]), int(of["wide"]), dropout=0.0, batch_first=bool(of.get("batch_first"))
    )


def part(hidden: int, of: Description) -> nn.Module:
    """A part of a block."""
    if of["kind"] == "sequential":
        return sequential(hidden, of)
    return (Step if of["kind"] == "step" else PARTS[of["kind"]])(hidden, of)


PART_NAMES = {
    "attention": "attn",
    "multihead": "self_attn",
    "mlp": "mlp",
    "sequential": "mlp",
    "gated": "feed_forward",
    "recurrent": "mixer",
    "conv": "conv",
    "experts": "moe",
}


class Block(nn.Module):
    """Parts one behind the other, each with a norm before or behind it, or none, and a residual or none."""

    def __init__(self, hidden: int, of: Description) -> None:
        super().__init__()
        self.drop = nn.Dropout(float(of.get("drop", 0.0)))
        self.how, self.returns = of.get("residual", "pre"), of.get("returns", "tensor")
        self.names: list[tuple[str, str]] = []
        for number, one in enumerate(of["parts"]):
            name = PART_NAMES.get(one["kind"], one["kind"])
            name = f"{name}{number}" if hasattr(self, name) else name
            setattr(self, name, part(hidden, one))
            self.names.append((name, f"norm{number + 1}"))
            if self.how != "plain":
                setattr(self, f"norm{number + 1}", parts.norm(of.get("norm", "layer"), hidden))

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        for name, norm in self.names:
            if self.how == "pre":
                x = x + scale * self.drop(getattr(self, name)(getattr(self, norm)(x)))
            elif self.how == "post":
                x = getattr(self, norm)(x + getattr(self, name)(x))
            elif self.how == "in place":
                y = getattr(self, name)(getattr(self, norm)(x))
                y += x
                x = y
            else:
                x = getattr(self, name)(x)
        return (x, None) if self.returns == "tuple" else x


def block(hidden: int, of: Description) -> nn.Module:
    """One member of the list of blocks."""
    if of["kind"] == "encoder_layer":
        return encoder_layer(hidden, of)
    if of["kind"] == "decoder_layer":
        return decoder_layer(hidden, of)
    if of["kind"] == "block":
        return Block(hidden, of)
    if of["kind"] == "nested":
        return nn.Sequential(*(block(hidden, inner) for inner in of["inner"]))
    return part(hidden, of)


def bind(of: Description, blocks: list[nn.Module]) -> None:
    """Let blocks have a part, or the weight of one, in common; hook and parametrize what is asked for."""
    first, *others = blocks
    linears = [[m for m in one.modules() if isinstance(m, nn.Linear)] for one in blocks]
    if of.get("share") and isinstance(first, Block):
        name = first.names[0][0]
        for other in others:
            if type(getattr(other, name, None)) is type(getattr(first, name)):
                setattr(other, name, getattr(first, name))
    if of.get("tie_blocks") and linears[0]:
        for each in linears[1:]:
            if each and each[0].weight.shape == linears[0][0].weight.shape:
                each[0].weight = linears[0][0].weight
    if of.get("hook") and linears[0]:
        linears[0][0].register_forward_hook(lambda module, args, output: output * 0.5)
    if of.get("parametrized") and linears[0]:
        nn.utils.parametrizations.weight_norm(linears[0][0])


class Model(nn.Module):
    """A stem, blocks and a head."""

    pe: Tensor

    def __init__(self, of: Description) -> None:
        super().__init__()
        self.of, hidden = dict(of), int(of["hidden"])
        self._stem(of, hidden)
        made = [block(hidden, one) for one in of["blocks"]]
        bind(of, made)
        self._contain(of.get("container", "ModuleList"), [made[i] for i in of.get("order") or range(len(made))])
        if of.get("final", "none") != "none":
            self.norm = parts.norm(of["final"], hidden)
        if of.get("unused") == "linear":
            self.spare = nn.Linear(hidden, hidden)
        elif of.get("unused") == "parameter":
            self.spare_bias = nn.Parameter(torch.randn(hidden))
        if of.get("head") is not None:
            self.head_name = str(of["head"]["name"])
            head = nn.Linear(hidden, int(of["vocab"]), bias=bool(of["head"].get("bias")))
            setattr(self, self.head_name, head)
            if of["head"].get("tied"):
                head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if any(word in name for word in of.get("frozen", ())):
                parameter.requires_grad_(False)

    def _stem(self, of: Description, hidden: int) -> None:
        comes = of["input"]
        if comes == "ids":
            self.embed = nn.Embedding(
                int(of["vocab"]),
                hidden,
                padding_idx=of.get("padding_idx"),
                max_norm=of.get("max_norm"),
                scale_grad_by_freq=bool(of.get("by_frequency")),
            )
        elif comes == "image":
            patch = int(of.get("patch", 2))
            self.patch = nn.Conv2d(3, hidden, patch, patch)
            if of.get("cls"):
                self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, hidden))
        elif comes == "picture":
            self.conv1, self.conv2 = nn.Conv2d(3, hidden, 3, padding=1), nn.Conv2d(hidden, hidden, 3, 2, 1)
            self.gn = nn.GroupNorm(2, hidden)
        else:
            self.inp = nn.Linear(int(of["features"]), hidden)
        where = of.get("positions")
        if where == "table":
            self.pos_emb = nn.Embedding(int(of["tokens"]) + 2, hidden)
        elif where == "parameter":
            self.pos = nn.Parameter(0.1 * torch.randn(1, int(of["tokens"]), hidden))
        elif where == "buffer":
            angles = torch.arange(float(of["tokens"]))[:, None] / 10 ** (torch.arange(float(hidden)) / hidden)
            self.register_buffer("pe", angles.sin())

    def _contain(self, container: str, blocks: list[nn.Module]) -> None:
        if container == "ModuleList":
            self.blocks: nn.Module = nn.ModuleList(blocks)
        elif container == "ModuleDict":
            self.blocks = nn.ModuleDict({f"step_{i}": one for i, one in enumerate(blocks)})
        elif container == "Sequential":
            self.blocks = nn.Sequential(*blocks)
        elif container == "layers inside":
            self.body = nn.Module()
            self.body.layers = nn.ModuleList(blocks)
        elif container == "encoder":
            self.blocks = nn.TransformerEncoder(blocks[0], len(blocks), enable_nested_tensor=False)  # type: ignore[arg-type]
        else:
            for i, one in enumerate(blocks):
                setattr(self, f"block{i + 1}", one)
        self.count = len(blocks)

    def _run(self, x: Tensor) -> Tensor:
        container, came = self.of.get("container", "ModuleList"), x
        if container in ("Sequential", "encoder"):
            found: Tensor = self.blocks(x)
            return found
        for one in self._each(container):
            if isinstance(one, Block) and self.of.get("keywords"):
                x = one(x=x, scale=0.5)
            elif isinstance(one, nn.TransformerDecoderLayer):
                x = one(x, came)
            elif self.of.get("checkpoint"):
                x = checkpoint(one, x, use_reentrant=False)
            else:
                x = one(x)
            if isinstance(x, tuple):
                x = x[0]
            if self.of.get("between") is not None:
                x = STEPS[self.of["between"]](x)
        return x

    def _each(self, container: str) -> Iterable[nn.Module]:
        if container == "ModuleDict":
            return self.blocks.values()  # type: ignore[operator, no-any-return]
        if container == "layers inside":
            return self.body.layers  # type: ignore[return-value]
        if container == "attributes":
            return [getattr(self, f"block{i + 1}") for i in range(self.count)]
        return self.blocks  # type: ignore[return-value]

    def _enter(self, given: Tensor) -> Tensor:
        comes, hidden = self.of["input"], int(self.of["hidden"])
        if comes == "ids":
            x: Tensor = self.embed(given)
            if self.of.get("scaled"):
                x = x * math.sqrt(hidden)
        elif comes == "image":
            x = self.patch(given).flatten(2).transpose(1, 2)
            if self.of.get("cls"):
                x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        elif comes == "picture":
            x = self.gn(F.relu(self.conv2(F.gelu(self.conv1(given))))).flatten(2).transpose(1, 2)
        else:
            x = self.inp(given)
        where = self.of.get("positions")
        if where == "table":
            x = x + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        elif where == "parameter":
            x = x + self.pos[:, : x.shape[1]]
        elif where == "buffer":
            x = x + self.pe[: x.shape[1]]
        return x

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self._enter(input_ids)
        if self.of.get("before") is not None:
            x = STEPS[self.of["before"]](x)
        came = x
        if self.of.get("tokens_first"):
            x = self._run(x.transpose(0, 1)).transpose(0, 1)
        else:
            x = self._run(x)
        if self.of.get("skip"):
            x = x + came
        if self.of.get("final", "none") != "none":
            x = self.norm(x)
        if self.of.get("behind") is not None:
            x = STEPS[self.of["behind"]](x)
        pool = self.of.get("pool")
        if pool is not None:
            x = {
                "mean": lambda: x.mean(1),
                "first": lambda: x[:, 0],
                "last": lambda: x[:, -1],
                "max": lambda: x.amax(1),
            }[pool]()
        if self.of.get("head") is not None:
            x = getattr(self, self.head_name)(x)
        return self._out(x, labels)

    def _out(self, x: Tensor, labels: Tensor | None) -> Any:
        out = self.of.get("out", "tensor")
        if out == "loss":
            if labels is None:
                return SimpleNamespace(loss=None, logits=x)
            loss = F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return SimpleNamespace(loss=loss, logits=x)
        if out == "dict loss" and labels is not None:
            return {
                "loss": F.cross_entropy(x[:, :-1].reshape(-1, x.shape[-1]), labels[:, 1:].reshape(-1)),
                "logits": x,
            }
        if out == "tuple":
            return x, None
        return {"logits": x} if out == "dict" else x


def hugging_face(of: Description) -> nn.Module:
    """A small model of transformers."""
    import transformers

    config = getattr(transformers, f"{of['family']}Config")(**of["config"])
    config._attn_implementation = str(of.get("attention", "sdpa"))
    config.bos_token_id = config.eos_token_id = None
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def dropping(of: Description, chance: float) -> Description:
    """A description in which all blocks drop."""
    blocks = [
        {**one, "drop": chance, "parts": [dict(p, drop=chance) for p in one.get("parts", ())]} for one in of["blocks"]
    ]
    return {**of, "blocks": blocks}


def build(of: Description, seed: int) -> nn.Module:
    """The model, with the same weights for the same seed, in float64."""
    torch.manual_seed(seed)
    made = hugging_face(of) if of.get("family") else Model(of)
    return made.double()
