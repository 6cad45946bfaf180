"""Token ids and labels that no rank has: an error that names them on every rank, never a row of zeros."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tensor_parallel_checks import Case, alone, case, mesh_of
from tensor_parallel_models import HIDDEN, VOCAB, Flat
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.mesh import MeshfoldError, TokenError
from meshfold.mesh.testing import ranks
from meshfold.tensor_parallel import CausalLMLoss, Embedding, find_mode, parallelize

CASES: tuple[Case, ...] = (case("1d", tensor=2), case("2d", row=1, col=2), case("2d", row=2, col=1))


def good() -> Tensor:
    return torch.randint(VOCAB, (2, 4), generator=torch.Generator().manual_seed(0))


def with_one(number: int) -> Tensor:
    ids = good()
    ids[1, 2] = number
    return ids


@ranks(2)
def test_ids_and_labels_out_of_range_are_refused_on_every_rank() -> None:
    torch.manual_seed(0)
    whole = Flat(gated=False)
    for mode, axes in CASES:
        model = copy.deepcopy(whole)
        parallelize(model, mesh_of(axes), mode)
        for wrong in (VOCAB, 5000, -1, -7, -100):
            with pytest.raises(TokenError, match=rf"token id {wrong} is not in the vocabulary of {VOCAB} words"):
                model(with_one(wrong), labels=good())
            if wrong != -100:
                with pytest.raises(TokenError, match=rf"label {wrong} is not in .* or -100 where none counts"):
                    model(good(), labels=with_one(wrong))
        for fine in (good(), with_one(0), with_one(VOCAB - 1)):
            assert bool(model(fine, labels=fine).loss.isfinite())
        assert bool(model(good(), labels=with_one(-100)).loss.isfinite())


def test_the_error_is_an_index_error_as_torchs_is() -> None:
    table = Embedding(VOCAB, HIDDEN, mesh=alone())
    for error in (IndexError, MeshfoldError):
        with pytest.raises(error):
            table(with_one(VOCAB))


def test_a_compiled_graph_looks_too() -> None:
    table = Embedding(VOCAB, HIDDEN, mesh=alone())
    loss = CausalLMLoss(alone(), find_mode("1d"), VOCAB)
    compiled = partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=False)
    looked_up, mean = compiled(table), compiled(loss)
    logits = torch.randn(2, 4, VOCAB, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(looked_up(good()), table(good()))
    wanted = F.cross_entropy(logits.flatten(0, 1), good().flatten())
    torch.testing.assert_close(mean(logits, shift_labels=good()), wanted)
    with pytest.raises(TokenError, match="token id 5000"):
        looked_up(with_one(5000))
    with pytest.raises(TokenError, match="label -7"):
        mean(logits, shift_labels=with_one(-7))


class OwnPadding(nn.Module):
    """A model whose loss ignores another label than -100, in a batch that has to be filled up."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB), loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.loss(self.head(self.embed(ids)), labels)
        return found


class SkipsZero(nn.Module):
    causal_lm_loss = True
    ignore_index = 0

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=0)


@ranks(2)
def test_rows_that_fill_a_batch_up_have_the_label_that_the_loss_ignores() -> None:
    torch.manual_seed(0)
    model = OwnPadding(SkipsZero()).double()
    ids = torch.randint(1, VOCAB, (3, 4), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(ids % 2 == 0, 0)
    wanted = model(ids, labels)
    parallelize(model, mesh_of((("row", 2), ("col", 1))), "2d")
    torch.testing.assert_close(model(ids, labels), wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asserts on a GPU: needs one")
@pytest.mark.parametrize("wrong", ["token id", "label"])
def test_a_gpu_asserts_without_waiting(wrong: str, warm_python: str) -> None:
    """In a process of its own: a device that failed an assertion takes no more work."""
    import subprocess

    code = f"""
import torch
from meshfold.mesh import Mesh
from meshfold.tensor_parallel import Embedding, cross_entropy
mesh = Mesh({{"tensor": 1}}, rank=0)
ids = torch.full((2, 4), 3).cuda()
table = Embedding(7, 4, mesh=mesh).cuda()
def run(ids):
    torch.cuda.set_sync_debug_mode("error")
    if {wrong!r} == "label":
        cross_entropy(torch.randn(2, 4, 7, device="cuda"), ids, mesh=mesh, vocab_size=7)
    else:
        table(ids)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
run(ids)
print("fine", flush=True)
run(ids + 100)
print("silent", flush=True)
"""
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, timeout=120)
    assert "fine" in done.stdout, done.stderr
    assert "silent" not in done.stdout
    assert "device-side assert" in done.stderr
