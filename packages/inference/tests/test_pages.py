"""Pages are never leaked, lost or shared wrongly, whatever sequences do; requests come out as if each ran alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshfold.inference import Pages, Sampling
from meshfold.inference.pages import OutOfPages
from meshfold.inference.requests import Request, Step, ids_of
from meshfold.inference.schedule import Part, Scheduler
from meshfold.mesh import MeshfoldError, SpecError

COUNT, SIZE = 9, 3


class AnyUse(RuleBasedStateMachine):
    """Sequences take, share, name and release pages in any order; what each page holds is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(COUNT, SIZE)
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.holds: dict[int, list[int]] = {}  # page -> all tokens of the sequence up to its end

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE))
    def begin(self, tokens: list[int]) -> None:
        shared, chain = self.pages.share(tokens)
        for i, page in enumerate(shared):
            assert self.holds[page] == tokens[: (i + 1) * SIZE]  # the same tokens, and the same before them
        assert len(shared) * SIZE < len(tokens)
        try:
            pages = shared + self.pages.take(self.pages.needed(len(tokens)) - len(shared))
        except OutOfPages:
            self.pages.release(shared)
            return
        assert not any(page in pages[len(shared) :] for _, others in self.sequences for page in others)
        for i in range(len(shared), len(pages)):
            self.holds.pop(pages[i], None)
            if (i + 1) * SIZE <= len(tokens):
                self.holds[pages[i]] = tokens[: (i + 1) * SIZE]
                chain = self.pages.remember(chain, tokens[i * SIZE : (i + 1) * SIZE], pages[i])
        self.sequences.append((tokens, pages))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, pages = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pages.release(pages)

    @rule()
    def forget(self) -> None:
        self.pages.forget()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        in_use = {page for _, pages in self.sequences for page in pages}
        assert self.pages.used == len(in_use)
        assert self.pages.available == COUNT - len(in_use)
        for page in range(COUNT):
            assert self.pages.users(page) == sum(page in pages for _, pages in self.sequences)


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pages_that_are_not_there() -> None:
    pages = Pages(2, 4)
    mine = pages.take(2)
    with pytest.raises(OutOfPages, match="1 pages wanted, 0 of 2 available"):
        pages.take(1)
    pages.release(mine)
    with pytest.raises(MeshfoldError, match="more often"):
        pages.release(mine)
    with pytest.raises(SpecError, match="pages=0"):
        Pages(0, 4)


def drawn(request: Request, position: int) -> int:
    """A token that depends on the whole sequence before it, as a model's does."""
    return hash((request.slice(0, position), request.sampling.seed)) % 5


