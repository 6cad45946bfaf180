"""Engines whose model was changed behind their back, that train where torch keeps no graph, or that are copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.engine import Engine, TrainingError
from meshfold.mesh import MeshfoldError


@pytest.mark.parametrize("parallel", [{}, dict(zero=dict(stage=3))], ids=["plain", "zero"])
def test_a_model_that_is_changed_after_its_engine_was_made_is_not_trained_silently(parallel: dict[str, Any]) -> None:
    def engine() -> Engine:
        return Engine(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), parallel, optimizer="sgd", loss_fn=_of_a_pair
        )

    batch = torch.randn(6, 4), torch.arange(6) % 3
    with engine() as made:
        made.train_step(batch)  # the second forward looks again
        made.model[1] = nn.Linear(4, 3)
        with pytest.raises(
            TrainingError, match=r"1\.weight was put into the model after the engine was made, .* change the model"
        ):
            made.train_step(batch)
    with engine() as made:

        def cast_and_train() -> None:
            made.model.bfloat16()  # refused at once where the engine stores the weights
            made.train_step(batch)

        with pytest.raises(MeshfoldError, match=r"float32.* (precision='bf16'|make the engine of a model)"):
            cast_and_train()
    with engine() as made:
        made.model[0].weight.requires_grad_(False)  # as before, freezing is allowed
        made.train_step(batch)


def _of_a_pair(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_where_torch_keeps_no_graph(mode: Any) -> None:
    batch = torch.randn(6, 4), torch.arange(6) % 3
    with Engine(nn.Linear(4, 3), optimizer="sgd", loss_fn=_of_a_pair) as engine:
        with mode(), pytest.raises(TrainingError, match=r"call it outside, or call eval_step"):
            engine.train_step(batch)
        assert engine.micro_step == 0 and engine.train_step(batch) > 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(copied: Any) -> None:
    with (
        Engine(nn.Linear(4, 3), optimizer="sgd", loss_fn=_of_a_pair) as engine,
        pytest.raises(TrainingError, match=r"cannot be copied or pickled: write engine\.save"),
    ):
        copied(engine)
