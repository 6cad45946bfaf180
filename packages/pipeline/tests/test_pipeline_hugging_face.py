"""OPT, GPT-2, Llama and Qwen2 of random weights in stages, against one process."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from pipeline_checks import assert_gradients, compare, gradients, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import Mesh, build_on_meta, materialize
from meshfold.mesh.testing import run_on_ranks
from meshfold.pipeline import Pipeline

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install transformers", allow_module_level=True)

VOCAB, LENGTH = 53, 7
SLIDING = dict(
    use_sliding_window=True,
    sliding_window=3,
    layer_types=[
        "full_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
)
MODELS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("opt", dict(word_embed_proj_dim=8)),
    ("gpt2", {}),
    ("llama", {}),
    ("qwen2", SLIDING),
)


def plain(kind: str, **settings: Any) -> nn.Module:
    """A small model of five blocks, as its own code makes it."""
    import transformers as t

    common = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "opt":
        return t.OPTForCausalLM(
            t.OPTConfig(
                **common,
                hidden_size=16,
                ffn_dim=32,
                num_hidden_layers=5,
                num_attention_heads=2,
                max_position_embeddings=16,
                dropout=0.0,
                **settings,
            )
        )
    if kind == "gpt2":
        none = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = t.GPT2Config(**common, n_embd=16, n_layer=5, n_head=2, n_positions=16, **none, **settings)
        return t.GPT2LMHeadModel(config)
    config_of, model_of = {
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "qwen2": (t.Qwen2Config, t.Qwen2ForCausalLM),
    }[kind]
    return model_of(
        config_of(
            **common,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=5,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=kind == "qwen2",
            **settings,
        )
    )


def exact_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """The models' own loss, without a detour over float32."""
    targets = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1))


def exact(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = plain(kind, **settings).double()
    model.loss_function = exact_loss  # type: ignore[assignment]
    return model


def batch_of(rows: int, seed: int) -> dict[str, Tensor]:
    """Sequences of different lengths, filled up on the right."""
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(1, rows, 2):
        mask[row, LENGTH - 1 - row % 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def check_training(kind: str, settings: dict[str, Any]) -> None:
    for name, many in (("zb-h1", 4), ("interleaved", 2)):
        if name == "interleaved":  # 2 ranks of 4 hold two stages each: a mesh of 2 pipelines
            axes = {"data": 2, "pipe": 2}
        else:
            axes = {"pipe": 4}
        batches = [batch_of(5, seed) for seed in range(3)]
        what = f"{kind} under {name}"
        pipeline = compare(partial(exact, kind, **settings), batches, axes, what, schedule=name, microbatches=many)
        names = [name for name, _ in pipeline.named_parameters()]
        assert len(names) == len(set(names))


def check_inference(kind: str, settings: dict[str, Any]) -> None:
    serial, batch = exact(kind, **settings).eval(), batch_of(5, 9)
    pipeline = Pipeline(copy.deepcopy(serial), Mesh({"pipe": 4}), microbatches=2)
    with torch.no_grad():
        wanted = loss_of(serial, batch)
        logits = serial(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert abs(float(pipeline.evaluate(batch) - wanted)) < 1e-12
    found = pipeline(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert torch.allclose(found, logits, rtol=1e-10, atol=1e-12)


def check_meta(kind: str, settings: dict[str, Any]) -> None:
    whole, trace = build_on_meta(partial(plain, kind, **settings))
    materialize(whole, trace, seed=3, device="cpu")
    mesh = Mesh({"pipe": 4})
    pipeline = Pipeline(partial(plain, kind, **settings), mesh, seed=3, microbatches=4)
    wanted = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        assert torch.equal(parameter, wanted[name]), name
    for name, buffer in pipeline.module.named_buffers():
        assert not buffer.is_meta, name
    batch = batch_of(4, 1)
    loss = loss_of(whole, batch)
    loss.backward()
    assert abs(float(pipeline.step(batch) - loss)) < 1e-5
    assert_gradients(pipeline, gradients(whole), kind, tolerance=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "settings"), MODELS, ids=[kind for kind, _ in MODELS])
def test_training(kind: str, settings: dict[str, Any]) -> None:
    run_on_ranks(4, check_training, kind, settings)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "settings"), MODELS, ids=[kind for kind, _ in MODELS])
def test_evaluation(kind: str, settings: dict[str, Any]) -> None:
    run_on_ranks(4, check_inference, kind, settings)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "settings"), MODELS, ids=[kind for kind, _ in MODELS])
def test_stages_on_the_meta_device(kind: str, settings: dict[str, Any]) -> None:
    run_on_ranks(4, check_meta, kind, settings)


def checkpointed() -> nn.Module:
    model: Any = exact("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def check_checkpointing() -> None:
    compare(checkpointed, [batch_of(5, 1)], {"pipe": 4}, "checkpointed", schedule="zb-h1", microbatches=4)


def test_activation_checkpointing() -> None:
    run_on_ranks(4, check_checkpointing)


def check_tensor_parallel(kind: str, settings: dict[str, Any]) -> None:
    from meshfold.mesh.parameters.parameter_meta import metadata_on
    from meshfold.tensor_parallel import parallelize

    serial, mesh = exact(kind, **settings), Mesh({"pipe": 2, "tensor": 2})
    ids = torch.randint(3, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids}
    wanted = loss_of(serial, batch)
    wanted.backward()
    mine = exact(kind, **settings)
    parallelize(mine, mesh, "1d")
    pipeline = Pipeline(mine, mesh, schedule="zb-h1", microbatches=2)
    loss = pipeline.step(batch)
    assert abs(float(loss - wanted)) < 1e-6  # this loss goes through float32
    parts = {
        key: metadata_on(p, mesh).placement.shard(serial.get_parameter(key).grad, mesh)
        for key, p in pipeline.named_parameters()
    }
    assert_gradients(pipeline, parts, f"{kind} in 1d", tolerance=1e-6)


# Mode 1d has no place for a table of another width than the stream's.
@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "settings"), [("opt", {}), *MODELS[1:]], ids=[kind for kind, _ in MODELS])
def test_stages_that_are_tensor_parallel(kind: str, settings: dict[str, Any]) -> None:
    run_on_ranks(4, check_tensor_parallel, kind, settings)
