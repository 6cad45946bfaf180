"""A model built on the meta device gets, block by block, the weights its own code would give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from meshfold.mesh import Mesh, MeshfoldError, Part, Placement
from meshfold.mesh.initialization import (
    InitTrace,
    build_on_meta,
    materialize,
    record_initialization,
    replay,
    retrace_initialization,
)
from meshfold.mesh.random import fill_normal_, fill_uniform_, key_of
from meshfold.mesh.testing import tensor_memory

HF = pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "llama3-rope", "qwen2"])


def old_truncated_normal_(tensor: Tensor, std: float) -> None:
    """As torch before 2.12 and timm do it: by the inverse error function, in place."""
    with torch.no_grad():
        edge = math.erf(2 / math.sqrt(2))
        tensor.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2.0)).add_(0.0).clamp_(min=-2 * std, max=2 * std)


class Zoo(nn.Module):
    """One parameter for each way of initialising that is met in the field."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(60, 16, padding_idx=3)
        self.linear = nn.Linear(16, 60)
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4)
        self.convolution = nn.Conv2d(3, 8, 3)
        self.head = nn.Linear(16, 60, bias=False)
        self.head.weight = self.embedding.weight
        self.token = nn.Parameter(torch.randn(1, 70, 16) * 0.02 + 1)
        self.scale = nn.Parameter(1e-3 * torch.ones(16))
        self.truncated = nn.Parameter(torch.empty(64, 16))
        nn.init.trunc_normal_(self.truncated, std=0.02, a=-0.04, b=0.04)
        self.old_truncated = nn.Parameter(torch.empty(64, 16))
        old_truncated_normal_(self.old_truncated, 0.02)
        self.transposed = nn.Parameter(torch.randn(40, 16).t())
        self.thirds = nn.Parameter(torch.empty(48, 16))
        for third, std in zip(self.thirds.data.split(16), (0.1, 1.0, 10.0), strict=True):
            nn.init.normal_(third, std=std)
        self.flat = nn.Parameter(torch.empty(30, 16))
        self.flat.data.view(-1).uniform_(2, 3)
        self.every_other = nn.Parameter(torch.zeros(30, 16))
        nn.init.uniform_(self.every_other[1::3, 2:9].t(), 5, 6)
        self.scaled = nn.Parameter(torch.rand(30, 16) * torch.arange(16) / torch.arange(1, 31)[:, None])
        self.from_table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.copied = nn.Parameter(torch.empty(30, 16))
        self.copied.data.copy_(self.flat)
        self.halved = nn.Parameter(torch.randn(70, 16).to(torch.bfloat16))
        self.doubled = nn.Parameter(torch.randn(70, 16, dtype=torch.float64))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(12, 12)))
        self.identity = nn.Parameter(nn.init.eye_(torch.empty(5, 7)))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(4, 4, 3)))
        self.gated = nn.Parameter(torch.ones(6, 2))
        with torch.no_grad():
            self.gated[torch.arange(6) > 3] = 7.0
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.noise = nn.Parameter(torch.randn(()))
        self.register_buffer("frequencies", 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16)))
        self.register_buffer("mask", torch.tril(torch.ones(9, 9, dtype=torch.bool)).view(1, 1, 9, 9), persistent=False)
        self.register_buffer("positions", torch.arange(9).expand((1, -1)))
        self.batch_norm = nn.BatchNorm1d(4)
        self.table = torch.outer(torch.arange(4), torch.ones(3))  # an ordinary attribute
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.sizes = torch.arange(3).tolist()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def whole(shape: Sequence[int]) -> list[Tensor]:
    return [torch.arange(size) for size in shape]


def constant(value: Tensor) -> bool:
    return bool((value == value.flatten()[0]).all())


@pytest.fixture(scope="module")
def zoo() -> tuple[nn.Module, InitTrace, nn.Module]:
    torch.manual_seed(0)
    return (*build_on_meta(Zoo), Zoo())


RANDOM = [
    "embedding.weight",
    "linear.weight",
    "linear.bias",
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "convolution.weight",
    "convolution.bias",
    "token",
    "truncated",
    "old_truncated",
    "transposed",
    "thirds",
    "flat",
    "every_other",
    "scaled",
    "copied",
    "halved",
    "doubled",
    "orthogonal",
    "noise",
]


