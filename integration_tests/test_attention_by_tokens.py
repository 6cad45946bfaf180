"""``tensor=dict(mode="1d", attention="tokens")`` beside other entries of a spec: trained as one process trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from integration_tests.composition import ADAMW, CLIP, LENGTH, MODELS, ROWS, SIZES, Run, run, train_and_go_on
from integration_tests.test_matrix import agree, check
from meshfold.engine import Engine
from meshfold.mesh import ParallelSpec, SpecError
from meshfold.mesh.spec import format_bytes
from meshfold.mesh.testing import run_on_ranks
from meshfold.planner import choose_spec, estimate
from meshfold.planner.report import traffic_table

Spec = dict[str, Any]
TOKENS: Spec = dict(tensor=dict(mode="1d", size=2, attention="tokens"))
SLOW = pytest.mark.slow


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "spec", "then"),
    [
        pytest.param("llama", dict(data=2, **TOKENS, zero=dict(stage=3)), dict(data=2, tensor=2), id="zero 3"),
        pytest.param(
            "gpt", dict(data=2, tensor=2), dict(data=2, **TOKENS, zero=dict(stage=1)), id="from 1d, zero 1", marks=SLOW
        ),
        pytest.param(
            "gpt", dict(data=2, **TOKENS, zero=dict(stage=2)), dict(data=2, tensor=2), id="zero 2", marks=SLOW
        ),
        pytest.param("llama", dict(pipeline=2, **TOKENS), dict(data=2, **TOKENS), id="pipeline"),
        pytest.param(
            "gpt", dict(pipeline=dict(size=2, schedule="zb-h1"), **TOKENS), dict(data=4), id="zb-h1", marks=SLOW
        ),
        pytest.param(
            "llama",
            dict(tensor=dict(mode="1d", size=4, overlap="auto", attention="tokens")),  # as meshfold train chooses
            dict(tensor=4),
            id="chosen for overlap auto, more ranks than key/value heads",
        ),
    ],
)
def test_it_trains_as_one_process_and_goes_on_under_another_spec(
    model: str, spec: Spec, then: Spec, tmp_path: Path
) -> None:
    runs = run_on_ranks(4, train_and_go_on, model, spec, then, str(tmp_path / "checkpoint"), 3, 1)
    check(agree([first for first, _ in runs]), model, 3)
    check(agree([second for _, second in runs]), model, 1, done=3)


def train_as_chosen(spec: ParallelSpec) -> tuple[list[float], list[float], dict[str, torch.Tensor], str]:
    """Two steps in float64, and what the engine's report says of the choice."""
    with Engine(MODELS["llama"], spec, optimizer=ADAMW, precision="fp64", clip_grad_norm=CLIP, seed=5) as engine:
        found = run(engine, 2)
        return found.losses, found.norms, found.state, "" if engine.report is None else str(engine.report)


def test_an_engine_of_ones_own_trains_as_the_plan_chose() -> None:
    """The choice is the same in every process, the report lists it, and losses, norms and weights are those of one process."""
    auto = dict(tensor=dict(mode="1d", size=2, overlap="auto"))
    spec = choose_spec(MODELS["llama"], auto, 2, batch_size=ROWS, seq_len=LENGTH)
    assert spec.tensor is not None and spec.tensor.chosen
    tokens = ParallelSpec.parse(dict(tensor={**auto["tensor"], "attention": "tokens"}), 2)
    as_tokens = replace(tokens, tensor=replace(spec.tensor, attention="tokens"))
    serial = run_on_ranks(1, train_as_chosen, ParallelSpec.parse({}, 1))[0]
    for each in (spec, as_tokens):
        losses, norms, state, report = run_on_ranks(2, train_as_chosen, each)[0]
        assert losses == pytest.approx(serial[0], rel=1e-9) and norms == pytest.approx(serial[1], rel=1e-9)
        for name, value in serial[2].items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=name)
        assert f"overlap='auto' chose {spec.tensor.chosen}" in report


