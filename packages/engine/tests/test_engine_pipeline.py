"""An engine with ``pipeline`` trains as one process does, with every other entry, and hands over to any other spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.mesh import SpecError, gradient_norm, metadata, record
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import generate

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from pipeline_cases import ADAMW, Case, assert_same, batches, compare, engine_of, relay, run, train

# -- training is that of one process ----------------------------------------------------------------------------------


def ordered(schedule: Any, **more: Any) -> dict[str, Any]:
    return dict(pipeline=dict(size=2, schedule=schedule, microbatches=4, **more))


def one_by_one(*, ranks: int, microbatches: int) -> str:
    """Each micro-batch there and back before the next."""
    return "\n".join(
        " ".join(f"{rank}F{m} {rank}B{m} {rank}W{m}" for m in range(microbatches)) for rank in range(ranks)
    )


# Schedules as such are the tests of packages/pipeline. Here: one chunk a rank and two, weight gradients apart, dropout, and a
# function of the user's.
SCHEDULES: list[Case] = [
    (ordered("zb-h1"), "dropping", {}),
    (ordered("interleaved"), "llama", {}),
    (ordered(one_by_one), "tied", {}),
]
MORE_SCHEDULES: list[Case] = [
    (ordered("gpipe"), "gpt", {}),
    (ordered("1f1b"), "tied", {}),
    (ordered("zb-h2"), "llama", {}),
    (ordered("zb-v"), "dropping", {}),
    (ordered("hanayo", waves=1), "gpt", {}),
    (ordered("dualpipe-v"), "tied", {}),
    (ordered("interleaved", chunks=2), "dropping", {"gradient_accumulation": 2}),
]


def test_schedules() -> None:
    compare(2, SCHEDULES, batches(2))


@pytest.mark.slow
def test_more_schedules() -> None:
    compare(2, MORE_SCHEDULES, batches(4))


COMPOSED: list[Case] = [
    (dict(tensor=2, pipeline=2, sequence=dict(mode="megatron")), "llama", {}),
    (dict(data=2, pipeline=2, zero=dict(stage=1)), "tied", {"gradient_accumulation": 2}),
    (dict(data=2, pipeline=ordered("interleaved")["pipeline"], zero=dict(stage=2)), "dropping", {}),
]
MORE_COMPOSED: list[Case] = [
    (dict(data=2, pipeline=2), "tied", {"gradient_accumulation": 2}),
    (dict(tensor=2, pipeline=2), "dropping", {}),
    (dict(tensor=dict(mode="2d", grid=(2, 1)), pipeline=2), "dropping", {}),
    (
        dict(tensor=2, pipeline=2, zero=dict(stage=2)),
        "tied",
        {"clip_grad_norm": None, "clip_grad_value": 0.02},
    ),
    (dict(data=2, pipeline=2, zero=dict(stage=2, placement="cpu")), "llama", {"gradient_accumulation": 2}),
    (dict(data=2, pipeline=2), "tied", {"clip_grad_norm": None, "clip_norm_type": 1.0}),
    (dict(data=2, pipeline=2), "dropping", {"recompute": "blocks"}),
    (dict(data=2, pipeline=2, zero=dict(stage=1)), "llama", {"clip_grad_norm": None}),
    (dict(pipeline=4), "dropping", {}),
    (dict(pipeline=dict(size=4, schedule="zb-h1", microbatches=8)), "tied", {}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", COMPOSED, ids=str)
def test_with_other_dimensions(case: Case) -> None:
    compare(4, [case], batches(4))


@pytest.mark.slow
def test_with_more_of_other_dimensions() -> None:
    compare(4, MORE_COMPOSED, batches(4))


@pytest.mark.slow
def test_with_two_others_at_once() -> None:
    cases: list[Case] = [
        (dict(data=2, pipeline=2, tensor=2), "dropping", {"gradient_accumulation": 2}),
        (dict(pipeline=2, tensor=dict(mode="2d", size=4)), "tied", {}),
        (dict(data=2, pipeline=2, tensor=2, zero=dict(stage=2)), "llama", {}),
    ]
    compare(8, cases, batches(4))


def test_a_smaller_last_batch() -> None:
    given = [*batches(2), *batches(1, rows=3, seed=5), *batches(1, rows=1, seed=6)]
    given[-1]["labels"] = given[-1]["input_ids"]  # its only row counts
    cases: list[Case] = [
        (dict(data=2, pipeline=dict(size=2, schedule="zb-h1", microbatches=4)), "two tied", {}),
        (dict(data=2, pipeline=2, zero=dict(stage=2)), "two", {}),
    ]
    compare(4, cases, given)


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(precision: str) -> None:
    """Masters, sums in float32, one loss scale; steps that overflow on one stage are left out on all."""
    settings: dict[str, Any] = {"precision": precision}
    if precision == "fp16":
        settings["precision"] = dict(name="fp16", initial_scale=2.0**24, growth_interval=2)
    given = batches(8)
    cases: list[Case] = [
        (dict(data=2, pipeline=2), "two tied", settings),
        (dict(data=2, pipeline=2, zero=dict(stage=2)), "two tied", settings),
    ]
    found = run_on_ranks(4, skipped, cases, given)
    wanted = skipped([({}, model, more) for _, model, more in cases], given)
    assert all(rank == found[0] for rank in found)
    for (losses, left_out), (serial, serial_left_out) in zip(found[0], wanted, strict=True):
        # Gradients of a micro-batch are smaller than those of its batch, and overflow a little later.
        assert 0 <= serial_left_out - left_out <= 1
        assert (left_out > 0) == (precision == "fp16")
        assert losses == pytest.approx(serial, rel=2e-2)


def skipped(cases: list[Case], given: list[dict[str, Tensor]]) -> list[tuple[list[float], int]]:
    found = []
    for parallel, model, settings in cases:
        with engine_of(parallel, model, **settings) as engine:
            losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
            found.append((losses, engine.skipped_steps))
    return found


@ranks(2)
def test_the_order_is_found_by_measured_costs() -> None:
    given = batches(3)
    with engine_of(ordered("auto"), "tied") as engine:
        assert engine.pipeline is not None
        before = engine.pipeline.program(4)
        seen = train(engine, given)
        assert engine.pipeline._programs._options["costs"].forward  # measured, and in use
        assert engine.pipeline.program(4).schedule.stage_ranks == before.schedule.stage_ranks
        found = seen, engine.full_state_dict()
    assert_same(found, run({}, "tied", given), "auto")


def own_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


def regression() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 2)
    )


def regress(parallel: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(3, 6, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    settings: dict[str, Any] = dict(loss_fn=own_loss, precision="fp64", example=(x[0][:1], y[0][:1]))
    with Engine(regression(), parallel, optimizer=dict(name="sgd", lr=0.1), **settings) as engine:
        return [
            engine.train_step(engine.shard_batch(pair)) for pair in zip(x, y, strict=True)
        ], engine.full_state_dict()


@ranks(4)
def test_a_module_that_is_there_and_a_loss_of_ones_own() -> None:
    assert_same(regress(dict(data=2, pipeline=2)), regress_serial(), "regression")


def regress_serial() -> tuple[list[float], dict[str, Tensor]]:
    """By torch alone: the ranks of a test are in a process group."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(3, 6, size, generator=generator, dtype=torch.float64) for size in (3, 2))
    model = regression().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for pair in zip(x, y, strict=True):
        loss = own_loss(model(pair[0]), pair)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


