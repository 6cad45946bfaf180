"""Random descriptions of models: what :func:`integration_tests.fuzz.models.build` makes a module of."""

from __future__ import annotations

import random
from typing import Any

from integration_tests.fuzz.parts import FUSED, GATED_NAMES, MLP_NAMES, NORMS, PROJECTIONS
from integration_tests.fuzz.streams import ELEMENTS, HIDDEN, SIZES, TOKENS

Description = dict[str, Any]

ACTS = ("gelu", "gelu", "tanh", "silu", "relu", "relu in place", "silu in place")

_FRESH = ("attention", "multihead", "mlp", "sequential", "gated")
"""Parts whose output no backward needs."""


def _maybe(draw: random.Random, chance: float) -> bool:
    return draw.random() < chance


def step(draw: random.Random) -> str:
    """Functional code on the stream."""
    return draw.choice(sorted(draw.choice([ELEMENTS, HIDDEN, TOKENS, SIZES])))


class Grammar:
    """Draws the parts of one model, all of one width."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.heads, size = draw.choice([(2, 4), (4, 2), (4, 4), (2, 2), (1, 4), (2, 1), (4, 1)])
        self.hidden = self.heads * size
        self.tokens = draw.choice([2, 4, 4, 5, 6, 7, 8])
        self.odd = _maybe(draw, 0.4)  # functional code and layers that are no transformer's
        self.first = False  # tokens first, rows behind

    def model(self) -> Description:
        """Any model."""
        draw = self.draw
        if _maybe(draw, 0.02):
            return self.hugging_face()
        comes = draw.choice(["ids"] * 7 + ["frames", "image", "features", "picture"])
        of: Description = dict(input=comes, hidden=self.hidden, tokens=self.tokens, vocab=draw.choice([7, 8, 11, 12]))
        if comes in ("image", "picture"):
            self.tokens = of["tokens"] = 4 + (comes == "image" and self._flag(of, "cls", 0.3))
        if comes in ("frames", "features"):
            of["features"] = draw.choice([3, 5])
        if comes == "ids" and _maybe(draw, 0.1):
            of["padding_idx"] = 0
        if comes == "ids":
            self._flag(of, "scaled", 0.15)
            self._flag(of, "by_frequency", 0.02)
            if _maybe(draw, 0.02):
                of["max_norm"] = 1.5
        if comes != "features" and _maybe(draw, 0.4):
            of["positions"] = draw.choice(["table", "table", "parameter", "buffer"])
        if comes != "features" and _maybe(draw, 0.08):
            self.first = of["tokens_first"] = True
        self._blocks(of, comes)
        if _maybe(draw, 0.7):
            of["final"] = draw.choice(NORMS)
        if self.odd and comes != "features":
            for where, chance in (("before", 0.12), ("between", 0.08), ("behind", 0.12)):
                if _maybe(draw, chance) and not (where == "between" and self.first):
                    of[where] = step(draw)
        self._head(of, comes)
        self._extras(of)
        return of

    def _flag(self, of: Description, name: str, chance: float) -> bool:
        if _maybe(self.draw, chance):
            of[name] = True
        return name in of

    # -- blocks -------------------------------------------------------------------------------------------------

    def _blocks(self, of: Description, comes: str) -> None:
        draw = self.draw
        count = draw.choice([1, 2, 2, 3, 4, 4])
        if comes == "features":
            made = [self.pointwise() for _ in range(count)]
        elif _maybe(draw, 0.1):
            made = [self.encoder_layer()] * count
            if _maybe(draw, 0.4):
                of["container"] = "encoder"
        elif _maybe(draw, 0.03):
            made = [dict(kind="decoder_layer", heads=self.heads, wide=self.wide(), batch_first=not self.first)] * count
            of["container"] = draw.choice(["ModuleList", "attributes"])
        elif _maybe(draw, 0.75):
            made = [self.block()] * count  # all alike, as most people have them
        else:
            made = [self.block() for _ in range(count)]
        of["blocks"] = made
        if "container" not in of:
            of["container"] = draw.choice(
                ["ModuleList"] * 4 + ["Sequential", "ModuleDict", "attributes", "layers inside"]
            )
            if len(made) > 1 and _maybe(draw, 0.08):
                of["order"] = draw.choice([[0, 1, 0, 1], [0, 0], [0, 1, 0], [*range(len(made)), 0]])
        if of["container"] in ("Sequential", "encoder") or any(one["kind"] != "block" for one in made):
            for one in made:
                one.pop("returns", None)
        elif _maybe(draw, 0.08):
            of["keywords"] = True
        for name, chance in (("share", 0.04), ("tie_blocks", 0.04), ("checkpoint", 0.04), ("skip", 0.04)):
            self._flag(of, name, chance)
        if self.odd:
            self._flag(of, "hook", 0.05)
            self._flag(of, "parametrized", 0.04)

    def block(self) -> Description:
        """A block of any kind."""
        draw = self.draw
        if _maybe(draw, 0.06):
            return self.encoder_layer()
        if self.odd and _maybe(draw, 0.06) and not self.first:
            return dict(kind="nested", inner=[self.plain_block() for _ in range(2)])
        if self.odd and _maybe(draw, 0.12):
            return self.pointwise()
        return self.plain_block()

    def plain_block(self) -> Description:
        """Parts with residuals and norms."""
        draw = self.draw
        parts = [self.part() for _ in range(draw.choice([1, 2, 2, 2, 3]))]
        if _maybe(draw, 0.5) and not self.first:
            parts = [self.attention(), self.feed_forward()]
        of: Description = dict(kind="block", parts=parts, norm=draw.choice(NORMS))
        of["residual"] = draw.choice(["pre"] * 6 + ["post", "post", "plain", "in place"])
        if of["residual"] == "in place" and any(part["kind"] not in _FRESH for part in parts):
            of["residual"] = "pre"  # torch forbids it where backward needs what a part made
        if _maybe(draw, 0.07):
            of["returns"] = "tuple"
        return of

    def pointwise(self) -> Description:
        """A part that stands alone, without a residual."""
        return self.draw.choice([self.sequential, self.linear, self.mlp, self.own])()

    def part(self) -> Description:
        """A part of a block."""
        draw, usual = self.draw, [self.feed_forward, self.feed_forward]
        if not self.first:
            usual += [self.attention, self.attention]
        usual.append(self.multihead)
        if self.odd:
            usual += [
                self.recurrent,
                self.linear,
                self.own,
                self.experts,
                self.adapted,
                self.counted,
                self.step,
            ]
            usual += [] if self.first else [self.conv, self.step]
        return draw.choice(usual)()

    def feed_forward(self) -> Description:
        """An MLP of some kind."""
        return self.draw.choice([self.mlp, self.mlp, self.sequential, self.gated])()

    def attention(self) -> Description:
        """Attention written with linear layers."""
        draw = self.draw
        of: Description = dict(kind="attention", heads=self.heads)
        of["how"] = draw.choice(["sdpa", "sdpa", "hand"])
        of["causal"] = _maybe(draw, 0.7)
        if _maybe(draw, 0.35):
            of["fused"], of["names"] = True, draw.choice(sorted(FUSED))
        else:
            of["names"] = draw.choice(sorted(PROJECTIONS))
            if self.heads > 1 and _maybe(draw, 0.15):
                of["kv_heads"] = self.heads // 2
        of["known"] = draw.choice(
            ["num_heads", "num_heads", "n_head", "heads", "head_dim", "head_dim"] + ["tuple"] * self.odd
        )
        of["merge"] = draw.choice(["flatten", "-1", "hidden"])
        of["bias"] = _maybe(draw, 0.6)
        self._flag(of, "head_norm", 0.08)
        self._flag(of, "dropout_module", 0.1)
        return of

    def multihead(self) -> Description:
        """torch's own attention."""
        of: Description = dict(kind="multihead", heads=self.heads, bias=_maybe(self.draw, 0.7))
        of["batch_first"] = not self.first and _maybe(self.draw, 0.9)
        if not of["batch_first"] and not self.first:
            of["batch_first"] = True
        self._flag(of, "causal", 0.4)
        self._flag(of, "weights", 0.1)
        return of

    def encoder_layer(self) -> Description:
        """torch's own layer."""
        draw = self.draw
        of: Description = dict(kind="encoder_layer", heads=self.heads, wide=self.wide(), batch_first=not self.first)
        of["act"] = draw.choice(["relu", "gelu"])
        self._flag(of, "norm_first", 0.5)
        return of

    def wide(self) -> int:
        """The width of an MLP."""
        return self.hidden * self.draw.choice([1, 2, 2, 2, 3, 4])

    def mlp(self) -> Description:
        """Two linear layers."""
        draw = self.draw
        of: Description = dict(
            kind="mlp", names=draw.choice(sorted(MLP_NAMES)), wide=self.wide(), act=draw.choice(ACTS)
        )
        of["bias"] = _maybe(draw, 0.7)
        self._flag(of, "functional", 0.3)
        self._flag(of, "inner_norm", 0.04)
        return of

    def sequential(self) -> Description:
        """The same as an nn.Sequential."""
        return dict(kind="sequential", wide=self.wide(), act=self.draw.choice(ACTS))

    def gated(self) -> Description:
        """A gated MLP."""
        of: Description = dict(kind="gated", names=self.draw.choice(sorted(GATED_NAMES)), wide=self.wide())
        self._flag(of, "bias", 0.3)
        self._flag(of, "fused", 0.2)
        return of

    def recurrent(self) -> Description:
        """An LSTM or GRU."""
        of: Description = dict(kind="recurrent", cell=self.draw.choice(["lstm", "gru"]), batch_first=not self.first)
        self._flag(of, "both_ways", 0.2)
        if _maybe(self.draw, 0.2):
            of["layers"] = 2
        return of

    def conv(self) -> Description:
        """A convolution over the tokens."""
        of: Description = dict(kind="conv")
        self._flag(of, "causal", 0.5)
        self._flag(of, "depthwise", 0.5)
        return of

    def linear(self) -> Description:
        """One linear layer."""
        return dict(
            kind="linear",
            name=self.draw.choice(["lin", "dense", "proj", "transform", "fc"]),
            act=self.draw.choice(ACTS),
        )

    def own(self) -> Description:
        """Bare parameters."""
        return dict(kind="own", how=self.draw.choice(["scale", "shift", "matmul", "einsum", "scalar"]))

    def experts(self) -> Description:
        """A dense mixture."""
        return {**self.mlp(), "kind": "experts", "experts": self.draw.choice([2, 3])}

    def adapted(self) -> Description:
        """A frozen layer and its adapter."""
        return dict(kind="adapted", rank=self.draw.choice([1, 2]))

    def counted(self) -> Description:
        """A layer with buffers."""
        return dict(kind="counted")

    def step(self) -> Description:
        """Functional code."""
        steps = sorted({**ELEMENTS, **HIDDEN}) if self.first else None
        return dict(kind="step", step=self.draw.choice(steps) if steps else step(self.draw))

    # -- what goes out ------------------------------------------------------------------------------------------

    def _head(self, of: Description, comes: str) -> None:
        draw = self.draw
        if comes != "features" and _maybe(draw, 0.15 if comes == "ids" else 0.5):
            of["pool"] = draw.choice(["mean", "first", "last", "max"])
        if comes not in ("ids", "image") and _maybe(draw, 0.3):
            pass  # the stream itself is the output
        else:
            of["head"] = dict(name=draw.choice(["head", "lm_head", "lm_head", "classifier", "decoder", "to_logits"]))
            self._flag(of["head"], "bias", 0.4)
            if comes == "ids" and "padding_idx" not in of:
                self._flag(of["head"], "tied", 0.2)
        if comes == "ids" and "pool" not in of and _maybe(draw, 0.2):
            of["out"] = draw.choice(["loss", "dict loss"])
        elif _maybe(draw, 0.15):
            of["out"] = draw.choice(["tuple", "dict"])

    def _extras(self, of: Description) -> None:
        draw = self.draw
        if _maybe(draw, 0.1):
            of["unused"] = draw.choice(["linear", "parameter"])
        if _maybe(draw, 0.12):
            of["frozen"] = [draw.choice(["embed", "norm", "bias", "blocks.0", "head", "weight_hh", "mlp", "attn"])]

        if of.get("head") is not None and "out" not in of and _maybe(draw, 0.06):
            of["loss"] = draw.choice(["ignore_index", "weights"])

    def hugging_face(self) -> Description:
        """A small model of transformers."""
        draw = self.draw
        tied = dict(tie_word_embeddings=draw.choice([True, False]), vocab_size=12)
        llama = dict(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=draw.choice([2, 4]),
            max_position_embeddings=16,
            **tied,
        )
        gpt2: Description = dict(n_embd=8, n_layer=2, n_head=2, n_positions=16, **tied)
        gpt2.update(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        family, config = draw.choice([("GPT2", gpt2), ("Llama", llama), ("Qwen2", llama)])
        how = draw.choice(["sdpa", "eager"])
        return dict(
            family=family,
            config=config,
            attention=how,
            input="ids",
            vocab=12,
            tokens=self.tokens,
            hidden=8,
            out="loss",
        )
