"""Peak memory of a Hugging Face Llama under a limit: what is recorded, operator by operator, is what was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.engine.zero.states import ZeroStates
from meshfold.mesh.model_io import LiveBytes
from meshfold.zero_gemini.memory.arena import Arena

WORDS, LIMIT = 4096, 10 * 2**20


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="this test trains a model of transformers")
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


class Recorded(LiveBytes):
    """The most that chunks and what operators make take together."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(round_bytes=512)  # as the allocator of a GPU
        self._arena, self.most = arena, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        self.most = max(self.most, self.bytes + self._arena.used_bytes)
        return made


def test_steps_take_what_was_planned_and_none_before_the_plan_goes_beyond_the_limit() -> None:
    """Whole logits: the largest blocks that there are. With 60 % of the limit for state, the first steps ran out of it."""
    zero = dict(stage=3, placement="auto", gpu_memory_limit=LIMIT)
    ids = torch.randint(0, WORDS, (2, 64), generator=torch.Generator().manual_seed(0))
    with Engine(
        llama, dict(zero=zero), optimizer=dict(name="adamw", lr=1e-3), precision="bf16", kernels="off"
    ) as engine:
        states = engine.states
        assert isinstance(states, ZeroStates)
        planned = 0
        for _ in range(5):
            plan = states.residency.plan
            with Recorded(states.gemini.memory.compute) as recorded:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
            assert recorded.most <= LIMIT
            if plan is not None:
                planned += 1
                assert recorded.most == pytest.approx(plan.peak_gpu_bytes, rel=1e-3)
            engine.step()
        assert planned >= 3
