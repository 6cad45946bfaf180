"""Eviction to the host: texts of an unlimited pool, bounded room, nothing left behind, and less that is computed anew."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from inference_models import own, prompts

from meshfold.engine import Engine
from meshfold.inference import Generator, Pages, Request, Sampling
from meshfold.inference.cache import LayerShape, Pool
from meshfold.inference.forward import PagedForward
from meshfold.inference.host_pages import HostPages
from meshfold.inference.schedule import Part, Scheduler
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks

GREEDY = Sampling(temperature=0.0, max_new_tokens=10)
DRAWN = Sampling(temperature=0.9, top_k=20, max_new_tokens=10, seed=3)


def crowded(model: Any, **more: Any) -> Generator:
    return Generator(model, **{**dict(tokens=24, page_size=4, chunk=5, most_rows=4, share_prefixes=False), **more})


@pytest.mark.parametrize("cache", [None, "fp8", "int8"])
def test_pages_come_back_as_they_went(cache: str | None) -> None:
    cpu = torch.device("cpu")
    pool = Pool([LayerShape(2, 8, torch.bfloat16), LayerShape(1, 4, torch.float32)], 5, 4, cpu, cache)
    host = HostPages(pool, 3)
    assert host.bytes * (pool.pages + 1) == pool.bytes * 3
    for layer in pool.layers:
        for part in layer.parts:
            part.view(torch.uint8).random_(0, 100)
    before = [part.view(torch.uint8).clone() for layer in pool.layers for part in layer.parts]
    slots = host.save([1, 4])
    assert len(slots) == 2 and host.used == 2 and host.save([0, 2]) == ()
    pool.clear()
    host.load(slots, [3, 0])
    host.free(slots)
    assert host.used == 0
    for part, old in zip((p for layer in pool.layers for p in layer.parts), before, strict=True):
        raw = part.view(torch.uint8)
        assert torch.equal(raw[:, [3, 0]], old[:, [1, 4]]) and not raw[:, [1, 2, 4]].any()


@pytest.mark.few(3)
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
@pytest.mark.parametrize("more", [{}, dict(cache="int8"), dict(share_prefixes=True, ahead=3)])
def test_texts_are_those_of_an_unlimited_pool(sampling: Sampling, more: dict[str, Any]) -> None:
    model = own("llama").eval()
    given = prompts(6)
    wanted = Generator(model, cache=more.get("cache")).generate(given, sampling=sampling)
    rows = []
    for host_tokens in (0, 4, 64):
        generator = crowded(model, host_tokens=host_tokens, **more)
        assert isinstance(generator.runner, PagedForward)
        computed: list[int] = []
        real = generator.runner.logits
        generator.runner.logits = lambda ids, *others, real=real, computed=computed: (
            computed.append(len(ids)) or real(ids, *others)
        )  # type: ignore
        requests = generator.complete(given, sampling=sampling)
        assert [request.tokens for request in requests] == wanted.tokens
        assert torch.allclose(torch.tensor([r.logprobs for r in requests]), torch.tensor(wanted.logprobs), atol=1e-4)
        assert sum(request.evictions for request in requests) > 0 and generator.scheduler.used_pages == 0
        restored = sum(request.restored for request in requests)
        assert (restored > 0) == (host_tokens == 64) or host_tokens == 4
        assert generator.host is None if not host_tokens else generator.host is not None and generator.host.used == 0
        rows.append(sum(computed))
    assert rows[2] < rows[0]  # less is computed anew


class Fake:
    """A store that notes what is in it."""

    def __init__(self, count: int) -> None:
        self.left, self.held = list(range(count)), set[int]()

    def save(self, pages: Any) -> tuple[int, ...]:
        if len(pages) > len(self.left):
            return ()
        slots = tuple(self.left.pop() for _ in pages)
        self.held |= set(slots)
        return slots

    def load(self, slots: Any, pages: Any) -> None:
        assert len(slots) == len(pages) and set(slots) <= self.held

    def free(self, slots: Any) -> None:
        assert set(slots) <= self.held
        self.held -= set(slots)
        self.left += slots


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7), st.integers(0, 8), st.data())
def test_no_place_is_lost(wanted: list[tuple[int, int]], room: int, data: st.DataObject) -> None:
    store = Fake(room)
    scheduler = Scheduler([Part(Pages(9, 2), store)], most_rows=4, chunk=6)
    requests = [Request(i, (i,) * n, Sampling(max_new_tokens=more)) for i, (n, more) in enumerate(wanted)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.busy:
        step = scheduler.plan()
        for span in step.spans:
            assert len(span.request.pages) * 2 >= span.stop and span.request.computed == span.start
        count = sum(span.samples for span in step.spans)
        scheduler.commit(step, [1] * count, [0.0] * count)
        left = [request for request in requests if not request.finish]
        if left and data.draw(st.integers(0, 9)) == 0:
            scheduler.finish(data.draw(st.sampled_from(left)), "cancelled")
    assert not store.held and sorted(store.left) == list(range(room)) and scheduler.used_pages == 0


def on_ranks() -> tuple[list[list[int]], int]:
    with Engine(own("llama"), dict(tensor=2)) as engine:
        generator = crowded(engine.generator, host_tokens=64)
        requests = generator.complete(prompts(6), sampling=GREEDY)
        return [request.tokens for request in requests], sum(request.restored for request in requests)


def test_ranks_keep_their_own_heads() -> None:
    wanted = Generator(own("llama").eval()).generate(prompts(6), sampling=GREEDY).tokens
    for tokens, restored in run_on_ranks(2, on_ranks):
        assert tokens == wanted and restored > 0


def test_what_cannot_be_is_refused() -> None:
    class Other(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*ids.shape, 5)

    with pytest.raises(
        SpecError, match=r"host_tokens=64: keys and values are not kept in pages.*leave host_tokens out"
    ):
        Generator(Other(), host_tokens=64)
    with pytest.raises(SpecError, match="host_tokens"):
        Generator(own("llama"), host_tokens=-1)
