"""Without clipping chunks are stepped in the backward: to the same bits, with less memory, and all or nothing."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini import ChunkError, Gemini, Memory, Shares
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.placement import EVERYTHING_ON_THE_DEVICE
from meshfold.zero_gemini.errors import DiskError
from meshfold.zero_gemini.optimizer import AdamStepper, DiskSettings
from meshfold.zero_gemini.optimizer import kernel_runs as runs_module

WORDS, WIDTH, ROWS, STEPS = 50, 24, 8, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """Tied table and head, a frozen block, a block that is called twice, and if wanted parts that some batches or none use."""

    def __init__(self, recompute: str, idle: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[1].requires_grad_(False)
        if idle:
            self.sometimes, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.recompute = recompute

    def forward(self, ids: Tensor, extra: bool) -> Tensor:
        x = self.embed(ids)
        order = [self.blocks[i] for i in (0, 2, 1, 3, 2)]  # the third also comes last
        if self.recompute in ("each", "reentrant"):
            for block in order:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        elif self.recompute == "pairs":  # a recomputation goes through several blocks
            for pair in (order[:2], order[2:]):
                x = checkpoint(partial(through, pair), x, use_reentrant=False)
        else:
            x = through(order, x)
        if extra and hasattr(self, "sometimes"):
            x = x + self.sometimes(x)
        y: Tensor = self.head(self.norm(x))
        return y


def through(blocks: list[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def batches(count: int = STEPS) -> list[tuple[Tensor, bool]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randint(WORDS, (ROWS, 6), generator=generator), step % 3 == 1) for step in range(count)]


def loss_of(model: nn.Module, ids: Tensor, extra: bool) -> Tensor:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mine = ids[rank * ROWS // world : (rank + 1) * ROWS // world]
    return F.cross_entropy(model(mine, extra)[:, :-1].flatten(0, 1).float(), mine[:, 1:].flatten()) / world


def in_chunks(
    recompute: str = "",
    dtype: torch.dtype = torch.bfloat16,
    *,
    regime: str = "A",
    stage: int = 3,
    placements: Any = EVERYTHING_ON_THE_DEVICE,
    disk: DiskSettings | None = None,
    chunk_elems: int = 1000,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    idle: bool = True,
) -> tuple[Model, Gemini]:
    torch.manual_seed(0)
    model, mesh = Model(recompute, idle), Mesh({"data": torch.distributed.get_world_size()})
    for p in model.parameters():
        place = Placement(shape=tuple(p.shape), axes=((),) * p.dim())
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=stage,
        memory=Memory(CPU),
        placements=placements,
        dtype=dtype,
        master_dtype=torch.float32,
        regime=regime,
        make_optimizer=partial(make, lr=1e-2, weight_decay=0.1),
        chunk_elems=chunk_elems,
        disk=disk,
    )
    return model, gemini


def train(model: Model, gemini: Gemini, kind: Any, accumulate: int = 1) -> list[Tensor]:
    """Losses, norms, and in the end all weights and moments."""
    seen: list[Tensor] = []
    for number, (ids, extra) in enumerate(batches(STEPS * accumulate)):
        last = number % accumulate == accumulate - 1
        gemini.begin(last=last)
        loss = loss_of(model, ids, extra)
        gemini.expect(kind if last else "more")
        loss.backward()
        seen.append(loss.detach())
        if last:
            gemini.finish()
            seen.append(gemini.norm())
            gemini.step()
        with torch.no_grad():
            if number == 1:
                seen.append(loss_of(model, ids, extra))
    for name, entries in gemini.state_entries().items():
        seen += [gemini.read_state(name, key, entry).clone() for key, entry in entries.items()]
    return seen + [gemini.read(p).clone() for p in model.parameters()]


PLACEMENTS = {
    "device": Shares(),
    "host": Shares(host_optimizer=1.0, host_parameters=1.0),
    "state": Shares(host_optimizer=1.0),
    "both": Shares(host_optimizer=0.6, host_parameters=0.3),
    "disk": Shares(host_optimizer=1.0, host_parameters=1.0, disk_optimizer=0.7),
}
# Recomputation, dtype, regime, stage, placement, micro-steps.
Case = tuple[str, torch.dtype, str, int, str, int]
CASES: list[Case] = [
    ("", torch.bfloat16, "A", 3, "host", 1),
    ("each", torch.bfloat16, "B", 3, "both", 1),
    ("pairs", torch.float32, "A", 3, "device", 1),
    ("pairs", torch.bfloat16, "C", 2, "state", 1),
    ("each", torch.float32, "A", 1, "both", 2),
    ("", torch.bfloat16, "A", 3, "disk", 1),
    ("each", torch.bfloat16, "A", 2, "disk", 2),
    ("reentrant", torch.bfloat16, "A", 3, "host", 1),
    ("reentrant", torch.float32, "A", 3, "device", 1),
]


def same_bits(cases: list[Case]) -> None:
    train(*in_chunks(), "last")  # torch's first sums of a process have other bits
    for recompute, dtype, regime, stage, placement, accumulate in cases:
        seen = []
        for kind in ("last", "final"):
            with tempfile.TemporaryDirectory() as folder:
                disk = DiskSettings(folder=folder, rank=torch.distributed.get_rank(), piece_bytes=8192)
                model, gemini = in_chunks(
                    recompute, dtype, regime=regime, stage=stage, placements=PLACEMENTS[placement], disk=disk
                )
                seen.append(train(model, gemini, kind, accumulate))
                assert gemini.holds_gradients == (kind == "last")
                gemini.close()
        for number, (held, early) in enumerate(zip(*seen, strict=True)):
            assert torch.equal(held, early), (recompute, dtype, regime, stage, placement, accumulate, number)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (1, CASES[:5]),
        (1, CASES[5:]),
        (
            2,
            [CASES[i] for i in (1, 2, 3, 4, 5, 7)],
        ),  # every recomputation, dtype, regime, stage and placement
        *(pytest.param(world, CASES, marks=pytest.mark.slow) for world in (2, 4)),
    ],
)
def test_steps_in_the_backward_have_the_bits_of_steps_after_it(world: int, cases: list[Case]) -> None:
    run_on_ranks(world, same_bits, cases)


def stepped_on_the_way(world: int) -> None:
    """Chunks are stepped when backward has left them for the last time, each once."""
    for recompute, placement in (("", "host"), ("each", "device"), ("pairs", "state")):
        model, gemini = in_chunks(recompute, placements=PLACEMENTS[placement], idle=False)
        stepper = gemini._stepper
        assert isinstance(stepper, AdamStepper)
        done: list[Chunk] = []
        original = stepper.step_one

        def step_one(chunk: Chunk, *args: Any, original: Any = original, done: Any = done, **more: Any) -> None:
            done.append(chunk)
            original(chunk, *args, **more)

        stepper.step_one = step_one  # type: ignore[method-assign]
        before: list[set[Chunk]] = []
        ids, _ = batches()[0]

        def note(done: Any = done, before: Any = before) -> Callable[[Tensor], None]:
            return lambda gradient: before.append({*done})

        for number in (3, 0):
            model.get_parameter(f"blocks.{number}.norm.weight").register_hook(note())
        for _ in range(2):
            done.clear()
            before.clear()
            gemini.begin(last=True)
            loss = loss_of(model, ids, True)
            gemini.expect("final")
            loss.backward()
            gemini.finish()
            assert len(done) == len(set(done)) and {*done} == {*gemini._gradients}
            gemini.step()
            chunks = [
                {gemini._chunk_of[name] for name in gemini._facts if name.startswith(f"blocks.{number}.")}
                for number in range(4)
            ]
            assert not before[0] & chunks[2]  # called last, and once before
            assert len(before[1] & (chunks[3] | chunks[2])) >= 3, (recompute, placement)
        gemini.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_chunks_are_stepped_on_the_way(world: int) -> None:
    run_on_ranks(world, stepped_on_the_way, world)


# -- what is still read ------------------------------------------------------------------------------------------------


class Straight(nn.Module):
    """Its gradient is there before backward comes to a use of its value that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 256))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate.detach() + self.gate


