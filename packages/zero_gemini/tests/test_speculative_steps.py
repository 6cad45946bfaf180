"""Speculative steps: into a shadow copy while backward goes on, kept if gradients count as expected, and else as if never made."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank

from stepping_cases import KINDS
from training_cases import CPU, Model, batches, in_chunks, loss_of, make_model

from meshfold.mesh.testing import run_on_ranks
from meshfold.zero_gemini import ChunkPlacement, Gemini, Memory
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.states import BackwardRole
from meshfold.zero_gemini.memory.copies import Arrival
from meshfold.zero_gemini.optimizer.cpu_executor import Halves, Worker
from meshfold.zero_gemini.optimizer.speculative_updates import SpeculativeUpdates

PLACEMENTS = {
    "streamed": [ChunkPlacement(parameters="host", state="host")],
    "resident": [ChunkPlacement(state="host")],
    "mixed": [
        ChunkPlacement(),
        ChunkPlacement(parameters="host", state="host"),
        ChunkPlacement(state="host"),
    ],
}
STEPS = 9
CLIPPED = 4
"""The step in which the norm is over its bound."""


def in_turn(ready: dict[str, bool], *, device: bool = False) -> list[str]:
    """In which order steps are done that were accepted as a, b, c while the thread that does them was busy."""
    worker, go, log = Worker(), threading.Event(), list[str]()

    def on_device(name: str) -> Arrival:
        go.wait()
        log.append(name)
        return Arrival()

    def work(name: str) -> None:
        log.append(name)

    def waits() -> None:
        go.wait()

    chunks = {name: cast(Chunk, object()) for name in ready}
    busy = cast(Chunk, object())
    worker.submit({busy: Halves(waits)}, [])
    for name, there in ready.items():
        through = partial(on_device, name) if device else None
        worker.submit_first(chunks[name], Halves(partial(work, name), on_device=through, is_ready=partial(bool, there)))
    go.set()
    for chunk in (busy, *chunks.values()):
        worker.wait_parameters(chunk)
    worker.close()
    return log


def test_the_step_of_the_last_gradient_goes_first() -> None:
    """Forward needs its parameters first; in the order of gradients it would wait for all others."""
    assert in_turn(dict(a=True, b=True, c=True)) == ["c", "b", "a"]
    assert in_turn(dict(a=True, b=True, c=False)) == ["b", "a", "c"]
    assert in_turn(dict(a=False, b=False)) == ["a", "b"]
    assert sorted(in_turn(dict(a=True, b=True, c=True), device=True)) == ["a", "b", "c"]  # once each


def test_a_gradient_that_cannot_come_is_reported_by_its_own_step() -> None:
    def fails() -> Any:
        raise RuntimeError("of the device")

    worker, chunk = Worker(), cast(Chunk, object())
    worker.submit_first(chunk, Halves(fails, is_ready=fails))
    with pytest.raises(RuntimeError, match="of the device"):
        worker.wait_parameters(chunk)
    worker.close()


def placements_of(kind: str) -> Callable[[Any], list[ChunkPlacement]]:
    return lambda sizes: [PLACEMENTS[kind][i % len(PLACEMENTS[kind])] for i in range(len(sizes))]


class Seen:
    """Speculative steps, step by step: how many chunks' steps were made so, and how many were begun."""

    def __init__(self) -> None:
        self.begun, self.kept = 0, 0
        self.steps: list[tuple[int, int]] = []

    def __enter__(self) -> Seen:
        begin, keep, seen = SpeculativeUpdates.begin, SpeculativeUpdates.keep, self

        def count_begun(self: SpeculativeUpdates, *arguments: Any) -> None:
            seen.begun += 1
            begin(self, *arguments)

        def count_kept(self: SpeculativeUpdates, steps: Any) -> set[Chunk]:
            kept = keep(self, steps)
            seen.steps.append((seen.begun, len(kept)))
            seen.begun = 0
            return kept

        self._patches = [
            mock.patch.object(SpeculativeUpdates, "begin", count_begun),
            mock.patch.object(SpeculativeUpdates, "keep", count_kept),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


def everything(gemini: Gemini) -> list[Tensor]:
    """All weights and moments, to the bit."""
    entries = gemini.state_entries()
    found = [gemini.read(parameter).clone() for parameter in gemini._names]
    for name, keys in entries.items():
        found += [gemini.read_state(name, key, entry).clone() for key, entry in keys.items()]
    return found


def a_step(
    model: Model,
    gemini: Gemini,
    number: int,
    *,
    bound: float = 1e3,
    between: Callable[[], None] | None = None,
    accumulate: int = 1,
    factor: float = 1.0,
) -> list[Tensor]:
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    losses = []
    for micro in range(accumulate):
        ids, extra = batches(STEPS * accumulate)[number * accumulate + micro]
        gemini.begin(last=micro == accumulate - 1)
        loss = loss_of(model, ids, extra, rank=rank, world=world)
        loss.backward()
        losses.append(loss.detach())
    if between is not None:
        between()
    gemini.finish(factor)
    norm = gemini.clip(bound)
    gemini.step()
    return [*losses, norm]


def trained(
    speculative: bool, placements: str, dtype: torch.dtype, regime: str, stage: int, passes: bool
) -> list[Tensor]:
    model = make_model()
    gemini = in_chunks(
        model,
        dtype,
        placements_of(placements),
        stage=stage,
        regime=regime,
        world=torch.distributed.get_world_size(),
    )
    if passes:
        gemini.stream_on_gpu(True)
    found = []
    with Seen() as seen:
        assert gemini.step_speculatively(speculative) == speculative
        for number in range(STEPS):
            found += a_step(model, gemini, number, bound=1e-3 if number == CLIPPED else 1e3)
    begun = [step for step, (count, _) in enumerate(seen.steps) if count]
    kept = [step for step, (_, count) in enumerate(seen.steps) if count]
    # two steps that count alike come first; the one after the clipped one is as good as the first
    assert begun == ([2, 3, 4, 7, 8] if speculative else []) and kept == ([2, 3, 7, 8] if speculative else [])
    found += everything(gemini)
    gemini.close()
    return found


def compare(*case: Any) -> None:
    expected, found = trained(False, *case), trained(True, *case)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


def by_turns() -> list[Any]:
    """Split masters in bfloat16 with one of the placements, by turns, without and with small moments; the slow tests have
    the rest, such as moments of 8 bits, for which Numba would compile one more step."""
    found = []
    for number, (dtype, regime) in enumerate(KINDS):
        for place, placements in enumerate(PLACEMENTS):
            quick = dtype is torch.bfloat16 and regime in "AB" and place == number % len(PLACEMENTS)
            name = f"{placements}-{str(dtype).removeprefix('torch.')}-{regime}"
            marks = () if quick else pytest.mark.slow
            found.append(pytest.param(placements, dtype, regime, id=name, marks=marks))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("placements", "dtype", "regime"), by_turns())
