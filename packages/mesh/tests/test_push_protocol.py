"""The protocol of pushes at any speed of the ranks: nothing is read early or overwritten while it is read, nobody is stuck."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from push_simulation import SimulatedRank, Simulation

from meshfold.mesh.collectives.push import Exchange, epochs

ROW = 4  # bytes


def value(rank: int, number: int) -> int:
    """The bytes that a rank pushes in a call."""
    return (number * 8 + rank) % 251 + 1


RECEIVE, COMPUTE, APART = "receive", "compute", "apart"
"""Where a call reads and releases: on one of the streams; or it reads on the first, and releases on the second later."""


def program(world: Simulation, calls: list[str]) -> None:
    """Queue calls on every rank. Slots are released in the order of the calls, so calls of the first kind are not mixed."""
    for rank in world.ranks:
        unreleased: list[tuple[Exchange, Any]] = []

        def release(rank: SimulatedRank = rank, unreleased: list[tuple[Exchange, Any]] = unreleased) -> None:
            for exchange, point in unreleased:
                rank.after(point)
                exchange.release()
                rank.after(exchange.sent)
            unreleased.clear()

        for number, way in enumerate(calls, 1):
            exchange = rank.channel.begin((ROW,), torch.uint8)
            block = torch.full((ROW,), value(rank.index, number), dtype=torch.uint8)
            for target in epochs.targets(rank.index, rank.size):
                exchange.push(target, block)

            def read(rank: SimulatedRank = rank, exchange: Exchange = exchange, number: int = number) -> None:
                for source in epochs.sources(rank.index, rank.size):
                    rank.check(exchange.await_block(source), value(source, number))

            if way == COMPUTE:
                read()
                unreleased.append((exchange, None))
                release()
                continue
            rank.follow("receive")
            with rank.on("receive"):
                read()
                if way == RECEIVE:
                    exchange.release()
                else:
                    unreleased.append((exchange, rank.mark()))
            if len(unreleased) == epochs.SLOTS:
                release()
        release()


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(2, 5),
    calls=st.one_of(
        st.lists(st.just(RECEIVE), min_size=1, max_size=7),
        st.lists(st.sampled_from((COMPUTE, APART)), min_size=1, max_size=7),
    ),
    serial=st.booleans(),
    seed=st.integers(0, 2**32),
    favoured=st.integers(0, 4),
)
def test_no_rank_reads_early_overwrites_or_waits_for_ever(
    size: int, calls: list[str], serial: bool, seed: int, favoured: int
) -> None:
    world = Simulation(size, size * ROW, serial)
    program(world, calls)
    generator = random.Random(seed)
    # Half of the time one of the first runnable streams: some ranks are much faster than others.
    world.run(lambda n: min(favoured, n - 1) if generator.random() < 0.5 else generator.randrange(n))


def test_the_simulation_notices_releases_in_another_order_than_the_calls() -> None:
    """Release on two streams: why collectives in pieces have a channel of their own."""
    found = 0
    for seed in range(60):
        world = Simulation(2, 2 * ROW)
        program(world, [RECEIVE, COMPUTE] * 4)
        generator = random.Random(seed)
        try:
            world.run(lambda n, generator=generator: generator.randrange(n) if generator.random() < 0.5 else 0)
        except AssertionError:
            found += 1
    assert found


def broken(seeds: int) -> int:
    """Count the schedules of this many that find a fault."""
    found = 0
    for seed in range(seeds):
        world = Simulation(3, 3 * ROW)
        program(world, [RECEIVE] * 6)
        generator = random.Random(seed)
        try:
            world.run(lambda n, generator=generator: generator.randrange(n) if generator.random() < 0.7 else 0)
        except AssertionError:
            found += 1
    return found


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("call_before", lambda number: number - epochs.SLOTS - 1),  # overwrites what is being read
        ("call_before", lambda number: number),  # waits for a release of its own call
        ("slot_of", lambda number: 0),  # one slot for two calls
        ("word", lambda number: (number + 1) % 2**32),  # flags are raised a call early
    ],
    ids=["overwrites", "waits", "one slot", "early"],
)
def test_the_simulation_notices_a_wrong_protocol(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Callable[[int], int]
) -> None:
    assert broken(10) == 0
    monkeypatch.setattr(epochs, name, wrong)
    assert broken(30) > 0


@given(st.integers(-4, 2**40), st.integers(-(2**30), 2**30))
def test_flags_compare_across_the_wrap(number: int, ahead: int) -> None:
    assert epochs.is_reached(epochs.word(number + ahead), number) == (ahead >= 0)


@given(st.integers(1, 9))
def test_every_rank_receives_from_one_rank_at_a_time(size: int) -> None:
    for step, pairs in enumerate(zip(*(epochs.targets(rank, size) for rank in range(size)), strict=True)):
        assert len(set(pairs)) == size  # each target once
        for rank, target in enumerate(pairs):
            assert list(epochs.sources(target, size))[step] == rank
