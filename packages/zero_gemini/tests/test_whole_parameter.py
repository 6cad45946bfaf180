"""Whole matrices at their owners: the same steps as torch's optimizers on plain tensors, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement
from meshfold.mesh.recording.comm_log import record
from meshfold.mesh.testing import fake_world, run_on_ranks
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.layout import Item, lay_out
from meshfold.zero_gemini.chunks.placement import ChunkPlacement
from meshfold.zero_gemini.errors import MemoryPlanError, OutOfBudget
from meshfold.zero_gemini.memory.arena import Memory
from meshfold.zero_gemini.optimizer.interface import Entry
from meshfold.zero_gemini.optimizer.parameter_owners import Owners
from meshfold.zero_gemini.optimizer.whole_parameter import WholeStepper

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (50, 24),
    "up": (40, 24),
    "up.bias": (40,),
    "down": (24, 40),
    "gate": (24,),
    "conv": (6, 5, 3, 3),
    "one": (1,),
    "head": (31, 24),
    "square": (16, 16),
    "never": (7, 9),
}
MATRICES: dict[str, tuple[int, ...]] = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
STEPS = 5
CPU = torch.device("cpu")


class Gram(torch.optim.Optimizer):
    """Shampoo in small: a matrix for every dim in a list, numbers of Python, an empty list, a tensor of whole numbers."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, every: int = 2) -> None:
        super().__init__(params, {"lr": lr})
        self.every = every

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, matrix = self.state[p], p.grad.view(p.shape[0], -1)
                if not state:
                    sides = matrix.shape if p.dim() > 1 else ()
                    state["gram"] = [torch.eye(n, dtype=p.dtype) if n < 45 else [] for n in sides]
                    state["root"], state["count"], state["rate"] = None, 0, 1.0
                    state["seen"] = torch.zeros(3, dtype=torch.int64)
                state["count"] += 1
                state["rate"] *= 0.9
                state["seen"][state["count"] % 3] += 2**60
                for side, gram in enumerate(state["gram"]):
                    if isinstance(gram, Tensor):
                        gram += matrix @ matrix.T if side == 0 else matrix.T @ matrix
                if state["gram"] and state["count"] % self.every == 1 and isinstance(state["gram"][-1], Tensor):
                    state["root"] = torch.linalg.inv(state["gram"][-1]).contiguous()
                update = matrix if state["root"] is None else matrix @ state["root"]
                p.add_(update.view_as(p), alpha=-group["lr"] * state["rate"])


MAKERS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "adafactor": (partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1), SHAPES),
    "muon": (partial(torch.optim.Muon, lr=1e-2), MATRICES),
    "gram": (Gram, SHAPES),
    "adagrad": (partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1), SHAPES),
}


def meta_of(mesh: Mesh, shape: tuple[int, ...]) -> ParameterMeta:
    return ParameterMeta(mesh=mesh, placement=Placement(shape=shape, axes=((),) * len(shape)), sum_axes=("data",))