def test_nothing_is_allocated_while_a_model_is_built(zoo: tuple[nn.Module, InitTrace, nn.Module]) -> None:
    model, _, plain = zoo
    real = {name for name, value in values_of(model).items() if not value.is_meta}
    assert real == {"from_table", "scalar", "batch_norm.num_batches_tracked"}  # torch.tensor of given numbers
    assert model.rates == plain.rates and model.sizes == plain.sizes
    assert model.head.weight is model.embedding.weight


def test_what_is_not_random_is_equal_bit_for_bit(zoo: tuple[nn.Module, InitTrace, nn.Module]) -> None:
    model, trace, plain = zoo
    model = materialize(build_on_meta(Zoo)[0], trace, seed=0, device="cpu")
    ours, theirs = values_of(model), values_of(plain)
    assert list(ours) == list(theirs)
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
        assert type(ours[name]) is type(theirs[name]) and ours[name].requires_grad == theirs[name].requires_grad
        if name not in RANDOM:
            assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(model.table, plain.table)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.copied, model.flat)
    assert not model.embedding.weight[3].any()
    torch.testing.assert_close(model.orthogonal @ model.orthogonal.T, torch.eye(12))


def test_what_is_random_is_equal_in_distribution(zoo: tuple[nn.Module, InitTrace, nn.Module]) -> None:
    _, _, plain = zoo
    model, trace = build_on_meta(Zoo)
    ours, theirs = values_of(materialize(model, trace, seed=0, device="cpu")), values_of(plain)
    for name in RANDOM:
        a, b = ours[name].detach().double().flatten(), theirs[name].detach().double().flatten()
        if a.numel() > 1:
            spread = float(b.std())
            assert abs(a.std() / spread - 1) < 5 / math.sqrt(a.numel()), name
            assert abs(a.mean() - b.mean()) < 6 * spread / math.sqrt(a.numel()), name
    for third, std in zip(ours["thirds"].split(16), (0.1, 1.0, 10.0), strict=True):
        assert abs(third.std() / std - 1) < 0.2
    for name in ("truncated", "old_truncated"):
        assert 0.03 < ours[name].abs().max() <= 0.04


def test_a_parameter_holds_the_numbers_of_its_name() -> None:
    model, trace = build_on_meta(lambda: nn.ModuleDict({"a": nn.Embedding(5, 4), "b": nn.Linear(4, 5)}))
    materialize(model, trace, seed=7, device="cpu")
    expected = fill_normal_(torch.empty(5, 4), whole((5, 4)), (5, 4), seed=7, key=key_of("a.weight"))
    assert torch.equal(model["a"].weight, expected)
    expected = fill_uniform_(
        torch.empty(5, 4), whole((5, 4)), (5, 4), seed=7, key=key_of("b.weight"), low=-0.5, high=0.5
    )
    torch.testing.assert_close(model["b"].weight.detach(), expected)


def test_weights_do_not_depend_on_the_order_of_construction_and_differ_by_name_and_seed() -> None:
    def build(names: str) -> nn.Module:
        return nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    models = {}
    for order, seed in (("ab", 0), ("ba", 0), ("ab", 1)):
        model, trace = build_on_meta(lambda order=order: build(order))
        models[order, seed] = materialize(model, trace, seed=seed, device="cpu")
    a = models["ab", 0]["a"].weight
    assert torch.equal(a, models["ba", 0]["a"].weight)
    assert not torch.equal(a, models["ab", 0]["b"].weight)
    assert not torch.equal(a, models["ab", 1]["a"].weight)


@pytest.mark.parametrize("name", [name for name, value in values_of(build_on_meta(Zoo)[0]).items() if value.is_meta])
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_any_split_replays_to_the_values_of_the_whole(
    zoo: tuple[nn.Module, InitTrace, nn.Module], name: str, data: st.DataObject
) -> None:
    model, trace, _ = zoo
    value = values_of(model)[name]
    full = trace.materialize(name, torch.empty(value.shape, dtype=value.dtype), seed=3)
    # Any positions, repeated ones and padding (beyond the size) among them.
    points = [
        torch.tensor(data.draw(st.lists(st.integers(0, size + 1), max_size=20)), dtype=torch.int64)
        for size in value.shape
    ]
    local = torch.empty([len(p) for p in points], dtype=value.dtype)
    trace.materialize(value, local, points, seed=3)
    for dim, p in enumerate(points):
        full = torch.cat([full, full.new_zeros(*full.shape[:dim], 2, *full.shape[dim + 1 :])], dim).index_select(dim, p)
    assert torch.equal(local, full)


