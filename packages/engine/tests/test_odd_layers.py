"""Layers and losses that depend on the batch as a whole, or whose code cannot be reached: right, or refused with a sentence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine, TrainingError
from meshfold.mesh import CollectiveError, SpecError
from meshfold.mesh.testing import RankFailure, close_pools, ranks, run_on_ranks

WORDS, HIDDEN = 11, 8
IDS = torch.randint(WORDS, (4, 3), generator=torch.Generator().manual_seed(0))
SGD: dict[str, Any] = dict(name="sgd", lr=0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Model(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity, **table: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, HIDDEN, **table)
        self.norm = norm()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x.flatten(0, 1)).view_as(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Lazy(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(WORDS)


def loss(output: Tensor, batch: Any, **settings: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), **settings)


def engine_of(model: Any, spec: dict[str, Any], **settings: Any) -> Engine:
    return Engine(model, spec, **{**dict(optimizer=SGD, loss_fn=loss, precision="fp64"), **settings})


def compare(
    model: Model,
    spec: dict[str, Any],
    batch: Any,
    loss_fn: Callable[..., Tensor] = loss,
    tolerance: float = 1e-9,
) -> None:
    """Two steps against a plain loop."""
    serial = copy.deepcopy(model).double()
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.5)
    with engine_of(model, spec, loss_fn=loss_fn) as engine:
        for _ in range(2):
            wanted = loss_fn(serial(batch[0]), batch)
            optimizer.zero_grad()
            wanted.backward()
            optimizer.step()
            assert engine.train_step(engine.shard_batch(batch)) == pytest.approx(wanted.item(), abs=tolerance)
        found = engine.full_state_dict()
    for name, value in serial.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=f"{name} differs")


# -- tables ---------------------------------------------------------------------------------------------------------


@ranks(2)
def test_tables_that_look_at_the_whole_batch_are_refused_where_it_is_split() -> None:
    for spec in (dict(data=2), dict(zero=dict(stage=1)), dict(zero=dict(stage=3)), dict(tensor=2)):
        with pytest.raises(SpecError, match=r"embed: nn.Embedding\(max_norm=1.0\)"):
            engine_of(Model(max_norm=1.0), spec)
        with pytest.raises(SpecError, match=r"embed: nn.Embedding\(scale_grad_by_freq=True\)"):
            engine_of(Model(scale_grad_by_freq=True), spec)
    with pytest.raises(SpecError, match="scale_grad_by_freq"):
        engine_of(Model(scale_grad_by_freq=True), dict(pipeline=2))
    ids = IDS.clamp(min=1)  # a look at shapes reads row 0, and no batch does
    compare(Model(max_norm=1.0), dict(pipeline=2), (ids, ids))
    tied = Model(max_norm=1.0)
    tied.head.weight = tied.embed.weight
    with pytest.raises(SpecError, match="another layer shares its weight"):
        engine_of(tied, dict(pipeline=2))


def test_one_process_trains_such_tables_as_torch_does() -> None:
    for options in (dict(max_norm=1.0), dict(scale_grad_by_freq=True)):
        compare(Model(**options), {}, (IDS, IDS))
    with pytest.raises(SpecError, match="precision='bf16'"):
        engine_of(Model(max_norm=1.0), {}, precision="bf16")
    with pytest.raises(SpecError, match=r"nn.Embedding\(sparse=True\) has sparse gradients"):
        engine_of(Model(sparse=True), {})


# -- code that cannot be reached ------------------------------------------------------------------------------------


def test_lazy_and_traced_modules_are_refused() -> None:
    for model in (Lazy(), Lazy):
        with pytest.raises(SpecError, match="head is a LazyLinear, whose parameters have no shape"):
            engine_of(model, {})
    lazy = Lazy()
    lazy(IDS)
    with engine_of(lazy, {}) as engine:
        engine.train_step((IDS, IDS))
    with pytest.raises(SpecError, match="the model is traced"):
        engine_of(torch.jit.trace(Model(), IDS), {})


@ranks(2)
def test_scripted_parts_are_refused_where_a_model_is_hooked_or_split() -> None:
    def scripted() -> Model:
        model = Model()
        model.blocks[1] = torch.jit.script(model.blocks[1])
        return model

    for name, spec in (
        ("zero", dict(zero=dict(stage=1))),
        ("tensor", dict(tensor=2)),
        ("pipeline", dict(pipeline=2)),
    ):
        with pytest.raises(SpecError, match=f"blocks.1 is traced or scripted .* does not work with {name}"):
            engine_of(scripted(), spec)
    with engine_of(scripted(), dict(data=2)) as engine:
        engine.train_step(engine.shard_batch((IDS, IDS)))


class Mapped(Model):
    """Calls a block in a transform of torch.func."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + torch.func.grad(lambda y: self.blocks[0](y).square().sum())(x)
        y: Tensor = self.head(self.blocks[1](x))
        return y


