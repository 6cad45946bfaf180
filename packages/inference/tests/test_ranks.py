"""Ranks that share a model write the texts of one process, under every spec, greedy and drawn."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from inference_models import FAMILIES, greedy, hugging_face, own

from meshfold.engine import Engine
from meshfold.inference import Generator, Request, Sampling
from meshfold.inference.forward import PagedForward
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import MoELlamaConfig

MEGATRON = dict(mode="megatron")
SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (2, dict(tensor=2)),
    "1d of 4": (4, dict(tensor=4)),  # ranks share key/value heads
    "1d+sequence": (2, dict(tensor=2, sequence=MEGATRON)),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=4))),
    "3d": (4, dict(tensor=dict(mode="3d", grid=(2, 2, 1)))),
    "3d with split columns": (4, dict(tensor=dict(mode="3d", grid=(1, 2, 2)))),
    "data": (2, dict(data=2)),
    "zero 3": (4, dict(data=2, tensor=2, zero=dict(stage=3))),
    "expert": (2, dict(data=2, expert=dict(size=2))),
    "pipeline": (2, dict(pipeline=2)),
    "pipeline and 1d": (4, dict(pipeline=2, tensor=2)),
    "pipeline and zero 3": (4, dict(pipeline=2, data=2, zero=dict(stage=3))),
    "ring": (2, dict(sequence=dict(mode="ring", size=2))),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
}
WHOLE = ("ring", "ulysses")  # sequences that ranks share
ROUGH = ("llama", "qwen3", "mistral", "mixtral")  # their norms compute in float32
FEW, MANY = 6, 9
"""requests"""
PARTS = {"2d": 2, "2.5d": 4, "3d": 4, "3d with split columns": 2}
"""parts into which the rows of a batch are split"""
# 2 · (11 pages + 1) · 2 tokens · layers · kv_heads · head_dim · 8: one of two layers, and one of two heads
BYTES = {("llama of ours, window", "pipeline"): 48 * 1 * 2 * 8 * 8, ("qwen3", "2d"): 48 * 2 * 1 * 16 * 8}
KINDS = [
    "gpt",
    "llama of ours",
    "llama of ours, window",
    "llama of ours, experts",
    *(kind for kind in FAMILIES if kind != "gpt2"),
]


def made(kind: str) -> Any:
    """Return a model in float64, which grouped products of experts do not take."""
    if kind in FAMILIES:
        model = hugging_face(kind)
        return model if kind == "mixtral" else model.double()
    if "experts" in kind:
        return own("llama", MoELlamaConfig, experts=4, shared=16).double()
    return own("gpt" if kind == "gpt" else "llama", window=5 if "window" in kind else None).double()


def wishes(count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts, of which some begin alike, each with settings of its own. As few as six still share, leave and come back."""
    longest, lengths = (7, 4) if count == FEW else (11, 7)
    kinds: list[dict[str, Any]] = [dict(temperature=0.0), dict(top_k=20), dict(temperature=1.2, repetition_penalty=1.3)]
    first = [5, 9, 11, 7, 33, 8, 41, 12, 6]
    return [
        ([*first[: 5 + i % 5], 20 + i % 3], Sampling(max_new_tokens=longest - i % lengths, seed=i, **kinds[i % 3]))
        for i in range(count)
    ]


def crowded(model: Any, name: str, count: int, short: bool) -> tuple[Generator, list[Request]]:
    """Run requests that arrive one by one over pools that are too small for all; ``short``: every token is a row of its own."""
    chance, waiting, requests = random.Random(5), wishes(count), []
    parts = PARTS.get(name, 1)
    host = 0 if name in WHOLE else 14 * parts
    generator = Generator(model, tokens=22 * parts, page_size=2, most_rows=6, chunk=8, ahead=2, host_tokens=host)
    if short:
        assert isinstance(generator.runner, PagedForward)
        generator.runner.short = True  # as on a GPU
    while waiting or generator.busy:
        while waiting and chance.random() < 0.6:
            requests.append(generator.submit(*waiting.pop(0)))
        generator.step()
    return generator, requests


def texts(cases: list[tuple[str, str]], count: int, short: bool) -> list[Any]:
    found = []
    for kind, name in cases:
        precision = "fp32" if kind == "mixtral" else "fp64"
        with Engine(made(kind), SPECS[name][1], precision=precision) as engine:
            generator, requests = crowded(engine.generator, name, count, short)
            scheduler = generator.scheduler
            assert scheduler.used_pages == 0 and (generator.host is None or generator.host.used == 0)
            found.append(
                (
                    [(r.tokens, r.logprobs) for r in requests],
                    [sum(getattr(r, what) > 0 for r in requests) for what in ("evictions", "shared", "restored")],
                    generator.reason,
                    len(scheduler.parts),
                    generator.bytes,
                )
            )
    return found


def check(size: int, cases: list[tuple[str, str]], count: int = MANY, short: bool = False) -> None:
    models = {kind: made(kind).eval() for kind, _ in cases}
    alone = {}
    for kind, model in models.items():
        one = Generator(model, page_size=8, most_rows=1)
        alone[kind] = [one.submit(*wish) for wish in wishes(count)]
        while one.busy:
            one.step()
    for kind, model in models.items():
        for (prompt, sampling), request in zip(wishes(count), alone[kind], strict=True):
            assert sampling.temperature or request.tokens == greedy(model, prompt, sampling.max_new_tokens)
    for rank in run_on_ranks(size, texts, cases, count, short):
        for (heard, counts, reason, parts, held), (kind, name) in zip(rank, cases, strict=True):
            case = (kind, name, reason, counts)
            assert (not reason) == (name not in WHOLE), case
            assert reason or (counts[0] and counts[1] and counts[2]), case
            assert parts == PARTS.get(name, 1), case
            assert held == BYTES.get((kind, name), held), case
            for (tokens, logprobs), request in zip(heard, alone[kind], strict=True):
                assert tokens == request.tokens, case
                assert logprobs == pytest.approx(request.logprobs, abs=2e-5 if kind in ROUGH else 1e-9), case


def families(name: str) -> list[str]:
    """Return the families that run under a spec."""
    return [kind for kind in KINDS if kind == "mixtral" or "experts" in kind] if name == "expert" else KINDS


THIN: dict[int, list[tuple[str, str]]] = {
    2: [
        ("mixtral", "expert"),
        ("opt", "1d"),
        ("llama of ours, window", "pipeline"),
        ("mixtral", "ring"),
        ("llama of ours, experts", "ulysses"),
    ],
    4: [
        ("llama", "1d of 4"),
        ("mistral", "zero 3"),
        ("qwen3", "2d"),
        ("llama", "3d with split columns"),
        ("mixtral", "pipeline and zero 3"),
    ],
}


@pytest.mark.parametrize("size", THIN)
def test_ranks_write_the_texts_of_one_process(size: int) -> None:
    check(size, THIN[size], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_every_family_writes_the_texts_of_one_process(name: str) -> None:
    check(SPECS[name][0], [(kind, name) for kind in families(name)])


@pytest.mark.slow
def test_steps_of_single_rows_write_the_texts_of_one_process() -> None:
    check(4, [("llama", "1d of 4"), ("qwen3", "2d"), ("llama", "3d with split columns"), ("opt", "2.5d")], short=True)
