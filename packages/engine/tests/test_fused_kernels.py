"""``kernels``: fused kernels train any model to the same weights, under every spec, and are off by one word."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.engine.model.fused_kernels import check_kernels
from meshfold.kernels.fuse.heads import Head
from meshfold.kernels.fuse.norms import Norm
from meshfold.mesh import SpecError
from meshfold.mesh.testing import ranks
from meshfold.models import GPT, GPTConfig, build

linear_cross_entropy = importlib.import_module("meshfold.kernels.linear_cross_entropy")
ALWAYS = dict(norm=True, gated=True, activation=True, rotary=True, residual=True, loss=True)
WORDS = 40
IDS = torch.randint(1, WORDS, (4, 12), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, 3:] = LABELS[1, :6] = -100  # so that data ranks have unequally many


class OwnRMSNorm(nn.Module):
    """RMSNorm, as a user writes it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.norm1, self.norm2 = OwnRMSNorm(16), OwnRMSNorm(16)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            p(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out_proj(y)
        y = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class OwnModel(nn.Module):
    """A user's model, whose loss is the usual line."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = OwnRMSNorm(16), nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return dict(logits=logits)
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return dict(loss=F.cross_entropy(logits.view(-1, WORDS), shifted.reshape(-1)), logits=logits)


def llama() -> nn.Module:
    return build("llama-tiny", hidden=16, layers=2, heads=2, kv_heads=1, ffn=24, vocab_size=WORDS, max_positions=16)


def gpt(dropout: float = 0.1) -> nn.Module:
    return GPT(GPTConfig(vocab_size=WORDS, hidden=16, layers=2, heads=2, max_positions=16, dropout=dropout))


def deep() -> nn.Module:
    return build("llama-tiny", hidden=16, layers=4, heads=2, kv_heads=1, ffn=24, vocab_size=WORDS, max_positions=16)


def hugging_face() -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="this test trains a model of transformers")
    return transformers.LlamaForCausalLM(  # type: ignore[no-any-return]
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            pad_token_id=0,
        )
    )


fused_losses: list[str] = []  # the heads that made one


later_losses: list[bool] = []  # for each, whether its gradients wait for the backward


whole_logits: list[str] = []  # the heads whose logits waited and were computed all the same


class Counted(Head):
    def loss(self, *args: Any) -> Tensor:
        fused_losses.append(self.name)
        later_losses.append(linear_cross_entropy._later > 0)
        return super().loss(*args)

    def logits(self, x: Tensor) -> Tensor:
        if self._loss is None:
            whole_logits.append(self.name)
        return super().logits(x)


def trained(
    model: Callable[[], nn.Module], parallel: dict[str, Any], kernels: object, **settings: Any
) -> tuple[list[float], dict[str, Tensor], str]:
    """Losses and gradient norms of three steps, the weights, and what was fused."""
    engine = Engine(
        model,
        parallel,
        kernels=kernels,
        clip_grad_norm=0.5,
        **{**dict(precision="fp64", optimizer=dict(name="sgd", lr=0.5, momentum=0.9)), **settings},
    )
    if engine.fused_kernels is not None and engine.fused_kernels.logits is not None:
        for head in engine.fused_kernels.logits.heads:
            head.__class__ = Counted
    seen: list[float] = []
    for _ in range(3):
        seen.append(engine.train_step(engine.shard_batch(dict(input_ids=IDS, labels=LABELS))))
        assert engine.last is not None
        seen.append(engine.last.grad_norm or 0.0)
    seen.append(engine.eval_step(engine.shard_batch(dict(input_ids=IDS, labels=LABELS))))
    weights, fused = engine.full_state_dict(), str(engine.fused_kernels)
    engine.close()
    return seen, weights, fused


def check(model: Callable[[], nn.Module], parallel: dict[str, Any], rules: tuple[str, ...], **settings: Any) -> None:
    want, got = trained(model, parallel, "off", **settings), trained(model, parallel, ALWAYS, **settings)
    assert want[2] == "None"
    lines = got[2].splitlines()
    assert len(lines) == len(rules) and all(rule in line for rule, line in zip(rules, lines, strict=True)), got[2]
    # transformers' RMSNorm computes in float32 whatever it is given.
    tolerance: dict[str, float] = dict(rtol=1e-4, atol=1e-5) if model is hugging_face else dict(rtol=1e-9, atol=1e-12)
    for one, other in zip(got[0], want[0], strict=True):
        assert one == pytest.approx(other, rel=tolerance["rtol"])
    for name, value in want[1].items():
        assert torch.allclose(got[1][name], value, **tolerance), name


NORM, GATED, ROTARY = "RMSNorm or LayerNorm", "activation(gate) * up", "rotary embedding"
RESIDUAL, LOSS = "residual + norm", "linear + cross entropy"
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "own": (OwnModel, (NORM, GATED, RESIDUAL, LOSS)),
    "Hugging Face": (hugging_face, (NORM, GATED, ROTARY, RESIDUAL, LOSS)),
    "llama": (llama, (NORM, RESIDUAL, LOSS)),
    "gpt with dropout": (gpt, (RESIDUAL, LOSS)),
}
ALONE: dict[str, dict[str, Any]] = {
    "none": {},
    "zero 3": dict(zero=dict(stage=3)),
    "zero 2 on the host": dict(zero=dict(stage=2, placement="cpu")),
    "a plan": dict(zero=dict(placement="auto")),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("spec", ALONE)
@pytest.mark.parametrize("model", MODELS)
@ranks(1)
def test_alone(model: str, spec: str) -> None:
    check(*MODELS[model][:1], ALONE[spec], MODELS[model][1])


@pytest.mark.few(4)
@pytest.mark.parametrize("recompute", [None, "blocks"])
@pytest.mark.parametrize("spec", ["none", "zero 3"])
@ranks(1)
def test_norms_make_the_sums_of_sharded_blocks_too(spec: str, recompute: str | None) -> None:
    # Sharded parameters have hooks on every submodule, which once kept each sum apart from its norm.
    made: list[str] = []
    of_sum = Norm.of_sum

    def counted(self: Norm, *args: Any) -> Any:
        made.append("sum")
        return of_sum(self, *args)

    sgd = dict(name="sgd", lr=0.1)
    engine = Engine(OwnModel, ALONE[spec], kernels=ALWAYS, precision="fp64", recompute=recompute, optimizer=sgd)
    with mock.patch.object(Norm, "of_sum", counted):
        engine.train_step(engine.shard_batch(dict(input_ids=IDS, labels=LABELS)))
    engine.close()
    assert len(made) == (2 if recompute is None else 4)  # one a block and forward


@ranks(1)
def test_layer_norms_of_gpt() -> None:
    check(partial(gpt, 0.0), ALONE["zero 3"], (NORM, RESIDUAL, LOSS), recompute="blocks")


@pytest.mark.parametrize(
    "settings", [dict(recompute="blocks"), dict(gradient_accumulation=2), dict(precision="bf16")], ids=str
)
@ranks(1)
def test_beside_other_arguments(settings: dict[str, Any]) -> None:
    if "precision" in settings:  # other roundings on the way
        (want, *_), (got, *_) = (trained(OwnModel, {}, kernels, **settings) for kernels in ("off", ALWAYS))
        assert got == pytest.approx(want, rel=0.02)
    else:
        check(OwnModel, {}, MODELS["own"][1], **settings)


def with_z_loss() -> nn.Module:
    return build("llama-tiny", hidden=16, layers=2, heads=2, ffn=24, vocab_size=WORDS, max_positions=16, z_loss=0.1)


@pytest.mark.parametrize("spec", ["none", "zero 3"])
@ranks(1)
def test_z_loss_reads_no_logits(spec: str) -> None:
    whole_logits.clear()
    check(with_z_loss, ALONE[spec], (NORM, RESIDUAL, LOSS))
    assert not whole_logits


SPLIT: dict[str, dict[str, Any]] = {
    "data": dict(data=2),
    "zero 3": dict(data=2, zero=dict(stage=3)),
    "zero 1": dict(data=2, zero=dict(stage=1)),
    "tensor": dict(tensor=2),
    "megatron": dict(tensor=2, sequence=dict(mode="megatron")),
    "pipeline": dict(pipeline=dict(size=2, microbatches=4)),
    "ring": dict(sequence=dict(mode="ring", size=2)),
    "ulysses": dict(sequence=dict(mode="ulysses", size=2)),
}


# A model whose loss moves labels itself cannot be told that a part of a sequence has neighbours: it is refused there.
CASES = [
    (model, spec)
    for model in ("own", "llama", "Hugging Face")
    for spec in SPLIT
    if model != "own" or "sequence" not in SPLIT[spec]
]


def checkpointed() -> nn.Module:
    """A model of transformers that recomputes its blocks by itself."""
    model = hugging_face()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model


RECOMPUTED = {"llama": ("data", "ring"), "Hugging Face": ("tensor", "pipeline"), "by itself": ("megatron", "ring")}


@pytest.mark.few(3)
@pytest.mark.parametrize(("model", "spec"), [(model, spec) for model, specs in RECOMPUTED.items() for spec in specs])
@ranks(2)
def test_recomputed(model: str, spec: str) -> None:
    """Backward repeats a block with the operations that its forward ran: those of the first forward are the model's own."""
    make = checkpointed if model == "by itself" else MODELS[model][0]
    recompute = None if model == "by itself" else "blocks"
    (want, *_), (got, *_) = (
        trained(make, SPLIT[spec], kernels, recompute=again) for kernels, again in (("off", None), (ALWAYS, recompute))
    )
    assert got == pytest.approx(want, rel=1e-9 if model == "llama" else 1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "spec"), CASES, ids=[f"{model}, {spec}" for model, spec in CASES])