def fill(step: Step, held: dict[tuple[int, int, int], tuple[int, ...]], size: int) -> tuple[list[int], list[float]]:
    """Do as a forward does: write the tokens of all spans to their pages, then read all that each sequence sees."""
    for span in step.spans:
        for position in range(span.start, span.stop):
            place = (span.request.part, span.request.pages[position // size], position % size)
            held[place] = tuple(span.request.slice(0, position + 1))
    tokens = []
    for span in step.spans:
        for position in range(span.stop):
            place = (span.request.part, span.request.pages[position // size], position % size)
            assert held[place] == tuple(span.request.slice(0, position + 1)), "keys of another sequence"
        if span.samples:
            tokens.append(drawn(span.request, span.stop))
    return tokens, [0.0] * len(tokens)


class Places:
    """A store of pages that says yes to everything."""

    def save(self, pages: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(len(pages)))

    def load(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        assert len(slots) == len(pages)

    def free(self, slots: Sequence[int]) -> None:
        assert slots


@pytest.mark.few(10)
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_requests_in_any_order_are_those_alone(seed: int, share: bool) -> None:
    chance = random.Random(seed)
    size, count = chance.choice([1, 2, 4]), chance.choice([12, 20, 40])
    parts = [Part(Pages(count, size)) for _ in range(1 + seed % 3)]
    scheduler = Scheduler(parts, most_rows=chance.choice([1, 3, 6]), chunk=chance.choice([6, 11]), share=share)
    most_rows, most_tokens = -(-scheduler.most_rows // len(parts)), scheduler.chunk // len(parts)
    prompts = [tuple(chance.randrange(2) for _ in range(chance.randint(1, 3 * size + 4))) for _ in range(32)]
    requests = []
    for number, prompt in enumerate(prompts):
        most = min(count * size - len(prompt), chance.randint(1, 9))
        if most > 0:
            requests.append(Request(number, prompt, Sampling(max_new_tokens=most, stop_tokens=(4,), seed=number % 3)))
    waiting, held, steps = list(requests), {}, 0
    while waiting or scheduler.busy:
        while waiting and chance.random() < 0.5:
            scheduler.submit(waiting.pop(0))
        step = scheduler.plan()
        assert step.spans or not scheduler.busy
        for part in range(len(parts)):
            assert sum(span.count for span in step.spans if span.request.part == part) <= max(most_tokens, most_rows)
            assert sum(request.part == part for request in scheduler.running) <= most_rows
        prefilling = {span.request for span in step.prefill}
        assert {span.request for span in step.decode} == {
            r for r in scheduler.running if r not in prefilling and r.length - r.computed == 1
        }
        ahead = scheduler.ahead(step, chance.choice([1, 4])) if step.spans else 0
        for _ in range(ahead):
            scheduler.commit(step, *fill(step, held, size))
            step = scheduler.next_step(step)
        steps += 1
        assert scheduler.used_pages == len({(r.part, page) for r in scheduler.running for page in r.pages})
        assert steps < 5000
    assert scheduler.used_pages == 0
    for request in requests:
        alone = Request(0, request.prompt, request.sampling)
        while not alone.finish:
            alone.tokens.append(drawn(alone, alone.length))
            if alone.tokens[-1] == 4:
                alone.finish = "stop"
            elif len(alone.tokens) == alone.sampling.max_new_tokens:
                alone.finish = "length"
        assert (request.tokens, request.finish) == (alone.tokens, alone.finish)
    if share:
        assert any(r.shared for r in requests) or size > 2
    if scheduler.most_rows > 1:
        assert {r.part for r in requests} == set(range(len(parts)))


def test_a_full_pool_evicts_who_came_last_and_loses_nothing() -> None:
    pages = Pages(6, 2)
    scheduler = Scheduler([Part(pages)], most_rows=4, chunk=8)
    requests = [Request(i, (i, i, i), Sampling(max_new_tokens=8, seed=i)) for i in range(3)]
    for request in requests:
        scheduler.submit(request)
    held: dict[tuple[int, int, int], tuple[int, ...]] = {}
    while scheduler.busy:
        step = scheduler.plan()
        scheduler.commit(step, *fill(step, held, 2))
    assert [r.evictions > 0 for r in requests] == [False, True, True]
    assert all(len(r.tokens) == 8 for r in requests) and pages.used == 0


def test_sequences_that_begin_alike_compute_it_once() -> None:
    scheduler = Scheduler([Part(Pages(32, 4))], most_rows=8, chunk=64)
    prompt = tuple(range(10))
    for number in range(4):
        scheduler.submit(Request(number, prompt, Sampling(max_new_tokens=2)))
    step = scheduler.plan()
    assert [span.count for span in step.spans] == [10, 2, 2, 2]  # already in the step that computes it
    assert scheduler.used_pages == 3 + 3
    fill(step, {}, 4)


def test_parts_take_turns_and_keep_what_waits_on_the_host() -> None:
    parts = [Part(Pages(4, 2), Places()) for _ in range(2)]
    scheduler = Scheduler(parts, most_rows=4, chunk=16)
    requests = [Request(i, (i, i), Sampling(max_new_tokens=5)) for i in range(4)]
    for request in requests:
        scheduler.submit(request)
    homes = []
    while scheduler.busy:
        step = scheduler.plan()
        homes.append([r.part for r in requests])
        new = sum(span.samples for span in step.spans)
        scheduler.commit(step, [7] * new, [0.0] * new)
    assert homes[0] == [0, 1, 0, 1] and homes[-1] == homes[0]
    assert [r.evictions for r in requests] == [0, 0, 1, 1] and [r.restored for r in requests] == [0, 0, 1, 1]
    with pytest.raises(SpecError, match=r"takes 5 pages, and there are 4 for each of the 2 parts of the rows"):
        scheduler.submit(Request(9, (1,) * 5, Sampling(max_new_tokens=5)))


def test_requests_are_checked() -> None:
    scheduler = Scheduler([Part(Pages(4, 2))], most_rows=1, chunk=4)
    with pytest.raises(SpecError, match=r"takes 5 pages, and there are 4.*max_new_tokens=4"):
        scheduler.submit(Request(0, (1,) * 5, Sampling(max_new_tokens=5)))
    with pytest.raises(SpecError, match="chunk=3"):
        Scheduler([Part(Pages(4, 2))], most_rows=4, chunk=3)
    for wrong in ([], [1.5], ["a"], [-1]):
        with pytest.raises(SpecError, match="a prompt"):
            ids_of(wrong)  # type: ignore[arg-type]


def test_tokens_recorded_at_once_equal_those_recorded_one_by_one() -> None:
    """Sequences that end in the middle, by length or by a stop token, drop what comes after."""
    found = []
    for at_once in (False, True):
        scheduler = Scheduler([Part(Pages(40, 2))], most_rows=4, chunk=32)
        most = [dict(max_new_tokens=3), dict(max_new_tokens=9), dict(max_new_tokens=9, stop_tokens=(22,))]
        requests = [Request(i, (5 + i, 6, 7), Sampling(**settings)) for i, settings in enumerate(most)]  # type: ignore[arg-type]
        for request in requests:
            scheduler.submit(request)
        scheduler.commit(scheduler.plan(), [1, 2, 3], [-1.0] * 3)
        step, counts = scheduler.plan(), []
        tokens = [[10 * row + step for row in range(3)] for step in range(4)]
        logprobs = [[-float(token) for token in row] for row in tokens]
        assert scheduler.ahead(step, 4) == 4
        if at_once:
            counts = scheduler.commit_ahead(step, tokens, logprobs)
            assert counts == [2, 4, 3]
        else:
            for new, new_logprobs in zip(tokens, logprobs, strict=True):
                mine = [span.request.number for span in step.decode]
                scheduler.commit(step, [new[row] for row in mine], [new_logprobs[row] for row in mine])
                step = scheduler.next_step(step)
        each = [(r.tokens, r.logprobs, r.finish, r.computed, r.named, len(r.pages)) for r in requests]
        found.append((each, scheduler.running == [requests[1]], scheduler.used_pages))
    assert found[0] == found[1] and found[0][1]
    assert [each[2] for each in found[0][0]] == ["length", "", "stop"]
