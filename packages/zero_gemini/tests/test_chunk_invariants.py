"""Whatever is done with whatever model: what holds of chunks holds after every operation, and inside of forward and backward.

Random small models (frozen, shared, unused and recomputed blocks), random operations, random placements. A ``Tracker`` watches
beside it: every transition of a parameter's state must be a legal one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from parameter_states import State, Tracker
from training_cases import CPU, in_chunks

from meshfold.mesh import Mesh
from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini import ChunkPlacement, Gemini, Memory
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.errors import ChunkError
from meshfold.zero_gemini.memory.arena import Arena, Block
from meshfold.zero_gemini.optimizer import AdamStepper, DiskSettings

PLACEMENTS = [
    ChunkPlacement(),
    ChunkPlacement(state="host"),
    ChunkPlacement(parameters="host", state="host"),
    ChunkPlacement(state="disk"),
    ChunkPlacement(parameters="host", state="disk"),
]


@dataclass(frozen=True)
class Shape:
    """A model, and how it is cut.

    Attributes:
        widths: inner width of each block.
        frozen: blocks that are not trained.
        shared: pairs of blocks: the second has the first's ``up``.
        recomputed: blocks under activation checkpointing.
        chunk_elems: size of a chunk.
        stage: of ZeRO.
        dtype: in which it computes.
    """

    widths: tuple[int, ...]
    frozen: frozenset[int]
    shared: bool
    recomputed: frozenset[int]
    chunk_elems: int
    stage: int
    dtype: str


class Part(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Parts(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(width) for width in shape.widths)
        self.scale = nn.Parameter(torch.ones(4))
        self.recomputed = shape.recomputed
        if shape.shared:
            self.parts[-1].up, self.parts[-1].down = self.parts[0].up, self.parts[0].down
        for number in shape.frozen:
            self.parts[number].requires_grad_(False)

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for number in order:
            part = self.parts[number]
            x = checkpoint(part, x, use_reentrant=False) if number in self.recomputed else part(x)
        return x * self.scale


shapes = st.builds(
    Shape,
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=5).map(tuple),
    frozen=st.frozensets(st.integers(0, 1), max_size=1),
    shared=st.booleans(),
    recomputed=st.frozensets(st.integers(0, 1)),
    chunk_elems=st.sampled_from([128, 300, 1000]),
    stage=st.sampled_from([1, 2, 3, 3, 3]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
orders = st.lists(st.integers(0, 4), max_size=6).map(tuple)
operations = st.one_of(
    st.tuples(st.just("backward"), orders, st.booleans()),
    st.tuples(st.just("backward"), orders, st.booleans()),
    st.tuples(st.just("two losses"), orders, orders),
    st.tuples(st.just("evaluate"), orders),
    st.tuples(st.just("raise"), orders, st.booleans()),
    st.tuples(st.just("step")),
    st.tuples(st.just("step")),
    st.tuples(st.just("skip")),
    st.tuples(st.just("move"), st.lists(st.sampled_from(range(len(PLACEMENTS))), min_size=1, max_size=4)),
    st.tuples(st.just("gather"), st.integers(0, 20)),
    st.tuples(st.just("release"), st.integers(0, 20)),
    st.tuples(st.just("read")),
    st.tuples(st.just("state")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("write"), st.integers(0, 20)),
)


# -- what holds -------------------------------------------------------------------------------------------------------


def blocks_of(gemini: Gemini) -> Iterator[Block]:
    """What is really held, found by walking over everything that can hold memory."""
    for chunk in gemini.chunks:
        yield from (chunk._block, *([] if chunk._own is None else [chunk._own]))
    for gradient in gemini._gradients.values():
        found = (*gradient._whole.blocks, *gradient._sending, gradient._here, gradient._host)
        yield from {id(block): block for block in found if block is not None}.values()
    stepper = gemini._stepper
    assert isinstance(stepper, AdamStepper) and stepper.disk is not None
    for held in stepper._held.values():
        yield from held._blocks.values()
        yield from [] if held.weights._own is None else [held.weights._own]
    yield from (buffer.block for buffer in stepper.disk.ring._buffers)


def check_bytes(gemini: Gemini) -> None:
    """Accounted bytes are the bytes of storages, each counted once, and no arena has blocks that nobody holds."""
    held: dict[Arena, dict[int, int]] = {gemini.memory.compute: {}, gemini.memory.host_arena: {}}
    mine = list(blocks_of(gemini))
    for block in mine:
        storage = block.tensor.untyped_storage()
        if storage.nbytes():
            taken = -(-storage.nbytes() // 512) * 512
            assert taken == block.nbytes, block
            held[block.arena][storage.data_ptr()] = taken
    for arena, storages in held.items():
        assert arena.used_bytes == sum(storages.values()), (arena, arena.holders(20))
        assert {id(block) for block in arena.blocks} == {id(b) for b in mine if b.arena is arena}


def check_values(gemini: Gemini, model: nn.Module) -> None:
    """Every parameter in one chunk; it is a view of it while that is gathered, and nothing otherwise; padding is zero."""
    names = [name for chunk in gemini.chunks for name in chunk.spec.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    for chunk in gemini.chunks:
        check_padding(chunk.shard, [(s.shard_start, s.length) for s in chunk.slices], f"{chunk}: shard")
        if not chunk.is_gathered:
            assert all(p.numel() == 0 for p in chunk.parameters) and not chunk.resident
            assert chunk._whole.untyped_storage().nbytes() == 0
        elif not chunk.is_gathering:
            slots = [(slot.start_elems, slot.numel) for slot in chunk.spec.slots]
            check_padding(chunk._whole, slots, f"{chunk}: gathered")
            for parameter, (start, numel) in zip(chunk.parameters, slots, strict=True):
                assert parameter.numel() == numel and parameter.device == gemini.memory.device
                if numel:
                    assert parameter.data_ptr() == chunk._whole[start:].data_ptr()
        if chunk.resident:
            assert chunk.is_gathered and lies_in_whole(chunk)


def lies_in_whole(chunk: Chunk) -> bool:
    """Return True if the shard is this rank's part of the gathered tensor."""
    first = chunk.group.index * chunk.spec.shard_elems * chunk.dtype.itemsize
    return chunk.shard.data_ptr() == chunk._whole.data_ptr() + first


