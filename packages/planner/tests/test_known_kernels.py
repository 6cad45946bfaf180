"""Kernels whose reference ran for arguments of one kind are not run again: plans stay exactly as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from meshfold.mesh import MetaMesh, ParallelSpec, all_reduce, record
from meshfold.mesh.model_io import LiveBytes, OperatorCounter, known_kernels, operators
from meshfold.mesh.model_io.nested_tensors import tensors_in
from meshfold.models import Llama, LlamaConfig
from meshfold.planner import MACHINES, Estimate, estimate


def small() -> nn.Module:
    return Llama(LlamaConfig(vocab_size=512, hidden=64, layers=8, heads=4, kv_heads=2, ffn=128, max_positions=64))


def planned(spec: dict[str, Any], ranks: int, recompute: str | None) -> Estimate:
    found = estimate(
        small,
        ParallelSpec.parse(spec, ranks),
        batch_size=8,
        seq_len=64,
        precision="bf16",
        recompute=recompute,
        machine=MACHINES["h100x8"],
    )
    return replace(found, seconds=0.0)


def always(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], count: Callable[..., Any]
) -> Any:
    return count(lambda: function(*args, **kwargs))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("spec", "ranks", "recompute"),
    [
        ({}, 1, None),
        ({}, 1, "blocks"),
        (dict(tensor=2), 2, None),
        (dict(data=2, tensor=4), 8, None),
        (dict(data=2, zero=dict(stage=3)), 2, "auto"),
        (dict(pipeline=dict(size=2, microbatches=4)), 2, None),
    ],
)
def test_plan_is_that_of_every_run(
    spec: dict[str, Any], ranks: int, recompute: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_kernels._known.clear()
    runs: Counter[str] = Counter()

    def counting(how: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(function: Callable[..., Any], args: Any, kwargs: Any, count: Callable[..., Any]) -> Any:
            def counted(inside: Callable[[], Any]) -> Any:
                runs[name] += 1
                return count(inside)

            return how(function, args, kwargs, counted)

        return run

    once = counting(known_kernels.run_once, "once")
    monkeypatch.setattr(operators, "run_once", once)
    got = planned(spec, ranks, recompute)
    monkeypatch.setattr(operators, "run_once", counting(always, "always"))
    want = planned(spec, ranks, recompute)
    assert 0 < runs["once"] < 0.7 * runs["always"]
    for name in vars(want):
        assert repr(getattr(got, name)) == repr(getattr(want, name)), name
    assert got.memory == want.memory
    assert got.work == want.work


def test_a_later_plan_has_the_same_messages() -> None:
    """Its kernels have all run with such arguments: those of a loss whose vocabulary is split left their messages out."""
    known_kernels._known.clear()
    first, second = (planned(dict(data=2, tensor=4), 8, None).traffic for _ in range(2))
    assert first == second
    loss = [entry for entry in second if entry.axes == ("tensor",) and entry.kind == "all_reduce"]
    assert loss and known_kernels._known


def summed(x: Tensor) -> Tensor:
    return all_reduce(x * 1, MetaMesh(dict(tensor=2)).group("tensor"))


def test_a_kernel_that_sends_runs_every_time() -> None:
    known_kernels._known.clear()
    for _ in range(2):
        with torch.no_grad(), record(on_meta=True) as log, OperatorCounter() as counter:
            counter.as_one(summed)(torch.empty(8, device="meta"))
        assert len(log.entries) == 1


def test_a_kernel_runs_every_time_for_others_that_count() -> None:
    """A backward under a counter of its own calls the functions that its forward's counter has wrapped."""
    known_kernels._known.clear()
    x, first = torch.empty(8, 8, device="meta"), OperatorCounter()
    kernel = first.as_one(doubled)
    with torch.no_grad():
        with first:
            kernel(x)
        for _ in range(2):
            with OperatorCounter() as other:
                kernel(x)
            assert other.flop == 2 * 8**3
            with LiveBytes() as live:
                kernel(x)
            assert live.take()[0] == 8 * 8 * 4


def test_tensors_are_those_that_torch_finds() -> None:
    x, y = torch.ones(2), nn.Parameter(torch.ones(3))
    named = torch.max(torch.ones(2, 2), 0)  # a tuple with names, which torch's registry knows
    nested = ((x, [y, None, 2]), dict(b=named, a=(x,)), torch.float32)
    want = [each for each in tree_iter(nested) if isinstance(each, Tensor)]
    found = tensors_in(nested)
    assert len(want) == 5
    assert [*map(id, found)] == [*map(id, want)]


def doubled(x: Tensor) -> Tensor:
    return x @ x


def in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.add_(1), x[0] * 1


def first_row(x: Tensor) -> Tensor:
    return x[0]


def halves(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).chunk(2)


@pytest.mark.parametrize("kernel", [doubled, in_place, first_row, halves])
def test_results_are_those_of_a_run(kernel: Callable[..., Any]) -> None:
    """FLOP, bytes, the bytes alive, and which results are the argument or share its memory."""
    known_kernels._known.clear()
    seen = []
    for _ in range(2):
        x = torch.empty(8, 8, device="meta")
        with torch.no_grad(), OperatorCounter() as counter, LiveBytes() as live:
            made = live.as_one(counter.as_one(kernel))(x)
            each = made if isinstance(made, tuple) else (made,)
            seen.append(
                (
                    dict(counter.counts),
                    live.bytes,
                    [(one is x, one.shape, one.stride(), one.dtype) for one in each],
                    [one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in each],
                )
            )
    assert seen[0] == seen[1]


def test_arguments_of_another_kind_run_the_kernel() -> None:
    known_kernels._known.clear()
    with torch.no_grad():
        for shape, dtype in ((4, torch.float32), (8, torch.float32), (8, torch.bfloat16)):
            with OperatorCounter() as counter:
                made = counter.as_one(doubled)(torch.empty(shape, shape, dtype=dtype, device="meta"))
            assert (counter.flop, made.shape, made.dtype) == (2 * shape**3, (shape, shape), dtype)
        with OperatorCounter() as counter:
            real = torch.eye(4)
            assert counter.as_one(doubled)(real).equal(counter.as_one(doubled)(real))
