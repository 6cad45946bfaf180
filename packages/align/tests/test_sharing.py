"""Completions that share their prompt in one row: the same losses and gradients as without, under every spec, in fewer tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from align_models import SPECS, WORDS, gpt, llama
from hypothesis import given
from hypothesis import strategies as st
from test_rollouts import COMMON as OF_SAMPLES
from test_rollouts import PROMPTS, Numbers, small
from test_trainers import COMMON, completion, pairs
from torch import Tensor, nn

from meshfold.align import DPO, GRPO, Preference, RewardModel, TokenValues, fit, group_rows, pair_rows, scorer, unfolded
from meshfold.engine import Engine
from meshfold.kernels import Segment, Segments
from meshfold.mesh import SpecError
from meshfold.mesh.model_io import IGNORE_INDEX, branch_starts, segments_of, visible
from meshfold.mesh.testing import ranks
from meshfold.models import Llama, LlamaConfig


def test_who_sees_whom() -> None:
    """A prompt of 2 tokens, completions of 2 and 1 behind it, and another document of 2."""
    positions = torch.tensor([[0, 1, 2, 3, 2, 0, 1]])
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [5], [5, 6]]
    assert [row.nonzero().flatten().tolist() for row in visible(positions)[0]] == expected
    assert branch_starts(positions).nonzero().tolist() == [[0, 4]]
    windowed = [[0], [0, 1], [1, 2], [2, 3], [1, 4], [5], [5, 6]]  # by positions: token 4 is next to token 1
    assert [row.nonzero().flatten().tolist() for row in visible(positions, 2)[0]] == windowed


def test_what_is_no_branch() -> None:
    """Positions that jump beyond the document, or of padding on the left, begin documents."""
    for positions in ([0, 1, 7, 8], [1, 1, 1, 0, 1, 2], [5, 6, 3, 4], [0, 1, 0, 1, 2]):
        assert not branch_starts(torch.tensor([positions])).any()
    assert visible(torch.tensor([[0, 1, 7, 8]]))[0, 3].tolist() == [False, False, True, True]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=6))
def test_segments_see_what_the_mask_says(runs: list[tuple[int, int]]) -> None:
    positions = torch.tensor([[start + i for start, count in runs for i in range(count)]])
    rows = [[Segment(*one) for one in row] for row in segments_of(positions)]
    assert torch.equal(Segments(rows, positions.shape[1], positions.device).seen(), visible(positions))


def test_shared_prompts_make_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(*args: Any) -> Tensor:
        raise AssertionError("a mask of all tokens was made")

    for where in ("meshfold.models.attention", "meshfold.engine.batches.branches"):
        monkeypatch.setattr(f"{where}.visible", mask)
    for model, kernels in ((llama, "auto"), (hugging_face("Llama"), "off")):
        assert fit(dpo_of(model, kernels=kernels)(shared_prompt=True), 1)[0]["loss"] == pytest.approx(math.log(2))


def long_pair(prompt: int, chosen: int, rejected: int) -> Preference:
    asked = list(range(prompt))
    return Preference(chosen=completion(asked, [1] * chosen), rejected=completion(asked, [2] * rejected))


def test_tokens_of_rows() -> None:
    """The prompt is there once, and its last token once more for the second completion, whose first token it predicts."""
    both = [long_pair(512, 512, 512)]
    assert pair_rows(both)["input_ids"].shape == (1, 2048)
    shared = pair_rows(both, shared=True)
    assert int((shared["branch"] > 0).sum()) == 1024 and int((shared["position_ids"] == 511).sum()) == 2
    assert shared["input_ids"].shape == (1, 1552)  # 1,537 tokens, and padding to a multiple of 16
    group = [completion(list(range(512)), [n] * 512) for n in range(8)]
    assert group_rows(group, 8)["input_ids"].shape == (1, -(-(512 + 8 * 512 + 7) // 16) * 16)


def test_groups_are_unfolded() -> None:
    """Completions come back from their row as they were, also empty ones and those of a prompt of one token."""
    group = [completion([5, 6, 7], [1, 2]), completion([5, 6, 7], []), completion([5, 6, 7], [3])]
    other = [completion([4], [9]), completion([4], [9, 8, 7, 6, 5]), completion([4], [])]
    rows = group_rows([*group, *other], 3)
    values, batch = unfolded(TokenValues(log_probs=rows["input_ids"].double()), rows)
    for one, ids, labels in zip([*group, *other], values.log_probs.tolist(), batch["labels"].tolist(), strict=True):
        assert ids[: len(one.ids)] == [float(i) for i in one.ids]
        wanted = [token if counts else IGNORE_INDEX for token, counts in zip(one.ids, one.counts, strict=True)]
        assert labels == wanted + [IGNORE_INDEX] * (len(labels) - len(one.ids))


@contextmanager
def norms_in_float64() -> Iterator[None]:
    """Keep transformers' norms from rounding to float32, which would hide what differs by less."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        made: Tensor = self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return made

    classes: tuple[Any, ...] = (LlamaRMSNorm, Qwen3RMSNorm)
    before = [one.forward for one in classes]
    for one in classes:
        one.forward = forward
    try:
        yield
    finally:
        for one, old in zip(classes, before, strict=True):
            one.forward = old


