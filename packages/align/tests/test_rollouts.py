"""Training on own samples: rollouts are the trainer's policy, samples differ, and steps under every spec equal one process."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from align_models import SPECS, SPECS_OF_4, llama

from meshfold.align import (
    GRPO,
    PPO,
    Completion,
    EngineRollouts,
    Objective,
    Prompt,
    RewardModel,
    Terms,
    TokenValues,
    fit,
    mean_of_tokens,
    rollout,
    scorer,
)
from meshfold.engine import Engine
from meshfold.inference import Rollouts, Sampling
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks

SAMPLING = Sampling(max_new_tokens=6, temperature=0.9)


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    end = 0

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Any) -> str:
        return " ".join(str(i) for i in ids if i)


PROMPTS = [
    Prompt(ids=ids, given=" ".join(map(str, ids)), columns=dict(wanted=n))
    for n, ids in enumerate(((3, 1), (5, 9, 2, 6), (8,), (4, 4, 4)), 5)
]


def small(completions: list[str], **columns: Any) -> list[float]:
    """Reward of small numbers, from 0 to 1."""
    return [sum(int(w) < 12 for w in text.split()) / max(len(text.split()), 1) for text in completions]


def of_column(prompts: list[str], completions: list[str], wanted: list[int], **columns: Any) -> list[float | None]:
    """Reward for the number in the record's column; none for one of the prompts, whose group is left empty by it."""
    return [
        None if p == "8" else float(str(w) in c.split()) for p, c, w in zip(prompts, completions, wanted, strict=True)
    ]


COMMON: dict[str, Any] = dict(
    sampling=SAMPLING, precision="fp64", optimizer=dict(name="sgd", lr=0.5, momentum=0.9), seed=4, batch_size=3
)


OF_PPO: dict[str, Any] = dict(batch_size=4, updates=2, critic_optimizer=dict(name="sgd", lr=0.02))


def grpo(**options: Any) -> GRPO:
    return GRPO(llama, PROMPTS, [small, of_column], Numbers(), **{"group": 4, **COMMON, **options})


def ppo(**options: Any) -> PPO:
    return PPO(llama, scorer(llama), PROMPTS, [small], Numbers(), **{**COMMON, **OF_PPO, **options})


