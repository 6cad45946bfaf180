"""OPT, GPT-2, Llama and Qwen2 (and Qwen3, GPT-NeoX) of random weights against themselves, in every mode."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from tensor_parallel_checks import (
    CASES,
    COVERING,
    WITHOUT_DATA,
    Case,
    alone,
    assert_gradients_equal,
    gradients,
    mesh_of,
    seeded,
    whole_gradients,
)
from tensor_parallel_models import exact_reference, hugging_face
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, dropout_stream, metadata
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import Report, parallelize

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold-tensor-parallel[hf]", allow_module_level=True)

VOCAB, SEQUENCE = 101, 8
KINDS = ("opt", "gpt2", "llama", "qwen2")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("opt", dict(tie_word_embeddings=False)),
    ("gpt2", dict(tie_word_embeddings=False)),
    ("llama", dict(num_key_value_heads=1)),
    ("llama", dict(num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True)),
    ("qwen2", dict(num_key_value_heads=1, tie_word_embeddings=False)),
    ("qwen3", dict(head_dim=16)),
    ("qwen3", dict(head_dim=16, num_key_value_heads=1)),
    ("neox", {}),
)


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    """ids and labels ``b s``, some of which do not count; no id is that of padding."""
    ids = torch.randint(3, VOCAB, (rows, SEQUENCE), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 3] = labels[-1, 1:6] = -100
    return ids, labels


def compare(kind: str, settings: dict[str, Any], cases: tuple[Case, ...], rows: int) -> None:
    """Loss, every gradient, and logits without labels."""
    ids, labels = tokens(rows)
    serial = seeded(partial(hugging_face, kind, **settings))
    reference = exact_reference(copy.deepcopy(serial))
    wanted = reference(input_ids=ids, labels=labels, use_cache=False).loss
    wanted.backward()
    with torch.no_grad():
        wanted_logits = reference(input_ids=ids, use_cache=False).logits
    for mode, axes in cases:
        what, mesh = f"{kind} {settings} in {mode} on {dict(axes)}", mesh_of(axes)
        model = copy.deepcopy(serial)
        report = parallelize(model, mesh, mode)
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        assert_gradients_equal({"loss": loss}, {"loss": wanted}, what)
        assert_gradients_equal(whole_gradients(model, mesh), gradients(reference), what)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        assert_gradients_equal({"logits": logits}, {"logits": wanted_logits}, what)
        assert model.state_dict().keys() == serial.state_dict().keys()
        check_report(report, model, serial, mesh)


def check_report(report: Report, model: nn.Module, serial: nn.Module, mesh: Mesh) -> None:
    """Every submodule with a parameter is there, and the counts are those of the parameters."""
    assert report.parameters == sum(p.numel() for p in serial.parameters())
    assert report.local_parameters == sum(p.numel() for p in model.parameters())
    assert report.parameters / mesh.world_size <= report.local_parameters < report.parameters
    text = str(report)
    for name, parameter in model.named_parameters():
        assert name.rsplit(".", 1)[0] in text
        assert metadata(parameter).placement.shape == serial.get_parameter(name).shape


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "kind"), list(enumerate(KINDS)))
def test_model_is_the_serial_one(place: int, kind: str) -> None:
    """Three rows fit no split of the batch: they are filled up. 101 words fit no split of the vocabulary.

    One mode a model; the slow test below has all.
    """
    run_on_ranks(4, compare, kind, {}, COVERING[place % 4 :][:1], 3)


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "kind", "settings"), [(n, *variant) for n, variant in enumerate(VARIANTS)])
def test_variant_is_the_serial_one(place: int, kind: str, settings: dict[str, Any]) -> None:
    """In 1d or in 2d; where a model stands here twice, in both."""
    run_on_ranks(4, compare, kind, settings, COVERING[:3:2][place % 2 :][:1], 4)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", {}), ("llama", dict(num_key_value_heads=1)), ("gpt2", {}), ("opt", {})]
)
def test_attention_by_tokens_is_the_serial_one(kind: str, settings: dict[str, Any]) -> None:
    """Projections apart and fused, with and without biases, and fewer key/value heads than ranks."""
    run_on_ranks(4, compare, kind, settings, (("1d+tokens", (("tensor", 4),)),), 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("kind", "settings"), [*((kind, {}) for kind in KINDS), *VARIANTS])
def test_every_model_is_the_serial_one_in_every_mode(kind: str, settings: dict[str, Any], world: int) -> None:
    for rows in (4, 3):
        run_on_ranks(world, compare, kind, settings, WITHOUT_DATA[world], rows)


# -- attention that cannot be split by heads ------------------------------------------------------------------------

WHOLE: dict[str, tuple[str, str, str]] = {
    "phi3": ("model.layers.0.self_attn", "*.self_attn", "it reads config.num_attention_heads"),
    "bloom": ("transformer.h.0.self_attention", "*.self_attention", ""),
    "mpt": ("transformer.blocks.0.attn", "*.attn", ""),
    "codegen": ("transformer.h.0.attn", "*.attn", "its fused projection may have another order"),
}
"""Attention's path, the rule that keeps it whole, and the message's words; empty if its heads can be split all the same."""


def unsplittable(kind: str, heads: int = 4) -> nn.Module:
    """A model whose attention needs all of its heads."""
    import transformers as t

    common = dict(vocab_size=VOCAB, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if kind == "phi3":
        config = t.Phi3Config(
            **common,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        return t.Phi3ForCausalLM(config)
    if kind == "bloom":
        return t.BloomForCausalLM(t.BloomConfig(**common, hidden_size=32, n_layer=2, n_head=heads))
    if kind == "mpt":
        return t.MptForCausalLM(t.MptConfig(vocab_size=VOCAB, d_model=32, n_heads=heads, n_layers=2, max_seq_len=32))
    config = t.CodeGenConfig(
        **common,
        n_embd=64,
        n_layer=2,
        n_head=heads,
        n_positions=32,
        n_ctx=32,
        rotary_dim=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return t.CodeGenForCausalLM(config)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [kind for kind, (_, _, says) in WHOLE.items() if says])
def test_attention_that_needs_all_of_its_heads_is_refused(kind: str, device: str) -> None:
    where, rule, says = WHOLE[kind]
    with torch.device(device):
        model = unsplittable(kind)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for mode, axes in (("1d", {"tensor": 4}), ("1d+sequence", {"tensor": 2}), ("2d", {"row": 2, "col": 2})):
        with pytest.raises(LayoutError) as raised:
            parallelize(model, Mesh(axes, rank=1), mode)
        for words in (f"{where}: ", says, f"the rule {rule!r}: 'replicate'"):
            assert words in str(raised.value)
        with torch.device(device), pytest.raises(LayoutError, match=re.escape(says)):
            parallelize(model, Mesh(axes, rank=1), mode)
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert not any(metadata(p) for p in model.parameters())


def test_an_odd_order_of_a_fused_projection_is_found_where_all_shapes_fit() -> None:
    with pytest.raises(LayoutError, match=r"CodeGenAttention's own code computes other values"):
        parallelize(unsplittable("codegen", heads=16), Mesh({"tensor": 4}, rank=0), "1d")


def compare_whole(kind: str, cases: tuple[Case, ...], rows: int) -> None:
    """With its attention kept whole the model is the serial one; softmax is in float32 in some of them."""
    ids, labels = tokens(rows)
    given: dict[str, Any] = dict(input_ids=ids, labels=labels, use_cache=False)
    padding = (torch.arange(SEQUENCE) < SEQUENCE - torch.arange(rows)[:, None]).long()  # row by row one more
    serial = seeded(partial(unsplittable, kind))
    reference = exact_reference(copy.deepcopy(serial))
    wanted = reference(**given).loss
    wanted.backward()
    for mode, axes in cases:
        what, mesh = f"{kind} in {mode} on {dict(axes)}", mesh_of(axes)
        model = copy.deepcopy(serial)
        parallelize(model, mesh, mode, rules={WHOLE[kind][1]: "replicate"})
        if not mode.startswith("1d"):  # a rank whose rows have no padding would make no mask of them
            with pytest.raises(LayoutError, match=r"0\..*attn, which stays whole, has other rows"):
                model(**given, attention_mask=padding)
        loss = model(**given).loss
        loss.backward()
        assert_gradients_equal({"loss": loss}, {"loss": wanted}, what, torch.float32)
        assert_gradients_equal(whole_gradients(model, mesh), gradients(reference), what, torch.float32)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", WHOLE)
def test_attention_kept_whole_is_the_serial_one(kind: str) -> None:
    run_on_ranks(4, compare_whole, kind, COVERING[:1], 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["phi3", "codegen"])
def test_attention_kept_whole_has_the_masks_of_all_rows(kind: str, turn: int) -> None:
    """CodeGen makes masks, for a rank's rows: of 2, one each; 3 are filled up. The slow half has the other rows of a mode."""
    turn += kind == "phi3"
    for rows in (2, 3):
        run_on_ranks(4, compare_whole, kind, COVERING[(rows + turn) % 2 :: 2], rows)


