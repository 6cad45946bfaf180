"""Masks of Hugging Face models: chosen without a look at tensors, and the loss is that of the model alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.engine import Engine

WORDS, LENGTH = 40, 12


def model_of(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        llama=dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2),
        mistral=dict(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            sliding_window=4,
        ),
        gpt2=dict(
            n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, summary_first_dropout=0.0
        ),
    )[family]
    config = AutoConfig.for_model(family, vocab_size=WORDS, use_cache=False, bos_token_id=1, eos_token_id=2, **sizes)
    config._attn_implementation = "sdpa"
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def batches() -> dict[str, list[dict[str, Tensor]]]:
    """Rows without anything, with padding that comes and goes, and with packed documents that change."""
    ids = torch.randint(WORDS, (6, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    padded, packed = [], []
    for number, rows in enumerate(ids):
        mask = torch.ones_like(rows)
        if number % 2:
            mask[0, LENGTH - 1 - number :] = 0
        padded.append(dict(input_ids=rows, attention_mask=mask, labels=rows.masked_fill(mask == 0, -100)))
        cut = 3 + number if number else LENGTH
        positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)]).expand(2, -1)
        labels = rows.clone()
        labels[:, cut:][:, :1] = -100
        packed.append(dict(input_ids=rows, position_ids=positions, labels=labels))
    return dict(plain=[dict(input_ids=rows, labels=rows) for rows in ids], padded=padded, packed=packed)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of attention, whether it was given a mask."""
    found: list[bool] = []
    theirs = F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs.get("attn_mask") is not None)
        return theirs(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    return found


@pytest.mark.few(7)
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("rows", ["plain", "padded", "packed"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_losses_are_those_of_the_model_alone(family: str, rows: str, cuda_graph: bool, kernels: list[bool]) -> None:
    given = batches()[rows]
    plain = model_of(family).double()
    wanted = [float(plain(**batch).loss.detach()) for batch in given]
    del kernels[:]
    with Engine(
        model_of(family), optimizer=dict(name="sgd", lr=0.0), precision="fp64", cuda_graph=cuda_graph, kernels="off"
    ) as engine:
        found = [engine.train_step(batch) for batch in given]
    assert found == pytest.approx(wanted, rel=1e-12)
    if rows == "plain" and family != "mistral":
        assert not any(kernels)  # the fast kernel, captured or not
    elif cuda_graph:
        assert all(kernels)  # every replay reads a mask, also where the first batch needed none


def test_positions_that_a_class_of_ones_own_computes() -> None:
    """A subclass packs documents by itself, without position_ids in the batch: they stay apart."""
    from transformers import LlamaForCausalLM

    class Packing(LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> Any:
            half = torch.arange(LENGTH // 2)
            positions = torch.cat([half, half]).expand(len(input_ids), -1)
            return super().forward(input_ids, labels=labels, position_ids=positions, use_cache=use_cache)

    plain = model_of("llama")
    torch.manual_seed(0)
    packing = Packing(plain.config)
    batch = batches()["plain"][0]
    wanted = float(packing(**batch).loss.detach())
    assert abs(wanted - float(plain(**batch).loss.detach())) > 1e-4
    with Engine(packing, optimizer=dict(name="sgd", lr=0.0), kernels="off") as engine:
        assert engine.train_step(batch) == pytest.approx(wanted, rel=1e-6)
