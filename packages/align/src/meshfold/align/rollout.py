"""Rollouts: completions of prompts, from whatever generates them.

The protocol is one function, ``generate(prompts, n, sampling) -> tokens, logprobs, version``. :class:`EngineRollouts` runs the
modules that are trained, on their ranks: no weights are sent, and the policy that samples is the one that is trained. Pages of
keys and values exist only while it generates. Another generator, such as :class:`meshfold.align.ServerRollouts`, says
``exact = False``: trainers then compute the log-probabilities of its tokens themselves and weigh them (:class:`Correction`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshfold.align.policy import importance_weights
from meshfold.engine import Engine
from meshfold.inference import Generator, Rollouts, Sampling
from meshfold.mesh import SpecError, key_of
from meshfold.mesh.collectives import all_gather_object

ROWS_AT_ONCE = 64
"""completions that a data coordinate computes at once, unless another number is given"""
_PAGE = 16


class Rollout(Protocol):
    """Protocol of what samples completions.

    Attributes:
        exact: samples are of the policy as it is now, so that no weights make up for another one.
    """

    exact: bool

    def generate(self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling) -> Rollouts:
        """Return ``n`` completions of each prompt, one prompt behind the other; all ranks call with the same, and get the same."""


def sampling_until(end: int, sampling: Sampling | None) -> Sampling:
    """Return settings of sampling (None: the default ones) under which the token ``end`` ends a completion too."""
    given = Sampling() if sampling is None else sampling
    return replace(given, stop_tokens=tuple({*given.stop_tokens, end}))


class Correction:
    """Weights of samples that another generator drew, perhaps with older weights."""

    def __init__(self, options: Mapping[str, Any] | None, *, max_staleness: int) -> None:
        """Args:
            options: of :func:`meshfold.align.importance_weights`.
            max_staleness: most optimizer steps that the generator's weights may be behind the policy's.

        Raises:
            SpecError: for options out of range.
        """
        if max_staleness < 0:
            raise SpecError(f"max_staleness={max_staleness!r}: optimizer steps, 0 or more")
        self._options, self._most = dict(options or {}), max_staleness
        one = torch.zeros(1, 1)
        importance_weights(one, one, one, **self._options)

    def staleness(self, found: Rollouts, engine: Engine) -> int:
        """Return how many optimizer steps samples are behind an engine.

        Raises:
            SpecError: for more than are allowed, or weights that the engine has not reached.
        """
        behind = engine.steps - found.version
        if not 0 <= behind <= self._most:
            raise SpecError(
                f"samples of weights of optimizer step {found.version} for a policy at step {engine.steps}: let the generator take "
                f"the policy's weights before it samples, or allow max_staleness={max(behind, 0)}"
            )
        return behind

    def weights(self, log_probs: Tensor, sampled: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Return the weights of tokens, ``n s``, and what they were before the bounds.

        Args:
            log_probs: of the trainer's policy, ``n s``.
            sampled: of the generator.
            mask: True for the completions' tokens.

        Returns:
            The weights; ``importance``: the mean ratio of the two policies over tokens, 1 where both agree; ``bounded``: the
            share of tokens whose weight was changed.
        """
        weights = importance_weights(log_probs, sampled, mask, **self._options).expand_as(log_probs).contiguous()
        free = {**self._options, "low": None, "high": None}
        ratios = importance_weights(log_probs, sampled, mask, **free).expand_as(log_probs)
        tokens = max(int(mask.sum()), 1)
        told = dict(
            importance=float(ratios[mask].sum()) / tokens, bounded=float((weights != ratios)[mask].sum()) / tokens
        )
        return weights, told


class EngineRollouts:
    """Samples with an engine's own model; data ranks share the prompts.

    A completion depends on ``sampling.seed`` and its number alone, not on the ranks: it has a seed of its own.

    Attributes:
        exact: True.
    """

    exact = True

    def __init__(self, engine: Engine, *, rows: int = ROWS_AT_ONCE, keeps: bool = False) -> None:
        """Args:
            engine: of the policy.
            rows: completions that a data coordinate computes at once.
            keeps: keep the pages and captured steps for the next call, as ranks can that only generate.

        Raises:
            SpecError: for rows below 1.
        """
        if rows < 1:
            raise SpecError(f"rows={rows!r}: completions at once, 1 or more")
        self._engine, self._rows, self._keeps = engine, rows, keeps
        self._kept: _Room | None = None
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
            room = self._room(-(-longest // _PAGE) * _PAGE, rows)
            generator = room.generator
            requests = {
                number: generator.submit(
                    prompts[number // n], replace(sampling, seed=key_of(f"rollout/{sampling.seed}/{number}"))
                )
                for number in mine
            }
            while not all(request.finish for request in requests.values()):
                generator.step()
            found = {number: (list(r.tokens), list(r.logprobs)) for number, r in requests.items()}
            if self._keeps:  # not after an error, which leaves requests behind
                self._kept = room
        if parts > 1:
            for each in all_gather_object(list(found.items()), world.row_group, self._engine.device):
                found.update(each)
        return Rollouts([found[i][0] for i in numbers], [found[i][1] for i in numbers], self._engine.steps)

    def _room(self, longest: int, rows: int) -> _Room:
        """Return what generates so many texts at once, of at most so many tokens each, with the weights as they are now."""
        kept, self._kept = self._kept, None
        if kept is not None and longest <= kept.longest and rows == kept.rows:
            kept.generator.new_weights()
            return kept
        kept = None  # releases its pages
        made = Generator(self._engine.generator, tokens=longest * rows, page_size=_PAGE, most_rows=rows)
        return _Room(longest, rows, made)


class _Room(NamedTuple):
    """A generator of some texts at once, of at most so many tokens each."""

    longest: int
    rows: int
    generator: Generator
