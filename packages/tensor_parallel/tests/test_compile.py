"""torch.compile: every layer in one graph, in every mode, with the numbers of eager; blocks alike share one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from tensor_parallel_checks import Case, assert_gradients_equal, case, mesh_of, seeded, whole_gradients
from tensor_parallel_models import HIDDEN, VOCAB, Classic, Flat, GatedMLP, ViT, hugging_face
from torch import Tensor, nn

from meshfold.mesh import Mesh, dropout_stream
from meshfold.mesh.random.dropout import TokenShards, set_token_shards
from meshfold.mesh.testing import fake_world, run_on_ranks
from meshfold.tensor_parallel import parallelize
from meshfold.tensor_parallel.layers.dropout import Dropout
from meshfold.tensor_parallel.modes import find_mode

MODES: tuple[Case, ...] = (
    case("1d", tensor=4),
    case("1d+sequence", tensor=4),
    case("1d+tokens", tensor=4),
    case("2d", row=2, col=2),
    case("2.5d", depth=2, row=2, col=1),
    case("3d", a=1, b=2, c=2),
)
SPLIT_ROUND_BLOCKS = ("1d+sequence", "1d+tokens")
compiled = partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=False)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    """How many graphs were made since the test began; none of them broken off."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    return int(counters["stats"]["unique_graphs"])


def language_model_step(model: nn.Module, step: int = 0) -> Tensor:
    ids = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(1))
    with dropout_stream(seed=3, step=step):
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss


def vision_step(model: nn.Module, step: int = 0) -> Tensor:
    y: Tensor = model(torch.randn(4, 3, 4, 8)).square().sum()
    y.backward()
    return y


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], Tensor]]] = {
    "gpt with dropout": (partial(Flat, gated=False, dropout=0.1, layers=1), language_model_step),
    "llama": (partial(Flat, gated=True, kv_heads=1, layers=1), language_model_step),
    "vision transformer": (ViT, vision_step),
}


def trace(mode: str, axes: tuple[tuple[str, int], ...], name: str) -> None:
    """Forward and backward of a whole model: embedding, positions or patches, dropout, norms, column, row, head, loss."""
    make, step = MODELS[name]
    with fake_world(4, rank=3):
        model = make().train()
        parallelize(model, Mesh(dict(axes)), mode)
        model.forward = compiled(model.forward)  # type: ignore[method-assign]  without the frame, which is not computing
        for i in range(3):  # another step drops other elements, by the same graph
            step(model, i)
        assert all(p.grad is not None for p in model.parameters())
        assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("mode", "axes"), MODES, ids=[mode for mode, _ in MODES])
def test_every_model_is_traced_in_every_mode(mode: str, axes: tuple[tuple[str, int], ...], name: str) -> None:
    trace(mode, axes, name)


# -- blocks ---------------------------------------------------------------------------------------------------------


def compile_blocks(blocks: list[nn.Module]) -> None:
    for block in blocks:
        block.compile(fullgraph=True, backend="aot_eager", dynamic=False)


def step_of(model: nn.Module) -> None:
    ids = torch.zeros(4, 8, dtype=torch.int64)
    with dropout_stream(0, 0):
        output = model(ids) if isinstance(model, Classic) else model(input_ids=ids, labels=ids).loss
        output.sum().backward()


@pytest.mark.few(1)
@pytest.mark.parametrize(("mode", "axes"), MODES[1:3], ids=SPLIT_ROUND_BLOCKS)
def test_blocks_alike_share_one_graph(mode: str, axes: tuple[tuple[str, int], ...]) -> None:
    """Names of modules, of which dropout needs some, make no difference. Where the stream is split round the blocks
    the first and the last differ: what splits and joins the stream is a graph beside the block's."""
    share(mode, axes, dropout=0.0)


def share(mode: str, axes: tuple[tuple[str, int], ...], dropout: float) -> None:
    with fake_world(4):
        model = Classic(dropout=dropout)
        model.blocks.extend(copy.deepcopy(model.blocks))
        parallelize(model.train(), Mesh(dict(axes)), mode)
        compile_blocks(list(model.blocks))
        for _ in range(2):
            step_of(model)
        assert graphs() == (3 if mode in SPLIT_ROUND_BLOCKS else 1)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("mode", "axes"), MODES, ids=[mode for mode, _ in MODES])
