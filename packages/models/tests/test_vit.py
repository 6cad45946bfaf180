"""Vision transformers of our own: against transformers', and under every spec against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import VITS, ViT, ViTConfig, build, preset, vit_preset

SMALL: dict[str, Any] = dict(hidden=32, layers=2, heads=4, image_size=28, patch_size=4, classes=7)
KINDS: dict[str, dict[str, Any]] = {"usual": {}, "22b": dict(parallel=True, pool="mean")}


def small(kind: str, **changes: Any) -> ViT:
    """A small model with random weights, none of them zero or one, where a mistake would not show."""
    torch.manual_seed(0)
    model = ViT(ViTConfig(**{**SMALL, **KINDS[kind], **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_((0.3 if parameter.dim() == 1 else 0.03) * torch.randn_like(parameter))
    return model.double()


def batch_of(rows: int = 4) -> dict[str, Tensor]:
    images = torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return dict(images=images, labels=torch.arange(rows) % 7)


def test_presets_have_the_published_sizes() -> None:
    sizes = {name: config.num_parameters() for name, config in VITS.items()}
    assert sizes["vit-base"] == 86_567_656  # timm and transformers, with 1,000 classes
    assert sizes["vit-large"] == 304_326_632
    assert sizes["vit-huge"] == 632_045_800
    assert VITS["vit-22b"].matmul_parameters() == 21_743_271_936  # 21,743 million in table 1 of the paper
    assert VITS["vit-base"].tokens == 197
    for name, config in VITS.items():
        with torch.device("meta"):
            model = build(config)
        assert sum(p.numel() for p in model.parameters()) == config.num_parameters(), name


def test_a_vit_is_transformers_vit() -> None:
    transformers = pytest.importorskip("transformers")
    ours, batch = small("usual"), batch_of()
    theirs = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=32,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=28,
            patch_size=4,
            num_labels=7,
            layer_norm_eps=1e-6,
        )
    ).double()
    mine = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(mine_of(name, mine))
    wanted = theirs(pixel_values=batch["images"], labels=batch["labels"])
    found = ours(**batch)
    assert torch.allclose(found.logits, wanted.logits, rtol=1e-9, atol=1e-9)
    assert torch.allclose(found.loss, wanted.loss, rtol=1e-9, atol=1e-9)


def mine_of(name: str, mine: dict[str, Tensor]) -> Tensor:
    """Return our parameter for a name of transformers 5; releases call the projections by two names."""
    leaf = name.rpartition(".")[2]
    for theirs, ours in (
        ("cls_token", "embed.class_token"),
        ("position_embeddings", "embed.positions"),
        ("patch_embeddings", f"embed.patches.{leaf}"),
        ("classifier", f"head.{leaf}"),
        ("vit.layernorm", f"norm.{leaf}"),
    ):
        if theirs in name:
            return mine[ours]
    block = f"blocks.{next(part for part in name.split('.') if part.isdigit())}"
    for number, projections in enumerate((("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))):
        if any(f".{one}." in name for one in projections):
            return mine[f"{block}.attn.qkv.{leaf}"].chunk(3)[number]
    for theirs, ours in (
        ("attention.o_proj", "attn.out"),
        ("attention.output", "attn.out"),
        ("fc1", "mlp.up"),
        ("intermediate", "mlp.up"),
        ("fc2", "mlp.down"),
        ("output.dense", "mlp.down"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
    ):
        if theirs in name:
            return mine[f"{block}.{ours}.{leaf}"]
    raise KeyError(name)


def test_a_parallel_block_is_the_formula() -> None:
    """x + attention(norm(x)) + mlp(norm(x)), norms of queries and keys a head, RMSNorms, no biases but the MLP's."""
    model, x = small("22b"), torch.randn(2, 49, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    block: Any = model.blocks[0]
    w = dict(block.named_parameters())

    def norm(t: Tensor, weight: Tensor) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    y = norm(x, w["norm.weight"])
    q, k, v = (y @ part.t() for part in w["attn.qkv.weight"].chunk(3))
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in (q, k, v))
    q, k = norm(q, w["attn.q_norm.weight"]), norm(k, w["attn.k_norm.weight"])
    seen = ((q @ k.transpose(-1, -2) / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    inner = F.gelu(y @ w["mlp.up.weight"].t() + w["mlp.up.bias"])
    wanted = x + seen @ w["attn.out.weight"].t() + inner @ w["mlp.down.weight"].t() + w["mlp.down.bias"]
    assert torch.allclose(block(x), wanted, rtol=1e-10, atol=1e-10)
    assert {name for name in w if name.endswith("bias")} == {"mlp.up.bias", "mlp.down.bias"}
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (4, dict(tensor=4)),
    "1d+sequence": (2, dict(tensor=2, sequence=dict(mode="megatron"))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=1))),
    "2.5d of depth 2": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d": (4, dict(tensor=dict(mode="3d", grid=(1, 2, 2)))),
    "zero 1": (2, dict(data=2, zero=dict(stage=1))),
    "zero 2": (2, dict(data=2, zero=dict(stage=2))),
    "tensor x zero 3": (4, dict(data=2, tensor=2, zero=dict(stage=3))),
    "pipeline": (2, dict(pipeline=dict(size=2, microbatches=2))),
    "tensor x pipeline": (4, dict(tensor=2, pipeline=2)),
    "ring": (2, dict(sequence=dict(mode="ring", size=2))),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
    "ring of 3": (3, dict(sequence=dict(mode="ring", size=3))),
    "both": (4, dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2))),
    "tensor x ring": (4, dict(tensor=2, sequence=dict(mode="ring", size=2))),
    "data x ulysses, zero 3": (4, dict(data=2, sequence=dict(mode="ulysses", size=2), zero=dict(stage=3))),
}
QUICK = {
    ("22b", "2.5d"),
    ("22b", "3d"),
    ("usual", "tensor x zero 3"),
    ("22b", "pipeline"),
    ("22b", "tensor x ring"),
    ("usual", "ulysses"),
}


