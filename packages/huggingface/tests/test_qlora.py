"""QLoRA: a base frozen in four bits, whose packed weights ``zero`` keeps, shards and gathers as they are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine, pretrained
from meshfold.kernels import Nf4Linear, pack_nf4, unpack_nf4
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import batch_of, folder_of

if importlib.util.find_spec("peft") is None:  # ranks import it, this process need not
    pytest.skip("peft is not installed: pip install meshfold[peft]", allow_module_level=True)

SIZES: dict[str, Any] = dict(hidden_size=64, intermediate_size=128)


def source(folder: str, **settings: Any) -> Any:
    from peft import LoraConfig

    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64)
    return pretrained(folder, adapter=adapter, quantize="nf4", **settings)


def train(folder: str, spec: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses, the state, and how many bytes of packed weights this rank holds for good."""
    with Engine(source(folder), spec, optimizer=dict(name="adamw", lr=1e-2)) as engine:
        losses = [engine.train_step(engine.shard_batch(batch_of("llama"))) for _ in range(3)]
        held = [p.numel() for m in engine.model.modules() if isinstance(m, Nf4Linear) for p in (m.weight,)]
        return losses, engine.full_state_dict(), held


def serial(folder: str) -> list[float]:
    """The same without packing: float weights that are what the codes stand for, and peft's model in a plain loop."""
    import transformers
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and "lm_head" not in name:
                w = module.weight
                w.copy_(unpack_nf4(pack_nf4(w), w.shape[1]))
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=64)
    model = get_peft_model(model, adapter).train()
    start = {n: v for n, v in train_start(folder).items() if "lora_" in n}
    model.load_state_dict(start, strict=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model(**batch_of("llama"), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_start(folder: str) -> dict[str, Tensor]:
    with Engine(source(folder)) as engine:
        return engine.full_state_dict()


def test_the_base_is_packed_and_trains_as_its_float_twin(tmp_path: Path) -> None:
    folder = str(folder_of("llama", tmp_path, **SIZES))
    losses, state, held = train(folder, {})
    assert losses == pytest.approx(serial(folder), rel=1e-4)
    assert losses[2] < losses[0]
    assert len(held) == 2 * 7
    packed = {name: value for name, value in state.items() if value.dtype == torch.uint8}
    assert len(packed) == 2 * 7
    before = train_start(folder)
    assert all(torch.equal(value, before[name]) for name, value in packed.items())  # nothing trains them
    floats = sum(v.numel() for n, v in state.items() if "base_layer" in n or "_proj.weight" in n)
    assert floats == sum(held)


SPECS: dict[str, dict[str, Any]] = {
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "zero 2": dict(data=2, zero=dict(stage=2)),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "pipeline": dict(pipeline=dict(size=2, microbatches=2)),
}


@pytest.mark.parametrize(
    "how",
    ["zero 3", *(pytest.param(how, marks=pytest.mark.slow) for how in ("zero 1", "zero 2", "pipeline"))],
)
def test_under_every_spec_it_is_the_same(how: str, tmp_path: Path) -> None:
    folder = str(folder_of("llama", tmp_path, **SIZES))
    losses, state, held = train(folder, {})
    for found, found_state, found_held in run_on_ranks(2, train, folder, SPECS[how]):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in state.items():
            if value.dtype == torch.uint8:
                assert torch.equal(found_state[name], value), name
            else:
                assert torch.allclose(found_state[name], value, atol=1e-4), name
        if how != "pipeline":  # in stage 3 they live in shards
            assert (sum(found_held) == 0) if how == "zero 3" else (found_held == held)


def refused(folder: str, spec: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as raised:
        Engine(source(folder), spec)
    return str(raised.value)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    folder = str(folder_of("llama", tmp_path, **SIZES))
    for said in run_on_ranks(2, refused, folder, dict(tensor=2)):
        assert "quantize='nf4' with tensor: packed weights are not split over tensor axes" in said
    with pytest.raises(SpecError, match=r"freezes the model: give adapter=LoraConfig"):
        pretrained(folder, quantize="nf4")
    with pytest.raises(SpecError, match="quantize='int4'"):
        pretrained(folder, quantize="int4")


def test_a_model_of_which_nothing_would_be_packed_is_refused(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path, hidden_size=48, intermediate_size=96)
    with pytest.raises(SpecError, match=r"would pack nothing of Llama.*multiple of 64 elements; leave quantize out"):
        Engine(source(str(folder)), optimizer=dict(name="sgd", lr=0.1))
