"""Training mode in a step: the model is put in it, and a part that its user put in eval mode stays so."""

import torch
from torch import nn

from meshfold.engine import Engine
from meshfold.mesh.testing import run_on_ranks


def steps() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
    engine = Engine(
        model,
        parallel=dict(data=1),
        optimizer=dict(name="sgd", lr=0.1),
        loss_fn=lambda output, batch: (output - batch).square().mean(),
    )
    batch = engine.shard_batch(torch.ones(2, 4))
    engine.train_step(batch)
    assert all(module.training for module in model.modules())
    model[1].eval()
    engine.train_step(batch)
    assert [module.training for module in model] == [True, False, True]
    model.eval()
    engine.train_step(batch)
    assert all(module.training for module in model.modules())


def test_a_part_in_eval_mode_stays_in_it_while_the_model_trains() -> None:
    run_on_ranks(1, steps)
