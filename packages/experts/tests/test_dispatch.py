"""Dispatch over ranks equals one process in float64, whatever the routing; its bytes are one copy a token and rank."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from expert_models import EXPERTS, FFN, HIDDEN, TOP_K, close, model_of, plain_mixture
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.experts import (
    ExpertRows,
    Experts,
    MixtureOfExperts,
    balance_loss,
    chosen_exchange,
    dispatch,
    feed_forward,
    find_experts,
    shard_experts,
    z_loss,
)
from meshfold.mesh import Mesh, SpecError, all_gather, all_reduce, record
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.testing import fake_world, ranks

TOKENS = (7, 0, 5, 12)  # of each rank


def routing(kind: str, tokens: int, size: int, generator: torch.Generator) -> Tensor:
    """Expert numbers [n, k]: anywhere; none to the experts of rank 1; all to two; some to nobody; one expert twice."""
    score = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "starved":
        score[:, EXPERTS // size : 2 * EXPERTS // size] -= 1
    index = score.topk(TOP_K).indices
    if kind == "one":
        index = torch.arange(TOP_K).expand(tokens, TOP_K).clone()
    if kind == "some":
        index[::2, 1] = -1
        index[1::3] = EXPERTS
    if kind == "twice":
        index[:, 1] = index[:, 0]
    return index


def of_all_ranks(kind: str, size: int) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(len(kind))
    x = [torch.randn(n, HIDDEN, dtype=torch.float64, generator=generator) for n in TOKENS[:size]]
    index = [routing(kind, n, size, generator) for n in TOKENS[:size]]
    weights = [torch.rand(n, TOP_K, dtype=torch.float64, generator=generator) for n in TOKENS[:size]]
    towards = torch.randn(sum(TOKENS[:size]), HIDDEN, dtype=torch.float64, generator=generator)
    return x, index, weights, towards


def compare(kind: str, size: int, capacity: float | None, exchange: str = "auto") -> None:
    group = Mesh({"expert": size}).group("expert")
    x, index, weights, towards = of_all_ranks(kind, size)
    torch.manual_seed(2)
    whole = Experts(HIDDEN, FFN, EXPERTS).double()
    gate_up, down = (p.detach().clone().requires_grad_() for p in (whole.gate_up, whole.down))
    all_x, all_weights = (torch.cat(parts).requires_grad_() for parts in (x, weights))
    all_index = torch.cat(index)
    valid = (all_index >= 0) & (all_index < EXPERTS)
    if capacity is not None:
        most = -(-int(all_index.numel() * capacity) // EXPERTS)
        seen = dict.fromkeys(range(EXPERTS), 0)
        for t, j in [(t, j) for t in range(len(all_index)) for j in range(TOP_K) if valid[t, j]]:
            seen[int(all_index[t, j])] += 1
            valid[t, j] = seen[int(all_index[t, j])] <= most
        assert not valid.all()
    expected = plain_mixture(all_x, all_index.clamp(0, EXPERTS - 1), all_weights, gate_up, down, valid)
    (expected * towards).sum().backward()

    [block] = find_experts(whole)
    sharded = shard_experts(block, group, capacity=capacity, exchange=exchange)
    assert [(s.offset, s.shape[0], s.whole[0]) for s in sharded.shards] == [
        (group.index * EXPERTS // size, EXPERTS // size, EXPERTS)
    ] * 2
    here = slice(sum(TOKENS[: group.index]), sum(TOKENS[: group.index + 1]))
    mine, my_weights = x[group.index].requires_grad_(), weights[group.index].requires_grad_()
    y = whole(mine, index[group.index], my_weights)
    close(y, expected[here])
    (y * towards[here]).sum().backward()
    close(mine.grad, all_x.grad[here])
    close(my_weights.grad, all_weights.grad[here])
    block_of = slice(group.index * EXPERTS // size, (group.index + 1) * EXPERTS // size)
    close(whole.gate_up.grad, gate_up.grad[block_of])
    close(whole.down.grad, down.grad[block_of])


KINDS = ("any", "starved", "one", "some", "twice")
BOTH = ("all_to_all", "all_gather")


@ranks(4)
def test_dispatch_equals_one_process_on_4() -> None:
    for exchange in BOTH:
        for kind in KINDS:
            compare(kind, 4, None, exchange)
        for kind, capacity in (("any", 0.6), ("one", 1.25), ("twice", 0.9)):
            compare(kind, 4, capacity, exchange)


def one_row(k: int, dtype: torch.dtype, exchange: str) -> None:
    """One token of rank 0 goes to k experts of rank 1, so a message is a single row; its bytes need not be aligned."""
    group = Mesh({"expert": 2}).group("expert")
    n = 1 - group.index
    tokens, weights = torch.ones(n, HIDDEN, dtype=dtype), torch.full((n, k), 0.5, dtype=dtype).requires_grad_()
    index = (torch.arange(k) + EXPERTS // 2).expand(n, k)
    y = dispatch(tokens, index, weights, lambda rows: 2 * rows.values, experts=EXPERTS, group=group, exchange=exchange)
    close(y, torch.full((n, HIDDEN), float(k), dtype=dtype))
    y.sum().backward()
    close(weights.grad, torch.full((n, k), 2.0 * HIDDEN, dtype=dtype))


@ranks(2)
def test_a_second_derivative_is_refused() -> None:
    """Second derivatives of tokens and of weights, behind a constant gradient too."""
    group = Mesh({"expert": 2}).group("expert")
    index = torch.arange(4).view(2, 2) * (EXPERTS // 4)
    for exchange in BOTH:
        tokens, weights = torch.randn(2, HIDDEN, requires_grad=True), torch.rand(2, 2, requires_grad=True)
        y = dispatch(
            tokens, index, weights, lambda rows: rows.values**2, experts=EXPERTS, group=group, exchange=exchange
        )
        gradients = torch.autograd.grad(y.sum(), (tokens, weights), create_graph=True)
        for gradient in gradients:
            with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with"):
                gradient.square().sum().backward(retain_graph=True)


@ranks(2)
def test_dispatch_equals_one_process_on_2() -> None:
    for exchange in BOTH:
        for k in (1, 3):
            for dtype in (torch.float64, torch.bfloat16):
                one_row(k, dtype, exchange)
        for kind in KINDS:
            compare(kind, 2, None, exchange)
        compare("one", 2, 1.5, exchange)


def test_dispatch_on_one_rank() -> None:
    with fake_world(1):
        for kind in KINDS:
            compare(kind, 1, None)
        compare("any", 1, 0.5)


@ranks(4)
def test_bytes_are_one_copy_of_a_token_to_each_remote_rank_and_one_back() -> None:
    group = Mesh({"expert": 4}).group("expert")
    generator = torch.Generator().manual_seed(group.index)
    tokens, k = 40, 6
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
        index = torch.rand(tokens, EXPERTS, generator=generator).topk(k).indices
        weights = torch.rand(tokens, k, generator=generator).requires_grad_()
        torch.manual_seed(0)
        experts = Experts(HIDDEN, FFN, EXPERTS).to(dtype)
        [block] = find_experts(experts)
        shard_experts(block, group, exchange="all_to_all")
        with record() as log:
            y = experts(x, index, weights)
            log.phase = "backward"
            y.float().square().sum().backward()
        owner = index // (EXPERTS // 4)
        away = sum(int((owner == rank).any(1).sum()) for rank in range(4) if rank != group.index)
        theirs = all_gather_object([int((owner == r).any(1).sum()) for r in range(4)], group, torch.device("cpu"))
        arrived = sum(counts[group.index] for rank, counts in enumerate(theirs) if rank != group.index)
        row = HIDDEN * x.element_size()
        assert away * row < int((owner != group.index).sum()) * row  # fewer than by pairs
        sent = [entry.bytes for entry in log.entries if entry.kind == "exchange_rows"]
        # tokens; weights (4 bytes) and expert numbers (4) of their rows; sums back; then gradients of sums, tokens and weights
        assert sent == [away * row, away * k * 8, arrived * row, away * row, arrived * row, arrived * k * 4]
        [sizes] = [entry for entry in log.entries if entry.kind != "exchange_rows"]
        assert (sizes.kind, sizes.phase, sizes.block_bytes) == ("all_to_all", "forward", 8 * 4 * (1 + EXPERTS // 4))


class _Poison(torch.autograd.Function):
    """Makes the rows that are nobody's NaN, and their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, filled: Tensor) -> Tensor:
        ctx.filled = int(filled)
        return _poisoned(rows, ctx.filled)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _poisoned(dy, ctx.filled), None