def test_training_is_the_same_to_the_bit(placements: str, dtype: torch.dtype, regime: str) -> None:
    run_on_ranks(1, compare, placements, dtype, regime, 3, False)


@pytest.mark.few(2)
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_also_where_the_device_steps_some(placements: str) -> None:
    run_on_ranks(1, compare, placements, torch.bfloat16, "A", 3, True)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_also_on_several_ranks(stage: int) -> None:
    run_on_ranks(2, compare, "mixed", torch.bfloat16, "A", stage, False)


# -- what happens between the backward and the step -----------------------------------------------------------------


def lower(gemini: Gemini) -> None:
    assert gemini.optimizer is not None
    for group in gemini.optimizer.param_groups:
        group["lr"] *= 0.5


def load(gemini: Gemini) -> None:
    name = next(iter(gemini.state_entries()))
    entries = gemini.state_entries()[name]
    value = gemini.read_state(name, "exp_avg", entries["exp_avg"])
    gemini.write_state(name, "exp_avg", torch.ones_like(value))


def look(gemini: Gemini) -> None:
    everything(gemini)


def move(gemini: Gemini) -> None:
    chunk = gemini.chunks[0]
    placement = gemini.placements[chunk]
    gemini.flush()
    gemini._stepper.move(chunk, placement)  # type: ignore[union-attr]


