"""Routers against transformers' own modules, and the losses that balance them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from expert_models import EXPERTS, HIDDEN, TOP_K, close, model_of
from torch import Tensor, nn

from meshfold.experts import (
    MixtureOfExperts,
    Routing,
    SigmoidRouter,
    SoftmaxRouter,
    balance_loss,
    balance_loss_of,
    find_experts,
    keep_routing,
    routing_sums,
    sigmoid_top_k,
    softmax_top_k,
    update_selection_bias,
    z_loss,
)
from meshfold.experts.counting import rank_places
from meshfold.experts.router_logits import router_logits
from meshfold.kernels import expert_places, take_rows
from meshfold.mesh import Mesh, SpecError, record
from meshfold.mesh.testing import Operators, ranks

ROUTERS: dict[str, Any] = {
    "mixtral": lambda logits, _: softmax_top_k(logits, TOP_K),
    "qwen2": lambda logits, _: softmax_top_k(logits, TOP_K, normalize=False),
    "qwen3": lambda logits, _: softmax_top_k(logits, TOP_K, normalize=True),
    "olmoe": lambda logits, _: softmax_top_k(logits, TOP_K, normalize=False),
    "gpt-oss": lambda logits, _: softmax_top_k(logits, TOP_K, after=True),
    "deepseek": lambda logits, router: sigmoid_top_k(
        logits, TOP_K, bias=router.e_score_correction_bias, groups=4, top_groups=2, scale=router.routed_scaling_factor
    ),
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_choose_and_weigh_as_transformers_do(family: str) -> None:
    """Weights and their gradients; in float64, and in float32 where transformers casts whatever it is given."""
    model = model_of(family)
    name = find_experts(model)[0].router_name
    assert name is not None
    router = model.get_submodule(name)
    if family == "deepseek":
        router.e_score_correction_bias.copy_(torch.randn(EXPERTS))
    x = torch.randn(50, HIDDEN, dtype=torch.float64)
    logits, weights, index = router(x)
    towards = torch.randn(50, EXPERTS, dtype=torch.float64)

    def spread(index: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(50, EXPERTS, dtype=torch.float64).scatter(1, index, weights.double())

    mine = ROUTERS[family](logits if family == "gpt-oss" else logits.float(), router)
    exact = family == "gpt-oss"
    tolerance = dict(rtol=1e-12, atol=1e-12) if exact else dict(rtol=1e-6, atol=1e-7)
    assert torch.equal(mine.index.sort(1).values, index.sort(1).values)
    torch.testing.assert_close(spread(mine.index, mine.weights), spread(index, weights), **tolerance)
    found, expected = (
        torch.autograd.grad((spread(i, w) * towards).sum(), logits, retain_graph=True)[0]
        for i, w in ((mine.index, mine.weights), (index, weights))
    )
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(mine.probabilities.sum(1), torch.ones_like(mine.probabilities[:, 0]))


def test_sigmoid_chooses_within_groups_by_biased_scores_in_float64() -> None:
    logits, bias = torch.randn(200, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    routing = sigmoid_top_k(logits, 4, bias=bias, groups=4, top_groups=2, normalize=True, scale=2.5)
    for t, scores in enumerate(logits.sigmoid()):
        biased = scores + bias
        best = sorted(range(4), key=lambda g: -float(biased[3 * g : 3 * g + 3].sort().values[-2:].sum()))[:2]
        allowed = [e for e in range(12) if e // 3 in best]
        chosen = sorted(allowed, key=lambda e: -float(biased[e]))[:4]
        assert routing.index[t].tolist() == chosen
        torch.testing.assert_close(routing.weights[t], 2.5 * scores[chosen] / scores[chosen].sum(), rtol=1e-12, atol=0)


def test_modules_keep_sums_of_the_last_forward() -> None:
    layer = MixtureOfExperts(HIDDEN, 8, EXPERTS, TOP_K, router=SigmoidRouter(HIDDEN, EXPERTS, TOP_K)).bfloat16()
    x = torch.randn(3, 7, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match="no routing to balance"):
        balance_loss(layer)
    with torch.no_grad():
        layer.eval()(x[:1])
    assert layer.router.sums.tokens == 7 and not balance_loss(layer).requires_grad
    assert not layer.router.counts.any()  # the bias is moved by what is trained on
    assert layer.train()(x).dtype is torch.bfloat16 and layer.router.sums.tokens == 21
    assert layer.router.sums.counts.sum() == 21 * TOP_K and balance_loss(layer).dtype is torch.float32
    assert torch.equal(layer.router.counts, layer.router.sums.counts.bfloat16())
    assert balance_loss(layer).requires_grad and copy.deepcopy(layer).router.sums is None
    with torch.no_grad():  # as in a recomputed region whose gradient would be lost without a word
        layer(x)
    with pytest.raises(SpecError, match="no routing to balance"):
        balance_loss(layer)


def test_recomputation_changes_no_loss_and_no_gradient() -> None:
    layer = MixtureOfExperts(HIDDEN, 8, EXPERTS, TOP_K).double()
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    gradients = []
    for recomputed in (False, True):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)
        gradients.append(torch.autograd.grad(y.square().sum() + balance_loss(layer), list(layer.parameters())))
    for one, other in zip(*gradients, strict=True):
        close(one, other)


def layers_logits(generator: torch.Generator, rows: int = 30) -> list[Tensor]:
    return [torch.randn(rows, EXPERTS, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_over_the_model_is_transformers(masked: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = layers_logits(torch.Generator().manual_seed(0))
    mask = (torch.arange(30) % 3 > 0).view(2, 15) if masked else None
    expected = load_balancing_loss_func(tuple(logits), EXPERTS, TOP_K, mask)
    flat = None if mask is None else mask.flatten()
    sums = [routing_sums(softmax_top_k(each, TOP_K), flat) for each in logits]
    found = balance_loss_of(sums, over="model")
    torch.testing.assert_close(found.float(), expected, rtol=1e-6, atol=1e-6)
    by_layer = torch.stack([balance_loss_of([each], over="model") for each in sums]).mean()
    torch.testing.assert_close(balance_loss_of(sums), by_layer, rtol=1e-12, atol=0)
    assert abs(float((by_layer - found).detach())) > 1e-3
    even = Routing(
        index=torch.arange(16).view(8, 2) % EXPERTS,
        weights=torch.ones(8, 2),
        probabilities=torch.full((8, EXPERTS), 1 / EXPERTS),
        logits=torch.zeros(8, EXPERTS),
    )
    torch.testing.assert_close(balance_loss_of([routing_sums(even)]), torch.tensor(2.0))


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2", "deepseek", "gpt-oss"])
def test_routers_of_transformers_are_balanced_by_a_hook(family: str) -> None:
    model = model_of(family)
    assert not hasattr(model, "router")
    keepers = keep_routing(model)
    assert not keep_routing(model) and len(keepers) == len(find_experts(model))
    logits: list[Tensor] = []
    for block in find_experts(model):
        assert block.router_name is not None
        model.get_submodule(block.router_name).register_forward_hook(lambda m, x, y: logits.append(y[0]))
    ids = torch.randint(0, 64, (2, 9))
    model.train()(input_ids=ids)
    routings = [
        ROUTERS[family](each, model.get_submodule(b.router_name))
        for each, b in zip(logits, find_experts(model), strict=True)
    ]
    expected = balance_loss_of([routing_sums(routing) for routing in routings])
    found = balance_loss(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, check_dtype=False)
    found.backward()
    assert model.get_submodule(find_experts(model)[0].router_name).weight.grad.abs().sum() > 0
    for keeper in keepers:
        keeper.over_ranks = lambda sums: 2 * sums  # as a second rank with the same tokens would
    torch.testing.assert_close(balance_loss(model), found)
    with pytest.raises(SpecError, match="no routing"):
        balance_loss(copied := copy.deepcopy(model))  # a copy has its own hooks, which have seen nothing
    copied(input_ids=ids[:1])
    assert next(each.routing_keeper.sums.tokens for each in copied.modules() if hasattr(each, "routing_keeper")) == 9
    assert keepers[0].sums is not None and keepers[0].sums.tokens == 18
    for keeper in keepers:
        keeper.close()
    with pytest.raises(SpecError, match="no routing"):
        balance_loss(model)


def test_a_router_that_weighs_otherwise_is_refused() -> None:
    model = model_of("mixtral")
    gate = type(model.model.layers[0].mlp.gate)

    class Odd(gate):  # type: ignore[misc,valid-type]
        """Weights are the squares of the others."""

        def forward(self, x: Tensor) -> Any:
            logits, weights, index = super().forward(x)
            return logits, weights**2, index

    model.model.layers[1].mlp.gate.__class__ = Odd
    with pytest.raises(SpecError, match=r"model.layers.1.mlp.gate: its weights are neither"):
        keep_routing(model)


@ranks(4)
def test_losses_and_bias_do_not_depend_on_the_number_of_ranks() -> None:
    """Values and gradients for 1, 2 and 4 ranks that share one batch unevenly; one all-reduce for all layers."""
    mesh = Mesh({"outer": 2, "inner": 2})
    logits = layers_logits(torch.Generator().manual_seed(1), rows=24)
    batches = {
        (): [slice(0, 24)],
        ("inner",): [slice(0, 7), slice(7, 24)],
        ("outer", "inner"): [slice(0, 5), slice(5, 5), slice(5, 20), slice(20, 24)],
    }
    results = []
    for axes, slices in batches.items():
        group = mesh.group(*axes)
        mine = slices[group.index]
        share = (mine.stop - mine.start) / 24
        leaves = [each.detach()[mine].requires_grad_() for each in logits]
        sums = [routing_sums(softmax_top_k(each, TOP_K)) for each in leaves]
        with record() as log:
            loss = balance_loss_of(sums, group)
        assert len(log.entries) == (1 if axes else 0)
        total = loss + 0.1 * MixtureLosses.z(sums, group)
        whole = [each.detach().requires_grad_() for each in logits]
        whole_sums = [routing_sums(softmax_top_k(each, TOP_K)) for each in whole]
        expected = balance_loss_of(whole_sums) + 0.1 * MixtureLosses.z(whole_sums, None)
        close(total, expected)
        (total * share).backward()
        expected.backward()
        for found, wanted in zip(leaves, whole, strict=True):
            assert found.grad is not None and wanted.grad is not None
            close(found.grad, wanted.grad[mine], rtol=1e-11, atol=1e-14)
        results.append(float(total))

        torch.manual_seed(0)
        model = nn.Sequential(SigmoidRouter(HIDDEN, EXPERTS, TOP_K), SigmoidRouter(HIDDEN, 4, 1)).double()
        x = torch.randn(24, HIDDEN, dtype=torch.float64)
        counts = [router(x) and router.counts.clone() for router in model]
        update_selection_bias(model, 0.01)
        expected_bias = [router.selection_bias.clone() for router in model]
        for router, before, bias in zip(model, counts, expected_bias, strict=True):
            assert torch.equal(bias, 0.01 * (before.mean() - before).sign()) and bias.abs().sum() > 0
            router.selection_bias.zero_()
            assert not router.counts.any()
            router(x[mine])
        update_selection_bias(model, 0.01, group)
        assert all(torch.equal(router.selection_bias, bias) for router, bias in zip(model, expected_bias, strict=True))
    assert "0.selection_bias" in model.state_dict() and "0.counts" not in model.state_dict()


class MixtureLosses:
    """The z-loss of sums, by its formula's function."""

    @staticmethod
    def z(sums: Any, group: Any) -> Tensor:
        from meshfold.experts import z_loss_of

        return z_loss_of(sums, group)


