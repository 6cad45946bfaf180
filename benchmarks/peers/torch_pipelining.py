"""torch.distributed.pipelining: its schedules over stages of our own Llama's blocks.

Works with torch 2.11 and 2.13: stages are made without example tensors, so that shapes are found at the first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pipeline.work import Work

SCHEDULES: dict[str, tuple[str, int, str]] = {
    "1f1b": ("Schedule1F1B", 1, "loop"),
    "interleaved": ("ScheduleInterleaved1F1B", 2, "loop"),
    "zbv": ("ScheduleZBVZeroBubble", 2, "v"),
}
"""class, stages a rank, how stages lie on ranks"""


class StageModule(nn.Module):
    """Some blocks of a Llama, with what is before and behind them where it is the first or the last stage.

    Names of parameters are those of the whole model. What travels is no view: torch detaches outputs in place where it
    splits the backward.
    """

    def __init__(self, whole: nn.Module, first: int, stop: int, seq_len: int, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.seq_len = seq_len
        model: Any = whole
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(first, stop)})
        self.embed = model.embed if is_first else None
        self.norm: nn.Module | None = model.norm if is_last else None
        self.head: nn.Module | None = model.head if is_last else None
        self.rotary = model.rotary
        self.tables: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``b s`` ids or ``m h`` -> ``m h`` or logits ``m v``."""
        if self.embed is not None:
            x = self.embed(x.reshape(-1))
        for block in self.blocks.values():
            x = block(x, self.seq_len, self.tables)
        if self.head is not None and self.norm is not None:
            x = self.head(self.norm(x))
        return x


def stages(schedule: str, work: Work) -> dict[int, StageModule]:
    """This rank's stages by number, on the meta device."""
    _, chunks, lie = SCHEDULES[schedule]
    ranks, rank = work.args.ranks, work.mesh.index("pipe")
    count = ranks * chunks
    mine = [rank + ranks * chunk for chunk in range(chunks)]
    if lie == "v":
        mine = [rank, count - 1 - rank]
    blocks, more = divmod(work.args.layers, count)
    bounds = [stage * blocks + min(stage, more) for stage in range(count + 1)]
    whole, s = work.model(), work.args.seq_len
    return {
        stage: StageModule(whole, bounds[stage], bounds[stage + 1], s, stage == 0, stage == count - 1) for stage in mine
    }


def start(schedule: str, modules: dict[int, StageModule], work: Work, microbatches: int) -> Callable[[], Tensor | None]:
    """A function that does one step with so many micro-batches."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import PipelineStage

    name, chunks, _ = SCHEDULES[schedule]
    count = work.args.ranks * chunks
    for module in modules.values():  # once; torch looks at shapes with tensors of its own
        module.tables = module.rotary(None, work.args.seq_len, work.device)
    made = [PipelineStage(module, stage, count, work.device) for stage, module in modules.items()]
    kind = getattr(pipelining, name)
    loss = work.model().loss

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        # The mean over the batch, so that no pass over the gradients is needed afterwards.
        found: Tensor = loss(logits, target) / microbatches
        return found

    given: Any = made[0] if chunks == 1 else made
    runs = kind(given, microbatches, loss_fn=loss_fn, scale_grads=False)
    ids = work.batch(microbatches)
    options: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(runs.step).parameters:
        options["return_outputs"] = False
    first, last = 0 in modules, count - 1 in modules

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        args = (ids,) if first else ()
        if last:
            runs.step(*args, target=ids, losses=losses, **options)
            return torch.stack([one.detach() for one in losses]).sum()
        runs.step(*args, **options)
        return None

    return step
