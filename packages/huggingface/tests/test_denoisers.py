"""Denoisers of diffusers under every kind of spec are diffusers' models of one process, or are refused."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine, averaged_state_dict
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from denoisers import KINDS, Squares, batch_of, denoiser
from hugging_face_families import InFloat64

if importlib.util.find_spec("diffusers") is None:  # ranks import it, this process need not
    pytest.skip("diffusers is not installed: pip install meshfold-huggingface[diffusers]", allow_module_level=True)

SPECS: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "tensor": dict(tensor=2),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "Gemini": dict(data=2, zero=dict(stage=3, placement="cpu")),
    "ring": dict(sequence=dict(mode="ring", size=2)),
    "ulysses": dict(sequence=dict(mode="ulysses", size=2)),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
}
CHANGES: dict[tuple[str, str], dict[str, Any]] = {("sd3", "pipeline"): dict(num_layers=4)}
"""A rank with the last block of SD3 alone, which returns no text, could not stand in for the others."""
REFUSED = {
    ("unet", "pipeline"): "keep the shape of their input",
    ("unet", "ring"): "can have theirs split. Use a spec without sequence",
    ("unet", "ulysses"): "can have theirs split. Use a spec without sequence",
}


@functools.cache
def serial(kind: str, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """diffusers' own loss, and parameters after a step of plain gradient descent with rate 1."""
    model, batch = denoiser(kind, **changes), batch_of(kind)
    given = {name: value for name, value in batch.items() if name != "target"}
    with InFloat64():
        loss = Squares()(model(**given), batch)
    loss.backward()
    after = {n: p.detach() - (0.0 if p.grad is None else p.grad) for n, p in model.named_parameters()}
    return float(loss.detach()), after


def compare(
    kind: str, spec: dict[str, Any], recompute: str | None = None, compile: object = False, **changes: Any
) -> None:
    wanted_loss, wanted = serial(kind, **changes)
    model = denoiser(kind, **changes)  # here, since some tables are made in float32
    example = {name: value for name, value in batch_of(kind).items() if name != "target"}
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", loss_fn=Squares())
    settings |= dict(example=example if "pipeline" in spec else None, recompute=recompute, compile=compile)
    with InFloat64(), Engine(model, spec, **settings) as engine:
        loss = engine.train_step(engine.shard_batch(batch_of(kind)))
        found = engine.full_state_dict()
    assert abs(loss - wanted_loss) < 1e-9, (loss, wanted_loss)
    for name, value in wanted.items():
        off = float((found[name] - value).abs().max())
        assert off < 1e-9, f"{name}: off by {off:.2e}"


# Each kind and each spec; a U-Net under tensor parallelism is in the test of dropout.
QUICK = {
    ("dit", "zero 3"),
    ("flux", "tensor"),
    ("unet", "Gemini"),
    ("unet", "data"),
    ("sd3", "zero 1"),
}
QUICK |= {("flux", "zero 2"), ("dit", "pipeline"), ("sd3", "ring"), ("flux", "ulysses"), ("unet", "ring")}


def test_the_quick_cases_leave_no_denoiser_and_no_spec_out() -> None:
    assert {kind for kind, _ in QUICK} == set(KINDS)
    assert {how for _, how in QUICK} == set(SPECS)


def cases() -> list[Any]:
    return [
        pytest.param(kind, how, marks=() if (kind, how) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for how in SPECS
    ]


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "how"), cases())
def test_a_denoiser_is_that_of_one_process(kind: str, how: str) -> None:
    """Loss and every gradient: parameters after a step of gradient descent."""
    if (kind, how) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[kind, how]):
            run_on_ranks(2, compare, kind, SPECS[how])
    else:
        run_on_ranks(2, compare, kind, SPECS[how], **CHANGES.get((kind, how), {}))


PRODUCTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tensor x ring": (4, dict(tensor=2, sequence=dict(mode="ring", size=2))),
    "data x ulysses, zero 3": (4, dict(data=2, sequence=dict(mode="ulysses", size=2), zero=dict(stage=3))),
    "both": (4, dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2))),
    "uneven": (3, dict(sequence=dict(mode="ring", size=3))),
    "tensor x pipeline": (4, dict(tensor=2, pipeline=2)),
    "tensor x zero 2": (4, dict(tensor=2, data=2, zero=dict(stage=2))),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("how", PRODUCTS)
@pytest.mark.parametrize("kind", ["sd3", "flux", "dit"])
def test_products_of_entries(kind: str, how: str) -> None:
    size, spec = PRODUCTS[how]
    run_on_ranks(size, compare, kind, spec, **(CHANGES["sd3", "pipeline"] if kind == "sd3" else {}))


def test_recomputed_blocks_attend_to_the_whole_image() -> None:
    """Flux only: its blocks compute nothing in float32."""
    run_on_ranks(2, compare, "flux", SPECS["ring"], recompute="blocks")


@pytest.mark.parametrize(
    "kind", [kind if kind == "dit" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_compiled_blocks_under_zero(kind: str) -> None:
    """DiT's forward calls the embedder of its first block itself."""
    run_on_ranks(2, compare, kind, SPECS["zero 3"], compile=dict(backend="aot_eager"))


def report_of(kind: str) -> str:
    with Engine(denoiser(kind), dict(tensor=2)) as engine:
        return str(engine.report)


def test_attention_and_mlps_are_split_and_the_rest_is_whole() -> None:
    report = run_on_ranks(2, report_of, "flux")[0]
    rows = {line.split()[0]: line for line in report.splitlines()}
    assert "96×64" not in rows["single_transformer_blocks.0.proj_out"]
    assert "64×320" in rows["single_transformer_blocks.0.proj_out"]  # heads and inner dim, half of both on a rank
    assert "64×160" in rows["single_transformer_blocks.0.proj_out"]
    assert "column" in rows["transformer_blocks.0.attn.add_q_proj"]
    assert "whole on every rank" in rows["transformer_blocks.0.norm1"]


def losses(kind: str, spec: dict[str, Any], **changes: Any) -> list[float]:
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", loss_fn=Squares(), seed=3)
    model = denoiser(kind, **changes)
    with InFloat64(), Engine(model, spec, **settings) as engine:
        return [engine.train_step(engine.shard_batch(batch_of(kind))) for _ in range(2)]


def run_losses(kind: str, spec: dict[str, Any]) -> list[float]:
    return losses(kind, spec, dropout=0.3)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("unet", dict(tensor=2)),
        ("dit", dict(data=2)),
        pytest.param("unet", dict(data=2), marks=pytest.mark.slow),
        pytest.param("dit", dict(tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_dropout_is_that_of_one_process(kind: str, spec: dict[str, Any]) -> None:
    wanted = losses(kind, {}, dropout=0.3)
    assert abs(wanted[0] - losses(kind, {})[0]) > 1e-4
    for found in run_on_ranks(2, run_losses, kind, spec):
        assert found == pytest.approx(wanted, abs=1e-9)


def refusal(kind: str, spec: dict[str, Any], changes: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        Engine(denoiser(kind, **changes), spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "spec", "changes", "said"),
    [
        ("dit", dict(tensor=dict(mode="2d", grid=(2, 1))), {}, "Use mode '1d', and zero"),
        ("dit", dict(tensor=2, sequence=dict(mode="megatron")), {}, "Use mode '1d', and zero"),
        ("dit", dict(sequence=dict(mode="ring", size=2)), dict(dropout=0.1), "set the model's dropout to 0"),
        ("dit", dict(tensor=2), dict(num_attention_heads=3), "3 attention heads cannot be split over tensor"),
    ],
)
def test_refused(kind: str, spec: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    assert said in run_on_ranks(2, refusal, kind, spec, changes)[0]


def averages(spec: dict[str, Any]) -> None:
    from diffusers.training_utils import EMAModel

    serial_model, model, batch = denoiser("dit"), denoiser("dit"), batch_of("dit")
    given = {name: value for name, value in batch.items() if name != "target"}
    adamw, ema = torch.optim.AdamW(serial_model.parameters(), lr=1e-2), EMAModel(serial_model.parameters(), decay=0.9)
    optimizer = dict(name="adamw", lr=1e-2, average=0.9)
    settings: dict[str, Any] = dict(precision="fp64", loss_fn=Squares(), example=given if "pipeline" in spec else None)
    with InFloat64(), Engine(model, spec, optimizer=optimizer, **settings) as engine:
        for _ in range(3):
            Squares()(serial_model(**given), batch).backward()
            adamw.step()
            adamw.zero_grad()
            ema.step(serial_model.parameters())
            engine.train_step(engine.shard_batch(batch))
        found = averaged_state_dict(engine)
    for (name, _), wanted in zip(serial_model.named_parameters(), ema.shadow_params, strict=True):
        assert torch.allclose(found[name], wanted, rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(
    "how", ["zero 3", *(pytest.param(how, marks=pytest.mark.slow) for how in SPECS if how != "zero 3")]
)
def test_averages_of_weights_are_those_of_diffusers(how: str) -> None:
    run_on_ranks(2, averages, SPECS[how])


def adapted(kind: str) -> Any:
    """A denoiser with adapters of attention, none of them zero, which alone are trained."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=2, lora_alpha=4, target_modules=["to_q", "to_v", "to_out.0"])
    model: Any = inject_adapter_in_model(config, denoiser(kind))  # what add_adapter does, which DiT lacks
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def compare_adapters(kind: str, spec: dict[str, Any]) -> None:
    serial, model, batch = adapted(kind), adapted(kind), batch_of(kind)
    given = {name: value for name, value in batch.items() if name != "target"}
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", loss_fn=Squares())
    settings |= dict(example=given if "pipeline" in spec else None)
    with InFloat64(), Engine(model, spec, **settings) as engine:
        wanted = Squares()(serial(**given), batch)
        wanted.backward()
        loss = engine.train_step(engine.shard_batch(batch))
        found = engine.full_state_dict()
    assert abs(loss - float(wanted.detach())) < 1e-9
    trained = [name for name, p in serial.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    for name, parameter in serial.named_parameters():
        after = parameter.detach() - (0.0 if parameter.grad is None else parameter.grad)
        off = float((found[name] - after).abs().max())
        assert off < 1e-9, f"{name}: off by {off:.2e}"


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("dit", "tensor"),
        *(
            pytest.param(kind, how, marks=pytest.mark.slow)
            for kind in KINDS
            for how in SPECS
            if (kind, how) not in {("dit", "tensor"), ("sd3", "pipeline"), *REFUSED}
        ),
    ],
)
def test_adapters_alone_are_trained_as_in_one_process(kind: str, how: str) -> None:
    run_on_ranks(2, compare_adapters, kind, SPECS[how])


def write_back(kind: str, folder: str, spec: dict[str, Any], out: str) -> None:
    import diffusers

    made = getattr(diffusers, KINDS[kind][0])
    with Engine(made.from_pretrained(folder), spec) as engine:
        weights = engine.full_state_dict()
        if engine.mesh.rank == 0:
            model = made.from_pretrained(folder)
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(weights)
            model.save_pretrained(out)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tensor", "zero 3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_the_same_to_the_byte_after_the_way_there_and_back(kind: str, how: str, tmp_path: Path) -> None:
    denoiser(kind).float().save_pretrained(tmp_path / "there")
    run_on_ranks(2, write_back, kind, str(tmp_path / "there"), SPECS[how], str(tmp_path / "back"))
    name = "diffusion_pytorch_model.safetensors"
    assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
