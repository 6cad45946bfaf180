"""The entry ``expert`` in the engine: losses, norms and every gradient are those of one process; checkpoints go anywhere."""

from __future__ import annotations

import sys
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.experts import MixtureOfExperts
from meshfold.mesh import SpecError, metadata, record
from meshfold.mesh.testing import ranks, run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from expert_cases import ADAMW, EXPERTS, HIDDEN, MODELS, Seen, assert_same, batches, built, engine_of, on_ranks, run


@cache
def serial(model: str) -> Seen:
    return run({}, model)


def zero(stage: int) -> dict[str, Any]:
    return dict(stage=stage, placement="cuda")


RING, MEGATRON, GRID = dict(mode="ring", size=2), dict(mode="megatron"), dict(mode="2d", size=4)
TO_SOME = dict(size=2, exchange="all_to_all")
Case = tuple[int, str, dict[str, Any]]
DIAGONAL: list[Case] = [
    (2, "plain", dict(data=2)),  # the balance loss is that of the global batch whatever the spec
    (2, "starved", dict(data=2, expert=2)),
    (4, "plain", dict(data=4, expert=2, zero=zero(2))),
    (4, "starved", dict(data=4, expert=4, zero=zero(3))),
    (4, "plain", dict(data=2, expert=TO_SOME, tensor=2, zero=zero(3))),
    (4, "plain", dict(data=2, expert=4, tensor=2)),
    (4, "starved", dict(data=2, expert=2, tensor=2, sequence=MEGATRON)),
    (4, "starved", dict(data=2, expert=dict(size=4, exchange="all_gather"), tensor=2, zero=zero(2))),
    (
        4,
        "starved",
        dict(data=4, expert=dict(size=4, exchange="all_gather"), zero=zero(3)),
    ),  # a rank gets 2.7 times the mean
    (4, "plain", dict(expert=2, tensor=GRID)),
    (4, "plain", dict(data=2, expert=4, sequence=RING)),
    (4, "unbalanced", dict(data=2, expert=2, pipeline=2, zero=zero(1))),
    (4, "starved", dict(data=2, tensor=2, expert=dict(size=2, tensor=2), zero=zero(2))),
    (4, "plain", dict(data=4, expert=dict(size=1, tensor=2), zero=zero(3))),
    # experts that are whole on each rank, which has tokens of its own: no entry
    (2, "plain", dict(sequence=RING)),
    (4, "starved", dict(tensor=2, sequence=dict(mode="ulysses", size=2))),
    (4, "unbalanced", dict(pipeline=2, sequence=RING, zero=zero(3))),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("count", "model", "parallel"), DIAGONAL, ids=str)
def test_logits_losses_norms_and_gradients_are_serial(count: int, model: str, parallel: dict[str, Any]) -> None:
    """SGD without momentum: weights after a step are the gradients, clipped by the norm of all of them."""
    assert_same(on_ranks(count, parallel, model), serial(model), parallel)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [dict(size=4, exchange="all_gather"), dict(size=2, tensor=2)], ids=str)
def test_ranks_that_share_all_experts_drop_the_tokens_of_one_process(how: dict[str, Any]) -> None:
    """Logits aside: every rank of a prediction has the whole batch, whose tokens a capacity then counts several times."""
    parallel = dict(data=4, expert=how, zero=zero(2))
    found, wanted = (
        (numbers, {name: value for name, value in state.items() if "logits" not in name})
        for numbers, state in (on_ranks(4, parallel, "dropping"), serial("dropping"))
    )
    assert wanted[0] != serial("plain")[0]
    assert_same(found, wanted, parallel)


