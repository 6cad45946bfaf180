"""Positions of loaders: saved by name, kept for loaders that are still to be made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import pytest
from torch import Tensor

from meshfold.engine import ShardedLoader
from meshfold.engine.batches.loader import DataPositions


def loader() -> ShardedLoader:
    return ShardedLoader(range(12), batch_size=2, index=0, blocks=1, shuffle=False)


def test_positions_find_their_loaders_before_and_after_these_are_made() -> None:
    before, rows = DataPositions(), loader()
    before.follow("train", rows)
    for _ in islice(rows, 3):
        pass
    saved = before.state_dict()

    after, made_first = DataPositions(), loader()
    after.follow("train", made_first)
    after.load_state_dict({**saved, "valid": saved["train"]})
    assert next(iter(made_first)).tolist() == [6, 7]
    assert "valid" not in after
    assert after.state_dict()["valid"] == saved["train"]  # nobody asked for it yet: it is saved again

    made_later = loader()
    after.follow("valid", made_later)
    assert next(iter(made_later)).tolist() == [6, 7]
    for _ in islice(made_later, 1):
        pass
    assert after.state_dict()["valid"] != saved["train"]


def numbers(batches: Iterable[Tensor]) -> list[int]:
    return [int(row) for batch in batches for row in batch]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_break_ends_the_epoch_and_a_checkpoint_goes_on_there(shuffle: bool) -> None:
    def of() -> ShardedLoader:
        return ShardedLoader(range(11), batch_size=2, index=0, blocks=1, shuffle=shuffle, seed=3)

    unbroken = of()
    first, second = numbers(unbroken), numbers(unbroken)
    assert sorted(first) == sorted(second) == list(range(11))

    broken = of()
    seen: list[int] = []
    for batch in broken:
        seen += numbers([batch])
        if len(seen) == 6:
            break
    assert (broken.epoch, broken.served) == (0, 3)
    resumed = of()
    resumed.load_state_dict(broken.state_dict())
    assert numbers(resumed) == first[6:]
    assert numbers(broken) == numbers(resumed) == second
    assert (broken.epoch, broken.served) == (resumed.epoch, resumed.served) == (2, 0)

    broken.load_state_dict(dict(epoch=0, served=0))  # anew, on request
    assert numbers(broken) == first


def test_a_few_steps_an_epoch_do_not_always_see_the_same_rows() -> None:
    rows = ShardedLoader(range(64), batch_size=2, index=0, blocks=1, seed=3)
    seen = {row for _ in range(8) for row in numbers(islice(rows, 2))}
    assert len(seen) > 16


def test_who_takes_the_last_batch_and_asks_for_no_more_has_ended_the_epoch() -> None:
    rows = ShardedLoader(range(4), batch_size=2, index=0, blocks=1, seed=3)
    epochs = []
    for _ in range(2):
        batches = iter(rows)
        epochs.append(numbers(next(batches) for _ in range(len(rows))))
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3]] * 2
    assert epochs[0] != epochs[1]
    assert numbers(rows) != epochs[1] and rows.epoch == 3


def test_a_position_loaded_within_a_loop_is_that_of_the_next_one() -> None:
    rows = loader()
    for batch in rows:
        if int(batch[0]) == 4:
            rows.load_state_dict(dict(epoch=0, served=1))
    assert (rows.epoch, rows.served) == (0, 1)
    assert numbers(rows) == list(range(2, 12))
