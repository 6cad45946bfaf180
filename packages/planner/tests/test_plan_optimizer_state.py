"""State that plans count of optimizers of whole matrices is what a real step leaves behind, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.engine.zero import ZeroStates
from meshfold.mesh import ParallelSpec
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig, Llama, MoELlamaConfig
from meshfold.planner import estimate
from meshfold.planner.optimizer_state import MOMENTS

MATRICES = [name for name, moments in MOMENTS.items() if moments is None]
WORDS, WIDTH, ROWS, TOKENS = 96, 64, 4, 8


def small() -> GPT:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=WIDTH, layers=2, heads=4, max_positions=TOKENS))


def mixture() -> Llama:
    sizes: dict[str, Any] = dict(vocab_size=WORDS, hidden=WIDTH, layers=2, heads=4, ffn=48, experts=4, top_k=2)
    return Llama(MoELlamaConfig(**sizes, balance=0.0))


MODELS: dict[str, Any] = {"small": small, "mixture": mixture}


def kept_in_steps(
    spec: dict[str, Any], names: list[str], precision: str, model: str = "small"
) -> list[tuple[int, int]]:
    """Return, for each optimizer, the bytes of its state on this rank after three steps, with master weights that it owns.

    With it comes what the engine's own plan counts; 0 if it makes none.
    """
    found = []
    ids = torch.randint(WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    for name in names:
        with Engine(MODELS[model], spec, optimizer=dict(name=name), precision=precision, device="cpu") as engine:
            batch = engine.shard_batch(dict(input_ids=ids, labels=ids))
            for _ in range(3):
                engine.train_step(batch)
            optimizer, states = engine.optimizer, engine.states
            assert optimizer is not None
            kept, counted = 0, 0
            for state in optimizer.state.values():
                kept += sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
            if isinstance(states, ZeroStates):
                kept += sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
                if plan := states.residency.plan:  # of placement="auto", once steps were measured
                    counted = round(sum(chunk.elems for chunk in plan.workload.chunks) * plan.workload.regime.state)
            found.append((kept, counted))
    return found


def check(spec: dict[str, Any], ranks: int, names: list[str], precision: str, model: str = "small") -> None:
    """Compare the rank that holds most with the plan."""
    every = run_on_ranks(ranks, kept_in_steps, spec, names, precision, model)
    for name, *found in zip(names, *every, strict=True):
        most = max(kept for kept, _ in found)
        sizes = dict(batch_size=ROWS, seq_len=TOKENS, optimizer=name, precision=precision)
        plan = estimate(MODELS[model], ParallelSpec.parse(spec, ranks), **sizes)  # type: ignore[arg-type]
        assert plan.memory.optimizer == pytest.approx(most, abs=64), name  # each chunk's bytes are rounded
        if spec.get("zero", {}).get("placement") == "auto":
            assert [counted for _, counted in found] == [pytest.approx(most, abs=64)] * ranks, name


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, "fp32"), (2, "bf16"), pytest.param(3, "bf16", marks=pytest.mark.slow)]
)
def test_state_under_zero_is_that_of_the_rank_that_owns_most(stage: int, precision: str) -> None:
    check(dict(data=2, zero=dict(stage=stage, placement="cuda")), 2, MATRICES, precision)


def test_an_engine_plans_with_the_same_bytes() -> None:
    names = ["came", "muon", "galore_adamw"]
    check(dict(data=2, zero=dict(stage=3, placement="auto", gpu_memory_limit="1GiB")), 2, names, "bf16")


def test_state_of_blocks_of_tensor_parallelism() -> None:
    check(dict(tensor=2), 2, MATRICES, "bf16")


@pytest.mark.slow
def test_state_under_zero_beside_tensor_parallelism() -> None:
    check(dict(data=2, tensor=dict(mode="2d", size=4), zero=dict(stage=3, placement="cuda")), 8, MATRICES, "bf16")


def test_state_of_experts_that_fewer_ranks_share() -> None:
    """Stacks of matrices: two ranks share those of two experts, four all else."""
    check(dict(data=4, expert=2, zero=dict(stage=3, placement="cuda")), 4, ["muon", "galore_adamw"], "bf16", "mixture")


def test_state_of_the_fullest_stage_of_a_pipeline() -> None:
    """Roles are known in stages: Muon keeps two numbers of an embedding, one of a matrix."""
    check(dict(pipeline=dict(size=2, microbatches=2)), 2, ["muon"], "bf16")