class Inner(nn.Module):
    """A backward inside of the backward brings a parameter's gradient in two parts, the second late."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 256))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: x * self.gate, x, use_reentrant=True) + self.gate
        return y


def chain(kind: type[nn.Module], data: int = 1) -> tuple[nn.Sequential, Gemini]:
    model, mesh = nn.Sequential(*(kind() for _ in range(4))), Mesh({"data": data})
    for p in model.parameters():
        place = Placement(shape=tuple(p.shape), axes=((),) * p.dim())
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model, mesh, stage=3, memory=Memory(CPU), make_optimizer=partial(torch.optim.AdamW, lr=0.1), chunk_elems=256
    )
    assert len(gemini.chunks) == 4 // data  # slots are aligned: two of them on two ranks
    return model, gemini


def one_step(model: nn.Module, gemini: Gemini, kind: Any) -> list[Tensor]:
    x = torch.linspace(-1, 1, 256).requires_grad_()
    gemini.begin(last=True)
    gemini.expect(kind)
    model(x).square().sum().backward()
    gemini.finish()
    gemini.step()
    assert x.grad is not None
    return [x.grad, *(gemini.read(p).clone() for p in model.parameters())]


def detached_uses() -> None:
    held, early = one_step(*chain(Straight), "last"), one_step(*chain(Straight), "final")
    assert all(torch.equal(a, b) for a, b in zip(held, early, strict=True))


def test_nothing_reads_a_value_that_is_too_new() -> None:
    run_on_ranks(1, detached_uses)


def late_parts() -> None:
    """Held: summed. In the backward: an error, and no step with half of a gradient that goes on as if it were one."""
    plain = nn.Sequential(*(Inner() for _ in range(4)))
    plain(torch.linspace(-1, 1, 256).requires_grad_()).square().sum().backward()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    held = one_step(*chain(Inner), "last")
    for mine, p in zip(held[1:], plain.parameters(), strict=True):
        torch.testing.assert_close(mine, p.detach())
    model, gemini = chain(Inner)
    with pytest.raises(ChunkError, match=r"'3.gate' got a second gradient.*use_reentrant=False"):
        one_step(model, gemini, "final")
    assert not gemini.is_half_stepped
    again = one_step(model, gemini, "last")
    assert all(torch.equal(a, b) for a, b in zip(held, again, strict=True))


def test_a_gradient_that_comes_late_is_no_half_step() -> None:
    run_on_ranks(1, late_parts)


class Shared(nn.Module):
    """One block that reentrant checkpointing calls three times: its gradient comes in three backwards inside of one."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(WIDTH, 2)
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            if self.inside == "block":
                x = checkpoint(self.blocks[0], x, use_reentrant=True)
            else:
                x = checkpoint(lambda x: self.blocks[0](self.blocks[0](x)), x, use_reentrant=True)
        y: Tensor = self.head(x)
        return y


