"""Hugging Face models with compiled blocks train as uncompiled ones, and each kind of block is compiled once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import CAUSAL, SEQ2SEQ, batch_of, model_of

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)

STEPS = 3
EXACT: dict[str, dict[str, Any]] = {"mixtral": dict(experts_implementation="eager")}
"""Grouped matmuls are not for float64."""
GRAPHS: list[int] = []


def counting(graph: Any, inputs: Any) -> Any:
    """The back end that makes forward and backward graphs and runs them without a compiler; counts them."""
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(len(graph.graph.nodes))
    return aot_eager(graph, inputs)


def train(
    kind: str, parallel: dict[str, Any], compile: object, recompute: str | None
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    torch.compiler.reset()
    GRAPHS.clear()
    model = model_of(kind)
    if kind in EXACT:
        model.config._experts_implementation = EXACT[kind]["experts_implementation"]
    seen, graphs = [], []
    with Engine(
        model.train(),
        parallel,
        optimizer=dict(name="adamw", lr=1e-2),
        precision="fp64",
        clip_grad_norm=0.5,
        recompute=recompute,
        compile=compile,
        example=batch_of(kind) if kind in ("vit", *SEQ2SEQ) else None,
    ) as engine:
        for step in range(STEPS):
            batch = engine.shard_batch(batch_of(kind, seed=step))
            seen += [engine.train_step(batch), engine.eval_step(batch)]
            graphs.append(len(GRAPHS))
        return seen, engine.full_state_dict(), graphs


def compare(kind: str, parallel: dict[str, Any], recompute: str | None = None) -> None:
    wanted, weights, _ = train(kind, parallel, False, recompute)
    found, ours, graphs = train(kind, parallel, dict(backend=counting), recompute)
    assert found == pytest.approx(wanted, rel=1e-9)
    assert list(ours) == list(weights)
    for name, value in weights.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-7, atol=1e-9, msg=f"{parallel} {name}")
    assert graphs[1] >= 1
    if recompute == "auto":  # a plan that measured steps correct recomputes others, whose forward has no gradients
        assert graphs[-1] <= 2, graphs
    elif kind != "mixtral":  # its experts get other numbers of tokens in every step
        assert graphs[1:] == [graphs[1]] * (STEPS - 1), graphs


SPECS: dict[str, dict[str, Any]] = {
    "zero 3, host": dict(data=2, zero=dict(stage=3, placement="cpu")),
    "zero 3": dict(data=2, zero=dict(stage=3, placement="cuda")),
    "tensor": dict(tensor=2),
    "1f1b": dict(pipeline=dict(size=2, microbatches=2)),
}
ENCODERS = ("bert", "bert-classes", "distilbert", "modernbert", "vit")
KINDS = (*CAUSAL, *ENCODERS, *SEQ2SEQ)
QUICK = [("qwen3", "tensor"), ("mbart", "zero 3")]
"""Blocks of encoders are in the second, and chunks on the host in the test of recomputed blocks."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        (kind, spec) if (kind, spec) in QUICK else pytest.param(kind, spec, marks=pytest.mark.slow)
        for kind in KINDS
        for spec in SPECS
    ],
)
def test_compiled_blocks_train_as_eager_ones(kind: str, spec: str) -> None:
    run_on_ranks(2, compare, kind, SPECS[spec])


def test_recomputed() -> None:
    run_on_ranks(2, compare, "llama", SPECS["zero 3, host"], "blocks")


@pytest.mark.slow  # plans and watches
@pytest.mark.parametrize("recompute", [None, "blocks", "auto"])
def test_planned(recompute: str | None) -> None:
    run_on_ranks(2, compare, "llama", dict(data=2, zero=dict(stage=3, placement="auto")), recompute)
