"""Models built under ShardedInit: never whole anywhere, and the same as those that were built in the plain way."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, MeshfoldError, SpecError, annotate, build_on_meta, materialize
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.initialization import parameter_values, replay
from meshfold.mesh.parameters.parameter_meta import metadata_on
from meshfold.mesh.testing import ranks, run_on_ranks, tensor_memory
from meshfold.zero_gemini import Gemini, Memory, ShardedInit

CPU = torch.device("cpu")


class Net(nn.Module):
    """Has a buffer that it computes, a tied parameter and an initialisation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        for block in self.blocks:
            assert isinstance(block, nn.Linear)
            nn.init.trunc_normal_(block.weight, std=0.3)
        self.scale = nn.Parameter(torch.full((6,), 2.0) / torch.arange(1.0, 7.0))
        self.register_buffer("table", torch.arange(6.0).outer(torch.ones(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scale + self.get_buffer("table").sum(1)
        for block in self.blocks:
            x = x + block(x).tanh()
        y: Tensor = self.head(x)
        return y


def sharded(seed: int = 3) -> nn.Module:
    with ShardedInit(seed=seed):
        model = Net()
    assert all(p.is_meta for p in model.parameters()) and model.get_buffer("table").is_meta
    assert model.head.weight is model.embed.weight
    return model


def shared(model: nn.Module, stage: int, chunk_elems: int) -> Gemini:
    """The model in chunks that two ranks share."""
    mesh = Mesh(dict(data=2))
    for parameter in model.parameters():
        annotate(parameter, replace(metadata_on(parameter, mesh), sum_axes=("data",)))
    return Gemini(model, mesh, stage=stage, memory=Memory(CPU), chunk_elems=chunk_elems)


def whole(seed: int = 3) -> nn.Module:
    model, trace = build_on_meta(Net)
    return materialize(model, trace, seed=seed, device="cpu")


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 64, bias=False), nn.Linear(64, 24, bias=False))


@ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("chunk_elems", [1536, 3200])
def test_ranks_that_share_a_chunk_draw_its_numbers_once(stage: int, chunk_elems: int) -> None:
    drawn, draw = [], replay.fill_uniform_

    def counted(local: Tensor, *args: Any, **options: Any) -> Tensor:
        drawn.append(local.numel())
        return draw(local, *args, **options)

    with mock.patch.object(parameter_values, "_AT_ONCE", 64), mock.patch.object(replay, "fill_uniform_", counted):
        with ShardedInit(seed=3):
            model = layers()
        held = shared(model, stage, chunk_elems)
    numbers = sum(all_gather_object(sum(drawn), held.chunks[0].group, CPU))
    assert 2 * 24 * 64 <= numbers <= 2 * 24 * 64 + 2 * 64, "both ranks draw a row that they share"
    built, trace = build_on_meta(layers)
    wanted = materialize(built, trace, seed=3, device="cpu")
    for name, parameter in model.named_parameters():
        assert torch.equal(held.read(parameter), wanted.get_parameter(name)), name
    held.close()


@ranks(2)
def test_gemini_fills_a_model_that_was_built_under_it() -> None:
    ids = torch.arange(14).view(2, 7) % 7
    wanted = whole()
    for stage in (1, 3):
        model = sharded()
        held = shared(model, stage, 64)
        assert all(chunk.group.size == 2 for chunk in held.chunks), held.chunks
        for name, parameter in model.named_parameters():
            assert torch.equal(held.read(parameter), wanted.get_parameter(name)), (stage, name)
        assert torch.equal(model.get_buffer("table"), wanted.get_buffer("table"))
        with torch.no_grad():
            torch.testing.assert_close(model(ids), wanted(ids))
        held.close()
    assert not torch.equal(whole(4).get_parameter("embed.weight"), wanted.get_parameter("embed.weight"))


def engines(specs: list[dict[str, Any]]) -> None:
    from meshfold.engine import Engine

    wanted = Engine(Net, specs[0], seed=3).full_state_dict()
    for parallel in specs:
        found = Engine(sharded(), parallel, seed=11, optimizer="adamw").full_state_dict()
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), (parallel, name)


def test_the_engine_takes_it_under_every_spec() -> None:
    engines([{}, dict(zero=dict(stage=3))])
    run_on_ranks(
        2,
        engines,
        [dict(data=2, **zero) for zero in ({}, dict(zero=dict(stage=2)), dict(zero=dict(stage=3)))],
    )


class Forgetful(nn.Module):
    """One of its parameters is never filled."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.good = nn.Linear(3, 3)
        self.inner = nn.Module()
        if what == "parameter":
            self.inner.lost = nn.Parameter(torch.empty(3, 3))
        elif what == "half":
            self.inner.lost = nn.Parameter(torch.empty(3, 3))
            with torch.no_grad():
                self.inner.lost[:2].zero_()
        else:
            self.inner.register_buffer("lost", torch.empty(3))


@pytest.mark.parametrize("what", ["parameter", "half", "buffer"])
def test_what_stays_uninitialised_is_named(what: str) -> None:
    with ShardedInit():
        model = Forgetful(what)
    with pytest.raises(MeshfoldError, match=r"'inner\.lost' is never initialised"):
        Gemini(model, Mesh({}), stage=3, memory=Memory(CPU))


def test_parts_of_one_model_have_one_origin() -> None:
    with ShardedInit(seed=0):
        one = nn.Linear(2, 2)
    with ShardedInit(seed=1):
        other = nn.Linear(2, 2)
    with pytest.raises(MeshfoldError, match=r"'0\.weight' and '1\.weight' were built under different"):
        Gemini(nn.Sequential(one, other), Mesh({}), stage=3, memory=Memory(CPU))
    with pytest.raises(SpecError, match="seed=-1"):
        ShardedInit(seed=-1)
    with pytest.raises(ZeroDivisionError), ShardedInit():
        raise ZeroDivisionError
    assert not nn.Linear(1, 1).weight.is_meta  # what raised inside has left nothing behind
    assert "_meshfold_origin" not in vars(nn.Linear(1, 1).weight)


MIB = 2**20


def peak_mib(lazily: bool, stage: int) -> tuple[float, float]:
    """Return the most memory that tensors of this rank hold while a model of 192 MiB is built, and what they hold then."""
    with tensor_memory() as memory:
        with ShardedInit() if lazily else nullcontext():
            model = nn.ModuleList(nn.Linear(2048, 1024, bias=False) for _ in range(24))  # 8 MiB each
        held = shared(model, stage, 4 * MIB)
    held.close()
    return memory.peak / MIB, memory.held / MIB


def test_no_rank_ever_holds_more_than_its_share_and_a_chunk() -> None:
    for peak, after in run_on_ranks(2, peak_mib, True, 3):
        # 96 MiB of shards; while they are filled one chunk of 16 MiB and one parameter of 8 with its random numbers.
        assert 96 <= after < 97 and 111 < peak < 150, (peak, after)
    assert min(peak for peak, _ in run_on_ranks(2, peak_mib, False, 3)) > 192