def steps_as_one_process(stage: int, kind: Any, inside: str, chunk_elems: int) -> None:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    plain, model = Shared(inside), Shared(inside)
    plain(x).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    mesh = Mesh({"data": world})
    for p in model.parameters():
        place = Placement(shape=tuple(p.shape), axes=((),) * p.dim())
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=stage,
        memory=Memory(CPU),
        make_optimizer=partial(torch.optim.SGD, lr=0.1),
        chunk_elems=chunk_elems,
    )
    gemini.begin(last=True)
    gemini.expect(kind)
    mine = x.detach()[rank * 4 // world : (rank + 1) * 4 // world].requires_grad_()
    model(mine).square().sum().backward()
    gemini.finish()
    gemini.step()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(gemini.read(q), p.detach(), msg=lambda m, n=name: f"{n}: {m}")


def shared_parts() -> None:
    for stage in (1, 2, 3):
        for kind in ("last", "final"):
            for inside in ("block", "pair"):
                for chunk_elems in (24, 100_000):
                    steps_as_one_process(stage, kind, inside, chunk_elems)


@pytest.mark.few(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_of_several_reentrant_checkpoints_has_all_of_its_gradient(ranks: int) -> None:
    run_on_ranks(ranks, shared_parts)


def parts_after_the_sum() -> None:
    model, gemini = chain(Inner, data=2)
    with pytest.raises(
        ChunkError, match=r"'2.gate' got a second gradient.*sent to the other ranks.*use_reentrant=False"
    ):
        one_step(model, gemini, "last")


def test_a_gradient_that_comes_after_the_sum_over_ranks_is_refused() -> None:
    run_on_ranks(2, parts_after_the_sum)


def different_uses() -> None:
    """A part that only rank 1's batches use: all ranks step it, and none steps what no rank used."""
    seen = []
    kind: Any
    for kind in ("last", "final"):
        model, gemini = in_chunks(stage=2, placements=PLACEMENTS["device"], chunk_elems=300)
        rank = torch.distributed.get_rank()
        for number, (ids, _) in enumerate(batches()):
            gemini.begin(last=True)
            gemini.expect(kind)
            loss_of(model, ids, rank == 1 and number % 2 == 0).backward()
            gemini.finish()
            gemini.step()
        steps = {
            name: int(gemini.read_state(name, "step", entries["step"]))
            for name, entries in gemini.state_entries().items()
        }
        assert steps["sometimes.weight"] == 2 and steps["norm.weight"] == STEPS
        assert not any(name.startswith("never") for name in steps)
        seen.append([gemini.read(p).clone() for p in model.parameters()])
        gemini.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_ranks_agree_on_what_was_used() -> None:
    run_on_ranks(2, different_uses)


class InAnyOrder(nn.Module):
    """Parts in any order, as often as one likes, some recomputed, with one table behind all of them."""

    def __init__(self, recomputed: frozenset[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Block() for _ in range(3))
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.recomputed = recomputed

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        x = x @ self.table
        for place, index in enumerate(order):
            part = self.parts[index]
            x = checkpoint(part, x, use_reentrant=False) if place in self.recomputed else part(x)
        return x @ self.table.T


def any_order(
    orders: list[tuple[int, ...]], recomputed: frozenset[int], chunk_elems: int, placement: str, stage: int
) -> None:
    seen = []
    for kind in ("last", "final"):
        torch.manual_seed(0)
        model = InAnyOrder(recomputed)
        gemini = Gemini(
            model,
            Mesh({"data": 1}),
            stage=stage,
            memory=Memory(CPU),
            placements=PLACEMENTS[placement],
            dtype=torch.bfloat16,
            master_dtype=torch.float32,
            make_optimizer=partial(torch.optim.AdamW, lr=1e-2),
            chunk_elems=chunk_elems,
        )
        found = []
        for number, order in enumerate(orders):
            x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).bfloat16().requires_grad_(number % 2 == 0)
            gemini.begin(last=True)
            gemini.expect("last" if kind == "last" else "final")
            model(x, order).float().square().mean().backward()
            gemini.finish()
            found.append(gemini.norm())
            gemini.step()
        seen.append([*found, *(gemini.read(p).clone() for p in model.parameters())])
        gemini.close()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), min_size=2, max_size=4),
    st.frozensets(st.integers(0, 4)),
    st.sampled_from([300, 1000, 4000]),
    st.sampled_from(["device", "host", "both"]),
    st.sampled_from([1, 3]),
)
def test_any_order_of_operations(
    orders: list[tuple[int, ...]], recomputed: frozenset[int], chunk_elems: int, placement: str, stage: int
) -> None:
    run_on_ranks(1, any_order, orders, recomputed, chunk_elems, placement, stage)


