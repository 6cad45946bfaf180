"""Recomputed blocks that keep the results of attention: the same bits, and attention runs once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.engine import Engine
from meshfold.engine.model.recompute import RecomputedBlocks
from meshfold.engine.model.repeated_blocks import find_blocks
from meshfold.mesh import record
from meshfold.mesh.model_io import KeptAttention
from meshfold.mesh.testing import ranks, run_on_ranks
from meshfold.models import GPT, GPTConfig, build

Trained = tuple[list[float], dict[str, Tensor]]


def gpt(dropout: float = 0.0) -> GPT:
    return GPT(GPTConfig(vocab_size=48, hidden=32, layers=3, heads=4, max_positions=16, dropout=dropout))


def llama() -> nn.Module:
    return build("llama-tiny", hidden=32, layers=3, heads=4, kv_heads=2, ffn=64, vocab_size=48, max_positions=16)


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs transformers, the extra 'hf'")
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=48, n_positions=16)
        config.attn_pdrop = 0.0  # the rest still drops
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=48,
            max_position_embeddings=16,
        )
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randint(48, (rows, 16), generator=torch.Generator().manual_seed(step))


class AttentionCount(TorchDispatchMode):
    """Counts the forward operators of attention, in graphs and in backward too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def trained(
    model: Callable[[], nn.Module], parallel: dict[str, Any], recompute: str | None, **settings: Any
) -> Trained:
    """Losses and gradient norms of every step, and the weights."""
    given: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5)
    with Engine(model, parallel, recompute=recompute, **{**given, **settings}) as engine:
        seen = []
        for step in range(3):
            seen.append(engine.train_step(engine.shard_batch(batch(step))))
            assert engine.last is not None and engine.last.grad_norm is not None
            seen.append(engine.last.grad_norm)
        return seen, engine.full_state_dict()


