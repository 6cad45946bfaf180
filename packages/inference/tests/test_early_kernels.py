"""A graph whose kernels begin early is taken if it is faster and chooses the same words, and leaves no trace where it is tried."""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.inference import Sampling, decode
from meshfold.inference.requests import Request, Span
from meshfold.kernels import PagedRows, overlap, token_graphs
from meshfold.kernels.weights_ahead import Ahead, launch_ahead, take_product
from meshfold.tensor_parallel.few_rows import measured

OLD: dict[Tensor, Tensor] = {}
CPU, WORDS = torch.device("cpu"), 11


class Graph:
    """Stands in for a CUDA graph: runs what it was made of again, with an error or not if its kernels begin early."""

    def __init__(self, run: Callable[[], None], wrong: Callable[[], None] | None) -> None:
        self.early = overlap.early()["EARLY"]
        if self.early and wrong is None:
            raise RuntimeError("operation not permitted\nwhile capturing")
        self.run, self.wrong, self.replays = run, wrong, 0

    def replay(self) -> None:
        self.replays += 1
        self.run()
        if self.early and self.wrong is not None:
            self.wrong()


def logits(ids: Tensor, positions: Tensor, rows: PagedRows) -> Tensor:
    table = torch.rand(64, WORDS, WORDS, generator=torch.Generator().manual_seed(0))
    return table[positions % 64, ids]


def generated(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Any,
    early_ms: float,
    agree: Callable[[bool], bool] | None,
    logits: Callable[[Tensor, Tensor, PagedRows], Tensor] = logits,
    plain_ms: Callable[[], float] = lambda: 1.0,
    asked: list[int] | None = None,
) -> tuple[list[Any], list[Graph]]:
    """Return the tokens of 5 steps and then 3, and the graphs; each takes 1 ms, or ``early_ms``.

    ``asked``: is emptied before a graph is timed; ``plain_ms`` returns what a graph took whose kernels do not begin early.
    """
    graphs: list[Graph] = []
    kept = [] if asked is None else asked
    batch = decode.DecodeBatch(2, 32, 5, 4, 9, CPU, mine=slice(None), whole=True, captures=True)

    def captured(run: Callable[[], None]) -> Graph:
        graphs.append(Graph(run, wrong and (lambda: wrong(batch))))
        return graphs[-1]

    def ms(run: Any, restore: Callable[[], None]) -> float:
        kept.clear()
        restore()
        run()
        found = early_ms if run.__self__.early else plain_ms()
        kept.clear()
        return found

    monkeypatch.setattr(token_graphs.TokenGraphs, "capture", staticmethod(captured))
    monkeypatch.setattr(token_graphs, "gpu_ms", ms)
    greedy = Sampling(temperature=0.0, repetition_penalty=1.3)
    request = Request(0, (3, 1, 4), greedy)
    request.pages = [0, 1, 2]
    seen = torch.zeros(1, WORDS, dtype=torch.bool)
    batch.load([Span(request, 2, 1)], [1], 5, seen)
    found = [batch.run(5, logits, None, agree)()]
    request.tokens += [row[1] for row in found[0][0]]
    batch.load([Span(request, 7, 1)], [1], 3, seen)
    return [*found, batch.run(3, None)()], graphs


def right(batch: Any) -> None:
    pass


def other_words(batch: Any) -> None:
    batch._state.tokens.add_(1)


def old_values(batch: Any) -> None:
    """Chooses what it chose the time before."""
    for part in (batch._state.tokens, batch._state.logprobs):
        mine, old = part.clone(), OLD.get(part, part)
        part.copy_(old)
        OLD[part] = mine


def other_logprobs(batch: Any) -> None:
    batch._state.logprobs.add_(1e-3)


@pytest.mark.parametrize(
    ("wrong", "early_ms", "agree", "taken", "told"),
    [
        (right, 0.9, bool, True, ""),
        (right, 1.1, bool, False, ""),
        (right, 0.9, lambda yes: False, False, "do not begin early, which is slower: on a rank"),
        (other_words, 0.9, bool, False, "choose other words"),
        (old_values, 0.9, bool, False, "choose other words"),
        (other_logprobs, 0.9, bool, False, "choose other words"),
        (None, 0.9, bool, False, "do not begin early, which is slower: operation not permitted$"),
    ],
)
def test_the_faster_graph_that_is_right(
    monkeypatch: pytest.MonkeyPatch,
    wrong: Any,
    early_ms: float,
    agree: Any,
    taken: bool,
    told: str,
) -> None:
    wanted, [plain] = generated(monkeypatch, right, 0.0, None)
    assert plain.replays == 4 + 3
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found, graphs = generated(monkeypatch, wrong, early_ms, agree)
    assert found == wanted
    assert [re.search(told, str(each.message)) is not None for each in heard] == [True] * bool(told)
    last = max(graphs, key=lambda graph: graph.replays)
    assert last.early == taken and last.replays >= 4 + 3


@pytest.mark.parametrize(("early_ms", "votes"), [(0.9, [True, True]), (1.1, [True, False])])
def test_a_rank_tells_the_others_which_graph_is_faster(
    monkeypatch: pytest.MonkeyPatch, early_ms: float, votes: list[bool]
) -> None:
    said: list[bool] = []

    def agree(yes: bool) -> bool:  # the other rank made the graph too, and found it slower
        said.append(yes)
        return len(said) == 1

    wanted, _ = generated(monkeypatch, right, 0.0, None)
    found, graphs = generated(monkeypatch, right, early_ms, agree)
    assert found == wanted and said == votes
    assert not max(graphs, key=lambda graph: graph.replays).early


@pytest.mark.parametrize(("ahead_ms", "taken"), [(0.8, True), (1.2, False)])
def test_weights_are_fetched_ahead_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, ahead_ms: float, taken: bool
) -> None:
    asked: list[int] = []

    weight = torch.zeros(1 << 13)

    def launch(ahead: Ahead) -> None:
        asked.extend([ahead.pieces] * bool(ahead.pieces))

    def with_products(ids: Tensor, positions: Tensor, rows: PagedRows) -> Tensor:
        launch_ahead(launch)
        take_product(weight)
        return logits(ids, positions, rows)

    wanted, _ = generated(monkeypatch, right, 1.0, None)
    found, _ = generated(monkeypatch, right, 1.0, bool, with_products, lambda: ahead_ms if asked else 1.0, asked)
    assert found == wanted
    assert len(asked) == (4 + 3 if taken else 0)  # by the tokens after the first


def test_what_was_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for early_ms, verdict in ((0.5, "taken"), (2.0, "left")):
        token_graphs._tried.clear()
        generated(monkeypatch, lambda batch: None, early_ms, bool)
        first, last = token_graphs.tried_graphs()
        assert first == (
            f"a graph whose kernels begin early: {early_ms:.4f} ms a token, 1.0000 ms by the best before: {verdict}"
        )
        assert last.startswith("no graph whose kernels fetch weights ahead")


def test_only_gpus_from_hopper_on_try(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured.agreement(None, None, 1, CPU) is None
    row_kernels: Any = types.SimpleNamespace(ranks=1)
    for ranks, tried in ((1, True), (2, False), (None, True)):  # of the model; None: those of the job
        row_kernels.ranks = ranks
        with monkeypatch.context() as patch:
            patch.setattr(measured, "overlaps_on", lambda device: True)
            assert (measured.agreement(row_kernels, None, 1, CPU) is not None) is tried
    assert overlap.early() == dict(EARLY=False)
    with overlap.overlapped_launches():
        assert overlap.early() == dict(EARLY=True, launch_pdl=True)
    assert overlap.early() == dict(EARLY=False)
