"""The products of experts with the passes before them, against the same in plain operations of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.experts import ExpertRows, Experts, feed_forward
from meshfold.experts.beside import beside
from meshfold.kernels import expert_places

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 7, 6, 5, 4, 2


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("frozen", ["", "tokens", "weights", "gate_up", "down", "experts"])
def test_rows_run_their_experts(keeps: bool, weighted: bool, frozen: str) -> None:
    """Values and every gradient in float64. Expert 2 has no rows, one token has one expert, and three rows are nobody's."""
    torch.manual_seed(0)
    experts = Experts(HIDDEN, FFN, EXPERTS).double()
    tokens = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=frozen != "tokens")
    index = torch.tensor([[0, 1], [3, 0], [1, 3], [0, 3], [1, -1], [3, 1], [0, 1]])
    places, pairs, ends = expert_places(index, EXPERTS, index.numel() + 2)
    of_rows = torch.rand(len(pairs), dtype=torch.float64, requires_grad=frozen != "weights")
    for name, parameter in experts.named_parameters():
        parameter.requires_grad_(frozen not in (name, "experts"))
    filled = int(ends[-1])
    rows = ExpertRows(
        tokens=tokens, pairs=pairs, places=places, ends=ends, weights=of_rows if weighted else None, keeps=keeps
    )
    y = feed_forward(experts.layout, experts, rows)[:filled]

    expert = torch.bucketize(torch.arange(filled), ends, right=True)
    gate, up = torch.einsum("mh,mfh->mf", tokens[pairs[:filled] // TOP_K], experts.gate_up[expert]).chunk(2, 1)
    hidden = F.silu(gate) * up * (of_rows[:filled].unsqueeze(1) if weighted else 1)
    wanted = torch.einsum("mf,mhf->mh", hidden, experts.down[expert])
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)

    leaves = [each for each in (tokens, of_rows if weighted else None, *experts.parameters()) if each is not None]
    leaves = [each for each in leaves if each.requires_grad]
    towards = torch.randn_like(wanted)
    for got, want in zip(
        torch.autograd.grad(y, leaves, towards), torch.autograd.grad(wanted, leaves, towards), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_rows_are_kept_or_copied_again() -> None:
    """Of a layer's rows and its tokens, backward keeps one."""
    torch.manual_seed(0)
    experts = Experts(HIDDEN, FFN, EXPERTS)
    tokens = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    places, pairs, ends = expert_places(torch.randint(EXPERTS, (TOKENS, TOP_K)), EXPERTS)
    kept: dict[bool, set[tuple[int, ...]]] = {}
    for keeps in (True, False):
        kept[keeps] = seen = set[tuple[int, ...]]()

        def save(x: Tensor, seen: set[tuple[int, ...]] = seen) -> Tensor:
            seen.add(tuple(x.shape))
            return x

        rows = ExpertRows(tokens=tokens, pairs=pairs, places=places, ends=ends, weights=torch.rand(14), keeps=keeps)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            feed_forward(experts.layout, experts, rows)
    assert kept[True] - kept[False] == {(TOKENS * TOP_K, HIDDEN)}
    assert kept[False] - kept[True] == {(TOKENS, HIDDEN)}


def test_both_parts_run() -> None:
    order: list[str] = []
    assert beside(lambda: order.append("product") or 1, lambda: order.append("passes") or 2, torch.zeros(1)) == (1, 2)
    assert order == ["product", "passes"]