@pytest.mark.parametrize("axes", [{"row": 2, "col": 2}, {"row": 3, "col": 2}])
def test_blocks_of_every_rank_make_up_the_serial_model(axes: dict[str, int]) -> None:
    serial, trace = build_on_meta(Zoo)
    materialize(serial, trace, seed=1, device="cpu")
    placement = Placement(shape=(48, 16), axes=(("row",), ("col",)), parts={0: (Part(24), Part(12), Part(12))})
    uneven = Placement(shape=(60, 16), axes=(("col", "row"), ()))
    for name, where in (("thirds", placement), ("embedding.weight", uneven)):
        for rank in range(math.prod(axes.values())):
            mesh = Mesh(axes, rank=rank)

            def coordinates(which: str, tensor: Tensor) -> list[Tensor] | None:
                return [where.coordinates(mesh, dim) for dim in range(2)] if which == name else None  # noqa: B023

            model, trace = build_on_meta(Zoo)
            materialize(model, trace, seed=1, device="cpu", placement_of=coordinates)
            full = serial.get_parameter(name).detach()
            assert torch.equal(model.get_parameter(name), where.shard(full, mesh))


def config_of(family: str) -> object:
    transformers = pytest.importorskip("transformers", reason="checks Hugging Face models")
    sizes = {"vocab_size": 96, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    llama = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, **sizes)
    if family == "opt":
        return transformers.OPTConfig(
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=64,
            **sizes,
        )
    if family == "llama":
        return transformers.LlamaConfig(**llama, **sizes)
    if family == "llama3-rope":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        return transformers.LlamaConfig(**llama, **sizes, rope_parameters=rope)
    return transformers.Qwen2Config(**llama, **sizes, tie_word_embeddings=True)


def builder_of(family: str, **options: object) -> Callable[[], nn.Module]:
    config = config_of(family)
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_config(config, **options)


def check_like_plain(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, a in ours.items():
        b = theirs[name].detach()
        a = a.detach()
        assert not a.is_meta and a.isfinite().all() and a.dtype == b.dtype and a.shape == b.shape, name
        if constant(b) or "inv_freq" in name:
            assert torch.equal(a, b), name
        else:
            a, b = a.double(), b.double()
            assert torch.equal((a == 0).all(-1), (b == 0).all(-1)), name  # the padding row
            assert abs(a.std() / b.std() - 1) < 6 / math.sqrt(a.numel()), name
            assert abs(a.mean() - b.mean()) < 7 * b.std() / math.sqrt(a.numel()), name


@HF
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_models(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    build = builder_of(family, dtype=dtype)
    plain = build()
    model, trace = build_on_meta(build)
    assert all(value.is_meta for value in values_of(model).values())
    materialize(model, trace, seed=0, device="cpu")
    check_like_plain(values_of(model), values_of(plain))
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == (plain.get_input_embeddings().weight is plain.get_output_embeddings().weight)
    ids = torch.arange(20).reshape(2, 10)
    loss = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - plain(input_ids=ids, labels=ids).loss.item()) < 0.2
    loss.backward()


@HF
def test_hugging_face_models_that_are_on_the_meta_device_already(family: str) -> None:
    torch.manual_seed(0)
    build = builder_of(family)
    plain = build()
    with torch.device("meta"):
        model = build()
    again, trace = build_on_meta(build)
    materialize(again, trace, seed=4, device="cpu")
    materialize(model, retrace_initialization(model), seed=4, device="cpu")
    check_like_plain(values_of(model), values_of(plain))
    for name, value in values_of(again).items():
        assert torch.equal(value, values_of(model)[name]), name


def test_the_direct_class_and_a_wrapper_that_initialises_after_hugging_face() -> None:
    config = config_of("llama")
    from transformers import LlamaForCausalLM

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = LlamaForCausalLM(config)
            nn.init.constant_(self.model.lm_head.weight, 0.25)

    model, trace = build_on_meta(Wrapper)
    materialize(model, trace, seed=0, device="cpu")
    assert (model.model.lm_head.weight == 0.25).all()
    assert abs(model.model.model.embed_tokens.weight.std() / 0.02 - 1) < 0.05


def test_retracing_plain_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 9), nn.LayerNorm(4), nn.BatchNorm1d(4))
        model[1].weight = model[0].weight
    materialize(model, retrace_initialization(model), seed=0, device="cpu")
    assert model[1].weight is model[0].weight
    assert not model[0].weight[0].any() and model[0].weight.abs().max() > 1  # normal, not the uniform of a Linear
    assert (model[2].weight == 1).all() and (model[3].running_var == 1).all()


