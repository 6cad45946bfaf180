"""The next token: as transformers' processors have it, drawn with the right probabilities, and no affair of other rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.inference import Sampling
from meshfold.inference.sampling import request_seed, sample, sampling_rows, truncated
from meshfold.mesh import SpecError

WORDS = 23
CPU = torch.device("cpu")


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, WORDS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "given",
    [
        dict(top_k=5),
        dict(top_k=100),
        dict(top_p=0.6),
        dict(top_p=0.05),
        dict(min_p=0.2),
        dict(top_k=7, top_p=0.8, min_p=0.1, temperature=0.7),
        dict(temperature=1.7, top_p=0.9),
    ],
    ids=str,
)
def test_truncation_is_that_of_transformers(given: dict[str, Any]) -> None:
    from transformers.generation import logits_process as theirs

    logits = logits_of(6)
    settings = Sampling(**given)
    wanted = theirs.TemperatureLogitsWarper(settings.temperature)(None, logits)
    if settings.top_k is not None:
        wanted = theirs.TopKLogitsWarper(min(settings.top_k, WORDS))(None, wanted)
    if settings.top_p < 1:
        wanted = theirs.TopPLogitsWarper(settings.top_p)(None, wanted)
    if settings.min_p > 0:
        wanted = theirs.MinPLogitsWarper(settings.min_p)(None, wanted)
    found = truncated(logits / settings.temperature, sampling_rows([settings] * 6, CPU))
    assert torch.equal(found, wanted)
    assert int(found.isinf().sum()) > 0 or settings.top_k == 100


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers.generation import logits_process as theirs

    logits, ids = logits_of(4), torch.randint(WORDS, (4, 15), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(4, WORDS, dtype=torch.bool).scatter_(1, ids, True)
    rows = sampling_rows([Sampling(temperature=0.0, repetition_penalty=3.0)] * 4, CPU)
    tokens, logprobs = sample(logits, torch.zeros(4, dtype=torch.int64), rows, seen)
    wanted = theirs.RepetitionPenaltyLogitsProcessor(3.0)(ids, logits).argmax(-1)
    assert torch.equal(tokens, wanted)
    assert not torch.equal(tokens, logits.argmax(-1))
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], rtol=1e-6)


def test_words_come_as_often_as_they_should() -> None:
    draws = 40_000
    logits = logits_of(1, seed=3).expand(draws, -1)
    for settings in (Sampling(seed=5), Sampling(temperature=0.6, top_k=4), Sampling(top_p=0.7, temperature=1.4)):
        rows = sampling_rows([settings], CPU)
        one = {name: value.expand(draws) for name, value in vars(rows).items() if isinstance(value, Tensor)}
        many = type(rows)(**{**vars(rows), **one})
        tokens, logprobs = sample(logits, torch.arange(draws), many)
        probabilities = torch.softmax(truncated(logits[:1] / settings.temperature, rows), -1)[0]
        wanted, found = draws * probabilities.double(), torch.bincount(tokens, minlength=WORDS).double()
        kept = wanted > 0
        assert int(found[~kept].sum()) == 0
        surprise = float(((found - wanted)[kept] ** 2 / wanted[kept]).sum())
        freedom = int(kept.sum()) - 1
        assert surprise < freedom + 5 * (2 * freedom) ** 0.5, (settings, surprise)
        exact = (logits / settings.temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert torch.allclose(logprobs, exact, atol=1e-6)


def test_a_row_does_not_see_its_neighbours() -> None:
    kinds = [
        Sampling(seed=1),
        Sampling(temperature=0.0, seed=2),
        Sampling(top_k=3, seed=3),
        Sampling(top_p=0.5, seed=-4),
        Sampling(min_p=0.3, repetition_penalty=1.5, seed=2**63),
    ]
    logits, positions = logits_of(5, seed=8), torch.tensor([4, 0, 9, 2, 7])
    seen = torch.zeros(5, WORDS, dtype=torch.bool).scatter_(1, logits.topk(3).indices, True)
    together = sample(logits, positions, sampling_rows(kinds, CPU), seen)
    for row, kind in enumerate(kinds):
        one = slice(row, row + 1)
        alone = sample(logits[one], positions[one], sampling_rows([kind], CPU), seen[one])
        assert torch.equal(alone[0], together[0][one]) and torch.equal(alone[1], together[1][one])
    assert int(together[0][1]) == int(logits[1].argmax())


def test_the_coldest_temperature_takes_the_likeliest_token() -> None:
    logits = torch.tensor([[-3e4, 2.0, 3e4, 1.0]])
    token, logprob = sample(
        logits, torch.zeros(1, dtype=torch.int64), sampling_rows([Sampling(temperature=1e-30)], CPU)
    )
    assert (token.item(), logprob.item()) == (2, 0.0)


def test_seeds_and_positions_give_other_numbers() -> None:
    logits = torch.zeros(1, 1000).expand(64, -1)
    by_seed = sample(
        logits, torch.zeros(64, dtype=torch.int64), sampling_rows([Sampling(seed=s) for s in range(64)], CPU)
    )[0]
    by_place = sample(logits, torch.arange(64), sampling_rows([Sampling()] * 64, CPU))[0]
    again = sample(logits, torch.arange(64), sampling_rows([Sampling()] * 64, CPU))[0]
    assert len(set(by_seed.tolist())) > 50 and len(set(by_place.tolist())) > 50
    assert torch.equal(by_place, again)
    assert len({request_seed(0, n) for n in range(100)} | {request_seed(1, n) for n in range(100)}) == 200


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens=0"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=1e-40), "temperature=1e-40: a number from 1e-30 up, or 0"),
        (dict(top_k=0), "top_k=0"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(min_p=1.5), "min_p=1.5"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0"),
        (dict(stop="end"), r"give a tuple, \('end',\)"),
        (dict(stop=("",)), "at least one character"),
        (dict(stop_tokens=(-1,)), "stop_tokens=-1"),
    ],
    ids=str,
)
def test_settings_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Sampling(**given)
