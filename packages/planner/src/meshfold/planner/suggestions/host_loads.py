"""Seconds of the host under ``zero`` when state does not fit on devices: in the phases of a step, by the formulas of its plan."""

from __future__ import annotations

from dataclasses import dataclass

from meshfold.planner.machines import Machine
from meshfold.zero_gemini.planner import Regime


@dataclass(frozen=True, kw_only=True)
class HostLoads:
    """Seconds of one rank's copies and steps on the host, beside which devices compute.

    Attributes:
        first: in the forward that waits for the step's new parameters.
        last: in the backward that has the last gradients.
        forward: in every other forward of a step.
        backward: in every other backward: sums of gradients go up, are added to, and go back.
        stepped: share of the rank's elements that the host steps.
    """

    first: float = 0.0
    last: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    stepped: float = 0.0

    @classmethod
    def of(
        cls, over: float, elements: float, regime: Regime, machine: Machine, *, ranks: int, halves: bool, late: bool
    ) -> HostLoads:
        """Return the loads of moving state to the host, and parameters too when all state has moved.

        Args:
            over: bytes that a device lacks.
            elements: of the rank's state.
            regime: bytes an element.
            machine: whose host steps.
            ranks: on a node, which share its memory.
            halves: moments are stepped during the backward, masters once the norm is known; else all in the backward.
            late: gradients are held until all have arrived, where the state is.
        """
        if over <= 0 or elements <= 0:
            return cls()
        host = machine.host
        each = regime.state + regime.gradient * late
        stepped = min(elements, over / each)
        streamed = min(elements, max(0.0, over - elements * each) / regime.parameter)
        mine = host.rank_rates(ranks)
        memory = max(mine.stepping, mine.stepping_while_streaming + mine.streaming)

        def copying(up: float, down: float, stepping: float = 0.0) -> float:
            """Return the seconds of copies, of which the host's memory has each byte once, beside a step's own bytes there."""
            return max(up / host.up, down / host.down, (up + down) / host.both, (up + down + stepping) / memory)

        parameters, gradients, renewed = (
            regime.parameter * streamed,
            regime.gradient * stepped,
            regime.parameter * stepped,
        )
        before, during = (regime.first_pass, regime.second_pass) if halves else (0.0, regime.step)
        return cls(
            first=copying(max(parameters, renewed), 0.0, before * stepped),
            last=copying(parameters, gradients, during * stepped),
            forward=copying(parameters, 0.0),
            backward=copying(parameters + gradients, gradients),
            stepped=stepped / elements,
        )