def compare(kind: str, spec: dict[str, Any], changes: dict[str, Any]) -> None:
    serial, batch = small(kind, **changes), batch_of()
    wanted = serial(**batch).loss
    wanted.backward()
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64", example=batch)
    with Engine(small(kind, **changes), spec, **settings) as engine:
        loss = engine.train_step(engine.shard_batch(batch))
        found = engine.full_state_dict()
    assert abs(loss - float(wanted.detach())) < 1e-9
    for name, parameter in serial.named_parameters():
        assert parameter.grad is not None
        off = float((found[name] - (parameter.detach() - parameter.grad)).abs().max())
        assert off < 1e-9, f"{name}: off by {off:.2e}"


def cases() -> list[Any]:
    return [
        pytest.param(kind, how, marks=() if (kind, how) in QUICK else pytest.mark.slow)
        for kind in KINDS
        for how in SPECS
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "how"), cases())
def test_loss_and_every_gradient_are_those_of_one_process(kind: str, how: str) -> None:
    size, spec = SPECS[how]
    run_on_ranks(size, compare, kind, spec, {})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ring", "ulysses", "ring of 3"])
def test_197_tokens(how: str) -> None:
    size, spec = SPECS[how]
    run_on_ranks(size, compare, "usual", spec, dict(patch_size=2))


def losses(spec: dict[str, Any]) -> list[float]:
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.1), precision="fp64", seed=3)
    with Engine(small("22b", dropout=0.3), spec, **settings) as engine:
        return [engine.train_step(engine.shard_batch(batch_of())) for _ in range(2)]


def test_dropout_is_that_of_one_process() -> None:
    wanted = losses({})
    for found in run_on_ranks(2, losses, dict(tensor=2)):
        assert found == pytest.approx(wanted, abs=1e-9)


def refusal(spec: dict[str, Any], changes: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        Engine(small("usual", **changes), spec)
    return str(caught.value)


@pytest.mark.parametrize(
    ("size", "mode", "changes", "wanted"),
    [
        (2, "ring", dict(dropout=0.1), "set the model's dropout to 0"),
        (3, "ulysses", {}, "4 query heads cannot be split over 3 ranks of ulysses"),
    ],
)
def test_refused_under_sequence(size: int, mode: str, changes: dict[str, Any], wanted: str) -> None:
    said = run_on_ranks(size, refusal, dict(sequence=dict(mode=mode, size=size)), changes)[0]
    assert wanted in said


def test_mistakes() -> None:
    for call, said in (
        (lambda: vit_preset("vit-bas"), "Did you mean 'vit-base'?"),
        (lambda: vit_preset("vit-base", layer=3), "Did you mean 'layers'?"),
        (lambda: preset("vit-22b"), "write build(vit_preset('vit-22b'))"),
        (lambda: vit_preset("vit-base", heads=5), "write heads=4, or hidden=770"),
        (lambda: vit_preset("vit-base", image_size=225), "write image_size=240"),
        (lambda: vit_preset("vit-base", pool="max"), "write 'class' or 'mean'"),
        (lambda: vit_preset("vit-base", layers=0), "give a whole number from 1 up"),
        (lambda: vit_preset("vit-base", dropout=1.0), "give a probability"),
        (lambda: small("usual")(torch.zeros(2, 3, 28, 32)), "this model takes [b, 3, 28, 28]"),
    ):
        with pytest.raises(SpecError) as caught:
            call()
        assert said in str(caught.value)
