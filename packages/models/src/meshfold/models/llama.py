"""Llama's architecture over a flat stream of tokens (Touvron et al., arXiv 2302.13971; GQA as in 2307.09288)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshfold.experts import balance_loss
from meshfold.kernels import FP8_SOURCE, Segments, swiglu
from meshfold.mesh.model_io import check_position_ids, ignore_document_starts
from meshfold.models.attention import Attention, CausalMask, Rotary, fused
from meshfold.models.config import LlamaConfig
from meshfold.models.gpt import INIT_STD, initialize
from meshfold.models.loss import CausalLMLoss, CausalLMOutput
from meshfold.models.moe import MoELlamaConfig, initialize_mixtures, mixture


class GatedMLP(nn.Module):
    """``m h -> m h`` by way of SwiGLU, gate and up in one projection (Shazeer, arXiv 2002.05202)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up = fused(nn.Linear(hidden, 2 * inner, bias=False), (inner, inner))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(swiglu(self.gate_up(x), source=self.__dict__.get(FP8_SOURCE)))
        return y


class Block(nn.Module):
    """``m h -> m h``: attention and an MLP, each after a norm and added to the stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = Attention(config, bias=False)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp: Any = mixture(config) if isinstance(config, MoELlamaConfig) else GatedMLP(config.hidden, config.inner)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, seq_len: int, rotary: tuple[Tensor, Tensor], mask: Tensor | Segments | None = None
    ) -> Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x), seq_len, rotary, mask))
        y: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return y


class Llama(nn.Module):
    """A Llama-like decoder with its language model head and loss; with experts if its configuration has them."""

    flat_tokens = True
    caches_keys = True

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.rotary = Rotary(config.d, config.rope_theta)
        self.mask = CausalMask(config.window)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.loss = CausalLMLoss(label_smoothing=config.label_smoothing, z_loss=config.z_loss)
        if config.tie:
            self.head.weight = self.embed.weight
        initialize(self, ("out", "down"), config.layers)
        initialize_mixtures(self, INIT_STD, config.layers)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None
    ) -> CausalLMOutput:
        """``b s`` int64 -> the loss if labels ``b s`` are given (not shifted; -100 does not count), logits.

        ``position_ids`` (``b s`` or ``1 s``) that restart at 0 separate documents packed into a row. Tokens see only their own
        document, and none predicts the first token of the next one. Positions that go back to q > 0 begin a branch: it continues
        the first q tokens of its document, and sees no other branch.

        Raises:
            SpecError: for position_ids of another shape.
        """
        check_position_ids(position_ids, input_ids)
        seq_len = input_ids.shape[1]
        rotary = self.rotary(position_ids, seq_len, input_ids.device)
        x = self.dropout(self.embed(input_ids.reshape(-1)))
        mask = self.mask(position_ids, x, seq_len)
        for block in self.blocks:
            x = block(x, seq_len, rotary, mask)
        logits = self.head(self.norm(x))
        if labels is not None:
            if position_ids is not None and self.loss.shifts:
                labels = ignore_document_starts(labels, position_ids)
            loss = self.loss(logits, labels)
            if isinstance(self.config, MoELlamaConfig) and self.config.balance and self.training:
                loss = loss + self.config.balance * balance_loss(self)
            return CausalLMOutput(loss=loss, logits=logits)
        return CausalLMOutput(loss=None, logits=logits.view(-1, seq_len, logits.shape[-1]))
