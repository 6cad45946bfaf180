"""Each Hugging Face family, loaded from a folder under every kind of spec, is transformers' model of one process."""

from __future__ import annotations

import copy
import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.checkpoint.tensors import open_weights
from meshfold.engine import Engine, pretrained
from meshfold.mesh.testing import run_on_ranks

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import FAMILIES, SEQ2SEQ, InFloat64, batch_of, folder_of, model_of

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)

SPECS: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=4),
    "1d+sequence": dict(tensor=4, sequence=dict(mode="megatron")),
    "2d": dict(tensor=dict(mode="2d", size=4)),
    "2.5d": dict(tensor=dict(mode="2.5d", size=4, depth=1)),
    "3d": dict(tensor=dict(mode="3d", grid=(1, 2, 2))),
    "pipeline": dict(data=2, pipeline=dict(size=2, microbatches=2)),
    "zero 3": dict(data=2, tensor=2, zero=dict(stage=3)),
}
EXACT: dict[str, dict[str, Any]] = {"mixtral": dict(experts_implementation="eager")}
"""Grouped matmuls are not for float64."""
BERT_SPLIT = "attention has other tokens than the residual stream"
REFUSED: dict[tuple[str, str], str] = {
    (kind, mode): BERT_SPLIT for kind in ("bert", "bert-classes") for mode in ("1d+sequence", "3d")
}
"""What a family cannot run under, and what is said of it."""


