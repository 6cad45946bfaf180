"""A machine's rates as training steps showed them, in place of those of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfold.zero_gemini.planner import Machine, Regime
from meshfold.zero_gemini.stepping.paces import Pace, What

ENOUGH_ELEMS = 2**24
"""Of what was stepped: fewer say more of what a call costs than of the memory."""


def as_seen(machine: Machine, regime: Regime, paces: Mapping[What, Pace]) -> Machine:
    """The machine with the host's memory as fast as the optimizer's steps on the host found it.

    A sample has the memory of one chunk, before the model has taken any; a step has the memory that the state really
    got, and the other ranks of the host at work. Neither half of a plan's model of a step changes: only the rates.

    The bytes counted are the kernel's and those of the copies beside it: of a first half the parameters that go up
    behind it, of a whole step in the backward the gradients too. Moments are left out: in a backward that is watched
    step by step nothing may be copied beside them. What the cores reach beside the device's steps changes in proportion.

    Args:
        machine: measured by a sample.
        regime: bytes an element.
        paces: of steps without a passage, as those before there is a plan; with too few elements in them the machine is
            what it was.
    """
    beside = {
        "parameters": regime.first_pass + regime.parameter,
        "whole": regime.step + regime.parameter + regime.gradient,
    }
    seen = {what: pace for what, pace in paces.items() if what in beside and pace.seconds > 0}
    if sum(pace.elements for pace in seen.values()) < ENOUGH_ELEMS:
        return machine
    moved = sum(beside[what] * pace.elements for what, pace in seen.items())
    rate = moved / sum(pace.seconds for pace in seen.values())
    share = rate / machine.host_memory
    return replace(machine, host_memory=rate, beside_passage=share * machine.beside_passage)
