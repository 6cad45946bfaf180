"""Names of meshfold.planner that have moved."""

from __future__ import annotations

import subprocess

import pytest


def test_estimate_is_the_function_whatever_was_imported_before(warm_python: str) -> None:
    code = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as heard:\n"
        "    warnings.simplefilter('always')\n"
        "    from meshfold.planner.estimate import Estimate as a, times\n"
        "assert any('is now meshfold.planner.estimates' in str(one.message) for one in heard)\n"
        "from meshfold.planner import Estimate as b, estimate, step_times\n"
        "from meshfold.planner.planner import estimate as c\n"
        "assert a is b and estimate is c and times is step_times\n"
    )
    subprocess.run([warm_python, "-c", code], check=True, timeout=120)


def test_machine_is_find_machine_now() -> None:
    with pytest.warns(DeprecationWarning, match="is now find_machine"):
        from meshfold.planner.machines import machine
    assert machine("h200").name == "h200"