class Differentiated(Model):
    """Differentiates its blocks in its forward."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        z: Tensor = self.head(torch.autograd.grad(y.sum(), x, create_graph=True)[0])
        return z


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "spec", "advice"),
    [
        (Mapped, dict(data=2, zero=dict(stage=3)), "A transform of torch.func"),
        (Mapped, dict(tensor=2), "A transform of torch.func"),
        (Differentiated, dict(pipeline=2), "torch.autograd.grad in a forward ends where its stage begins"),
    ],
    ids=["zero 3", "tensor", "pipeline"],
)
def test_torchs_error_of_a_transform_says_what_to_change(make: Any, spec: dict[str, Any], advice: str) -> None:
    with pytest.raises(RankFailure, match=advice):
        run_on_ranks(2, one_step, make, spec)


def one_step(make: Any, spec: dict[str, Any]) -> None:
    with engine_of(make(), spec) as engine:
        engine.train_step(engine.shard_batch((IDS, IDS)))


@ranks(2)
def test_a_copy_of_what_is_not_all_here_is_refused() -> None:
    for spec, why in ((dict(zero=dict(stage=3)), "zero=dict.stage=3"), (dict(pipeline=2), "in a pipeline")):
        model = Model()
        with engine_of(model, spec) as engine:
            for part in (engine.model, engine.model.get_submodule("blocks")):
                with pytest.raises(TrainingError, match=f"copy.deepcopy of a model .*{why}"):
                    copy.deepcopy(part)
        copy.deepcopy(model)
    model = Model()
    with engine_of(model, dict(zero=dict(stage=3))) as engine:
        for part in (model, model.head):
            with pytest.raises(
                TrainingError, match=r"state_dict\(\) .*zero=dict\(stage=3\).*engine.full_state_dict\(\)"
            ):
                part.state_dict()
            with pytest.raises(TrainingError, match=r"engine.load_state_dict\(state\)"):
                part.load_state_dict(Model().get_submodule("head" if part is model.head else "").state_dict())
    with engine_of(Model(), dict(zero=dict(stage=1))) as engine:
        copied = copy.deepcopy(engine.model)
        torch.testing.assert_close(copied.head.weight, engine.model.head.weight)


# -- parameters that another module reads ------------------------------------------------------------------------------


class Attending(Model):
    """Torch's own attention as an attribute: it reads its ``out_proj``, and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


@ranks(4)
def test_torchs_attention_is_gathered_with_what_it_reads() -> None:
    for spec in (dict(zero=dict(stage=3)), dict(tensor=2, zero=dict(stage=3))):
        compare(Attending(), spec, (IDS, IDS))


# -- losses ---------------------------------------------------------------------------------------------------------


def without_three(output: Tensor, batch: Any) -> Tensor:
    return loss(output, batch, ignore_index=3)


def weighted(output: Tensor, batch: Any) -> Tensor:
    return loss(output, batch, weight=torch.arange(1.0, WORDS + 1, dtype=output.dtype))


def weighted_sum(output: Tensor, batch: Any) -> Tensor:
    weight = torch.arange(1.0, WORDS + 1, dtype=output.dtype)
    return loss(output, batch, weight=weight, reduction="sum") / (batch[1] != -100).sum()


@ranks(2)
def test_another_ignored_index_counts_as_in_one_process() -> None:
    targets = IDS.clone()
    targets[0], targets[1, 0] = 3, 3  # the first rank has fewer that count
    for spec in (dict(data=2), dict(zero=dict(stage=1)), dict(tensor=2)):
        compare(Model(), spec, (IDS, targets), without_three)


def without_zero(output: Tensor, batch: Any) -> Tensor:
    return loss(output, batch, ignore_index=0)


def by_keyword(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target=batch[1].flatten(), ignore_index=3)


@ranks(2)
def test_a_rank_without_rows_has_targets_that_the_loss_knows() -> None:
    targets = IDS[:1].clone()
    targets[0, 0] = 0
    for own in (without_three, without_zero, by_keyword):
        compare(Model(), dict(data=2), (IDS[:1], targets), own)


def in_a_pipeline() -> str:
    try:
        with engine_of(Model(), dict(pipeline=2), loss_fn=without_three, watchdog=60) as engine:
            engine.train_step((IDS, IDS))
    except (CollectiveError, SpecError) as error:
        return str(error)
    return ""


def test_another_ignored_index_is_refused_in_a_pipeline() -> None:
    close_pools()  # ranks of other tests have had errors of their own
    try:
        found = run_on_ranks(2, in_a_pipeline)
    finally:
        close_pools()  # its connections are broken now
    assert all("targets.masked_fill(targets == 3, -100)" in text for text in found), found


@ranks(2)
def test_a_mean_over_weights_is_refused_where_the_batch_is_split() -> None:
    compare(Model(), dict(tensor=2), (IDS, IDS), weighted)
    compare(Model(), dict(data=2), (IDS, IDS), weighted_sum)
    with (
        engine_of(Model(), dict(data=2), loss_fn=weighted) as engine,
        pytest.raises(SpecError, match=r"cross_entropy\(weight=\.\.\.\) averages by the weights"),
    ):
        engine.train_step(engine.shard_batch((IDS, IDS)))


# -- said when the model is built -----------------------------------------------------------------------------------


class Balanced(Model):
    def __init__(self) -> None:
        super().__init__()
        self.aux_loss_coef = 0.01


def notes(make: Callable[[], Model], spec: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine_of(make, spec).close()
    return [str(w.message) for w in caught if w.category is UserWarning]


@ranks(2)
def test_what_is_of_a_ranks_own_rows_is_said_once() -> None:
    rank = int(torch.distributed.get_rank())
    batch_norm = [n for n in notes(lambda: Model(lambda: nn.BatchNorm1d(HIDDEN)), dict(data=2)) if "batch norm" in n]
    balance = [n for n in notes(Balanced, dict(data=2)) if "balance loss" in n]
    if rank:
        assert batch_norm == balance == []
        return
    assert len(batch_norm) == len(balance) == 1
    assert batch_norm[0].startswith("norm: a batch norm computes mean and variance from the rows of its own data rank")
    assert balance[0].startswith("aux_loss_coef=0.01: a mixture of experts' own balance loss")
    assert not [n for n in notes(Balanced, dict(tensor=2)) if "balance" in n]
