"""Small random denoisers of diffusers, what each is called with, and its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": (
        "UNet2DConditionModel",
        dict(
            sample_size=8,
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=12,
            attention_head_dim=4,
            norm_num_groups=4,
            use_linear_projection=True,
        ),
    ),
    "dit": (
        "DiTTransformer2DModel",
        dict(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            sample_size=8,
            patch_size=2,
            num_embeds_ada_norm=10,
        ),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        dict(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=12,
            caption_projection_dim=32,
            pooled_projection_dim=10,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    ),
    "flux": (
        "FluxTransformer2DModel",
        dict(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=12,
            pooled_projection_dim=10,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        ),
    ),
}
"""Class and sizes, by what the tests call them."""


def denoiser(kind: str, **changes: Any) -> Any:
    """A denoiser with random weights, none of them zero or one, where a mistake would not show."""
    import diffusers

    name, sizes = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**{**sizes, **changes})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.2 if parameter.dim() == 1 else 0.02) * torch.randn_like(parameter))
    for module in model.modules():
        if type(module).__name__ == "LabelEmbedding":
            module.dropout_prob = 0.0  # draws from torch's generator; meshfold's loss drops classes itself
    return model.double()


def batch_of(kind: str, rows: int = 4) -> dict[str, Tensor]:
    """Arguments of a denoiser, and the ``target`` of its output."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, *shape, generator=generator, dtype=torch.float64)

    # In float64, since sines of float32 differ in the last bit between batches of other sizes.
    times = torch.randint(0, 1000, (rows,), generator=generator).double()
    text = dict(encoder_hidden_states=normal(5, 12), pooled_projections=normal(10))
    if kind == "unet":
        target = dict(sample=normal(4, 8, 8), target=normal(4, 8, 8))
        return dict(**target, timestep=times, encoder_hidden_states=text["encoder_hidden_states"])
    if kind == "dit":
        classes = torch.arange(rows) % 10
        return dict(hidden_states=normal(4, 8, 8), timestep=times, class_labels=classes, target=normal(8, 8, 8))
    if kind == "sd3":
        return dict(hidden_states=normal(4, 8, 8), timestep=times, **text, target=normal(4, 8, 8))
    places = torch.zeros(4, 4, 3)
    places[..., 1], places[..., 2] = torch.arange(4.0)[:, None], torch.arange(4.0)
    return dict(
        hidden_states=normal(16, 16),
        timestep=times / 1000,
        **text,
        img_ids=places.view(1, 16, 3).expand(rows, -1, -1),
        txt_ids=torch.zeros(rows, 5, 3),
        guidance=torch.full((rows,), 3.5, dtype=torch.float64),
        target=normal(16, 16),
    )


class Squares:
    """Mean squared distance of the output from ``target``."""

    batch_fields = ("target",)

    def __call__(self, output: Any, batch: Any) -> Tensor:
        return F.mse_loss(output.sample, batch["target"])