def serial(folder: str, kind: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """transformers' own loss, logits and parameters after a step of plain gradient descent with rate 1."""
    import transformers

    model = (
        getattr(transformers, FAMILIES[kind][0])
        .from_pretrained(folder, dtype=torch.float64, **EXACT.get(kind, {}))
        .eval()
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with exact(kind):
        output = model(**batch_of(kind), **_no_cache(kind))
    output.loss.backward()
    grads = {
        name: 0.0 if p.grad is None else p.grad for name, p in model.named_parameters()
    }  # an expert without tokens
    return (
        float(output.loss.detach()),
        {"logits": output.logits.detach()},
        {n: before[n] - grads[n] for n in before},
    )


def exact(kind: str) -> AbstractContextManager[object]:
    """Exact arithmetic. mBART needs none, and a function mode hides the line that takes an element for its shape alone."""
    return nullcontext() if kind == "mbart" else InFloat64()


def _no_cache(kind: str) -> dict[str, Any]:
    return {} if kind == "vit" or "bert" in kind else {"use_cache": False}


def parallel(folder: str, kind: str, spec: dict[str, Any]) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The same of an engine."""
    source = pretrained(folder, dtype=torch.float64, **EXACT.get(kind, {}))
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=1.0), precision="fp64")
    batch = batch_of(kind)
    with Engine(source, spec, example=batch if kind in ("vit", *SEQ2SEQ) else None, **settings) as engine:
        given = {name: value for name, value in batch.items() if name != "labels" or kind in SEQ2SEQ}
        with exact(kind):
            engine.model.eval()
            with torch.no_grad():
                logits = {"logits": engine.generator(**given).logits}
            loss = engine.train_step(engine.shard_batch(batch))
        whole = engine.full_state_dict()
        names = [name for name in whole if whole[name].is_floating_point()]
        return loss, logits, {name: whole[name] for name in names}


def compare(folder: str, kind: str, spec: dict[str, Any]) -> None:
    wanted_loss, wanted_logits, wanted = serial(folder, kind)
    loss, logits, found = parallel(folder, kind, spec)
    assert abs(loss - wanted_loss) < 1e-9, (loss, wanted_loss)
    for name, value in logits.items():
        assert torch.allclose(value, wanted_logits[name], rtol=1e-9, atol=1e-9), name
    for name, value in wanted.items():
        off = float((found[name] - value).abs().max())
        assert off < 1e-9, f"{name}: off by {off:.2e}"


def check(kind: str, how: str, root: Path) -> None:
    folder = str(folder_of(kind, root))
    if (kind, how) in REFUSED:
        with pytest.raises(Exception, match=REFUSED[kind, how]):
            run_on_ranks(4, compare, folder, kind, SPECS[how])
    else:
        run_on_ranks(4, compare, folder, kind, SPECS[how])


QUICK = {
    ("opt", "2.5d"),
    ("gpt2", "1d+sequence"),
    ("qwen2", "zero 3"),
    ("mistral", "3d"),
    ("olmo2", "1d"),
    ("olmo3", "3d"),
    ("falcon", "2.5d"),
    ("falcon-one-key", "1d+sequence"),
    ("falcon-alibi", "1d"),
    ("bloom", "3d"),
    ("mpt", "1d+sequence"),
    ("stablelm", "1d"),
    ("gemma3", "1d"),
    ("granite", "pipeline"),
    ("cohere2", "2d"),
    ("phi", "1d+sequence"),
    ("gptj", "zero 3"),
    ("glm4", "3d"),
    ("nemotron", "2.5d"),
    ("smollm3", "1d"),
    ("mixtral", "2d"),
    ("llama", "1d"),
    ("qwen3", "2d"),
    ("bert", "1d"),
    ("bert", "3d"),
    ("bert-classes", "zero 3"),
    ("distilbert", "2d"),
    ("modernbert", "1d"),
    ("vit", "2d"),
    ("mbart", "2.5d"),
    ("mbart", "3d"),
    ("t5", "1d+sequence"),
    ("t5", "2d"),
    ("t5", "pipeline"),
    ("switch", "2d"),
}
"""Every family and every spec once or more, in `make test`."""


def test_the_quick_cases_leave_no_family_and_no_spec_out() -> None:
    assert {kind for kind, _ in QUICK} == set(FAMILIES)
    assert {how for _, how in QUICK} == set(SPECS)


def cases() -> list[Any]:
    return [
        pytest.param(kind, how, marks=() if (kind, how) in QUICK else pytest.mark.slow)
        for kind in FAMILIES
        for how in SPECS
    ]


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "how"), cases())
def test_a_family_is_that_of_one_process(kind: str, how: str, tmp_path: Path) -> None:
    """Loss, logits, and every gradient: parameters after a step of gradient descent."""
    check(kind, how, tmp_path)


def export(folder: str, target: str, spec: dict[str, Any]) -> None:
    with Engine(pretrained(folder), spec, optimizer="sgd") as engine:
        engine.save_hugging_face(target, like=folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["olmo2", "falcon", "stablelm"])
def test_a_family_leaves_as_the_folder_that_it_came_from(kind: str, tmp_path: Path) -> None:
    """Its norms of heads with it: the same names, every tensor to the bit."""
    source, target = folder_of(kind, tmp_path), tmp_path / "target"
    run_on_ranks(4, export, str(source), str(target), SPECS["1d"])
    found, wanted = open_weights(target), open_weights(source)
    assert set(found) == set(wanted)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


DROPPING: dict[str, dict[str, Any]] = {
    "bert-classes": dict(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3),
    "t5": dict(dropout_rate=0.3),
    "vit": dict(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3),
    "mixtral": dict(output_router_logits=True, router_aux_loss_coef=5.0, attention_dropout=0.3),
}
"""Settings with which a loss is another; the last adds one of its routers' to that of the tokens."""


def losses(folder: str, kind: str, spec: dict[str, Any], **settings: Any) -> list[float]:
    source = pretrained(folder, dtype=torch.float64, **EXACT.get(kind, {}), **settings)
    with (
        Engine(source, spec, optimizer=dict(name="sgd", lr=0.1), precision="fp64", seed=3) as engine,
        InFloat64(),
    ):
        return [engine.train_step(engine.shard_batch(batch_of(kind))) for _ in range(2)]


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in ("t5", "vit")), "bert-classes", "mixtral"]
)
def test_what_drops_drops_alike_and_routers_add_their_loss(kind: str, tmp_path: Path) -> None:
    folder = str(folder_of(kind, tmp_path))
    wanted = losses(folder, kind, {}, **DROPPING[kind])
    assert abs(wanted[0] - losses(folder, kind, {})[0]) > 1e-4
    for spec in (dict(tensor=2), dict(tensor=dict(mode="2d", grid=(2, 1)))):
        for found in run_on_ranks(2, run_losses, folder, kind, spec):
            assert found == pytest.approx(wanted, abs=1e-9), spec


def run_losses(folder: str, kind: str, spec: dict[str, Any]) -> list[float]:
    return losses(folder, kind, spec, **DROPPING[kind])


TITLES = {
    "opt": "OPT",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "falcon": "Falcon, groups of heads",
    "falcon-one-key": "Falcon, one key head",
    "falcon-alibi": "Falcon, ALiBi",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "stablelm": "StableLM, a norm for each head",
    "gemma3": "Gemma 3",
    "granite": "Granite",
    "cohere2": "Cohere 2",
    "phi": "Phi",
    "gptj": "GPT-J",
    "glm4": "GLM-4",
    "nemotron": "Nemotron",
    "smollm3": "SmolLM3",
    "mixtral": "Mixtral",
    "bert": "Bert, masked words",
    "bert-classes": "Bert, classes",
    "distilbert": "DistilBERT, masked words",
    "modernbert": "ModernBERT, masked words",
    "vit": "ViT, classes of images",
    "mbart": "mBART",
    "t5": "T5",
    "switch": "Switch Transformers",
}


