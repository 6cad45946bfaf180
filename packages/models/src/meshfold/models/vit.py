"""Vision transformers: images to classes (Dosovitskiy et al., arXiv 2010.11929), and ViT-22B's blocks (arXiv 2302.05442)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import SpecError
from meshfold.models.attention import fused
from meshfold.models.gpt import INIT_STD, initialize
from meshfold.models.vit_config import ViTConfig


@dataclass(frozen=True, kw_only=True)
class ImageClasses:
    """The result of one forward.

    Attributes:
        loss: mean cross entropy over the images, a scalar; None when no labels were given.
        logits: ``b classes``.
    """

    loss: Tensor | None
    logits: Tensor


class PatchTokens(nn.Module):
    """Images to tokens, ``b c height width -> b s h``: patches by a convolution, a class token, learned positions."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.image_size = config.image_size
        size = config.patch_size
        self.patches = nn.Conv2d(config.channels, config.hidden, kernel_size=size, stride=size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.hidden)) if config.pool == "class" else None
        self.positions = nn.Parameter(torch.empty(1, config.tokens, config.hidden))

    def forward(self, images: Tensor) -> Tensor:
        if (
            images.dim() != 4
            or images.shape[1] != self.patches.in_channels
            or set(images.shape[2:]) != {self.image_size}
        ):
            raise SpecError(
                f"images of shape {list(images.shape)}: this model takes [b, {self.patches.in_channels}, {self.image_size}, "
                f"{self.image_size}]"
            )
        x: Tensor = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        return x + self.positions


class ImageAttention(nn.Module):
    """Each token attends to all of its image: ``b s h -> b s h``.

    ``n_heads`` are the heads of this module's own projection; code that shards it sets them to the local number.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.heads, config.hidden // config.heads
        self.qkv = fused(nn.Linear(config.hidden, 3 * config.hidden, bias=not config.parallel), (config.hidden,) * 3)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.parallel else nn.Identity() for _ in range(2)
        )
        self.out = nn.Linear(config.hidden, config.hidden, bias=not config.parallel)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.n_heads, self.head_dim).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y

    def extra_repr(self) -> str:
        return f"heads={self.n_heads}, head_dim={self.head_dim}"


class MLP(nn.Module):
    """``b s h -> b s h`` by way of GELU."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.inner)
        self.down = nn.Linear(config.inner, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """``b s h -> b s h``: attention and an MLP, each after a norm and added to the stream."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attn = ImageAttention(config)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout1(self.attn(self.norm1(x)))
        y: Tensor = x + self.dropout2(self.mlp(self.norm2(x)))
        return y


class ParallelBlock(nn.Module):
    """``b s h -> b s h``: attention and an MLP read one norm, and both are added to the stream (arXiv 2302.05442, section 2).

    The bias of the MLP's second layer is that of the sum.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attn = ImageAttention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        added: Tensor = x + self.dropout(self.attn(y) + self.mlp(y))
        return added


class ViT(nn.Module):
    """A vision transformer with its head and loss.

    ``image_blocks`` is for code that splits an image's tokens over ranks: from the first of these blocks to the last, only
    attention mixes tokens.
    """

    image_blocks = "blocks"

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = PatchTokens(config)
        self.dropout = nn.Dropout(config.dropout)
        block = ParallelBlock if config.parallel else Block
        self.blocks = nn.ModuleList(block(config) for _ in range(config.layers))
        norm = nn.RMSNorm if config.parallel else nn.LayerNorm
        self.norm = norm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.classes)
        initialize(self, ("out", "down"), config.layers)
        nn.init.normal_(self.embed.positions, std=INIT_STD)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> ImageClasses:
        """``b c height width`` -> the loss if labels ``b`` are given (-100 does not count), and logits.

        Raises:
            SpecError: for images of another shape.
        """
        x = self.dropout(self.embed(images))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = self.head(x[:, 0] if self.config.pool == "class" else x.mean(1))
        if labels is None:
            return ImageClasses(loss=None, logits=logits)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return ImageClasses(loss=F.cross_entropy(wide, labels), logits=logits)
