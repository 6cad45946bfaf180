"""Rollouts of a server over HTTP and of transformers: their tokens and weights, and steps that make up for what differs."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from align_models import SPECS, llama
from align_models import hugging_face as theirs
from completion_server import Server, serving
from test_rollouts import COMMON, PROMPTS, SAMPLING, Numbers, grpo, ppo, small
from torch import nn

from meshfold.align import GRPO, Correction, ServerRollouts, TransformersRollouts, fit
from meshfold.engine import Engine
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks


def load(folder: Path) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model


def policy_of(seed: int = 4) -> nn.Module:
    """The policy that trainers of these tests begin with."""
    model = llama().double()
    with Engine(llama, seed=seed, precision="fp64") as engine:
        model.load_state_dict(engine.full_state_dict())
    return model


def test_a_server_samples_the_policy_of_each_step(tmp_path: Path) -> None:
    """Its weights are those of the step, so ratios are 1; it sleeps while others compute; old folders are gone."""
    with serving(policy_of(), load) as (server, url):
        trainer = grpo(rollout=lambda engine: ServerRollouts(engine, url, weights=tmp_path, sleep=True))
        found = fit(trainer, 3)
        for step in found:
            assert step["importance"] == pytest.approx(1.0, abs=1e-4)  # transformers rotates in float32
            assert step["bounded"] == step["stale"] == 0
        trainer.close()
    assert [Path(folder).name for folder in server.weights] == [f"step-{n:08d}" for n in range(3)]
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-00000002"]
    assert server.version == "2" and server.asleep
    order = [call for call in server.calls if call != "/v1/completions"]
    update = ["/pause?mode=wait", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
    slept = ["/wake_up", *update, "/sleep?level=1"]
    assert order == ["/v1/models", "/init_weight_transfer_engine", *slept[1:], *slept, *slept]


def test_seeds_and_order_of_a_server() -> None:
    """Completions come back in order, with a seed for each prompt and step."""
    with serving(policy_of(), load) as (server, url), Engine(llama, seed=4, precision="fp64") as engine:
        generator = ServerRollouts(engine, url, requests=3)
        first = generator.generate([(3, 1), (3, 1), (5,)], 2, SAMPLING)
        again = generator.generate([(3, 1), (3, 1), (5,)], 2, SAMPLING)
        assert first == again and first.version == 0
        assert len({tuple(tokens) for tokens in first.tokens}) == 6
        assert len({body["seed"] for body in server.asked}) == 3
        model = policy_of()
        for number, (tokens, logs) in enumerate(zip(first.tokens, first.logprobs, strict=True)):
            prompt = [(3, 1), (3, 1), (5,)][number // 2]
            expected = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0] / 0.9, -1)
            for place, (token, log) in enumerate(zip(tokens, logs, strict=True)):
                assert log == pytest.approx(float(expected[len(prompt) - 1 + place, token].detach()), abs=1e-9)


def test_old_weights_are_refused_or_counted() -> None:
    with serving(policy_of(), load) as (_, url):
        trainer = grpo(rollout=lambda engine: ServerRollouts(engine, url))
        with pytest.raises(SpecError, match=r"optimizer step 0 for a policy at step 1.*max_staleness=1"):
            fit(trainer, 2)
        trainer.close()
        trainer = ppo(rollout=lambda engine: ServerRollouts(engine, url), max_staleness=9, importance=dict(high=1.01))
        steps = fit(trainer, 2)
        trainer.close()
    assert [step["stale"] for step in steps] == [0, 4]  # epochs and updates: four optimizer steps
    assert steps[0]["importance"] == pytest.approx(1.0, abs=1e-9)
    assert abs(steps[1]["importance"] - 1.0) > 1e-6 and steps[1]["bounded"] > 0


def test_what_a_correction_reports() -> None:
    logs, mask = torch.tensor([[0.0, -1.0, -1.0]]), torch.tensor([[False, True, True]])
    sampled = torch.tensor([[0.0, -1.0, -1.0 - math.log(4)]])
    weights, told = Correction(dict(high=2.0), max_staleness=0).weights(logs, sampled, mask)
    assert weights.tolist() == [[1.0, 1.0, 2.0]]
    assert told == pytest.approx(dict(importance=2.5, bounded=0.5))
    with Engine(llama, seed=4) as engine, pytest.raises(SpecError, match="step 3 for a policy at step 0"):
        Correction(None, max_staleness=9).staleness(Rollouts([], [], 3), engine)


@ranks(2)
def test_one_rank_asks_a_server() -> None:
    """Two data ranks get what one process gets, though one of them has no server: it does not ask."""
    with contextlib.ExitStack() as opened:
        model = llama().double()
        with Engine(llama, SPECS["data"], seed=4, precision="fp64") as engine:
            model.load_state_dict(engine.full_state_dict())
            leads = engine.mesh.rank == 0
        url = "http://127.0.0.1:9"
        server: Server | None = None
        if leads:
            server, url = opened.enter_context(serving(model, load))
        short = Sampling(max_new_tokens=2)
        trainer = grpo(rollout=lambda engine: ServerRollouts(engine, url), parallel=SPECS["data"], sampling=short)
        [step] = fit(trainer, 1)
        assert step["importance"] == pytest.approx(1.0, abs=1e-9)
        trainer.close()
        assert server is None or len(server.asked) == 3
        with pytest.raises(SpecError, match="no server answers"):
            grpo(rollout=lambda engine: ServerRollouts(engine, "http://127.0.0.1:9"), parallel=SPECS["data"])


def transformers_grpo(method: str, **options: Any) -> GRPO:
    settings = {**COMMON, "precision": "fp32", "group": 2, **options}
    make: Any = lambda engine: TransformersRollouts(engine, method=method)  # type: ignore[arg-type]  # noqa: E731
    return GRPO(theirs, PROMPTS, [small], Numbers(), rollout=make, **settings)


@pytest.mark.parametrize("method", ["generate", pytest.param("generate_batch", marks=pytest.mark.slow)])
def test_transformers_samples_the_policy(method: str) -> None:
    """Ratios are 1 to rounding after a step too, samples repeat with their seed and differ with another."""
    trainer = transformers_grpo(method)
    for step in fit(trainer, 2):
        assert step["importance"] == pytest.approx(1.0, abs=1e-4)
        assert step["stale"] == 0
    prompts = [(3, 1), (5, 9, 2, 6)]
    sampling = Sampling(max_new_tokens=5, stop_tokens=(0,), seed=7)
    found = trainer.rollout.generate(prompts, 3, sampling)
    assert found.tokens == trainer.rollout.generate(prompts, 3, sampling).tokens
    assert found.tokens != trainer.rollout.generate(prompts, 3, Sampling(max_new_tokens=5, seed=8)).tokens
    assert len({tuple(tokens) for tokens in found.tokens}) == 6
    assert all(len(a) == len(b) for a, b in zip(found.tokens, found.logprobs, strict=True))
    trainer.close()


@ranks(2)
def test_data_ranks_share_the_prompts_of_transformers() -> None:
    trainer = transformers_grpo("generate", parallel=SPECS["data"])
    [step] = fit(trainer, 1)
    assert step["importance"] == pytest.approx(1.0, abs=1e-4)
    found = trainer.rollout.generate([(3, 1), (3, 1), (3, 1)], 2, Sampling(max_new_tokens=8, seed=7))
    assert len({tuple(tokens) for tokens in found.tokens}) == 6  # ranks draw different ones
    trainer.close()
    for name in ("tensor", "zero 3"):
        with pytest.raises(SpecError, match="whole weights"):
            transformers_grpo("generate", parallel=SPECS[name])


def test_mistakes() -> None:
    with serving(policy_of(), load) as (server, url), Engine(llama, seed=4) as engine:
        for options, words in (
            (dict(model="other"), "serves .'policy'., not model='other'"),
            (dict(logprobs="top"), "logprobs='top'"),
            (dict(requests=0), "requests=0"),
        ):
            with pytest.raises(SpecError, match=words):
                ServerRollouts(engine, url, **options)  # type: ignore[arg-type]
        generator = ServerRollouts(engine, url)
        with pytest.raises(SpecError, match="stop="):
            generator.generate([(3,)], 1, Sampling(stop=("x",)))
        with pytest.raises(SpecError, match="--logprobs-mode processed_logprobs"):
            ServerRollouts(engine, url, logprobs="raw").generate([(3,)], 1, SAMPLING)
        server.broken = ("token_ids",)
        with pytest.raises(SpecError, match="without a log-probability for each"):
            generator.generate([(3,)], 1, SAMPLING)
        server.asleep = True
        with pytest.raises(SpecError, match="/v1/completions failed with 503: the engine sleeps"):
            generator.generate([(3,)], 1, SAMPLING)
    with Engine(llama, seed=4) as engine:
        with pytest.raises(SpecError, match="no server answers"):
            ServerRollouts(engine, "http://127.0.0.1:9")
        with pytest.raises(SpecError, match="the address of a server"):
            ServerRollouts(engine, "localhost:8000")
        with pytest.raises(SpecError, match="has no generate_batch"):
            TransformersRollouts(engine)
        with pytest.raises(SpecError, match="method='beam'"):
            TransformersRollouts(engine, method="beam")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="max_staleness=-1"):
        grpo(max_staleness=-1)
