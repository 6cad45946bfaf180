"""Rates of this machine that training steps showed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshfold.zero_gemini.optimizer.kernel_runs import StepKind, StepTiming
from meshfold.zero_gemini.planner import Machine, Plan, Regime

ENOUGH_ELEMS = 2**24
"""Least number of stepped elements that shows a memory rate; fewer show the cost of a call instead."""


def with_observed_rates(
    machine: Machine, regime: Regime, timings: Mapping[StepKind, StepTiming], *, passed: float = 0.0
) -> Machine:
    """Return the machine with the host-memory and disk rates that the optimizer's steps showed.

    A sample uses the memory of one chunk, before the model has allocated any. A step uses the memory that the state really got,
    while the other ranks of the host work. Neither half of a plan's model of a step changes: only the rates.

    The bytes counted are the kernel's and those of simultaneous copies: in a first half the parameters that follow it to the
    device, in the backward the gradients too. The rate of the cores during the device's steps changes in proportion. Moments have
    their own rate: during a backward the same memory moved 1.4 to 1.5 times the bytes per second of the first halves before a
    forward (H200 hosts). One rate for both made plans 24 to 30 % too slow there.

    If the device steps some of the host's chunks, cores and device share the host's memory as in no sample. On H200 hosts the cores
    were 7 to 34 % faster than during a sample of GPU streaming, and the device up to a third slower.

    A disk may be slower for hundreds of GiB than for the one of a sample. Its rates change in proportion.

    Args:
        machine: measured by a sample.
        regime: bytes an element.
        timings: of some steps; with too few elements the machine is not changed.
        passed: bytes an element that passed through the device in these steps; 0: none did, as before there is a plan.
    """

    def rate(moved: Mapping[StepKind, float]) -> float:
        """Return bytes/s of steps, given the bytes that each kind moves per element; 0 if there were too few elements."""
        seen = {what: timing for what, timing in timings.items() if what in moved and timing.seconds > 0}
        if sum(timing.elements for timing in seen.values()) < ENOUGH_ELEMS:
            return 0.0
        total = sum(moved[what] * timing.elements for what, timing in seen.items())
        return total / sum(timing.seconds for timing in seen.values())

    up, both_ways = regime.parameter, regime.parameter + regime.gradient
    if passed:
        cores = rate({"parameters": regime.first_pass, "second copy": regime.out_of_place})
        device = rate({"GPU streaming": passed})
        if cores and device:
            machine = replace(machine, host_memory_while_streaming=cores, gpu_streaming=device)
    elif found := rate(
        {
            "parameters": regime.first_pass + up,
            "whole": regime.step + both_ways,
            "second copy": regime.out_of_place + both_ways,
        }
    ):
        share = found / machine.host_memory
        machine = replace(
            machine, host_memory=found, host_memory_while_streaming=share * machine.host_memory_while_streaming
        )
    if found := rate({"moments": regime.second_pass + both_ways}):
        machine = replace(machine, moments_memory=found)
    if found := rate({"disk": regime.state}):  # every byte is read, once or twice, and written
        share = found * (regime.disk_reads / machine.disk_read + 1 / machine.disk_write)
        machine = replace(machine, disk_read=share * machine.disk_read, disk_write=share * machine.disk_write)
    return machine


def observed_under(plan: Plan, timings: Mapping[StepKind, StepTiming]) -> Machine:
    """Return this rank's machine with the rates of steps under a plan, whose state may pass through the device.

    Args:
        plan: the plan in effect.
        timings: of its steps on the host.
    """
    regime, passed = plan.workload.regime, 0.0
    if plan.machine.gpu_streaming:
        whole = plan.copied_fraction if plan.device_steps_halves else 1.0  # fraction that is stepped in one part
        passed = whole * regime.step + (1 - whole) * regime.first_pass
    return with_observed_rates(plan.machine, regime, timings, passed=passed)
