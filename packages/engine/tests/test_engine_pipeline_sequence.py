"""Stages whose ranks share the tokens of each micro-batch train as one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError, metadata, record
from meshfold.mesh.testing import fake_world, ranks, run_on_ranks
from meshfold.models import generate

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import ADAMW, MODELS, Case, assert_same, batches, compare, engine_of

RING, ULYSSES = dict(mode="ring", size=2), dict(mode="ulysses", size=2)
BOTH = dict(mode="ring_ulysses", size=4, ulysses=2)
RATE = 0.1
EIGHT: list[tuple[dict[str, Any], str]] = [
    (dict(data=2, pipeline=2, sequence=RING), "two tied"),
    (dict(tensor=2, sequence=RING, pipeline=2), "two"),
]
"""The two specs that a gradient is most easily summed over the wrong ranks in"""


def ordered(schedule: str, sequence: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(pipeline=dict(size=2, schedule=schedule, microbatches=4), sequence=sequence, **more)


# -- gradients as such ------------------------------------------------------------------------------------------------

Trained = tuple[list[float], list[dict[str, Tensor]]]
"""losses; the model before every step, and behind the last"""


def plainly_stepped(parallel: dict[str, Any], model: str, given: list[dict[str, Tensor]]) -> Trained:
    """By SGD without clipping, so that a factor in a gradient shows as it is."""
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=RATE), clip_grad_norm=None)
    with engine_of(parallel, model, **settings) as engine:
        losses, states = [], [engine.full_state_dict()]
        for batch in given:
            losses.append(engine.train_step(engine.shard_batch(batch)))
            states.append(engine.full_state_dict())
        return losses, states


def by_torch_alone(model: str, first: dict[str, Tensor], given: list[dict[str, Tensor]]) -> Trained:
    module = MODELS[model]().double()
    module.load_state_dict(first)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    losses, states = [], [first]
    for batch in given:
        loss = module(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        states.append({name: value.clone() for name, value in module.state_dict().items()})
    return losses, states


@pytest.mark.few(1)
@pytest.mark.parametrize(("parallel", "model"), EIGHT, ids=["data-pipe-seq", "pipe-seq-tensor"])
def test_every_gradient_is_that_of_one_process(parallel: dict[str, Any], model: str) -> None:
    given = batches(2, length=7)  # which two ranks cannot share evenly
    every = run_on_ranks(8, plainly_stepped, parallel, model, given)
    losses, states = by_torch_alone(model, every[0][1][0], given)
    for seen, found in every:
        assert seen == pytest.approx(losses, rel=1e-9)
        for step in range(len(given)):
            gradients = {name: states[step][name] - value for name, value in states[step + 1].items()}
            largest = max(float(gradient.abs().max()) for gradient in gradients.values())
            for name, gradient in gradients.items():
                other = found[step][name] - found[step + 1][name]
                near = dict(rtol=0.0, atol=1e-9 * largest)
                torch.testing.assert_close(other, gradient, **near, msg=f"{parallel} step {step} {name}")
                torch.testing.assert_close(found[step + 1][name], states[step + 1][name], **near)


# -- which ranks a gradient is summed over ----------------------------------------------------------------------------


def summed_over(parallel: dict[str, Any]) -> tuple[dict[str, int], set[int]]:
    """Every rank gives all its gradients the value 2**rank: this rank's coordinates, and the bits of what comes back."""
    with engine_of(parallel, "two") as engine:  # a tied table is summed over its stages besides
        states, mesh = engine.states, engine.mesh
        engine.runner.gradients.begin()  # a forward would
        with states.backward("last"):
            for parameter in engine.model.parameters():
                if parameter.requires_grad:
                    parameter.backward(torch.full_like(parameter, 2.0**mesh.rank))
            states.complete([p for p in engine.model.parameters() if p.requires_grad])
        states.finish(1.0)
        found = set()
        for group in engine.optimizer.param_groups:  # type: ignore[union-attr]
            found |= {int(value) for target in group["params"] for value in target.grad.unique()}
        return dict(mesh.coordinates(mesh.rank)), found


def test_gradients_are_summed_over_the_ranks_that_have_other_tokens_for_the_same_parameters() -> None:
    for parallel, count in ((EIGHT[0][0], 4), (EIGHT[1][0], 2)):
        every = run_on_ranks(8, summed_over, parallel)
        for place, bits in every:
            alike = [
                number
                for number, (other, _) in enumerate(every)
                if all(other.get(axis) == place.get(axis) for axis in ("pipe", "tensor"))
            ]
            assert len(alike) == count
            assert bits == {sum(2**number for number in alike)}


