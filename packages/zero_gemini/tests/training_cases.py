"""What tests of whole trainings share: a small model with every kind of parameter, its batches, and a model in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.zero_gemini import ChunkPlacement, Gemini, Memory

WORDS, WIDTH, ROWS, LENGTH = 40, 16, 8, 5
CHUNK_ELEMS = 1024
CPU = torch.device("cpu")
ADAMW: dict[str, Any] = dict(lr=1e-2, weight_decay=0.1, eps=1e-6)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x)))) * self.gate
        return y


class Model(nn.Module):
    """Tied table and head, a frozen block, a part that only some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, extra: bool) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        if extra:
            x = x + self.sometimes(x)
        y: Tensor = self.head(self.norm(x))
        return y


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def batches(count: int) -> list[tuple[Tensor, bool]]:
    """Token ids of all ranks, and whether the part that is used sometimes is used."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(WORDS, (ROWS, LENGTH), generator=generator), step % 3 == 1) for step in range(count)]


def loss_of(model: nn.Module, ids: Tensor, extra: bool, *, rank: int = 0, world: int = 1) -> Tensor:
    """This rank's share of the loss."""
    mine = ids[rank * ROWS // world : (rank + 1) * ROWS // world]
    return F.cross_entropy(model(mine, extra)[:, :-1].flatten(0, 1).float(), mine[:, 1:].flatten()) / world


def shared(model: nn.Module, mesh: Mesh) -> None:
    """Every parameter is on every rank of the axis ``data``."""
    for parameter in model.parameters():
        place = Placement(shape=tuple(parameter.shape), axes=((),) * parameter.dim())
        annotate(parameter, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))


def in_chunks(
    model: nn.Module,
    dtype: torch.dtype,
    placements: Callable[[Sequence[int]], Sequence[ChunkPlacement]],
    *,
    stage: int = 3,
    world: int = 1,
    memory: Memory | None = None,
    **settings: Any,
) -> Gemini:
    """Adam with float32 masters, in chunks of some parameters each."""
    mesh = Mesh({"data": world})
    shared(model, mesh)
    given: dict[str, Any] = {
        "make_optimizer": partial(torch.optim.AdamW, **ADAMW),
        "chunk_elems": CHUNK_ELEMS,
        "seed": 3,
        **settings,
    }
    return Gemini(
        model,
        mesh,
        stage=stage,
        memory=memory or Memory(CPU),
        placements=placements,
        dtype=dtype,
        master_dtype=torch.float32,
        **given,
    )