def test_blocks_alike_share_one_graph_in_every_mode(
    mode: str, axes: tuple[tuple[str, int], ...], dropout: float
) -> None:
    """Dropout by module and by function included."""
    share(mode, axes, dropout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["opt", "gpt2", "llama", "qwen2"])
@pytest.mark.parametrize(("mode", "axes"), MODES, ids=[mode for mode, _ in MODES])
def test_hugging_face_blocks_share_one_graph(mode: str, axes: tuple[tuple[str, int], ...], kind: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    with fake_world(4):
        model = hugging_face(kind, layers=3).train()
        parallelize(model, Mesh(dict(axes)), mode)
        lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
        compile_blocks(list(lists[0]))
        ids = torch.zeros(4, 8, dtype=torch.int64)
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert graphs() == (3 if mode in SPLIT_ROUND_BLOCKS else 1)


def test_a_part_of_a_model_is_traced() -> None:
    with fake_world(4):
        model = GatedMLP()
        parallelize(model, Mesh(dict(next(axes for mode, axes in MODES if mode == "2d"))), "2d")
        model.forward = compiled(model.forward)  # type: ignore[method-assign]
        model(torch.randn(4, 8, HIDDEN))  # the first forward of a kind is looked at, and not compiled
        model(torch.randn(4, 8, HIDDEN, requires_grad=True)).sum().backward()
        assert graphs() == 1


# -- numbers --------------------------------------------------------------------------------------------------------


def compare_with_eager(cases: tuple[Case, ...]) -> None:
    """The partitioner decides what is kept for backward as under Inductor, which must not draw a dropout twice."""
    for mode, axes in cases:
        mesh, found = mesh_of(axes), []
        serial = seeded(partial(Flat, gated=False, dropout=0.2, layers=1)).train()
        for compiles in (False, True):
            model = copy.deepcopy(serial)
            parallelize(model, mesh, mode)
            if compiles:
                model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager_decomp_partition")
            losses = [language_model_step(model, step) for step in range(2)]
            found.append((torch.stack(losses).detach(), whole_gradients(model, mesh)))
        (losses, exact), (again, gradients) = found
        assert losses[0] != losses[1]
        assert_gradients_equal({"loss": again}, {"loss": losses}, mode)
        assert_gradients_equal(gradients, exact, mode)


@pytest.mark.slow  # `make test` compiles the blocks of such a model: packages/engine/tests/test_compile_blocks.py
def test_compiled_is_eager() -> None:
    """A whole model in one graph, dropout included."""
    run_on_ranks(2, compare_with_eager, (case("2d", row=2, col=1),))


@pytest.mark.slow
def test_compiled_is_eager_in_every_mode() -> None:
    run_on_ranks(4, compare_with_eager, MODES, timeout_s=300)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (2, 4)], ids=["m h", "b s h", "b h"])
def test_a_token_of_a_split_sequence_has_its_own_fate(shape: tuple[int, ...]) -> None:
    """What a rank drops of its tokens 0, 3 and 4 is what a whole sequence drops there, compiled or not."""
    places = torch.tensor([0, 3, 4])
    flat = shape[0] == 6
    with fake_world(2):
        part = Dropout(0.5, Mesh({"seq": 2, "tensor": 1}), find_mode("1d"), 4, "drop", flat_tokens=flat)
        whole = Dropout(0.5, Mesh({"seq": 1, "tensor": 1}, rank=0), find_mode("1d"), 4, "drop", flat_tokens=flat)
        with dropout_stream(0, 0, first_row=1, first_token=5):
            wanted = whole(torch.ones((10, 4) if flat else (2, 5, 4) if len(shape) == 3 else (2, 4)))
        if len(shape) == 3:
            wanted = wanted[:, places]
        elif flat:
            wanted = wanted.view(2, 5, 4)[:, places].view(6, 4)
        for run in (part, compiled(part)):
            with dropout_stream(0, 0, first_row=1, first_token=5):
                set_token_shards(TokenShards(length=5, index=places))
                assert torch.equal(run(torch.ones(shape)), wanted)