def _poisoned(rows: Tensor, filled: int) -> Tensor:
    rows = rows.clone()
    rows[filled:] = torch.nan
    return rows


@ranks(2)
def test_rows_of_nobody_change_neither_results_nor_gradients() -> None:
    """Experts with biases too, whose gradients are sums over rows."""
    group = Mesh({"expert": 2}).group("expert")
    generator = torch.Generator().manual_seed(group.index)
    tokens = 6 + group.index
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    index, weights = routing("some", tokens, 2, generator), torch.rand(tokens, TOP_K, generator=generator).double()
    torch.manual_seed(2)
    biased = model_of("gpt-oss").model.layers[0].mlp.experts
    for experts in (Experts(HIDDEN, FFN, EXPERTS).double(), biased):
        [block] = find_experts(experts)
        shard_experts(block, group)
        layout, seen = block.layout, list[int]()

        def run(
            rows: ExpertRows, *, poisons: bool, experts: Any = experts, layout: Any = layout, seen: list[int] = seen
        ) -> Tensor:
            if not poisons:
                return feed_forward(layout, experts, rows)
            seen.append(rows.values.shape[0] - int(rows.filled))
            values = _Poison.apply(rows.values, rows.filled)
            of_rows = None if rows.weights is None else _Poison.apply(rows.weights, rows.filled)
            return _Poison.apply(
                feed_forward(layout, experts, replace(rows, values=values, weights=of_rows)), rows.filled
            )

        found = []
        for poisons in (False, True):
            leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
            y = dispatch(
                leaves[0],
                index,
                leaves[1],
                partial(run, poisons=poisons),
                experts=EXPERTS,
                group=group,
                weighs=layout.weighs,
                exchange="all_gather",
            )
            found.append([y, *torch.autograd.grad(y.square().sum(), [*leaves, *experts.parameters()])])
        assert seen and min(seen) > 0
        for clean, poisoned in zip(*found, strict=True):
            assert torch.equal(clean, poisoned)