def products() -> list[Case]:
    """Every combination; experts over 8 ranks in two stages take 16."""
    found: list[Case] = []
    for size, tensor, stage, pipeline in product((2, 4, 8), (1, 2), (0, 1, 2, 3), (1, 2)):
        data = max(2, size // tensor)
        parallel: dict[str, Any] = dict(data=data, tensor=tensor, expert=size)
        parallel |= {} if pipeline == 1 else dict(pipeline=pipeline)
        parallel |= {} if stage == 0 else dict(zero=zero(stage))
        models = ("unbalanced", "unbalanced starved") if pipeline > 1 else ("plain", "starved")
        found += [(data * tensor * pipeline, model, parallel) for model in models]
    for size, tensor, pipeline in (
        (2, 2, 2),
        (4, 2, 2),
        (4, 1, 1),
        (8, 2, 1),
    ):  # the exchange that they would not choose
        how = dict(size=size, exchange="all_to_all" if size == 2 else "all_gather")
        parallel = dict(data=max(2, size // tensor), tensor=tensor, expert=how, zero=zero(3))
        parallel |= {} if pipeline == 1 else dict(pipeline=pipeline)
        count = max(2, size // tensor) * tensor * pipeline
        found.append((count, "unbalanced starved" if pipeline > 1 else "starved", parallel))
    shared: list[dict[str, Any]] = [dict(data=8), dict(data=4, tensor=2), dict(data=2, sequence=RING, tensor=2)]
    for parallel, size, stage in product(shared, (1, 2, 4), (0, 1, 2, 3)):
        more = {} if stage == 0 else dict(zero=zero(stage))
        found.append((8, "starved", dict(**parallel, expert=dict(size=size, tensor=2), **more)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "model", "parallel"), products(), ids=str)
def test_the_whole_product_is_serial(count: int, model: str, parallel: dict[str, Any]) -> None:
    assert_same(on_ranks(count, parallel, model), serial(model), parallel)


def norms_and_matrices(parallel: dict[str, Any], names: tuple[str, ...]) -> list[Seen]:
    """A run of each optimizer, which look at more than an element."""
    return [run(parallel, "plain", 1, optimizer=dict(name=name, lr=1e-2)) for name in names]


@pytest.mark.slow  # compiles kernels of LAMB on every rank
def test_optimizers_that_look_at_whole_tensors_see_whole_experts() -> None:
    names = ("lamb", "muon", "adafactor")
    wanted = norms_and_matrices({}, names)
    cases: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        (dict(data=4, expert=2), names),
        (dict(data=2, expert=4, tensor=2, zero=zero(2)), names[:1]),
    ]
    for parallel, some in cases:
        for name, found, other in zip(
            some, run_on_ranks(4, norms_and_matrices, parallel, some)[0], wanted, strict=False
        ):
            assert_same(found, other, (parallel, name))


# -- what ranks have --------------------------------------------------------------------------------------------------


@ranks(4)
def test_ranks_have_their_experts_and_the_metadata_say_so() -> None:
    with engine_of(dict(data=4, expert=2)) as engine:
        experts = engine.model.blocks[0].mlp.experts
        assert experts.gate_up.shape == (EXPERTS // 2, 20, HIDDEN)
        meta, dense = metadata(experts.gate_up), metadata(engine.model.head.weight)
        assert meta is not None and dense is not None
        assert meta.placement.axes[0] == ("data%2",) and meta.sum_axes == ("data/2",)
        assert dense.sum_axes == ("data",)
        first = EXPERTS // 2 * (engine.mesh.rank % 2)
        assert torch.equal(experts.down, built("plain").blocks[0].mlp.experts.down[first : first + EXPERTS // 2])


@ranks(4)
def test_ranks_that_share_an_expert_have_the_same_rows_of_its_gate_and_up() -> None:
    with engine_of(dict(data=4, expert=dict(size=1, tensor=2))) as engine:
        experts, whole = engine.model.blocks[0].mlp.experts, built("plain").blocks[0].mlp.experts
        rows = 5 * (engine.mesh.rank % 2) + torch.arange(5)
        assert torch.equal(experts.gate_up, whole.gate_up[:, torch.cat([rows, rows + 10])])
        assert torch.equal(experts.down, whole.down[:, :, rows])
        meta = metadata(experts.gate_up)
        assert meta is not None and meta.placement.axes == ((), ("data%2",), ()) and meta.sum_axes == ("data/2",)


@ranks(4)
def test_a_model_that_is_built_without_allocating_begins_as_in_one_process() -> None:
    settings: dict[str, Any] = dict(optimizer=None, precision="fp64", seed=5)
    with Engine(MODELS["plain"], dict(data=2, expert=4, tensor=2), **settings) as engine:
        found = engine.full_state_dict()
    with Engine(MODELS["plain"], dict(data=4, expert=2, zero=zero(3)), **settings) as engine:
        again = engine.full_state_dict()
    with Engine(MODELS["plain"], dict(data=4), **settings) as engine:
        wanted = engine.full_state_dict()
    for name, value in wanted.items():
        assert torch.equal(found[name], value) and torch.equal(again[name], value), name


@ranks(4)
def test_experts_are_reduced_over_the_ranks_that_have_copies_alone() -> None:
    with engine_of(dict(data=4, expert=2), "unbalanced", clip_grad_norm=None) as engine:
        batch = engine.shard_batch(batches(1)[0])
        engine.train_step(batch)
        with record() as log:
            engine.train_step(batch)
        own = sum(p.numel() for p in engine.model.parameters() if metadata(p).own_sum_axes)
    reduced = [entry for entry in log.entries if entry.kind == "all_reduce" and entry.axes == ("data/2",)]
    assert own * 8 <= sum(entry.block_bytes for entry in reduced) <= own * 8 + 1024  # padding, and who used what


# -- checkpoints --------------------------------------------------------------------------------------------------------


def save(parallel: dict[str, Any], path: str) -> list[float]:
    with engine_of(parallel, optimizer=ADAMW) as engine:
        given = batches(4)
        for batch in given[:2]:
            engine.train_step(engine.shard_batch(batch))
        engine.save(path)
        return [engine.train_step(engine.shard_batch(batch)) for batch in given[2:]]


def resume(parallel: dict[str, Any], path: str) -> list[float]:
    with engine_of(parallel, optimizer=ADAMW) as engine:
        engine.load(path)
        return [engine.train_step(engine.shard_batch(batch)) for batch in batches(4)[2:]]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_under_any_expert_size_and_none(tmp_path: Path, stage: int) -> None:
    path, shared = str(tmp_path / "run"), {} if stage == 0 else dict(zero=zero(stage))
    wanted = run_on_ranks(4, save, dict(data=4, expert=2, **shared), path)[0]
    others: list[tuple[int, dict[str, Any]]] = [
        (4, dict(data=4, expert=4)),
        (4, dict(data=2, expert=4, tensor=2, zero=zero(2))),
        (4, dict(data=4, expert=dict(size=2, tensor=2), zero=zero(1))),
        (2, dict(data=2)),
    ]
    for count, parallel in others:
        found = run_on_ranks(count, resume, parallel, path)[0]
        assert found == pytest.approx(wanted, rel=1e-9), parallel
    assert resume({}, path) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_over_eight_ranks_goes_on_under_every_expert_size(tmp_path: Path, stage: int) -> None:
    path, shared = str(tmp_path / "run"), {} if stage == 0 else dict(zero=zero(stage))
    wanted = run_on_ranks(8, save, dict(data=4, tensor=2, expert=8, **shared), path)[0]
    for size, other in product(
        (1, 2, 4, 8), (dict(data=8, zero=zero(2)), dict(data=2, tensor=4), dict(data=4, tensor=2))
    ):
        parallel: dict[str, Any] = dict(**other, expert=size)
        assert run_on_ranks(8, resume, parallel, path)[0] == pytest.approx(wanted, rel=1e-9), parallel


# -- refusals -----------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, *, experts: int = 6, ffn: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.mlp = MixtureOfExperts(4, ffn, experts, 2)
        self.mlp.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(x)
        return y


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(2, 2),
            "expert spreads the experts of a mixture over ranks, but Linear has no mixture.* Leave expert out",
        ),
        (Mixture(dropout=0.1), r"expert=1\): mlp.drop is dropout inside experts.* Put it after the mixture"),
    ],
    ids=["no experts", "dropout"],
)
def test_a_model_whose_experts_cannot_be_split_is_refused(model: nn.Module, message: str) -> None:
    before = dict(model.state_dict(keep_vars=True))
    with pytest.raises(SpecError, match=message):
        Engine(model, dict(expert=1), loss_fn=lambda output, batch: output.mean())
    assert all(value is before[name] for name, value in model.state_dict(keep_vars=True).items())


@ranks(4)
def test_what_does_not_fit_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        SpecError, match=r"mlp.experts has 6 experts, which 4 ranks .* write expert=dict\(size=1, 2, 3 or 6\)"
    ):
        Engine(Mixture(), dict(data=4, expert=4), loss_fn=lambda output, batch: output.mean())
    with pytest.raises(SpecError, match=r"size 3 does not divide data=4. Write size=1, 2 or 4"):
        Engine(Mixture(), dict(expert=3))
    with pytest.raises(SpecError, match=r"inner size of 5, of which 2 .* write expert=dict\(size=2, tensor=1 or 5\)"):
        Engine(Mixture(ffn=5), dict(data=4, expert=dict(size=2, tensor=2)), loss_fn=lambda output, batch: output.mean())
    alone = MixtureOfExperts(4, 4, 4, 2).experts
    with pytest.raises(SpecError, match=r"the experts of Experts are its direct children.* or leave tensor out"):
        Engine(alone, dict(data=2, tensor=2, expert=2), loss_fn=lambda output, batch: output.mean())
    with engine_of(dict(data=2, sequence=RING, expert=2)) as engine:
        batch = {name: value[:, :6] for name, value in batches(1)[0].items()}
        with pytest.raises(SpecError, match=r"sequences of 6 tokens are padded to 8 .* give 8 tokens"):
            engine.train_step(engine.shard_batch(batch))


# -- pipelines ----------------------------------------------------------------------------------------------------------


def counting_all(ranks: int) -> list[dict[str, torch.Tensor]]:
    """Two batches in which every label counts, so that micro-batches weigh alike; with a row for each of two on every rank."""
    given = batches(2, rows=max(8, 2 * ranks))
    return [{"input_ids": batch["input_ids"], "labels": batch["input_ids"]} for batch in given]


def through_stages(parallel: dict[str, Any], model: str, **settings: Any) -> Seen:
    """Return what :func:`expert_cases.run` does, of micro-batches that weigh alike."""
    numbers: list[float] = []
    state: dict[str, torch.Tensor] = {}
    with engine_of(parallel, model, **settings) as engine:
        for step, batch in enumerate(counting_all(parallel.get("data", 1))):
            numbers.append(engine.train_step(engine.shard_batch(batch)))
            assert engine.last is not None and engine.last.grad_norm is not None
            numbers.append(engine.last.grad_norm)
            state.update({f"{step} {name}": value for name, value in engine.full_state_dict().items()})
    return numbers, state


def one_by_one(model: str, ranks: int, microbatches: int) -> Seen:
    """The same in one process: the balance is that of each micro-batch on all data ranks."""
    numbers: list[float] = []
    state: dict[str, torch.Tensor] = {}
    with engine_of({}, model, gradient_accumulation=microbatches) as engine:
        for step, batch in enumerate(counting_all(ranks)):
            rows = torch.arange(len(batch["labels"])).view(ranks, microbatches, -1)
            losses = [
                engine.train_step({name: value[rows[:, number].flatten()] for name, value in batch.items()})
                for number in range(microbatches)
            ]
            assert engine.last is not None and engine.last.grad_norm is not None
            numbers += [sum(losses) / len(losses), engine.last.grad_norm]
            state.update({f"{step} {name}": value for name, value in engine.full_state_dict().items()})
    return numbers, state


def staged(size: int = 2, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return dict(size=size, schedule=schedule, microbatches=2, **more)


STAGED: list[tuple[int, str, dict[str, Any]]] = [
    (2, "deep", dict(pipeline=staged())),
    (2, "deep", dict(pipeline=staged(schedule="zb-v"))),
    (4, "deep", dict(data=2, expert=2, pipeline=staged(), zero=zero(1))),
    (4, "deep starved", dict(tensor=2, expert=2, pipeline=staged(schedule="interleaved", chunks=2))),
    (4, "last dense", dict(pipeline=staged(4))),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("count", "model", "parallel"), STAGED, ids=str)
def test_a_balance_loss_counts_on_the_routers_of_all_stages(count: int, model: str, parallel: dict[str, Any]) -> None:
    found = run_on_ranks(count, through_stages, parallel, model)[0]
    assert_same(found, one_by_one(model, parallel.get("data", 1), 2), parallel)


def staged_products() -> list[Case]:
    """Every combination in two stages, with starved experts and without; those over 8 ranks take 16."""
    found: list[Case] = []
    for size, tensor, stage in product((2, 4, 8), (1, 2), (0, 1, 2, 3)):
        data = max(2, size // tensor)
        parallel: dict[str, Any] = dict(data=data, tensor=tensor, expert=size, pipeline=staged())
        parallel |= {} if stage == 0 else dict(zero=zero(stage))
        found += [(2 * data * tensor, model, parallel) for model in ("deep", "deep starved")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("count", "model", "parallel"), staged_products(), ids=str)
def test_the_whole_product_in_stages_is_serial(count: int, model: str, parallel: dict[str, Any]) -> None:
    found = run_on_ranks(count, through_stages, parallel, model, recompute="blocks")[0]
    assert_same(found, one_by_one(model, parallel["data"], 2), parallel)


def apart() -> None:
    with engine_of(dict(pipeline=staged()), "two in a block") as engine:
        engine.train_step(engine.shard_batch(batches(1)[0]))


def test_routers_that_no_stage_can_send_are_refused() -> None:
    with pytest.raises(Exception, match="stages pass on the sums of routers only if each block"):
        run_on_ranks(2, apart)
