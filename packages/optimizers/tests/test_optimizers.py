"""Ten steps of each optimizer equal a reference written from its paper, in float64; torch's own where it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.optimizers import (
    Adafactor,
    AdafactorHF,
    Came,
    GaLoreAdafactor,
    GaLoreAdamW,
    Lamb,
    Lars,
    Lion,
    Muon,
    OptimizerSettingError,
    orthogonalize,
    role_groups,
    roles_of,
)
from meshfold.optimizers.galore import singular_vectors

SHAPES = ((6, 5), (4, 7), (6, 5), (8,), (3, 4, 5))
STEPS = 10
Reference = Callable[[Tensor, list[Tensor]], Tensor]


def data(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> tuple[list[Tensor], list[list[Tensor]]]:
    """First values, and gradients of every step; one parameter is zero at first and one gradient is zero once."""
    generator = torch.Generator().manual_seed(3)
    first = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    gradients = [[torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in first] for _ in range(STEPS)]
    if len(first) > 2:
        first[-2].zero_()
    gradients[4][0].zero_()
    return first, gradients


def run(make: Callable[..., torch.optim.Optimizer], first: list[Tensor], gradients: list[list[Tensor]]) -> list[Tensor]:
    parameters = [nn.Parameter(x.clone()) for x in first]
    optimizer = make(parameters)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in parameters]


def check(make: Callable[..., torch.optim.Optimizer], reference: Reference, **tolerance: float) -> None:
    first, gradients = data()
    found = run(make, first, gradients)
    for i, x in enumerate(first):
        expected = reference(x.clone(), [step[i] for step in gradients])
        assert not torch.equal(expected, x)
        torch.testing.assert_close(found[i], expected, **{"rtol": 1e-12, "atol": 1e-12, **tolerance})


def norm(x: Tensor) -> Tensor:
    return (x * x).sum().sqrt()


@pytest.mark.parametrize(("decay", "clip", "corrected"), [(0.0, False, True), (0.1, True, True), (0.1, False, False)])
def test_lamb(decay: float, clip: bool, corrected: bool) -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t, g in enumerate(gradients, 1):
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            bias1, bias2 = (1 - 0.8**t, 1 - 0.95**t) if corrected else (1, 1)
            u = (m / bias1) / ((v / bias2).sqrt() + 1e-6) + decay * x
            ratio = 1.0 if norm(x) == 0 or norm(u) == 0 else float(norm(x) / norm(u))
            x = x - 0.02 * (min(ratio, 1.0) if clip else ratio) * u
        return x

    settings = dict(lr=0.02, betas=(0.8, 0.95), weight_decay=decay, trust_clip=clip, bias_correction=corrected)
    check(lambda p: Lamb(p, **settings), reference)


@pytest.mark.parametrize(("decay", "momentum", "nesterov"), [(0.0, 0.9, False), (0.1, 0.0, False), (0.1, 0.9, True)])
def test_lars(decay: float, momentum: float, nesterov: bool) -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        v = None
        for g in gradients:
            local = 0.01 * norm(x) / (norm(g) + decay * norm(x) + 1e-8)
            d = (1.0 if norm(x) == 0 or norm(g) == 0 else local) * (g + decay * x)
            v = d if v is None else momentum * v + d
            x = x - 0.5 * (d + momentum * v if nesterov else v)
        return x

    settings = dict(lr=0.5, momentum=momentum, weight_decay=decay, nesterov=nesterov, trust_coeff=0.01)
    check(lambda p: Lars(p, **settings), reference)


def test_groups_without_weight_decay_can_be_left_out_of_adaptation() -> None:
    first, gradients = data(((6, 5),))
    found = run(lambda p: Lars(p, lr=0.5, momentum=0.9, always_adapt=False), first, gradients)
    expected = run(lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), first, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    found = run(lambda p: Lamb(p, lr=0.5, eps=1e-8, always_adapt=False), first, gradients)
    expected = run(lambda p: torch.optim.Adam(p, lr=0.5), first, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_lion() -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        m = torch.zeros_like(x)
        for g in gradients:
            x = x - 0.01 * (torch.sign(0.9 * m + 0.1 * g) + 0.3 * x)
            m = 0.99 * m + 0.01 * g
        return x

    check(lambda p: Lion(p, lr=0.01, weight_decay=0.3), reference)


def outer(rows: Tensor, columns: Tensor) -> Tensor:
    """V of Adafactor: R C / sum of R, where means take the place of sums."""
    return rows[..., :, None] * columns[..., None, :] / rows.mean(-1)[..., None, None]


def limited(update: Tensor, most: float) -> Tensor:
    return update / max(1.0, float((update * update).mean().sqrt()) / most)


def test_came() -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        m = torch.zeros_like(x)
        rows = columns = whole = distance_rows = distance_columns = 0.0
        for g in gradients:
            squares = g * g + 1e-30
            if x.dim() > 1:
                rows = 0.999 * rows + 0.001 * squares.mean(-1)
                columns = 0.999 * columns + 0.001 * squares.mean(-2)
                u = limited(g / outer(rows, columns).sqrt(), 1.0)
                m = 0.9 * m + 0.1 * u
                distance = (u - m) ** 2 + 1e-16
                distance_rows = 0.9999 * distance_rows + 0.0001 * distance.mean(-1)
                distance_columns = 0.9999 * distance_columns + 0.0001 * distance.mean(-2)
                step = m / outer(distance_rows, distance_columns).sqrt()
            else:
                whole = 0.999 * whole + 0.001 * squares
                m = step = 0.9 * m + 0.1 * limited(g / whole.sqrt(), 1.0)
            x = x - 0.01 * 0.2 * x - 0.01 * step
        return x

    check(lambda p: Came(p, lr=0.01, weight_decay=0.2), reference)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"warmup_init": True, "beta1": 0.9},
        {"relative_step": False, "lr": 0.01, "scale_parameter": False, "weight_decay": 0.1},
    ],
    ids=["relative", "warmup", "fixed"],
)
def test_adafactor_of_transformers(settings: dict[str, Any]) -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        rows = columns = whole = mean = 0.0
        beta1 = settings.get("beta1", 0.0)
        for t, g in enumerate(gradients, 1):
            rate = settings.get("lr", min(1e-6 * t if settings.get("warmup_init") else 1e-2, t**-0.5))
            if settings.get("scale_parameter", True):
                rate *= max(1e-3, float((x * x).mean().sqrt()))
            decay, squares = 1 - t**-0.8, g * g + 1e-30
            if x.dim() > 1:
                rows = decay * rows + (1 - decay) * squares.mean(-1)
                columns = decay * columns + (1 - decay) * squares.mean(-2)
                u = g / outer(rows, columns).sqrt()
            else:
                whole = decay * whole + (1 - decay) * squares
                u = g / whole.sqrt()
            mean = beta1 * mean + (1 - beta1) * rate * limited(u, 1.0)
            x = x - rate * settings.get("weight_decay", 0.0) * x - mean
        return x

    check(lambda p: AdafactorHF(p, **settings), reference)


def test_adafactor_is_that_of_torch() -> None:
    first, gradients = data()
    assert all(map(torch.equal, run(Adafactor, first, gradients), run(torch.optim.Adafactor, first, gradients)))


def adamw_reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
    [found] = run(
        lambda p: torch.optim.AdamW(p, lr=0.003, betas=(0.9, 0.95), weight_decay=0.2), [x], [[g] for g in gradients]
    )
    return found


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon(adjust: str) -> None:
    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        if x.dim() != 2:
            return adamw_reference(x, gradients)
        m = torch.zeros_like(x)
        for g in gradients:
            m = 0.95 * m + 0.05 * g
            u = 0.05 * g + 0.95 * m
            u = u / norm(u)
            for _ in range(5):
                u = 3.4445 * u - 4.7750 * u @ u.T @ u + 2.0315 * u @ u.T @ u @ u.T @ u
            rows, columns = x.shape
            factor = max(1.0, rows / columns) ** 0.5 if adjust == "original" else 0.2 * max(rows, columns) ** 0.5
            x = (1 - 0.02 * 0.1) * x - 0.02 * factor * u
        return x

    def make(parameters: list[nn.Parameter]) -> Muon:
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "role": "matrices"},
            {"params": [p for p in parameters if p.dim() != 2], "role": "norms_and_biases"},
        ]
        return Muon(groups, lr=0.02, adjust_lr_fn=adjust, ns_dtype="same", adamw_lr=0.003, adamw_weight_decay=0.2)

    check(make, reference, rtol=1e-10, atol=1e-10)


def test_muon_on_matrices_is_that_of_torch() -> None:
    """Also in bfloat16, where torch multiplies: the iterates are the same but for the order of sums."""
    first, gradients = data(((6, 5), (4, 7)))
    found = run(lambda p: Muon(p, lr=0.02), first, gradients)
    expected = run(lambda p: torch.optim.Muon(p, lr=0.02), first, gradients)
    moved = max(float((a - b).abs().max()) for a, b in zip(expected, first, strict=True))
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 0.02 * moved


def projected(x: Tensor, gradients: list[Tensor], low: Callable[[int, Tensor], Tensor]) -> Tensor:
    """GaLore as in its paper: ``low`` makes the update of a projected gradient."""
    basis = x
    for number, gradient in enumerate(gradients):
        if number % 4 == 0:
            left, _, right = torch.linalg.svd(gradient)
            basis = right[:2].T if x.shape[0] >= x.shape[1] else left[:, :2]
            basis = basis * basis.gather(0, basis.abs().argmax(0, keepdim=True)).sign()
        if x.shape[0] >= x.shape[1]:
            update = low(number, gradient @ basis) @ basis.T
        else:
            update = basis @ low(number, basis.T @ gradient)
        x = (x - 0.05 * 0.25 * update) * (1 - 0.05 * 0.1)
    return x


def test_galore_on_adamw() -> None:
    """Moments are of projected gradients, and go on in new projections; all else is AdamW with eps before bias correction."""

    def reference(x: Tensor, gradients: list[Tensor]) -> Tensor:
        means: list[Tensor] = []

        def adam(number: int, gradient: Tensor) -> Tensor:
            if not means:
                means.extend([torch.zeros_like(gradient), torch.zeros_like(gradient)])
            means[0] = 0.9 * means[0] + 0.1 * gradient
            means[1] = 0.999 * means[1] + 0.001 * gradient**2
            corrected = (1 - 0.999 ** (number + 1)) ** 0.5 / (1 - 0.9 ** (number + 1))
            return corrected * means[0] / (means[1].sqrt() + 1e-6)

        if x.dim() == 2:
            return projected(x, gradients, adam)
        for number, gradient in enumerate(gradients):
            x = (x - 0.05 * adam(number, gradient)) * (1 - 0.05 * 0.1)
        return x

    settings: dict[str, Any] = dict(lr=0.05, weight_decay=0.1, rank=2, update_proj_gap=4)
    check(lambda p: GaLoreAdamW(p, **settings), reference, rtol=1e-10, atol=1e-10)


def test_galore_of_full_rank_is_adafactor_of_the_rotated_gradient() -> None:
    """On the side that is projected a full rank is a rotation, which a first moment without clipping does not see."""
    first, gradients = data(((6, 5),))
    settings: dict[str, Any] = dict(lr=0.05, clip_threshold=1e9)
    found = run(lambda p: GaLoreAdafactor(p, rank=5, update_proj_gap=100, scale=1.0, **settings), first, gradients)
    basis = singular_vectors(gradients[0][0], 5)
    turned = [[one @ basis for one in step] for step in gradients]
    plain = run(
        lambda p: AdafactorHF(p, relative_step=False, scale_parameter=False, **settings), [first[0] @ basis], turned
    )
    torch.testing.assert_close(found[0], plain[0] @ basis.T, rtol=1e-10, atol=1e-10)


def test_newton_schulz_brings_singular_values_near_one_and_keeps_vectors() -> None:
    matrix = torch.randn(3, 12, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.mT @ found @ vh.mT
    torch.testing.assert_close(inner, torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 17), (17, 3), (2, 4, 12)])
def test_newton_schulz_of_long_matrices_multiplies_gram_matrices_to_the_same(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for steps in (1, 2, 3, 5):
        x = matrix / matrix.norm(dim=(-2, -1), keepdim=True)
        for _ in range(steps):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        torch.testing.assert_close(orthogonalize(matrix, steps=steps), x, rtol=1e-10, atol=1e-11)


class Tiny(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, 4), nn.LayerNorm(4)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight


def test_roles_of_a_model() -> None:
    assert roles_of(Tiny(tied=False)) == {
        "tokens.weight": "embeddings",
        "norm.weight": "norms_and_biases",
        "norm.bias": "norms_and_biases",
        "inner.weight": "matrices",
        "inner.bias": "norms_and_biases",
        "head.weight": "head",
    }
    assert "head" not in roles_of(Tiny(tied=True)).values()
    groups = {group["role"]: len(group["params"]) for group in role_groups(Tiny(tied=True))}
    assert groups == {"matrices": 1, "embeddings": 1, "head": 0, "norms_and_biases": 3}


def test_matrices_of_experts_are_orthogonalised_each_by_itself() -> None:
    class SmallExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.ones(3, 6, 4))

    assert roles_of(nn.Sequential(SmallExperts(), nn.Conv1d(2, 2, 3))) == {
        "0.up": "matrices",
        "1.weight": "norms_and_biases",
        "1.bias": "norms_and_biases",
    }
    first, gradients = data(((3, 6, 4),))
    settings: dict[str, Any] = dict(lr=0.02, ns_dtype="same")
    [found] = run(lambda p: Muon([{"params": p, "role": "matrices"}], **settings), first, gradients)
    for place in range(3):
        [alone] = run(lambda p: Muon(p, **settings), [first[0][place]], [[one[0][place]] for one in gradients])
        torch.testing.assert_close(found[place], alone, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("cls", [Lamb, Lars, Lion, Came, AdafactorHF, Muon, GaLoreAdamW, GaLoreAdafactor])
def test_state_dict_goes_on_to_the_bit(cls: type[torch.optim.Optimizer]) -> None:
    first, gradients = data()
    straight = run(cls, first, gradients)
    halfway = [nn.Parameter(x.clone()) for x in first]
    optimizer = cls(halfway)
    for number, step in enumerate(gradients):
        if number == 5:
            saved, optimizer = optimizer.state_dict(), cls(halfway)
            optimizer.load_state_dict(saved)
        for parameter, gradient in zip(halfway, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(halfway, straight, strict=True))


@pytest.mark.parametrize("cls", [Lamb, Lars, Lion, Came, AdafactorHF, Muon, GaLoreAdamW, GaLoreAdafactor])
def test_a_parameter_without_a_gradient_stays(cls: type[torch.optim.Optimizer]) -> None:
    pair = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))]
    optimizer = cls(pair)
    pair[0].grad = torch.ones(3, 2)
    optimizer.step()
    assert torch.equal(pair[1], torch.ones(3, 2))
    assert not torch.equal(pair[0], torch.ones(3, 2))


@pytest.mark.parametrize(
    ("cls", "settings", "words"),
    [
        (Lamb, {"lr": -1.0}, "lr=-1.0"),
        (Lamb, {"betas": (0.9, 1.0)}, "betas=(0.9, 1.0)"),
        (Lamb, {"eps": float("nan")}, "eps=nan"),
        (Lars, {"trust_coeff": 0.0}, "trust_coeff=0.0"),
        (Lars, {"momentum": 0.0, "nesterov": True}, "nesterov=True"),
        (Lion, {"weight_decay": "much"}, "weight_decay='much'"),
        (Came, {"eps": 1e-8}, "eps=1e-08"),
        (Came, {"betas": (0.9, 0.99)}, "betas=(0.9, 0.99)"),
        (AdafactorHF, {"lr": 1e-3}, "relative_step=False"),
        (AdafactorHF, {"relative_step": False}, "lr=1e-3"),
        (AdafactorHF, {"decay_rate": 0.8}, "decay_rate=0.8"),
        (Muon, {"ns_steps": 0}, "ns_steps=0"),
        (Muon, {"ns_dtype": "float8"}, "'bfloat16'"),
        (Muon, {"adjust_lr_fn": "none"}, "'match_rms_adamw'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptimizerSettingError) as caught:
        cls([nn.Parameter(torch.ones(2, 2))], **settings)
    assert words in str(caught.value)
    assert cls.__name__ in str(caught.value)


def test_muon_refuses_unknown_roles_and_vectors_as_matrices() -> None:
    with pytest.raises(OptimizerSettingError, match="norms_and_biases"):
        Muon([{"params": [nn.Parameter(torch.ones(2))], "role": "matrices"}])
    with pytest.raises(OptimizerSettingError, match="role='bias'"):
        Muon([{"params": [nn.Parameter(torch.ones(2))], "role": "bias"}])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerSettingError, match="sparse=False"):
        Lamb(table.parameters()).step()
