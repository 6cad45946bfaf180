"""What a stage hands on must lie as what it was given: the next stage believes so."""

from __future__ import annotations

import pytest
import torch

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking.active import activated
from meshfold.mesh.tracking.dims import block, whole
from meshfold.mesh.tracking.follow import Tracker
from meshfold.pipeline.runtime.stage_border import check_handed_on, layouts_of


def test_a_stage_that_turns_what_it_was_given_is_refused() -> None:
    given, other, tracker = torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), Tracker()
    tracker.mark(given, (block(2, ("row",)), whole(2), whole(4)))
    with activated(tracker):
        began = layouts_of({0: given})
        check_handed_on(1, began, {0: given * 2})
        check_handed_on(1, began, {1: other})  # of the batch alone
        with pytest.raises(
            LayoutError,
            match=r"block 1, .* \[2, 2, 4\] of which dim 1 is split over row, .* of which dim 0 is split",
        ):
            check_handed_on(1, began, {0: given.transpose(0, 1)})
        with pytest.raises(LayoutError, match="that is whole on every rank, and the first block"):
            check_handed_on(1, began, {0: other})
    assert layouts_of({0: given}) == {}