def hugging_face(kind: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            head_dim=8,
        )
        config = getattr(transformers, f"{kind}Config")(**{**sizes, "attn_implementation": "sdpa", **options})
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model

    return make


def after_a_step(trainer: Any, shared: bool) -> tuple[float, dict[str, Tensor]]:
    """The loss of the second step, and the weights after it: two steps of gradients are in them."""
    assert trainer.shared_prompt.on is shared
    loss = fit(trainer, 2)[-1]["loss"]
    state = trainer.engines["policy"].full_state_dict()
    if shared:
        assert trainer.shared_prompt.tokens < trainer.shared_prompt.unshared_tokens
    trainer.close()
    return loss, state


def check(make: Callable[..., Any]) -> None:
    (loss, found), (expected, state) = (after_a_step(make(shared_prompt=on), on) for on in (True, False))
    assert loss == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for name, value in found.items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


def dpo_of(model: Callable[[], nn.Module], **options: Any) -> Callable[..., DPO]:
    return lambda **more: DPO(model, pairs(), **{**COMMON, **options, **more})


def grpo_of(model: Callable[[], nn.Module], **options: Any) -> Callable[..., GRPO]:
    settings = {**OF_SAMPLES, "group": 3, "beta": 0.1, **options}
    return lambda **more: GRPO(model, PROMPTS, [small], Numbers(), **{**settings, **more})


WINDOWED = LlamaConfig(vocab_size=WORDS, hidden=16, layers=2, heads=2, kv_heads=1, window=3)


def test_shared_prompts_on_one_rank() -> None:
    for model in (llama, gpt, lambda: Llama(WINDOWED)):
        check(dpo_of(model))
    check(dpo_of(llama, loss="orpo", micro_steps=2, length=9))
    check(lambda **more: RewardModel(scorer(llama), pairs(), centering=0.1, **{**COMMON, **more}))
    for kind in ("grpo", "rloo", "dapo"):
        check(grpo_of(llama, kind=kind, mask_truncated=True))
    check(grpo_of(llama, micro_steps=3, importance=dict(high=2.0)))


