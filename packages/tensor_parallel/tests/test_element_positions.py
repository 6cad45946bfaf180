"""The number of every element in one process's tensor, from a rank's part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold.mesh import Mesh, MeshfoldError, dropout_stream
from meshfold.mesh.random.dropout import TokenShards
from meshfold.mesh.testing import fake_world
from meshfold.mesh.tracking.dims import Dims, Factor, Split, block, whole
from meshfold.mesh.tracking.rows import ROWS, ROWS_INNERMOST
from meshfold.tensor_parallel.layers.base import BatchShape
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.layers.element_positions import (
    GlobalBatch,
    Run,
    fitted_positions,
    followed_positions,
    numbers_of,
)
from meshfold.tensor_parallel.modes import find_mode

S, ALL, FIRST, HERE, HEADS, WIDTH = 6, 10, 4, 4, 2, 3  # rows 4 to 7 of 10 are this data coordinate's
MESH = Mesh(dict(row=2, tensor=2, seq=2), rank=7)  # the second of each
TOKEN_SHARDS = TokenShards(length=S, index=torch.tensor([1, 3, 5]))
MINE, TOKENS = slice(FIRST, FIRST + HERE), [1, 3, 5]
ROW, COLUMN, SEQ = ("row",), ("tensor",), Split(("seq",), "tokens")

Case = tuple[Callable[[Tensor], Tensor], Dims, tuple[tuple[Factor, ...], ...]]


def rows(size: int) -> tuple[Factor, ...]:
    return (Factor(size, ROWS),)


CASES: dict[str, Case] = {
    "b s h": (lambda w: w[MINE], (whole(4), whole(S), whole(WIDTH)), (rows(4), whole(S), whole(WIDTH))),
    "s b h": (
        lambda w: w.transpose(0, 1)[:, MINE],
        (whole(S), whole(4), whole(WIDTH)),
        (whole(S), rows(4), whole(WIDTH)),
    ),
    "s b h, rows split": (
        lambda w: w.transpose(0, 1)[:, 6:8],
        (whole(S), block(2, ROW), whole(WIDTH)),
        (whole(S), rows(2), whole(WIDTH)),
    ),
    "s·b h, a block of both": (
        lambda w: w.transpose(0, 1)[:, MINE].reshape(-1, WIDTH)[12:],
        (block(12, ROW), whole(WIDTH)),
        ((Factor(12, ROWS_INNERMOST),), whole(WIDTH)),
    ),
    "s·b h": (
        lambda w: w.transpose(0, 1)[:, MINE].reshape(-1, WIDTH),
        (whole(24), whole(WIDTH)),
        ((Factor(S), Factor(4, ROWS)), whole(WIDTH)),
    ),
    "b·s h, tokens split": (
        lambda w: w[MINE][:, TOKENS].reshape(-1, WIDTH),
        ((Factor(4), Factor(3, SEQ)), whole(WIDTH)),
        (rows(12), whole(WIDTH)),
    ),
    "s b h, tokens split": (
        lambda w: w.transpose(0, 1)[TOKENS, MINE],
        ((Factor(3, SEQ),), whole(4), whole(WIDTH)),
        (whole(3), rows(4), whole(WIDTH)),
    ),
    "h s b": (
        lambda w: w.permute(2, 1, 0)[..., MINE],
        (whole(WIDTH), whole(S), whole(4)),
        (whole(WIDTH), whole(S), rows(4)),
    ),
    "no rows": (lambda w: w[0], (whole(S), whole(WIDTH)), (whole(S), whole(WIDTH))),
}


def batch_of(first: int = FIRST) -> GlobalBatch:
    return GlobalBatch(first, 0, ALL, BatchShape(rows=HERE, given=HERE, length=S), TOKEN_SHARDS)


@pytest.mark.parametrize(("part", "real", "by_rows"), CASES.values(), ids=CASES)
def test_a_part_has_the_numbers_that_it_has_in_the_whole(
    part: Callable[[Tensor], Tensor], real: Dims, by_rows: Dims
) -> None:
    order = next(name for name, case in CASES.items() if case[0] is part).split(",")[0]
    whole_tensor = torch.arange(ALL * S * WIDTH).view(ALL, S, WIDTH)
    if order == "no rows":
        whole_tensor = torch.arange(S * WIDTH).view(1, S, WIDTH)
    turned = whole_tensor.permute({"s": (1, 0, 2), "h": (2, 1, 0)}.get(order[0], (0, 1, 2)))
    numbers = torch.empty_like(whole_tensor)  # of each element, where it lies in one process
    numbers.permute({"s": (1, 0, 2), "h": (2, 1, 0)}.get(order[0], (0, 1, 2))).copy_(
        torch.arange(whole_tensor.numel()).view(turned.shape)
    )
    mine = part(numbers)
    guess = tuple((Run(size=n),) for n in mine.shape)
    place = followed_positions(mine, real, by_rows, guess, batch_of(), MESH, ("seq",), "drop")
    assert place is not None
    assert torch.equal(numbers_of(place, batch_of(), MESH, torch.device("cpu")), mine.flatten())
    assert fitted_positions(place, tuple(mine.shape), batch_of(), MESH) == place


def test_heads_split_behind_the_rows_in_one_dim() -> None:
    wanted = torch.arange(ALL * 4).view(ALL, 4)[MINE, 2:].flatten()
    x = torch.empty(8, 1)
    real = ((Factor(4), Factor(2, Split(COLUMN))), whole(1))
    place = followed_positions(x, real, ((Factor(8, ROWS),), whole(1)), ((Run(),),) * 2, batch_of(), MESH, (), "drop")
    assert place is not None
    assert torch.equal(numbers_of(place, batch_of(), MESH, torch.device("cpu")), wanted)


def test_another_batch_has_other_sizes_in_the_same_dims() -> None:
    place = ((Run(size=6), Run((), "rows", single=True, size=4)), (Run(size=3),))
    more = GlobalBatch(0, 0, ALL, BatchShape(rows=5, given=5, length=7), None)
    found = fitted_positions(place, (35, 3), more, MESH)
    assert found is not None
    assert [run.size for run in found[0]] == [7, 5]
    assert fitted_positions(place, (36, 3), more, MESH) is None
    windows = fitted_positions(((Run((), "rows", single=True, size=4),),), (10,), more, MESH)  # there was one a row
    assert windows == ((Run((), "rows", single=False, size=10),),)


def test_rows_behind_tokens_want_to_know_how_many_there_are() -> None:
    with fake_world(2):
        drop = Dropout(0.5, Mesh(dict(tensor=2)), find_mode("1d"), 4, batch=BatchShape(rows=3, given=3, length=5))
        with (
            pytest.raises(MeshfoldError, match=r"dropout_stream\(seed, step, first_row=..., rows=...\)"),
            dropout_stream(0, 0, first_row=3),
        ):
            drop(torch.ones(5, 3, 4))
        with dropout_stream(0, 0, first_row=3, rows=6):
            assert drop(torch.ones(5, 3, 4)).shape == (5, 3, 4)