# -- memory ------------------------------------------------------------------------------------------------------------


def host_bytes(kind: Any, accumulate: int = 1) -> tuple[Gemini, int]:
    model, gemini = in_chunks(dtype=torch.bfloat16, placements=PLACEMENTS["host"])
    before = gemini.memory.host_arena.used_bytes
    train(model, gemini, kind, accumulate)
    return gemini, gemini.memory.host_arena.used_bytes - before


def no_gradient_is_held(world: int) -> None:
    gemini, held = host_bytes("last")
    width = 4  # of float32, in which gradients are summed
    shards = [chunk.spec.shard_elems for chunk in gemini._gradients]
    assert held >= width * sum(shards)
    gemini.close()
    gemini, early = host_bytes("final")
    assert 2 * width * max(shards) <= early < 2 * width * max(shards) + 2 * 512
    assert 3 * early < held
    gemini.close()
    gemini, summed = host_bytes(
        "final", accumulate=2
    )  # sums over micro-steps wait off the device, and are stepped from there
    assert summed == held
    gemini.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [1, 2])
def test_no_gradient_is_held(world: int) -> None:
    run_on_ranks(world, no_gradient_is_held, world)


def slow_steps(seconds: float) -> None:
    """Backward waits for a buffer, and for nothing else; a buffer is filled again when its step is done."""
    import threading
    import time

    original, threads, running = runs_module.ChunkStep._do, set(), []

    def slowly(self: Any, kernel: Any) -> None:
        threads.add(threading.current_thread().name)
        gradient = self.gradient.clone()
        running.append(1)
        time.sleep(seconds)
        assert torch.equal(gradient, self.gradient)  # nobody writes into it meanwhile
        original(self, kernel)
        running.pop()

    model, gemini = in_chunks(placements=PLACEMENTS["host"])
    wanted = train(model, gemini, "final")
    gemini.close()
    runs_module.ChunkStep._do = slowly  # type: ignore[method-assign]
    try:
        model, gemini = in_chunks(placements=PLACEMENTS["host"])
        found = train(model, gemini, "final")
        gemini.close()
    finally:
        runs_module.ChunkStep._do = original  # type: ignore[method-assign]
    assert len(threads) == 1 and "meshfold-step" in threads.pop()
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def test_a_slow_host_is_waited_for() -> None:
    run_on_ranks(1, slow_steps, 0.003)


