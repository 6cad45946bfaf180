"""Rollouts: completions of prompts, from whatever generates them.

The protocol is one function, ``generate(prompts, n, sampling) -> tokens, logprobs, version``. :class:`EngineRollouts` runs the
modules that are trained, on their ranks: no weights are sent, and the policy that samples is the one that is trained. Pages of
keys and values exist only while it generates. Another generator, such as a server, says ``exact = False``: trainers then compute
the log-probabilities of its tokens themselves and weigh them (:func:`meshfold.align.importance_weights`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from meshfold.engine import Engine
from meshfold.inference import Generator, Rollouts, Sampling
from meshfold.mesh import SpecError, key_of
from meshfold.mesh.collectives import all_gather_object

__all__ = ["EngineRollouts", "Rollout"]

_PAGE, _ROWS = 16, 64


class Rollout(Protocol):
    """Protocol of what samples completions.

    Attributes:
        exact: samples are of the policy as it is now, so that no weights make up for another one.
    """

    exact: bool

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt, one prompt behind the other; all ranks call with the same, and get the same."""


class EngineRollouts:
    """Samples with an engine's own model; data ranks share the prompts.

    A completion depends on ``sampling.seed`` and its number alone, not on the ranks: it has a seed of its own.

    Attributes:
        exact: True.
    """

    exact = True

    def __init__(self, engine: Engine, *, rows: int = _ROWS) -> None:
        """Args:
            engine: of the policy.
            rows: completions that a data coordinate computes at once.

        Raises:
            SpecError: for rows below 1.
        """
        if rows < 1:
            raise SpecError(f"rows={rows!r}: completions at once, 1 or more")
        self._engine, self._rows = engine, rows
        zero = engine.spec.zero
        # Where a forward takes weights or experts of other data ranks, all of them have to make the same forwards.
        self._shares = (zero is None or zero.stage < 3) and engine.spec.expert is None

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt; see :class:`Rollout`."""
        world = self._engine.world
        numbers = range(len(prompts) * n)
        parts = world.row_size if self._shares else 1
        mine = [number for number in numbers if number * parts // len(numbers) == world.row_index % parts]
        found: dict[int, tuple[list[int], list[float]]] = {}
        if mine:
            rows = min(self._rows, len(mine))
            longest = max(len(prompts[number // n]) for number in mine) + sampling.max_new_tokens
            pages = -(-longest // _PAGE) * rows
            generator = Generator(self._engine.generator, tokens=pages * _PAGE, page_size=_PAGE, most_rows=rows)
            requests = {
                number: generator.submit(
                    prompts[number // n], replace(sampling, seed=key_of(f"rollout/{sampling.seed}/{number}"))
                )
                for number in mine
            }
            while not all(request.finish for request in requests.values()):
                generator.step()
            found = {number: (list(r.tokens), list(r.logprobs)) for number, r in requests.items()}
        if parts > 1:
            for each in all_gather_object(list(found.items()), world.row_group, self._engine.device):
                found.update(each)
        return Rollouts([found[i][0] for i in numbers], [found[i][1] for i in numbers], self._engine.steps)