def test_the_z_loss_is_its_formula() -> None:
    router = SoftmaxRouter(HIDDEN, EXPERTS, TOP_K).double()
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    router(x)
    torch.testing.assert_close(z_loss(router), (x @ router.weight.t()).logsumexp(1).square().mean(), rtol=1e-12, atol=0)


def test_a_bias_makes_the_load_even() -> None:
    """Loss-free balancing: the busiest of 8 experts, which all tokens like, ends near the mean."""
    torch.manual_seed(0)
    router = SigmoidRouter(HIDDEN, EXPERTS, TOP_K)
    with torch.no_grad():
        router.weight[0] += 1.0
    x = torch.randn(512, HIDDEN) + 0.5
    router(x)
    first = router.counts.max() / router.counts.mean()
    for _ in range(300):
        router.counts.zero_()
        router(x)
        update_selection_bias(router, 0.005)
    router(x)
    last = router.counts.max() / router.counts.mean()
    assert first > 2.5 and last < 1.2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SoftmaxRouter(8, 4, 5), "top_k=5.*1 to 4"),
        (lambda: SoftmaxRouter(8, 4, 0), "top_k=0"),
        (lambda: SigmoidRouter(8, 6, 2, groups=4), "groups=4.*divisor of 6"),
        (lambda: SigmoidRouter(8, 8, 3, groups=4, top_groups=1), "top_groups=1.*write 2 to 4"),
        (lambda: MixtureOfExperts(8, 8, 4, 2, router="best"), "router='best'.*'softmax', 'sigmoid'"),  # type: ignore[arg-type]
        (lambda: MixtureOfExperts(8, 8, 4, 2, router=SoftmaxRouter(8, 4, 1)), "4 experts of hidden=8 and top_k=2"),
        (lambda: balance_loss_of([routing_sums(softmax_top_k(torch.zeros(1, 2), 1))], over="all"), "over='all'"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        make()


def test_logits_in_bfloat16_are_those_of_float32_and_so_are_their_gradients() -> None:
    """The operands are bfloat16, their products exact in float32; gradients are rounded once, at the end."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in (33, 8))
    towards = torch.randn(33, 8, generator=generator)
    _, logits = router_logits(x, weight)
    assert logits.dtype is torch.float32 and logits.grad_fn is not None and "_Logits" in logits.grad_fn.name()
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    wanted = exact[0] @ exact[1].t()
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(logits, (x, weight), towards)
    for got, leaf in zip(gradients, torch.autograd.grad(wanted, exact, towards.double()), strict=True):
        off = (got.double() - leaf).abs().max() / leaf.abs().max()
        assert got.dtype is torch.bfloat16 and off < 2**-8
    torch.testing.assert_close(router_logits(x.float(), weight)[1], logits, rtol=1e-5, atol=1e-5)


def test_gradients_of_logits_and_experts_are_added_in_a_product() -> None:
    """Tokens that come back from the router have both gradients, with no pass that adds them."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator).bfloat16().requires_grad_() for n in (33, 8))
    to_tokens, to_logits = torch.randn(33, 64, generator=generator).bfloat16(), torch.randn(33, 8, generator=generator)
    places = torch.arange(33)

    def gradients(experts_read_tokens: bool) -> tuple[tuple[Tensor, ...], list[str]]:
        tokens, logits = router_logits(x, weight)
        rows = take_rows(tokens if experts_read_tokens else x, places, places.unsqueeze(1))
        with Operators() as seen:
            return torch.autograd.grad([rows, logits], (x, weight), [to_tokens, to_logits]), seen.seen

    (got, dweight), names = gradients(True)
    (apart, same), others = gradients(False)
    exact = to_tokens.double() + to_logits.double() @ weight.double()
    assert (got.double() - exact).abs().max() <= (apart.double() - exact).abs().max() + 1e-6
    assert torch.equal(dweight, same)
    assert "add" in others and "add" not in names and "addmm_" in names


def test_rows_are_counted_in_runs_of_tokens_too() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens in (256, 257, 700):
        index = torch.rand(tokens, 6, generator=generator).topk(2).indices
        index[3, 1], index[5, 0], index[7, 1] = index[3, 0], -1, 6
        places, pairs, ends = expert_places(index, 6)
        wanted = sorted((int(e), pair) for pair, e in enumerate(index.flatten()) if 0 <= e < 6)
        assert pairs[: len(wanted)].tolist() == [pair for _, pair in wanted]
        assert torch.equal(places.flatten()[pairs[: len(wanted)]], torch.arange(len(wanted)))
        assert ends.diff(prepend=ends.new_zeros(1)).tolist() == [
            sum(e == expert for e, _ in wanted) for expert in range(6)
        ]
        _, rows = rank_places(index, 3, 2)
        assert rows.tolist() == [int(((index >= 3 * r) & (index < 3 * r + 3)).any(1).sum()) for r in (0, 1)]


def test_compiled_layers_leave_the_router_and_the_experts_to_eager_code() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, 24, 4, 2, shared=8)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(layer, backend=backend)
    for tokens in (5, 9):
        x = torch.randn(tokens, 16, requires_grad=True)
        torch.testing.assert_close(compiled(x), layer(x))
        gradients = [torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()]) for run in (compiled, layer)]
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted)
    eager = ("grouped_mm", "autograd_function", "softmax")
    assert graphs and not any(word in code for code in graphs for word in eager)
