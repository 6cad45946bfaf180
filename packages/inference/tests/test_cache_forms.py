"""Keys and values in eight bits: their formula, their bytes, texts that nothing else changes, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from inference_models import hugging_face, own, prompts
from torch import nn

from meshfold.engine import Engine
from meshfold.inference import Generator, Sampling
from meshfold.kernels import CACHE_FORMS, of_codes, to_codes
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
FORMS = list(CACHE_FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_the_nearest_levels(form: str) -> None:
    dtype, top = CACHE_FORMS[form]
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    codes, scale = to_codes(x, dtype)
    assert codes.dtype == dtype and scale.shape == (3, 5) and scale[0, 0] == 1
    bits = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    levels = bits[bits.isfinite() & (bits.abs() <= top)].unique()
    nearest = (x.unsqueeze(-1) / scale[..., None, None] - levels).abs().amin(-1)
    assert torch.allclose((codes.float() - x / scale.unsqueeze(-1)).abs(), nearest, atol=1e-4)
    assert torch.allclose(of_codes(codes, scale, torch.float32).abs().amax(-1), x.abs().amax(-1))


@pytest.mark.parametrize("form", FORMS)
def test_the_pool_has_its_stated_bytes_and_log_probs_are_near(form: str) -> None:
    model = own("llama").eval()
    plain, small = (Generator(model, tokens=256, cache=cache) for cache in (None, form))
    kv_heads, d, layers, size = 2, 8, 2, 16
    assert plain.bytes == 2 * (256 // size + 1) * size * layers * kv_heads * d * 4
    assert small.bytes == 2 * (256 // size + 1) * size * layers * kv_heads * (d + 4)
    prompt = prompts(2)[1]
    exact, found = (g.generate([prompt], sampling=GREEDY) for g in (plain, small))
    same = next((i for i, (a, b) in enumerate(zip(exact.tokens[0], found.tokens[0], strict=True)) if a != b), 8)
    assert same >= 2
    for a, b in zip(exact.logprobs[0][:same], found.logprobs[0][:same], strict=True):
        assert abs(a - b) < 0.3
    assert found.logprobs != exact.logprobs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["own", "mistral"])
def test_texts_do_not_depend_on_chunks_neighbours_and_evictions(form: str, kind: str) -> None:
    model: Any = own("llama").eval() if kind == "own" else hugging_face(kind)
    given = prompts(6)
    alone = [Generator(model, cache=form).generate([prompt], sampling=GREEDY).tokens[0] for prompt in given]
    together = Generator(model, cache=form, page_size=4, chunk=4, most_rows=4, ahead=2)
    assert together.generate(given, sampling=GREEDY).tokens == alone
    crowded = Generator(model, tokens=24, cache=form, page_size=4, chunk=5, most_rows=4)
    requests = crowded.complete(given, sampling=GREEDY)
    assert [request.tokens for request in requests] == alone
    assert sum(request.evictions for request in requests) > 0
    assert crowded.scheduler.used_pages == 0


def test_compiled_blocks_keep_codes_too() -> None:
    model = own("llama").eval()
    wanted = Generator(model, cache="int8").generate(prompts(2), sampling=GREEDY).tokens
    assert Generator(model, cache="int8", compile="eager").generate(prompts(2), sampling=GREEDY).tokens == wanted


def on_ranks(form: str) -> list[list[int]]:
    with Engine(own("llama"), dict(tensor=2)) as engine:
        return Generator(engine.generator, cache=form).generate(prompts(3), sampling=GREEDY).tokens


def test_heads_of_ranks_have_their_own_scales() -> None:
    wanted = Generator(own("llama").eval(), cache="int8").generate(prompts(3), sampling=GREEDY).tokens
    assert run_on_ranks(2, on_ranks, "int8") == [wanted, wanted]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cache='fp4': write 'fp8' or 'int8'\. Did you mean 'fp8'"):
        Generator(own("llama"), cache="fp4")

    class Other(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*ids.shape, 5)

    with pytest.raises(SpecError, match="cache='fp8': keys and values are not kept in pages here, since it is neither"):
        Generator(Other(), cache="fp8")
