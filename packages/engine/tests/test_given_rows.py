"""A batch that every data rank was given is refused; batches that the engine has cut are not compared."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.recording import record
from meshfold.mesh.testing import ranks

ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))


def squares(output: Tensor, batch: Any) -> Tensor:
    return (output - batch[1]).square().mean(1).mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


def engine_of(**spec: Any) -> Engine:
    return Engine(model, parallel=spec, optimizer=dict(name="sgd", lr=0.1), loss_fn=squares)


@ranks(2)
def test_batches_of_a_plain_dataloader_are_refused_with_the_line_to_write() -> None:
    with engine_of(data=2) as engine:
        batch = next(iter(DataLoader(TensorDataset(ROWS, ROWS), batch_size=4)))
        with pytest.raises(
            SpecError, match=r"all 2 data ranks were given the same batch.*engine\.shard_batch\(batch\)"
        ):
            engine.train_step(batch)


@ranks(2)
def test_equal_inputs_in_a_loop_of_ones_own_are_warned_of_once() -> None:
    """Targets or the loss may differ between ranks."""
    with engine_of(zero=dict(stage=3), data=2) as engine:
        first = pytest.warns(UserWarning, match="were given the same inputs.*engine.shard_batch")
        with first if engine.mesh.rank == 0 else nullcontext():
            loss = (engine(ROWS) - engine.mesh.rank).square().mean()
        engine.backward(loss)
        engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine(ROWS)


@ranks(2)
def test_other_rows_pass_and_later_batches_are_not_compared() -> None:
    with engine_of(data=2) as engine:
        rank = engine.mesh.rank
        changed = ROWS.clone()
        changed[-1, -1] += rank * 1e-6  # the last bits of one element
        engine.train_step((changed, ROWS))
        with record() as log:
            engine.train_step((ROWS, ROWS))
        with record() as cut:
            engine.train_step(engine.shard_batch((ROWS, ROWS)))
        assert [entry.kind for entry in log.entries] == [entry.kind for entry in cut.entries]


@ranks(2)
def test_equal_rows_that_the_engine_has_cut_pass() -> None:
    same = ROWS[:1].expand(8, 6)
    with engine_of(data=2) as engine:
        engine.train_step(engine.shard_batch((same, same)))
    with engine_of(data=2) as engine:
        for batch in engine.dataloader(TensorDataset(same, same), 4):
            engine.train_step(batch)


@ranks(2)
def test_a_trial_with_one_number_everywhere_passes() -> None:
    with engine_of(data=2) as engine:
        assert engine.train_step((torch.ones(2, 6), torch.ones(2, 6))) > 0.0


@ranks(2)
def test_ranks_that_share_rows_get_the_same_batch() -> None:
    with engine_of(tensor=2) as engine:
        assert engine.train_step((ROWS, ROWS)) > 0.0