def test_rollouts_are_of_the_policy_and_differ() -> None:
    trainer = grpo(beta=0.1)
    policy = trainer.engines["policy"]
    prompts = [p.ids for p in PROMPTS]
    found = trainer.rollout.generate(prompts, 3, SAMPLING)
    again = trainer.rollout.generate(prompts, 3, SAMPLING)
    assert found == again and found.version == 0
    assert len({tuple(ids) for ids in found.tokens}) > 9  # one seed each
    other = trainer.rollout.generate(prompts, 3, Sampling(max_new_tokens=6, temperature=0.9, seed=1))
    assert other.tokens != found.tokens
    model = llama().double()
    model.load_state_dict(policy.full_state_dict())
    for number, (ids, logs) in enumerate(zip(found.tokens, found.logprobs, strict=True)):
        prompt = prompts[number // 3]
        whole = torch.tensor([[*prompt, *ids]])
        expected = torch.log_softmax(model(whole).logits[0] / 0.9, -1)
        for place, (token, log) in enumerate(zip(ids, logs, strict=True)):
            assert log == pytest.approx(float(expected[len(prompt) - 1 + place, token].detach()), abs=1e-9)
    trainer.close()


def rows_of(tokens: list[list[int]], n: int) -> dict[str, torch.Tensor]:
    """Rows of a prompt and a completion, whose tokens alone are labels."""
    prompts = [prompt.ids for prompt in PROMPTS for _ in range(n)]
    length = max(len(prompt) + len(ids) for prompt, ids in zip(prompts, tokens, strict=True))
    input_ids = torch.zeros(len(tokens), length, dtype=torch.int64)
    labels = torch.full_like(input_ids, -100)
    for row, (prompt, ids) in enumerate(zip(prompts, tokens, strict=True)):
        input_ids[row, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        labels[row, len(prompt) : len(prompt) + len(ids)] = torch.tensor(ids)
    return dict(input_ids=input_ids, labels=labels)


def agree_with_scores(specs: Mapping[str, dict[str, Any]]) -> None:
    """A rollout's log-probabilities are those of the trainer's forward, and training's those of scoring to the bit."""
    for name, spec in specs.items():
        seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def terms(values: TokenValues, batch: Mapping[str, Any], seen: list[Any] = seen) -> Terms:
            if values.log_probs.requires_grad:  # of a training step
                seen.append((batch["number"], values.log_probs.detach().clone(), batch["labels"] != -100))
            return Terms(loss=[mean_of_tokens(-values.log_probs, batch["labels"] != -100)])

        objective = Objective(terms, fields=("number",), temperature=0.9)
        with Engine(llama, spec, precision="fp64", optimizer=dict(name="sgd", lr=0.1), loss_fn=objective) as engine:
            objective.attach(engine)
            found = EngineRollouts(engine).generate([prompt.ids for prompt in PROMPTS], 2, SAMPLING)
            batch = rows_of(found.tokens, 2)
            batch["number"] = torch.arange(len(found.tokens))
            scored = objective.score(batch).log_probs
            own = [log for row, mask in zip(scored, batch["labels"] != -100, strict=True) for log in row[mask].tolist()]
            assert own == pytest.approx([log for logs in found.logprobs for log in logs], rel=1e-12, abs=1e-12), name
            objective.step([batch])
            for number, logs, mask in seen:
                assert torch.equal(logs[mask], scored[number, : logs.shape[1]][mask]), name
            assert seen or "pipeline" in spec, name  # the last stage alone has them
            objective.close()


@ranks(2)
def test_a_rollout_says_what_the_trainer_says() -> None:
    agree_with_scores({"tensor": SPECS["tensor"]})


@pytest.mark.slow
@ranks(2)
def test_a_rollout_says_what_the_trainer_says_in_more_specs() -> None:
    agree_with_scores({name: SPECS[name] for name in ("data", "zero 3", "pipeline", "sequence")})


@pytest.mark.slow
@ranks(4)
def test_a_rollout_says_what_the_trainer_says_on_4() -> None:
    agree_with_scores(SPECS_OF_4)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_a_step_is_that_of_a_plain_loop(kind: str) -> None:
    trainer = grpo(kind=kind, beta=0.2, batch_size=4, group=3, high=0.3)
    policy = trainer.engines["policy"]
    with torch.no_grad():  # so that the reference differs
        state = policy.full_state_dict()
        policy.load_state_dict({name: value + 0.02 * torch.sin(value * 9) for name, value in state.items()})
    before = llama().double()
    before.load_state_dict(state)
    model = llama().double()
    model.load_state_dict(policy.full_state_dict())
    seen: list[Rollouts] = []
    real = trainer.rollout

    class Seen:
        exact = True

        def generate(self, *given: Any) -> Rollouts:
            seen.append(real.generate(*given))
            self.prompts = given[0]
            return seen[-1]

    trainer.rollout = watched = Seen()
    trainer.step(0)

    rows = []
    for number, ids in enumerate(seen[0].tokens):
        prompt = watched.prompts[number // 3]
        columns = next(p for p in PROMPTS if p.ids == tuple(prompt))
        text = Numbers().decode(ids)
        reward = small([text])[0]
        wanted = of_column([columns.given], [text], [columns.columns["wanted"]])[0]
        counts = (False,) * len(prompt) + (True,) * len(ids)
        one = Completion(ids=(*prompt, *ids), counts=counts)

        def logs(m: Any, one: Completion = one) -> torch.Tensor:
            return torch.log_softmax(m(torch.tensor([one.ids])).logits[0] / 0.9, -1)[:-1].gather(
                1, torch.tensor(one.ids)[1:, None]
            )[:, 0][sum(not c for c in one.counts) - 1 :]

        with torch.no_grad():
            reference = logs(before)
        rows.append((logs(model), reference, reward + (0.0 if wanted is None else wanted)))
    losses, tokens = [], 0
    for number, (now, reference, _) in enumerate(rows):
        group = [rows[i] for i in range(number // 3 * 3, number // 3 * 3 + 3)]
        rewards = [r - (0.2 * float((n.detach() - o).sum()) if kind == "rloo" else 0.0) for n, o, r in group]
        mine = rewards[number % 3]
        if kind == "rloo":
            advantage = mine - (sum(rewards) - mine) / 2
        else:
            mean = sum(rewards) / 3
            spread = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 2)
            advantage = (mine - mean) / (1.0 if kind == "dr_grpo" else spread + 1e-4)
        each = -(now - now.detach()).exp() * advantage
        if kind != "rloo":
            each = each + 0.2 * (torch.exp(reference - now) - (reference - now) - 1)
        tokens += len(each)
        losses.append(each.mean() if kind == "grpo" else each.sum())
    total = torch.stack(losses).sum()
    loss = total / {"grpo": 12, "dr_grpo": 12 * 6, "dapo": tokens, "rloo": 12}[kind]
    loss.backward()  # type: ignore[no-untyped-call]
    found = policy.full_state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.detach() - 0.5 * parameter.grad, rtol=1e-9, atol=1e-9)
    trainer.close()


TRAINERS: dict[str, Callable[..., Any]] = dict(
    grpo=lambda **o: grpo(beta=0.1, mask_truncated=True, **o),
    dapo=lambda **o: grpo(kind="dapo", updates=3, high=0.28, **o),
    ppo=ppo,
)


SOME = [("grpo", "zero 3"), ("dapo", "pipeline"), ("ppo", "tensor")]


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, list[dict[str, float]]]:
    found = {}
    for name, make in TRAINERS.items():
        trainer = make()
        found[name] = fit(trainer, 3)
        trainer.close()
    return found


@pytest.mark.parametrize(
    ("pairs", "steps"),
    [
        (SOME, 2),
        pytest.param([*SOME, ("grpo", "data"), ("ppo", "zero 3")], 3, marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
@ranks(2)
def test_steps_equal_one_process(
    of_one_process: dict[str, list[dict[str, float]]], pairs: list[tuple[str, str]], steps: int
) -> None:
    for name, spec in pairs:
        trainer = TRAINERS[name](parallel=SPECS[spec])
        for found, expected in zip(fit(trainer, steps), of_one_process[name][:steps], strict=True):
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-8), (name, spec)
        trainer.close()


def test_the_steps_learn_something(of_one_process: dict[str, list[dict[str, float]]]) -> None:
    for name, steps in of_one_process.items():
        assert any(step["loss"] != 0 for step in steps[1:])
        assert all(math.isfinite(value) for step in steps for value in step.values()), name
    assert of_one_process["grpo"][1]["ended"] == 0  # nothing counts in this step
    assert of_one_process["grpo"][1]["loss"] == 0
    assert len({step["reward"] for step in of_one_process["grpo"]}) == 3  # other samples in each step


def test_a_resumed_run_equals_an_uninterrupted_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = fit(ppo(), 3, f"{folder}/a")
        assert [*fit(ppo(), 1, f"{folder}/b"), *fit(ppo(), 3, f"{folder}/b", resume=True)] == whole


def test_another_generator_is_weighed() -> None:
    """A generator whose log-probabilities are off by log 3 gets weights of 1/3, or of the bound."""

    class Foreign(EngineRollouts):
        exact = False  # type: ignore[misc]

        def generate(self, prompts: Any, n: int, sampling: Sampling) -> Rollouts:
            found = super().generate(prompts, n, sampling)
            return Rollouts(found.tokens, [[log + math.log(3) for log in logs] for logs in found.logprobs], 0)

    states = []
    for importance, lr in ((dict(high=2.0), 0.3), (dict(low=0.5, outside="drop"), 0.3), (None, 0.1)):
        own = importance is None
        trainer = grpo(
            rollout=EngineRollouts if own else Foreign, importance=importance, optimizer=dict(name="sgd", lr=lr)
        )
        fit(trainer, 1)
        states.append(copy.deepcopy(trainer.engines["policy"].full_state_dict()))
        trainer.close()
    start = llama()
    with Engine(llama, seed=4, precision="fp64") as engine:
        start.double().load_state_dict(engine.full_state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(
            value, states[2][name], rtol=1e-9, atol=1e-9
        )  # a third of the weight, three times the rate
        torch.testing.assert_close(states[1][name], start.state_dict()[name], rtol=1e-9, atol=1e-9)  # all dropped


def test_a_reward_model_scores_completions() -> None:
    model = RewardModel(scorer(llama), [], precision="fp64", seed=1)
    trainer = GRPO(llama, PROMPTS, [model], Numbers(), group=2, **COMMON)
    metrics = fit(trainer, 1)
    plain = scorer(llama)().double()
    plain.load_state_dict(model.engines["policy"].full_state_dict())
    one = Completion(ids=(3, 1, 7), counts=(False, False, True))
    other = Completion(ids=(5,), counts=(True,))
    expected = [plain(torch.tensor([c.ids])).logits[0, -1, 0] for c in (one, other)]
    torch.testing.assert_close(model.scores([one, other]), torch.stack(expected).detach(), rtol=1e-9, atol=1e-9)
    assert metrics[0]["reward"] != 0
    trainer.close()
    model.close()


def failing(completions: list[str], **columns: Any) -> list[float]:
    raise ValueError("no such judge")


def judged(returned: Any) -> Any:
    """A step with a reward function that returns this."""
    return fit(GRPO(llama, PROMPTS, [lambda **columns: returned], Numbers(), group=2, **COMMON), 1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grpo(kind="grop"), "Did you mean 'grpo'"),
        (lambda: grpo(group=1), "2 or more"),
        (lambda: grpo(updates=5), "a divisor of 12"),
        (lambda: grpo(beta=-0.1), "beta=-0.1"),
        (lambda: grpo(low=2.0), "low=2.0"),
        (lambda: grpo(reward_weights=[1.0]), "1 weights for 2 rewards"),
        (lambda: ppo(epochs=0), "epochs=0"),
        (lambda: ppo(gamma=2.0), "gamma=2.0"),
        (lambda: GRPO(llama, PROMPTS, [], Numbers()), "at least one"),
        (lambda: fit(GRPO(llama, PROMPTS, [failing], Numbers(), group=2, **COMMON), 1), "no such judge"),
        (lambda: fit(GRPO(llama, PROMPTS, [failing], Numbers(), group=2, **COMMON), 1), "in failing"),
        (
            lambda: judged(["good"] * 6),
            "<lambda> returned 'good' for completion 0 of 6: return a finite number, or None",
        ),
        (lambda: judged([0.0, math.inf] * 3), "returned inf for completion 1 of 6"),
        (lambda: judged([[1.0]] * 6), "returned [1.0] for completion 0 of 6"),
        (lambda: judged(0.5), "returned 0.5: return a list with a number for each completion"),
        (lambda: judged([0.5]), "returned 1 rewards for 6 completions"),
    ],
)
def test_mistakes(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SpecError) as told:
        make()
    assert words in str(told.value)


def test_a_generator_that_is_kept_samples_as_a_new_one() -> None:
    """With other weights, shorter and longer prompts, and after prompts that were refused."""
    short, long = [[3, 1], [8]], [[4] * 20, [8]]
    with Engine(lambda: llama(), dict()) as engine:
        kept, makes = EngineRollouts(engine, keeps=True), []
        made = rollout.Generator
        with mock.patch.object(
            rollout, "Generator", lambda *args, **of: makes.append(of["tokens"]) or made(*args, **of)
        ):
            for prompts in (short, short, long, short, long):
                assert kept.generate(prompts, 2, SAMPLING) == EngineRollouts(engine).generate(prompts, 2, SAMPLING)
                with torch.no_grad():
                    next(engine.model.parameters()).mul_(1.1)
            assert [makes.count(tokens) for tokens in (4 * 16, 4 * 32)] == [1 + 3, 1 + 2]
            with pytest.raises(SpecError):
                kept.generate([[8], [3] * 10_000], 2, SAMPLING)
            assert kept.generate(short, 2, SAMPLING) == EngineRollouts(engine).generate(short, 2, SAMPLING)
