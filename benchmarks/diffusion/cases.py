"""Cases of the benchmark: a denoiser from a configuration, its batch, what memory it may take. No weights are fetched."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

GIB = 2**30
_SD2: dict[str, Any] = dict(
    sample_size=64,
    block_out_channels=(320, 640, 1280, 1280),
    attention_head_dim=(5, 10, 20, 20),
    cross_attention_dim=1024,
    use_linear_projection=True,
)
_DIT_XL: dict[str, Any] = dict(
    sample_size=32,
    in_channels=4,
    out_channels=8,
    num_layers=28,
    num_attention_heads=16,
    attention_head_dim=72,
    patch_size=2,
    num_embeds_ada_norm=1000,
)
_FLUX: dict[str, Any] = dict(
    num_layers=19, num_single_layers=38, num_attention_heads=24, attention_head_dim=128, guidance_embeds=True
)
_TINY: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": dict(
        sample_size=8,
        block_out_channels=(8, 16),
        attention_head_dim=4,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=16,
    ),
    "DiTTransformer2DModel": dict(sample_size=8, num_layers=2, num_attention_heads=2, attention_head_dim=8),
    "FluxTransformer2DModel": dict(
        num_layers=1,
        num_single_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=16,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    ),
}
UNETS = (
    "ours",
    "ours, compiled",
    "ours, compiled, captured",
    "ours, channels last, compiled, captured",
    "diffusers",
    "diffusers, blocks compiled",
    "diffusers, compiled",
)
SHARDED = ("ours", "ours, compiled", "ours, kept whole, compiled", "FSDP2", "FSDP2, compiled")
CAPPED = ("ours", "ours, compiled", "ours, compiled, captured")
SMALL_STATE = ("ours, regime B, compiled, captured", "ours, regime C, compiled, captured")
"""Adam's moments in 16 and in 8 bits: an approximation, so their verdict is one of its own."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Work of the benchmark.

    Attributes:
        about: what it is.
        kind: class of diffusers.
        config: of the model; what is missing is diffusers' default.
        rows: images a step, over all ranks.
        tokens: of an image and of its text, for Flux; of the text, for a U-Net.
        ranks: GPUs.
        limit: GPU memory that a rank may have, in GiB; None: all.
        recompute: whether the activations of every block are computed again in backward: "none", "blocks", or for ours "auto",
            where the plan chooses.
        micro_steps: that a step of ours takes its images in, one after the other.
        contestants: who runs, unless others are asked for.
    """

    about: str
    kind: str
    config: Mapping[str, Any]
    rows: int
    tokens: tuple[int, ...] = (77,)
    ranks: int = 1
    limit: float | None = None
    recompute: str = "none"
    micro_steps: int = 1
    contestants: tuple[str, ...] = field(default=UNETS)


def _sd2(about: str, **settings: Any) -> Case:
    return Case(about=about, kind="UNet2DConditionModel", config=_SD2, rows=16, **settings)


CASES: Mapping[str, Case] = {
    "sd2": _sd2("the U-Net of Stable Diffusion 2, 512 × 512 pixels, without a limit"),
    "sd2-11": _sd2("the same under 11 GiB", limit=11.0, recompute="auto", contestants=(*CAPPED, *SMALL_STATE)),
    "sd2-5.6": _sd2("the same under 5.6 GiB", limit=5.6, recompute="auto", micro_steps=4, contestants=CAPPED[:2]),
    "dit-xl": Case(
        about="DiT-XL/2, 256 × 256 pixels",
        kind="DiTTransformer2DModel",
        config=_DIT_XL,
        rows=64,
        ranks=2,
        contestants=SHARDED,
    ),
    "flux-12b": Case(
        about="a Flux of 12 billion parameters, 512 × 512 pixels",
        kind="FluxTransformer2DModel",
        config=_FLUX,
        rows=4,
        tokens=(1024, 512),
        ranks=2,
        recompute="blocks",
        contestants=SHARDED,
    ),
    "flux-6b": Case(
        about="half the blocks of that Flux, 6 billion parameters, for GPUs of 80 GiB",
        kind="FluxTransformer2DModel",
        config={**_FLUX, "num_layers": 9, "num_single_layers": 19},
        rows=4,
        tokens=(1024, 512),
        ranks=2,
        recompute="blocks",
        contestants=SHARDED,
    ),
}


def tiny(case: Case) -> Case:
    """Return the case with a small model and batch, to try the command without GPUs."""
    config = {**case.config, **_TINY[case.kind]}
    return replace(case, config=config, rows=4, tokens=tuple(min(n, 9) for n in case.tokens), limit=None)


def model_of(kind: str, config: Mapping[str, Any], device: torch.device | None = None) -> nn.Module:
    """Return a denoiser with weights of a seed and without dropout of classes; ``device``: where it is made, if not the default."""
    import diffusers

    torch.manual_seed(0)
    with device or nullcontext():
        model: nn.Module = getattr(diffusers, kind)(**config)
    for module in model.modules():
        if hasattr(module, "dropout_prob"):
            module.__dict__["dropout_prob"] = 0.0  # drops by torch's own generator: contestants would differ
    return model


def batch_of(model: Any, rows: int, tokens: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """Return arguments of a denoiser and the ``target`` of its output, float32, on the CPU."""
    generator, config = torch.Generator().manual_seed(seed), model.config

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator)

    times = torch.randint(0, 1000, (rows,), generator=generator)
    kind, size = type(model).__name__, getattr(config, "sample_size", 0)
    if kind == "UNet2DConditionModel":
        text = normal(tokens[0], config.cross_attention_dim)
        shape = (config.in_channels, size, size)
        return dict(sample=normal(*shape), timestep=times, encoder_hidden_states=text, target=normal(*shape))
    if kind == "DiTTransformer2DModel":
        image, target = normal(config.in_channels, size, size), normal(config.out_channels, size, size)
        return dict(hidden_states=image, timestep=times, class_labels=times, target=target)
    image_tokens, text_tokens = tokens
    side = max(1, int(image_tokens**0.5))
    places = torch.zeros(image_tokens, 3)
    places[:, 1], places[:, 2] = torch.arange(image_tokens) // side, torch.arange(image_tokens) % side
    return dict(
        hidden_states=normal(image_tokens, config.in_channels),
        timestep=times / 1000,
        encoder_hidden_states=normal(text_tokens, config.joint_attention_dim),
        pooled_projections=normal(config.pooled_projection_dim),
        guidance=torch.full((rows,), 3.5),
        img_ids=places.expand(rows, -1, -1),
        txt_ids=torch.zeros(rows, text_tokens, 3),
        target=normal(image_tokens, config.in_channels),
    )
