"""Experts of transformers' models: found, and run as transformers' own eager code does, in float64."""

from __future__ import annotations

import pytest
import torch
from expert_models import EXPERTS, FAMILIES, FFN, HIDDEN, model_of
from torch import nn

from meshfold.experts import MixtureOfExperts, find_experts, shard_experts


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_transformers_are_found_and_run_as_they_do(family: str) -> None:
    model = model_of(family)
    blocks = find_experts(model)
    assert len(blocks) == (1 if family == "deepseek" else 2)
    for block in blocks:
        assert (block.num_experts, block.hidden, block.ffn) == (EXPERTS, HIDDEN, FFN)
        assert {name.rpartition(".")[0] for name in block.stacked} == {block.experts_name}
        assert len(block.stacked) == (4 if family == "gpt-oss" else 2)
        assert set(block.stacked) == {n for n, p in model.named_parameters() if n.startswith(f"{block.experts_name}.")}
        assert block.router == tuple(
            f"{block.router_name}.{leaf}" for leaf in (("weight", "bias") if family == "gpt-oss" else ("weight",))
        )
        assert len(block.shared) == {"qwen2": 4, "deepseek": 3}.get(family, 0)
        assert model.get_submodule(block.name) is block.block
    ids = torch.randint(0, 64, (2, 11))
    ids[:, 5:] = ids[:, 4:5]  # repeated tokens: some experts are busy, others idle

    def run() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        return output.logits.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    logits, gradients = run()
    sharded = [shard_experts(block) for block in blocks]
    assert all(shard.shape == shard.whole and shard.offset == 0 for each in sharded for shard in each.shards)
    assert not find_experts(model)
    for found, expected in zip(run(), (logits, gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for each in sharded:
        each.close()
    assert len(find_experts(model)) == len(blocks)
    assert torch.equal(model(input_ids=ids).logits, logits)


def test_parameters_on_the_meta_device_are_found_alike() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(num_hidden_layers=1, num_experts=128, vocab_size=64)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    [block] = find_experts(model)
    assert (block.num_experts, block.hidden, block.ffn) == (128, 2048, 768)
    assert block.router == ("model.layers.0.mlp.gate.weight",)


def test_own_layers_are_found_and_other_modules_are_not() -> None:
    model = nn.ModuleDict(dict(a=MixtureOfExperts(8, 12, 4, 2, shared=6), b=nn.Linear(4, 4)))
    [block] = find_experts(model)
    assert block.name == "a" and block.stacked == ("a.experts.gate_up", "a.experts.down")
    assert block.router == ("a.router.weight",)
    assert block.shared == ("a.shared.gate.weight", "a.shared.up.weight", "a.shared.down.weight")

    class Other(nn.Module):
        """Stacked parameters that are no gated experts."""

        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(4, 24, 8))
            self.two = nn.Parameter(torch.randn(4, 8, 12))

        def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return x * weights.sum(1, keepdim=True)

    assert not find_experts(Other())
