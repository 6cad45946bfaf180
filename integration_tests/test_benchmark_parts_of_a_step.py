"""`bench tensor-parallel` tells how much of the communication is hidden: from a step without messages, and from its messages."""

from __future__ import annotations

import argparse
from collections import Counter

import torch
import torch.distributed as dist

from benchmarks.tensor_parallel import report
from benchmarks.tensor_parallel.contestants import build
from benchmarks.tensor_parallel.parts import ARITHMETIC, MESSAGES
from benchmarks.tensor_parallel.run import TINY
from benchmarks.tensor_parallel.work import Work
from meshfold.mesh import record
from meshfold.mesh.testing import ranks


@ranks(2)
def test_one_part_sends_nothing_and_the_other_what_a_step_sends() -> None:
    args = argparse.Namespace(
        **{**TINY, "layers": 2, "ranks": 2, "head_dim": None, "profile": "yes"}
    )  # errors are raised
    work = Work(args, torch.device("cpu"))
    found = {name: build(name, work, args).step for name in ("1d+sequence", ARITHMETIC, MESSAGES)}
    sent = {}
    for name in ("1d+sequence", MESSAGES):
        with record() as log:
            found[name]()  # type: ignore[misc]
        sent[name] = Counter((entry.kind, entry.block_bytes) for entry in log.entries)
    if dist.get_rank() == 0:
        found[ARITHMETIC]()  # type: ignore[misc]  # would wait for the other rank
    blocks = 2 * 16 * 32 * 4  # bytes of all rows
    assert sent[MESSAGES] == {("all_gather", blocks): 4 * 2, ("reduce_scatter", blocks): 4 * 2}
    # Uncompiled, backward gathers the rows of two products again, and sums the gradients of two norms.
    again = sent["1d+sequence"] - sent[MESSAGES]
    assert again["all_gather", blocks] == 2 * 2 and not sent[MESSAGES] - sent["1d+sequence"]
    assert all(kind == "all_reduce" or size == blocks for kind, size in again)


def test_what_is_hidden_is_judged_for_two_ranks() -> None:
    settings = dict(report.ONE_OF_FOUR, ranks=2)
    times = {
        "1d+sequence compiled": [11.0],
        "1d+sequence by push compiled": [10.5],
        f"{ARITHMETIC} compiled": [10.0],
        MESSAGES: [2.5],
    }
    lines = list(report.hidden(dict(settings=settings, milliseconds=times)))
    assert lines == ["- communication that 1d+sequence by push compiled hides: 0.800 (bar 0.75): met"]
    slow = {**times, "1d+sequence by push compiled": [10.7]}
    [line] = report.hidden(dict(settings=settings, milliseconds=slow))
    assert line.endswith("0.720 (bar 0.75): **not met**")
    [line] = report.hidden(dict(settings={**settings, "ranks": 4}, milliseconds=times))
    assert line.endswith(": 0.800")
    [line] = report.hidden(dict(settings={**settings, "ffn": 48}, milliseconds=times))  # other blocks
    assert line.endswith(": 0.800")
    assert not list(
        report.hidden(dict(settings=settings, milliseconds={MESSAGES: [1.0], **dict([*times.items()][:1])}))
    )