def assert_same(found: Trained, wanted: Trained) -> None:
    assert found[0] == wanted[0]
    assert list(found[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        assert torch.equal(found[1][name], value), name


# -- the same bits ----------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt,
    "gpt that drops": partial(gpt, 0.2),
    "llama": llama,
    "Hugging Face's gpt2": partial(hugging_face, "gpt2"),
    "Hugging Face's llama": partial(hugging_face, "llama"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@ranks(1)
def test_alone(name: str) -> None:
    assert_same(trained(MODELS[name], {}, "but-attention"), trained(MODELS[name], {}, None))


SPECS: dict[str, dict[str, Any]] = {
    "zero": dict(data=2, zero=dict(stage=3, placement="cpu")),
    "1d": dict(tensor=2),
    "megatron": dict(tensor=2, sequence=dict(mode="megatron")),
    "ring": dict(sequence=dict(mode="ring", size=2)),
    "ulysses": dict(sequence=dict(mode="ulysses", size=2)),
    "pipeline": dict(pipeline=dict(size=2, schedule="zb-h1", microbatches=2)),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "3d": dict(tensor=dict(mode="3d", grid=(2, 2, 1))),
}
FEW = ("zero", "1d", "ring", "pipeline")


def on_ranks(parallel: dict[str, Any]) -> None:
    for make in (llama, partial(gpt, 0.2)):
        assert_same(trained(make, parallel, "but-attention"), trained(make, parallel, None))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in SPECS]
)
def test_on_every_mesh(name: str) -> None:
    run_on_ranks(4 if name in ("2d", "3d") else 2, on_ranks, SPECS[name])


# -- what is repeated -------------------------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize(("recompute", "wanted"), [(None, 3), ("blocks", 6), ("but-attention", 3)])
@pytest.mark.parametrize("name", ["gpt", "Hugging Face's llama"])
@ranks(1)
def test_attention_runs_once(name: str, recompute: str | None, wanted: int) -> None:
    with Engine(MODELS[name], {}, optimizer="adamw", recompute=recompute) as engine:
        engine.train_step(batch(0))
        with AttentionCount() as found:
            engine.train_step(batch(1))
    assert found.count == wanted


def rings_on_ranks() -> None:
    sent = {}
    for recompute in (None, "but-attention", "blocks"):
        with Engine(llama, SPECS["ring"], optimizer="adamw", recompute=recompute) as engine:
            engine.train_step(engine.shard_batch(batch(0)))
            with record() as log:
                engine.train_step(engine.shard_batch(batch(1)))
            sent[recompute] = sum(entry.kind == "shift" for entry in log.entries)
    assert sent["but-attention"] == sent[None] < sent["blocks"]


@pytest.mark.few(1)
def test_a_ring_sends_keys_and_values_once() -> None:
    run_on_ranks(2, rings_on_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("zero", [{}, dict(zero=dict(stage=3, placement="cpu"))], ids=["", "zero"])
@ranks(1)
def test_compiled_blocks(backend: str, zero: dict[str, Any]) -> None:
    seen, counts = {}, {}
    for recompute in (None, "blocks", "but-attention"):
        torch._dynamo.reset()
        settings: dict[str, Any] = dict(optimizer=dict(name="adamw", lr=1e-2), clip_grad_norm=0.5)
        with Engine(llama, zero, recompute=recompute, compile=dict(backend=backend), **settings) as engine:
            seen[recompute] = [engine.train_step(batch(step)) for step in range(3)]
            with AttentionCount() as found:
                seen[recompute].append(engine.train_step(batch(3)))
            counts[recompute] = found.count
    assert seen["but-attention"] == seen["blocks"] == seen[None]
    assert counts == {None: 3, "blocks": 6, "but-attention": 3}


def unet() -> nn.Module:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")
    model: nn.Module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    return model


@pytest.mark.parametrize("backend", ["", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_blocks_of_a_unet(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 5, 16, generator=generator)
    seen, counts = {}, {}
    for way in ("", "blocks", "but-attention"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = unet()
        found = find_blocks(model)
        if backend:
            for block in found.values():
                block.compile(backend=backend)
        if way:
            blocks = RecomputedBlocks(model)
            blocks.keep_attention(blocks.names if way == "but-attention" else ())
        with AttentionCount() as count:
            model(image, torch.tensor([3, 7]), text).sample.square().mean().backward()
        counts[way] = count.count
        seen[way] = [parameter.grad for parameter in model.parameters()]
    few = 3  # blocks at 8 x 8 attend to 64 pixels, kept, and to 5 words, which takes no time
    assert counts == {"": 8, "blocks": 16, "but-attention": 8 + few}
    for way in ("blocks", "but-attention"):
        for a, b in zip(seen[way], seen[""], strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


class Block(nn.Module):
    """Attention whose result is changed in place, then dropped: its repetition must draw the same numbers."""

    def __init__(self, heads: int = 2, drops: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drops = heads, drops
        self.wide, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wide(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drops)
        y = y.transpose(1, 2).flatten(2)
        y = F.dropout(y, 0.3)
        return x + self.out(y).mul_(2.0)


class Model(nn.Module):
    def __init__(self, drops: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drops=drops) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(way: str, drops: float, *, times: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    model = Model(drops)
    if way:
        blocks = RecomputedBlocks(model)
        blocks.keep_attention(blocks.names if way == "but-attention" else ())
    torch.manual_seed(1)
    loss = model(torch.randn(3, 8, 16))
    for time in range(times):
        loss.backward(retain_graph=time + 1 < times)
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("drops", [0.0, 0.4])
def test_random_numbers_are_those_of_the_first_time(drops: float, times: int) -> None:
    wanted = gradients("", drops, times=times)
    for way in ("blocks", "but-attention"):
        found = gradients(way, drops, times=times)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_done_to_a_result_later_does_not_change_what_is_kept() -> None:
    q = torch.randn(1, 2, 8, 4)
    kept = KeptAttention()
    with kept.keeping():
        first = F.scaled_dot_product_attention(q, q, q)
        wanted = first.clone()
        first.zero_()
    with kept.returning():
        again = F.scaled_dot_product_attention(q, q, q)
    assert torch.equal(again, wanted) and again.stride() == first.stride()


def test_another_call_than_the_first_is_computed() -> None:
    q, other = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 6, 4)
    kept = KeptAttention()
    with kept.keeping():
        F.scaled_dot_product_attention(q, q, q)
    with AttentionCount() as count, kept.returning():
        found = F.scaled_dot_product_attention(other, other, other)
    assert count.count == 1 and torch.equal(found, F.scaled_dot_product_attention(other, other, other))
