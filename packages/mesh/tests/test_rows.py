"""Which dim is the batch is followed through a forward, by what operations do and not by sizes: here all are 4."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh.tracking.active import activated
from meshfold.mesh.tracking.dims import Factor, is_split, is_unknown
from meshfold.mesh.tracking.follow import Tracker
from meshfold.mesh.tracking.rows import ROWS, ROWS_INNERMOST

N = 4


def followed(code: Callable[[Tensor], Tensor]) -> tuple[Tracker, Tensor, Tensor]:
    """What a tracker knows after some code on a batch ``b s h``; what it was given, and its result."""
    tracker, x = Tracker(), torch.randn(N, N, N)
    with activated(tracker):
        tracker.rows.begin([x], N)
        return tracker, x, code(x)


MOVES: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "turned": (lambda x: x.transpose(0, 1).contiguous(), 1),
    "to the end": (lambda x: x.permute(1, 2, 0) * 2, 2),
    "linear": (lambda x: F.linear(x.transpose(0, 1), torch.ones(N, N)), 1),
    "added to what has none": (lambda x: torch.randn(N, N) + x, 0),
    "heads": (lambda x: x.unflatten(-1, (2, 2)).transpose(1, 2), 0),
    "into and out of one dim": (lambda x: x.transpose(0, 1).reshape(-1, N).view(N, N, N), 1),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)[None]] * 3), 2),
    "written in place": (lambda x: torch.zeros(N, N, N).add_(x.transpose(0, 1)), 1),
    "one for every row": (lambda x: torch.ones(1, N, N).expand(N, -1, -1) * 1, 0),
    "a norm of the batch": (lambda x: F.batch_norm(x, None, None, training=True), 0),
    "recurrent": (lambda x: torch.nn.LSTM(N, N)(x.transpose(0, 1))[0], 1),
    "two, one behind the other, taken apart": (lambda x: torch.cat([x, x]).chunk(2)[1], 0),
}


@pytest.mark.parametrize(("code", "place"), MOVES.values(), ids=MOVES)
def test_rows_are_found_where_an_operation_has_moved_them(code: Callable[[Tensor], Tensor], place: int) -> None:
    tracker, _, y = followed(code)
    assert [at for at, dim in enumerate(tracker.rows.dims(y)) if is_split(dim)] == [place]


def test_a_merged_dim_knows_the_order_in_it() -> None:
    tracker, _, y = followed(lambda x: x.flatten(0, 1))
    assert tracker.rows.dims(y)[0] == (Factor(N * N, ROWS),)
    tracker, _, y = followed(lambda x: x.transpose(0, 1).reshape(-1, N))
    assert tracker.rows.dims(y)[0] == (Factor(N), Factor(N, ROWS))
    tracker, _, y = followed(lambda x: torch.cat([x, x]))
    assert tracker.rows.dims(y)[0] == (Factor(2), Factor(N, ROWS))


@pytest.mark.parametrize(
    "code", [lambda x: x[:3], lambda x: x[x[..., 0] > 0], lambda x: x[torch.randperm(N)], lambda x: x[[0, 2]]]
)
def test_of_chosen_rows_nobody_knows_which_they_are(code: Callable[[Tensor], Tensor]) -> None:
    for behind in (lambda y: y, lambda y: y.relu() @ torch.ones(N, N)):
        tracker, _, y = followed(lambda x, behind=behind: behind(code(x)))
        assert any(map(is_unknown, tracker.rows.dims(y)))


def test_what_is_one_for_the_batch_has_no_rows() -> None:
    for code in (lambda x: x.mean(0), lambda x: torch.randn(N, N) * 2):
        tracker, _, y = followed(code)
        assert not any(is_split(dim) or is_unknown(dim) for dim in tracker.rows.dims(y))


def test_where_ranks_exchange_the_rows_are_said() -> None:
    tracker, x, y = followed(lambda x: x.transpose(0, 1) * 1)
    with activated(tracker):
        with tracker.untracked():
            z, flat = y * 2, y[:2].reshape(-1, N)
        assert all(map(is_unknown, tracker.rows.dims(z)))
        assert tracker.rows.dims(y)[1] == (Factor(N, ROWS),)  # what is known stays so
        tracker.rows.keep(z, y)
        assert tracker.rows.dims(z)[1] == (Factor(N, ROWS),)
        tracker.rows.flattened(flat, y)
        assert tracker.rows.dims(flat)[0] == (Factor(2 * N, ROWS_INNERMOST),)
        tracker.rows.unflattened(x.clone(), flat)
        back = torch.empty(2, N, N)
        tracker.rows.unflattened(back, flat)
        assert tracker.rows.dims(back)[1] == (Factor(N, ROWS),)
