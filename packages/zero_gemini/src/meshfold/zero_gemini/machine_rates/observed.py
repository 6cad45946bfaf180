"""A machine's rates as training steps showed them, in place of those of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfold.zero_gemini.optimizer.step_timing import StepKind, StepTiming
from meshfold.zero_gemini.planner import Machine, Regime

ENOUGH_ELEMS = 2**24
"""Least number of stepped elements that shows a memory rate; fewer show the cost of a call instead."""


def with_observed_rates(
    machine: Machine, regime: Regime, paces: Mapping[StepKind, StepTiming], *, passed: float = 0.0
) -> Machine:
    """Return the machine with the host-memory and disk rates that the optimizer's steps showed.

    A sample has the memory of one chunk, before the model has taken any; a step has the memory that the state really
    got, and the other ranks of the host at work. Neither half of a plan's model of a step changes: only the rates.

    The bytes counted are the kernel's and those of the copies beside it: of a first half the parameters that go up
    behind it, in the backward the gradients too. What the cores reach beside the device's steps changes in proportion.
    Moments have a rate of their own: beside a backward the same memory moved 1.4 to 1.5 times the bytes a second of the
    first halves before a forward (H200 hosts), and one rate for both made plans 24 to 30 % too slow there.

    Where the device steps some of the host's chunks, cores and device share the host's memory as they do in no sample: on
    H200 hosts the cores were 7 to 34 % faster than beside a sample's passage, the device up to a third slower.

    A disk may be slower for hundreds of GiB than for the one of a sample. Its rates change in proportion.

    Args:
        machine: measured by a sample.
        regime: bytes an element.
        paces: of some steps; with too few elements in them the machine is what it was.
        passed: bytes an element that passed through the device in these steps; 0: none did, as before there is a plan.
    """

    def rate(moved: Mapping[StepKind, float]) -> float:
        """Bytes a second of steps that move so many an element, by what they do; 0 if they were of too few elements."""
        seen = {what: pace for what, pace in paces.items() if what in moved and pace.seconds > 0}
        if sum(pace.elements for pace in seen.values()) < ENOUGH_ELEMS:
            return 0.0
        total = sum(moved[what] * pace.elements for what, pace in seen.items())
        return total / sum(pace.seconds for pace in seen.values())

    up, both_ways = regime.parameter, regime.parameter + regime.gradient
    if passed:
        cores = rate({"parameters": regime.first_pass, "second copy": regime.out_of_place})
        device = rate({"passage": passed})
        if cores and device:
            machine = replace(machine, beside_passage=cores, passage=device)
    elif found := rate(
        {
            "parameters": regime.first_pass + up,
            "whole": regime.step + both_ways,
            "second copy": regime.out_of_place + both_ways,
        }
    ):
        share = found / machine.host_memory
        machine = replace(machine, host_memory=found, beside_passage=share * machine.beside_passage)
    if found := rate({"moments": regime.second_pass + both_ways}):
        machine = replace(machine, moments_memory=found)
    if found := rate({"disk": regime.state}):  # each of its bytes is read and written
        share = found * (1 / machine.disk_read + 1 / machine.disk_write)
        machine = replace(machine, disk_read=share * machine.disk_read, disk_write=share * machine.disk_write)
    return machine
