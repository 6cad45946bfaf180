"""Plans of folding models over residues and GPUs: what is chosen fits, runs as it is pasted, and sends what is counted."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshfold.folding import (
    Axes,
    FoldingOutline,
    FoldingRun,
    MemorySettings,
    PairFormerStack,
    Sizes,
    count_work,
    find_axial_mode,
    folding_cost,
    parallelize_folding,
)
from meshfold.folding.planning import MemoryLimit
from meshfold.mesh import Mesh, MetaMesh, ParallelSpec, SpecError
from meshfold.planner import find_machine
from meshfold.planner.folding import (
    draw_folding,
    folding_text,
    layouts,
    lines_to_paste,
    longest_that_fits,
    plan_folding,
)


def outline(blocks: int = 1) -> FoldingOutline:
    widths = dict(c_hidden_pair_bias=8, no_heads_pair_bias=2, c_hidden_mul=16, c_hidden_pair_att=8, no_heads_pair=2)
    with torch.device("meta"):
        stack = PairFormerStack(blocks, 16, 16, transition_n=2, pair_dropout=0.25, **widths)
    return FoldingOutline(name="tiny", stack=stack, recycled_channels=16)


def test_the_table_fits_and_its_lines_choose_the_same(tmp_path: Path) -> None:
    given = outline()
    weights = sum(weight.nbytes for weight in given.stack.parameters())
    machine = replace(find_machine("h200x8"), memory=weights + (34 << 20) + 1_150_000)  # two ranks need less, one more
    found = plan_folding(given, machine, residues=[16, 64], gpus=[1, 2], precision="fp32")
    assert [(one.residues, one.gpus) for one in found.options] == [(16, 1), (16, 2), (64, 1), (64, 2)]
    assert [one.fits for one in found.options] == [True, True, False, True]
    assert found.options[0].plan.settings == MemorySettings() != found.options[3].plan.settings
    assert found.options[0].seconds > 0
    for one in found.options:
        assert one.fits == (one.plan.bytes <= machine.memory)
    longest = longest_that_fits(found)
    assert longest is found.options[3]
    stack = given.stack
    stack.set_axes(Axes.of(MetaMesh(longest.plan.run.axes), longest.plan.run.mode))
    with torch.no_grad():  # as an engine chooses, under the line that is pasted
        chosen = MemoryLimit(longest.stack_limit >> 10 << 10)(stack, torch.empty(1, device="meta"), dict(residues=64))
    assert chosen == longest.plan.settings
    lines = lines_to_paste(longest, folds=True).splitlines()
    spec = ParallelSpec.parse(eval(lines[0].removeprefix("parallel = "), {"dict": dict}), longest.gpus)
    assert spec.axial is not None and spec.axial.axes == longest.plan.run.axes
    assert spec.axial.memory == longest.stack_limit >> 10 << 10
    assert lines[-1].startswith(f"meshfold fold --model DIR --ranks {longest.gpus}")
    text = folding_text(found)
    assert re.search(r"^ *64 +1 +no .* one rank +least: chunks of", text, re.M) and " yes " in text
    draw_folding(found, tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text().count("<!-- 2 GPUs -->") == 1


@pytest.mark.parametrize(("mode", "axes"), [("dap", {"axial": 4}), ("grid", {"row": 2, "col": 2})])
def test_collectives_are_those_of_the_layout(mode: str, axes: dict[str, int]) -> None:
    given = outline(blocks=3)
    run = FoldingRun(
        sizes=Sizes(residues=24, itemsize=4), mode=find_axial_mode(mode), axes=axes, dtype=torch.float32, kernels=False
    )
    work = count_work(given.stack, run, MemorySettings())
    counted: Counter[object] = Counter()
    for entry, count in work.collectives.items():
        counted[entry.kind, entry.axes, entry.bytes] += count
    stack = given.stack
    parallelize_folding(stack, Mesh(axes, rank=0), mode)
    expected = Counter(
        (entry.kind, entry.axes, entry.bytes)
        for entry in folding_cost(stack, residues=24).entries
        if entry.phase != "gradients"
    )
    assert counted == expected
    # Chunks send the same bytes in more messages.
    run = replace(run, training=False)
    whole, parts = (count_work(given.stack, run, MemorySettings(chunk_bytes=chunk)) for chunk in (None, 4096))
    sent = [sum(entry.bytes * count for entry, count in one.collectives.items()) for one in (whole, parts)]
    assert sent[0] == sent[1] and sum(parts.collectives.values()) > sum(whole.collectives.values())


def test_layouts_and_refusals() -> None:
    assert list(layouts(8))[1:] == [("grid", {"row": 2, "col": 4}), ("grid", {"row": 4, "col": 2})]
    with pytest.raises(SpecError, match=r"64 GPUs for 32 residues: .* give fewer GPUs"):
        plan_folding(outline(), find_machine("h200x8"), residues=[32], gpus=[64])


def test_training_holds_the_optimizer_and_takes_longer() -> None:
    machine = find_machine("h200x8")
    rest, training = (
        plan_folding(outline(), machine, residues=[16], gpus=[2], training=training).options[0]
        for training in (False, True)
    )
    weights = sum(weight.numel() for weight in outline().stack.parameters())
    assert rest.plan.weights == 2 * weights
    # bf16: weights and gradients of 2 bytes in the plan; masters, moments and wide gradients beside it.
    assert training.plan.weights + training.plan.other_bytes - rest.plan.other_bytes == (2 + 4 + 4 + 8) * weights
    assert rest.times is not None and training.times is not None
    assert training.times.compute > rest.times.compute and training.times.data > 0 == rest.times.data
    assert training.times.optimizer > 0 == rest.times.optimizer
