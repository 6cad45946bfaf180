"""Machines under a power cap: matmuls are slower by the third root of the power, all else is as before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshfold.mesh import SpecError
from meshfold.planner import MACHINES, under_power_cap

H100 = MACHINES["h100x8"]


def test_an_eighth_of_the_power_of_computing_is_half_of_the_clock() -> None:
    capped = under_power_cap(H100, 70 + 630 / 8)
    assert capped.flops == pytest.approx({name: rate / 2 for name, rate in H100.flops.items()})
    assert replace(capped, name=H100.name, flops=H100.flops) == H100
    assert capped.name == "h100x8 at 148.75 W" and capped.peak("bf16") == H100.peak("bf16")


@given(st.floats(71, 700), st.floats(71, 700))
def test_less_power_is_never_faster(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert under_power_cap(H100, low).flops["bf16"] <= under_power_cap(H100, high).flops["bf16"] <= H100.flops["bf16"]


@pytest.mark.parametrize(
    ("name", "watts", "said"),
    [
        ("laptop", 400, "the power limit of laptop is not known. Known: H200, H100"),
        ("h100", 70, "power_cap=70 must be above 70 W, which a device of h100 takes idle, and at most 700 W"),
        ("a100x8", 401, "at most 400 W"),
    ],
)
def test_a_cap_that_says_nothing_is_refused(name: str, watts: float, said: str) -> None:
    with pytest.raises(SpecError, match=said.replace(".", r"\.")):
        under_power_cap(MACHINES[name], watts)
