"""The diffusion examples: noise and losses are the same under every spec, folders go to diffusers and back."""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from integration_tests.warm_python import WarmPython
from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples" / "diffusion"
sys.path.append(str(FOLDER))
from process import Process, WeightedSquares  # type: ignore[import-not-found]  # noqa: E402

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("diffusers is not installed: pip install meshfold-huggingface[diffusers]", allow_module_level=True)


def test_rows_have_their_own_noise_and_timesteps() -> None:
    """Whatever part of the global batch a rank draws."""
    for settings in ({}, dict(prediction="flow", logit_normal=True), dict(logit_normal=True)):
        process = Process(seed=3, **settings)
        noise, times = process.draw((6, 2, 3), step=4)
        mine, my_times = process.draw((2, 2, 3), step=4, first_row=3)
        assert torch.equal(noise[3:5], mine)
        assert torch.equal(times[3:5], my_times)
        assert not torch.equal(noise, process.draw((6, 2, 3), step=5)[0])


def test_timesteps_are_even_or_logit_normal() -> None:
    _, even = Process().draw((20000, 1), step=0)
    assert even.min() == 0
    assert even.max() == 999
    assert abs(even.double().mean() - 499.5) < 6
    assert abs(even.double().std() - 288.7) < 4
    _, drawn = Process(prediction="flow", logit_normal=True).draw((20000, 1), step=0)
    logits = torch.logit(drawn.double() / 1000)
    assert abs(logits.mean()) < 0.03
    assert abs(logits.std() - 1) < 0.03


def test_noise_is_that_of_diffusers_schedulers() -> None:
    from diffusers import DDPMScheduler

    betas = dict(linear=(1e-4, 0.02), scaled_linear=(0.00085, 0.012))
    clean = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    for schedule, (low, high) in betas.items():
        theirs = DDPMScheduler(1000, beta_start=low, beta_end=high, beta_schedule=schedule)
        made = Process(prediction="v", schedule=schedule).batch(clean, step=0)
        noise, times = Process().draw((4, 3, 2, 2), step=0)
        assert torch.equal(times, made["timestep"])
        assert torch.allclose(made["noisy"], theirs.add_noise(clean, noise.double(), times), atol=1e-5)
        assert torch.allclose(made["target"], theirs.get_velocity(clean, noise.double(), times), atol=1e-5)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0", "flow"])
def test_samplers_find_the_image_that_a_perfect_model_knows(prediction: Any) -> None:
    process = Process(prediction=prediction)
    clean = torch.randn(2, 3, 4, 4, dtype=torch.float64)

    def perfect(x: Tensor, times: Tensor) -> Tensor:
        a, s = (value.view(-1, 1, 1, 1) for value in process.signal_and_noise(times))
        noise = (x - a * clean) / s
        found: Tensor = dict(epsilon=noise, v=a * noise - s * clean, x0=clean, flow=noise - clean)[prediction]
        return found

    found = process.sample(perfect, torch.randn(2, 3, 4, 4, dtype=torch.float64), steps=10)
    assert (found - clean).abs().max() < 0.05


def test_weights_and_mistakes() -> None:
    process = Process(prediction="v", min_snr=5.0)
    signal, noise = process.signal_and_noise(torch.tensor([10, 500]))
    ratio = (signal / noise) ** 2
    assert ratio[0] > 5 > ratio[1]
    assert torch.allclose(
        process.weights(torch.tensor([10, 500])),
        torch.tensor([5.0, 1.0]).double() * torch.tensor([1.0, float(ratio[1])]) / (ratio + 1),
    )
    least = torch.tensor([5.0, float(ratio[1])]).double()
    for prediction, wanted in (("epsilon", least / ratio), ("x0", least)):
        other = Process(prediction=prediction, min_snr=5.0)
        assert torch.allclose(other.weights(torch.tensor([10, 500])), wanted)
    for wrong, said in (
        (dict(prediction="eps"), "write 'epsilon', 'v', 'x0' or 'flow'"),
        (dict(schedule="cosine"), "'linear' or 'scaled_linear'"),
        (dict(prediction="flow", min_snr=5.0), "for predictions other than 'flow'"),
    ):
        with pytest.raises(SpecError, match=said):
            Process(**wrong)


def small_dit() -> Any:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(sample_size=8, in_channels=3, out_channels=3, num_layers=2, patch_size=2)
    model = DiTTransformer2DModel(**sizes, num_attention_heads=4, attention_head_dim=8, num_embeds_ada_norm=4)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0
    return model.double()


def losses(spec: dict[str, Any], prediction: str) -> list[float]:
    process = Process(prediction=prediction, min_snr=None if prediction == "flow" else 5.0)
    clean, found = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []
    adamw = dict(name="adamw", lr=1e-2)
    with Engine(small_dit(), spec, precision="fp64", optimizer=adamw, loss_fn=WeightedSquares()) as engine:
        for step in range(3):
            made = process.batch(clean, step)
            given = dict(hidden_states=made.pop("noisy"), timestep=made.pop("timestep"), class_labels=torch.arange(4))
            found.append(engine.train_step(engine.shard_batch({**given, **made})))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "prediction", ["v", "flow", *(pytest.param(p, marks=pytest.mark.slow) for p in ("epsilon", "x0"))]
)
def test_losses_are_those_of_one_process(prediction: str) -> None:
    wanted = losses({}, prediction)
    ring = dict(sequence=dict(mode="ring", size=2))
    for spec in (dict(data=2), dict(tensor=2), ring, dict(data=2, zero=dict(stage=3))):
        for found in run_on_ranks(2, losses, spec, prediction):
            assert found == pytest.approx(wanted, abs=1e-6), spec  # sines of timesteps are float32


