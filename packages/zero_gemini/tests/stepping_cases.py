"""What tests of stepping share: three small chunks, the optimizer's kinds, and everything there is to know of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.layout import Item, lay_out
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.memory.pinned import PAGE_BYTES
from meshfold.zero_gemini.optimizer import AdamStepper, DiskSettings, GeneralStepper, Stepper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = {"a": (30, 50), "b": (7,), "c": (1000,), "d": (33, 70), "e": (2500,), "f": (), "g": (40, 25)}
PLACEMENTS = [
    ChunkPlacement(),
    ChunkPlacement(state="host"),
    ChunkPlacement(parameters="host", state="host"),
    ChunkPlacement(state="disk"),
    ChunkPlacement(parameters="host", state="disk"),
]
KINDS = [
    (torch.float32, "A"),
    (torch.float16, "A"),
    (torch.bfloat16, "A"),
    (torch.bfloat16, "B"),
    (torch.bfloat16, "C"),
]
kinds = pytest.mark.parametrize(("dtype", "regime"), KINDS, ids=lambda kind: str(kind).removeprefix("torch."))


def two_groups(parameters: list[nn.Parameter], cls: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Every third parameter has settings of its own."""
    groups = [
        {"params": [p for i, p in enumerate(parameters) if i % 3]},
        {"params": parameters[::3], "lr": 3e-3},
    ]
    return cls(groups, lr=1e-2, **options)


class Small:
    """Three chunks, and what steps on them."""

    def __init__(
        self,
        make: Callable[[Any], Stepper],
        dtype: torch.dtype,
        placements: Iterable[ChunkPlacement],
        *,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = two_groups,
        resident: bool = False,
        world: int = 1,
    ) -> None:
        self.memory = Memory(DEVICE)
        items = [Item(name, torch.Size(shape).numel(), 0) for name, shape in SHAPES.items()]
        group = Mesh({"data": world}).group("data")
        layout = lay_out(items, 4096, world, slot_align_elems=256)
        made = optimizer([nn.Parameter(torch.empty(shape)) for shape in SHAPES.values()])
        names = iter([[name for i, name in enumerate(SHAPES) if i % 3], [*SHAPES][::3]])
        self.stepper = make(made)
        self.chunks: list[Chunk] = []
        self.count, self.finished = 0, True
        generator = torch.Generator().manual_seed(0)
        for spec, placement in zip(layout.chunks, itertools.cycle(placements)):
            shapes = [torch.Size(SHAPES[name]) for name in spec.names]
            chunk = Chunk(
                spec,
                layout.shard_slices(spec, group.index),
                [nn.Parameter(torch.empty(0)) for _ in shapes],
                shapes,
                group,
                dtype=dtype,
                memory=self.memory,
                tier=placement.parameters,
                whole_group=resident,
            )
            self.chunks.append(chunk)
            self.stepper.adopt(chunk, placement.state)
            for name, shape in zip(spec.names, shapes, strict=True):
                self.stepper.fill(name, torch.randn(shape, generator=generator))
            self.stepper.publish(chunk)
            chunk.wait_if_resident()
        assert len(self.chunks) == 3
        for settings_, mine in zip(self.stepper.optimizer.param_groups, names, strict=True):
            found = [self.stepper.optimizer_parameter(name) for name in mine]
            settings_["params"] = [parameter for parameter in found if parameter is not None]
        if isinstance(self.stepper, GeneralStepper):
            self.stepper.begin()

    def step(self, used: Iterable[str] = SHAPES, scale: float | Tensor = 0.5) -> None:
        """With gradients that are the same for all who step as often."""
        self.count += 1
        generator = torch.Generator().manual_seed(self.count)
        dtype = torch.float32 if self.count % 2 or not isinstance(self.stepper, AdamStepper) else torch.bfloat16
        gradients = {}
        for chunk in self.chunks:
            gradient = torch.zeros(chunk.spec.shard_elems)
            for part in chunk.slices:
                drawn = torch.randn(part.length, generator=generator)
                if part.name in used:
                    gradient[part.shard_start : part.shard_start + part.length] = drawn
            placement = self.stepper.optimizer_parameter(chunk.slices[0].name) if chunk.slices else None
            gradients[chunk] = gradient.to("cpu" if placement is None else placement.device, dtype)
        self.stepper.step(gradients, scale, set(used))
        for chunk in self.chunks:
            if not chunk.step_is_pending:
                self.stepper.publish(chunk)
                chunk.wait_if_resident()

    def seen(self) -> Iterator[Tensor]:
        """What the model computes with, chunk by chunk."""
        for chunk in self.chunks:
            if chunk.resident:
                chunk.wait_step()
            else:
                chunk.gather()
            chunk.wait()
            yield from (parameter.detach().cpu().clone() for parameter in chunk.parameters)
            chunk.release()

    def move(self, index: int, placement: ChunkPlacement) -> None:
        self.stepper.finish()
        self.stepper.move(self.chunks[index], placement)

    def bits(self) -> list[Tensor]:
        """Everything there is to know."""
        found = [*self.seen()]
        self.stepper.finish()
        for chunk in self.chunks:
            for name, entries in self.stepper.entries(chunk).items():
                found += [self.stepper.read(name, key).cpu().clone() for key in sorted(entries)]
        mine = [name for name in SHAPES if self.stepper.optimizer_parameter(name) is not None]
        return found + [self.stepper.master(name).cpu().clone() for name in mine]

    def parameter_ids(self) -> list[int]:
        """Which objects the optimizer's groups have."""
        return [id(p) for group in self.stepper.optimizer.param_groups for p in group["params"]]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, wanted, strict=True)
    )


def adam(regime: str = "A", folder: Path | None = None, **options: Any) -> Callable[[Any], AdamStepper]:
    """Pieces are so small that each chunk has several."""
    disk = (
        None if folder is None else DiskSettings(folder=folder, **{"rank": 0, "piece_bytes": 3 * PAGE_BYTES, **options})
    )
    return lambda optimizer: AdamStepper(optimizer, regime, 7, disk)


@contextmanager
def small(*arguments: Any, **options: Any) -> Iterator[Small]:
    made = Small(*arguments, **options)
    try:
        yield made
    finally:
        made.stepper.close()