@ranks(2)
def test_on_two_ranks(model: str, spec: str) -> None:
    make = MODELS[model][0]
    fused_losses.clear()
    whole_logits.clear()
    (want, weights, _), (got, others, fused) = (trained(make, SPLIT[spec], kernels) for kernels in ("off", ALWAYS))
    last = spec != "pipeline" or dist.get_rank() == 1
    assert ("linear + cross entropy" in fused) == last
    # One a step and one an evaluation; in a pipeline one a micro-batch, where the last stage is.
    assert len(fused_losses) == (4 * 4 * last if spec == "pipeline" else 4)
    assert not whole_logits
    tolerance = 1e-4 if model == "Hugging Face" else 1e-9
    assert got == pytest.approx(want, rel=tolerance)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=tolerance, atol=tolerance / 10), name


@ranks(2)
def test_norms_make_residual_sums_under_tensor_parallelism() -> None:
    norms = importlib.import_module("meshfold.kernels.fuse.norms")
    for make, spec, kind, names in (
        (llama, "tensor", "add_rms_norm", "blocks.0.norm2 and 1 more"),
        (hugging_face, "megatron", "add_rms_norm", "model.layers.0.post_attention_layernorm and 1 more"),
        (partial(gpt, 0.0), "megatron", "add_layer_norm", "blocks.0.norm2 and 1 more"),
    ):
        want, weights, _ = trained(make, SPLIT[spec], "off")
        with mock.patch.object(norms, kind, wraps=getattr(norms, kind)) as sums:
            got, others, fused = trained(make, SPLIT[spec], ALWAYS)
        assert f"residual + norm in one launch: {names}" in fused
        # Two blocks in three steps and an evaluation, save the first of each, which is looked at. Trials have 2 x 3 rows.
        assert sum(call.args[0].shape[:2] != (2, 3) for call in sums.call_args_list) >= 2 * 2
        assert got == pytest.approx(want, rel=1e-9)
        for name, value in weights.items():
            assert torch.allclose(others[name], value, rtol=1e-9, atol=1e-12), name


