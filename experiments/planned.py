"""Plans of GPTs on the machines of papers: what experiments on memory ask the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from meshfold.mesh import ParallelSpec
from meshfold.models import GPT, GPTConfig
from meshfold.planner import Machine, estimate, find_machine, step_speed
from meshfold.zero_gemini.planner import Limits, Workload
from meshfold.zero_gemini.planner import Machine as Rates

GB = 1e9
CONTEXT = 0.5 * 2**30
"""Bytes of a GPU that CUDA's context and its libraries take, beside what a plan counts."""
PLENTY = 2.0**50
"""Bytes that no model needs."""
VOCABULARY = 50_304


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of a paper, as a table of a settings.toml: a preset with the paper's devices and memory.

    Attributes:
        preset: the machine whose rates it has, all of them from data sheets.
        devices: GPUs of the node.
        gpu_gib: of a GPU.
        host_gb: of the host's memory.
        source: where devices and memory are published.
    """

    preset: str
    devices: int
    gpu_gib: float
    host_gb: float
    source: str

    def machine(self) -> Machine:
        """Return it for the planner."""
        preset = find_machine(self.preset)
        host = replace(preset.host, memory=self.host_gb * GB)
        return replace(preset, devices=self.devices, memory=self.gpu_gib * 2**30 - CONTEXT, host=host)


@dataclass(frozen=True, kw_only=True)
class Size:
    """A GPT by its sizes; 1024 positions."""

    layers: int
    hidden: int
    heads: int

    @classmethod
    def of(cls, row: Mapping[str, str]) -> Size:
        """Return the size of a row of a published table."""
        return cls(layers=int(row["layers"]), hidden=int(row["hidden"]), heads=int(row["heads"]))

    def build(self) -> GPT:
        """Return the model, its head tied to the embedding."""
        return GPT(
            GPTConfig(
                vocab_size=VOCABULARY,
                hidden=self.hidden,
                layers=self.layers,
                heads=self.heads,
                max_positions=1024,
            )
        )

    @property
    def builder(self) -> Callable[[], GPT]:
        """The function that :func:`meshfold.planner.estimate` takes."""
        return partial(self.build)


def planned(
    size: Size,
    parallel: Mapping[str, object],
    machine: Machine,
    *,
    batch: int,
    sequence: int = 1024,
    precision: str = "fp16",
    recompute: str | None = "blocks",
    **settings: Any,
) -> dict[str, Any]:
    """Return the plan of a step as JSON can hold it.

    ``GB`` are what a GPU holds at its peak, ``host GB`` what all ranks of a node hold then. ``TFLOP/s`` are those of a
    GPU by the count of these papers: 8 operations a parameter and token, recomputation included.

    Args:
        size: of the model.
        parallel: the spec.
        machine: it is planned for.
        batch: sequences of all ranks.
        sequence: tokens of one.
        precision: of the model.
        recompute: as for the engine.
        settings: what else :func:`meshfold.planner.estimate` takes.
    """
    spec = ParallelSpec.parse(parallel)
    found = estimate(
        size.builder,
        spec,
        batch_size=batch,
        seq_len=sequence,
        precision=precision,
        machine=machine,
        recompute=recompute,
        **{"clip": False, **settings},
    )
    memory, seconds = found.memory, step_speed(found, machine, precision).seconds
    device = memory.total
    return {
        "parameters": found.parameters,
        "fits": not found.refusal and (found.plan is not None or device <= machine.memory),
        "GB": device / GB,
        "host GB": memory.host / GB,
        "seconds": seconds,
        "samples/s": batch / seconds,
        "TFLOP/s": 8 * found.parameters * batch * sequence / seconds / spec.world_size / 1e12,
        "waits for": [] if found.plan is None else list(found.plan.binding),
    }


def workload_of(
    build: Callable[[], nn.Module],
    gpus: int,
    machine: Machine,
    *,
    batch: int,
    sequence: int = 1024,
    clip: bool = False,
    stage: int = 3,
) -> tuple[Workload, Rates]:
    """Return the work of a rank's step in half precision and its machine's rates: traced once, for plans under any limits.

    Args:
        build: the model.
        gpus: data-parallel ranks.
        machine: it is planned for; its memory is left out of account.
        batch: sequences of all ranks.
        sequence: tokens of one.
        clip: clip by the norm of all gradients.
        stage: of ZeRO.
    """
    roomy = replace(machine, memory=PLENTY, host=replace(machine.host, memory=PLENTY))
    spec = ParallelSpec.parse(dict(data=gpus, zero=dict(stage=stage, placement="auto")))
    settings: dict[str, Any] = dict(batch_size=batch, seq_len=sequence, precision="fp16", recompute="blocks")
    made = estimate(build, spec, machine=roomy, clip=clip, **settings).plan
    if made is None:
        raise RuntimeError("a plan without limits was refused")
    return made.workload, made.machine


def limits_of(machine: Machine) -> Limits:
    """Return the memory of a GPU and of the host that all of its ranks share; nothing goes to a disk."""
    return Limits(gpu_bytes=int(machine.memory), host_bytes=int(machine.host.memory), disk_bytes=0)
