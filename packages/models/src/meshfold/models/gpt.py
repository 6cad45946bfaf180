"""GPT-2's architecture over a flat stream of tokens (Radford et al., 2019)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.kernels import Segments
from meshfold.mesh.model_io import check_position_ids, ignore_document_starts
from meshfold.models.attention import Attention, CausalMask
from meshfold.models.config import GPTConfig
from meshfold.models.loss import CausalLMLoss, CausalLMOutput

INIT_STD = 0.02


def initialize(model: nn.Module, residual_projections: tuple[str, ...], layers: int) -> None:
    """Draw normal weights of std 0.02 and zero the biases; scale projections into the residual stream by 1/√(2 layers).

    Operations are in place, so that their recording can be replayed on shards.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.

    Args:
        residual_projections: last parts of the names of those projections.
        layers: blocks; each adds to the stream twice.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = 1 / math.sqrt(2 * layers) if name.rsplit(".", 1)[-1] in residual_projections else 1.0
            nn.init.normal_(module.weight, std=INIT_STD * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class MLP(nn.Module):
    """``m h -> m h`` by way of GELU (tanh approximation)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class Block(nn.Module):
    """``m h -> m h``: attention and an MLP, each after a norm and added to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config, bias=True)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config.hidden, config.inner)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, seq_len: int, mask: Tensor | Segments | None = None) -> Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x), seq_len, mask=mask))
        y: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return y


class GPT(nn.Module):
    """A GPT-2-like decoder with its language model head and loss."""

    flat_tokens = True
    caches_keys = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.positions = nn.Embedding(config.max_positions, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.mask = CausalMask(config.window)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        self.loss = CausalLMLoss(label_smoothing=config.label_smoothing, z_loss=config.z_loss)
        if config.tie:
            self.head.weight = self.embed.weight
        initialize(self, ("out", "down"), config.layers)

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
        batch, seq_len = input_ids.shape
        counted = torch.arange(seq_len, device=input_ids.device) if position_ids is None else position_ids
        positions = counted.expand(batch, seq_len).reshape(-1)
        x = self.dropout(self.embed(input_ids.reshape(-1)) + self.positions(positions))
        mask = self.mask(position_ids, x, seq_len)
        for block in self.blocks:
            x = block(x, seq_len, mask)
        logits = self.head(self.norm(x))
        if labels is not None:
            if position_ids is not None and self.loss.shifts:
                labels = ignore_document_starts(labels, position_ids)
            return CausalLMOutput(loss=self.loss(logits, labels), logits=logits)
        return CausalLMOutput(loss=None, logits=logits.view(-1, seq_len, logits.shape[-1]))