def write_back(folder: str, spec: dict[str, Any], out: str) -> None:
    from diffusers import DiTTransformer2DModel

    with Engine(DiTTransformer2DModel.from_pretrained(folder), spec) as engine:
        weights = engine.full_state_dict()
        if engine.mesh.rank == 0:
            model = DiTTransformer2DModel.from_pretrained(folder)
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(weights)
            model.save_pretrained(out)


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(tensor=2), dict(data=2, zero=dict(stage=3))], ids=["tensor", "zero"])
def test_a_folder_is_the_same_to_the_byte_after_the_way_there_and_back(spec: dict[str, Any], tmp_path: Path) -> None:
    small_dit().float().save_pretrained(tmp_path / "there")
    run_on_ranks(2, write_back, str(tmp_path / "there"), spec, str(tmp_path / "back"))
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_dit_xl_takes_the_published_operations() -> None:
    """119 and 525 Gflop, as its paper counts them: multiplications with their additions, of matmuls and attention."""
    from diffusers import DiTTransformer2DModel

    from meshfold.mesh.model_io import DryRun, OperatorCounter

    for size, published in ((32, 119e9), (64, 525e9)):
        sizes: dict[str, Any] = dict(sample_size=size, in_channels=4, out_channels=8, num_layers=28, patch_size=2)
        with torch.device("meta"):
            model = DiTTransformer2DModel(
                **sizes, num_attention_heads=16, attention_head_dim=72, num_embeds_ada_norm=1000
            )
            image, one = torch.empty(1, 4, size, size), torch.zeros(1, dtype=torch.int64)
        with DryRun() as stand_in, stand_in.counting(OperatorCounter()) as counter, torch.no_grad():
            model.eval()(image, one, one)
        found = counter.flop / 2
        assert abs(found / published - 1) < 0.01, (size, found)


def run(command: list[str], warm: WarmPython) -> str:
    made = subprocess.run(command, capture_output=True, text=True, env=warm.environment(), timeout=240, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    return made.stdout


def test_training_writes_a_grid(warm: WarmPython, tmp_path: Path) -> None:
    from PIL import Image

    options = ["--model", "unet", "--steps", "2", "--rows", "4", "--sampling-steps", "3", "--parallel", '{"tensor": 2}']
    command = [warm.python, "-m", "meshfold.cli", "run", "--ranks", "2", str(FOLDER / "train.py"), str(tmp_path)]
    printed = run([*command, *options], warm)
    assert "step 1  loss" in printed
    assert Image.open(tmp_path / "samples.png").size == (64, 64)


def stable_diffusion(folder: Path) -> None:
    """A Stable Diffusion folder of tiny random models."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    words = ["<|startoftext|>", "<|endoftext|>", *(c for c in "abcdefghij"), *(f"{c}</w>" for c in "abcdefghij")]
    (folder / "made").mkdir(parents=True)
    (folder / "made" / "vocab.json").write_text(str({word: i for i, word in enumerate(words)}).replace("'", '"'))
    (folder / "made" / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(folder / "made", model_max_length=8)
    tokenizer.save_pretrained(folder / "tokenizer")
    text: dict[str, Any] = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.CLIPTextConfig(vocab_size=len(words), max_position_embeddings=8, **text)
    transformers.CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    vae: dict[str, Any] = dict(block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16)
    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    diffusers.AutoencoderKL(down_block_types=down, up_block_types=up, **vae).save_pretrained(folder / "vae")
    diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    ).save_pretrained(folder / "unet")
    diffusers.DDPMScheduler(prediction_type="v_prediction").save_pretrained(folder / "scheduler")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options", [["--parallel", '{"data": 2, "zero": {"stage": 2}}'], ["--lora", "2", "--parallel", '{"tensor": 2}']]
)
def test_stable_diffusion_is_tuned_from_folder_to_folder(options: list[str], warm: WarmPython, tmp_path: Path) -> None:
    import diffusers
    from PIL import Image

    stable_diffusion(tmp_path / "there")
    (tmp_path / "images").mkdir()
    for number, caption in enumerate(("a bad cab", "a fig")):
        Image.new("RGB", (16, 16), (90 * number, 200, 10)).save(tmp_path / "images" / f"{number}.png")
        (tmp_path / "images" / f"{number}.txt").write_text(caption)
    script, folders = str(FOLDER / "fine_tune.py"), [str(tmp_path / name) for name in ("there", "images", "out")]
    command = [warm.python, "-m", "meshfold.cli", "run", "--ranks", "2", script, *folders, "--steps", "2"]
    assert "wrote out" in run([*command, *options], warm)
    if "--lora" in options:
        assert (tmp_path / "out" / "pytorch_lora_weights.safetensors").is_file()
        return
    before, after = (
        diffusers.UNet2DConditionModel.from_pretrained(tmp_path / name / "unet") for name in ("there", "out")
    )
    moved = [not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2


def test_folders_that_cannot_be_tuned_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is read; they were numpy's, diffusers' and the file system's tracebacks."""
    images = tmp_path / "images"

    def refused() -> str:
        monkeypatch.setattr(sys, "argv", ["fine_tune.py", str(tmp_path / "there"), str(images), str(tmp_path / "out")])
        with pytest.raises(SystemExit):
            runpy.run_path(str(FOLDER / "fine_tune.py"))
        return capsys.readouterr().err

    assert "images has no .png file: give a folder of images with captions" in refused()
    images.mkdir()
    (images / "a.png").touch()
    (images / "b.png").touch()
    (images / "b.txt").write_text("a fig")
    assert "no caption for a.png (1 of 2): write x.txt" in refused()
    (images / "a.txt").write_text("a cab")
    (tmp_path / "there" / "unet").mkdir(parents=True)
    assert "there lacks vae, text_encoder, tokenizer, scheduler: give a local folder" in refused()
