"""Linear layers whose weight gradient waits: B and W apart are backward in one go."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, MeshfoldError
from meshfold.mesh.testing import ranks
from meshfold.pipeline.runtime.deferred_linear import defer_weight_gradients

ROWS, SEQUENCE, WIDTH = 4, 5, 8


class Block(nn.Module):
    """Norm, two linear layers (one used twice), a residual."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y + self.down(torch.sin(self.up(x)))


def block(bias: bool = True) -> Block:
    torch.manual_seed(1)
    return Block(bias).double()


def inputs(count: int) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(ROWS, SEQUENCE, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_autograd_calls_for_a_weight_only_where_it_does_not_call_for_the_input(dims: int) -> None:
    layer = nn.Linear(WIDTH, 3).double()
    queue = defer_weight_gradients(layer)
    for needs in (True, False):
        x = inputs(1)[0].detach().reshape(-1, WIDTH)[: 1 if dims == 1 else 4]
        x = (x[0] if dims == 1 else x.view(2, 2, WIDTH) if dims == 3 else x).clone().requires_grad_(needs)
        y = layer(x)
        assert y.grad_fn is not None
        assert (
            sum(node is not None for node, _ in y.grad_fn.next_functions) == 1
        )  # a node more is a task more of autograd
        y.relu_()  # not a view, so it may be changed in place
        with queue.collecting(needs):
            y.sum().backward()
        assert layer.weight.grad is None
        queue.compute(needs)
        rows, weight = x.detach().reshape(-1, WIDTH), layer.weight.detach().clone().requires_grad_()
        wanted = torch.autograd.grad(torch.relu(rows @ weight.t() + layer.bias.detach()).sum(), weight)[0]
        assert_close({"weight": gradients(layer)["weight"]}, {"weight": wanted}, 1e-12)
        layer.zero_grad()


def test_the_operation_is_exact() -> None:
    plain, split, (x,) = (
        nn.Linear(WIDTH, 3, dtype=torch.float64),
        nn.Linear(WIDTH, 3, dtype=torch.float64),
        inputs(1),
    )
    split.load_state_dict(plain.state_dict())
    queue, other = defer_weight_gradients(split), x.detach().clone().requires_grad_()
    dy = torch.randn(ROWS, SEQUENCE, 3, dtype=torch.float64)
    y = plain(x)
    y.backward(dy)
    with queue.collecting("a"):
        z = split(other)
        z.backward(dy)
    assert torch.equal(y, z)
    assert torch.equal(x.grad, other.grad)  # bit for bit
    assert split.weight.grad is None and split.bias.grad is None
    queue.compute("a")
    assert_close(gradients(split), gradients(plain), 1e-12)
    assert queue.waiting == ()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_microbatches_in_any_order(bias: bool, batched: bool) -> None:
    plain, split = block(bias), block(bias)
    queue = defer_weight_gradients(split, batched=batched)
    assert list(split.state_dict()) == list(plain.state_dict()) and isinstance(split.up, nn.Linear)
    for k, x in enumerate(inputs(3)):
        plain(x).square().sum().backward()
        other = x.detach().clone().requires_grad_()
        with queue.collecting(k):
            split(other).square().sum().backward()
        assert torch.equal(x.grad, other.grad)
    assert gradients(split).keys() == {"norm.weight", "norm.bias"}  # what is no linear layer is whole after B
    assert queue.held_bytes > 0
    queue.compute(1)
    queue.compute(0, 2)
    assert queue.held_bytes == 0
    assert_close(gradients(split), gradients(plain), 1e-12)


def test_batching_makes_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for batched in (False, True):
        split = block(False)
        queue = defer_weight_gradients(split.up, batched=batched)
        for k, x in enumerate(inputs(3)):
            with queue.collecting(k):
                split.up(x).sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            queue.compute(0, 1, 2)
        counts.append(sum(e.count for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm_")))
    assert counts == [3, 1]


def test_without_a_queue_that_collects_it_is_an_ordinary_layer() -> None:
    plain, split = block(), block()
    defer_weight_gradients(split)
    for x in inputs(2):
        plain(x).square().sum().backward()
        split(x).square().sum().backward()
    assert_close(gradients(split), gradients(plain), 1e-12)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.mul_(0.5), lambda y: y.add_(1.0).tanh_()])
def test_what_follows_may_change_the_output_in_place(dims: int, change: Callable[[Tensor], Tensor]) -> None:
    plain, split, x = block(), block(), inputs(1)[0].detach()
    x = x if dims == 3 else x[0]
    queue = defer_weight_gradients(split)
    wanted, found = (change(of.up(x)).square().sum() for of in (plain, split))
    wanted.backward()
    with queue.collecting(0):
        found.backward()
    queue.compute(0)
    assert torch.equal(wanted, found)
    assert_close(gradients(split), gradients(plain), 1e-12)


def test_frozen_parameters_and_inputs_without_gradient() -> None:
    plain, split, x = block(), block(), inputs(1)[0].detach()
    for module in (plain, split):
        module.up.weight.requires_grad_(False)
        module.norm.requires_grad_(False)
    queue = defer_weight_gradients(split)
    plain(x).sum().backward()
    with queue.collecting(0):
        split(x).sum().backward()
    queue.compute(0)
    assert_close(gradients(split), gradients(plain), 1e-12)


def test_weights_that_functional_call_puts_in_their_place_get_their_own_gradients() -> None:
    def scaled(module: Block, factor: Tensor) -> Tensor:
        weights = {name: p * factor for name, p in module.named_parameters()}
        return torch.func.functional_call(module, weights, (inputs(1)[0],)).square().sum()

    plain, split = block(), block()
    factors = [torch.tensor(1.5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    queue = defer_weight_gradients(split)
    scaled(plain, factors[0]).backward()
    with queue.collecting(0):
        scaled(split, factors[1]).backward()
    queue.compute(0)
    assert_close(gradients(split), gradients(plain), 1e-12)
    torch.testing.assert_close(factors[1].grad, factors[0].grad)


def test_transforms_of_torch_func_make_their_own_graphs() -> None:
    plain, split, x = block(), block(), inputs(1)[0]
    queue = defer_weight_gradients(split)
    torch.vmap(plain)(x).square().sum().backward()
    with queue.collecting(0):
        torch.vmap(split)(x).square().sum().backward()
    queue.compute(0)
    assert_close(gradients(split), gradients(plain), 1e-12)


def test_hooks_of_parameters_run_and_copies_are_ordinary() -> None:
    split, seen = block(), []
    queue = defer_weight_gradients(split)
    split.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    with queue.collecting(0):
        split(inputs(1)[0]).sum().backward()
    assert not seen
    queue.compute(0)
    assert seen == [split.up.weight.shape] * 2  # the layer is called twice
    twin = copy.deepcopy(split)
    split.zero_grad()
    twin.zero_grad()
    twin(inputs(1)[0]).sum().backward()
    assert split.up.weight.grad is None and twin.up.weight.grad is not None


def test_activations_of_the_rest_are_freed_by_backward() -> None:
    split, freed = block(), []
    queue = defer_weight_gradients(split.down)

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            kept = x * 2
            import weakref

            weakref.finalize(kept, freed.append, True)
            ctx.save_for_backward(kept)
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return g * (ctx.saved_tensors[0] * 0 + 1)

    x = inputs(1)[0]
    with queue.collecting(0):
        split.down(torch.cat([Watch.apply(x)] * 3, -1)).sum().backward()
    assert freed == [True] and queue.waiting == (0,)


def test_mistakes_are_told() -> None:
    queue = defer_weight_gradients(block())
    with pytest.raises(MeshfoldError, match="no backward has collected weight gradients of 3"):
        queue.compute(3)
    with queue.collecting(0), pytest.raises(MeshfoldError, match="collected already"), queue.collecting(1):
        pass


def test_conv1d_of_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install transformers")
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    plain = Conv1D(3 * WIDTH, WIDTH).double()
    split, (x,) = copy.deepcopy(plain), inputs(1)
    queue, other = defer_weight_gradients(split), x.detach().clone().requires_grad_()
    y = plain(x)
    y.square().sum().backward()
    with queue.collecting(0):
        z = split(other)
        z.square().sum().backward()
    queue.compute(0)
    assert isinstance(split, Conv1D) and torch.equal(y, z) and torch.equal(x.grad, other.grad)
    assert_close(gradients(split), gradients(plain), 1e-12)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_blocks_stay_compilable(backend: str) -> None:
    plain, split = block(), block()
    queue = defer_weight_gradients(split)
    compiled = torch.compile(split, fullgraph=True, backend=backend)
    for k, x in enumerate(inputs(2)):
        plain(x).square().sum().backward()
        other = x.detach().clone().requires_grad_()
        with queue.collecting(k):
            compiled(other).square().sum().backward()
        assert (x.grad - other.grad).abs().max() <= 1e-12 * x.grad.abs().max()
    assert gradients(split).keys() == {"norm.weight", "norm.bias"}
    queue.compute(0, 1)
    assert_close(gradients(split), gradients(plain), 1e-12)


CASES: tuple[tuple[str, dict[str, int]], ...] = (
    ("1d", {"tensor": 4}),
    ("2d", {"row": 2, "col": 2}),
    ("1d+sequence", {"tensor": 4}),
)


@ranks(4)
def test_tensor_parallel_layers() -> None:
    from meshfold.models import LlamaConfig, build
    from meshfold.tensor_parallel import parallelize
    from meshfold.tensor_parallel.layers import Linear

    config = LlamaConfig(vocab_size=64, hidden=32, layers=1, heads=4, kv_heads=2, ffn=48, max_positions=16)
    ids = torch.randint(0, 64, (4, 8))
    for mode, axes in CASES:
        torch.manual_seed(3)
        plain = build(config).double()
        split, mesh = copy.deepcopy(plain), Mesh(axes)
        parallelize(plain, mesh, mode)
        parallelize(split, mesh, mode)
        queue = defer_weight_gradients(split)
        linears = [name for name, m in split.named_modules() if isinstance(m, Linear)]
        for k in range(2):
            plain(ids, ids).loss.backward()
            with queue.collecting(k):
                split(ids, ids).loss.backward()
        assert linears and all(split.get_submodule(name).weight.grad is None for name in linears)
        queue.compute(0, 1)
        assert_close(gradients(split), gradients(plain), 1e-12)