# -- dropout and recomputation --------------------------------------------------------------------------------------

DROPPING: dict[str, dict[str, float]] = {
    "opt": dict(dropout=0.2, attention_dropout=0.2),
    "gpt2": dict(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2),
    "llama": dict(attention_dropout=0.2),
}


def compare_dropout(kind: str, cases: tuple[Case, ...], attention: str) -> None:
    """The elements that one rank drops, recomputed or not, are dropped everywhere."""
    ids, labels = tokens(3)
    serial = seeded(partial(hugging_face, kind, attn_implementation=attention, **DROPPING[kind])).train()

    def run(mesh: Mesh, mode: str, recompute: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(serial)
        if recompute:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        parallelize(model, mesh, mode)
        with dropout_stream(seed=2, step=9):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
        return loss, whole_gradients(model, mesh)

    wanted, exact = run(alone(), "1d")
    undropped = copy.deepcopy(serial).eval()(input_ids=ids, labels=labels).loss
    assert abs(float(wanted - undropped)) > 1e-4
    for mode, axes in cases:
        for recompute in (False, True):
            loss, found = run(mesh_of(axes), mode, recompute)
            what = f"{kind} in {mode} on {dict(axes)}, {recompute=}"
            assert_gradients_equal({"loss": loss}, {"loss": wanted}, what)
            assert_gradients_equal(found, exact, what)


@pytest.mark.few(1)
@pytest.mark.parametrize(("place", "kind"), list(enumerate(DROPPING)))
def test_dropout_is_that_of_one_rank(place: int, kind: str) -> None:
    """One mode a model; the slow test below has all."""
    run_on_ranks(4, compare_dropout, kind, COVERING[1 + place : 2 + place], "sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("kind", DROPPING)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_is_that_of_one_rank_in_every_mode(kind: str, attention: str) -> None:
    run_on_ranks(4, compare_dropout, kind, WITHOUT_DATA[4], attention)


# -- what a caller may and may not pass -----------------------------------------------------------------------------


def call_with_masks() -> None:
    """Masks and positions that differ by row are cut with the batch where attention has the stream's rows."""
    ids, labels = tokens(4)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[2, :1] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels[mask == 0] = -100
    right = mask.flip(1)  # on the left, eager attention of a row without any key is nan
    for kind, given, settings in (
        ("llama", dict(attention_mask=mask, position_ids=positions), {}),
        ("llama", dict(attention_mask=right), dict(attn_implementation="eager")),
        ("opt", dict(attention_mask=mask), {}),
    ):
        serial = exact_reference(seeded(partial(hugging_face, kind, **settings)))
        wanted = serial(input_ids=ids, labels=labels, use_cache=False, **given).loss
        for mode, axes in COVERING[1:3]:
            model = copy.deepcopy(serial)
            parallelize(model, mesh_of(axes), mode)
            loss = model(input_ids=ids, labels=labels, use_cache=False, **given).loss
            assert_gradients_equal({"loss": loss}, {"loss": wanted}, f"{kind} in {mode}")
        model = copy.deepcopy(serial)
        parallelize(model, mesh_of(CASES[4][4][1]), "3d")
        for _ in range(2):
            with pytest.raises(LayoutError, match=r"differs by row cannot be used in mode '3d'.*pad on the right"):
                model(input_ids=ids, labels=labels, **given)
        everything = dict.fromkeys(given, torch.ones_like(ids)) if kind == "opt" else {}
        model(input_ids=ids, labels=labels, use_cache=False, **everything)
        with torch.no_grad():  # a mask given by position is no labels: logits come out whole
            logits = model(ids, torch.ones_like(ids), use_cache=False).logits
            assert_gradients_equal({"logits": logits}, {"logits": serial(ids, torch.ones_like(ids)).logits}, kind)


def test_masks_and_positions() -> None:
    run_on_ranks(4, call_with_masks)


def generate() -> None:
    ids, _ = tokens(2)
    serial = seeded(partial(hugging_face, "llama")).eval()
    settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    wanted = serial.generate(ids, **settings)
    for mode, axes in COVERING[:3]:
        model = copy.deepcopy(serial)
        parallelize(model, mesh_of(axes), mode)
        assert torch.equal(model.generate(ids, **settings), wanted), mode


@pytest.mark.slow
def test_a_sharded_model_generates_what_the_serial_one_does() -> None:
    run_on_ranks(4, generate)


def leave_configurations_alone() -> None:
    """Another model of the same configuration is not affected, and a copy of a sharded model runs by itself."""
    model = hugging_face("opt", dropout=0.1).train()
    before = copy.deepcopy(model.config.to_dict())
    other = type(model)(model.config)
    parallelize(model, alone(), "1d")
    assert model.config.to_dict() == before
    ids, labels = tokens(2)
    other(input_ids=ids, labels=labels)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with dropout_stream(0, 0):
        assert float(twin(input_ids=ids, labels=labels).loss) != pytest.approx(math.log(VOCAB))
        assert float(model(input_ids=ids, labels=labels).loss) == pytest.approx(math.log(VOCAB))
    assert all(metadata(p) is not None for p in twin.parameters())


def test_configurations_are_left_alone() -> None:
    run_on_ranks(4, leave_configurations_alone)


def refuse_what_cannot_be() -> None:
    four, square = mesh_of(COVERING[0][1]), mesh_of(COVERING[2][1])
    ids, _ = tokens(2)
    model = hugging_face("llama")
    parallelize(model, four, "1d")
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(LayoutError, match=f"{name}: outputs of blocks stay split"):
            model(input_ids=ids, **{name: True})
    model = hugging_face("llama")
    parallelize(model, square, "2d")
    with pytest.raises(LayoutError, match=r"inputs_embeds cannot be used in mode '2d'.*give input_ids"):
        model(inputs_embeds=torch.zeros(2, 4, 32))
    with pytest.raises(LayoutError, match="layerdrop would skip different layers on each rank; set it to 0"):
        parallelize(hugging_face("opt", layerdrop=0.1), four, "1d")


def test_what_cannot_be_is_refused() -> None:
    run_on_ranks(4, refuse_what_cannot_be)
