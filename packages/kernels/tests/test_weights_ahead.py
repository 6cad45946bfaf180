"""Weights of the next products are asked for where something else runs before them, once, from the second token on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels import weights_ahead
from meshfold.kernels.weights_ahead import WeightsAhead, fetch_ahead, take_product

CPU = torch.device("cpu")


def recorder(asked: list[tuple[tuple[int, ...], int]]) -> WeightsAhead:
    def fetch(weights: Sequence[Tensor], count: int) -> None:
        asked.append((tuple(w.shape[0] for w in weights), count))

    return WeightsAhead(CPU, fetch)


def test_weights_are_asked_for_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_ahead, "AHEAD_BYTES", 1000)
    asked: list[tuple[tuple[int, ...], int]] = []
    ahead = recorder(asked)
    first, out, gate, head = (torch.zeros(n, 100, dtype=torch.int8) for n in (9, 3, 6, 50))

    def token() -> None:
        with ahead.token():
            take_product(first)
            fetch_ahead()  # rotary embedding
            fetch_ahead()  # attention
            take_product(out)
            take_product(gate, gate)
            fetch_ahead()  # a sum
            take_product(head)
            fetch_ahead()  # nothing comes after it

    token()
    assert asked == [] and ahead.fetches
    for _ in range(2):
        asked.clear()
        token()
        assert asked == [((3,), 300), ((6, 6), 350), ((50,), 1000)]
    take_product(first)
    fetch_ahead()
    assert len(asked) == 3  # outside of a token


def test_a_fetch_that_fails_does_not_end_the_token() -> None:
    def fails(weights: Sequence[Tensor], count: int) -> None:
        raise RuntimeError("no such instruction\nat line 1")

    ahead = WeightsAhead(CPU, fails)
    for _ in range(2):
        with ahead.token():
            fetch_ahead()
            take_product(torch.zeros(4, 4))
    assert ahead.problem == "no such instruction"


def test_a_token_without_attention_between_products_fetches_nothing() -> None:
    ahead = recorder([])
    with ahead.token():
        take_product(torch.zeros(4, 4))
        fetch_ahead()
    assert not ahead.fetches


def test_products_and_sums_say_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from meshfold.kernels import one_shot_packets_triton, one_shot_triton, row_product_triton

    for module in (one_shot_packets_triton, one_shot_triton, row_product_triton):
        monkeypatch.setattr(module, "launch", lambda *arguments, **settings: None)
    asked: list[tuple[tuple[int, ...], int]] = []
    ahead, x = recorder(asked), torch.zeros(1, 64, dtype=torch.bfloat16)
    out, up, down = (torch.zeros(n, 64, dtype=torch.bfloat16) for n in (64, 96, 32))
    memory = K.OneShotMemory(torch.zeros(2).long(), 1, 8, 64, torch.bfloat16)
    for _ in range(2):
        with ahead.token():
            row_product_triton.product(x, out, None)
            one_shot_packets_triton.launch_packets(x, x, x[0], 1e-5, memory, 2, adds=False, tries=0)
            row_product_triton.product(x, up, None, gate=K.RowWeight(up))
            one_shot_triton.launch_one_shot(x, x, x[0], 1e-5, memory, 2, adds=False)
            row_product_triton.product(x, down, None)
    assert asked == [((96, 96), up.nbytes), ((32,), down.nbytes), ((32,), down.nbytes)]
