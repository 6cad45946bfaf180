"""Balance losses of transformers' routers in the engine: those of the global batch, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from meshfold.engine import Engine
from meshfold.experts import balance_loss, keep_routing
from meshfold.mesh.testing import run_on_ranks


class Balanced(MixtralForCausalLM):  # type: ignore[misc]
    """A tiny Mixtral whose loss counts on the balance of the global batch."""

    def __init__(self) -> None:
        super().__init__(
            MixtralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                experts_implementation="eager",
                attn_implementation="eager",
            )
        )
        with torch.no_grad():
            for block in self.model.layers:  # so that experts are used unevenly, and not alike by all rows
                block.mlp.gate.weight.normal_(std=2.0)
        keep_routing(self)

    def forward(self, *arguments: Tensor, **given: Any) -> Any:
        output = super().forward(*arguments, **given)
        if output.loss is not None and self.training:
            output.loss = output.loss + 0.5 * balance_loss(self)
        return output


def losses(parallel: dict[str, Any]) -> list[float]:
    """Losses of three steps, the later ones of what the gradients of the first ones made."""
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", clip_grad_norm=1.0)
    with Engine(Balanced().double(), parallel, **settings) as engine:
        return [engine.train_step(engine.shard_batch(dict(input_ids=ids, labels=ids))) for _ in range(3)]


@pytest.mark.parametrize("parallel", [dict(data=2), dict(data=2, expert=2), dict(tensor=2, expert=2)], ids=str)
def test_balance_losses_of_transformers_routers_are_of_the_global_batch(parallel: dict[str, Any]) -> None:
    expected = losses({})
    found = run_on_ranks(2, losses, parallel)[0]
    assert found == pytest.approx(expected, rel=1e-6)  # transformers computes routers in float32
    assert expected[2] < expected[0]