@ranks(4)
def test_an_all_gather_sends_each_token_to_all_ranks_and_its_host_waits_for_no_device() -> None:
    group = Mesh({"expert": 4}).group("expert")
    tokens, k, row = 10 + group.index, 3, HIDDEN * 4
    x = torch.randn(tokens, HIDDEN, requires_grad=True)
    index = torch.rand(tokens, EXPERTS).topk(k).indices
    weights = torch.rand(tokens, k, requires_grad=True)
    experts = Experts(HIDDEN, FFN, EXPERTS)
    [block] = find_experts(experts)
    shard_experts(block, group, exchange="all_gather")
    with record() as log, Waits() as waits:
        experts(x, index, weights).square().sum().backward()
    assert waits.found == ["host_numbers.py"]  # the other hosts' numbers of tokens, over gloo
    most, away = 13, 3  # the most tokens of a rank, the other ranks
    rows = [away * most * size for size in (row, k * 8, row, row, row, k * 4)]
    assert [(entry.kind, int(entry.bytes)) for entry in log.entries] == [
        ("all_reduce", 12),
        *zip(["all_gather", "all_gather", "all_to_all", "all_gather", "all_to_all", "all_to_all"], rows, strict=True),
    ]


class Waits(TorchDispatchMode):
    """Notes the files of ours in which the host reads what a device computes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_to_copy"):
            ours = [frame for frame in traceback.extract_stack() if "/src/meshfold" in frame.filename]
            if func.overloadpacket.__name__ != "_to_copy" or (kwargs or {}).get("device") is not None:
                self.found.append(ours[-1].filename.rpartition("/")[2])
        return func(*args, **(kwargs or {}))


def test_the_exchange_is_chosen_by_what_it_sends_and_allocates() -> None:
    chosen = {
        (blocks, k): chosen_exchange("auto", blocks=blocks, top_k=k) for blocks in (1, 2, 4, 8) for k in (1, 2, 8)
    }
    gathered = [key for key, how in chosen.items() if how == "all_gather"]
    assert gathered == [(1, 1), (1, 2), (1, 8), (2, 2), (2, 8)]
    assert chosen_exchange("all_gather", blocks=8, top_k=8) == "all_gather"
    with pytest.raises(SpecError, match="exchange='padded': write one of 'auto', 'all_to_all', 'all_gather'"):
        chosen_exchange("padded", blocks=2, top_k=2)


@ranks(4)
def test_a_layer_with_its_losses_on_4_equals_one_process() -> None:
    """Tokens are split over the ranks, experts too; balance loss and z-loss are those of the whole batch."""
    group = Mesh({"expert": 4}).group("expert")
    x, _, _, _ = of_all_ranks("any", 4)
    batch = torch.cat(x)
    shares = [len(rows) / len(batch) for rows in x]
    torch.manual_seed(5)
    serial = MixtureOfExperts(HIDDEN, FFN, EXPERTS, TOP_K, shared=8).double()
    layer = MixtureOfExperts(HIDDEN, FFN, EXPERTS, TOP_K, shared=8).double()
    layer.load_state_dict(serial.state_dict())
    losses = balance_loss, z_loss
    loss = serial(batch).square().mean() + sum(0.1 * f(serial) for f in losses)
    loss.backward()
    [block] = find_experts(layer)
    shard_experts(block, group)
    seen: list[int] = []
    assert layer.shared is not None
    layer.shared.register_forward_hook(lambda *_: seen.append(len(log.entries)))
    with record() as log:
        y = layer(x[group.index])
    assert (
        seen == [3] and len(log.entries) == 4
    )  # the shared expert ran while sizes, tokens and weights were on their way
    extra = sum(0.1 * f(layer, group) for f in losses)
    mine = (y.square().sum() / batch.numel() / shares[group.index] if len(y) else y.sum()) + extra
    (mine * shares[group.index]).backward()
    close(all_reduce((mine * shares[group.index]).detach(), group), loss.detach())
    for (name, own), expected in zip(layer.named_parameters(), serial.parameters(), strict=True):
        assert own.grad is not None and expected.grad is not None
        grad = own.grad
        found = all_gather(grad, group, 0) if name in block.stacked else all_reduce(grad, group)
        close(found, expected.grad, rtol=1e-11)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2", "deepseek", "gpt-oss"])
@ranks(2)
def test_transformers_models_on_2_equal_one_process(family: str) -> None:
    group = Mesh({"expert": 2}).group("expert")
    serial, model = model_of(family), model_of(family)
    ids = torch.randint(0, 64, (4, 9), generator=torch.Generator().manual_seed(0))
    output = serial(input_ids=ids, labels=ids)
    output.loss.backward()
    blocks = find_experts(model)
    for block in blocks:
        shard_experts(block, group)
    here = slice(2 * group.index, 2 * group.index + 2)
    mine = model(input_ids=ids[here], labels=ids[here])
    close(mine.logits, output.logits[here])
    (mine.loss / 2).backward()
    stacked = {name for block in blocks for name in block.stacked}
    for (name, own), expected in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert (own.grad is None) == (expected.grad is None), name
        if expected.grad is not None and own.grad is not None:
            found = all_gather(own.grad, group, 0) if name in stacked else all_reduce(own.grad, group)
            # transformers computes DeepSeek's router in float32, whatever the model's dtype
            coarse = family == "deepseek" and name.endswith("gate.weight")
            close(found, expected.grad, rtol=1e-4 if coarse else 1e-10, atol=1e-8 if coarse else 1e-12)


def test_simulated_ranks_and_the_meta_device_have_the_shapes_and_bytes_of_real_ones() -> None:
    tokens, k, size = 64, 3, 4
    with fake_world(size, rank=2):
        group = Mesh({"expert": size}).group("expert")
        for device, dtype in (
            ("cpu", torch.float64),
            ("cpu", torch.bfloat16),
            ("meta", torch.float64),
            ("meta", torch.bfloat16),
        ):
            whole = Experts(HIDDEN, FFN, EXPERTS).to(dtype)
            [block] = find_experts(whole)
            shard_experts(block, group)
            whole = whole.to(device)
            generator = torch.Generator().manual_seed(0)
            index = torch.rand(tokens, EXPERTS, generator=generator).topk(k).indices
            owner = index // (EXPERTS // size)
            away = sum(int((owner == rank).any(1).sum()) for rank in range(size) if rank != 2)
            x = torch.ones(tokens, HIDDEN, dtype=dtype, device=device, requires_grad=True)
            weights = torch.ones(tokens, k, device=device, requires_grad=True)
            with record() as log:
                whole(x, index.to(device), weights).sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape and whole.down.grad is not None
            sent = [entry.bytes for entry in log.entries if entry.kind == "exchange_rows"]
            if device == "meta":  # of 8 experts in 4 pairs, 3 miss a pair with 20 / 56
                away = round(tokens * (1 - 20 / 56)) * (size - 1)
            row = HIDDEN * x.element_size()
            assert sent == [away * row, away * k * 8, away * row, away * row, away * row, away * k * 4]
            del block
    alone = Experts(HIDDEN, FFN, EXPERTS).to("meta")
    y = alone(x.detach(), index.to("meta"), weights.detach().float())
    assert y.shape == (tokens, HIDDEN)


def test_what_cannot_be_split_is_refused() -> None:
    [block] = find_experts(Experts(8, 12, 6))
    with fake_world(4):
        group = Mesh({"expert": 4}).group("expert")
        with pytest.raises(
            SpecError, match=r"6 experts cannot be split evenly over 4 ranks.*that divides 6: 1, 2, 3, 6"
        ):
            shard_experts(block, group)
    assert block.experts.get_parameter("down").shape[0] == 6
    shard_experts(block)
    with pytest.raises(SpecError, match="forward has been replaced"):
        shard_experts(block)
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="index \\[n, k\\]"):
        dispatch(x, torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3, 1), lambda rows: rows.values, experts=6)


@ranks(2)
def test_tokens_in_fp8_are_off_by_a_sixteenth_at_most_and_half_the_bytes() -> None:
    group = Mesh({"expert": 2}).group("expert")
    generator = torch.Generator().manual_seed(group.index)
    wide = 64
    x = torch.randn(20, wide, generator=generator).bfloat16()
    index = torch.rand(20, EXPERTS, generator=generator).topk(TOP_K).indices
    weights = torch.rand(20, TOP_K, generator=generator)

    def found(fp8: bool, exchange: str) -> tuple[Tensor, Tensor, list[int]]:
        leaf = x.clone().requires_grad_()
        with record() as log:
            y = dispatch(
                leaf,
                index,
                weights,
                lambda rows: 2 * rows.values,
                experts=EXPERTS,
                group=group,
                fp8=fp8,
                exchange=exchange,
            )
            (y.float() * x.float().flip(0)).sum().backward()
        assert leaf.grad is not None
        _, *sent = log.entries  # first the numbers of rows, or of tokens
        return y.detach().float(), leaf.grad.float(), [int(entry.bytes) for entry in sent]

    whole = 2 * weights.sum(1, keepdim=True)
    for exchange in BOTH:
        (y, dx, sent), (y8, dx8, sent8) = found(False, exchange), found(True, exchange)
        for got, exact, of in ((y8, y, x.float()), (dx8, dx, x.float().flip(0))):
            off, rounding = (got - exact).abs(), 2**-7 * exact.abs()  # both are rounded to bfloat16
            assert float(off.max()) > 0 and bool(
                (off <= whole * (of.abs() / 16 + of.abs().amax(1, keepdim=True) / 2**17) + rounding).all()
            )
        assert [a * (wide + 4) // (2 * wide) for a in (sent[0], sent[3])] == [sent8[0], sent8[3]]
        assert sent[1:3] + sent[4:] == sent8[1:3] + sent8[4:]