# -- what is where ----------------------------------------------------------------------------------------------------


@ranks(4)
def test_gradients_are_summed_over_the_data_axis_alone_and_every_rank_has_its_stages_only() -> None:
    with engine_of(dict(data=2, pipeline=2), "tied") as engine:
        whole = sum(value.numel() for value in set(engine.full_state_dict().values()))
        batch = engine.shard_batch(batches(1)[0])
        engine.train_step(batch)
        with record() as log:
            engine.train_step(batch)
        sums = [entry for entry in log.entries if entry.kind == "all_reduce" and entry.bytes > 1000]
        assert sums and all(entry.axes == ("data",) for entry in sums)
        order = [(entry.kind, entry.axes) for entry in log.entries]
        gradients = [place for place, entry in enumerate(log.entries) if entry in sums]
        assert len(gradients) == 2  # the tied table in a bucket of its own, which waits for the other stage
        loss = order.index(("broadcast", ("pipe",)))
        assert gradients[0] < loss and gradients[1] < loss  # while the step still runs, not behind it
        own = list(engine.model.parameters())
        assert sum(p.numel() for p in own) < 0.8 * whole
        for parameter in own:
            meta = metadata(parameter)
            assert meta is not None and meta.sum_axes == ("data",)
            assert meta.only_at == {"pipe": (0, 1) if meta.tie else (engine.mesh.index("pipe"),)}
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        assert float(gradient_norm(own, engine.mesh)) == pytest.approx(whole**0.5)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def leg(parallel: dict[str, Any], load: str, save: str, given: list[dict[str, Tensor]], **settings: Any) -> Any:
    with engine_of(parallel, "dropping", **settings) as engine:
        before = None
        if load:
            engine.load(load)
            before = engine.full_state_dict()
        losses = [engine.train_step(engine.shard_batch(batch)) for batch in given]
        engine.save(save)
        return losses, before, engine.full_state_dict()


