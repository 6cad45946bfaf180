"""The protocol of pushes at any speed of the ranks: nothing is read early or overwritten while it is read, nobody is stuck."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from push_simulation import Simulation

from meshfold.mesh.collectives.push import epochs

ROW = 4  # bytes


def value(rank: int, number: int) -> int:
    """The bytes that a rank pushes in a call."""
    return (number * 8 + rank) % 251 + 1


def program(world: Simulation, calls: list[bool]) -> None:
    """Queue calls on every rank: True reads on the receive stream, False on the compute stream."""
    for rank in world.ranks:
        for number, beside in enumerate(calls, 1):
            exchange = rank.channel.begin((ROW,), torch.uint8)
            block = torch.full((ROW,), value(rank.index, number), dtype=torch.uint8)
            for target in epochs.targets(rank.index, rank.size):
                exchange.push(target, block)

            def read(rank=rank, exchange=exchange, number=number) -> None:  # type: ignore[no-untyped-def]
                for source in epochs.sources(rank.index, rank.size):
                    rank.check(exchange.await_block(source), value(source, number))
                exchange.release()

            if beside:
                rank.follow("receive")
                with rank.on("receive"):
                    read()
            else:
                read()
                rank.after(exchange.sent)


@settings(deadline=None, max_examples=40)
@given(
    size=st.integers(2, 5),
    calls=st.lists(st.booleans(), min_size=1, max_size=7),
    serial=st.booleans(),
    seed=st.integers(0, 2**32),
    favoured=st.integers(0, 4),
)
def test_no_rank_reads_early_overwrites_or_waits_for_ever(
    size: int, calls: list[bool], serial: bool, seed: int, favoured: int
) -> None:
    world = Simulation(size, size * ROW, serial)
    program(world, calls)
    generator = random.Random(seed)
    # Half of the time one of the first runnable streams: some ranks are much faster than others.
    world.run(lambda n: min(favoured, n - 1) if generator.random() < 0.5 else generator.randrange(n))


def broken(seeds: int) -> int:
    """Count the schedules of this many that find a fault."""
    found = 0
    for seed in range(seeds):
        world = Simulation(3, 3 * ROW)
        program(world, [True] * 6)
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
