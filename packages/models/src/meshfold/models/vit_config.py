"""Configurations of vision transformers, and their published shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from meshfold.mesh import SpecError, did_you_mean
from meshfold.models.config import changed

POOLS = ("class", "mean")
_SIZES = ("image_size", "patch_size", "channels", "classes", "hidden", "layers", "heads", "ffn")


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Settings of a vision transformer.

    Attributes:
        image_size: height and width of an image, in pixels.
        patch_size: height and width of a patch, in pixels; divides ``image_size``.
        channels: of an image.
        classes: of the head.
        hidden: size of the residual stream, in elements.
        layers: blocks.
        heads: attention heads.
        ffn: inner size of the MLP; None for ``4 hidden``.
        pool: what the head reads: ``"class"``, a learned token before the patches, or ``"mean"`` of the patches.
        parallel: ViT-22B's blocks: attention and MLP side by side behind one norm, norms of queries and keys, no biases in
            the projections to queries, keys and values, and norms without bias and centring (RMSNorm).
        dropout: probability with which the embedding and what a block adds are dropped.
        norm_eps: added under the root of norms.

    Raises:
        SpecError: for sizes that do not fit together.
    """

    kind: ClassVar[str] = "vit"

    hidden: int
    layers: int
    heads: int
    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    ffn: int | None = None
    pool: str = "class"
    parallel: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if value is None and name == "ffn":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"ViTConfig({name}={value!r}): give a whole number from 1 up")
        if self.hidden % self.heads:
            heads = max(n for n in range(1, min(self.heads, self.hidden) + 1) if self.hidden % n == 0)
            raise SpecError(
                f"ViTConfig(hidden={self.hidden}, heads={self.heads}): {self.heads} heads do not divide {self.hidden}; write "
                f"heads={heads}, or hidden={-(-self.hidden // self.heads) * self.heads}"
            )
        if self.image_size % self.patch_size:
            raise SpecError(
                f"ViTConfig(image_size={self.image_size}, patch_size={self.patch_size}): patches of {self.patch_size} pixels do "
                f"not divide {self.image_size}; write image_size={-(-self.image_size // self.patch_size) * self.patch_size}"
            )
        if self.pool not in POOLS:
            raise SpecError(f"ViTConfig(pool={self.pool!r}): write 'class' or 'mean'")
        if not 0.0 <= self.dropout < 1.0:
            raise SpecError(f"ViTConfig(dropout={self.dropout!r}): give a probability from 0 to below 1")

    @property
    def inner(self) -> int:
        """Inner size of the MLP, in elements."""
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "class")

    def checkpoint_description(self) -> dict[str, Any]:
        """Return the part of this configuration that a checkpoint keeps."""
        return {"kind": self.kind, "config": asdict(self)}

    def matmul_parameters(self) -> int:
        """Return the number of parameters in the blocks that multiply every token."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.inner)

    def num_parameters(self) -> int:
        """Return the number of parameters of the model."""
        h, d = self.hidden, self.hidden // self.heads
        patches = self.channels * self.patch_size**2 * h + h
        table = self.tokens * h + (h if self.pool == "class" else 0)
        head = h * self.classes + self.classes
        if self.parallel:
            block = self.inner + h + h + 2 * d  # biases of the MLP's two layers, a norm, norms of queries and keys
            last = h
        else:
            block, last = 3 * h + h + self.inner + h + 4 * h, 2 * h
        return self.matmul_parameters() + self.layers * block + patches + table + last + head


_22B: dict[str, Any] = dict(patch_size=14, pool="mean", parallel=True)
VITS: Mapping[str, ViTConfig] = {
    "vit-tiny": ViTConfig(hidden=64, layers=2, heads=4, image_size=32, patch_size=4, classes=10),
    "vit-base": ViTConfig(hidden=768, layers=12, heads=12),
    "vit-large": ViTConfig(hidden=1024, layers=24, heads=16),
    "vit-huge": ViTConfig(hidden=1280, layers=32, heads=16, patch_size=14),
    "vit-22b-tiny": ViTConfig(hidden=64, layers=2, heads=4, **{**_22B, "patch_size": 4}, image_size=32, classes=10),
    "vit-22b": ViTConfig(hidden=6144, layers=48, heads=48, **_22B),
}
"""``*-tiny`` are for small images on a laptop; the rest are the published shapes, with 1,000 classes. ViT-22B's own head attends
to the patches with a learned query; here it reads their mean."""


def vit_preset(name: str, **changes: Any) -> ViTConfig:
    """Return the named configuration, with some fields changed: ``vit_preset("vit-22b", layers=4)``.

    Raises:
        SpecError: for an unknown name or field, or sizes that do not fit together.
    """
    if name not in VITS:
        raise SpecError(
            f"there is no vision transformer {name!r}.{did_you_mean(str(name), VITS)} Known: {', '.join(VITS)}"
        )
    return changed(name, VITS[name], changes)
