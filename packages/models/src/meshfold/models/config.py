"""Configurations of the models: checked settings, and the counts that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, TypeVar

from meshfold.mesh import SpecError, did_you_mean

Config = TypeVar("Config", bound=Any)


def changed(name: str, config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the configuration of a preset's name with some fields changed.

    Raises:
        SpecError: for an unknown field, or sizes that do not fit together.
    """
    known = config.__dataclass_fields__
    for field in changes:
        if field not in known:
            raise SpecError(
                f"model {name!r} has no setting {field!r}.{did_you_mean(field, known)} Known: {', '.join(known)}"
            )
    made: Config = replace(config, **changes)
    return made


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Settings that GPT and Llama share.

    Attributes:
        vocab_size: words.
        hidden: size of the residual stream, in elements.
        layers: blocks.
        heads: attention heads.
        kv_heads: key/value heads, each shared by ``heads / kv_heads`` heads; None for one each.
        head_dim: elements of a head; None for ``hidden / heads``.
        ffn: inner size of the MLP; None for the family's usual one.
        max_positions: longest sequence, in tokens.
        window: a token sees itself and ``window - 1`` before (Mistral's sliding window, arXiv 2310.06825); None: all before.
        tie: whether the head is the token embedding, transposed.
        dropout: probability with which the embedding and what each block adds are dropped.
        label_smoothing: of the loss.
        z_loss: of the loss.

    Raises:
        SpecError: for sizes that do not fit together.
    """

    kind: ClassVar[str]

    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    max_positions: int = 1024
    window: int | None = None
    tie: bool = True
    dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "ffn",
            "max_positions",
            "window",
        ):
            value = getattr(self, name)
            optional = name in ("kv_heads", "head_dim", "ffn", "window")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"{type(self).__name__}({name}={value!r}): give a whole number from 1 up")
        if self.head_dim is None and self.hidden % self.heads:
            hidden = -(-self.hidden // self.heads) * self.heads
            heads = max(n for n in range(1, min(self.heads, self.hidden) + 1) if self.hidden % n == 0)
            raise SpecError(
                f"{type(self).__name__}(hidden={self.hidden}, heads={self.heads}): {self.heads} heads do not divide "
                f"{self.hidden}; write heads={heads}, hidden={hidden}, or head_dim={hidden // self.heads}"
            )
        if self.heads % self.n_kv_heads:
            raise SpecError(
                f"{type(self).__name__}(heads={self.heads}, kv_heads={self.kv_heads}): {self.kv_heads} does not divide "
                f"{self.heads}, so the heads cannot be shared out evenly"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"{type(self).__name__}(dropout={self.dropout!r}): give a probability from 0 to below 1")

    @property
    def learned_positions(self) -> int | None:
        """Rows of the table of positions; None for positions that are computed."""
        return None

    def checkpoint_description(self) -> dict[str, Any]:
        """Return the part of this configuration that a checkpoint keeps."""
        return {"kind": self.kind, "config": asdict(self)}

    @property
    def n_kv_heads(self) -> int:
        """Key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def d(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def inner(self) -> int:
        """Inner size of the MLP, in elements."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def qkv_parts(self) -> tuple[int, int, int]:
        """Sizes of Q, K and V in the fused projection, in elements."""
        return self.heads * self.d, self.n_kv_heads * self.d, self.n_kv_heads * self.d

    def matmul_parameters(self) -> int:
        """Return the number of parameters that multiply every token: all but look-ups, norms and biases; the head once."""
        raise NotImplementedError

    def num_parameters(self) -> int:
        """Return the number of parameters of the model, tied ones once."""
        raise NotImplementedError

    def flops_per_token(self, sequence_length: int) -> int:
        """Return the floating-point operations of forward and backward for one token of a sequence of this length.

        6 for each parameter of a matmul and 12 · layers · heads · head_dim · length for attention, without subtracting what a
        causal mask skips. "Model FLOPs utilisation" uses this count (Chowdhery et al., arXiv 2204.02311, appendix B). A window
        shorter than the sequence replaces its length.
        """
        seen = sequence_length if self.window is None else min(self.window, sequence_length)
        return 6 * self.matmul_parameters() + 12 * self.layers * self.heads * self.d * seen


@dataclass(frozen=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """GPT-2's architecture: learned positions, LayerNorm before each part, GELU, biases."""

    kind = "gpt"

    @property
    def learned_positions(self) -> int:
        """Rows of the table of positions."""
        return self.max_positions

    def matmul_parameters(self) -> int:
        block = self.hidden * sum(self.qkv_parts) + self.heads * self.d * self.hidden + 2 * self.hidden * self.inner
        return self.layers * block + self.vocab_size * self.hidden

    def num_parameters(self) -> int:
        biases = sum(self.qkv_parts) + self.hidden + self.inner + self.hidden
        norms = 2 * 2 * self.hidden
        tables = (self.vocab_size if not self.tie else 0) * self.hidden + self.max_positions * self.hidden
        return self.matmul_parameters() + self.layers * (biases + norms) + 2 * self.hidden + tables


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Llama's architecture: rotary positions, RMSNorm before each part, SwiGLU, no biases.

    Attributes:
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square under the root.
    """

    kind = "llama"

    tie: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d % 2:
            raise SpecError(
                f"LlamaConfig with heads of {self.d} elements: rotary positions turn pairs, so use an even size"
            )

    @property
    def inner(self) -> int:
        """Inner size of the MLP: 8/3 of the hidden size, rounded up to a multiple of 32."""
        return -(-8 * self.hidden // 3 // 32) * 32 if self.ffn is None else self.ffn

    def matmul_parameters(self) -> int:
        block = self.hidden * sum(self.qkv_parts) + self.heads * self.d * self.hidden + 3 * self.hidden * self.inner
        return self.layers * block + self.vocab_size * self.hidden

    def num_parameters(self) -> int:
        table = (self.vocab_size if not self.tie else 0) * self.hidden
        return self.matmul_parameters() + self.layers * 2 * self.hidden + self.hidden + table