# -- all or nothing ----------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def broken_off(placement: str, late: bool) -> None:
    model, gemini = in_chunks(placements=PLACEMENTS[placement], idle=False)
    train(model, gemini, "final")
    ids, _ = batches()[0]

    def stop(gradient: Tensor) -> None:
        raise Stop

    gemini.begin(last=True)
    gemini.expect("final")
    loss = loss_of(model, ids, False)
    parameter = model.get_parameter("blocks.0.norm.weight" if late else "norm.weight")
    handle = parameter.register_hook(stop)
    with pytest.raises(Stop):
        loss.backward()
    handle.remove()
    assert gemini.is_half_stepped == late
    if not late:  # nothing has stepped: it is forgotten, and training goes on
        gemini.abandon()
        train(model, gemini, "final")
        gemini.close()
        return
    for attempt in (
        lambda: gemini.begin(last=True),
        lambda: gemini.abandon(),
        lambda: gemini.forget(),
        lambda: gemini.flush(),
        lambda: gemini.read(model.norm.weight),
        lambda: gemini.state_entries(),
        lambda: gemini.move({}),
        lambda: loss_of(model, ids, False),
    ):
        with pytest.raises(ChunkError, match=r"some chunks had made.*resume\s+from the last checkpoint"):
            attempt()
    gemini.close()


@pytest.mark.few(3)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_step_that_is_broken_off_is_the_end(placement: str, late: bool) -> None:
    run_on_ranks(1, broken_off, placement, late)


