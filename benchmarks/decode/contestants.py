"""Contestants of `meshfold bench decode`: our generator, transformers', gpt-fast's way, and engines for many requests."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Contestant
from benchmarks.decode.exact_forward import in_float32, logprobs_of
from benchmarks.decode.models import made_here, own_model, their_model
from benchmarks.decode.report import COMPILED, CONTINUOUS, FORMS, GPT_FAST, LMDEPLOY, OURS, PEER
from benchmarks.planned_memory import PlannedMemory

ON_THEIRS = "ours on transformers' Llama"
EAGER = "transformers dynamic"
FIRST = 8
"""New tokens of the texts that make transformers' continuous batching warm."""
PREFILL = 8192
"""Tokens of prompts that one forward of ours computes at most, where there are many."""


def makers(options: argparse.Namespace) -> dict[str, Callable[[], Contestant]]:
    """Return what makes each contestant, by name; models are made when they are first needed."""
    made: dict[str, Any] = {}

    def model(kind: str) -> Any:
        if kind not in made:
            made[kind] = own_model(options) if kind == "own" else their_model(options)
        return made[kind]

    found: dict[str, Callable[[], Contestant]] = {
        OURS: lambda: ours(OURS, model("own"), options),
        COMPILED: lambda: ours(COMPILED, model("own"), options, compile=options.backend),
        **{f"{OURS} {form} compiled": partial(packed, form, options) for form in FORMS},
        f"{OURS} plain": lambda: ours(f"{OURS} plain", model("own"), options, plain=True),
        **{f"{OURS} {form}": partial(packed, form, options, compiled=False) for form in FORMS},
        ON_THEIRS: lambda: ours(ON_THEIRS, model("theirs"), options),
        f"{ON_THEIRS} compiled": lambda: ours(
            f"{ON_THEIRS} compiled", model("theirs"), options, compile=options.backend
        ),
        GPT_FAST: lambda: by_hand(GPT_FAST, options),
        PEER: lambda: theirs(PEER, model("theirs"), options, cache_implementation="static"),
        EAGER: lambda: theirs(EAGER, model("theirs"), options),
        CONTINUOUS: lambda: continuous(CONTINUOUS, model("theirs"), options),
        LMDEPLOY: lambda: lmdeploy(LMDEPLOY, model("theirs"), options),
    }
    if options.ranks == 1:
        return found
    split = (OURS, COMPILED, *(f"{OURS} {form}" for form in FORMS))
    return {name: make for name, make in found.items() if name in split}


def ours(name: str, model: Any, options: argparse.Namespace, plain: bool = False, **settings: Any) -> Contestant:
    """Return our generator over a model; ``plain``: without the kernels of a single row."""
    from meshfold.inference import Generator, Sampling

    room = options.batch * (-(-(options.prompt + options.new) // options.page_size) + 1) * options.page_size
    memory = PlannedMemory()
    generator = Generator(
        model,
        tokens=room,
        page_size=options.page_size,
        most_rows=options.batch,
        chunk=max(min(options.batch * options.prompt, PREFILL), options.batch),
        ahead=options.ahead,
        sums=options.sums,
        **settings,
    )
    if plain:
        generator.runner.row_kernels = None  # type: ignore[attr-defined]
    given = prompts(options).tolist()

    def step(new: int = options.new) -> Any:
        return generator.generate(given, sampling=Sampling(temperature=0.0, max_new_tokens=new))

    without = {} if plain or settings.get("compile") else getattr(generator.runner, "without", {})
    named = dict(
        row_kernels="the kernels of a single row", sums="fused sums over ranks", packets="packets of sums over ranks"
    )
    lacking = [
        f"without {named[key]}: {why}" for key, why in without.items() if key == "row_kernels" or options.ranks > 1
    ]
    note = generator.reason or "; ".join(lacking)
    options.memory[name] = memory.of(generator, step)
    error, options.__dict__.setdefault("forward_error", {})[name] = errors_of(model, given[0], step())
    return Contestant(name, step, note=note, error=error, parts=dict(prefill=partial(step, 1)), warm=True)


def packed(form: str, options: argparse.Namespace, *, compiled: bool = True) -> Contestant:
    """Return our generator over a model of its own with packed weights; its own forward, for the error, has the same ones."""
    from meshfold.inference import quantize

    model = own_model(options)
    quantize(model, form, group=min(128, options.hidden))
    name = f"{OURS} {form} compiled" if compiled else f"{OURS} {form}"
    return ours(name, model, options, compile=options.backend if compiled else False)


def theirs(name: str, model: Any, options: argparse.Namespace, **settings: Any) -> Contestant:
    """Return transformers' own generation."""
    ids = prompts(options).to(model.device)

    def step() -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new,
            min_new_tokens=options.new,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )

    return Contestant(name, step)


def by_hand(name: str, options: argparse.Namespace) -> Contestant:
    """Return gpt-fast's way, written by hand."""
    from benchmarks.peers import gpt_fast

    sizes = [options.vocabulary, options.hidden, options.layers, options.heads, options.kv_heads, options.ffn]
    longest = options.prompt + options.new
    model: Any = made_here(lambda: gpt_fast.Decoder(*sizes, batch=options.batch, longest=longest), options)
    generate, ids = gpt_fast.generator(model, options.backend), prompts(options).to(model.output.weight.device)
    return Contestant(name, lambda: generate(ids, options.new).tolist())


def continuous(name: str, model: Any, options: argparse.Namespace) -> Contestant:
    """Return transformers' continuous batching, warm and timed once; one that is stopped has the limit as its time."""
    from benchmarks.peers.continuous_batching import ContinuousBatching, StoppedError

    texts = ContinuousBatching(model, prompts(options).tolist(), options.new)
    texts(min(FIRST, options.new), 4 * options.most_s)
    try:
        return Contestant(name, known_ms=texts(options.new, options.most_s) * 1e3, note="timed once")
    except StoppedError as error:
        return Contestant(name, known_ms=options.most_s * 1e3, note=str(error))


def lmdeploy(name: str, model: Any, options: argparse.Namespace) -> Contestant:
    """Return LMDeploy's engine over the weights of a model of transformers."""
    from benchmarks.peers.lmdeploy_engine import LMDeployEngine

    texts = LMDeployEngine(model, prompts(options).tolist(), options.new)

    def step(new: int = options.new) -> float:
        return texts(new, 4 * options.most_s)  # also one that compiles

    return Contestant(name, step, parts=dict(prefill=partial(step, 1)))


def prompts(options: argparse.Namespace) -> Tensor:
    """Return random prompts, ``batch prompt``."""
    random = torch.Generator().manual_seed(1)
    return torch.randint(1, options.vocabulary, (options.batch, options.prompt), generator=random)


def errors_of(model: Any, prompt: list[int], found: Any) -> tuple[float, float]:
    """Return the largest difference of log-probs of the first text from those in float32: of generation, and of one forward."""
    tokens = found.tokens[0]
    with in_float32(model):
        exact = logprobs_of(model, prompt, tokens)
    heard = torch.tensor(found.logprobs[0], device=exact.device)
    return tuple(float((each - exact).abs().max()) for each in (heard, logprobs_of(model, prompt, tokens)))  # type: ignore[return-value]
