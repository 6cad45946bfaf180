"""Ranks that share a model write the texts of one process, under every spec, greedy and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from inference_models import FAMILIES, greedy, hugging_face, own, prompts

from meshfold.engine import Engine
from meshfold.inference import Generator, Sampling
from meshfold.mesh.testing import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=4)
DRAWN = Sampling(top_k=20, max_new_tokens=4, seed=4)
MEGATRON = dict(mode="megatron")
SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, dict(tensor=2)),
    "1d of 4": (4, dict(tensor=4)),  # ranks share key/value heads
    "1d+sequence": (2, dict(tensor=2, sequence=MEGATRON)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=4))),
    "3d": (4, dict(tensor=dict(mode="3d", grid=(2, 2, 1)))),
    "data": (2, dict(data=2)),
    "zero 3": (4, dict(data=2, tensor=2, zero=dict(stage=3))),
    "expert": (2, dict(data=2, expert=dict(size=2))),
    "pipeline": (2, dict(pipeline=2)),
    "pipeline and 1d": (4, dict(pipeline=2, tensor=2)),
    "ring": (2, dict(sequence=dict(mode="ring", size=2))),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
}
PAGED = ("1d", "1d of 4", "1d+sequence", "data", "zero 3", "expert")
KINDS = ["gpt", "llama of ours", "llama of ours, window", *(kind for kind in FAMILIES if kind != "gpt2")]


def made(kind: str) -> Any:
    if kind in FAMILIES:
        return hugging_face(kind)
    return own("gpt") if kind == "gpt" else own("llama", window=5 if "window" in kind else None)


def texts(
    cases: list[tuple[str, dict[str, Any]]],
) -> list[tuple[list[list[int]], list[list[int]], list[list[float]], str]]:
    found = []
    for kind, spec in cases:
        with Engine(made(kind), spec) as engine:
            generator = Generator(engine.generator, page_size=4, most_rows=3, chunk=5, ahead=3)
            rollouts = generator.generate(prompts(3), sampling=DRAWN)
            found.append(
                (
                    generator.generate(prompts(3), sampling=GREEDY).tokens,
                    rollouts.tokens,
                    rollouts.logprobs,
                    generator.reason,
                )
            )
    return found


def check(size: int, cases: list[tuple[str, str]]) -> None:
    models = {kind: made(kind).eval() for kind, _ in cases}
    for rank in run_on_ranks(size, texts, [(kind, SPECS[name][1]) for kind, name in cases]):
        for (likely, drawn, logprobs, reason), (kind, name) in zip(rank, cases, strict=True):
            model, case = models[kind], (kind, name, reason)
            assert (not reason) == (name in PAGED), case
            assert likely == [greedy(model, prompt, 4) for prompt in prompts(3)], case
            alone = Generator(model).generate(prompts(3), sampling=DRAWN)
            assert drawn == alone.tokens, case
            assert [p for row in logprobs for p in row] == pytest.approx(
                [p for row in alone.logprobs for p in row], abs=1e-4
            ), case


def families(name: str) -> list[str]:
    """Return the families that run under a spec: Mixtral's code sorts tokens, which ranks that split sequences refuse."""
    if name == "expert":
        return ["mixtral"]
    return [kind for kind in KINDS if kind != "mixtral" or name not in ("ring", "ulysses")]


THIN: dict[int, list[tuple[str, str]]] = {
    2: [("gpt", "1d"), ("mixtral", "expert"), ("opt", "1d"), ("llama of ours, window", "pipeline")],
    4: [("llama", "1d of 4"), ("mistral", "zero 3"), ("qwen3", "2d"), ("gpt", "3d")],
}


@pytest.mark.parametrize("size", THIN)
def test_ranks_write_the_texts_of_one_process(size: int) -> None:
    check(size, THIN[size])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_family_writes_the_texts_of_one_process(name: str) -> None:
    check(SPECS[name][0], [(kind, name) for kind in families(name)])