def disk_breaks(bad: int) -> None:
    """On one rank in the middle of a backward: all are told, at the latest when the next one is over."""
    for call in ("pwritev", "preadv"):
        with tempfile.TemporaryDirectory() as folder:
            disk = DiskSettings(folder=folder, rank=torch.distributed.get_rank(), piece_bytes=8192)
            model, gemini = in_chunks(placements=PLACEMENTS["disk"], disk=disk, idle=False)
            train(model, gemini, "final")
            real, left = getattr(os, call), [2 if torch.distributed.get_rank() == bad else 10**9]

            def failing(*arguments: Any, real: Any = real, left: list[int] = left) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.EIO, "the cable is out")
                return real(*arguments)

            with (
                mock.patch.object(os, call, failing),
                pytest.raises(DiskError, match=f"rank {bad}: .*the cable is out") as raised,
            ):
                train(model, gemini, "final")
            for again in (gemini.step, gemini.flush, gemini.norm, lambda: gemini.begin(last=True)):  # noqa: B023
                with pytest.raises(DiskError, match=f"rank {bad}: ") as other:
                    again()
                assert str(other.value) == str(raised.value)
            gemini.close()


def test_a_disk_that_breaks_on_one_rank_is_told_to_all() -> None:
    run_on_ranks(2, disk_breaks, 1)


def refusals() -> None:
    """What looks at gradients cannot be asked of those that are gone."""
    for ask, words in (
        (lambda g: (g.finish(), g.clip(1.0)), "to be clipped"),
        (lambda g: (g.finish(), g.clip_value(1.0)), "to be clipped"),
        (lambda g: g.finish(0.5), "0.5 times"),
        (lambda g: (g.finish(), g.norm(1.0)), "1-norm"),
    ):
        model, gemini = in_chunks()
        ids, _ = batches()[0]
        gemini.begin(last=True)
        gemini.expect("final")
        loss_of(model, ids, False).backward()
        with pytest.raises(ChunkError, match=words):
            ask(gemini)
        gemini.close()


def test_what_looks_at_all_gradients_is_refused() -> None:
    run_on_ranks(1, refusals)


def others_hold() -> None:
    for make in (partial(torch.optim.SGD, momentum=0.9), torch.optim.Adafactor):
        seen = []
        for kind in ("last", "final"):
            model, gemini = in_chunks(make=make)
            seen.append(train(model, gemini, kind))
            assert gemini.holds_gradients
            gemini.close()
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_other_optimizers_hold_gradients() -> None:
    run_on_ranks(1, others_hold)


def trained_beside_copies(placement: str, kind: Any, regime: str) -> list[Tensor]:
    """Losses, norms and weights of a model whose gradients take longer to copy than their kernels to be queued."""
    torch.manual_seed(0)
    device, wide = torch.device("cuda"), 4096
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(wide), nn.Linear(wide, wide), nn.GELU()) for _ in range(8)))
    mesh = Mesh({"data": 1})
    for p in model.parameters():
        place = Placement(shape=tuple(p.shape), axes=((),) * p.dim())
        annotate(p, ParameterMeta(mesh=mesh, placement=place, sum_axes=("data",)))
    gemini = Gemini(
        model,
        mesh,
        stage=3,
        memory=Memory(device),
        placements=PLACEMENTS[placement],
        dtype=torch.bfloat16,
        regime=regime,
        master_dtype=torch.float32,
        make_optimizer=partial(torch.optim.AdamW, lr=1e-4),
        chunk_elems=wide * wide,
    )
    x = torch.randn(64, wide, device=device).bfloat16()
    seen = []
    for _ in range(12):
        gemini.begin(last=True)
        y = x
        for block in model:
            y = y + checkpoint(block, y, use_reentrant=False)
        loss = y.float().square().mean()
        gemini.expect(kind)
        loss.backward()
        gemini.finish()
        seen += [loss.detach(), gemini.norm()]
        gemini.step()
    seen += [gemini.read(p).clone() for p in model.parameters()]
    gemini.close()
    return seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the computation: needs a GPU")
@pytest.mark.parametrize("regime", ["A", "B"])
@pytest.mark.parametrize("placement", ["device", "host", "state", "both"])
def test_a_gpu_steps_to_the_same_bits(placement: str, regime: str) -> None:
    held, early = (trained_beside_copies(placement, kind, regime) for kind in ("last", "final"))
    assert all(map(torch.equal, held, early))
