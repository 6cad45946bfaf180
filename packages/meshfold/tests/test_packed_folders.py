"""Folders whose layers other libraries have packed: each weight by its formula, the same texts, parts of the whole on ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the folders, on every rank too
from packed_folders import FORMS, GROUP, llama, write
from torch import nn

from meshfold.checkpoint import CheckpointError
from meshfold.engine import Engine
from meshfold.huggingface import convert_folder, pretrained
from meshfold.inference import Generator, Quantized, Sampling
from meshfold.kernels import packed_weight_of
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
ONE, EIGHT = torch.uint8, (torch.int8, torch.float8_e4m3fn)


def texts_of(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0]
        found.append(out[len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_texts_are_those_of_the_formula(form: str, tmp_path: Path) -> None:
    plain = write(tmp_path, form)
    with Engine(pretrained(tmp_path), dict()) as engine:
        count = 0
        for name, module in engine.model.named_modules():
            if isinstance(module, nn.Linear) and "proj" in name:
                packed = packed_weight_of(module)
                assert packed is not None and packed.codes.dtype in (ONE, *EIGHT)
                assert torch.equal(module.weight, plain.get_submodule(name).weight), name
                count += 1
        assert count == 14 and not any(p.requires_grad for p in engine.model.parameters())
        report = Quantized.of(engine.model)
        assert len(report.layers) == 14 and report.bytes_before == 4 * sum(
            w.numel() for name, w in plain.named_parameters() if "proj" in name
        )
        assert Generator(engine.generator).generate(PROMPTS, sampling=GREEDY).tokens == texts_of(plain)


def test_experts_that_are_fused_are_unpacked(tmp_path: Path) -> None:
    """transformers has the experts of a layer as one tensor, which no linear layer reads."""
    from safetensors.torch import load_file, save_file
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {name: getattr(llama().config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    torch.manual_seed(0)
    config = MixtralConfig(
        **sizes,
        intermediate_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    MixtralForCausalLM(config).save_pretrained(tmp_path / "plain")
    files, packed = load_file(tmp_path / "plain" / "model.safetensors"), {}
    settings, make, options = FORMS["awq"]
    random = torch.Generator().manual_seed(5)
    for name, value in list(files.items()):
        if value.dim() == 2 and (".experts." in name or "_proj" in name):
            parts, files[name] = make(*value.shape, random, **options)
            packed |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        else:
            packed[name] = value
    assert sum("experts" in name for name in packed) == 2 * 4 * 3 * 3
    save_file(files, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "packed").mkdir()
    save_file(packed, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "packed" / "config.json").write_text(json.dumps({**told, "quantization_config": settings}))
    plain = MixtralForCausalLM.from_pretrained(tmp_path / "plain").eval()
    with Engine(pretrained(tmp_path / "packed"), dict()) as engine:
        assert len(Quantized.of(engine.model).layers) == 2 * 4
        assert Generator(engine.generator).generate(PROMPTS, sampling=GREEDY).tokens == texts_of(plain)


def on_ranks(folders: dict[str, Path]) -> list[tuple[str, list[bool], list[list[int]] | str]]:
    from meshfold.huggingface.packed_folder import shard_packed
    from meshfold.mesh import metadata

    found: list[tuple[str, list[bool], list[list[int]] | str]] = []
    for form, folder in folders.items():
        with Engine(pretrained(folder), dict()) as engine:
            whole = {name: packed for name, m in engine.model.named_modules() if (packed := packed_weight_of(m))}
        with Engine(pretrained(folder, dequantize=True), dict(tensor=2)) as engine:
            places = {name: m.weight for name, m in engine.model.named_modules() if name in whole}
            values = {name: weight.detach().clone() for name, weight in places.items()}
            assert all(metadata(weight) is not None for weight in places.values())
        try:
            with Engine(pretrained(folder), dict(tensor=2)) as engine:
                same = []
                for name, packed in whole.items():
                    mine = packed_weight_of(engine.model.get_submodule(name))
                    assert mine is not None
                    cut = shard_packed(name, packed, places[name])
                    pairs = zip(mine.parts().values(), cut.parts().values(), strict=True)
                    bits = [(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs]
                    same += [torch.equal(a, b) for a, b in bits]
                    same.append(torch.equal(mine.unpack(torch.float32), values[name]))
                found.append((form, same, Generator(engine.generator).generate(PROMPTS, sampling=GREEDY).tokens))
        except SpecError as error:
            found.append((form, [], str(error)))
    return found


@pytest.mark.parametrize(
    "forms",
    [
        pytest.param(["awq", "gptq act order", "compressed int8"], id="some"),
        pytest.param(["gptq", "fp8 blocks", "compressed int4 zero"], marks=pytest.mark.slow, id="others"),
    ],
)
def test_ranks_keep_their_part_of_the_codes(forms: list[str], tmp_path: Path) -> None:
    plain = {form: write(tmp_path / form, form) for form in forms}
    for rank in run_on_ranks(2, on_ranks, {form: tmp_path / form for form in forms}):
        for form, same, texts in rank:
            if form == "gptq act order":
                assert "not in the order of its groups" in str(texts) and "leave tensor out" in str(texts)
            else:
                assert len(same) >= 14 * 3 and all(same), form
                assert texts == texts_of(plain[form]), form


def refused(folder: Path) -> str:
    with pytest.raises(SpecError) as error, Engine(pretrained(folder), dict(tensor=4)):
        pass
    return str(error.value)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    said = run_on_ranks(4, refused, tmp_path)
    assert all(f"8 of its 32 columns, which lie in groups of {GROUP}" in each for each in said)
    with pytest.raises(SpecError, match="leave zero out, or give pretrained"):
        Engine(pretrained(tmp_path), dict(data=1, zero=dict(stage=3)))
    with pytest.raises(SpecError, match="all are frozen"):
        Engine(pretrained(tmp_path), dict(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    told = json.loads((tmp_path / "config.json").read_text())
    for changes, said_of in (
        (dict(quant_method="bitsandbytes"), "packed by 'bitsandbytes', which is not read here; awq, gptq"),
        (dict(quant_method="awq", version="gemv"), "version='gemv': the layout 'gemm' is read"),
        (dict(quant_method="gptq", bits=3), "bits=3: codes of 4 bits are read and of 8"),
        (dict(quant_method="gptq", checkpoint_format="marlin"), "checkpoint_format='marlin'"),
        (dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized"), "format='nvfp4-pack-quantized'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**told, "quantization_config": changes}))
        with pytest.raises(SpecError, match=said_of.replace("(", "\\(")):
            pretrained(tmp_path)
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(SpecError, match="not packed; leave dequantize out"):
        pretrained(tmp_path / "plain", dequantize=True)


def test_the_command_reads_them_and_convert_refuses_casts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshfold.cli import main

    write(tmp_path, "awq")
    with pytest.raises(CheckpointError, match="only a copy of them as they are"):
        convert_folder(tmp_path, tmp_path / "made", to="hf", dtype="bfloat16")
    greedy = ["--temperature", "0", "--max-new-tokens", "3", "--tokenizer", "byte"]
    assert main(["generate", str(tmp_path), "--prompt", "\x03\x01", *greedy]) == 0
    assert "14 layers packed as they are stored: " in capsys.readouterr().err