@pytest.mark.parametrize(
    "cases", [EIGHT[:1], pytest.param(EIGHT[1:], marks=pytest.mark.slow)], ids=["data-pipe-seq", "pipe-seq-tensor"]
)
@ranks(8)
def test_what_is_recorded_is_one_sum_of_every_gradient(cases: list[tuple[dict[str, Any], str]]) -> None:
    """Which ranks are summed over, the test above says of both specs."""
    for parallel, model in cases:
        with engine_of(parallel, model) as engine:
            batch = engine.shard_batch(batches(1)[0])
            engine.train_step(batch)
            with record() as log:
                engine.train_step(batch)
            outer = ("data", "seq")
            own = list(engine.model.parameters())
            for parameter in own:
                meta = metadata(parameter)
                assert meta is not None and meta.sum_axes == outer
                assert meta.only_at == {"pipe": (0, 1) if meta.tie else (engine.mesh.index("pipe"),)}
            sums = [e for e in log.entries if e.kind == "all_reduce" and e.block_bytes > 1000 and "seq" in e.axes]
            assert {entry.axes for entry in sums} == {tuple(a for a in outer if engine.mesh.size(a) > 1)}
            elements = (
                sum(entry.block_bytes for entry in sums) / 8
            )  # parts begin at multiples of 16, and uses are counted
            assert 0 <= elements - sum(p.numel() for p in own) <= 17 * len(own)
            # Keys and values of a micro-batch travel within its stage alone.
            assert {e.axes for e in log.entries if e.kind == "shift"} <= {("seq",), ("pipe",)}
            assert any(entry.axes == ("seq",) for entry in log.entries)


# -- with every other entry -------------------------------------------------------------------------------------------

