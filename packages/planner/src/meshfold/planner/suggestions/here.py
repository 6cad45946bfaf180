"""Suggestion for the machine at hand, whose devices are looked up among the presets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshfold.mesh.processes import Environment
from meshfold.planner.known_machines import MACHINES
from meshfold.planner.machines import Machine
from meshfold.planner.optimizer_state import MOMENTS
from meshfold.planner.report import format_seconds
from meshfold.planner.suggestions.options import Suggestion
from meshfold.planner.suggestions.search import suggest
from meshfold.planner.suggestions.text import settings_words, spec_words

_GIB = 2**30


def local_machine(ranks: int | None = None, *, device: str | None = None) -> Machine:
    """Return the machine that this process runs on: a preset by the name of its GPU, else ranks that share a CPU.

    Ranks on equal nodes get the same machine.

    Args:
        ranks: on this node; by default those that were started, else one for each GPU.
        device: ``"cpu"`` leaves GPUs out.
    """
    here = Environment.detect()
    gpus = 0 if device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()
    started = here.local_world_size if here.world_size > 1 else gpus
    local = max(1, ranks or started)
    if not gpus:
        return replace(MACHINES["laptop"], devices=local)
    found = torch.cuda.get_device_properties(0)
    kinds = {name.removesuffix("x8").upper(): one for name, one in MACHINES.items() if name.endswith("x8")}
    known = next((one for kind, one in kinds.items() if kind in found.name.upper()), MACHINES["a100x8"])
    # The driver and NCCL take a part. Whole GiB, so that ranks whose devices differ by a page get the same.
    memory = float(int(found.total_memory * 0.98) // _GIB * _GIB)
    return replace(known, devices=local, memory=memory, source=f"{known.name}, and the memory of {found.name}")


def suggest_here(
    build: Callable[[], nn.Module],
    *,
    batch_size: int,
    seq_len: int,
    ranks: int | None = None,
    device: str | None = None,
    machine: Machine | None = None,
    optimizer: str = "adamw",
    **settings: Any,
) -> Suggestion:
    """Return the best spec for the devices at hand. It depends on the arguments and the kind of device: all ranks get the same.

    Args:
        build: makes the model.
        batch_size: sequences of a global batch.
        seq_len: tokens of a sequence.
        ranks: world size; by default that of the job, else one for each GPU.
        device: ``"cpu"`` leaves GPUs out.
        machine: the devices, if they were measured; by default the preset of their kind.
        optimizer: its name; one without a number of moments counts as AdamW.
        settings: as for :func:`suggest`.

    Raises:
        SpecError: as :func:`suggest`.
    """
    here = Environment.detect()
    local = here.local_world_size if here.world_size > 1 else ranks
    found = local_machine(local, device=device) if machine is None else machine
    world = here.world_size if here.world_size > 1 else ranks or found.devices
    known = optimizer if optimizer in MOMENTS else "adamw"
    return suggest(
        build, found, ranks=world, batch_size=batch_size, seq_len=seq_len, optimizer=known, options=1, **settings
    )


def choice_words(found: Suggestion) -> str:
    """Return the best spec in words: ``dict(data=4, tensor=2) --accumulate 4: 3.31 s a step, 79,310 tokens/s expected``."""
    best = found.best
    words = " ".join([f"dict({spec_words(best.candidate)})", *settings_words(best.candidate)])
    speed = best.speed
    return (
        f"{words}: {format_seconds(speed.seconds)} a step, {speed.tokens_per_second:,.0f} tokens/s expected on "
        f"{found.ranks} ranks of {found.machine.name}"
    )
