"""``recompute="but-attention"``: a plan counts the results of attention that are kept, and attention once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.cli import main
from meshfold.engine import Engine
from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import ATTENTION_OF, DryRun, LiveBytes
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig, build
from meshfold.planner import Estimate, estimate, find_machine
from meshfold.zero_gemini import MemoryPlanError
from meshfold.zero_gemini.planner import REGIMES, Limits, on_device, plan
from meshfold.zero_gemini.planner.memory import layer_bytes
from meshfold.zero_gemini.profiler import ChunkUse, StepTracer, Trace, WallClock, workload_of

ROWS, TOKENS, HIDDEN, HEADS, LAYERS = 64, 64, 64, 4, 4


def gpt(layers: int = LAYERS) -> GPT:
    return GPT(GPTConfig(vocab_size=128, hidden=HIDDEN, layers=layers, heads=HEADS, max_positions=TOKENS))


def llama() -> nn.Module:
    return build("llama-tiny", hidden=HIDDEN, layers=LAYERS, heads=HEADS, kv_heads=2, ffn=160, vocab_size=128)


def planned(recompute: str | None, parallel: dict[str, Any], model: Any = gpt) -> Estimate:
    spec = ParallelSpec.parse(parallel)
    return estimate(
        model,
        spec.with_world_size(spec.world_size),
        batch_size=ROWS,
        seq_len=TOKENS,
        precision="bf16",
        machine=find_machine("h200x8"),
        recompute=recompute,
        name="it",
    )


def kept_bytes(itemsize: int = 2) -> int:
    """Bytes of a block's output of attention and of its log-sum-exps."""
    return ROWS * TOKENS * (HIDDEN * itemsize + HEADS * 4)


SPECS: dict[str, tuple[dict[str, Any], int]] = {
    "one": ({}, 1),
    "1d": (dict(tensor=2), 2),
    "zero": (dict(zero=dict(stage=3)), 1),
    "ring": (dict(sequence=dict(mode="ring", size=2)), 2),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SPECS)
def test_a_plan_counts_what_is_kept_by_hand(name: str) -> None:
    (parallel, parts), few = SPECS[name], 2
    found = {
        (way, layers): planned(way, parallel, partial(gpt, layers))
        for way, layers in [(None, few), *product(("blocks", "but-attention"), (few, 2 * few))]
    }

    def more(way: str) -> int:
        """Bytes of more layers: only these are kept all the time."""
        return found[way, 2 * few].memory.activations - found[way, few].memory.activations

    assert more("but-attention") - more("blocks") == few * kept_bytes() // parts
    without, blocks, but = (found[way, few].flops for way in (None, "blocks", "but-attention"))
    assert without < but < blocks
    assert blocks - but == 2 * 2 * ROWS * TOKENS * TOKENS * HIDDEN * few // parts