def test_a_large_model_costs_no_memory_and_one_block_of_it_little() -> None:
    with tensor_memory() as building:
        _, trace = build_on_meta(lambda: nn.Sequential(*[nn.Linear(16384, 65536) for _ in range(16)]))  # 69 GB
    assert building.peak < 2**10
    rows, columns = torch.arange(1000, 1064), torch.arange(16384)
    with tensor_memory() as filling:
        block = trace.materialize("7.weight", torch.empty(64, 16384), [rows, columns], seed=0)
    assert abs(block.std() * math.sqrt(3 * 16384) - 1) < 0.01
    assert filling.peak < 12 * block.nbytes, filling  # random numbers are made in float64


def test_dtype_rounds_and_leaves_integers_alone() -> None:
    model, trace = build_on_meta(Zoo)
    wide = values_of(materialize(model, trace, seed=0, device="cpu"))
    model, trace = build_on_meta(Zoo)
    narrow = values_of(materialize(model, trace, seed=0, device="cpu", dtype=torch.bfloat16))
    for name, value in narrow.items():
        floating = wide[name].is_floating_point()
        assert torch.equal(value, wide[name].to(torch.bfloat16) if floating else wide[name]), name


def view_of(tensor: Tensor, choose: Random) -> Tensor:
    """A row, some columns, every n-th index, the transpose, or (seldom, as no block can be cut from it) a flat view."""
    kind = choose.choice(["row", "columns", "steps", "steps", "turned", "turned", "flat"])
    if kind == "row" and tensor.dim() > 1:
        return tensor[choose.randrange(tensor.shape[0])]
    if kind == "columns":
        return tensor[..., choose.randrange(tensor.shape[-1]) :]
    if kind == "steps":
        return tensor[choose.randrange(tensor.shape[0]) :: choose.randint(1, 3)]
    if kind == "turned":
        return tensor.transpose(0, -1)
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def write_into(tensor: Tensor, choose: Random) -> None:
    kind = choose.randrange(20)
    if kind < 6:
        tensor.fill_(choose.random())
    elif kind < 9:
        tensor.mul_(choose.random())
    elif kind < 13:
        tensor.sub_(torch.arange(tensor.shape[-1]) * 0.25 + choose.random())
    elif kind < 15:
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape).cos())
    elif kind < 17:
        tensor.copy_(tensor.clone().flip(0))
    elif kind < 19:
        tensor.mul_(tensor)
    else:
        tensor.cumsum_(0)  # replayed on the whole


def test_any_sequence_of_writes_into_views_is_replayed_exactly() -> None:
    def build(seed: int) -> nn.Module:
        choose = Random(seed)
        weight = torch.ones(4, 5, 6, dtype=torch.float64) * torch.arange(6) + torch.arange(5)[:, None]
        for _ in range(choose.randint(1, 5)):
            part = weight
            for _ in range(choose.randint(0, 3)):
                part = view_of(part, choose)
            write_into(part, choose)
        return nn.ParameterDict({"weight": weight})

    for seed in range(400):
        expected = build(seed)["weight"]
        _, trace = build_on_meta(lambda seed=seed: build(seed))
        choose = Random(seed)
        points = [torch.tensor(choose.choices(range(size), k=size)) for size in expected.shape]
        block = trace.materialize("weight", torch.empty(4, 5, 6, dtype=torch.float64), points, seed=0)
        for dim, p in enumerate(points):
            expected = expected.index_select(dim, p)
        assert torch.equal(block, expected), f"program {seed}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_same_weights_on_a_gpu() -> None:
    models = {}
    for device in ("cpu", "cuda"):
        model, trace = build_on_meta(Zoo)
        models[device] = values_of(materialize(model, trace, seed=0, device=device))
    for name, value in models["cuda"].items():
        assert value.is_cuda
        if name in ("truncated", "old_truncated"):
            torch.testing.assert_close(value.cpu(), models["cpu"][name])
        else:
            assert torch.equal(value.cpu(), models["cpu"][name]), name


def test_what_is_attached_to_a_parameter_stays() -> None:
    model, trace = build_on_meta(lambda: nn.Linear(2, 2))
    model.weight.note = "kept"
    model.bias.requires_grad_(False)
    materialize(model, trace, seed=0, device="cpu")
    assert model.weight.note == "kept" and model.weight.requires_grad and not model.bias.requires_grad


