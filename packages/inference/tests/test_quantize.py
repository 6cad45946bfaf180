"""Packed weights: the formulas, the same codes on ranks as in one process, and the texts of the weights that codes stand for."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from inference_models import greedy, own, prompts
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from meshfold.engine import Engine
from meshfold.inference import Generator, Sampling, quantize
from meshfold.mesh import SpecError, metadata
from meshfold.mesh.testing import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)
GROUP = 8


def oracle(weight: Tensor, form: str) -> Tensor:
    """The weight after packing, by other means: the nearest of all levels."""
    n, k = weight.shape
    grouped = weight.view(n, -1, GROUP) if form == "int4" else weight.view(n, 1, k)
    top = {"int8": 127, "int4": 7, "fp8": 448}[form]
    scale = grouped.abs().amax(-1, keepdim=True) / top
    if form == "fp8":
        bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        levels = bits[bits.isfinite()].unique()
    else:
        levels = torch.arange(-top, top + 1, dtype=torch.float32)
    nearest = (grouped.unsqueeze(-1) / scale.unsqueeze(-1) - levels).abs().argmin(-1)
    return (levels[nearest] * scale).view(n, k)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4"])
def test_texts_are_those_of_the_weights_that_codes_stand_for(form: str) -> None:
    plain, model = own("llama").eval(), own("llama").eval()
    count, before = 0, 0
    for module in plain.modules():
        if isinstance(module, nn.Linear):
            before, count = before + module.weight.nbytes, count + 1
            module.weight.data = oracle(module.weight.data, form)
    found = quantize(model, form, group=GROUP)
    assert len(found.layers) == count == 2 * 4 + 1 and found.bytes_before == before
    elements, rows = before // 4, sum(m.scale.shape[0] for m in model.modules() if hasattr(m, "codes"))
    assert found.bytes == (elements // 2 + elements // GROUP * 4 if form == "int4" else elements + rows * 4)
    for packed, wanted in zip(model.modules(), plain.modules(), strict=True):
        if isinstance(wanted, nn.Linear):
            assert torch.allclose(packed.weight, wanted.weight, rtol=1e-6, atol=1e-7)
    counter = CompileCounter()  # all blocks share compiled code
    texts = Generator(model, compile=counter).generate(prompts(3), sampling=GREEDY).tokens
    assert texts == [greedy(plain, p, 6) for p in prompts(3)]
    assert counter.frame_count == 1
    assert greedy(plain, prompts(3)[0], 6) != greedy(own("llama").eval(), prompts(3)[0], 6) or form != "int4"


def packed_on_ranks(form: str) -> tuple[list[bool], list[list[int]]]:
    whole = own("llama")
    with Engine(copy.deepcopy(whole), dict(tensor=2)) as engine:
        places = {
            name: metadata(module.weight)
            for name, module in engine.model.named_modules()
            if hasattr(module, "plan") and isinstance(getattr(module, "weight", None), nn.Parameter)
        }
        quantize(engine.model, form, group=GROUP)
        quantize(whole, form, group=GROUP)
        same = []
        for name, module in engine.model.named_modules():
            if not hasattr(module, "codes"):
                continue
            known, there = places[name], whole.get_submodule(name)
            rows, columns = (known.placement.coordinates(known.mesh, dim) for dim in (0, 1))
            inside = rows < there.codes.shape[0]  # the vocabulary is padded
            each = columns.shape[0] // module.codes.shape[1]
            codes = there.codes.view(torch.uint8)[rows[inside]][:, columns[::each] // each]
            same.append(torch.equal(module.codes.view(torch.uint8)[inside], codes))
            each = columns.shape[0] // module.scale.shape[1]
            scales = there.scale[rows[inside]][:, columns[::each] // each if form == "int4" else slice(None)]
            same.append(torch.equal(module.scale[inside], scales))
        return same, Generator(engine.generator).generate(prompts(3), sampling=GREEDY).tokens


def on_ranks(forms: list[str]) -> list[tuple[list[bool], list[list[int]]]]:
    return [packed_on_ranks(form) for form in forms]


@pytest.mark.parametrize("forms", [["int8", "int4"], pytest.param(["fp8"], marks=pytest.mark.slow)])
def test_ranks_pack_their_part_of_the_whole(forms: list[str]) -> None:
    for rank in run_on_ranks(2, on_ranks, forms):
        for form, (same, texts) in zip(forms, rank, strict=True):
            model = own("llama").eval()
            quantize(model, form, group=GROUP)
            assert len(same) == 2 * 9 and all(same), form
            assert texts == Generator(model).generate(prompts(3), sampling=GREEDY).tokens, form


def refused(form: str, group: int) -> str:
    with Engine(own("llama"), dict(tensor=2)) as engine:
        with pytest.raises(SpecError) as error:
            quantize(engine.model, form, group=group)
        assert not any(hasattr(module, "codes") for module in engine.model.modules())
        return str(error.value)


def test_what_cannot_be_packed_is_refused() -> None:
    for message in run_on_ranks(2, refused, "int4", 32):
        assert "blocks.0.attn.out: groups of 32 do not divide the 16 columns" in message and "write group=16" in message
    model: Any = own("gpt", tie=True)
    with pytest.raises(SpecError, match=r"'int7': write one of int8, fp8, int4\. Did you mean 'int"):
        quantize(model, "int7")
    assert "head" not in quantize(model, "int8").layers  # its weight is the embedding
    with pytest.raises(SpecError, match="is not there to be packed"):
        quantize(own("gpt").to("meta"), "int8")
