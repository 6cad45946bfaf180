"""Train a U-Net or a DiT on images that it draws itself, under any spec, and sample a grid with averaged weights.

meshfold run --ranks 2 examples/diffusion/train.py $(mktemp -d) --steps 20
"""

import argparse
import json
from pathlib import Path

import diffusers
import torch
from images import CLASSES, draw, save_grid
from process import Process, WeightedSquares

from meshfold.engine import Engine, averaged_weights

SIZES = {
    "unet": dict(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=len(CLASSES),
        attention_head_dim=8,
        norm_num_groups=8,
    ),
    "dit": dict(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=16,
        patch_size=2,
        num_embeds_ada_norm=len(CLASSES),
        norm_num_groups=1,
    ),
    "dit-xl": dict(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        num_layers=28,
        num_attention_heads=16,
        attention_head_dim=72,
        patch_size=2,
        num_embeds_ada_norm=1000,
    ),
}

arguments = argparse.ArgumentParser()
arguments.add_argument("out", type=Path)
arguments.add_argument("--model", choices=SIZES, default="dit")
arguments.add_argument("--prediction", choices=("epsilon", "v", "x0", "flow"), default="v", help="of the model")
arguments.add_argument("--parallel", type=json.loads, default=dict(data=2), help="as in '{\"tensor\": 2}'")
arguments.add_argument("--steps", type=int, default=2000)
arguments.add_argument("--rows", type=int, default=32, help="of the global batch")
arguments.add_argument("--sampling-steps", type=int, default=20, help="of the grid")
asked = arguments.parse_args()

sizes, process = (
    SIZES[asked.model],
    Process(prediction=asked.prediction, min_snr=None if asked.prediction == "flow" else 5.0),
)
torch.manual_seed(0)
kind = diffusers.UNet2DConditionModel if asked.model == "unet" else diffusers.DiTTransformer2DModel
model = kind(**sizes)
for module in model.modules():
    if hasattr(module, "dropout_prob"):  # of classes, by torch's own generator: each rank would drop others
        module.dropout_prob = 0.0


def called_with(noisy: torch.Tensor, times: torch.Tensor, classes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of the model."""
    if asked.model != "unet":
        return dict(hidden_states=noisy, timestep=times, class_labels=classes)
    text = torch.nn.functional.one_hot(classes, len(CLASSES)).to(noisy.dtype)[:, None].expand(-1, 2, -1)  # two tokens
    return dict(sample=noisy, timestep=times, encoder_hidden_states=text)


adamw = dict(name="adamw", lr=1e-3, average=0.999)
with Engine(model, asked.parallel, optimizer=adamw, loss_fn=WeightedSquares()) as engine:
    for step in range(asked.steps):
        images, classes = draw(asked.rows, sizes["sample_size"], step)
        made = process.batch(images, step)
        batch = called_with(made.pop("noisy"), made.pop("timestep"), classes)
        loss = engine.train_step(engine.shard_batch({**batch, **made}))
        if step % max(1, asked.steps // 10) == 0:
            engine.print(f"step {step}  loss {loss:.4f}")
    asked.out.mkdir(exist_ok=True, parents=True)
    wanted = torch.arange(16) % len(CLASSES)
    noise, _ = process.draw((16, 3, sizes["sample_size"], sizes["sample_size"]), step=-1)
    with averaged_weights(engine):
        engine.model.eval()
        noise, where, steps = noise.to(engine.device), wanted.to(engine.device), asked.sampling_steps
        found = process.sample(lambda x, times: engine.model(**called_with(x, times, where)).sample, noise, steps=steps)
    if engine.mesh.rank == 0:
        save_grid(found, asked.out / "samples.png")
    engine.print(f"a grid of {len(found)} samples, from {found.min():.1f} to {found.max():.1f}")
