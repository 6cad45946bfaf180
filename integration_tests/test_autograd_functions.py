"""Every autograd function of the packages under torch.compile: the results and gradients of eager, in every torch.

A compiler may take a function's backward from it without a word (see :mod:`meshfold.mesh.collectives.primitives`), so
what is compared
are numbers, and that a function takes part at all is seen in autograd's graph of the eager run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch._dynamo
from torch import Tensor

from integration_tests.autograd_cases import CASES, NOT_COMPILED, Called, Case, found
from meshfold.mesh.testing import run_on_ranks

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-6}
NAMED = {case.name: case for case in CASES}


def chosen(ranks: int) -> list[object]:
    """Per function the first of its cases, by the cheapest compiler in float32; all the rest is slow."""
    first = {case.function: case for case in reversed(CASES)}
    return [
        pytest.param(
            case.name,
            dtype,
            backend,
            id=f"{case.name}-{str(dtype).removeprefix('torch.')}-{backend}",
            marks=() if (case, dtype, backend) == (first[case.function], torch.float32, "eager") else pytest.mark.slow,
        )
        for case in CASES
        if case.ranks == ranks
        for dtype in TOLERANCES
        for backend in ("eager", "aot_eager")
    ]


def results(call: Callable[..., Tensor | tuple[Tensor, ...]], leaves: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """What a call gives."""
    made = call(*leaves)
    return made if isinstance(made, tuple) else (made,)


def gradients(made: tuple[Tensor, ...], leaves: Iterable[Tensor]) -> list[Tensor | None]:
    """Of all the leaves, towards a different weight for each element."""
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(made, [torch.arange(y.numel()).cos().to(y).view(y.shape) for y in made])
    return [leaf.grad for leaf in leaves]


def nodes(made: tuple[Tensor, ...]) -> set[str]:
    """The names of all nodes of autograd's graph."""
    seen, waiting = set(), [y.grad_fn for y in made]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(before for before, _ in node.next_functions)
    return {node.name() for node in seen}


def compare(name: str, dtype: torch.dtype, backend: str) -> None:
    case: Case = NAMED[name]
    called: Called = case.make(dtype)
    call, leaves = called
    plain = results(call, leaves)
    assert any(node.startswith(case.node) for node in nodes(plain)), nodes(plain)
    wanted = gradients(plain, leaves)
    assert all(gradient is not None and gradient.any() for gradient in wanted)
    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=not case.breaks, dynamic=False)
    again = results(compiled, leaves)
    tolerance = TOLERANCES[dtype]
    for got, exact in zip((*again, *gradients(again, leaves)), (*plain, *wanted), strict=True):
        torch.testing.assert_close(got, exact, rtol=tolerance, atol=tolerance)


def test_every_function_is_here() -> None:
    """A new one needs a line in autograd_cases.py; one that has gone leaves none behind."""
    listed = {case.function for case in CASES} | NOT_COMPILED.keys()
    assert found() == listed


@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "dtype", "backend"), chosen(1))
def test_compiled_gradients_are_those_of_eager(name: str, dtype: torch.dtype, backend: str) -> None:
    compare(name, dtype, backend)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "dtype", "backend"), chosen(2))
def test_compiled_gradients_are_those_of_eager_on_two_ranks(name: str, dtype: torch.dtype, backend: str) -> None:
    run_on_ranks(2, compare, name, dtype, backend)


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_what_a_function_gives_may_be_changed_in_place(compiles: bool) -> None:
    """Autograd refuses it for a view that a function made; here nothing is saved of what is changed."""
    call, leaves = NAMED["tensor_parallel.matmul._make_product.Matmul, stream column on 1"].make(torch.float32)

    def doubled(*given: Tensor) -> Tensor:
        (y,) = results(call, given)
        return y.mul_(2.0)

    wanted = gradients(results(call, leaves), leaves)
    found = gradients(results(torch.compile(doubled, backend="eager") if compiles else doubled, leaves), leaves)
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, None if exact is None else 2.0 * exact)
