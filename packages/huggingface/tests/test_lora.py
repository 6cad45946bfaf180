"""LoRA through peft: adapters split with their layers, trained alone, written and read as peft does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import CheckpointError, Engine, pretrained, save_adapter
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import InFloat64, batch_of, folder_of, model_of

if importlib.util.find_spec("peft") is None:  # ranks import it, this process need not
    pytest.skip("peft is not installed: pip install meshfold[peft]", allow_module_level=True)

TARGETS = {"llama": ["q_proj", "v_proj", "up_proj", "down_proj"], "gpt2": ["c_attn", "mlp.c_proj"]}
SPECS: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=4),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "zero 3": dict(data=4, zero=dict(stage=3)),
    "1d × zero 2": dict(data=2, tensor=2, zero=dict(stage=2)),
    "pipeline × 1d": dict(pipeline=dict(size=2, microbatches=2), tensor=2),
}
SGD: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64")


def lora(kind: str, **settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS[kind], **settings})


def peft_model(kind: str) -> Any:
    """peft's own model in float64, both matrices of its adapters random."""
    from peft import get_peft_model

    model = get_peft_model(model_of(kind).double(), lora(kind))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.double().eval()


def folders(kind: str, root: Path) -> tuple[str, str]:
    """A model's and an adapter's, both as their libraries write them."""
    base = folder_of(kind, root)
    peft_model(kind).save_pretrained(root / "adapter")
    return str(base), str(root / "adapter")


def serial(kind: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss and logits, and parameters after a step of plain gradient descent with rate 1."""
    model = peft_model(kind)
    with InFloat64():
        output = model(**batch_of(kind), use_cache=False)
    output.loss.backward()
    after = {n: (p if p.grad is None else p - p.grad).detach() for n, p in model.named_parameters()}
    return float(output.loss.detach()), output.logits.detach(), after


def compare(kind: str, base: str, adapter: str, spec: dict[str, Any], out: str) -> None:
    from peft import PeftModel

    loss, logits, after = serial(kind)
    source = pretrained(base, dtype=torch.float64, adapter=adapter)
    batch = batch_of(kind)
    with Engine(source, spec, **SGD) as engine, InFloat64():
        engine.model.eval()
        with torch.no_grad():
            found = engine.generator(input_ids=batch["input_ids"]).logits
        assert torch.allclose(found, logits, rtol=1e-9, atol=1e-9)
        assert abs(engine.train_step(engine.shard_batch(batch)) - loss) < 1e-9
        whole = engine.full_state_dict()
        for name, value in after.items():
            assert float((whole[name] - value).abs().max()) < 1e-9, name
        save_adapter(engine, out)
        engine.model.eval()
        with torch.no_grad():
            found = engine.generator(input_ids=batch["input_ids"]).logits
    # What was trained, merged into the weights by peft, computes the same in one process.
    merged = PeftModel.from_pretrained(model_of(kind).double(), out).double().merge_and_unload().eval()
    with torch.no_grad(), InFloat64():
        wanted = merged(batch["input_ids"], use_cache=False).logits
    assert float((wanted - logits).abs().max()) > 1e-3
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", "2d"),
        ("llama", "1d × zero 2"),
        ("gpt2", "1d"),
        *(
            pytest.param(k, how, marks=pytest.mark.slow)
            for k, how in (
                ("llama", "1d"),
                ("llama", "zero 3"),
                ("llama", "pipeline × 1d"),
                ("gpt2", "2d"),
                ("gpt2", "zero 3"),
            )
        ),
    ],
)
def test_adapters_are_those_of_one_process(kind: str, how: str, tmp_path: Path) -> None:
    base, adapter = folders(kind, tmp_path)
    run_on_ranks(4, compare, kind, base, adapter, SPECS[how], str(tmp_path / "trained"))


def trained(base: str, spec: dict[str, Any]) -> tuple[list[str], list[float], dict[str, Tensor]]:
    """A new adapter, which drops: names with optimizer state, losses, adapters after two steps."""
    source = pretrained(base, adapter=lora("llama", lora_dropout=0.3))
    with Engine(source, spec, optimizer=dict(name="adamw", lr=1e-2), seed=3) as engine:
        losses = [engine.train_step(engine.shard_batch(batch_of("llama"))) for _ in range(2)]
        names = sorted({name.rpartition("/")[0] for name in engine.model_state.optimizer_sources()})
        after = engine.full_state_dict()
        return names, losses, {name: value for name, value in after.items() if "lora_" in name}


@pytest.mark.few(1)
@pytest.mark.parametrize("spec", [dict(tensor=2), dict(data=2, zero=dict(stage=3))], ids=["1d", "zero 3"])
def test_only_adapters_have_optimizer_states_and_they_start_and_drop_alike(
    spec: dict[str, Any], tmp_path: Path
) -> None:
    base = str(folder_of("llama", tmp_path))
    names, losses, after = trained(base, {})
    assert names == sorted(after)
    assert len(names) == 2 * 2 * 4
    assert losses[0] > losses[1]
    for found_names, found_losses, found in run_on_ranks(2, trained, base, spec):
        assert found_names == names
        assert found_losses == pytest.approx(losses, abs=1e-5)
        for name, value in after.items():
            assert torch.allclose(found[name], value, atol=1e-4), name


def refused(base: str, spec: dict[str, Any], settings: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as raised:
        Engine(pretrained(base, adapter=lora("llama", **settings)), spec)
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "spec", "says"),
    [
        (dict(use_dora=True), dict(tensor=2), "another form of LoRA (DoRA, ...) cannot be split over a mesh"),
        (dict(modules_to_save=["lm_head"]), dict(tensor=2), "modules_to_save keeps two copies of a layer"),
        (
            dict(target_modules=["lm_head"]),
            dict(tensor=2),
            "an adapter on a 'head' layer cannot be split",
        ),
        (
            {},
            dict(tensor=2, sequence=dict(mode="megatron")),
            "LoRA in mode '1d+sequence': layers have other tokens there",
        ),
        (dict(target_modules=["nothing"]), dict(data=2), "adapter: Target modules"),
    ],
    ids=["dora", "modules to save", "head", "sequence", "no target"],
)
def test_what_cannot_be_adapted_is_refused(
    settings: dict[str, Any], spec: dict[str, Any], says: str, tmp_path: Path
) -> None:
    base = str(folder_of("llama", tmp_path))
    for said in run_on_ranks(2, refused, base, spec, settings):
        assert says in said


def test_what_is_no_adapter_is_said(tmp_path: Path) -> None:
    base, adapter = folders("llama", tmp_path)
    with pytest.raises(SpecError, match="no folder with adapter_config"):
        pretrained(base, adapter=tmp_path)
    with pytest.raises(SpecError, match=r"peft's LoraConfig\(\.\.\.\), or the folder"):
        pretrained(base, adapter=4)
    other = str(folder_of("llama", tmp_path / "deeper", num_hidden_layers=3))
    with pytest.raises(
        SpecError, match=r"belongs to another model: 'base_model.*layers\.2.*' is in only one of the two"
    ):
        Engine(pretrained(other, adapter=adapter))
    with Engine(pretrained(base)) as engine, pytest.raises(CheckpointError, match="has no adapter"):
        save_adapter(engine, tmp_path / "out")
