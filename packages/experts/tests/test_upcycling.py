"""Upcycled models compute what the dense ones did, and their experts learn apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshfold.experts import MixtureOfExperts, upcycle
from meshfold.kernels import swiglu
from meshfold.mesh import SpecError


def dense_model() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).double()


def test_an_upcycled_llama_has_the_dense_models_logits_and_then_learns_apart() -> None:
    model = dense_model()
    ids = torch.randint(0, 32, (2, 7))
    before = model(input_ids=ids).logits.detach()
    assert upcycle(model, experts=4, top_k=2) == ["model.layers.0.mlp", "model.layers.1.mlp"]
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-12, atol=1e-12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    experts = model.model.layers[0].mlp.experts
    assert losses[-1] < losses[0] and not torch.equal(experts.down[0], experts.down[1])


def test_what_to_replace_can_be_chosen_and_fused_projections_are_known() -> None:
    class Fused(nn.Module):
        """Gate and up in one projection."""

        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Linear(6, 20, bias=False)
            self.down = nn.Linear(10, 6, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(swiglu(self.both(x)))
            return y

    model = nn.Sequential(Fused(), Fused(), nn.Linear(6, 6)).double().eval()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    before = model(x)
    assert upcycle(model, 3, 1, where=lambda name: name == "1") == ["1"]
    assert isinstance(model[1], MixtureOfExperts) and isinstance(model[0], Fused) and not model[1].training
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    with pytest.raises(SpecError, match="no gated feed-forward to upcycle"):
        upcycle(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), 2, 1)
    with pytest.raises(SpecError, match="top_k=4"):
        upcycle(model, 3, 4)