FOUR: list[Case] = [
    (ordered("zb-h1", RING), "dropping", {"gradient_accumulation": 2}),
    (ordered("interleaved", ULYSSES), "tied", {}),
    (ordered("1f1b", RING, zero=dict(stage=2)), "dropping", {}),
]
MORE_OF_FOUR: list[Case] = [
    (ordered("gpipe", RING, zero=dict(stage=1)), "llama", {"gradient_accumulation": 2}),
    (dict(pipeline=2, sequence=RING), "dropping", {"recompute": "blocks"}),
    (ordered("auto", RING), "llama", {}),
    (ordered("zb-v", ULYSSES), "dropping", {}),
    (ordered("hanayo", RING), "tied", {"clip_grad_norm": None, "clip_grad_value": 0.02}),
    (ordered("1f1b", RING, zero=dict(stage=2, placement="cpu")), "llama", {}),
]
OF_EIGHT: list[Case] = [
    (dict(data=2, pipeline=2, sequence=ULYSSES, zero=dict(stage=2)), "two dropping", {}),
    (dict(tensor=dict(mode="2d", grid=(2, 1)), pipeline=2, sequence=RING), "two dropping", {}),
]
MORE_OF_EIGHT: list[Case] = [
    (dict(tensor=2, pipeline=2, sequence=RING, zero=dict(stage=1)), "tied", {"gradient_accumulation": 2}),
    (dict(data=2, tensor=2, pipeline=2, sequence=dict(mode="megatron")), "dropping", {}),
    (dict(pipeline=2, sequence=BOTH), "llama", {}),
    (dict(tensor=dict(mode="2d", grid=(1, 2)), pipeline=2, sequence=ULYSSES), "llama", {}),
    (dict(tensor=dict(mode="2.5d", size=2, depth=2), pipeline=2, sequence=RING), "tied", {}),
    (dict(tensor=dict(mode="3d", grid=(2, 1, 1)), pipeline=2, sequence=RING), "dropping", {}),
    (dict(pipeline=4, sequence=RING), "dropping", {}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", OF_EIGHT, ids=str)
def test_with_data_and_tensor_modes(case: Case) -> None:
    compare(8, [case], batches(1, length=7))


@pytest.mark.slow
def test_with_more_tensor_modes() -> None:
    compare(8, MORE_OF_EIGHT, batches(4, length=10))


@pytest.mark.few(1)
@pytest.mark.parametrize("case", FOUR, ids=str)
def test_schedules_modes_and_zero(case: Case) -> None:
    compare(4, [case], batches(2, length=7))


@pytest.mark.slow
def test_more_schedules_modes_and_zero() -> None:
    compare(4, MORE_OF_FOUR, batches(4, length=9))


@pytest.mark.parametrize(
    "case",
    [
        (ordered("zb-h1", RING), "dropping", {}),
        pytest.param((ordered("1f1b", ULYSSES), "tied", {}), marks=pytest.mark.slow),
    ],
    ids=["ring", "ulysses"],
)
def test_a_smaller_last_batch_and_other_lengths(case: Case) -> None:
    """Ring: its ranks share tokens unevenly. Ulysses has odd lengths in test_sequence.py."""
    given = [*batches(1), *batches(1, rows=3, seed=5, length=5), *batches(1, rows=1, seed=6, length=2)]
    given[-1]["labels"] = given[-1]["input_ids"]  # its only row counts
    compare(4, [case], given)


def own_loss(output: Any, batch: Any) -> Tensor:
    """Knows of no ranks: it moves labels itself, and is given the logits of whole sequences."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


def by_own_loss(parallel: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    settings: dict[str, Any] = dict(optimizer=ADAMW, precision="fp64", loss_fn=own_loss)
    with Engine(MODELS["dropping"], parallel, **settings) as engine:
        losses = []
        for batch in batches(2, length=7):
            ids = engine.shard_batch(batch["input_ids"])
            losses += [engine.train_step((ids, ids)), engine.eval_step((ids, ids))]
        return losses, engine.full_state_dict()


def test_a_loss_of_ones_own_gets_whole_sequences() -> None:
    wanted = by_own_loss({})
    for found in run_on_ranks(4, by_own_loss, dict(pipeline=2, sequence=RING)):
        assert_same(found, wanted, "own loss")


def text(parallel: dict[str, Any]) -> Tensor:
    with engine_of(parallel, "two dropping") as engine:
        engine.train_step(engine.shard_batch(batches(1)[0]))
        ids = batches(1)[0]["input_ids"][:3, :3]
        return generate(engine.generator, ids, 5, temperature=0.0)


def test_text() -> None:
    wanted = text({})
    for found in run_on_ranks(4, text, dict(sequence=RING, pipeline=2)):
        assert torch.equal(found, wanted)


def hugging_face(parallel: dict[str, Any], given: list[dict[str, Tensor]]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, hidden_size=16, num_hidden_layers=4, intermediate_size=24, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=16))  # type: ignore[arg-type]
    with Engine(model, parallel, optimizer=ADAMW, precision="fp64", clip_grad_norm=0.3) as engine:
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
        return losses, engine.full_state_dict()


def test_a_hugging_face_model() -> None:
    """It computes its loss in float32."""
    pytest.importorskip("transformers")
    given = batches(3, length=7)
    wanted = hugging_face({}, given)
    for found in run_on_ranks(4, hugging_face, dict(sequence=RING, pipeline=2), given):
        assert_same(found, wanted, "llama", 1e-6)


# -- how many micro-batches -------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("tensor", "rows", "sizes"),
    [
        (dict(mode="2d", grid=(2, 1)), 6, [4, 2]),  # two blocks of rows
        (dict(mode="2d", grid=(1, 2)), 6, [3, 3]),  # one
        (dict(mode="2d", grid=(2, 1)), 2, [2]),
        (dict(mode="2.5d", size=2, depth=2), 10, [6, 4]),
        (dict(mode="3d", grid=(2, 1, 1)), 6, [4, 2]),
        (dict(mode="1d", size=2), 6, [3, 3]),
    ],
    ids=str,
)
def test_micro_batches_have_rows_that_the_tensor_mode_can_split(
    tensor: dict[str, Any], rows: int, sizes: list[int]
) -> None:
    """Otherwise each would be filled up with rows that do not count."""
    for sequence, ranks_of in ({}, 4), (dict(sequence=RING), 8):
        with fake_world(ranks_of), engine_of(dict(pipeline=2, tensor=tensor, **sequence)) as engine:
            batch = engine.runner.forward.prepare(batches(1, rows=rows)[0])
            assert [len(work.given["labels"]) for work in engine.runner.stages.microbatches(batch)] == sizes  # type: ignore[union-attr]


# -- refusals ---------------------------------------------------------------------------------------------------------


class LastMixes(torch.nn.Module):
    """Its last block, which the first rank never has, sees neighbours without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(4))
        self.blocks[3].append(torch.nn.Conv1d(4, 4, 3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def test_every_rank_refuses_what_one_stage_cannot_do() -> None:
    for rank in range(4):
        with (
            fake_world(4, rank=rank),
            pytest.raises(SpecError, match=r"blocks\.3\.1, a Conv1d, mixes tokens"),
        ):
            Engine(LastMixes, dict(pipeline=2, sequence=RING), loss_fn=own_loss)