def hugging_face(kv_heads: int = 2) -> nn.Module:
    """A small ``LlamaForCausalLM``."""
    import transformers

    model: nn.Module = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SIZES["vocab_size"],
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=kv_heads,
            max_position_embeddings=16,
            tie_word_embeddings=False,
        )
    )
    return model


def train_hugging_face(parallel: Spec) -> Run:
    """Three steps in float64, every block recomputed."""
    with Engine(
        hugging_face,
        parallel,
        optimizer=ADAMW,
        precision="fp64",
        clip_grad_norm=CLIP,
        gradient_accumulation=2,
        recompute="blocks",
        seed=5,
    ) as engine:
        return run(engine, 3)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=SLOW), pytest.param(0, marks=SLOW)])
def test_hugging_face_llama_recomputed_in_float64(stage: int) -> None:
    """As under plain ``tensor=2``, to 1e-9; one process rounds its norms and angles to float32, as transformers writes them."""
    pytest.importorskip("transformers")
    spec = dict(data=2, **TOKENS, **(dict(zero=dict(stage=stage)) if stage else {}))
    found = agree(run_on_ranks(4, train_hugging_face, spec))
    for other, tolerance in ((dict(data=2, tensor=2), 1e-9), ({}, 1e-5)):
        wanted = run_on_ranks(4 if other else 1, train_hugging_face, other)[0]
        assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
        assert found.norms == pytest.approx(wanted.norms, rel=tolerance)
        assert all(norm > CLIP for norm in wanted.norms), "clipping has to be at work"
        for name, value in wanted.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=tolerance, atol=tolerance, msg=name)
    assert found.differing == []


def test_heads_that_do_not_divide_are_refused_before_the_start() -> None:
    spec = dict(tensor=dict(mode="1d", size=3, attention="tokens"))
    with pytest.raises(SpecError, match=r"8 attention heads cannot be split over tensor \(3 blocks\)"):
        estimate(hugging_face, ParallelSpec.parse(spec, 3), batch_size=3, seq_len=8)


def test_a_plan_says_what_the_next_product_waits_for() -> None:
    """By hand for four ranks: of two blocks, the exchanges, and one sum of attention's weights in float32, in a bucket that counts
    their uses, however many micro-steps there are.
    """
    sizes: Spec = dict(batch_size=4, seq_len=8, precision="fp32")
    parallel = ParallelSpec.parse(dict(tensor=dict(mode="1d", size=4, attention="tokens")), 4)
    found = estimate(MODELS["llama"], parallel, **sizes)
    other = estimate(MODELS["llama"], ParallelSpec.parse(dict(tensor=4, sequence=dict(mode="megatron")), 4), **sizes)
    (weights,) = (entry for entry in found.traffic if entry.phase == "weights")
    layers, hidden, kv, repeat, tokens = SIZES["layers"], SIZES["hidden"], 2 * 4, 2, 4 * 8
    qkv = hidden + 2 * kv
    assert (weights.kind, weights.axes, weights.calls) == ("all_reduce", ("tensor",), 1)
    assert weights.bytes == found.hideable == 2 * 3 / 4 * layers * ((qkv + hidden) * hidden + 2) * 4
    twice = estimate(MODELS["llama"], parallel, accumulate=2, **sizes)
    assert [entry for entry in twice.traffic if entry.phase == "weights"] == [weights]
    exchanged = sum(entry.bytes for entry in found.traffic if entry.kind == "all_to_all")
    assert exchanged == 2 * 3 / 4 * layers * tokens / 4 * (hidden + 2 * kv * repeat + hidden) * 4
    assert found.critical < other.critical and not [entry for entry in other.traffic if entry.phase == "weights"]
    assert f"hideable, gradients and parameters: {format_bytes(weights.bytes)}" in traffic_table(found)
    assert "hideable" not in traffic_table(other)
