"""The host's work on gradients: no call of Python for a parameter, and operators a bucket at most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshfold.engine.precision import Masters, Precision
from meshfold.engine.states import GradientReducer
from meshfold.mesh import Mesh
from meshfold.mesh.parameters import accumulate_grad, accumulate_grad_product
from meshfold.mesh.testing import Operators


def _reducer(model: nn.Module, bucket_bytes: int) -> tuple[GradientReducer, Masters]:
    parameters = list(model.parameters())
    masters = Masters(parameters, Precision.parse("bf16"))
    return GradientReducer(parameters, masters, Mesh({}), bucket_bytes=bucket_bytes), masters


def _hooks(model: nn.Module) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters())


def test_first_gradients_cost_one_copy_without_hooks_and_a_second_micro_step_one_sum_and_one_hook_a_bucket() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(12)))
    reducer, masters = _reducer(model, 4 * 8 * 9 * 4)
    reducer.reset()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    wanted: list[Tensor] = []
    for last, name in ((False, "_foreach_copy_"), (True, "_foreach_add_")):
        gradients = torch.autograd.grad(model(x).float().square().sum(), list(model.parameters()))
        wanted = (
            [g.float() for g in gradients] if not wanted else [w + g for w, g in zip(wanted, gradients, strict=True)]
        )
        loss = model(x).float().square().sum()
        with Operators() as operators, reducer.backward(last=last):
            loss.backward()
        assert 1 < len(reducer.buckets) <= 6
        # The first gradients wait for the end of backward, and are copied together; sums are made while backward runs.
        assert operators.seen[name] == (1 if name == "_foreach_copy_" else len(reducer.buckets))
        assert _hooks(model) == (0 if name == "_foreach_copy_" else len(reducer.buckets))
        assert not {"copy_", "add_", "fill_", "slice"} & operators.seen.keys()
        assert all(parameter.grad is None for parameter in model.parameters())
    reducer.finish()
    for parameter, want in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(masters.of(parameter).grad, want)
    reducer.close()


def test_gradients_that_wait_for_their_bucket_are_counted_and_written_at_the_end_of_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    reducer, masters = _reducer(model, 1 << 20)
    held: list[int] = []
    handle = model[0].weight.register_hook(lambda gradient: held.append(reducer.held_bytes))
    loss = model[0](torch.randn(3, 8, dtype=torch.bfloat16)).float().sum()
    second = model[1](torch.randn(3, 8, dtype=torch.bfloat16)).float().sum()
    reducer.reset()
    with reducer.backward(last=False):
        second.backward()
        assert reducer.held_bytes == 8 * 8 * 2  # in bfloat16, until backward has ended
        loss.backward()
        assert held == [8 * 8 * 2]
        assert reducer.held_bytes == 2 * 8 * 8 * 2
    assert reducer.held_bytes == 2 * 8 * 8 * 4
    reducer.reset()
    with reducer.backward(last=True):
        model[1](torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
    reducer.finish()
    assert masters.of(model[0].weight).grad is None  # no rank used it
    torch.testing.assert_close(masters.of(model[1].weight).grad, torch.ones(8, 8))
    handle.remove()
    reducer.close()


def test_gradients_of_other_losses_and_of_aborted_backwards_are_dropped() -> None:
    model = nn.Linear(8, 8, bias=False)
    reducer, masters = _reducer(model, 1 << 20)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    reducer.reset()
    model(7 * x).float().sum().backward()  # between two steps

    def abort() -> None:
        with reducer.backward(last=False):
            model(5 * x).float().sum().backward()
            raise KeyError

    with pytest.raises(KeyError):
        abort()
    assert model.weight.grad is None
    for factor, last in ((1, False), (2, True)):
        model(7 * x).float().sum().backward()
        with reducer.backward(last=last):
            model(factor * x).float().sum().backward()
    reducer.finish()
    torch.testing.assert_close(masters.of(model.weight).grad, torch.full((8, 8), 3.0))
    reducer.close()
    assert _hooks(model) == 0


def test_hooks_of_users_see_and_change_whole_gradients() -> None:
    model = nn.Linear(8, 8, bias=False)
    seen: list[float] = []

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(float(parameter.grad[0, 0]))
        parameter.grad.mul_(0.5)

    reducer, masters = _reducer(model, 1 << 20)
    handle = model.weight.register_post_accumulate_grad_hook(halve)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    reducer.reset()
    with reducer.backward(last=True):
        model(4 * x).float().sum().backward()
    reducer.finish()
    assert seen == [4.0]
    torch.testing.assert_close(masters.of(model.weight).grad, torch.full((8, 8), 2.0))
    handle.remove()
    reducer.close()


def test_a_parameter_of_several_recomputed_blocks_has_the_sum_of_its_gradients() -> None:
    model = nn.Linear(8, 8, bias=False)
    reducer, masters = _reducer(model, 1 << 20)
    x = torch.randn(3, 8, dtype=torch.bfloat16, requires_grad=True)

    def twice(reentrant: bool | None) -> Tensor:
        y = x
        for _ in range(2):
            y = model(y) if reentrant is None else checkpoint(model, y, use_reentrant=reentrant)
        return y.float().square().sum()

    [wanted] = torch.autograd.grad(twice(None), [model.weight])
    for reentrant in (True, False):
        reducer.reset()
        with reducer.backward(last=True):
            twice(reentrant).backward()
        reducer.finish()
        torch.testing.assert_close(masters.of(model.weight).grad, wanted.float(), rtol=0.02, atol=0.02)
    reducer.close()


def test_products_go_into_their_bucket_beside_whole_gradients_and_not_past_hooks_of_others() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2)).double()
    parameters = list(model.parameters())
    masters = Masters(parameters, Precision.parse("fp64"))
    reducer = GradientReducer(parameters, masters, Mesh({}), several=True)
    first, second, bias = parameters
    wanted = {parameter: torch.zeros_like(parameter) for parameter in parameters}

    def give(weight: nn.Parameter) -> None:
        left, right = torch.randn(weight.shape[0], 5).double(), torch.randn(5, weight.shape[1]).double()
        wanted[weight] += left @ right
        with torch.no_grad():
            accumulate_grad_product(weight, left, right)

    for step in range(3):
        with reducer.backward(last=step == 2), Operators() as operators:
            give(first)
            if step == 1:  # a whole gradient between products
                gradient = torch.randn_like(second)
                wanted[second] += gradient
                accumulate_grad(second, gradient)
            else:
                give(second)
            accumulate_grad(bias, torch.ones_like(bias))
            wanted[bias] += 1
        assert operators.seen["addmm_"] == step, "a product is added where a part has come before"
    reducer.finish(0.5)
    for parameter in parameters:
        torch.testing.assert_close(masters.of(parameter).grad, wanted[parameter] / 2, rtol=1e-12, atol=1e-12)
    seen: list[bool] = []
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(True))
    with reducer.backward(last=True):
        give(first)
    assert seen == [True]
    reducer.close()


def test_vectors_of_a_micro_step_are_added_by_one_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.LayerNorm(6) for _ in range(4)], nn.Linear(6, 6)).double()
    parameters = list(model.parameters())
    masters = Masters(parameters, Precision.parse("fp64"))
    reducer = GradientReducer(parameters, masters, Mesh({}), several=True)
    batches = [torch.randn(5, 6, dtype=torch.float64) for _ in range(4)]
    wanted = torch.autograd.grad(sum(model(x).square().sum() for x in batches), parameters)
    with Operators() as operators:
        with reducer.backward(last=True):
            for x in batches:
                model(x).square().sum().backward()
            reducer.complete(parameters)
        reducer.finish()
    assert operators.seen["_foreach_add_"] == len(batches), "the matrix takes the vectors that wait with it"
    for parameter, gradient in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(masters.of(parameter).grad, gradient, rtol=1e-12, atol=1e-12)
    reducer.close()
