"""Every block under every layout equals one process in float64, outputs and every gradient, on all ranks."""

from __future__ import annotations

import pytest
from folding_models import MODELS, check_equal

from meshfold.mesh.testing import ranks


@pytest.mark.parametrize("kind", MODELS)
@ranks(2)
def test_dap_2(kind: str) -> None:
    check_equal(kind, "dap", {"axial": 2})


@pytest.mark.parametrize("kind", MODELS)
@ranks(3)
def test_dap_3(kind: str) -> None:
    check_equal(kind, "dap", {"axial": 3})


@pytest.mark.parametrize("kind", MODELS)
@ranks(4)
def test_grid_2x2(kind: str) -> None:
    check_equal(kind, "grid", {"row": 2, "col": 2})
