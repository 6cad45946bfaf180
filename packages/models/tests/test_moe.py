"""Llama with experts: against transformers' Mixtral, and what can be counted about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from meshfold.engine import Engine
from meshfold.experts import MixtureOfExperts, balance_loss
from meshfold.mesh import SpecError
from meshfold.models import PRESETS, Llama, MoELlamaConfig, build

SMALL: dict[str, Any] = dict(vocab_size=50, hidden=32, layers=2, heads=4, kv_heads=2, ffn=24, max_positions=16)


def test_parameters_and_flops_are_what_the_configuration_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    assert PRESETS["mixtral-8x7b"].num_parameters() == 46_702_792_704  # Mixtral 8x7B
    for changes in ({}, dict(shared=40, top_k=3), dict(tie=True, router="sigmoid")):
        with torch.device("meta"):
            model = build("llama-moe-tiny", **changes)
        assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters(), changes
        config = model.config
        assert isinstance(config, MoELlamaConfig)
        x = torch.empty(64, config.hidden, device="meta", requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            model.blocks[0].mlp(x).sum().backward()
        attention = config.hidden * sum(config.qkv_parts) + config.heads * config.d * config.hidden
        block = (config.matmul_parameters() - config.vocab_size * config.hidden) // config.layers - attention
        assert counter.get_total_flops() == 64 * 6 * block


def test_it_is_transformers_mixtral() -> None:
    transformers = pytest.importorskip("transformers")
    config = MoELlamaConfig(**SMALL, experts=4, top_k=2, rope_theta=500.0, balance=0.0)
    ours = Llama(config).double()
    theirs = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            experts_implementation="eager",
        )
    ).double()
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = [
        (ours.embed.weight, theirs.model.embed_tokens.weight),
        (ours.head.weight, theirs.lm_head.weight),
    ]
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(std=0.3)
        for mine, block in zip(ours.blocks, theirs.model.layers, strict=True):
            assert isinstance(mine.mlp, MixtureOfExperts)
            for name, part in zip("qkv", mine.attn.qkv.weight.split(mine.attn.qkv.parts), strict=True):
                getattr(block.self_attn, f"{name}_proj").weight.copy_(part)
            pairs += [
                (mine.attn.out.weight, block.self_attn.o_proj.weight),
                (mine.norm1.weight, block.input_layernorm.weight),
                (mine.norm2.weight, block.post_attention_layernorm.weight),
                (mine.mlp.router.weight, block.mlp.gate.weight),
                (mine.mlp.experts.gate_up, block.mlp.experts.gate_up_proj),
                (mine.mlp.experts.down, block.mlp.experts.down_proj),
            ]
        pairs.append((ours.norm.weight, theirs.model.norm.weight))
        for one, other in pairs:
            other.copy_(one)
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(3))
    found, wanted = ours(ids, labels=ids), theirs(ids, labels=ids)
    tolerance = dict(rtol=1e-5, atol=1e-6)  # transformers takes the router's softmax in float32
    torch.testing.assert_close(ours(ids).logits, wanted.logits, **tolerance)
    torch.testing.assert_close(found.loss.float(), wanted.loss, **tolerance)
    found.loss.backward()
    wanted.loss.backward()
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad, **tolerance)

    balanced = Llama(replace(config, balance=0.5)).double()
    balanced.load_state_dict(ours.state_dict())
    loss = balanced(ids, labels=ids).loss
    torch.testing.assert_close(loss, found.loss + 0.5 * balance_loss(balanced))
    torch.testing.assert_close(balanced.eval()(ids, labels=ids).loss, found.loss)


def test_it_learns_and_its_experts_begin_apart() -> None:
    with Engine(lambda: build("llama-moe-tiny", router="sigmoid", shared=32), optimizer="adamw") as engine:
        experts = engine.model.blocks[0].mlp.experts
        assert (
            0.019 < float(experts.gate_up.detach().std()) < 0.021
            and 0.0095 < float(experts.down.detach().std()) < 0.0105
        )
        assert not torch.equal(experts.down[0], experts.down[1])
        ids = torch.arange(64).view(2, 32)
        losses = [engine.train_step(ids) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(experts=0), "experts=0.*from 1 up"),
        (dict(top_k=9), "experts=8, top_k=9"),
        (dict(router="best"), "router='best'.*'softmax' or 'sigmoid'"),
        (dict(balance=-1.0), "balance=-1.0"),
        (dict(shared=0), "shared=0"),
    ],
)
def test_wrong_settings_are_clear_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build("llama-moe-tiny", **changes)
