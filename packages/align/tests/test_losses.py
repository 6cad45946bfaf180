"""Each loss equals a reference that is written out here, number by number; gradients are torch's of the same reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from meshfold.align import (
    clipped_policy_losses,
    clipped_value_losses,
    dpo_losses,
    gae,
    group_advantages,
    importance_weights,
    kl_penalties,
    kto_baseline,
    kto_losses,
    leave_one_out,
    odds_ratio_losses,
    reward_losses,
    rewards_of_tokens,
    simpo_losses,
    whiten,
)
from meshfold.mesh import SpecError

TOLERANCE = dict(rtol=1e-12, atol=1e-12)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator) * scale


def lengths_mask(lengths: list[int], width: int) -> Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def same_gradients(ours: Callable[..., Tensor], theirs: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare losses, and the gradients of their weighted sum."""
    mine, other = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found, expected = ours(*mine), theirs(*other)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    towards = numbers(*found.shape, seed=9)
    for x, y in zip(
        torch.autograd.grad((found * towards).sum(), mine),
        torch.autograd.grad((expected * towards).sum(), other),
        strict=True,
    ):
        torch.testing.assert_close(x, y, **TOLERANCE)


def log_sigmoid(x: Tensor) -> Tensor:
    return -torch.log(1 + torch.exp(-x))


def pair_reference(kind: str, beta: float, smoothing: float, lengths: tuple[Tensor, Tensor]) -> Callable[..., Tensor]:
    def reference(a: Tensor, b: Tensor, ra: Tensor, rb: Tensor) -> Tensor:
        rows = []
        for i in range(len(a)):
            h = (a[i] - ra[i]) - (b[i] - rb[i])
            if kind == "sigmoid":
                rows.append(-(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h))
            elif kind == "hinge":
                rows.append((1 - beta * h) if beta * h < 1 else 0 * h)
            elif kind == "ipo":
                h = (a[i] - ra[i]) / lengths[0][i] - (b[i] - rb[i]) / lengths[1][i]
                rows.append((h - 0.5 / beta) ** 2)
            else:
                good, bad = -log_sigmoid(beta * h), -log_sigmoid(-beta * h)
                rows.append(((1 - smoothing) * good - smoothing * bad) / (1 - 2 * smoothing))
        return torch.stack(rows)

    return reference