MEANWHILE = {
    "another lr": (lower, False),
    "loaded": (load, False),
    "looked at": (look, True),
    "moved": (move, False),
}


def interrupted(speculative: bool, what: str) -> list[Tensor]:
    do, stays = MEANWHILE[what]
    model = make_model()
    gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"))
    found = []
    with Seen() as seen:
        gemini.step_speculatively(speculative)
        for number in range(6):
            between = partial(do, gemini) if number == 3 else None
            found += a_step(model, gemini, number, between=between)
    if speculative:
        begun, kept = seen.steps[3]
        assert begun > 1 and (kept == begun) == stays
        assert seen.steps[4][1] == seen.steps[4][0] > 0  # and the next step is speculative again
    found += everything(gemini)
    gemini.close()
    return found


def compare_interrupted(what: str) -> None:
    for a, b in zip(interrupted(False, what), interrupted(True, what), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("what", MEANWHILE)
def test_what_happens_before_the_step_counts(what: str) -> None:
    run_on_ranks(1, compare_interrupted, what)


def compare_dropped() -> None:
    """A step that is not made leaves all as it was, and so does a backward that was broken off."""
    results = []
    for speculative in (False, True):
        model = make_model()
        gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"))
        gemini.step_speculatively(speculative)
        for number in range(3):
            a_step(model, gemini, number)
        before = everything(gemini)
        ids, extra = batches(STEPS)[3]
        gemini.begin(last=True)
        loss_of(model, ids, extra).backward()
        gemini.forget()
        for a, b in zip(before, everything(gemini), strict=True):
            assert torch.equal(a, b)
        gemini.begin(last=True)
        loss = loss_of(model, ids, extra)
        broken = model.embed.weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        broken.remove()
        gemini.abandon()
        for a, b in zip(before, everything(gemini), strict=True):
            assert torch.equal(a, b)
        for number in range(4, 8):
            a_step(model, gemini, number)
        results.append(everything(gemini))
        gemini.close()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_step_that_is_not_made_never_was() -> None:
    run_on_ranks(1, compare_dropped)


def accumulated(speculative: bool) -> list[Tensor]:
    model = make_model()
    gemini = in_chunks(model, torch.bfloat16, placements_of("mixed"))
    found = []
    with Seen() as seen:
        gemini.step_speculatively(speculative)
        for number in range(4):
            found += a_step(model, gemini, number, accumulate=2, factor=0.5)
    if speculative:
        assert [kept > 0 for _, kept in seen.steps] == [False, False, True, True]
    found += everything(gemini)
    gemini.close()
    return found


def several(speculative: bool, kinds: tuple[BackwardRole, ...] = ()) -> list[Tensor]:
    """There are more backwards after one that could be a step's last: then nothing is tried any more."""
    model = make_model()
    gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"))
    with Seen() as seen:
        gemini.step_speculatively(speculative)
        for number in range(6):
            gemini.begin(last=True)
            for place, (ids, extra) in enumerate(batches(12)[2 * number : 2 * number + 2]):
                if kinds:
                    gemini.expect(kinds[place])
                loss_of(model, ids, extra).backward()
            gemini.finish()
            gemini.clip(1e3)
            gemini.step()
    assert not any(kept for _, kept in seen.steps)
    assert [begun > 0 for begun, _ in seen.steps] == [speculative and step == 2 for step in range(6)]
    found = everything(gemini)
    gemini.close()
    return found


def clipped_by_value(speculative: bool) -> list[Tensor]:
    """The elements of gradients change after they were stepped with: then nothing is tried any more."""
    model = make_model()
    gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"))
    with Seen() as seen:
        gemini.step_speculatively(speculative)
        for number in range(6):
            ids, extra = batches(STEPS)[number]
            gemini.begin(last=True)
            loss_of(model, ids, extra).backward()
            gemini.finish()
            if number > 2:
                gemini.clip_value(1e-3)
            gemini.step()
    assert [(begun > 0, kept > 0) for begun, kept in seen.steps] == [
        (speculative and step in (2, 3), speculative and step == 2) for step in range(6)
    ]
    assert not gemini.steps_alike
    found = everything(gemini)
    gemini.close()
    return found


def compare_gradients() -> None:
    told, more = (partial(several, kinds=kinds) for kinds in (("last", "last"), ("last", "more")))
    for made in (accumulated, several, told, more, clipped_by_value):
        for a, b in zip(made(False), made(True), strict=True):
            assert torch.equal(a, b)


def test_gradients_of_several_backwards_or_changed_after_one() -> None:
    run_on_ranks(1, compare_gradients)


def compare_some(passes: bool, accumulate: int) -> None:
    """Copies of the first and third chunk that are trained."""
    found = []
    for some in (False, True):
        model = make_model()
        world = torch.distributed.get_world_size()
        gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"), world=world)
        if passes:
            gemini.stream_on_gpu(True, halves=True)
        stepped = [chunk for chunk in gemini.chunks if chunk in gemini._gradients]
        chosen = [stepped[place] for place in (0, 2)]
        before, values = gemini.memory.host_arena.used_bytes, []
        with Seen() as seen:
            if some:
                assert gemini.step_speculatively(True, chunks=chosen)
                copies = 12 * sum(chunk.shard.numel() for chunk in chosen)
                assert gemini.memory.host_arena.used_bytes - before == copies
            for number in range(STEPS):
                bound = 1e-3 if number == CLIPPED else 1e3
                values += a_step(model, gemini, number, bound=bound, accumulate=accumulate)
        kept = [2, 2, 0, 0, 0, 2, 2] if some else [0] * 7
        assert len(stepped) > 3 and [made for _, made in seen.steps[2:]] == kept
        found.append([*values, *everything(gemini)])
        gemini.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("ranks", "passes", "accumulate"), [(1, False, 1), (1, True, 1), (2, False, 2)])
