"""The models of our own: against transformers' of the same architecture, and what can be counted about them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.models import (
    GPT,
    PRESETS,
    CausalLMLoss,
    GPTConfig,
    Llama,
    LlamaConfig,
    build,
    generate,
    preset,
)

SMALL: dict[str, Any] = dict(vocab_size=50, hidden=32, layers=2, heads=4, max_positions=16)


def test_parameters_are_what_the_configuration_counts() -> None:
    for name, changes in [
        ("gpt-tiny", {}),
        ("gpt-tiny", dict(tie=False, ffn=100)),
        ("gpt-tiny", dict(kv_heads=1, head_dim=8)),
        ("llama-tiny", {}),
        ("llama-tiny", dict(tie=True, kv_heads=4, ffn=None)),
    ]:
        with torch.device("meta"):
            model = build(name, **changes)
        assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters(), (name, changes)
        weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        assert sum(w.numel() for w in weights) == model.config.matmul_parameters()


def test_presets_have_the_published_sizes() -> None:
    sizes = {name: config.num_parameters() for name, config in PRESETS.items()}
    assert sizes["gpt2"] == 124_439_808  # Hugging Face gpt2
    assert sizes["gpt2-xl"] == 1_557_611_200
    assert sizes["llama-8b"] == 8_030_261_248  # Llama 3 8B
    assert sizes["llama-70b"] == 70_553_706_496
    assert sizes["llama-1b"] == 1_235_814_400  # Llama 3.2 1B
    assert 173e9 < sizes["gpt-175b"] < 176e9


def test_flops_are_those_of_the_matmuls() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    for name, length in (("llama-tiny", 32), ("gpt-tiny", 16)):
        model, ids = build(name), torch.zeros(2, length, dtype=torch.int64)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(ids, labels=ids).loss.backward()
        assert counter.get_total_flops() == 2 * length * model.config.flops_per_token(length)


def ids_of(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(3))


def test_llama_is_transformers_llama() -> None:
    transformers = pytest.importorskip("transformers")
    for tie, kv_heads in ((False, 2), (True, 4)):
        ours = Llama(LlamaConfig(**SMALL, kv_heads=kv_heads, ffn=48, tie=tie, rope_theta=500.0)).double()
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=50,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=kv_heads,
                max_position_embeddings=16,
                rms_norm_eps=1e-5,
                tie_word_embeddings=tie,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            )
        ).double()
        with torch.no_grad():
            theirs.model.embed_tokens.weight.copy_(ours.embed.weight)
            theirs.lm_head.weight.copy_(ours.head.weight)
            theirs.model.norm.weight.copy_(ours.norm.weight.uniform_(0.5, 1.5))
            for mine, block in zip(ours.blocks, theirs.model.layers, strict=True):
                for name, part in zip("qkv", mine.attn.qkv.weight.split(mine.attn.qkv.parts), strict=True):
                    getattr(block.self_attn, f"{name}_proj").weight.copy_(part)
                block.self_attn.o_proj.weight.copy_(mine.attn.out.weight)
                gate, up = mine.mlp.gate_up.weight.chunk(2)
                block.mlp.gate_proj.weight.copy_(gate)
                block.mlp.up_proj.weight.copy_(up)
                block.mlp.down_proj.weight.copy_(mine.mlp.down.weight)
                block.input_layernorm.weight.copy_(mine.norm1.weight.uniform_(0.5, 1.5))
                block.post_attention_layernorm.weight.copy_(mine.norm2.weight.uniform_(0.5, 1.5))
        agree(ours, theirs)


def test_gpt_is_transformers_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    ours = GPT(GPTConfig(**SMALL)).double()
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            layer_norm_epsilon=1e-5,
        )
    ).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1, 1)
        theirs.transformer.wte.weight.copy_(ours.embed.weight)
        theirs.transformer.wpe.weight.copy_(ours.positions.weight)
        theirs.transformer.ln_f.load_state_dict(ours.norm.state_dict())
        for mine, block in zip(ours.blocks, theirs.transformer.h, strict=True):
            block.ln_1.load_state_dict(mine.norm1.state_dict())
            block.ln_2.load_state_dict(mine.norm2.state_dict())
            for linear, conv in (
                (mine.attn.qkv, block.attn.c_attn),
                (mine.attn.out, block.attn.c_proj),
                (mine.mlp.up, block.mlp.c_fc),
                (mine.mlp.down, block.mlp.c_proj),
            ):
                conv.weight.copy_(linear.weight.T)
                conv.bias.copy_(linear.bias)
    agree(ours, theirs)


def agree(ours: nn.Module, theirs: nn.Module) -> None:
    """The same loss, logits and gradient of the embedding."""
    ids = ids_of(3, 9, 50)
    labels = ids.masked_fill(ids % 5 == 0, -100)
    mine, other = ours(ids, labels=labels), theirs(input_ids=ids, labels=labels)
    torch.testing.assert_close(mine.loss, other.loss, rtol=1e-6, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(ours(ids).logits, other.logits, rtol=1e-5, atol=1e-6)
    mine.loss.backward()
    other.loss.backward()
    theirs_embed = theirs.get_input_embeddings().weight.grad  # type: ignore[operator]
    torch.testing.assert_close(ours.get_parameter("embed.weight").grad, theirs_embed, rtol=1e-4, atol=1e-7)


def test_the_loss_is_the_formula() -> None:
    logits = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[5, 1, 2], [6, -100, 3]])
    rows, targets = torch.tensor([0, 1, 4]), torch.tensor([1, 2, 3])
    log_p = logits.log_softmax(-1)[rows]
    nll = -log_p[torch.arange(3), targets]
    assert CausalLMLoss()(logits, labels).item() == pytest.approx(nll.mean().item(), rel=1e-12)
    smoothed = (0.9 * nll - 0.1 * log_p.mean(-1)).mean() + 0.01 * logits[rows].logsumexp(-1).square().mean()
    found = CausalLMLoss(label_smoothing=0.1, z_loss=0.01)(logits, labels)
    assert found.item() == pytest.approx(smoothed.item(), rel=1e-12)
    nothing = logits.clone().requires_grad_()
    loss = CausalLMLoss(z_loss=0.1)(nothing, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert nothing.grad is not None
    assert not nothing.grad.any()
    with pytest.raises(SpecError, match=r"label_smoothing=1\.0"):
        CausalLMLoss(label_smoothing=1.0)


def test_no_token_sees_its_future() -> None:
    for name in ("gpt-tiny", "llama-tiny"):
        model = build(name).eval()
        ids = ids_of(2, 12, 256)
        changed = ids.clone()
        changed[:, 8:] = (changed[:, 8:] + 1) % 256
        before, after = model(ids).logits, model(changed).logits
        torch.testing.assert_close(before[:, :8], after[:, :8], rtol=0, atol=1e-6)
        assert (before[:, 8:] - after[:, 8:]).abs().max() > 1e-3
        one = model(ids[1:]).logits  # rows do not see each other
        torch.testing.assert_close(one[0], before[1], rtol=0, atol=1e-5)


def test_weights_begin_as_gpt2s() -> None:
    torch.manual_seed(0)
    model = build("gpt-small", layers=8)
    assert isinstance(model, GPT)
    assert model.head.weight is model.embed.weight
    for module, std in (
        (model.embed, 0.02),
        (model.blocks[0].attn.qkv, 0.02),
        (model.blocks[7].mlp.down, 0.02 / 4),
    ):
        assert float(module.weight.detach().std()) == pytest.approx(std, rel=0.03)
    assert not model.blocks[0].mlp.up.bias.any()
    loss = model(ids_of(2, 16, 256), labels=ids_of(2, 16, 256)).loss
    assert loss is not None
    assert math.log(256) - 0.1 < loss.item() < math.log(256) + 0.3


def test_generated_text_is_repeatable_and_obeys_its_settings() -> None:
    torch.manual_seed(0)
    model = build("gpt-tiny", max_positions=8).train()
    start = ids_of(2, 3, 256)
    first = generate(model, start, 10, temperature=0.8, top_k=20, generator=5)
    assert first.shape == (2, 13)
    assert torch.equal(first[:, :3], start)
    assert torch.equal(first, generate(model, start, 10, temperature=0.8, top_k=20, generator=5))
    assert not torch.equal(first, generate(model, start, 10, temperature=0.8, top_k=20, generator=6))
    greedy = generate(model, start, 4, temperature=0.0)
    assert torch.equal(greedy, generate(model, start, 4, top_k=1))
    assert torch.equal(greedy[:, 3], model.eval()(start).logits[:, -1].argmax(-1))
    for wrong, message in (
        (dict(temperature=-1.0), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(max_new_tokens=-1), "max_new_tokens=-1"),
    ):
        with pytest.raises(SpecError, match=message):
            generate(model, start, **{"max_new_tokens": 1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="ids of shape"):
        generate(model, torch.zeros(2, 0, dtype=torch.int64), 1)


def test_generating_and_evaluating_leave_each_module_in_its_own_mode() -> None:
    model, ids = build("gpt-tiny").train(), ids_of(2, 3, 256)
    first = model.get_submodule("blocks.0").eval()  # the user's choice
    generate(model, ids, 2)
    Engine(model).eval_step(ids)
    inside = set(first.modules())
    assert all(module.training != (module in inside) for module in model.modules())


def test_wrong_shapes_are_clear_errors() -> None:
    for wrong, message in [
        (dict(heads=5), "5 heads do not divide 32"),
        (dict(heads=4, kv_heads=3), "3 does not divide 4"),
        (dict(layers=0), "layers=0"),
        (dict(hidden=32.0), "hidden=32.0"),
        (dict(vocab_size=True), "vocab_size=True"),
        (dict(dropout=1.0), "dropout=1.0"),
    ]:
        with pytest.raises(SpecError, match=message):
            GPTConfig(**{**SMALL, **wrong})
    with pytest.raises(SpecError, match="even size"):
        LlamaConfig(**SMALL, head_dim=7)
    with pytest.raises(SpecError, match="Did you mean 'gpt-tiny'"):
        preset("gpt-tin")
    with pytest.raises(SpecError, match=r"no setting 'layer'.*'layers'"):
        preset("gpt2", layer=3)


def test_labels_of_a_bf16_model_give_a_float32_loss() -> None:
    model = build("llama-tiny").bfloat16()
    ids = ids_of(2, 8, 256)
    loss = model(ids, labels=ids).loss
    assert loss is not None
    assert loss.dtype == torch.float32
    logits = model(ids).logits.float()
    assert loss.item() == pytest.approx(
        F.cross_entropy(logits[:, :-1].reshape(-1, 256), ids[:, 1:].reshape(-1)).item(), rel=1e-4
    )
