"""The work of a stack: operators and collectives of a run on meta tensors, from which a planner knows its time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from meshfold.folding.memory.parts import counting_parts_once
from meshfold.folding.memory.settings import MemorySettings
from meshfold.folding.planning.run import FoldingRun
from meshfold.folding.stack import Stack
from meshfold.kernels import count_kernels
from meshfold.mesh import record
from meshfold.mesh.model_io import Operator, OperatorCounter
from meshfold.mesh.recording import Entry


@dataclass(frozen=True, kw_only=True)
class StackWork:
    """Work of one rank in a forward, and a backward in training, with what chunks and recomputation repeat.

    Attributes:
        operators: each with its count.
        collectives: each with its count.
    """

    operators: Counter[Operator]
    collectives: Counter[Entry]


def count_work(stack: Stack, run: FoldingRun, settings: MemorySettings) -> StackWork:
    """Count the operators and collectives of a stack under settings: those around its blocks, and of one block as many times."""
    around, one = (_run(stack, blocks, run, settings) for blocks in (0, 1))
    blocks = len(stack.blocks)
    return StackWork(
        operators=_of_blocks(around.operators, one.operators, blocks),
        collectives=_of_blocks(around.collectives, one.collectives, blocks),
    )


def _of_blocks(none: Counter[Any], one: Counter[Any], blocks: int) -> Counter[Any]:
    """Return the counts of so many blocks from those of no block and of one."""
    found = {key: none[key] + blocks * (one[key] - none[key]) for key in {**none, **one}}
    return Counter({key: count for key, count in found.items() if count > 0})


def _run(stack: Stack, blocks: int, run: FoldingRun, settings: MemorySettings) -> StackWork:
    with _disable_current_modes(), ExitStack() as context:
        model = run.skeleton(stack, blocks, settings)
        log = context.enter_context(record(on_meta=True))
        counter = OperatorCounter()

        def repeats(parts: Sequence[Any]) -> Iterator[Any]:
            """Run the first part, which counts as all but the last one, and the last one."""
            first = len(log.entries)
            with counter.times(max(len(parts) - 1, 1)):
                yield parts[0]
            log.entries += log.entries[first:] * (len(parts) - 2)
            yield from parts[1:][-1:]

        context.enter_context(counting_parts_once(repeats))
        context.enter_context(counter)
        if run.kernels:
            context.enter_context(count_kernels(counter.as_one))
        run.step(model)
    return StackWork(operators=counter.counts, collectives=Counter(log.entries))