LEGS: list[tuple[int, dict[str, Any]]] = [
    (2, dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=4))),
    (1, {}),
    (4, dict(data=2, pipeline=2, zero=dict(stage=2))),
    (4, dict(tensor=2, pipeline=dict(size=2, schedule="interleaved", microbatches=4))),
    (4, dict(sequence=dict(mode="ring", size=2), pipeline=2)),
    (2, dict(data=2)),
    (4, dict(sequence=dict(mode="ulysses", size=2), pipeline=2, zero=dict(stage=2))),
    (4, dict(data=2, pipeline=2)),
]


@pytest.mark.parametrize("legs", [LEGS[2:4], pytest.param(LEGS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_run_handed_from_spec_to_spec_is_the_unbroken_run(
    legs: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    relay(legs, leg, tmp_path)


# -- evaluation, text, refusals ---------------------------------------------------------------------------------------


def text(parallel: dict[str, Any]) -> Tensor:
    with engine_of(parallel, "two dropping") as engine:
        engine.train_step(engine.shard_batch(batches(1)[0]))
        ids = batches(1)[0]["input_ids"][:3, :4]
        return generate(engine.generator, ids, 5, temperature=0.0)


def test_text() -> None:
    wanted = text({})
    for found in run_on_ranks(4, text, dict(tensor=2, pipeline=2)):
        assert torch.equal(found, wanted)


@ranks(2)
def test_what_is_refused() -> None:
    ids = batches(1)[0]["input_ids"]
    with engine_of(dict(pipeline=2)) as engine:
        for refused in (
            lambda: engine(ids),
            lambda: engine.backward(torch.zeros((), requires_grad=True)),
            lambda: engine.no_sync().__enter__(),
        ):
            with pytest.raises(SpecError, match=r"under pipeline.*engine.train_step\(batch\)"):
                refused()
        assert engine.train_step(engine.shard_batch(ids)) > 0
    with pytest.raises(SpecError, match=r"pipeline=.*blocks"):
        engine_of(dict(pipeline=dict(size=2, schedule="interleaved", chunks=4)))  # eight stages of four blocks
    with pytest.raises(SpecError, match="different parameter groups"):
        engine_of(dict(pipeline=2), "long", optimizer=grouped)
    with pytest.raises(SpecError, match=r"recompute='auto'.*placement"):
        engine_of(dict(pipeline=2, zero=dict(stage=1, placement="cpu")), recompute="auto")


def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """A group for the table of positions, which only the first stage has."""
    tables = [p for p in parameters if p.shape[:1] == (24,)]
    rest = [p for p in parameters if p.shape[:1] != (24,)]
    groups = [{"params": members} for members in (tables, rest) if members]
    return torch.optim.SGD(groups, lr=0.1)


@ranks(2)
def test_a_step_that_fails_leaves_nothing_behind() -> None:
    given = batches(3)
    shorter = {name: value[:, :-2] for name, value in given[1].items()}  # of a shape that all ranks look at first

    def fail(*_: object) -> None:
        raise RuntimeError("in the model")

    with engine_of(ordered("1f1b"), "tied", optimizer=ADAMW) as engine:
        first = engine.train_step(given[0])
        failing = engine.model.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the model"):
            engine.train_step(shorter)
        failing.remove()
        assert engine.micro_step == 1
        rest = [engine.train_step(batch) for batch in given[1:]]
    wanted, _ = run({}, "tied", given)
    assert [first, *rest] == pytest.approx([wanted[0], wanted[2], wanted[5]], rel=1e-9)


MEGATRON: dict[str, Any] = dict(tensor=2, sequence=dict(mode="megatron"))


def hugging_face(parallel: dict[str, Any], given: list[dict[str, Tensor]]) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = dict(vocab_size=37, n_embd=16, n_layer=4, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
    without = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **without))  # type: ignore[arg-type]
    with Engine(model, parallel, optimizer=ADAMW, precision="fp64", clip_grad_norm=0.3) as engine:
        return train(engine, given), engine.full_state_dict()


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(dict(tensor=2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(dict(pipeline=2, **MEGATRON), marks=pytest.mark.slow),
        dict(pipeline=dict(size=2, schedule="interleaved", chunks=2), **MEGATRON),
    ],
    ids=str,
)
def test_a_hugging_face_model(parallel: dict[str, Any]) -> None:
    """It is there on every rank at first, ties its head, and computes its loss in float32."""
    pytest.importorskip("transformers")
    given = batches(3)
    wanted = hugging_face({}, given)
    for found in run_on_ranks(4, hugging_face, parallel, given):
        assert_same(found, wanted, f"gpt2 under {parallel}", 1e-6)