def check_padding(tensor: Tensor, spans: list[tuple[int, int]], what: str) -> None:
    rest = torch.ones(tensor.numel(), dtype=torch.bool)
    for start, length in spans:
        assert rest[start : start + length].all(), f"{what}: parameters overlap"
        rest[start : start + length] = False
    assert not tensor[rest].any(), f"{what}: padding is not zero"


def check_state_padding(gemini: Gemini) -> None:
    """Between steps that are done: of masters and moments in memory, too."""
    stepper = gemini._stepper
    assert isinstance(stepper, AdamStepper)
    for chunk, held in stepper._held.items():
        spans = [(s.shard_start, s.length) for s in chunk.slices]
        for name, block in held._blocks.items():
            check_padding(block.tensor, spans, f"{chunk}: {name}")
        check_padding(held.weights.tensor, spans, f"{chunk}: weights")


@dataclass
class Watch:
    """Follows every parameter's state from hooks that come after Gemini's."""

    gemini: Gemini
    model: Parts
    trackers: dict[Chunk, Tracker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tier: dict[str, tuple[Chunk, Tracker]] = {}
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for chunk in self.gemini.chunks:
            trained = chunk in self.gemini._gradients
            self.trackers[chunk] = Tracker(chunk.spec.names, state=State.HOLD, frozen=not trained, chunk=str(chunk))
            self.tier.update(dict.fromkeys(chunk.spec.names, (chunk, self.trackers[chunk])))
        self.behind = False
        for unit in self.gemini._units:
            mine = [names[p] for p in unit.parameters]  # type: ignore[index]
            unit.module.register_forward_pre_hook(self.before(unit.module, mine))
            unit.module.register_forward_hook(self.after(mine), always_call=True)  # recomputation ends early
        for parameter, name in names.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.arrival(name))

    def begin(self, names: list[str], operation: str) -> None:
        for name in names:
            self.tier[name][1].begin(name, operation)
        self.check()

    def end(self, names: list[str], to: State, operation: str) -> None:
        for name in names:
            if self.tier[name][1].uses(name):  # a gradient that came in has ended all uses
                self.tier[name][1].end(name, to, operation)

    def check(self) -> None:
        """What is computed with is gathered, and there."""
        for chunk, tracker in self.trackers.items():
            if tracker.any_in(State.COMPUTE):
                assert chunk.is_gathered and not chunk.is_gathering, chunk
                assert chunk._whole.untyped_storage().nbytes(), chunk
        check_values(self.gemini, self.model)
        check_bytes(self.gemini)

    def before(self, module: nn.Module, names: list[str]) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.begin(names, "forward")
            first = next((x for x in args if isinstance(x, Tensor) and x.requires_grad), None)
            if first is not None and module is not self.model and not self.behind:
                first.register_hook(lambda _: self.end(names, State.HOLD_AFTER_BWD, "end of backward"))

        return hook

    def after(self, names: list[str]) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, output: Tensor | None) -> None:
            training = torch.is_grad_enabled()
            self.end(names, State.HOLD_AFTER_FWD if training else State.HOLD, "end of forward")
            if training and output is not None and output.requires_grad and not self.behind:
                output.register_hook(lambda _: self.backward(names))

        return hook

    def backward(self, names: list[str]) -> None:
        self.behind = True
        self.begin(names, "backward")

    def arrival(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self.tier[name][1].move(name, State.READY_FOR_REDUCE, "gradient")

        return hook

    def ended(self) -> None:
        """After a backward: what had no gradient counts as zero, all is reduced; and after what was given up."""
        self.behind = False
        for tracker in self.trackers.values():
            tracker.reset("end of backward")
        self.check()


# -- what is done -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def carry_out(shape: Shape, placements: list[int], plan: list[tuple[Any, ...]], world: int) -> list[str]:
    """Do everything, and check after each operation; what is left of it all must be finite."""
    torch.manual_seed(0)
    model, done = Parts(shape), []
    rank = Mesh({"data": world}).index("data")
    with tempfile.TemporaryDirectory() as folder:
        gemini = in_chunks(
            model,
            getattr(torch, shape.dtype),
            lambda sizes: [PLACEMENTS[placements[i % len(placements)]] for i in range(len(sizes))],
            stage=shape.stage,
            world=world,
            memory=Memory(CPU),
            chunk_elems=shape.chunk_elems,
            disk=DiskSettings(folder=folder, rank=rank, piece_bytes=4096),
        )
        watch = Watch(gemini, model)
        watch.check()
        for number, operation in enumerate(plan):
            done.append(operation[0])
            Doing(gemini, model, watch, number, rank).do(*operation)
            watch.check()
        gemini.flush()
        check_state_padding(gemini)
        values = [gemini.read(p) for p in model.parameters()]
        assert all(value.isfinite().all() for value in values)
        parameters = sum(block.nbytes for chunk in gemini.chunks for block in kept(chunk))
        gemini.close()
        used = gemini.memory.compute.used_bytes + gemini.memory.host_arena.used_bytes
        assert used == parameters, "only what the model computes with outlives the training"
        assert not list(Path(folder).iterdir())
    return done


def kept(chunk: Chunk) -> list[Block]:
    """What a chunk has of memory while it is not gathered, or for good."""
    return [block for block in (chunk._block, chunk._own) if block and block.tensor.untyped_storage().nbytes()]


@dataclass
class Doing:
    """One operation."""

    gemini: Gemini
    model: Parts
    watch: Watch
    number: int
    rank: int

    def do(self, what: str, *arguments: Any) -> None:
        getattr(self, what.replace(" ", "_"))(*arguments)

    def loss(self, order: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.number + self.rank)
        parameter = self.gemini.chunks[0].dtype
        x = torch.randn(3, 4, generator=generator).to(parameter)
        count = len(self.model.parts)
        found: Tensor = self.model(x, tuple(i % count for i in order)).float().square().mean()
        return found

    def backward(self, order: tuple[int, ...], last: bool) -> None:
        self.gemini.begin(last=last)
        self.loss(order).backward()
        if not last:
            self.gemini.reduce_rest()
        self.watch.ended()

    def two_losses(self, order: tuple[int, ...], other: tuple[int, ...]) -> None:
        self.gemini.begin(last=True)
        (self.loss(order) + self.loss(other)).backward()
        self.watch.ended()

    def evaluate(self, order: tuple[int, ...]) -> None:
        with torch.no_grad():
            self.loss(order)
        for tracker in self.watch.trackers.values():
            assert tracker.all_in(State.HOLD)
        assert not self.gemini._runtime._held

    def raise_(self, order: tuple[int, ...], late: bool) -> None:
        def stop(*_: object) -> None:
            raise Stop

        parts = [self.model.parts[i % len(self.model.parts)] for i in order] or [self.model]
        handle = parts[-1].register_forward_pre_hook(stop)
        self.gemini.begin(last=True)
        try:
            with pytest.raises(Stop):
                self.loss(order)
        finally:
            handle.remove()
        self.gemini.abandon()
        self.watch.ended()

    def step(self) -> None:
        if any(gradient.shard is None for gradient in self.gemini._gradients.values()) and self.is_missing():
            return
        self.gemini.finish()
        assert self.gemini.clip(0.5).isfinite()
        self.gemini.step()

    def is_missing(self) -> bool:
        """There was no backward, and that is what is said; a reduction may be on its way still."""
        if any(gradient.is_pending for gradient in self.gemini._gradients.values()):
            self.gemini.finish()
            return False
        with pytest.raises(ChunkError, match="before any backward"):
            self.gemini.finish()
        return True

    def skip(self) -> None:
        self.gemini.forget()

    def move(self, placements: list[int]) -> None:
        before = [self.gemini.read(p).clone() for p in self.model.parameters()]
        self.gemini.move({c: PLACEMENTS[placements[i % len(placements)]] for i, c in enumerate(self.gemini.chunks)})
        after = [self.gemini.read(p) for p in self.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    def gather(self, which: int) -> None:
        chunk = self.gemini.chunks[which % len(self.gemini.chunks)]
        chunk.gather()
        chunk.wait()
        assert chunk.is_gathered

    def release(self, which: int) -> None:
        chunk = self.gemini.chunks[which % len(self.gemini.chunks)]
        chunk.release()
        assert chunk.resident or not chunk.is_gathered

    def read(self) -> None:
        for parameter in self.model.parameters():
            assert self.gemini.read(parameter).isfinite().all()

    def state(self) -> None:
        for name, entries in self.gemini.state_entries().items():
            for key, entry in entries.items():
                assert self.gemini.read_state(name, key, entry).isfinite().all()

    def reset(self) -> None:
        self.gemini.clear_state()
        assert self.gemini.state_entries() == {}

    def write(self, which: int) -> None:
        names = dict(self.model.named_parameters())
        name = [*names][which % len(names)]
        value = self.gemini.read(names[name]).clone() * 0.5
        self.gemini.write(names[name], value)
        self.gemini.publish()
        assert torch.equal(self.gemini.read(names[name]), value)


setattr(Doing, "raise", Doing.raise_)
plans = st.lists(operations, min_size=1, max_size=14)
first_placements = st.lists(st.sampled_from(range(len(PLACEMENTS))), min_size=1, max_size=4)
quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=20, suppress_health_check=quiet)
@given(shapes, first_placements, plans)
def test_invariants_hold_after_every_operation(
    shape: Shape, placements: list[int], plan: list[tuple[Any, ...]]
) -> None:
    assert carry_out(shape, placements, plan, 1) == [operation[0] for operation in plan]


CALLED_TWICE: list[tuple[Any, ...]] = [
    ("backward", (0, 2, 0), True),
    ("two losses", (0, 1, 0), (1, 0, 2)),
    ("step",),
    ("backward", (1, 2, 0, 2, 1), False),
    ("step",),
]


@pytest.mark.parametrize("recomputed", [frozenset[int](), frozenset({0}), frozenset({0, 1})])
def test_a_block_may_be_called_twice_with_others_between(recomputed: frozenset[int]) -> None:
    shape = Shape((1, 1, 1), frozenset(), False, recomputed, chunk_elems=128, stage=3, dtype="float32")
    carry_out(shape, [2], CALLED_TWICE * 2, 1)


@settings(max_examples=8, suppress_health_check=quiet)
@given(shapes, first_placements, plans)
def test_invariants_hold_on_every_rank(shape: Shape, placements: list[int], plan: list[tuple[Any, ...]]) -> None:
    run_on_ranks(2, carry_out, shape, placements, plan, 2)


@pytest.mark.slow
@settings(max_examples=6 * settings().max_examples, suppress_health_check=quiet)
@given(shapes, first_placements, st.lists(operations, min_size=5, max_size=40))
def test_invariants_hold_over_many_operations(shape: Shape, placements: list[int], plan: list[tuple[Any, ...]]) -> None:
    carry_out(shape, placements, plan, 1)
