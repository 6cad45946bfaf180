"""An engine that cannot be made leaves nothing behind: no hooks on the model, no watchdog, and no rank that waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import CollectiveError, SpecError, all_reduce
from meshfold.mesh.processes import groups
from meshfold.mesh.recording import flight_recorder
from meshfold.mesh.testing import close_pools, ranks, run_on_ranks
from meshfold.mesh.watchdog import diagnosis
from meshfold.models import GPT, GPTConfig

INPUTS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
BATCH = INPUTS, torch.arange(6) % 3
ADAMW: dict[str, Any] = dict(name="adamw", lr=0.05)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).tanh())
        return y


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def absent(optimizer: torch.optim.Optimizer) -> Any:
    raise KeyError("absent")


@pytest.mark.few(2)
@pytest.mark.parametrize("zero", [None, dict(stage=1), dict(stage=3)], ids=["plain", "zero 1", "zero 3"])
def test_the_model_is_free_whatever_went_wrong(zero: dict[str, Any] | None) -> None:
    model, parallel = Net(), {} if zero is None else dict(zero=zero)
    with pytest.raises(KeyError, match="absent") as kept:  # and with it what the frames of the error hold
        Engine(model, parallel, optimizer=ADAMW, loss_fn=loss, lr_scheduler=absent)
    with Engine(model, parallel, optimizer=ADAMW, loss_fn=loss) as engine:
        losses = [engine.train_step(BATCH) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2] and kept.value is not None
    hooks = [p._post_accumulate_grad_hooks for p in model.parameters()]
    assert not any(hooks) and not any(module._forward_pre_hooks for module in model.modules())


def test_nothing_of_it_is_left_on_the_disk(tmp_path: Path) -> None:
    parallel = dict(zero=dict(stage=3, placement="cpu", offload_path=str(tmp_path)))
    with pytest.raises(KeyError, match="absent"):
        Engine(Net(), parallel, optimizer=ADAMW, loss_fn=loss, lr_scheduler=absent)
    assert not [*tmp_path.iterdir()]
    with Engine(Net(), parallel, optimizer=ADAMW, loss_fn=loss) as engine:
        engine.train_step(BATCH)
        assert [*tmp_path.iterdir()]
    assert not [*tmp_path.iterdir()]


@ranks(2)
def test_nobody_watches_any_more() -> None:
    before = flight_recorder.active
    with pytest.raises(SpecError, match="lr_scheduler=7"):
        Engine(Net, dict(data=2), optimizer=ADAMW, loss_fn=loss, lr_scheduler=7)  # type: ignore[arg-type]
    assert flight_recorder.active is before
    engine = Engine(Net, dict(data=2), optimizer=ADAMW, loss_fn=loss)
    assert int(all_reduce(torch.ones(()), engine.world.everyone)) == 2
    engine.close()


def of_two_windows() -> GPT:
    model = GPT(GPTConfig(vocab_size=37, hidden=16, layers=1, heads=2, max_positions=16, window=4))
    model.other = type(model.mask)(8)
    return model


@ranks(2)
def test_a_model_whose_attention_is_refused_is_as_it_was() -> None:
    model, ids = of_two_windows(), torch.arange(24).view(3, 8)
    with pytest.raises(SpecError, match=r"sequence=.*: the model's masks have the windows \['4', '8'\]"):
        Engine(model, dict(sequence=dict(mode="ring", size=2)), optimizer=ADAMW)
    assert model.loss.shifts and model.mask.makes_masks
    assert not model._forward_pre_hooks and not model._forward_hooks
    wanted = float(model(ids, labels=ids).loss)
    with Engine(model, dict(data=2)) as engine:
        assert engine.eval_step(ids) == pytest.approx(wanted, rel=1e-5)


def one_is_refused(make: Callable[..., Engine]) -> tuple[str, float]:
    """What a rank ends with where the last one's scheduler is wrong."""
    diagnosis._BEAT_S = 0.1  # of this pool's ranks, which end after the test
    rank, _ = groups.rank_and_world_size()
    scheduler = absent if rank == 1 else None
    began = time.monotonic()
    try:
        make(lr_scheduler=scheduler).train_step(BATCH)
    except (CollectiveError, KeyError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "no error", time.monotonic() - began


def plain(**settings: Any) -> Engine:
    return Engine(Net, dict(data=2), optimizer=ADAMW, loss_fn=loss, watchdog=300.0, **settings)


def test_where_one_rank_is_refused_the_others_hear_why() -> None:
    close_pools()  # ranks of other tests have had errors of their own
    try:
        (waited, seconds), (refused, _) = run_on_ranks(2, one_is_refused, plain)
    finally:
        close_pools()  # its connections are broken now
    assert refused == "KeyError: 'absent'" and seconds < 60.0
    assert waited.startswith("CollectiveError: rank 1 failed, so the others end: KeyError: 'absent'\n"), waited
