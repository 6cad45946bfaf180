"""Where state begins, by sizes: bytes an element are those that are kept, and all ranks come to the same."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from meshfold.engine import Engine
from meshfold.engine.precision import Precision
from meshfold.engine.zero import plan as zero_plan
from meshfold.engine.zero.plan import Sizes, first_placements, regime_of
from meshfold.mesh import Mesh
from meshfold.mesh.spec import ZeroSpec
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import GPT, GPTConfig
from meshfold.zero_gemini import Shares

CPU = torch.device("cpu")


def gpt() -> GPT:
    return GPT(GPTConfig(vocab_size=512, hidden=64, layers=2, heads=4, max_positions=64))


def sizes_of(precision: str, regime: str, elements: int, ranks: int = 1) -> Sizes:
    spec = ZeroSpec.parse(dict(regime=regime))
    found = regime_of(spec, Precision.parse(precision), accumulation=1, ranks=ranks)
    return Sizes.of(found, elements=elements, ranks=ranks)


@pytest.mark.parametrize(
    ("precision", "regime", "held"),
    [("fp32", "A", 12), ("bf16", "A", 12), ("bf16", "B", 8), ("bf16", "C", 6.03), ("fp16", "A", 14)],
)
def test_sizes_are_those_that_are_kept(precision: str, regime: str, held: float) -> None:
    zero: dict[str, Any] = dict(zero=dict(stage=3, placement="cuda", regime=regime))
    with Engine(gpt, zero, optimizer=dict(name="adamw", lr=1e-2), precision=precision) as engine:
        elements = sum(p.numel() for p in engine.model.parameters())
        used = engine.states.gemini.memory.compute.used_bytes  # type: ignore[attr-defined]
    sizes = sizes_of(precision, regime, elements)
    assert sizes.parameter + sizes.state == pytest.approx(held, rel=1e-3)
    assert used / elements == pytest.approx(held, rel=0.15 if regime == "C" else 0.03)  # slots of C begin at blocks
    assert sizes.all == sizes.parameter + sizes.state + sizes.gradient


def one_has_less() -> tuple[Shares, Shares]:
    """Of device and of host."""
    mesh = Mesh({"data": 2})
    rank, sizes = mesh.rank, sizes_of("bf16", "A", 10_000_000, 2)
    found = []
    for what, zero in (
        ("available_device_bytes", dict(stage=3)),
        ("available_host_bytes", dict(stage=3, gpu_memory_limit=10**7, offload_path="/scratch")),
    ):
        have = 10**8 + rank * 10**6
        with mock.patch.object(zero_plan, what, lambda *_, have=have: have):
            spec = ZeroSpec.parse(zero)
            placements = first_placements(spec, CPU, sizes, ranks_per_host=2, everyone=mesh.group("data"))
        assert isinstance(placements, Shares)
        found.append(placements)
    return found[0], found[1]


def test_the_rank_with_the_least_memory_decides() -> None:
    first, second = run_on_ranks(2, one_has_less)
    assert first == second
    device, host = first
    assert 0 < device.host_optimizer < 1 and device.disk_optimizer == 0
    assert 0 < host.disk_optimizer < 1


def test_a_host_that_is_too_small_is_told_before_the_system_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 10 billion parameters was killed on a host of 126 GiB whose control group has no limit."""
    sizes = sizes_of("bf16", "A", 10_000_000_000)
    everyone: Any = SimpleNamespace(index=0, size=1)
    monkeypatch.setattr(zero_plan, "_least", lambda nbytes, everyone, device: nbytes)
    monkeypatch.setattr(zero_plan, "available_host_bytes", lambda: zero_plan.UNLIMITED_BYTES)

    def placed(there: int, **zero: Any) -> Any:
        monkeypatch.setattr(zero_plan, "present_host_bytes", lambda: there * 2**30)
        spec = ZeroSpec.parse(dict(stage=3, gpu_memory_limit="70GiB", **zero))
        return first_placements(spec, torch.device("cuda"), sizes, ranks_per_host=1, everyone=everyone)

    with pytest.warns(UserWarning, match=r"need 13\d\.\d+ GiB of the host's memory, which has 126\.00 GiB") as told:
        everything = placed(126)
    assert everything.host_optimizer == 1.0
    suggested = str(told[0].message).split("host_memory_limit='")[1].split("'")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        within = placed(126, host_memory_limit=suggested)
        placed(0)  # a system that does not say
        placed(512)
        everyone.index = 1
        placed(126)  # the first rank has said it
    assert 0.5 < within.host_optimizer < 1.0, "the rest stays on the device"