def test_a_model_cast_after_it_was_recorded_is_found_by_name() -> None:
    model, trace = build_on_meta(lambda: nn.Linear(4, 4))
    reference, other = build_on_meta(lambda: nn.Linear(4, 4))
    materialize(reference, other, seed=0, device="cpu", dtype=torch.bfloat16)
    materialize(model.to(torch.bfloat16), trace, seed=0, device="cpu")
    assert torch.equal(model.weight, reference.weight)


def test_casts_and_reads_inside_the_builder() -> None:
    def build() -> nn.Module:
        model = nn.Linear(4, 4).to(torch.bfloat16)
        rate = torch.linspace(0, 1, 5)[2]
        if rate > 0.25 and torch.ones(3).any() and len(torch.arange(4).nonzero()) == 3:
            nn.init.constant_(model.bias, float(rate))
        model.register_buffer("array", torch.from_numpy(torch.arange(3).numpy()))
        return model

    model, trace = build_on_meta(build)
    materialize(model, trace, seed=0, device="cpu")
    assert model.weight.dtype == torch.bfloat16 and (model.bias == 0.5).all()
    assert model.array.tolist() == [0, 1, 2]


def test_recording_leaves_no_trace() -> None:
    before = torch.nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), record_initialization():
        1 / 0  # noqa: B018
    assert torch.nn.init._no_grad_trunc_normal_ is before
    assert torch.empty(1).device.type == "cpu"


def uninitialised() -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(4, 4))
    nn.init.ones_(module.weight[:2])
    return module


def sparse() -> nn.Module:
    return nn.ParameterDict({"weight": nn.init.sparse_(torch.empty(4, 4), 0.5)})


def geometric() -> nn.Module:
    return nn.ParameterDict({"weight": torch.empty(4, 4).geometric_(0.5)})


def random_branch() -> nn.Module:
    return nn.Linear(4, 4, bias=bool(torch.rand(1) > 0.5))


def under_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.ParameterDict({"weight": torch.tensor([1.0, 2.0])})


def many_at_once() -> nn.Module:
    model = nn.Linear(4, 4)
    torch._foreach_zero_([p.data for p in model.parameters()])
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (uninitialised, "'weight' is never initialised"),
        (sparse, "'weight' is initialised by randperm.*build the model"),
        (geometric, "'weight' is initialised by geometric_.*build the model"),
        (random_branch, "value that the builder reads.*rand"),
        (under_meta, "'weight' was not made while this trace recorded"),
        (many_at_once, "list of tensors"),
    ],
)
def test_what_cannot_be_replayed_is_named(build: Callable[[], nn.Module], words: str) -> None:
    def build_and_fill() -> None:
        model, trace = build_on_meta(build)
        materialize(model, trace, seed=0, device="cpu")

    with pytest.raises(MeshfoldError, match=words):
        build_and_fill()


def test_a_block_of_a_large_tensor_is_not_computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_WHOLE_LIMIT", 100)
    monkeypatch.setattr(replay, "_SMALL", 10)
    _, trace = build_on_meta(Zoo)
    with pytest.raises(MeshfoldError, match=r"'orthogonal', with 144 elements, is initialised by .*on a block"):
        trace.materialize("orthogonal", torch.empty(6, 12), [torch.arange(6), torch.arange(12)], seed=0)
    trace.materialize("orthogonal", torch.empty(12, 12), seed=0)
    with pytest.raises(MeshfoldError, match="one coordinate a position"):
        trace.materialize("linear.weight", torch.empty(6, 12), seed=0)
    with pytest.raises(MeshfoldError, match="'lineer' was not made"):
        trace.materialize("lineer", torch.empty(6, 12), seed=0)
    with pytest.raises(MeshfoldError, match="not made while"):
        trace.materialize(torch.empty(3, device="meta"), torch.empty(3), seed=0)


@pytest.mark.parametrize(("dtype", "std"), [(torch.float32, -1.0), (torch.int64, 1.0)])
def test_normal_refuses_while_recording_what_it_refuses_without(dtype: torch.dtype, std: float) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, dtype=dtype).normal_(0.0, std)
    with pytest.raises((RuntimeError, NotImplementedError)), record_initialization():
        torch.empty(3, dtype=dtype).normal_(0.0, std)
