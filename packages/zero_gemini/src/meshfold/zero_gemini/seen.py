"""A machine's rates as training steps showed them, in place of those of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfold.zero_gemini.planner import Machine, Regime
from meshfold.zero_gemini.stepping.paces import Pace, What

ENOUGH_ELEMS = 2**24
"""Of what was stepped: fewer say more of what a call costs than of the memory."""


def as_seen(machine: Machine, regime: Regime, paces: Mapping[What, Pace], *, passed: float = 0.0) -> Machine:
    """The machine with the host's memory as fast as the optimizer's steps on the host found it.

    A sample has the memory of one chunk, before the model has taken any; a step has the memory that the state really
    got, and the other ranks of the host at work. Neither half of a plan's model of a step changes: only the rates.

    The bytes counted are the kernel's and those of the copies beside it: of a first half the parameters that go up
    behind it, in the backward the gradients too. What the cores reach beside the device's steps changes in proportion.
    Moments have a rate of their own: beside a backward the same memory moved 1.4 to 1.5 times the bytes a second of the
    first halves before a forward (H200 hosts), and one rate for both made plans 24 to 30 % too slow there.

    Where the device steps some of the host's chunks, cores and device share the host's memory as they do in no sample: on
    H200 hosts the cores were 7 to 34 % faster than beside a sample's passage, the device up to a third slower.

    Args:
        machine: measured by a sample.
        regime: bytes an element.
        paces: of some steps; with too few elements in them the machine is what it was.
        passed: bytes an element that passed through the device in these steps; 0: none did, as before there is a plan.
    """
    beside = {
        "parameters": regime.first_pass + regime.parameter,
        "whole": regime.step + regime.parameter + regime.gradient,
        "moments": regime.second_pass + regime.parameter + regime.gradient,
    }

    def pace(*kinds: What) -> float:
        """Seconds of those; 0 if they were of too few elements."""
        seen = [one for what, one in paces.items() if what in kinds and one.seconds > 0]
        enough = sum(one.elements for one in seen) >= ENOUGH_ELEMS
        return sum(one.seconds for one in seen) if enough else 0.0

    def rate(*kinds: What) -> float:
        """Bytes a second of those; 0 if they were too few."""
        moved = sum(
            beside[what] * one.elements for what, one in paces.items() if what in kinds and one.seconds > 0
        )
        seconds = pace(*kinds)
        return moved / seconds if seconds else 0.0

    if passed:
        cores, device = pace("parameters"), pace("passage")
        if cores and device:
            machine = replace(
                machine,
                beside_passage=regime.first_pass * paces["parameters"].elements / cores,
                passage=passed * paces["passage"].elements / device,
            )
    elif found := rate("parameters", "whole"):
        share = found / machine.host_memory
        machine = replace(machine, host_memory=found, beside_passage=share * machine.beside_passage)
    if found := rate("moments"):
        machine = replace(machine, moments_memory=found)
    return machine
