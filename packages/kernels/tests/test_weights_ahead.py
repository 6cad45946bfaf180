"""Weights of the next products are asked for where something else runs before them, once, from the second token on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels import weights_ahead
from meshfold.kernels.weights_ahead import NOTHING, PIECE, Ahead, WeightsAhead, launch_ahead, take_product


def of_pieces(count: int) -> Tensor:
    return torch.zeros(count, PIECE, dtype=torch.int8)


def test_weights_are_asked_for_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_ahead, "AHEAD_BYTES", 11 * PIECE)
    asked: list[Ahead] = []
    ahead = WeightsAhead()
    first, out, gate, up, head = (of_pieces(count) for count in (9, 5, 6, 6, 50))

    def token() -> None:
        with ahead.token():
            take_product(first)
            launch_ahead(asked.append)  # attention
            launch_ahead(asked.append)  # nothing is asked for twice
            take_product(out)
            launch_ahead(asked.append)  # a sum
            take_product(gate, up)
            take_product(head)
            launch_ahead(asked.append)  # nothing comes after it

    token()
    assert asked == [NOTHING] * 4 and ahead.fetches
    whole = out.data_ptr()
    for _ in range(2):
        asked.clear()
        token()
        assert asked == [
            Ahead(whole, whole + 2 * PIECE, 2),
            NOTHING,
            Ahead(gate.data_ptr(), up.data_ptr(), 5),
            NOTHING,
        ]
    assert asked[0].programs(32) == 1 and asked[2].programs(4) == 3 and NOTHING.programs(32) == 0
    take_product(first)
    launch_ahead(asked.append)
    assert asked[4:] == [NOTHING]  # outside of a token


def test_addresses_that_the_instruction_does_not_take_are_left_out() -> None:
    asked: list[Ahead] = []
    ahead, odd = WeightsAhead(), of_pieces(9).flatten()[8:]
    for _ in range(2):
        with ahead.token():
            launch_ahead(asked.append)
            take_product(odd)
    assert asked == [NOTHING, NOTHING]


def test_a_launch_that_fails_runs_without() -> None:
    ahead, asked = WeightsAhead(), []

    def launch(given: Ahead) -> None:
        asked.append(given.pieces)
        if given.pieces:
            raise RuntimeError("no such instruction\nat line 1")

    for _ in range(3):
        with ahead.token():
            launch_ahead(launch)
            take_product(of_pieces(4))
    assert ahead.problem == "no such instruction"
    assert asked == [0, 2, 0, 0]

    def fails(given: Ahead) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        launch_ahead(fails)


def test_a_token_without_attention_between_products_fetches_nothing() -> None:
    ahead = WeightsAhead()
    with ahead.token():
        take_product(torch.zeros(4, 4))
        launch_ahead(lambda given: None)
    assert not ahead.fetches


def test_attention_and_sums_have_spare_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from meshfold.kernels import one_shot_packets_triton, one_shot_triton, paged_attention_triton, row_product_triton

    grids: dict[str, list[tuple[int, ...]]] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **settings: Any) -> None:
        if "AHEAD" in settings:
            grids.setdefault(kernel.__name__, []).append(grid)
            assert settings["AHEAD"] is (grid not in ((1,), (1, 2, 1)))

    for module in (one_shot_packets_triton, one_shot_triton, row_product_triton, paged_attention_triton):
        monkeypatch.setattr(module, "launch", launch)
    ahead, x = WeightsAhead(), torch.zeros(1, 64, dtype=torch.bfloat16)
    out, up, down = (torch.zeros(n * 256 * PIECE // 128, 64, dtype=torch.bfloat16) for n in (1, 1, 2))
    memory = K.OneShotMemory(torch.zeros(2).long(), 1, 8, 64, torch.bfloat16)
    q, kept = torch.zeros(1, 4, 16), torch.zeros(2, 3, 2, 16, 16)
    for _ in range(2):
        with ahead.token():
            where = torch.zeros(1, 1).long()
            paged_attention_triton.attend_new(q, q[:, :2], q[:, :2], kept, None, where, where[0], 1.0, None, 1)
            row_product_triton.product(x, out, None)
            one_shot_packets_triton.launch_packets(x, x, x[0], 1e-5, memory, 2, adds=False, norm=True, tries=0)
            row_product_triton.product(x, up, None, gate=K.RowWeight(up))
            one_shot_triton.launch_one_shot(x, x, x[0], 1e-5, memory, 2, adds=False)
            row_product_triton.product(x, down, None)
    # 256 pieces for programs of 128 threads, two of them in a place; twice 256, and 512
    assert grids == {"_attend": [(1, 2, 1), (1, 2, 2)], "_packets": [(1,), (5,)], "_one_shot": [(1,), (5,)]}
