"""The spec's entry ``expert`` in the engine."""

from __future__ import annotations

import pytest
from torch import nn

from meshfold.engine import Engine
from meshfold.mesh import SpecError


def test_the_entry_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        SpecError, match=r"parallel=dict\(expert=1\): expert is not carried out by the engine yet: leave it out"
    ):
        Engine(nn.Linear(2, 2), dict(expert=1))