@pytest.mark.parametrize(
    ("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.2)]
)
def test_dpo_family(kind: str, smoothing: float) -> None:
    lengths = torch.tensor([3, 1, 7, 2]), torch.tensor([1, 9, 2, 4])
    logs = [numbers(4, seed=seed, scale=6) - 8 for seed in range(4)]
    same_gradients(
        lambda *x: dpo_losses(*x, kind=kind, beta=0.3, label_smoothing=smoothing, lengths=lengths),
        pair_reference(kind, 0.3, smoothing, lengths),
        *logs,
    )


def test_losses_without_a_reference() -> None:
    chosen, rejected = -numbers(5, seed=1).abs() - 0.05, -numbers(5, seed=2).abs() * 3 - 0.05
    same_gradients(
        lambda a, b: simpo_losses(a, b, beta=2.5, gamma=0.8),
        lambda a, b: -log_sigmoid(2.5 * (a - b) - 0.8),
        chosen,
        rejected,
    )

    def odds(x: Tensor) -> Tensor:
        return torch.exp(x) / (1 - torch.exp(x))

    same_gradients(odds_ratio_losses, lambda a, b: -log_sigmoid(torch.log(odds(a) / odds(b))), chosen, rejected)
    certain = torch.zeros(1, dtype=torch.float64, requires_grad=True)  # p = 1: the odds are infinite
    [slope] = torch.autograd.grad(odds_ratio_losses(certain, torch.tensor([-1.0], dtype=torch.float64)).sum(), certain)
    assert slope.isfinite().all()


def test_reward_model() -> None:
    a, b, margin = numbers(6, seed=1), numbers(6, seed=2), numbers(6, seed=3).abs()
    same_gradients(lambda a, b: reward_losses(a, b), lambda a, b: -log_sigmoid(a - b), a, b)
    same_gradients(
        lambda a, b: reward_losses(a, b, margin, centering=0.01),
        lambda a, b: -log_sigmoid(a - b - margin) + 0.01 * (a + b) ** 2,
        a,
        b,
    )


def test_kto() -> None:
    ratios, good = numbers(6, scale=3), torch.tensor([True, False, True, True, False, False])
    baseline = kto_baseline(torch.tensor([0.5, -0.1, 2.0], dtype=torch.float64), torch.tensor([True, True, False]))
    assert float(baseline) == pytest.approx(0.2)
    assert float(kto_baseline(torch.tensor([-3.0, 1.0]))) == 0.0

    def reference(x: Tensor) -> Tensor:
        rows = [
            1.5 * (1 - 1 / (1 + torch.exp(-0.2 * (x[i] - 0.2))))
            if good[i]
            else 0.5 * (1 - 1 / (1 + torch.exp(-0.2 * (0.2 - x[i]))))
            for i in range(6)
        ]
        return torch.stack(rows)

    same_gradients(
        lambda x: kto_losses(x, good, baseline, beta=0.2, desirable_weight=1.5, undesirable_weight=0.5),
        reference,
        ratios,
    )


class PlainPPO:
    """PPO of a batch in loops over sequences and tokens, from the papers' formulas."""

    def __init__(self, lengths: list[int], gamma: float, lam: float, coefficient: float) -> None:
        self.lengths, self.gamma, self.lam, self.coefficient = lengths, gamma, lam, coefficient

    def advantages(self, scores: Tensor, logs: Tensor, reference: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found, returns = torch.zeros_like(values), torch.zeros_like(values)
        for i, n in enumerate(self.lengths):
            reward = [-self.coefficient * (logs[i, t] - reference[i, t]) for t in range(n)]
            if n:
                reward[-1] = reward[-1] + scores[i]
            for t in range(n):
                total, factor = 0.0, 1.0
                for u in range(t, n):  # the sum of discounted temporal differences, not the recursion
                    after = values[i, u + 1] if u + 1 < n else 0.0
                    total = total + factor * (reward[u] + self.gamma * after - values[i, u])
                    factor *= self.gamma * self.lam
                found[i, t], returns[i, t] = total, total + values[i, t]
        return found, returns

    def whitened(self, advantages: Tensor) -> Tensor:
        flat = [float(advantages[i, t]) for i, n in enumerate(self.lengths) for t in range(n)]
        mean = sum(flat) / len(flat)
        variance = sum((x - mean) ** 2 for x in flat) / (len(flat) - 1)
        found = torch.zeros_like(advantages)
        for i, n in enumerate(self.lengths):
            for t in range(n):
                found[i, t] = (advantages[i, t] - mean) / math.sqrt(variance + 1e-8)
        return found

    @staticmethod
    def policy(log: Tensor, old: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> Tensor:
        r = torch.exp(log - old)
        kept = r if 1 - low < r < 1 + high else torch.tensor(1 - low if r < 1 else 1 + high, dtype=r.dtype) + 0 * r
        better = r * advantage if r * advantage < kept * advantage else kept * advantage
        if dual is not None and advantage < 0 and better < dual * advantage:
            better = dual * advantage + 0 * r
        return -better

    @staticmethod
    def value(value: Tensor, old: Tensor, goal: Tensor, clip: float) -> Tensor:
        near = (
            value
            if abs(difference := float((value - old).detach())) < clip
            else old + math.copysign(clip, difference) + 0 * value
        )
        squares = (value - goal) ** 2, (near - goal) ** 2
        return (squares[0] if squares[0] > squares[1] else squares[1]) / 2


def test_ppo_equals_plain_loops() -> None:
    lengths = [4, 1, 0, 6]
    mask = lengths_mask(lengths, 6)
    plain = PlainPPO(lengths, 0.97, 0.9, 0.05)
    old, reference, values, scores = (
        numbers(4, 6) - 2,
        numbers(4, 6, seed=1) - 2,
        numbers(4, 6, seed=2),
        numbers(4, seed=3),
    )
    rewards = rewards_of_tokens(scores, kl_penalties(old, reference, "k1"), mask, 0.05)
    advantages, returns = gae(rewards, values, mask, gamma=0.97, lam=0.9)
    expected, goals = plain.advantages(scores, old, reference, values)
    torch.testing.assert_close(advantages, expected, **TOLERANCE)
    torch.testing.assert_close(returns, goals, **TOLERANCE)
    white = whiten(advantages, mask)
    torch.testing.assert_close(white, plain.whitened(advantages), **TOLERANCE)
    torch.testing.assert_close(whiten(advantages, mask, shift=False)[mask].var(), torch.ones((), dtype=torch.float64))

    now = old + numbers(4, 6, seed=4, scale=0.5)
    for low, high, dual in ((0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.2, 1.5)):

        def loops(x: Tensor, low: float = low, high: float = high, dual: float | None = dual) -> Tensor:
            each = [
                plain.policy(x[i, t], old[i, t], white[i, t], low, high, dual)
                for i, n in enumerate(lengths)
                for t in range(n)
            ]
            return torch.stack(each)

        def ours(x: Tensor, low: float = low, high: float = high, dual: float | None = dual) -> Tensor:
            return clipped_policy_losses(x, old, white, mask, low=low, high=high, dual=dual)[mask]

        same_gradients(ours, loops, now)
    same_gradients(
        lambda x: clipped_value_losses(x, values, returns, 0.2)[mask],
        lambda x: torch.stack(
            [plain.value(x[i, t], values[i, t], returns[i, t], 0.2) for i, n in enumerate(lengths) for t in range(n)]
        ),
        values + numbers(4, 6, seed=5, scale=0.4),
    )
    assert torch.equal(clipped_value_losses(values, values, returns, None), (values - returns) ** 2 / 2)


def test_ratio_of_a_sequence_is_the_geometric_mean() -> None:
    mask = lengths_mask([3, 2], 4)
    logs, old, advantages = (
        numbers(2, 4) - 1,
        numbers(2, 4, seed=1) - 1,
        torch.tensor([[1.0], [-2.0]], dtype=torch.float64),
    )
    found = clipped_policy_losses(logs, old, advantages, mask, low=0.9, high=5.0, ratio_of="sequence")
    for i, n in enumerate((3, 2)):
        ratio = math.exp(float((logs - old)[i, :n].mean()))
        kept = min(max(ratio, 0.1), 6.0)
        assert float(found[i, 0]) == pytest.approx(-min(ratio * float(advantages[i]), kept * float(advantages[i])))


def test_kl_estimates() -> None:
    a, b = numbers(3, 4) - 1, numbers(3, 4, seed=1) - 1
    same_gradients(lambda x: kl_penalties(x, b, "k1"), lambda x: x - b, a)
    same_gradients(lambda x: kl_penalties(x, b, "k2"), lambda x: (x - b) ** 2 / 2, a)
    same_gradients(lambda x: kl_penalties(x, b, "k3"), lambda x: torch.exp(b - x) - (b - x) - 1, a)
    # over all outcomes of a distribution, k1 and k3 are the divergence
    p, q = torch.softmax(numbers(50), 0), torch.softmax(numbers(50, seed=1), 0)
    exact = (p * (p / q).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p * kl_penalties(p.log(), q.log(), kind)).sum(), exact)


def test_advantages_of_groups() -> None:
    rewards = torch.tensor([1.0, 5.0, math.nan, 2.0, 2.0, 7.0, 4.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 1, 1, 3, 0])
    first = [1.0, 5.0, 4.0]
    mean, deviation = sum(first) / 3, torch.tensor(first, dtype=torch.float64).std()
    expected = [(x - mean) for x in first]
    found = group_advantages(rewards, groups, 4)
    torch.testing.assert_close(found[[0, 1, 6]], torch.tensor(expected, dtype=torch.float64) / (deviation + 1e-4))
    assert found[2] == 0 and found[3] == found[4] == 0 and found[5] == 0
    torch.testing.assert_close(
        group_advantages(rewards, groups, 4, scale="none")[[0, 1, 6]], torch.tensor(expected, dtype=torch.float64)
    )
    spread = rewards[~rewards.isnan()].std()
    torch.testing.assert_close(
        group_advantages(rewards, groups, 4, scale="batch")[[0, 1, 6]],
        torch.tensor(expected, dtype=torch.float64) / (spread + 1e-4),
    )
    alone = leave_one_out(rewards, groups, 4)
    torch.testing.assert_close(alone[[0, 1, 6]], torch.tensor([1 - 4.5, 5 - 2.5, 4 - 3.0], dtype=torch.float64))
    assert alone[2] == 0 and alone[5] == 0


def test_importance_weights() -> None:
    mask = lengths_mask([2, 3], 3)
    logs, sampled = numbers(2, 3), numbers(2, 3, seed=1)
    ratio = torch.where(mask, (logs - sampled).exp(), 1.0)
    assert torch.equal(importance_weights(logs, sampled, mask, high=1.2), ratio.clamp(max=1.2))
    dropped = importance_weights(logs, sampled, mask, low=0.5, high=1.2, outside="drop")
    assert torch.equal(dropped, torch.where((ratio < 0.5) | (ratio > 1.2), 0.0, ratio))
    torch.testing.assert_close(
        importance_weights(logs, sampled, mask, level="sequence", high=None), ratio.prod(-1, keepdim=True)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: dpo_losses(x, x, x, x, kind="sigmod"), "Did you mean 'sigmoid'"),
        (lambda x: dpo_losses(x, x, x, x, kind="ipo"), "lengths=(chosen, rejected)"),
        (lambda x: dpo_losses(x, x, x, x, beta=0.0), "beta=0.0"),
        (lambda x: dpo_losses(x, x, x, x, kind="hinge", label_smoothing=0.1), "which has none"),
        (lambda x: dpo_losses(x, x, x, x, label_smoothing=0.5), "below 0.5"),
        (lambda x: reward_losses(x, x, centering=-1.0), "centering=-1.0"),
        (lambda x: kl_penalties(x, x, "k4"), "kind='k4'"),  # type: ignore[arg-type]
        (lambda x: gae(x[None], x[None], x[None], gamma=1.1), "gamma=1.1"),
        (lambda x: clipped_policy_losses(x[None], x[None], x[None], x[None], low=0.0), "low=0.0"),
        (lambda x: clipped_policy_losses(x[None], x[None], x[None], x[None], dual=0.5), "dual=0.5"),
        (lambda x: clipped_value_losses(x, x, x, 0.0), "clip=0.0"),
        (lambda x: group_advantages(x, torch.tensor([0, 1, 2]), 2), "there are 2: 0 to 1"),
        (lambda x: group_advantages(x, torch.tensor([0, 1]), 2), "one group a completion"),
    ],
)
def test_mistakes_are_told(call: Callable[[Tensor], object], words: str) -> None:
    with pytest.raises(SpecError) as told:
        call(torch.ones(3))
    assert words in str(told.value)
