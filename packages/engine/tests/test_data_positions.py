"""Positions of loaders: saved by name, kept for loaders that are still to be made."""

from __future__ import annotations

from itertools import islice

from meshfold.engine import ShardedLoader
from meshfold.engine.batches.positions import DataPositions


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