def staged(schedule: str, **more: Any) -> dict[str, Any]:
    return dict(pipeline=dict(size=2, schedule=schedule, microbatches=4, **more))


STAGED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], int]] = {
    # A model, a spec, and the rank on the pipeline axis that has the last stage.
    "gpipe": (OwnModel, staged("gpipe"), 1),
    "1f1b": (llama, staged("1f1b"), 1),
    "zb-h1": (OwnModel, staged("zb-h1"), 1),
    "interleaved": (deep, staged("interleaved", chunks=2), 1),
    "dualpipe-v": (deep, staged("dualpipe-v"), 0),
    "zero 2": (OwnModel, {**staged("1f1b"), "zero": dict(stage=2)}, 1),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", STAGED)
@ranks(2)
def test_in_pipelines(case: str) -> None:
    """No micro-batch has whole logits; of those between F and B only the first holds a gradient of the head."""
    make, spec, last = STAGED[case]
    want, weights, _ = trained(make, spec, "off")
    fused_losses.clear()
    later_losses.clear()
    got, others, _ = trained(make, spec, ALWAYS)
    here = dist.get_rank() == last
    assert len(fused_losses) == (4 * 4 if here else 0)  # three steps, an evaluation
    assert sum(later_losses) == (3 * 3 if here and case == "gpipe" else 0)
    assert got == pytest.approx(want, rel=1e-9)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=1e-9, atol=1e-12), name


SPREAD: dict[str, dict[str, Any]] = {
    "data, zero 3": dict(data=2, zero=dict(stage=3), **staged("gpipe")),
    "tensor, zb-h1": dict(tensor=2, **staged("zb-h1")),
    "ulysses": dict(sequence=dict(mode="ulysses", size=2), **staged("1f1b")),
}


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPREAD)
@ranks(4)
def test_in_pipelines_on_four_ranks(spec: str) -> None:
    want, weights, _ = trained(llama, SPREAD[spec], "off")
    fused_losses.clear()
    got, others, fused = trained(llama, SPREAD[spec], ALWAYS)
    assert bool(fused_losses) == ("linear + cross entropy" in fused)
    counts = [0] * 4
    dist.all_gather_object(counts, len(fused_losses))
    # With two data ranks each has two rows, so two micro-batches.
    assert sorted(counts)[:2] == [0, 0] and sorted(counts)[2] >= (8 if "data" in spec else 12), counts
    assert got == pytest.approx(want, rel=1e-9)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize(
    ("kernels", "said"),
    [
        ("of", "'off'"),
        (dict(norms=True), "there is no key 'norms'. Did you mean 'norm'"),
        (dict(norm=1), "True (always), False (never) or None"),
    ],
)
def test_wrong_values_are_refused(kernels: object, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_kernels(kernels)
    assert said in str(refused.value)
