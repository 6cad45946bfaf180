"""Compiled blocks of packed documents and of completions that share a prompt: one graph for batches of any segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import build

WORDS = 48
DOCUMENTS = ([0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 5, 6, 7])
BRANCHES = ([0, 1, 2, 3, 4, 3, 4, 0], [0, 1, 2, 3, 2, 3, 2, 3], [0, 1, 2, 3, 1, 2, 3, 4])
"""Positions of rows: documents, and prompts with completions that go back to the token behind them."""
GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """The back end that makes forward and backward graphs and runs them without a compiler; counts them."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(len(graph.graph.nodes))
    return aot_eager(graph, inputs)


def own() -> nn.Module:
    torch.manual_seed(0)
    return build("llama-tiny", hidden=32, layers=3, heads=4, kv_heads=2, ffn=64, vocab_size=WORDS, max_positions=8)


def theirs() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=8,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[list[int], ...]]] = {
    "own, documents": (own, DOCUMENTS),
    "own, branches": (own, BRANCHES),
    "transformers, branches": (theirs, BRANCHES),
}
SPECS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "alone": (1, {}, {}),
    "alone, recomputed": (1, {}, dict(recompute="blocks")),
    "zero 3": (2, dict(data=2, zero=dict(stage=3, placement="cuda")), {}),
    "zero 3, recomputed": (2, dict(data=2, zero=dict(stage=3, placement="cuda")), dict(recompute="blocks")),
    "tensor": (2, dict(tensor=2), {}),
    "1f1b": (2, dict(pipeline=dict(size=2, microbatches=2)), {}),
}


def batch(step: int, rows: tuple[list[int], ...]) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(step))
    positions = torch.tensor([rows[(step + row) % len(rows)] for row in range(4)])
    return dict(input_ids=ids, labels=ids, position_ids=positions)


def train(
    case: str, parallel: dict[str, Any], compile: object, settings: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses and gradient norms, the weights, and how many graphs there were after each step."""
    torch.compiler.reset()
    GRAPHS.clear()
    made, rows = CASES[case]
    given = dict(optimizer=dict(name="adamw", lr=1e-2), precision="fp64", clip_grad_norm=0.5, **settings)
    seen: list[float] = []
    graphs: list[int] = []
    with Engine(made(), parallel, compile=compile, **given) as engine:
        for step in range(4):
            seen.append(engine.train_step(engine.shard_batch(batch(step, rows))))
            assert engine.last is not None
            seen.append(float(engine.last.grad_norm or 0.0))
            graphs.append(len(GRAPHS))
        return seen, engine.full_state_dict(), graphs


def compare(case: str, parallel: dict[str, Any], settings: dict[str, Any]) -> None:
    wanted, weights, _ = train(case, parallel, False, settings)
    found, ours, graphs = train(case, parallel, dict(backend=counting), settings)
    assert found == pytest.approx(wanted, rel=1e-9)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=f"{parallel} {name}")
    if case.startswith("transformers") and "pipeline" in parallel:
        return  # segments of a micro-batch's rows are made when the first block asks, which compiled code cannot
    assert 1 <= graphs[1] <= 3, (parallel, graphs)  # whole blocks, not their pieces around attention
    assert graphs[1:] == [graphs[1]] * 3, (parallel, graphs)


QUICK = [("own, documents", "alone, recomputed"), ("transformers, branches", "zero 3, recomputed")]


@pytest.mark.parametrize(
    ("case", "spec"),
    [
        (case, spec) if (case, spec) in QUICK else pytest.param(case, spec, marks=pytest.mark.slow)
        for case in CASES
        for spec in SPECS
    ],
)
def test_compiled_blocks_train_as_uncompiled_ones_by_one_graph(case: str, spec: str) -> None:
    ranks, parallel, settings = SPECS[spec]
    run_on_ranks(ranks, compare, case, parallel, settings)
