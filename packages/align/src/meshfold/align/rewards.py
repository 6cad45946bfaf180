"""Rewards of completions: Python functions with TRL's signature, each completion scored once, on one rank.

    def short(completions, **kwargs):
        return [-len(text) for text in completions]

A function gets ``prompts`` and ``completions`` (texts; for prompts of messages a message of the assistant), ``completion_ids``, and
the other columns of the records by name, a value a completion. It returns a number for each, or None for one that it cannot score.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.align.records import Completion, Prompt, TextTokenizer
from meshfold.align.reward import RewardModel
from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.collectives import all_gather_object


class Rewards:
    """The sum of several rewards of each completion."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any] | RewardModel],
        tokenizer: TextTokenizer,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Args:
            functions: with TRL's signature; or a trained :class:`meshfold.align.RewardModel`, on all ranks.
            tokenizer: makes texts of tokens.
            weights: factor of each; None: 1.

        Raises:
            SpecError: for no functions, or other than one weight each.
        """
        if (
            not isinstance(functions, (list, tuple))
            or not functions
            or not all(callable(f) or isinstance(f, RewardModel) for f in functions)
        ):
            raise SpecError(
                "rewards: give a list of functions (prompts, completions, **columns) -> numbers, at least one"
            )
        if weights is not None and len(weights) != len(functions):
            raise SpecError(f"{len(weights)} weights for {len(functions)} rewards: give one each")
        self._models: dict[int, RewardModel] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        for place, one in enumerate(functions):
            if isinstance(one, RewardModel):
                self._models[place] = one
            else:
                self._functions[place] = one
        self._tokenizer = tokenizer
        self._weights = [1.0] * len(functions) if weights is None else list(weights)
        self.names = _names(functions)

    @property
    def engines(self) -> dict[str, Engine]:
        """Engines of the reward models, by name."""
        return {
            f"reward {n}" if n > 1 else "reward": model.engines["policy"]
            for n, model in enumerate(self._models.values(), 1)
        }

    def __call__(self, engine: Engine, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return rewards ``n`` in float64, the same on every rank; NaN where no function scored. All ranks must call.

        Args:
            engine: whose data coordinates share the work.
            prompts: of each completion.
            tokens: of each completion, without the prompt.

        Raises:
            SpecError: on all ranks, if a function fails, or returns another number of rewards.
        """
        world, count = engine.world, len(tokens)
        here = range(count * world.row_index // world.row_size, count * (world.row_index + 1) // world.row_size)
        leads = world.mesh.rank == world.members[0]  # of the ranks with these rows one calls
        mine: list[tuple[int, list[float]]] = []
        failure, cause = "", None
        if leads and len(here):
            try:
                mine = self._of_functions([prompts[i] for i in here], [tokens[i] for i in here], here.start)
            except Exception as error:
                failure, cause = _words(error), error
        table = torch.full((len(self.names), count), math.nan, dtype=torch.float64)
        for found, failed in all_gather_object((mine, failure), world.everyone, engine.device):
            if failed:
                raise SpecError(f"a reward function failed: {failed}") from cause
            for number, values in found:
                table[:, number] = torch.tensor(values, dtype=torch.float64)
        for place, model in self._models.items():
            table[place] = model.scores([_whole(p, t) for p, t in zip(prompts, tokens, strict=True)]).double()
        weights = torch.tensor(self._weights, dtype=torch.float64)[:, None]
        total = (weights * table).nansum(0)
        return total.masked_fill(table.isnan().all(0), math.nan)

    def _of_functions(
        self, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], first: int
    ) -> list[tuple[int, list[float]]]:
        texts = [self._tokenizer.decode(list(ids)) for ids in tokens]
        completions = [
            [{"role": "assistant", "content": text}] if isinstance(prompt.given, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = {name for prompt in prompts for name in prompt.columns}
        columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in sorted(names)}
        found = [[math.nan] * len(self.names) for _ in tokens]
        for place, function in self._functions.items():
            values = function(
                prompts=[prompt.given for prompt in prompts],
                completions=completions,
                completion_ids=[list(ids) for ids in tokens],
                **columns,
            )
            for row, value in zip(found, _numbers(self.names[place], values, len(tokens)), strict=True):
                row[place] = value
        return [(first + number, row) for number, row in enumerate(found)]


def _numbers(name: str, values: Any, count: int) -> list[float]:
    """Return what a function returned as numbers, NaN for None; raise a SpecError for anything else."""
    try:
        listed = list(values)
    except TypeError:
        raise SpecError(f"{name} returned {values!r}: return a list with a number for each completion") from None
    if len(listed) != count:
        raise SpecError(f"{name} returned {len(listed)} rewards for {count} completions")
    found = []
    for place, value in enumerate(listed):
        try:
            if isinstance(value, str):
                raise TypeError
            number = math.nan if value is None else float(value)
        except (TypeError, ValueError):
            number = math.inf
        if math.isinf(number):
            raise SpecError(
                f"{name} returned {value!r} for completion {place} of {count}: return a finite number, or None for a completion "
                "that it cannot score"
            )
        found.append(number)
    return found


def _words(error: Exception) -> str:
    """Return an error with the lines of the function that raised it."""
    if isinstance(error, SpecError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename != __file__]
    lines = "".join(traceback.format_list(theirs)).rstrip()
    return f"{type(error).__name__}: {error}" + (f"\n{lines}" if lines else "")


def _names(functions: Sequence[Any]) -> list[str]:
    return [getattr(function, "__name__", type(function).__name__) for function in functions]


def _whole(prompt: Prompt, tokens: Sequence[int]) -> Completion:
    counts = (False,) * len(prompt.ids) + (True,) * len(tokens)
    return Completion(ids=(*prompt.ids, *tokens), counts=counts)
