"""Balance by hooks on transformers' routers, and by a bias, in the engine: that of the global batch, as in one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from meshfold.engine import Engine
from meshfold.experts import balance_loss, keep_routing, update_selection_bias
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from expert_cases import batches, engine_of


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


@pytest.mark.few(1)
@pytest.mark.parametrize("parallel", [dict(data=2), dict(data=2, expert=2), dict(tensor=2, expert=2)], ids=str)
def test_balance_losses_of_transformers_routers_are_of_the_global_batch(parallel: dict[str, Any]) -> None:
    expected = losses({})
    found = run_on_ranks(2, losses, parallel)[0]
    assert found == pytest.approx(expected, rel=1e-6)  # transformers computes routers in float32
    assert expected[2] < expected[0]


def biases(parallel: dict[str, Any], folder: str = "") -> dict[str, Tensor]:
    """The biases after three steps, or after two, a checkpoint, and one more in an engine of another spec."""
    given, settings = batches(3), dict(clip_grad_norm=None)
    first = engine_of(parallel, "biased", **settings)
    with first as engine:
        for batch in given[: 2 if folder else 3]:
            engine.train_step(engine.shard_batch(batch))
            update_selection_bias(engine.model, 0.01)
        if not folder:
            return {n: v for n, v in engine.full_state_dict().items() if n.endswith("selection_bias")}
        engine.save(folder)
    with engine_of(dict(data=4, expert=2), "biased", **settings) as engine:
        engine.load(folder)
        engine.train_step(engine.shard_batch(given[2]))
        update_selection_bias(engine.model, 0.01)
        return {n: v for n, v in engine.full_state_dict().items() if n.endswith("selection_bias")}


def test_the_bias_moves_by_the_global_batch_in_pipelines_too_and_checkpoints_keep_it(tmp_path: Path) -> None:
    expected = biases({})
    assert len(expected) == 2 and all(float(bias.abs().max()) > 0.005 for bias in expected.values())
    pipelined = run_on_ranks(4, biases, dict(data=2, pipeline=2))[0]
    resumed = run_on_ranks(4, biases, dict(data=2, tensor=2, expert=2), str(tmp_path / "checkpoint"))[0]
    for found in (pipelined, resumed):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], bias) for name, bias in expected.items())
