"""Fine-tune the U-Net of a local Stable Diffusion folder on images with captions; VAE and text encoder stay frozen.

meshfold run --ranks 2 examples/diffusion/fine_tune.py FOLDER IMAGES OUT --steps 100

IMAGES holds x.png and its caption x.txt. OUT becomes a folder that diffusers loads; with --lora 8, one of adapters alone.
"""

import argparse
import json
import shutil
from pathlib import Path

import diffusers
import numpy
import torch
import transformers
from peft import LoraConfig
from PIL import Image
from process import Process, WeightedSquares

from meshfold.engine import Engine, averaged_state_dict

PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")
arguments = argparse.ArgumentParser()
for name in ("folder", "images", "out"):
    arguments.add_argument(name, type=Path)
arguments.add_argument("--parallel", type=json.loads, default=dict(data=2), help="as in '{\"tensor\": 2}'")
arguments.add_argument("--steps", type=int, default=100)
arguments.add_argument("--rows", type=int, default=4, help="of the global batch")
arguments.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: train all weights")
asked = arguments.parse_args()

files = sorted(asked.images.glob("*.png"))
if not files:
    arguments.error(f"{asked.images} has no .png file: give a folder of images with captions, x.png and x.txt")
if alone := [file.name for file in files if not file.with_suffix(".txt").is_file()]:
    arguments.error(
        f"{asked.images}: no caption for {', '.join(alone[:3])} ({len(alone)} of {len(files)}): write x.txt"
    )
if gone := [name for name in PARTS if not (asked.folder / name).is_dir()]:
    arguments.error(
        f"{asked.folder} lacks {', '.join(gone)}: give a local folder of diffusers' StableDiffusionPipeline"
    )
unet = diffusers.UNet2DConditionModel.from_pretrained(asked.folder / "unet")
vae = diffusers.AutoencoderKL.from_pretrained(asked.folder / "vae").eval().requires_grad_(False)
text_encoder = transformers.CLIPTextModel.from_pretrained(asked.folder / "text_encoder").eval().requires_grad_(False)
tokenizer = transformers.CLIPTokenizer.from_pretrained(asked.folder / "tokenizer")
noising = json.loads((asked.folder / "scheduler" / "scheduler_config.json").read_text())
kinds = dict(epsilon="epsilon", v_prediction="v", sample="x0")
process = Process(prediction=kinds[noising.get("prediction_type", "epsilon")], schedule="scaled_linear", min_snr=5.0)
if asked.lora:
    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=asked.lora, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))

size = vae.config.sample_size
pixels = [numpy.asarray(Image.open(file).convert("RGB").resize((size, size))) for file in files]
images = torch.from_numpy(numpy.stack(pixels)).permute(0, 3, 1, 2).float() / 127.5 - 1
captions = [file.with_suffix(".txt").read_text().strip() for file in files]
ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
with torch.no_grad():  # once: both are frozen
    latents = vae.encode(images).latent_dist.mean * vae.config.scaling_factor
    texts = text_encoder(ids).last_hidden_state

adamw = dict(name="adamw", lr=1e-4 if asked.lora else 1e-5, average=0.999)
with Engine(unet, asked.parallel, optimizer=adamw, loss_fn=WeightedSquares()) as engine:
    for step in range(asked.steps):
        rows = torch.randint(len(files), (asked.rows,), generator=torch.Generator().manual_seed(step))
        made = process.batch(latents[rows], step)
        inputs = dict(sample=made.pop("noisy"), timestep=made.pop("timestep"), encoder_hidden_states=texts[rows])
        loss = engine.train_step(engine.shard_batch({**inputs, **made}))
        if step % max(1, asked.steps // 4) == 0:
            engine.print(f"step {step}  loss {loss:.4f}")
    weights = averaged_state_dict(engine)
    if engine.mesh.rank == 0:
        whole = diffusers.UNet2DConditionModel.from_pretrained(asked.folder / "unet")
        if asked.lora:
            adapters = {name.replace(".default", ""): x for name, x in weights.items() if "lora_" in name}
            diffusers.StableDiffusionPipeline.save_lora_weights(asked.out, unet_lora_layers=adapters)
        else:
            shutil.copytree(asked.folder, asked.out, dirs_exist_ok=True)
            whole.load_state_dict(weights)
            whole.save_pretrained(asked.out / "unet")
    engine.print(f"wrote {asked.out.name}")