def peak(model: nn.Module, ids: Tensor, way: str) -> int:
    blocks = RecomputedBlocks(model)
    blocks.keep_attention(blocks.names if way == "but-attention" else ())
    with LiveBytes() as live:
        model(ids, labels=ids).loss.backward()
    blocks.close()
    model.zero_grad(set_to_none=True)
    return live.take()[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("make", [gpt, llama])
def test_bytes_on_meta_are_those_of_a_run(make: Any) -> None:
    ids = torch.randint(128, (ROWS, TOKENS))
    model = make()
    run = {way: peak(model, ids, way) for way in ("blocks", "but-attention")}
    with DryRun():
        dry = {way: peak(make().to("meta"), ids.to("meta"), way) for way in run}
    assert run == dry
    assert run["but-attention"] > run["blocks"]


# -- as the plan says -------------------------------------------------------------------------------------------------

LONG = 512


def long(layers: int = LAYERS) -> GPT:
    return GPT(GPTConfig(vocab_size=128, hidden=HIDDEN, layers=layers, heads=HEADS, max_positions=LONG))


def test_a_plan_keeps_attention_alone_where_memory_is_short() -> None:
    spec = ParallelSpec.parse(dict(zero=dict(stage=3)))
    settings: dict[str, Any] = dict(batch_size=ROWS, seq_len=LONG, precision="bf16", machine=find_machine("h200"))
    found = estimate(long, spec.with_world_size(1), recompute="auto", name="it", **settings).plan
    assert found is not None
    alone = [layer for layer in found.workload.layers if layer.name.startswith(ATTENTION_OF)]
    assert [layer.kept_bytes for layer in alone] == [ROWS * LONG * (HIDDEN * 2 + HEADS * 4)] * LAYERS
    least = on_device(found.workload, found.machine, Limits(gpu_bytes=1 << 60)).peak_gpu_bytes
    seen, before = set(), 0.0
    for share in range(20, 101, 4):
        try:
            made = plan(found.workload, found.machine, Limits(gpu_bytes=least * share // 100, disk_bytes=0))
        except MemoryPlanError:
            continue
        kept = {layer.name for layer in made.layers if layer.kept}
        attention = {name for name in kept if name.startswith(ATTENTION_OF)}
        assert {ATTENTION_OF + name for name in kept - attention} <= attention
        assert not before or made.seconds <= before * (1 + 1e-9)
        before = made.seconds
        seen.add((len(kept) - len(attention), len(attention)))
    assert (LAYERS, LAYERS) in seen and (0, LAYERS) in seen, seen


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [["blocks.0", "attention of blocks.0", "attention of blocks.1"], []])
def test_what_is_alive_is_what_was_planned(names: list[str]) -> None:
    ids = torch.randint(128, (ROWS, TOKENS))
    model = gpt()
    blocks = RecomputedBlocks(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))

    def traced() -> Trace:
        with (
            StepTracer(model, memory=LiveBytes(), clock=WallClock()) as tracer,
            blocks.watched(tracer.layers),
        ):
            model(ids, labels=ids).loss.backward()
        return tracer.trace()

    seen = traced()
    dear = [replace(layer, attention_seconds=0.9 * layer.seconds) for layer in seen.layers]
    seen = replace(seen, layers=tuple(dear))
    workload = workload_of(
        seen,
        [ChunkUse(name="all", elems=1, gathered_elems=1, units={timestep.unit: 1 for timestep in seen.timesteps})],
        name="it",
        regime=REGIMES["A"],
        tokens=ROWS * TOKENS,
    )
    blocks.keep(names)
    added = sum(layer_bytes(workload)[j, int(layer.name in names)] for j, layer in enumerate(workload.layers))
    planned = [int(value) for value in workload.non_model_bytes + added]
    alive = [timestep.non_model_bytes for timestep in traced().timesteps]
    assert max(alive) == pytest.approx(max(planned), rel=0.01)
    assert all(a <= 1.02 * b for a, b in zip(alive, planned, strict=True))


@ranks(1)
def test_what_a_plan_chooses_trains_to_the_same_bits() -> None:
    seen = {}
    for way in (None, "auto"):
        zero = dict(zero=dict(stage=3, placement="auto"))
        with Engine(long, zero, optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5, recompute=way) as engine:
            losses = []
            for step in range(4):
                if engine.recomputed_blocks is not None and step:
                    names = engine.recomputed_blocks.names
                    engine.recomputed_blocks.keep([names[step], *(ATTENTION_OF + name for name in names[step - 1 :])])
                ids = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(step))
                losses.append(engine.train_step(engine.shard_batch(ids)))
            seen[way] = losses
    assert seen[None] == seen["auto"]


def test_the_command_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for recompute in ("blocks", "but-attention"):
        words = ["plan", "--model", "gpt-small", "--batch-size", "16", "--recompute", recompute, "--json"]
        assert main(words) == 0
        totals.append(capsys.readouterr().out)
    assert totals[0] != totals[1]
