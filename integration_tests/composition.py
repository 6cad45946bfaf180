"""One short training under any spec, and what has to hold afterwards: run by the tests, and by torchrun as a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.engine.states import PlainStates
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh import Mesh, all_gather
from meshfold.mesh.parameters.parameter_meta import metadata_on
from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig, MoELlamaConfig, build

SIZES: dict[str, Any] = dict(vocab_size=37, hidden=32, layers=4, heads=8, max_positions=16)
MODELS: dict[str, Callable[[], nn.Module]] = {
    # Its head is tied to the embedding, it has biases, and drops.
    "gpt": lambda: GPT(GPTConfig(**SIZES, dropout=0.1)),
    # Fewer key/value heads than heads, and than some tensor axes have ranks.
    "llama": lambda: Llama(LlamaConfig(**SIZES, kv_heads=2, ffn=48, tie=False)),
    "mixture": lambda: build(MoELlamaConfig(**SIZES, kv_heads=2, ffn=24, experts=8, top_k=3, shared=20, balance=0.0)),
}
# An epsilon of the size of gradients: rounding is not blown up where they are all but zero, as those of key biases are, and
# a gradient that is wrong by a factor shows in the weights.
ADAMW: dict[str, Any] = dict(name="adamw", lr=1e-2, weight_decay=0.1, eps=1e-2)
# Six rows and nine tokens: most specs have to fill up or deal unevenly.
STEPS, MORE, ACCUMULATION, CLIP, ROWS, LENGTH = 5, 2, 2, 0.5, 6, 9
# A mixture refuses rows that are filled up.
EVEN = dict(mixture=(16, 8))
# `make test` takes fewer: as many as measured placements take to be planned, and one under the plan.
FEW_STEPS, ONE_MORE = 3, 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training gave on one rank.

    Attributes:
        losses: one a micro-step.
        norms: of the gradient before clipping, one a step.
        state: the whole model's at the end.
        differing: names of the parameters, or masters, of which two ranks hold different bits.
    """

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]
    differing: list[str]


def engine_of(model: str, parallel: Mapping[str, object], precision: str | None = None) -> Engine:
    """Two micro-steps a step, with clipping; a mixture in float64, where rounding sends no token to another expert."""
    return Engine(
        MODELS[model],
        parallel,
        optimizer=ADAMW,
        precision=precision or ("fp64" if model == "mixture" else "fp32"),
        clip_grad_norm=CLIP,
        gradient_accumulation=ACCUMULATION,
        seed=5,
    )


def train(model: str, parallel: Mapping[str, object], precision: str | None = None, steps: int = STEPS) -> Run:
    """Some steps from the start."""
    with engine_of(model, parallel, precision) as engine:
        return run(engine, steps, shape=EVEN.get(model, (ROWS, LENGTH)))


def train_and_go_on(
    model: str, parallel: Mapping[str, object], then: Mapping[str, object], folder: str, steps: int, more: int
) -> tuple[Run, Run]:
    """So many steps, a checkpoint, and some more steps from it under another spec."""
    shape = EVEN.get(model, (ROWS, LENGTH))
    with engine_of(model, parallel) as engine:
        first = run(engine, steps, shape=shape)
        engine.save(folder)
    with engine_of(model, then) as engine:
        engine.load(folder)
        return first, run(engine, more, done=steps, shape=shape)


def run(engine: Engine, steps: int, done: int = 0, shape: tuple[int, int] = (ROWS, LENGTH)) -> Run:
    """So many steps on, after those that are done, on batches of so many rows and tokens."""
    generator = torch.Generator().manual_seed(1)
    losses, norms = [], []
    for number in range((done + steps) * ACCUMULATION):
        ids = torch.randint(0, SIZES["vocab_size"], shape, generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)
        if number < done * ACCUMULATION:
            continue
        losses.append(engine.train_step(engine.shard_batch({"input_ids": ids, "labels": labels})))
        if engine.last is not None and engine.last.stepped and engine.last.grad_norm is not None:
            norms.append(engine.last.grad_norm)
    return Run(losses=losses, norms=norms, state=engine.full_state_dict(), differing=differing_replicas(engine))


def differing_replicas(engine: Engine) -> list[str]:
    """Parameters and masters of which some element has other bits on one rank than on another that holds it too.

    Every rank's block is fetched and laid into the global tensor, each element of which all its holders must agree on:
    replicas over axes that do not split the parameter, and parts that neighbouring ranks hold together.
    """
    mesh, states = engine.mesh, engine.states
    found: list[str] = []
    for name, parameter in engine.model.named_parameters():
        if isinstance(states, PlainStates):
            held = {"": parameter.detach(), " (master)": states.targets.get(name, parameter).detach()}
        else:
            assert isinstance(states, ZeroStates)
            held = {" (master)": states.gemini.read(parameter)}  # each data rank has a part of it
        for kind, tensor in held.items():
            if not agrees(tensor, parameter, mesh):
                found.append(name + kind)
    return found


def agrees(local: Tensor, parameter: Tensor, mesh: Mesh) -> bool:
    """Whether all ranks that hold an element of a parameter hold the same bits."""
    meta = metadata_on(parameter, mesh)
    placement = meta.placement
    # Ranks of other stages have other parameters at this place.
    group = mesh.group(*(axis for axis in mesh.names if axis not in meta.only_at))
    blocks = all_gather(local.unsqueeze(0), group, 0)
    whole, seen = local.new_zeros(placement.shape), torch.zeros(placement.shape, dtype=torch.bool)
    for rank, block in zip(group.ranks, blocks, strict=True):
        for box in placement.rectangles(mesh, rank):
            here = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            there = tuple(slice(o, o + n) for o, n in zip(box.local_offsets, box.sizes, strict=True))
            known = seen[here]
            if not torch.equal(whole[here][known], block[there][known]):
                return False
            whole[here], seen[here] = block[there], True
    if not seen.all():
        raise AssertionError(f"elements of a parameter of shape {placement.shape} that no rank holds")
    return True


def main(argv: list[str]) -> None:
    """``composition.py MODEL SPEC_AS_JSON FOLDER``: every rank writes what it found to ``FOLDER/rank.pt``."""
    from meshfold.mesh import start

    model, parallel, folder = argv
    with start(backend="gloo", device="cpu") as process:
        found = train(model, json.loads(parallel))
        torch.save(vars(found), Path(folder) / f"{process.rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