def test_shared_prompts_of_hugging_face() -> None:
    with norms_in_float64():
        for kind in ("Llama", "Qwen3"):
            check(dpo_of(hugging_face(kind), kernels="off"))
        # Eager attention takes its softmax in float32, whose rounding is seen.
        trainer = dpo_of(hugging_face("Llama", attn_implementation="eager"), kernels="off")
        losses = [fit(trainer(shared_prompt=on), 1)[0]["chosen_reward"] for on in (True, False)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@ranks(2)
def test_shared_prompts_on_2() -> None:
    for name in ("zero 3", "tensor", "pipeline"):
        check(dpo_of(llama, parallel=SPECS[name]))
    check(grpo_of(gpt, parallel=SPECS["data"]))
    trainer = dpo_of(llama, parallel=SPECS["sequence"])
    assert "under 'sequence'" in str(trainer().shared_prompt)
    with pytest.raises(SpecError, match="under 'sequence'"):
        trainer(shared_prompt=True)


@pytest.mark.slow
@ranks(2)
def test_shared_prompts_on_2_in_more_specs() -> None:
    with norms_in_float64():
        for model in (llama, gpt):
            check(dpo_of(model, parallel=SPECS["data"]))
        check(grpo_of(llama, parallel=SPECS["data"]))
        for name in ("data", "zero 3", "tensor", "pipeline"):
            for kind in ("Llama", "Qwen3"):
                check(dpo_of(hugging_face(kind), kernels="off", parallel=SPECS[name]))
            of_scores = {**COMMON, "parallel": SPECS[name]}
            check(lambda of=of_scores, **more: RewardModel(scorer(gpt), pairs(), **{**of, **more}))
            check(grpo_of(gpt, parallel=SPECS[name]))


@ranks(2)
def test_shared_prompts_of_hugging_face_on_2() -> None:
    with norms_in_float64():
        check(dpo_of(hugging_face("Qwen3"), kernels="off", parallel=SPECS["pipeline"]))
        check(dpo_of(hugging_face("Llama"), kernels="off", parallel=SPECS["tensor"]))


def test_long_rows_of_groups_are_left_alone() -> None:
    """With a mask 16 long completions of a short prompt in one row would take longer; within segments they never do."""
    free = grpo_of(llama)().shared_prompt
    auto = grpo_of(lambda: Llama(replace(WINDOWED, window=600)))().shared_prompt
    assert auto.on
    assert free.shares([[completion([1, 2], [n] * 500) for n in range(16)]])
    assert not auto.shares([[completion([1, 2], [n] * 500) for n in range(16)]])
    assert "would take longer" in str(auto)
    assert auto.tokens == auto.unshared_tokens
    assert auto.shares([[completion([1] * 900, [n]) for n in range(16)]])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (dpo_of(hugging_face("Mistral", sliding_window=4), kernels="off"), "a window of 4 tokens for documents of 13"),
        (
            dpo_of(hugging_face("Mistral", attn_implementation="flex_attention"), kernels="off"),
            "takes no mask of tokens",
        ),
        (grpo_of(llama, updates=3), "updates divide a group's completions"),
        (grpo_of(llama, micro_steps=5), "micro_steps=5 divide 3 groups"),
    ],
)
def test_models_that_cannot_share(make: Callable[..., Any], words: str) -> None:
    assert words in str(make().shared_prompt)
    assert not make().shared_prompt.on
    with pytest.raises(SpecError) as told:
        make(shared_prompt=True)
    assert words in str(told.value)


def test_mistakes() -> None:
    with pytest.raises(SpecError, match="shared_prompt='always'"):
        dpo_of(llama)(shared_prompt="always")
    ids = torch.arange(1, 8)[None]
    branched = dict(input_ids=ids, labels=ids, position_ids=torch.tensor([[0, 1, 2, 3, 4, 3, 4]]))
    with Engine(hugging_face("Mistral", sliding_window=4), {}) as engine, pytest.raises(SpecError, match="window of 4"):
        engine.eval_step(branched)
    wrong = {**branched, "position_ids": torch.tensor([[0, 1, 2, 6, 7, 8, 9]])}
    with Engine(llama, {}) as engine, pytest.raises(SpecError, match="have 6 at token 3"):
        engine.eval_step(wrong)
