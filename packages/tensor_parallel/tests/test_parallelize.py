"""What ``parallelize`` does to a module, apart from numbers: blocks, metadata, ties, hooks, copies, the report."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tensor_parallel_models import (
    HIDDEN,
    LANGUAGE_MODELS,
    VOCAB,
    Attention,
    Block,
    Classic,
    Flat,
    GatedMLP,
    ViT,
    WithRouter,
    mlp,
)
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement, build_on_meta, materialize, metadata
from meshfold.tensor_parallel import Embedding, LayerNorm, Linear, Report, RMSNorm, parallelize

WHERE: tuple[tuple[str, dict[str, int]], ...] = (
    ("1d", {"tensor": 4}),
    ("1d+sequence", {"tensor": 4}),
    ("2d", {"row": 2, "col": 4}),
    ("2.5d", {"depth": 2, "row": 2, "col": 2}),
    ("3d", {"a": 2, "b": 1, "c": 4}),
)
MODELS = {**LANGUAGE_MODELS, "vit": ViT, "mlp": mlp, "gated mlp": GatedMLP, "block": Block}


def at(axes: dict[str, int], rank: int = -1) -> Mesh:
    """A mesh seen from one of its ranks, the last unless said otherwise; nothing communicates."""
    size = Mesh(axes).world_size
    return Mesh(axes, rank=rank % size)


@pytest.mark.few(15)
@pytest.mark.parametrize(("mode", "axes"), WHERE, ids=[mode for mode, _ in WHERE])
@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_blocks_that_know_their_place(name: str, mode: str, axes: dict[str, int]) -> None:
    """Names stay, shapes are local, each block has the numbers that its metadata says; meta weights give the same."""
    whole = MODELS[name]()
    serial = {key: value.clone() for key, value in whole.state_dict().items()}
    with torch.device("meta"):
        empty = MODELS[name]()
    names = [key for key, _ in whole.named_parameters()]
    mesh = at(axes)
    report, of_meta = parallelize(whole, mesh, mode), parallelize(empty, mesh, mode)
    assert str(report) == str(of_meta)
    assert [key for key, _ in whole.named_parameters()] == names
    assert whole.state_dict().keys() == serial.keys()
    for (key, parameter), twin in zip(whole.named_parameters(), empty.parameters(), strict=True):
        meta, meta_twin = metadata(parameter), metadata(twin)
        assert isinstance(meta, ParameterMeta)
        assert meta_twin is not None
        assert meta.placement == meta_twin.placement
        assert meta.mesh is mesh
        assert twin.is_meta
        assert parameter.shape == twin.shape == meta.placement.local_shape(mesh)
        assert meta.placement.shape == serial[key].shape
        assert torch.equal(parameter, meta.placement.shard(serial[key], mesh)), key
        assert parameter.requires_grad
        assert parameter.is_leaf


@pytest.mark.few(2)
@pytest.mark.parametrize(("mode", "axes"), WHERE, ids=[mode for mode, _ in WHERE])
def test_the_blocks_of_all_ranks_are_the_model(mode: str, axes: dict[str, int]) -> None:
    """Every element of every parameter is on as many ranks as its placement says, and on no two blocks of them."""
    size = Mesh(axes).world_size
    for make in (LANGUAGE_MODELS["llama with one key/value head"], LANGUAGE_MODELS["gpt"]):
        with torch.device("meta"):
            models = [make() for _ in range(size)]
        for rank, model in enumerate(models):
            parallelize(model, at(axes, rank), mode)
        for name, parameter in models[0].named_parameters():
            place = metadata(parameter).placement
            held = torch.zeros(place.shape)
            for rank in range(size):
                for box in place.rectangles(at(axes), rank):
                    held[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
            assert held.min() >= size // at(axes).size(*place.split_axes), name
            if not place.parts:
                assert held.max() == held.min(), name


def test_the_report_says_what_became_of_everything() -> None:
    model = Flat(gated=False)
    report = parallelize(model, at({"row": 2, "col": 2}), "2d")
    assert isinstance(report, Report)
    text = str(report)
    lines = text.splitlines()
    assert lines[0] == "mode 2d on Mesh(row 2 × col 2)"
    assert "submodule" in lines[1]
    words = next(line for line in lines if line.startswith("blocks.0.attn.qkv")).split()
    assert words == ["blocks.0.attn.qkv", "column", "Linear", "k:row", "n:col", "48×16", "24×8"]
    assert next(line for line in lines if line.startswith("head ")).split()[:3] == [
        "head",
        "tied_head",
        "Linear",
    ]
    assert {p.name for p in report.placed} >= {
        "embed",
        "positions",
        "blocks.1.mlp.down",
        "norm",
        "loss",
        "dropout",
    }
    assert f"{sum(p.numel() for p in Flat(gated=False).parameters()):,} parameters" in text
    assert report.local_parameters == sum(p.numel() for p in model.parameters())


def test_the_report_tells_of_boundaries_and_shared_gathers() -> None:
    notes = parallelize(Classic(), at({"tensor": 4}), "1d+sequence").notes
    assert "blocks: the stream is split over tensor from the first block to the last" in notes
    assert "blocks.1.attn: its input is gathered once for q_proj, k_proj, v_proj" in notes
    assert parallelize(mlp(), at({"tensor": 4}), "1d").notes == [
        "inputs are split on the way in, outputs joined on the way out"
    ]


def test_printed_modules_show_their_layouts() -> None:
    model = Classic()
    parallelize(model, at({"row": 2, "col": 2}), "2d")
    text = repr(model)
    assert "Linear(16, 64, bias=True, mode=2d, role=column, x='m:row k:col', w='k:row n:col', y='m:row n:col')" in text
    assert "Embedding(37, 16, mode=2d, w='v:row h:col')" in text
    assert "LayerNorm(16, eps=1e-05, mode=2d)" in text


# -- ties and shared modules ----------------------------------------------------------------------------------------


def test_ties_stay_ties() -> None:
    model = Flat(gated=False)
    parallelize(model, at({"row": 2, "col": 2}), "2d")
    assert model.head.weight is model.embed.weight
    assert len(list(model.parameters())) == len({id(p) for p in model.parameters()})


def test_a_module_that_stands_in_two_places_still_does() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))
            self.second = self.first
            self.third = nn.ModuleList([self.first[0], self.first[2]])

    model = Shared()
    parallelize(model, at({"tensor": 4}), "1d")
    assert isinstance(model.first[0], Linear)
    assert model.second is model.first
    assert model.third[0] is model.first[0]
    assert model.third[1] is model.first[2]


def test_a_layer_keeps_its_hooks_training_flag_and_frozen_parameters() -> None:
    model = mlp().eval()
    model[0].weight.requires_grad_(False)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model[3].register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True)
    parallelize(model, Mesh({"tensor": 1}, rank=0), "1d")
    model(torch.zeros(2, HIDDEN))
    assert seen == [Linear, "before"]
    assert not model[0].training
    assert not model[0].weight.requires_grad
    assert model[0].bias.requires_grad


# -- copies and moves -----------------------------------------------------------------------------------------------


def test_metadata_survives_what_torch_does_to_parameters() -> None:
    """(Off the meta device torch makes new parameters, tied ones one for each name, here as in any model.)"""
    for mode, axes in WHERE:
        model = LANGUAGE_MODELS["llama"]()
        parallelize(model, at(axes), mode)
        places = {name: metadata(p).placement for name, p in model.named_parameters()}
        for change in (
            lambda m: m.to(torch.bfloat16),
            lambda m: m.double(),
            lambda m: m.to("meta"),
            lambda m: m.to_empty(device="cpu"),
            copy.deepcopy,
        ):
            model = change(model)
            assert {name: metadata(p).placement for name, p in model.named_parameters()} == places
            assert all(metadata(p).mesh is model.embed.mesh for p in model.parameters())


def test_a_copy_is_a_model_of_its_own_on_the_same_mesh() -> None:
    mesh = Mesh({"tensor": 1}, rank=0)
    for make, x in (
        (Classic, torch.arange(8).view(2, 4)),
        (Block, torch.randn(2, 4, HIDDEN)),
        (GatedMLP, torch.randn(2, HIDDEN)),
    ):
        model = make().eval()
        parallelize(model, mesh, "1d")
        twin = copy.deepcopy(model)
        y = model(x)
        assert torch.equal(twin(x), y)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(twin(x), y)
        assert not torch.equal(model(x), y)
        assert all(module.mesh is mesh for module in twin.modules() if hasattr(module, "mesh"))
        assert not any(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_sharded_model_is_saved_by_its_state() -> None:
    model = mlp()
    parallelize(model, at({"tensor": 4}), "1d")
    with pytest.raises(TypeError, match=r"a module that was split over a mesh.*cannot be pickled.*state_dict\(\)"):
        pickle.dumps(model)
    assert pickle.loads(pickle.dumps(model.state_dict())).keys() == model.state_dict().keys()


def test_labels_are_known_by_name_and_by_position() -> None:
    """Logits stay split only where labels are given, since then the model computes its loss of them."""
    model = Flat(gated=True)
    parallelize(model, Mesh({"tensor": 1}, rank=0), "1d")
    ids = torch.arange(8).view(2, 4)
    losses = []
    for args, kwargs in (
        ((ids, ids), {}),
        ((ids,), {"labels": ids}),
        ((), {"input_ids": ids, "labels": ids}),
    ):
        losses.append(float(model(*args, **kwargs).loss))
        assert not model.head.gather_output
    assert len(set(losses)) == 1
    assert model(ids).loss is None
    assert model.head.gather_output


def test_layers_made_directly_carry_metadata() -> None:
    mesh = at({"row": 2, "col": 2})
    layers: tuple[nn.Module, ...] = (
        Linear(8, 12, mesh=mesh, mode="2d"),
        Linear(8, 12, bias=False, mesh=mesh, mode="2d", role="row", dtype=torch.bfloat16),
        Embedding(10, 8, mesh=mesh, mode="2d"),
        LayerNorm(8, mesh=mesh, mode="2d", dtype=torch.bfloat16),
        RMSNorm(8, mesh=mesh, mode="2d", device="meta"),
        Linear(8, 12, mesh=mesh, mode="2d", device="meta"),
    )
    for layer in layers:
        for name, parameter in layer.named_parameters():
            meta = metadata(parameter)
            assert meta is not None, f"{layer}: {name}"
            assert parameter.shape == meta.placement.local_shape(mesh)
            assert parameter.is_meta or bool(parameter.isfinite().all())
    bound = 8**-0.5
    weight = layers[0].weight
    assert float(weight.detach().abs().max()) <= bound


def test_a_model_built_on_meta_gets_its_blocks_from_the_seed() -> None:
    """The weights that a rank makes for itself are its block of those that one rank makes."""

    def build(axes: dict[str, int], mode: str) -> nn.Module:
        model, trace = build_on_meta(lambda: Flat(gated=True, kv_heads=1))
        parallelize(model, at(axes), mode)

        def coordinates(name: str, tensor: Tensor) -> list[Tensor] | None:
            meta = metadata(tensor)
            return None if meta is None else [meta.placement.coordinates(meta.mesh, d) for d in range(tensor.dim())]

        return materialize(model, trace, seed=4, device="cpu", placement_of=coordinates)

    whole = build({"tensor": 1}, "1d")
    for mode, axes in WHERE:
        for (name, block), (_, full) in zip(
            build(axes, mode).named_parameters(), whole.named_parameters(), strict=True
        ):
            place: Placement = metadata(block).placement
            assert torch.equal(block, place.shard(full.detach()[tuple(slice(n) for n in place.shape)], at(axes))), name


# -- roles ----------------------------------------------------------------------------------------------------------


def roles(model: nn.Module, **settings: Any) -> dict[str, str]:
    report = parallelize(model, Mesh({"tensor": 2}, rank=0), "1d", **settings)
    return {placed.name: placed.role for placed in report.placed}


def test_roles_follow_names_then_shapes() -> None:
    found = roles(Classic())
    assert found["to_logits"] == "head"
    assert found["blocks.0.mlp.0"] == "column"
    assert found["blocks.0.mlp.3"] == "row"
    assert found["blocks.0.attn.out_proj"] == "row"
    assert found["pos_emb"] == "positions"
    assert roles(ViT())["patch_embed"] == "patch"
    assert (
        roles(
            nn.Sequential(
                nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), nn.LayerNorm(8)
            )
        )["0"]
        == "stem"
    )


def test_rules_decide_what_names_do_not() -> None:
    square = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert roles(square, rules={"0": "column", "2": "row"}) == {"0": "column", "2": "row"}
    model = WithRouter()
    report = parallelize(model, at({"row": 2, "col": 2}), "2d", rules={"blocks.1": "replicate"})
    assert "whole on every rank" in str(report)
    assert model.blocks[1].mix.shape == (HIDDEN, HIDDEN)
    assert metadata(model.blocks[1].mix).placement.axes == ((), ())


def test_gate_and_up_in_one_are_split_by_halves() -> None:
    model = Flat(gated=True)
    parallelize(model, at({"tensor": 4}), "1d")
    parts = metadata(model.blocks[0].mlp.up.weight).placement.parts
    assert [part.size for part in parts[0]] == [48, 48]


def test_modules_are_told_their_local_heads() -> None:
    model = Attention(HIDDEN, heads=8)
    parallelize(model, at({"tensor": 4}), "1d")
    assert (model.num_heads, model.head_dim) == (2, 2)
    llama = Flat(gated=True, kv_heads=1)
    parallelize(llama, at({"tensor": 4}), "1d")
    assert (llama.blocks[0].attn.n_heads, llama.blocks[0].attn.n_kv_heads) == (1, 1)


def test_an_uneven_vocabulary_is_padded() -> None:
    model = Classic()
    parallelize(model, at({"a": 2, "b": 2, "c": 2}), "3d")
    assert model.tok_emb.weight.shape == (40 // 4, HIDDEN // 2)
    assert metadata(model.tok_emb.weight).placement.shape == (VOCAB, HIDDEN)
    assert not model.tok_emb.weight[VOCAB - 40 :].any(), "padding is zero"