def test_some_chunks_step_speculatively_and_the_others_once_the_norm_is_known(
    ranks: int, passes: bool, accumulate: int
) -> None:
    run_on_ranks(ranks, compare_some, passes, accumulate)


def bytes_of_copies() -> None:
    model = make_model()
    memory = Memory(CPU)
    gemini = in_chunks(model, torch.bfloat16, placements_of("streamed"), memory=memory)
    before = memory.host_arena.used_bytes
    assert gemini.step_speculatively(True)
    mine = 12 * sum(chunk.shard.numel() for chunk in gemini.chunks if chunk in gemini._gradients)
    assert memory.host_arena.used_bytes - before == mine
    for number in range(4):
        a_step(model, gemini, number)
    assert not gemini.step_speculatively(False)
    held = 4 * sum(chunk.shard.numel() for chunk in gemini.chunks if chunk in gemini._gradients)  # float32 gradients
    assert memory.host_arena.used_bytes == before + held
    memory.host_arena.budget_bytes = before + held + mine - 1
    assert not gemini.step_speculatively(True)  # one byte too few: none of it stays taken
    assert memory.host_arena.used_bytes == before + held
    for number in range(4, 8):
        a_step(model, gemini, number)
    gemini.close()
    assert memory.host_arena.used_bytes == sum(chunk.shard.nbytes for chunk in gemini.chunks)


def test_copies_are_accounted_and_go_back() -> None:
    run_on_ranks(1, bytes_of_copies)
