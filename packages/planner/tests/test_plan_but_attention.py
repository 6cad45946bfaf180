"""``recompute="but-attention"``: a plan counts the results of attention that are kept, and attention once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.cli import main
from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.mesh import ParallelSpec
from meshfold.mesh.model_io import DryRun, LiveBytes
from meshfold.models import GPT, GPTConfig, build
from meshfold.planner import Estimate, estimate, find_machine

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


@pytest.mark.parametrize("name", SPECS)
def test_a_plan_counts_what_is_kept_by_hand(name: str) -> None:
    parallel, parts = SPECS[name]
    found = {
        (way, layers): planned(way, parallel, partial(gpt, layers))
        for way in (None, "blocks", "but-attention")
        for layers in (LAYERS, 2 * LAYERS)
    }

    def more(way: str) -> int:
        """Bytes of more layers: only these are kept all the time."""
        return found[way, 2 * LAYERS].memory.activations - found[way, LAYERS].memory.activations

    assert more("but-attention") - more("blocks") == LAYERS * kept_bytes() // parts
    without, blocks, but = (found[way, LAYERS].flops for way in (None, "blocks", "but-attention"))
    assert without < but < blocks
    assert blocks - but == 2 * 2 * ROWS * TOKENS * TOKENS * HIDDEN * LAYERS // parts


def peak(model: nn.Module, ids: Tensor, way: str) -> int:
    blocks = RecomputedBlocks(model)
    blocks.keep_attention(blocks.names if way == "but-attention" else ())
    with LiveBytes() as live:
        model(ids, labels=ids).loss.backward()
    blocks.close()
    model.zero_grad(set_to_none=True)
    return live.take()[0]


@pytest.mark.parametrize("make", [gpt, llama])
def test_bytes_on_meta_are_those_of_a_run(make: Any) -> None:
    ids = torch.randint(128, (ROWS, TOKENS))
    model = make()
    run = {way: peak(model, ids, way) for way in ("blocks", "but-attention")}
    with DryRun():
        dry = {way: peak(make().to("meta"), ids.to("meta"), way) for way in run}
    assert run == dry
    assert run["but-attention"] > run["blocks"]


def test_the_command_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    totals = []
    for recompute in ("blocks", "but-attention"):
        words = ["plan", "--model", "gpt-small", "--batch-size", "16", "--recompute", recompute, "--json"]
        assert main(words) == 0
        totals.append(capsys.readouterr().out)
    assert totals[0] != totals[1]
