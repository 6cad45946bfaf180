"""PaLM: transformers' Cohere equals the formulas of PaLM-pytorch, and trains in every mode like one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.mesh import Mesh, ParallelSpec, SpecError
from meshfold.mesh.testing import run_on_ranks
from meshfold.tensor_parallel import parallelize

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file, on every rank
from hugging_face_families import InFloat64

if importlib.util.find_spec("transformers") is None:  # ranks import it, this process need not
    pytest.skip("transformers is not installed: pip install meshfold[hf]", allow_module_level=True)

WORDS, HIDDEN, HEADS, LENGTH = 101, 32, 4, 9


def small() -> Any:
    """A small PaLM with random weights, none of them one."""
    from meshfold.huggingface import palm

    torch.manual_seed(0)
    model = palm("palm-tiny", vocab_size=WORDS, hidden=HIDDEN, heads=HEADS)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def ids_of(rows: int = 4) -> Tensor:
    return torch.randint(WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, None, 1e-5)


def turned(x: Tensor) -> Tensor:
    """Rotary embedding of PaLM-pytorch: element i of the first half of a head turns with element i of the second; ``.. s d``."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] / 10000 ** (torch.arange(half, dtype=x.dtype) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def oracle(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits by the formulas: x + attention(norm(x)) + swiglu(norm(x)), queries of many heads, keys and values of one."""
    from meshfold.huggingface import rotary_rows

    dim = HIDDEN // HEADS
    x = state["model.embed_tokens.weight"][ids]
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for layer in range(2):
        w = {name.split(f"layers.{layer}.")[1]: v for name, v in state.items() if f"layers.{layer}." in name}
        y = norm(x, w["input_layernorm.weight"])
        q, k = (y @ rotary_rows(w[f"self_attn.{n}_proj.weight"], dim, to_halves=True).t() for n in "qk")
        q = turned(q.unflatten(-1, (HEADS, dim)).transpose(1, 2))
        scores = q @ turned(k)[:, None].transpose(-1, -2) / dim**0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        seen = (weights @ (y @ w["self_attn.v_proj.weight"].t())[:, None]).transpose(1, 2).flatten(2)
        inner = F.silu(y @ w["mlp.gate_proj.weight"].t()) * (y @ w["mlp.up_proj.weight"].t())
        x = x + seen @ w["self_attn.o_proj.weight"].t() + inner @ w["mlp.down_proj.weight"].t()
    return norm(x, state["model.norm.weight"]) @ state["model.embed_tokens.weight"].t()


def test_logits_are_those_of_the_formulas() -> None:
    model, ids = small(), ids_of()
    with InFloat64(), torch.no_grad():
        found = model(input_ids=ids).logits
    assert (found - oracle(model.state_dict(), ids)).abs().max() < 6e-8
    assert found.abs().max() > 0.1


def test_rows_go_to_halves_and_back() -> None:
    from meshfold.huggingface import rotary_rows

    rows = torch.arange(16.0).view(16, 1)
    assert rotary_rows(rows, 8)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(rotary_rows(rotary_rows(rows, 8), 8, to_halves=True), rows)


def compare(spec: dict[str, Any]) -> None:
    serial, ids = small(), ids_of()
    before = {name: p.detach().clone() for name, p in serial.named_parameters()}
    with InFloat64():
        wanted = serial(input_ids=ids, labels=ids).loss
        wanted.backward()
        with Engine(small(), spec, optimizer=dict(name="sgd", lr=1.0), precision="fp64") as engine:
            loss = engine.train_step(engine.shard_batch(ids))
            found = engine.full_state_dict()
    assert abs(loss - float(wanted.detach())) < 1e-9
    for name, parameter in serial.named_parameters():
        assert torch.allclose(found[name], before[name] - parameter.grad, rtol=1e-9, atol=1e-9), name


SPECS: dict[str, tuple[int, dict[str, Any]]] = {
    "1d": (4, dict(tensor=4)),
    "1d+sequence": (2, dict(tensor=2, sequence=dict(mode="megatron"))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=1))),
    "3d": (4, dict(tensor=dict(mode="3d", grid=(1, 2, 2)))),
    "2.5d, two deep": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2))),
    "3d, a cube": (8, dict(tensor=dict(mode="3d", grid=(2, 2, 2)))),
    "zero": (4, dict(data=2, tensor=2, zero=dict(stage=3))),
    "pipeline": (2, dict(pipeline=2)),
    "ulysses": (2, dict(sequence=dict(mode="ulysses", size=2))),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("how", SPECS)
def test_loss_and_gradients_are_those_of_one_process(how: str) -> None:
    size, spec = SPECS[how]
    run_on_ranks(size, compare, spec)


def test_published_sizes() -> None:
    from transformers import CohereForCausalLM

    from meshfold.huggingface import palm_config

    for name, h, layers, heads in (
        ("palm-1b", 2048, 16, 16),
        ("palm-8b", 4096, 32, 16),
        ("palm-16b", 4096, 64, 16),
        ("palm-30b", 6144, 48, 24),
        ("palm-62b", 8192, 64, 32),
    ):
        # queries and output, one key and one value head, three matrices of the MLP, a norm; words, the last norm
        wanted = layers * (2 * h * h + 2 * h * (h // heads) + 12 * h * h + h) + 50304 * h + h
        with torch.device("meta"):
            model = CohereForCausalLM(palm_config(name))
        assert sum(p.numel() for p in model.parameters()) == wanted, name


@pytest.mark.parametrize("how", ["1d", "2d", "2.5d, two deep", "3d, a cube"])
def test_published_sizes_are_split_in_every_mode(how: str) -> None:
    """A rank has its share of a layer's weights; norms, and the one key and value head under 1d, are whole."""
    from transformers import CohereForCausalLM

    from meshfold.huggingface import palm_config

    entry = SPECS[how][1]
    tensor = ParallelSpec.parse(entry)
    shared = tensor.axes.get("depth", 1)  # 2.5d has copies of the weights over depth
    for name in ("palm-1b", "palm-30b", "palm-62b"):
        with torch.device("meta"):
            model = CohereForCausalLM(palm_config(name, layers=1))
        whole = sum(p.numel() for p in model.parameters())
        parallelize(model, Mesh(tensor.axes, rank=0), mode=how.partition(",")[0])
        share = sum(p.numel() for p in model.parameters()) * tensor.world_size / shared
        assert whole <= share < 1.05 * whole, (name, share / whole)


def test_mistakes() -> None:
    from meshfold.huggingface import palm_sizes

    for name, changes, said in (
        ("palm-9b", {}, "Did you mean 'palm-8b'?"),
        ("palm-8b", dict(layer=3), "Did you mean 'layers'?"),
        ("palm-8b", dict(layers=0), "give a whole number above 0"),
        ("palm-8b", dict(heads=3), "do not divide hidden=4096"),
    ):
        with pytest.raises(SpecError) as caught:
            palm_sizes(name, **changes)
        assert said in str(caught.value)
