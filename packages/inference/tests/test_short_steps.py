"""Steps whose tokens are all rows of their own, as in a CUDA graph on a GPU: texts are those of chunks, here without a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inference_models import hugging_face, own, prompts

from meshfold.inference import Generator, Rollouts, Sampling
from meshfold.inference.batch import RowParts
from meshfold.inference.forward import PagedForward
from meshfold.inference.requests import Request, Span, Step
from meshfold.inference.short_steps import GraphMemory, ShortSteps, short_rows

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


def texts(model: Any, short: bool, **settings: Any) -> tuple[Rollouts, set[tuple[int, int]]]:
    """Texts of five prompts, three at once in chunks of five tokens, and the shapes of the short steps."""
    generator = Generator(model, page_size=4, most_rows=3, chunk=5, tokens=72, **settings)
    runner = generator.runner
    assert isinstance(runner, PagedForward)
    assert not runner.short  # not a GPU
    runner.short = short
    found = generator.generate(prompts(5), sampling=GREEDY)
    assert generator.scheduler.used_pages == 0
    return found, set(runner._shorts)


@pytest.mark.parametrize(("kind", "cache"), [("llama", None), ("window", "int8"), ("mistral", None)])
def test_short_steps_write_the_same_texts(kind: str, cache: str | None) -> None:
    model = hugging_face(kind) if kind == "mistral" else own("llama", window=5 if kind == "window" else None).eval()
    wanted, none = texts(model, short=False, cache=cache)
    found, shapes = texts(model, short=True, cache=cache)
    assert found.tokens == wanted.tokens and shapes == {(16, 1), (16, 8)} and not none
    for mine, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert torch.allclose(torch.tensor(mine), torch.tensor(theirs), atol=1e-5)


def test_the_second_step_of_a_shape_is_captured_and_later_ones_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captures, replays, calls = [], [], []

    class Graph:
        def replay(self) -> None:
            replays.append(self)

    class Captured:
        def __init__(self, graph: Graph, **settings: object) -> None:
            captures.append(settings["pool"])

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Captured)
    parts = RowParts(0, 1, 1)
    steps = ShortSteps(16, 8, 4, 4, 9, torch.device("cpu"), parts=parts, memory=GraphMemory("memory"))
    request = Request(0, tuple(range(1, 8)), GREEDY, pages=[5, 2])

    def logits(ids: Any, positions: Any, rows: Any, last: Any) -> Any:
        calls.append((ids.tolist(), positions.tolist(), rows, last.tolist()))
        return torch.ones(8, 3)

    for turn in range(4):
        steps.load(Step((), (Span(request, 2, 5),)))
        assert steps.run(None if steps.captured else logits).shape == (8, 3)
        assert (len(calls), len(captures), len(replays)) == (min(turn + 1, 2), min(turn, 1), turn)
    ids, positions, rows, last = calls[0]
    assert ids == [3, 4, 5, 6, 7, *[0] * 11] and positions == [2, 3, 4, 5, 6, *[0] * 11] and last == [4, *[0] * 7]
    assert rows.page.tolist() == [5, 5, 2, 2, 2, *[9] * 11] and rows.offset.tolist() == [2, 3, 0, 1, 2, *[0] * 11]
    assert rows.tables.tolist() == [[5, 2, 9, 9]] * 5 + [[9] * 4] * 11 and rows.together
    assert captures == ["memory"]


def test_a_model_that_cannot_be_captured_keeps_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    steps = ShortSteps(16, 8, 4, 4, 9, torch.device("cpu"), parts=RowParts(0, 1, 1), memory=GraphMemory("memory"))
    request = Request(0, (1, 2), GREEDY, pages=[0])
    steps.load(Step((), (Span(request, 0, 2),)))
    assert steps.run(lambda *given: torch.zeros(8, 3)).shape == (8, 3)
    with pytest.warns(UserWarning, match="no CUDA graph of a short step, which is slower: operation not permitted"):
        steps.run(lambda *given: torch.zeros(8, 3))
    assert not steps.captured and steps.run(lambda *given: torch.ones(8, 3)).sum() == 24


def test_steps_of_many_tokens_or_of_long_sequences_are_not_short() -> None:
    def span(start: int, count: int, length: int) -> Span:
        return Span(Request(0, tuple(range(length)), GREEDY), start, count)

    assert short_rows([span(0, 9, 9)], 9) == (16, 1) and short_rows([span(0, 5, 9)], 5) == (16, 1)
    assert [short_rows([span(0, n, n)], n) for n in (32, 33, 65, 512, 513)] == [
        (32, 1),
        (64, 1),
        (128, 1),
        (512, 1),
        None,
    ]
    assert short_rows([span(0, 1, 1)] * 2, 2) == (16, 8)
    assert short_rows([span(0, 1, 1)] * 9, 9) == (16, 64) and short_rows([span(0, 1, 1)] * 65, 65) is None
    assert short_rows([span(4000, 64, 5000)], 64) == (64, 1) and short_rows([span(4000, 128, 5000)], 128) is None
