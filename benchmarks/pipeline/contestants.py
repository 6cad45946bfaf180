"""Ours under every schedule and torch's schedules: the same blocks, the same weights, stages of equal size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.peers import torch_pipelining
from benchmarks.pipeline.work import Work
from meshfold.pipeline import Costs, Pipeline

OURS: dict[str, dict[str, Any]] = {
    "1f1b": dict(schedule="1f1b"),
    "zb-v": dict(schedule="zb-v"),
    "interleaved": dict(schedule="interleaved", chunks=2),
    "zb-h1": dict(schedule="zb-h1"),
    "dualpipe-v": dict(schedule="dualpipe-v"),
    "hanayo": dict(schedule="hanayo", waves=2),
    "auto": dict(schedule="auto"),
}
PEERS = {f"torch {name}": name for name in torch_pipelining.SCHEDULES}
LIKE = {"1f1b": "torch 1f1b", "interleaved": "torch interleaved", "zb-v": "torch zbv"}
COMPILED = ("1f1b", "interleaved", "zb-v", "torch 1f1b", "torch interleaved")
NAMES = (*OURS, *PEERS)


@dataclass
class Runner:
    """One contestant, built.

    Attributes:
        name: what the table calls it.
        start: given the number of micro-batches, makes the function that does a step and returns its loss where the
            contestant knows it, else None.
        named: its parameters by their names in the whole model.
        weights: bytes of its weights on this rank.
        pipeline: of ours.
        note: why it could not be built or run.
    """

    name: str
    start: Callable[[int], Callable[[], Any]] | None = None
    named: Callable[[], Iterator[tuple[str, nn.Parameter]]] = lambda: iter(())
    weights: int = 0
    pipeline: Pipeline | None = None
    note: str = ""
    costs: dict[str, Any] = field(default_factory=dict)


def build(name: str, work: Work, costs: dict[int, Costs]) -> Runner:
    """A contestant by its name; a name with `` compiled`` at its end has every block compiled.

    Args:
        costs: what ``auto`` searches with, by stages a rank.
    """
    kind = name.removesuffix(" compiled")
    compiled = kind != name
    if kind in PEERS:
        return _peer(name, PEERS[kind], work, compiled)
    options = dict(OURS[kind])
    if kind == "auto":
        options |= dict(costs=costs, memory=work.args.auto_memory)
    pipeline = Pipeline(
        work.model(),
        work.mesh,
        microbatches=max(work.args.microbatches),
        layers=_even(work, _stages(options, work)),
        fill=work.fill,
        device=work.device,
        example=((torch.zeros(1, 8, dtype=torch.long, device=work.device),), {}),
        batched_weights=work.args.batched_weights,
        **options,
    )
    if compiled:
        compile_blocks(pipeline.module, work)

    def start(microbatches: int) -> Callable[[], Any]:
        ids = work.batch(microbatches)
        batch = dict(input_ids=ids, labels=ids)
        return lambda: pipeline.step(batch)

    held = sum(p.numel() * p.element_size() for p in pipeline.parameters())
    return Runner(name, start, pipeline.named_parameters, held, pipeline)


def compile_blocks(module: nn.Module, work: Work) -> None:
    """Have every block of the model that is on this rank compiled, in place."""
    from meshfold.models.llama import Block

    backend = "inductor" if work.device.type == "cuda" else "aot_eager"
    for block in module.modules():
        if isinstance(block, Block):
            block.compile(fullgraph=True, dynamic=False, backend=backend)


def _peer(name: str, schedule: str, work: Work, compiled: bool) -> Runner:
    modules = torch_pipelining.stages(schedule, work)
    for module in modules.values():
        work.fill(module)
        if compiled:
            compile_blocks(module, work)

    def named() -> Iterator[tuple[str, nn.Parameter]]:
        for module in modules.values():
            yield from module.named_parameters()

    held = sum(p.numel() * p.element_size() for _, p in named())
    return Runner(name, lambda m: torch_pipelining.start(schedule, modules, work, m), named, held)


def _stages(options: dict[str, Any], work: Work) -> int:
    from meshfold.pipeline import schedule

    found = schedule(ranks=work.args.ranks, microbatches=max(work.args.microbatches), **_renamed(options))
    return found.stages


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {("name" if key == "schedule" else key): value for key, value in options.items()}


def _even(work: Work, stages: int) -> list[int]:
    blocks, more = divmod(work.args.layers, stages)
    return [blocks + (stage < more) for stage in range(stages)]