def test_the_table_in_the_documentation_is_what_these_tests_hold() -> None:
    rows = [["family", *SPECS], ["---"] * (len(SPECS) + 1)]
    rows += [[TITLES[kind], *("no" if (kind, how) in REFUSED else "yes" for how in SPECS)] for kind in FAMILIES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = (Path(__file__).parents[3] / "docs" / "hugging-face.md").read_text()
    wanted = table.replace("| --- | ---", "|---|---").replace(" | ---", "|---").replace("--- |", "---|")
    assert wanted in page, wanted


def labels_of_their_own(kind: str, rows: int) -> list[dict[str, Tensor]]:
    """What a decoder says, of another length than what its encoder reads; or a number for each class. Uneven rows."""
    found = []
    for seed in (1, 2):
        batch = batch_of(kind, rows=rows, seed=seed)
        if kind in SEQ2SEQ:
            batch["labels"] = batch["labels"][:, :5].clone()
            batch["labels"][:3, 0] = batch["labels"][4, 2:] = -100
        else:
            batch["labels"] = (torch.arange(3 * rows).view(rows, 3) % 2).double()
        found.append(batch)
    return found


def compare_labels(kind: str, spec: dict[str, Any], rows: int = 7) -> None:
    made = model_of(kind, **({} if kind in SEQ2SEQ else dict(problem_type="multi_label_classification"))).double()
    wanted, batches = copy.deepcopy(made), labels_of_their_own(kind, rows)
    settings: dict[str, Any] = dict(optimizer=dict(name="sgd", lr=0.5), precision="fp64", example=batches[0])
    with exact(kind), Engine(made, spec, **settings) as engine:
        for batch in batches:
            loss = engine.train_step(engine.shard_batch(batch))
            output = wanted(**batch).loss
            output.backward()
            assert abs(loss - float(output.detach())) < 1e-9
            with torch.no_grad():
                for parameter in wanted.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.5 * parameter.grad
                        parameter.grad = None
        found = engine.full_state_dict()
    for name, value in wanted.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-9), name


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["t5", "bert-classes"])
@pytest.mark.parametrize("spec", [dict(data=4), dict(data=2, pipeline=2)], ids=["data", "data × pipeline"])
def test_labels_that_are_not_one_a_token(kind: str, spec: dict[str, Any]) -> None:
    """Each counts, also the first of a row: nothing is shifted."""
    run_on_ranks(4, compare_labels, kind, spec)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        # Switch's blocks are T5's, beside its experts.
        (kind, how)
        if (kind, how) == ("switch", "2d") or kind == "mbart"
        else pytest.param(kind, how, marks=pytest.mark.slow)
        for kind in SEQ2SEQ
        for how in ("2d", "3d")
    ],
)
def test_rows_of_padding_do_not_count(kind: str, how: str) -> None:
    """Seven rows become eight, in whose last mBART would look for a token that is not padding. The decoder has fewer tokens."""
    run_on_ranks(4, compare_labels, kind, SPECS[how])


@pytest.mark.parametrize("kind", ["mbart", pytest.param("t5", marks=pytest.mark.slow)])
def test_a_decoder_has_fewer_tokens_than_its_encoder(kind: str) -> None:
    run_on_ranks(4, compare_labels, kind, SPECS["1d+sequence"], rows=8)


def compare_padded(kind: str, spec: dict[str, Any]) -> None:
    """To the rounding of softmax, which is in float32: a function mode that keeps float64 hides the lines that make masks."""
    made, batch = model_of(kind).double(), batch_of(kind)
    wanted = copy.deepcopy(made)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -3:] = mask[2, -1:] = 0
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    loss = wanted(**batch, use_cache=False).loss
    loss.backward()
    with Engine(made, spec, optimizer=dict(name="sgd", lr=1.0), precision="fp64") as engine:
        assert abs(engine.train_step(engine.shard_batch(batch)) - float(loss.detach())) < 2e-6
        found = engine.full_state_dict()
    for name, value in wanted.named_parameters():
        assert value.grad is not None
        assert torch.allclose(found[name], value.detach() - value.grad, rtol=0, atol=2e-7), name


@pytest.mark.parametrize("kind", ["bloom", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mpt", "falcon-alibi"))])
def test_padding_beside_biases_of_heads(kind: str) -> None:
    for how in ("2d", "2.5d"):
        run_on_ranks(4, compare_padded, kind, SPECS[how])


@pytest.mark.parametrize("kind", ["mbart", "t5"])
def test_attention_by_tokens_of_two_streams_is_refused(kind: str) -> None:
    from meshfold.mesh import LayoutError, Mesh
    from meshfold.tensor_parallel import parallelize

    with pytest.raises(LayoutError, match=r"is an encoder-decoder.*Leave attention='tokens' out of tensor"):
        parallelize(model_of(kind), Mesh(dict(tensor=2)), "1d+tokens")
