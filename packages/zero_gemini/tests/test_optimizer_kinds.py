"""What an optimizer needs to see of a parameter is known, believed or found out; and its state flattens to names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.zero_gemini.errors import MemoryPlanError
from meshfold.zero_gemini.optimizer import state_tree as paths
from meshfold.zero_gemini.optimizer.dispatch import adam_regime, optimizer_kind
from meshfold.zero_gemini.optimizers import CPUAdam, HybridAdam


class Custom(torch.optim.Optimizer):
    """A user's own: ``update`` says what is subtracted."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.helper = {"calls": 0, "hook": [p for g in self.param_groups for p in g["params"]]}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        self.helper["calls"] += 1  # type: ignore[operator]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self.update(p, p.grad, self.state[p]), alpha=group["lr"])

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g


class Lion(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        m: Tensor = state.setdefault("m", torch.zeros_like(p))
        state["count"] = state.get("count", 0) + 1
        out = (0.9 * m + 0.1 * g).sign()
        m.lerp_(g, 0.01)
        return out


class Lamb(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        ratio: Tensor = p.norm() / g.norm()
        return g * ratio


class Rows(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        norms: Tensor = g.norm(dim=-1, keepdim=True)
        return g / norms


class Late(Custom):
    """Elementwise until its twentieth step; only what it keeps tells."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        gram: Tensor = state.get("gram", 0.0) + (g @ g.T if g.dim() == 2 else g[:, None] * g)
        state["gram"] = gram
        state["count"] = state.get("count", 0) + 1
        return g if state["count"] < 1000 else torch.linalg.solve(gram, g)


class Listed(Late):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        state.setdefault("grams", [torch.zeros_like(p)])
        return g


class Rare(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        state["count"] = state.get("count", 0) + 1
        norm: Tensor = g.norm()
        return g / norm if state["count"] % 10 == 0 else g


class MatricesOnly(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        if g.dim() != 2:
            raise ValueError("matrices only")
        return torch.linalg.qr(g)[0] if g.shape[0] >= g.shape[1] else g


class Global(Custom):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()


class Langevin(Custom):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g + torch.randn_like(g)


class Closed(Custom):
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()


class Declared(Langevin):
    elementwise = True


class DeclaredWhole(Custom):
    elementwise = False


class Misdeclared(Custom):
    elementwise = "yes"


class FromTheStart(Custom):
    """Makes its state when it is made."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        total: Tensor = state["sum"].add_(g * g)
        return g / (total.sqrt() + 1e-8)


def parameters() -> list[nn.Parameter]:
    """As Gemini makes them: shapes without memory."""
    return [
        nn.Parameter(torch.empty(()).expand(1 << 20, 1 << 20)),
        nn.Parameter(torch.empty(()).expand(1 << 20)),
    ]


@pytest.mark.parametrize("name", ["SGD", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD"])
def test_torchs_elementwise_ones(name: str) -> None:
    assert optimizer_kind(getattr(torch.optim, name)(parameters(), lr=0.1)) == "elementwise"


def test_torchs_others() -> None:
    assert optimizer_kind(torch.optim.AdamW(parameters())) == "adam"
    assert optimizer_kind(torch.optim.Adam(parameters())) == "adam"
    assert optimizer_kind(torch.optim.AdamW(parameters(), amsgrad=True)) == "elementwise"
    assert optimizer_kind(torch.optim.AdamW(parameters()), [(torch.float64, torch.float64)]) == "elementwise"
    assert optimizer_kind(torch.optim.Adafactor(parameters())) == "matrices"
    assert optimizer_kind(torch.optim.Muon(parameters()[:1])) == "matrices"
    with pytest.raises(MemoryPlanError, match="LBFGS needs all gradients in one vector"):
        optimizer_kind(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))
    with pytest.raises(MemoryPlanError, match="SparseAdam steps on sparse gradients"):
        optimizer_kind(torch.optim.SparseAdam(parameters()))


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Custom, "elementwise"),
        (Lion, "elementwise"),
        (FromTheStart, "elementwise"),
        (Declared, "elementwise"),
        (Lamb, "matrices"),
        (Rows, "matrices"),
        (Late, "matrices"),
        (Listed, "matrices"),
        (Rare, "matrices"),
        (MatricesOnly, "matrices"),
        (DeclaredWhole, "matrices"),
    ],
)
def test_users_own_are_tried(cls: type[Custom], kind: str) -> None:
    made = cls([nn.Parameter(torch.zeros(2, 2))] if cls is FromTheStart else parameters())
    torch.manual_seed(5)
    wanted, calls = torch.rand(1), made.helper["calls"]
    torch.manual_seed(5)
    assert optimizer_kind(made) == kind
    assert torch.equal(torch.rand(1), wanted)  # chance is left as it was
    assert made.helper["calls"] == calls
    assert not made.state or cls is FromTheStart


def test_every_group_counts() -> None:
    class Switched(Custom):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.sub_(p.grad / p.grad.norm() if group["whole"] else p.grad)

    one, other = parameters()
    assert optimizer_kind(Switched([{"params": [one], "whole": False}])) == "elementwise"
    both = Switched([{"params": [one], "whole": False}, {"params": [other], "whole": True}])
    assert optimizer_kind(both) == "matrices"


@pytest.mark.parametrize(
    ("cls", "match"),
    [
        (Global, r"Global steps on a parameter in a way that depends on other parameters.*clip_grad_norm"),
        (Langevin, r"draws random numbers.*elementwise = True"),
        (Closed, r"Closed is not known, and trying it out.*AssertionError.*elementwise = False"),
        (Misdeclared, r"Misdeclared.elementwise is 'yes'"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(cls: type[Custom], match: str) -> None:
    with pytest.raises(MemoryPlanError, match=match):
        optimizer_kind(cls(parameters()))


@pytest.mark.parametrize("cls", [HybridAdam, CPUAdam])
def test_ours(cls: type[HybridAdam]) -> None:
    half = [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
    assert optimizer_kind(cls(parameters(), adamw_mode=False), half) == "adam"
    assert optimizer_kind(cls(parameters(), bias_correction=False)) == "elementwise"
    with pytest.raises(MemoryPlanError, match=r"float64.*torch.optim.AdamW"):
        optimizer_kind(cls(parameters()), [(torch.float64, torch.float64)])
    with pytest.raises(MemoryPlanError, match="bias_correction=False and a regime"):
        optimizer_kind(cls(parameters(), bias_correction=False, regime="B"))
    assert adam_regime(cls(parameters(), regime="C", seed=3), "A", 0) == ("C", 3)
    assert adam_regime(cls(parameters(), regime="B"), "B", 7) == ("B", 7)
    assert adam_regime(torch.optim.AdamW(parameters()), "B", 7) == ("B", 7)
    with pytest.raises(MemoryPlanError, match=r"regime='B' was asked for.*regime='C'"):
        adam_regime(cls(parameters(), regime="C"), "B", 0)
    one, other = parameters()
    groups: list[dict[str, Any]] = [{"params": [one]}, {"params": [other], "regime": "B"}]
    with pytest.raises(MemoryPlanError, match="regimes A and B"):
        adam_regime(cls(groups), "A", 0)


def test_state_flattens_and_comes_back() -> None:
    state = {
        "step": torch.tensor(3.0),
        "count": 2**40,
        "rate": 0.1,
        "on": True,
        "nothing": None,
        "gram": [torch.eye(3), [], [torch.ones(2), 5]],
        "pair": (torch.zeros(1, dtype=torch.int8), {"rows": torch.ones(1), "none": {}}),
        "empty": (),
    }
    flat = paths.flatten(state)
    assert "step" in flat and "gram[2][1]=int" in flat and "pair(1).rows" in flat
    assert all(isinstance(value, Tensor) for value in flat.values())
    back = paths.unflatten(dict(reversed(flat.items())))
    assert _plain(back) == _plain(state)
    assert type(back["count"]) is int and type(back["rate"]) is float and back["on"] is True
    with pytest.raises(MemoryPlanError, match="keeps str 'adam' as 'mode'"):
        paths.flatten({"mode": "adam"})
    with pytest.raises(MemoryPlanError, match=r"under the key 'a.b'"):
        paths.flatten({"a.b": torch.zeros(1)})


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
