"""States of a chunk and of its gradient: random sequences of calls keep to the tables, and illegal calls raise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from meshfold.mesh import Group
from meshfold.zero_gemini import Memory
from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.gradient import ChunkGradient
from meshfold.zero_gemini.chunks.layout import Item, lay_out
from meshfold.zero_gemini.chunks.states import (
    CHUNK_TRANSITIONS,
    GRAD_TRANSITIONS,
    ChunkState,
    GradState,
    check_transition,
)
from meshfold.zero_gemini.errors import ChunkError

CPU = torch.device("cpu")
SIZES = {"a": 5, "b": 7}
PLACES = st.sampled_from(range(len(SIZES)))


class Step:
    """A step that adds to the shard when it is waited for, or fails."""

    def __init__(self, chunk: Chunk, added: float | None) -> None:
        self.chunk, self.added, self.waits = chunk, added, 0

    def is_done(self) -> bool:
        return True

    def wait(self) -> bool:
        self.waits += 1
        return self.added is not None

    def land(self) -> None:
        assert self.added is not None
        self.chunk.shard.add_(self.added)


class Life(RuleBasedStateMachine):
    """One chunk and its gradient on one rank, beside plain numbers that say what they must hold."""

    @initialize(tier=st.sampled_from(["device", "host"]))
    def make(self, tier: str) -> None:
        layout = lay_out([Item(name, n, "all") for name, n in SIZES.items()], 64, 1, slot_align_elems=8)
        (spec,) = layout.chunks
        self.parameters = [nn.Parameter(torch.empty(0)) for _ in SIZES]
        self.chunk = Chunk(
            spec,
            layout.shard_slices(spec, 0),
            self.parameters,
            [torch.Size([n]) for n in SIZES.values()],
            Group(axes=("data",), ranks=(0,), index=0, name=""),
            dtype=torch.float32,
            memory=Memory(CPU),
            tier=tier,
            whole_group=False,  # type: ignore[arg-type]
        )
        self.gradient = ChunkGradient(
            self.chunk,
            torch.float32,
            tier,
            every_time=True,
            measure=Tensor.sum,
            wait_for_reader=self.read,  # type: ignore[arg-type]
        )
        self.reads = self.lent = 0
        self.value, self.step = 0.0, None
        self.sums = [0.0] * len(SIZES)  # of each parameter's gradient, reduced or not
        self.is_reduced = True  # all of them

    def read(self) -> None:
        self.reads += 1

    # -- the chunk ----------------------------------------------------------------------------------------------

    @rule()
    def gather(self) -> None:
        self.chunk.gather()
        self.stepped()
        assert self.chunk.is_gathered

    @precondition(lambda self: self.chunk.is_gathered)
    @rule()
    def wait(self) -> None:
        self.chunk.wait()
        if not self.chunk.step_is_pending:
            assert self.chunk.state is ChunkState.GATHERED
            assert all((p == self.value).all() for p in self.parameters)

    @precondition(lambda self: not self.chunk.is_gathered)
    @rule()
    def wait_for_what_was_not_gathered(self) -> None:
        before = self.chunk.state
        with pytest.raises(ChunkError, match="before it was gathered"):
            self.chunk.wait()
        assert self.chunk.state is before

    @rule()
    def release(self) -> None:
        self.chunk.release()
        assert self.chunk.resident or not self.chunk.is_gathered

    @precondition(lambda self: not self.chunk.step_is_pending)
    @rule()
    def change(self) -> None:
        self.chunk.wait_if_resident()
        self.value += 1.0
        for name, elements in SIZES.items():
            self.chunk.fill(name, torch.full((elements,), self.value))
        self.chunk.publish()
        self.chunk.publish()  # waits for the first

    @precondition(lambda self: not self.chunk.step_is_pending)
    @rule()
    def promise(self) -> None:
        self.step = Step(self.chunk, 1.0)
        self.chunk.promise_step(self.step)
        assert self.chunk.step_is_pending and self.step.waits == 0

    @precondition(lambda self: self.chunk.step_is_pending)
    @rule(tier=st.sampled_from(["device", "host"]))
    def promise_again_or_move(self, tier: str) -> None:
        before = self.chunk.state
        with pytest.raises(ChunkError, match=f"'{before.value}' to"):
            self.chunk.promise_step(Step(self.chunk, 1.0))
        if tier != self.chunk.tier:
            with pytest.raises(ChunkError, match="while a step of it is pending"):
                self.chunk.move(tier)  # type: ignore[arg-type]
        assert self.chunk.state is before

    @rule()
    def wait_step(self) -> None:
        self.chunk.wait_step()
        self.stepped()

    def stepped(self) -> None:
        assert not self.chunk.step_is_pending
        if self.step is not None:
            assert self.step.waits == 1
            self.step, self.value = None, self.value + 1.0

    @precondition(lambda self: not self.chunk.step_is_pending)
    @rule(tier=st.sampled_from(["device", "host"]))
    def move(self, tier: str) -> None:
        self.chunk.move(tier)  # type: ignore[arg-type]
        assert self.chunk.tier == tier

    # -- its gradient -------------------------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        return self.gradient.state not in (GradState.SETTLED, GradState.CONSUMED)

    @precondition(lambda self: self.takes_more)
    @rule(place=PLACES)
    def add(self, place: int) -> None:
        self.gradient.add(place, torch.ones([*SIZES.values()][place]))
        self.sums[place] += 1.0
        self.is_reduced = False
        assert self.gradient.state is GradState.ACCUMULATING

    @precondition(lambda self: not self.takes_more)
    @rule(place=PLACES)
    def add_too_late(self, place: int) -> None:
        before = self.gradient.state
        with pytest.raises(ChunkError, match="second gradient"):
            self.gradient.add(place, torch.ones([*SIZES.values()][place]))
        assert self.gradient.state is before

    @precondition(lambda self: self.takes_more)
    @rule(last=st.booleans())
    def reduce(self, last: bool) -> None:
        self.gradient.reduce("last")
        self.gradient.begin()
        self.is_reduced = True
        assert self.gradient.state is GradState.REDUCED

    @precondition(lambda self: self.takes_more)
    @rule(unsure=st.booleans())
    def reduce_finally(self, unsure: bool) -> None:
        self.gradient.reduce("final", unsure=unsure)
        self.is_reduced = True
        assert self.gradient.state is (GradState.REDUCED if unsure else GradState.SETTLED)

    @precondition(lambda self: self.gradient.state in (GradState.REDUCED, GradState.SETTLED))
    @rule(out=st.booleans())
    def consume(self, out: bool) -> None:
        shard = self.gradient.finish()
        for part, wanted in zip(self.chunk.slices, self.sums, strict=True):
            assert (shard[part.shard_start : part.shard_start + part.length] == wanted).all()
        if out:
            block = self.gradient.hand_out()
            if block is not None:
                block.free()
        else:
            self.gradient.hand_over()
            self.lent += 1
        assert self.gradient.is_consumed

    @precondition(lambda self: self.gradient.state not in (GradState.REDUCED, GradState.SETTLED))
    @rule()
    def consume_too_early_or_twice(self) -> None:
        before = self.gradient.state
        with pytest.raises(ChunkError, match=f"illegal transition from '{before.value}' to 'consumed'"):
            self.gradient.hand_over()
        assert self.gradient.state is before

    @precondition(lambda self: self.gradient.state is GradState.ACCUMULATING)
    @rule()
    def finish_before_the_sum(self) -> None:
        with pytest.raises(ChunkError, match="gradients of a to b: some of them are not summed over the ranks yet"):
            self.gradient.finish()
        assert self.gradient.state is GradState.ACCUMULATING

    @rule()
    def clear(self) -> None:
        self.gradient.clear()
        self.sums, self.is_reduced = [0.0] * len(SIZES), True
        assert self.gradient.state is GradState.EMPTY and self.gradient.shard is None

    # -- always -------------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        chunk = self.chunk
        assert chunk.step_is_pending == (chunk.state in (ChunkState.STEP_PENDING, ChunkState.STALE))
        assert chunk.is_gathered == bool(chunk._whole.untyped_storage().nbytes())
        assert chunk.is_gathered or not chunk.resident
        assert self.reads <= self.lent
        assert self.is_reduced == (self.gradient.state is not GradState.ACCUMULATING)

    def teardown(self) -> None:
        if not hasattr(self, "chunk"):
            return
        self.chunk.drop_step()
        assert self.chunk.state in (ChunkState.SHARDED, ChunkState.GATHERING, ChunkState.GATHERED)
        self.gradient.close()


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=3 * settings().max_examples // 5, stateful_step_count=40)


@pytest.mark.parametrize("before", ChunkState)
@pytest.mark.parametrize("after", ChunkState)
def test_a_chunk_changes_its_state_as_the_table_says(before: ChunkState, after: ChunkState) -> None:
    if after in CHUNK_TRANSITIONS[before]:
        check_transition("chunk", CHUNK_TRANSITIONS, before, after)
    else:
        with pytest.raises(ChunkError, match=f"chunk: illegal transition from '{before.value}' to '{after.value}'"):
            check_transition("chunk", CHUNK_TRANSITIONS, before, after)


def test_every_state_of_a_gradient_leads_back_to_the_first() -> None:
    assert set(GRAD_TRANSITIONS) == set(GradState)
    for state in GradState:
        assert state is GradState.EMPTY or GradState.EMPTY in GRAD_TRANSITIONS[state]


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_step_that_failed_shows_nan(tier: str) -> None:
    life = Life()
    life.make(tier)
    life.chunk.gather()
    life.chunk.promise_step(Step(life.chunk, None))
    life.chunk.gather()
    life.chunk.wait()
    assert all(p.isnan().all() for p in life.parameters)
