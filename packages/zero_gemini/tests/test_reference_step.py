"""Every stage and placement, on every number of ranks, is one flat buffer's step, to the bit, and torch's AdamW within 1e-6."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from training_cases import ADAMW, CHUNK_ELEMS, Model, batches, in_chunks, loss_of, make_model

from meshfold.kernels import AdamSettings, SplitState, WholeState, adam_step, use
from meshfold.mesh import Group, Mesh, all_gather, all_reduce, reduce_scatter
from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini import ChunkPlacement, Shares
from meshfold.zero_gemini.chunks.layout import Item, ShardSlice, lay_out
from meshfold.zero_gemini.norm import power_sum
from meshfold.zero_gemini.optimizer import DiskSettings

STEPS, ACCUMULATION, CLIP, OVERFLOWS = 20, 2, 0.4, 3
FEW_STEPS = 8
"""Cases of `make test`: three that overflow in fp16, and a move to each place in `MOVES`."""
SETTINGS = AdamSettings(beta1=0.9, beta2=0.999, adamw_mode=True, **ADAMW)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Seen:
    """Record of a training: losses of micro-steps, norms of steps, which steps were left out, and master weights at the end."""

    losses: list[Tensor]
    norms: list[Tensor]
    skipped: list[int]
    weights: dict[str, Tensor]


def scale_of(step: int, precision: str) -> float:
    """Loss scales that overflow at first, as a dynamic one begins."""
    if precision != "fp16":
        return 1.0
    return 2.0**40 if step < OVERFLOWS else 2.0**7


class Reference:
    """All trained parameters in one flat buffer on each rank, its gradient in another; each rank steps its share of both.

    The sum of four numbers depends on their order, and in which order collectives add up ranks depends on who gets the sum.
    So a rank's share is of the elements that are its own in chunks.
    """

    def __init__(self, model: Model, dtype: torch.dtype, group: Group, *, sum_every_time: bool) -> None:
        self.group, self.sum_every_time = group, sum_every_time
        masters = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.to(dtype)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        shares = shares_of(self.trained, group.size)
        self.length = max(sum(part.length for part in share) for share in shares)
        self.places: dict[str, list[tuple[slice, slice]]] = {name: [] for name in self.trained}
        for rank, share in enumerate(shares):
            start = rank * self.length
            for part in share:
                there = slice(part.parameter_start, part.parameter_start + part.length)
                self.places[part.name].append((slice(start, start + part.length), there))
                start += part.length
        self.sum, self.kept = torch.zeros(self.length * group.size), torch.zeros(self.length)
        flat = torch.zeros(self.length * group.size)
        for name in self.trained:
            for here, there in self.places[name]:
                flat[here] = masters[name].reshape(-1)[there]
        mine = flat[group.index * self.length : (group.index + 1) * self.length]
        self.state = SplitState.of(mine) if dtype == torch.bfloat16 else WholeState.of(mine)
        self.counts, self.used = dict.fromkeys(self.trained, 0), dict.fromkeys(self.trained, 0.0)

    def micro_step(self, loss: Tensor) -> None:
        loss.backward()
        for name, p in self.trained.items():
            if p.grad is not None:
                for here, there in self.places[name]:
                    self.sum[here] += p.grad.reshape(-1)[there].float()
                self.used[name], p.grad = 1.0, None
        if self.sum_every_time:
            self.reduce()

    def reduce(self) -> None:
        self.kept = reduce_scatter(self.sum.clone(), self.group, 0) + self.kept
        self.sum.zero_()

    def step(self, scale: float) -> tuple[Tensor, bool]:
        if not self.sum_every_time:
            self.reduce()
        norm = all_reduce(power_sum(self.kept, 1, 2.0), self.group).sqrt() / scale
        if stepped := bool(norm.isfinite()):
            factor = (torch.clamp(CLIP / (norm + 1e-6), max=1.0) / scale).float()
            flags = all_reduce(torch.tensor(list(self.used.values())), self.group, "max").tolist()
            for name, used in zip(self.trained, flags, strict=True):
                if used:
                    self.counts[name] += 1
                    self.step_parameter(name, factor)
            self.show()
        self.kept = torch.zeros(self.length)
        self.used = dict.fromkeys(self.trained, 0.0)
        return norm, stepped

    def step_parameter(self, name: str, factor: Tensor) -> None:
        first = self.group.index * self.length
        for here, _ in self.places[name]:
            mine = slice(here.start - first, here.stop - first)
            if 0 <= mine.start < self.length:
                planes = {key: plane[mine] for key, plane in vars(self.state).items() if plane is not None}
                with use("reference"):  # plain torch, neither our numba nor our Triton
                    adam_step(
                        type(self.state)(**planes), self.kept[mine], SETTINGS, step=self.counts[name], grad_scale=factor
                    )

    def show(self) -> None:
        for name, value in self.weights(self.state.weights).items():
            self.trained[name].data.copy_(value)

    def weights(self, plane: Tensor) -> dict[str, Tensor]:
        """A plane of all ranks, by parameter."""
        flat, found = all_gather(plane, self.group, 0), {}
        for name, p in self.trained.items():
            whole = torch.empty(p.numel(), dtype=plane.dtype)
            for here, there in self.places[name]:
                whole[there] = flat[here]
            found[name] = whole.view_as(p)
        return found


def shares_of(parameters: dict[str, nn.Parameter], world: int) -> list[list[ShardSlice]]:
    """Slices of parameters that each rank has."""
    items = [Item(name, p.numel(), 0) for name, p in parameters.items()]
    layout = lay_out(items, CHUNK_ELEMS, world, slot_align_elems=64)
    return [[part for chunk in layout.chunks for part in layout.shard_slices(chunk, rank)] for rank in range(world)]


def train_reference(precision: str, world: int, steps: int, *, sum_every_time: bool) -> Seen:
    model, group = make_model(), Mesh({"data": world}).group("data")
    reference = Reference(model, DTYPES[precision], group, sum_every_time=sum_every_time)
    reference.show()
    seen = Seen([], [], [], {})
    for number, (ids, extra) in enumerate(batches(steps * ACCUMULATION)):
        step, scale = number // ACCUMULATION, scale_of(number // ACCUMULATION, precision)
        loss = loss_of(model, ids, extra, rank=group.index, world=world) / ACCUMULATION
        seen.losses.append(loss.detach())
        reference.micro_step(loss * scale)
        if number % ACCUMULATION == ACCUMULATION - 1:
            norm, stepped = reference.step(scale)
            seen.norms.append(norm)
            seen.skipped += [] if stepped else [step]
    seen.weights = reference.weights(reference.state.master())
    return seen


def train_chunks(
    precision: str,
    world: int,
    steps: int,
    stage: int,
    placements: Callable[[Sequence[int]], Sequence[ChunkPlacement]],
    *,
    moving: bool = False,
    regime: str = "A",
) -> Seen:
    model, seen = make_model(), Seen([], [], [], {})
    rank = Mesh({"data": world}).index("data")
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskSettings(folder=folder, rank=rank, piece_bytes=8192)
        gemini = in_chunks(model, DTYPES[precision], placements, stage=stage, world=world, regime=regime, disk=disk)
        for number, (ids, extra) in enumerate(batches(steps * ACCUMULATION)):
            step, scale = number // ACCUMULATION, scale_of(number // ACCUMULATION, precision)
            last = number % ACCUMULATION == ACCUMULATION - 1
            gemini.begin(last=last)
            loss = loss_of(model, ids, extra, rank=rank, world=world) / ACCUMULATION
            seen.losses.append(loss.detach())
            (loss * scale).backward()
            if not last:
                continue
            gemini.finish(1.0 / scale)
            norm = gemini.clip(CLIP)
            seen.norms.append(norm)
            if norm.isfinite():
                gemini.step()
            else:
                gemini.forget()
                seen.skipped.append(step)
            if moving:
                gemini.move({c: MOVES[(i + step) % len(MOVES)] for i, c in enumerate(gemini.chunks)})
        seen.weights = {name: gemini.read(p).clone() for name, p in model.named_parameters() if p.requires_grad}
        gemini.close()
    return seen


MOVES = [
    ChunkPlacement(),
    ChunkPlacement(parameters="host", state="disk"),
    ChunkPlacement(state="host"),
    ChunkPlacement(parameters="host", state="host"),
    ChunkPlacement(state="disk"),
]
PLACES: dict[str, Any] = {
    "cuda": Shares(),
    "state on host": Shares(host_optimizer=1.0),
    "cpu": Shares(host_optimizer=1.0, host_parameters=1.0),
    "static": Shares(host_optimizer=0.7, host_parameters=0.3),
    "disk": Shares(host_optimizer=1.0, host_parameters=1.0, disk_optimizer=1.0),
    "some of all": Shares(host_optimizer=0.8, host_parameters=0.5, disk_optimizer=0.4),
}
# Stage, placement, and whether all chunks move after each step.
ALL: list[tuple[int, str, bool]] = [
    *((stage, place, False) for stage in (1, 2, 3) for place in PLACES),
    *((stage, "cuda", True) for stage in (1, 2, 3)),
]


def same(found: Seen, wanted: Seen, case: object) -> None:
    assert found.skipped == wanted.skipped, case
    for step, (a, b) in enumerate(zip(found.norms, wanted.norms, strict=True)):
        if step in wanted.skipped:
            assert not a.isfinite() and not b.isfinite(), case
        else:  # float64, added up in another order
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0.0, msg=f"{case}: norm of step {step}")
    for number, (a, b) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert torch.equal(a, b), (case, "loss of micro-step", number)
    assert found.weights.keys() == wanted.weights.keys()
    for name, value in wanted.weights.items():
        assert torch.equal(found.weights[name], value), (case, name)


def against_reference(precision: str, world: int, steps: int, cases: list[tuple[int, str, bool]]) -> None:
    """Stage 1 adds up micro-steps before it adds up ranks, stages 2 and 3 the other way round: two references."""
    needed = {True, *(stage > 1 for stage, _, _ in cases)}
    wanted = {each: train_reference(precision, world, steps, sum_every_time=each) for each in needed}
    reference = wanted[True]
    assert reference.skipped == ([*range(OVERFLOWS)] if precision == "fp16" else [])
    clipped = [bool(norm > CLIP) for norm in reference.norms if norm.isfinite()]
    assert sum(clipped) > len(clipped) / 2, "clipping has to be at work"
    for stage, place, moving in cases:
        found = train_chunks(precision, world, steps, stage, PLACES[place], moving=moving)
        same(found, wanted[stage > 1], (stage, place, moving))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "world", "cases"),
    [
        ("bf16", 1, [(3, "cuda", False), (3, "cpu", False), (2, "disk", False), (3, "some of all", True)]),
        ("fp16", 2, [(1, "state on host", False), (3, "static", False), (2, "cuda", True)]),
        ("fp32", 4, [(3, "some of all", False), (1, "cuda", False)]),
        ("bf16", 4, [(3, "cpu", False), (2, "static", True)]),
    ],
)
def test_training_is_the_reference_step(precision: str, world: int, cases: list[tuple[int, str, bool]]) -> None:
    run_on_ranks(world, against_reference, precision, world, FEW_STEPS, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", DTYPES)
def test_training_is_the_reference_step_in_every_case(precision: str, world: int) -> None:
    run_on_ranks(world, against_reference, precision, world, STEPS, ALL, timeout_s=280.0)


def regimes(world: int, steps: int, cases: list[tuple[int, str, bool]]) -> None:
    for regime in ("B", "C"):
        wanted = train_chunks("bf16", world, steps, 3, PLACES["cuda"], regime=regime)
        for stage, place, moving in cases:
            found = train_chunks("bf16", world, steps, stage, PLACES[place], moving=moving, regime=regime)
            same(found, wanted, (regime, stage, place, moving))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "steps", "cases"),
    [
        (1, FEW_STEPS, [(3, "disk", False), (1, "static", True)]),
        (2, FEW_STEPS, [(3, "some of all", True)]),
        pytest.param(2, STEPS, [case for case in ALL if case[0] > 1], marks=pytest.mark.slow),
    ],
)
def test_small_moments_have_the_same_bits_wherever_they_are(
    world: int, steps: int, cases: list[tuple[int, str, bool]]
) -> None:
    run_on_ranks(world, regimes, world, steps, cases)


def near_torch(world: int, steps: int) -> None:
    serial = make_model()
    optimizer = torch.optim.AdamW([p for p in serial.parameters() if p.requires_grad], **ADAMW)
    losses = []
    for number, (ids, extra) in enumerate(batches(steps * ACCUMULATION)):
        loss = loss_of(serial, ids, extra) / ACCUMULATION
        losses.append(float(loss))
        loss.backward()
        if number % ACCUMULATION == ACCUMULATION - 1:
            nn.utils.clip_grad_norm_([p for p in serial.parameters() if p.grad is not None], CLIP)
            optimizer.step()
            optimizer.zero_grad()
    for found in (
        train_reference("fp32", world, steps, sum_every_time=True),
        train_chunks("fp32", world, steps, 3, PLACES["static"]),
    ):
        group = Mesh({"data": world}).group("data")
        total = all_reduce(torch.stack(found.losses).double(), group)
        torch.testing.assert_close(total, torch.tensor(losses).double(), rtol=1e-6, atol=1e-6)
        for name, value in found.weights.items():
            wanted = serial.get_parameter(name).detach()
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6, msg=partial("{}: {}".format, name))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "steps"),
    [
        (1, STEPS),
        (2, FEW_STEPS),
        (4, FEW_STEPS),
        *(pytest.param(n, STEPS, marks=pytest.mark.slow) for n in (2, 4)),
    ],
)
def test_training_is_torchs_adamw(world: int, steps: int) -> None:
    run_on_ranks(world, near_torch, world, steps)


def test_chunks_are_as_the_reference_has_them() -> None:
    model = make_model()
    gemini = in_chunks(model, torch.bfloat16, PLACES["static"])
    placements = {(placement.parameters, placement.state) for placement in gemini.placements.values()}
    assert placements == {("device", "device"), ("device", "host"), ("host", "host")}
    trained = {name: p for name, p in make_model().named_parameters() if p.requires_grad}
    wanted = {(one.name, one.parameter_start, one.length) for one in shares_of(trained, 1)[0]}
    found = {
        (one.name, one.parameter_start, one.length)
        for chunk in gemini.chunks
        for one in chunk.slices
        if one.name in trained
    }
    assert found == wanted
    gemini.close()