class Trained:
    """A stepper with its chunks, as Gemini would set it up."""

    def __init__(
        self,
        make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        shapes: dict[str, tuple[int, ...]],
        dtype: torch.dtype,
        *,
        master: torch.dtype | None = None,
        placement: ChunkPlacement | None = None,
        chunk_elems: int = 1500,
        stage: int = 3,
        memory: Memory | None = None,
    ) -> None:
        placement = placement or ChunkPlacement()
        self.mesh = Mesh({"data": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1})
        group, self.memory, self.shapes = self.mesh.group("data"), memory or Memory(CPU), shapes
        stand_ins = {name: nn.Parameter(torch.empty(()).expand(shape)) for name, shape in shapes.items()}
        made = make(list(stand_ins.values()))
        with_state = bool(made.state)
        made.state.clear()
        self.stepper = WholeStepper(
            made,
            master,
            metas={name: meta_of(self.mesh, shape) for name, shape in shapes.items()},
            shapes={name: torch.Size(shape) for name, shape in shapes.items()},
            with_state=with_state,
        )
        items = [Item(name, torch.Size(shape).numel(), "all") for name, shape in shapes.items()]
        layout = lay_out(items, chunk_elems, group.size)
        self.chunks, self.parameters = [], {name: nn.Parameter(torch.empty(0)) for name in shapes}
        for spec in layout.chunks:
            chunk = Chunk(
                spec,
                layout.shard_slices(spec, group.index),
                [self.parameters[name] for name in spec.names],
                [torch.Size(shapes[name]) for name in spec.names],
                group,
                dtype=dtype,
                memory=self.memory,
                tier=placement.parameters,
                whole_group=stage < 3,
            )
            self.stepper.adopt(chunk, placement.state)
            self.chunks.append(chunk)
            for name in spec.names:
                self.stepper.fill(name, first(name, shapes[name]))
            chunk.publish()
            chunk.wait_if_resident()
        made.param_groups[0]["params"] = [
            s for name in shapes if (s := self.stepper.optimizer_parameter(name)) is not None
        ]
        self.stepper.begin()

    def step(self, number: int, scale: float | Tensor, dtype: torch.dtype) -> None:
        shards = {}
        for chunk in self.chunks:
            shards[chunk] = torch.zeros(chunk.shard.numel(), dtype=dtype)
            for part in chunk.slices:
                cut = chunk.cut(part.name, gradient(part.name, self.shapes[part.name], number))
                shards[chunk][part.shard_start : part.shard_start + part.length] = cut
        self.stepper.step(shards, scale, used_at(number, self.shapes))
        for chunk in self.chunks:
            self.stepper.publish(chunk)
            chunk.wait_if_resident()

    def shown(self) -> dict[str, Tensor]:
        """What the model would compute with."""
        found = {}
        for chunk in self.chunks:
            chunk.gather()
            chunk.wait()
            found.update({name: self.parameters[name].detach().clone() for name in chunk.spec.names})
            chunk.release()
        return found

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All state, as every rank can have it."""
        found: dict[str, dict[str, Tensor]] = {}
        for chunk in self.chunks:
            told: list[Any] = [None] * chunk.group.size
            mine = {
                name: {k: tuple(e) for k, e in entries.items()} for name, entries in self.stepper.entries(chunk).items()
            }
            if chunk.group.size > 1:
                torch.distributed.all_gather_object(told, mine)
            else:
                told = [mine]
            for entries in told:
                for name, keys in entries.items():
                    for key, entry in keys.items():
                        value = self.stepper.gather_state(name, key, Entry(*entry))
                        found.setdefault(name, {})[key] = value.clone()
        return found


def first(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + sum(map(ord, name)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def used_at(step: int, shapes: dict[str, tuple[int, ...]]) -> set[str]:
    return {name for name in shapes if name != "never" and not (name == "up" and step == 2)}


def serial(
    name: str, dtype: torch.dtype, scale: float, steps: int = STEPS
) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    make, shapes = MAKERS[name]
    whole = {key: nn.Parameter(first(key, shape).to(dtype)) for key, shape in shapes.items()}
    optimizer = make(list(whole.values()))
    for step in range(steps):
        for key, p in whole.items():
            used = key in used_at(step, shapes)
            p.grad = gradient(key, shapes[key], step).to(dtype) * scale if used else None
        optimizer.step()
    return optimizer, whole


def compare(
    name: str, dtype: torch.dtype, scale: float, placement: ChunkPlacement, stage: int, chunk_elems: int
) -> None:
    make, shapes = MAKERS[name]
    reference, whole = serial(name, dtype, scale)
    trained = Trained(make, shapes, dtype, placement=placement, stage=stage, chunk_elems=chunk_elems)
    for step in range(STEPS):
        number: float | Tensor = torch.tensor(scale, dtype=torch.float64) if step % 2 else scale
        trained.step(step, number, dtype)
    shown = trained.shown()
    for key, p in whole.items():
        assert torch.equal(shown[key], p.detach()), key
        assert torch.equal(trained.stepper.gather_master(key), p.detach()), key
    state = trained.state()
    for key, p in whole.items():
        for part, value in reference.state.get(p, {}).items():
            if isinstance(value, Tensor):
                assert torch.equal(state[key][part], value), (key, part)
                assert state[key][part].dtype == value.dtype


@pytest.mark.few(5)
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_torch_on_whole_tensors(world: int, name: str, dtype: torch.dtype) -> None:
    """To the bit: the owner steps on what one process would. Adafactor and Gram depend on all of a matrix."""
    host = ChunkPlacement(parameters="host", state="host")
    run_on_ranks(world, compare, name, dtype, 1.0, ChunkPlacement(), 3, 1500)
    run_on_ranks(world, compare, name, dtype, 0.37, host if name == "gram" else ChunkPlacement(state="host"), 2, 256)


def mixed(chunk_elems: int) -> None:
    """A model in bfloat16 whose owners keep float32."""
    make, shapes = MAKERS["adafactor"]
    whole = {key: nn.Parameter(first(key, shape).float()) for key, shape in shapes.items()}
    reference = make(list(whole.values()))
    trained = Trained(make, shapes, torch.bfloat16, master=torch.float32, chunk_elems=chunk_elems)
    for step in range(STEPS):
        for key, p in whole.items():
            p.grad = gradient(key, shapes[key], step).bfloat16().float() if key in used_at(step, shapes) else None
        reference.step()
        trained.step(step, 1.0, torch.bfloat16)
    shown = trained.shown()
    for key, p in whole.items():
        assert torch.equal(trained.stepper.gather_master(key), p.detach())
        assert torch.equal(shown[key], p.detach().bfloat16())
        assert trained.stepper.master_dtype(trained.chunks[0]) == torch.float32


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_float32_masters_of_a_bfloat16_model(world: int) -> None:
    run_on_ranks(world, mixed, 1500)


def resume(name: str) -> None:
    make, shapes = MAKERS[name]
    trained, other = (Trained(make, shapes, torch.float64) for _ in range(2))
    for step in range(3):
        trained.step(step, 1.0, torch.float64)
        other.step(step + 7, 0.5, torch.float64)
    state = trained.state()
    other.stepper.reset()
    assert not any(other.stepper.entries(chunk).get("up") for chunk in other.chunks) or name == "adagrad"
    for key in shapes:
        other.stepper.fill(key, trained.stepper.gather_master(key))
        for part in reversed(state.get(key, {})):  # parts of lists in any order
            other.stepper.write(key, part, state[key][part])
    again = other.state()
    assert {k: list(v) for k, v in again.items()} == {k: sorted(v, key=list(again[k]).index) for k, v in state.items()}
    for key, parts in state.items():
        assert all(torch.equal(again[key][part], value) for part, value in parts.items())
    for step in range(3, 6):
        trained.step(step, 1.0, torch.float64)
        other.step(step, 1.0, torch.float64)
    a, b = trained.shown(), other.shown()
    assert all(torch.equal(a[key], b[key]) for key in shapes)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", list(MAKERS))
def test_state_is_saved_and_restored_to_the_bit(world: int, name: str) -> None:
    run_on_ranks(world, resume, name)


def move(stage: int) -> None:
    make, shapes = MAKERS["gram"]
    memory = Memory(CPU)
    trained, still = (
        Trained(make, shapes, torch.float64, memory=memory, stage=stage),
        Trained(make, shapes, torch.float64),
    )
    placements = [
        ChunkPlacement(),
        ChunkPlacement(state="host"),
        ChunkPlacement(parameters="host" if stage == 3 else "device", state="host"),
    ]
    for step in range(6):
        trained.step(step, 1.0, torch.float64)
        still.step(step, 1.0, torch.float64)
        for place, chunk in enumerate(trained.chunks):
            trained.stepper.move(chunk, placements[(step + place) % 3])
    a, b = trained.shown(), still.shown()
    assert all(torch.equal(a[key], b[key]) for key in shapes)
    for chunk in trained.chunks:
        trained.stepper.move(chunk, ChunkPlacement())
    assert memory.host_arena.used_bytes == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [2, 3])
def test_chunks_may_move_between_steps(world: int, stage: int) -> None:
    run_on_ranks(world, move, stage)


@pytest.mark.parametrize("start", [ChunkPlacement(), ChunkPlacement(parameters="host", state="host")])
def test_without_room_everything_stays_where_it_was(start: ChunkPlacement) -> None:
    make, shapes = MAKERS["gram"]
    memory = Memory(CPU)
    trained, still = (Trained(make, shapes, torch.float64, memory=m, placement=start) for m in (memory, Memory(CPU)))
    target = ChunkPlacement(state="host") if start == ChunkPlacement() else ChunkPlacement()
    refused = 0
    for step in range(2):
        trained.step(step, 1.0, torch.float64)
        still.step(step, 1.0, torch.float64)
        for chunk in trained.chunks:
            used = memory.compute.used_bytes, memory.host_arena.used_bytes
            for spare in (0, 4096, 16 * 1024):  # for nothing, for a shard, for weights without state
                memory.compute.budget_bytes, memory.host_arena.budget_bytes = (bytes_ + spare for bytes_ in used)
                try:
                    trained.stepper.move(chunk, target)
                    trained.stepper.move(chunk, start)
                except OutOfBudget:
                    refused += 1
                assert (memory.compute.used_bytes, memory.host_arena.used_bytes) == used
            memory.compute.budget_bytes = memory.host_arena.budget_bytes = None
            with pytest.raises(MemoryPlanError, match=r"Gram cannot be on disk.*use adamw"):
                trained.stepper.move(chunk, ChunkPlacement(state="disk"))
    assert refused >= 2 * len(trained.chunks)
    a, b = trained.shown(), still.shown()
    assert all(torch.equal(a[key], b[key]) for key in shapes)


def test_what_is_held_is_accounted_for() -> None:
    make, shapes = MAKERS["adafactor"]
    memory = Memory(CPU)
    trained = Trained(
        make, shapes, torch.float32, memory=memory, placement=ChunkPlacement(parameters="host", state="host")
    )
    before = memory.host_arena.used_bytes
    for step in range(3):
        trained.step(step, 1.0, torch.float32)
    state = sum(
        memory.host_arena.nbytes(value.numel(), value.dtype)
        for parts in trained.state().values()
        for value in parts.values()
        if value.numel() > 1
    )
    assert memory.host_arena.used_bytes == before + state > before
    trained.stepper.reset()
    assert memory.host_arena.used_bytes == before
    trained.stepper.close()
    assert memory.host_arena.used_bytes == sum(
        block.nbytes for block in memory.host_arena.blocks if "parameters" in block.purpose
    )


# -- owners -------------------------------------------------------------------------------------------------------


def chunks_of(sizes: list[int], chunk_elems: int, mesh: Mesh) -> list[Chunk]:
    group = mesh.group("data")
    layout = lay_out([Item(str(i), size, "all") for i, size in enumerate(sizes)], chunk_elems, group.size)
    return [
        Chunk(
            spec,
            layout.shard_slices(spec, group.index),
            [nn.Parameter(torch.empty(0)) for _ in spec.names],
            [torch.Size([slot.numel]) for slot in spec.slots],
            group,
            dtype=torch.float32,
            memory=Memory(CPU),
            tier="host",
            whole_group=False,
        )
        for spec in layout.chunks
    ]


@pytest.mark.parametrize("sizes", [[4096] * 30, [64] * 500, [20000, 64, 64, 9000, 128] * 6, [30000]])
@pytest.mark.parametrize("world", [1, 2, 7])
def test_owners_are_balanced_and_mostly_have_the_whole(sizes: list[int], world: int) -> None:
    chosen = []
    for rank in (0, world - 1):
        with fake_world(world, rank=rank):
            mesh, owners = Mesh({"data": world}), Owners()
            found: dict[str, int] = {}
            moved = 0
            chunks = chunks_of(sizes, 16384, mesh)
            for chunk in chunks:
                mine = owners.choose(chunk.spec, chunk.group.ranks)
                moved += sum(sum(chunk.lengths(name)) - chunk.lengths(name)[owner] for name, owner in mine.items())
                found.update(mine)
            mesh.close()
        loads = [sum(sizes[int(name)] for name, owner in found.items() if owner == i) for i in range(world)]
        assert max(loads) - min(loads) <= 2 * max(sizes) + 256 * world  # the last shard's padding
        if max(sizes) <= 64:  # only what lies across a border moves
            assert moved <= 64 * len(chunks) * (world - 1)
        chosen.append(found)
    assert chosen[0] == chosen[1]


def exchanged() -> None:
    """Each element crosses once there and once back, to padding: here 8 matrices of the size of a chunk, on 4 ranks."""
    shapes: dict[str, tuple[int, ...]] = {str(i): (64, 64) for i in range(8)}
    trained = Trained(partial(torch.optim.Muon, lr=1e-2), shapes, torch.float32, chunk_elems=4096)
    with record() as log:
        trained.step(0, 1.0, torch.float32)
    sent = [entry for entry in log.entries if entry.kind == "all_to_all"]
    assert len(log.entries) == len(sent) == 4  # two rounds of four chunks, there and back
    assert sum(entry.block_bytes for entry in sent) == 2 * 8 * 4096 * 4 / 4


def test_what_travels() -> None:
    run_on_ranks(4, exchanged)


def test_split_and_padded_parameters_are_refused() -> None:
    with fake_world(4):
        mesh = Mesh({"data": 2, "tensor": 2})
        split = ParameterMeta(mesh=mesh, placement=Placement(shape=(8, 6), axes=(("tensor",), ())), sum_axes=("data",))
        made = torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 6))])
        with pytest.raises(MemoryPlanError, match=r"Adafactor needs whole parameters, and 'w' is split over tensor"):
            WholeStepper(made, None, metas={"w": split}, shapes={"w": torch.Size((4, 6))})
        whole = meta_of(mesh, (7, 6))
        with pytest.raises(MemoryPlanError, match=r"'w' of shape \(7, 6\) is padded with zeros to \(8, 6\)"):
            WholeStepper(made, None, metas={"w": whole}, shapes={"w": torch.Size((8, 6))})
        WholeStepper(made, None, metas={"w": whole}, shapes={"w": torch.Size((7, 6))})
        mesh.close()
