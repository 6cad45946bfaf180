"""What calls each autograd function of the packages, by the function's name: the one list that a new one joins."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from integration_tests.house import PACKAGES
from meshfold import kernels as K
from meshfold.engine.model.fp8_linear import Fp8Products
from meshfold.experts import grouped_matmul
from meshfold.kernels import Nf4Linear
from meshfold.mesh import Mesh, Placement
from meshfold.mesh.collectives import primitives
from meshfold.mesh.parameters.deferred_wgrad import MatmulOperands, WeightGradSite, accumulate_grad
from meshfold.pipeline.runtime.deferred_linear import defer_weight_gradients
from meshfold.sequence import attention
from meshfold.tensor_parallel.fp8_matmul import bind_fp8_lowering
from meshfold.tensor_parallel.layers.loss import bind_cross_entropy
from meshfold.tensor_parallel.layers.norm import bind_layer_norm, bind_rms_norm
from meshfold.tensor_parallel.lowerings import LOWERINGS
from meshfold.tensor_parallel.matmul import bind_deferred_matmul, bind_matmul, bind_product, weight_gradient
from meshfold.tensor_parallel.modes import MODES, find_mode
from meshfold.tensor_parallel.plan import MatmulPlan
from meshfold.zero_gemini.runtime.gradient_arrival import watch_inputs

Called = tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[Tensor, ...]]
"""A function and the leaves that it is called on; all of them want a gradient."""


def found() -> set[str]:
    """Every class of the packages that derives from ``torch.autograd.Function``, by module and place in it.

    Found in the sources, because many are made inside of functions.
    """
    return {
        name
        for package in PACKAGES
        for path in package.modules
        for name in _functions(ast.parse(path.read_text()), _module(path.relative_to(package.folder / "src/meshfold")))
    }


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _functions(node: ast.AST, above: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        here = above
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            here = f"{above}.{child.name}"
        if isinstance(child, ast.ClassDef) and any(_is_function(base) for base in child.bases):
            yield here
        yield from _functions(child, here)


def _is_function(base: ast.expr) -> bool:
    return ast.unparse(base).rpartition(".")[2] == "Function"


@dataclass(frozen=True)
class Case:
    """A way to call an autograd function.

    Attributes:
        function: its name, as :func:`found` has it.
        way: what is particular to this call.
        ranks: how many it takes.
        make: from a dtype, on each of the ranks, what to call.
        breaks: why it is no single graph; empty: it is one.
    """

    function: str
    way: str
    ranks: int
    make: Callable[[torch.dtype], Called] = field(repr=False)
    breaks: str = ""

    @property
    def name(self) -> str:
        """Of the test."""
        return f"{self.function}, {self.way}" if self.way else self.function

    @property
    def node(self) -> str:
        """What autograd calls the function's node in a graph."""
        return self.function.rpartition(".")[2] + "Backward"


def leaf(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every rank."""
    draw = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw.to(dtype).requires_grad_()


ROWS, WIDTH, WORDS = 4, 8, 16
LABELS = torch.tensor([0, 3, -100, 15])
# Four tokens of two experts each, one of them with none: the rows of tokens, and the pair of token and choice of each row.
PLACES, PAIRS = torch.tensor([[0, 1], [2, -1], [3, 4], [-1, -1]]), torch.tensor([0, 1, 2, 4, 5])
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
MESH = "tensor"
MATMUL = "tensor_parallel.matmul"


@cache
def mesh(ranks: int, axis: str = MESH) -> Mesh:
    """One a process: process groups are dear."""
    return Mesh({axis: ranks}, rank=None if ranks > 1 else 0)


# -- kernels --------------------------------------------------------------------------------------------------------


def of_shapes(
    op: Callable[..., Tensor | tuple[Tensor, ...]], *shapes: tuple[int, ...]
) -> Callable[[torch.dtype], Called]:
    """A function of leaves of these shapes, all of one dtype."""
    return lambda dtype: (op, tuple(leaf(dtype, *shape, seed=i) for i, shape in enumerate(shapes)))


def rotary(dtype: torch.dtype) -> Called:
    cos, sin = leaf(dtype, 3, 8, seed=5).detach(), leaf(dtype, 3, 8, seed=6).detach()
    return lambda q, k: K.apply_rotary(q, k, cos, sin), (
        leaf(dtype, 2, 3, 4, 8),
        leaf(dtype, 2, 3, 2, 8, seed=1),
    )


def nf4(dtype: torch.dtype) -> Called:
    linear = nn.Linear(64, WIDTH, bias=False)
    with torch.no_grad():
        linear.weight.copy_(leaf(torch.float32, WIDTH, 64))
    return Nf4Linear.of(linear), (leaf(dtype, ROWS, 64),)


X, V = (2, ROWS, WIDTH), (WIDTH,)
KERNELS = (
    Case("kernels.norms._Norm", "rms", 1, of_shapes(lambda x, w: K.rms_norm(x, w), X, V)),
    Case("kernels.norms._Norm", "rms of rows, no weight", 1, of_shapes(lambda x: K.rms_norm(x, None), (ROWS, WIDTH))),
    Case("kernels.norms._Norm", "layer", 1, of_shapes(lambda x, w, b: K.layer_norm(x, w, b), X, V, V)),
    Case("kernels.norms._AddNorm", "rms", 1, of_shapes(lambda x, r, w: K.add_rms_norm(x, r, w), X, X, V)),
    Case("kernels.norms._AddNorm", "layer", 1, of_shapes(lambda x, r, w, b: K.add_layer_norm(x, r, w, b), X, X, V, V)),
    Case("kernels.rotary._Rotary", "", 1, rotary),
    Case("kernels.nf4._Multiply", "", 1, nf4),
    Case(
        "kernels.cross_entropy._CrossEntropy",
        "",
        1,
        of_shapes(lambda x: K.cross_entropy(x, LABELS, -100, 0.1, 1e-2), (ROWS, WORDS)),
    ),
    Case(
        "kernels.linear_cross_entropy._LinearCrossEntropy",
        "",
        1,
        of_shapes(
            lambda x, w, b: K.linear_cross_entropy(x, w, LABELS, b, z_loss=1e-2, softcap=3.0),
            (ROWS, WIDTH),
            (WORDS, WIDTH),
            (WORDS,),
        ),
    ),
    Case(
        "kernels.linear_cross_entropy._LinearCrossEntropy",
        "rows",
        1,
        of_shapes(lambda x, w: K.linear_cross_entropy(x, w, LABELS, reduction="none"), (ROWS, WIDTH), (WORDS, WIDTH)),
    ),
    Case(
        "kernels.pair_attention._PairAttention",
        "",
        1,
        of_shapes(
            lambda q, k, v, bias: K.pair_attention(q, k, v, bias),
            (1, 2, ROWS, 2, WIDTH),
            (1, 2, 3, 2, WIDTH),
            (1, 2, 3, 2, WIDTH),
            (1, 2, ROWS, 3),
        ),
    ),
    Case("kernels.activations._Fused", "", 1, of_shapes(lambda x: K.swiglu(x), X)),
    Case(
        "kernels.activations._Weighted",
        "",
        1,
        of_shapes(lambda x, w: K.weighted_swiglu(x, w), (ROWS, WIDTH), (ROWS,)),
    ),
    Case("kernels.activations._Separate", "", 1, of_shapes(lambda gate, up: K.swiglu2(gate, up), X, X)),
    Case("kernels.dropout._Dropout", "", 1, of_shapes(lambda x: K.dropout(x, 0.5, 3, 4), X)),
    Case(
        "kernels.expert_choice._Choice",
        "",
        1,
        of_shapes(lambda x: K.softmax_choice(x, 2, normalize=True)[1], (4, WIDTH)),
    ),
    Case(
        "kernels.expert_choice._Totals",
        "",
        1,
        of_shapes(lambda x: K.routing_totals(x, x.softmax(1), PAIRS[:4].view(-1, 1) % 2)[1], (4, WIDTH)),
    ),
    Case("kernels.token_rows._Take", "", 1, of_shapes(lambda x: K.take_rows(x, PAIRS, PLACES), (4, WIDTH))),
    Case(
        "kernels.token_rows._TakeWeighted",
        "",
        1,
        of_shapes(lambda x, w: K.take_weighted_rows(x, w, PAIRS, PLACES), (4, WIDTH), (4, 2)),
    ),
    Case("kernels.token_rows._Sum", "", 1, of_shapes(lambda x: K.sum_rows(x, PAIRS, PLACES), (5, WIDTH))),
    Case(
        "kernels.token_rows._Sum",
        "weighted",
        1,
        of_shapes(lambda x, w: K.sum_rows(x, PAIRS, PLACES, w), (5, WIDTH), (4, 2)),
    ),
)

EXPERTS = (
    Case(
        "experts.grouped._Grouped",
        "",
        1,
        of_shapes(lambda x, w: grouped_matmul(x, w, ENDS, (2, 0, 3)), (5, WIDTH), (3, WIDTH, WORDS)),
        breaks="where a weight begins in its storage decides whether torch's grouped_mm takes it",
    ),
)

# -- mesh -----------------------------------------------------------------------------------------------------------

AXES = (MESH,)
BOUND: Mapping[str, Callable[[Mesh], primitives.Primitive]] = {
    "take": lambda m: primitives.bind_take(m, 0, AXES),  # first: contiguous rows, a block that nothing copies
    "take 1": lambda m: primitives.bind_take(m, 1, AXES),
    "enter": lambda m: primitives.bind_enter(m, AXES),
    "leave": lambda m: primitives.bind_leave(m, AXES),
    **{f"gather {dim}": partial(primitives.bind_gather, dim=dim, axes=AXES) for dim in (0, 1)},
    **{f"collect {dim}": partial(primitives.bind_collect, dim=dim, axes=AXES) for dim in (0, 1)},
    "exchange": lambda m: primitives.bind_exchange(m, 0, 1, AXES),
}


def primitive(name: str, dtype: torch.dtype) -> Called:
    return BOUND[name](mesh(2)), (leaf(dtype, ROWS, WIDTH),)


PRIMITIVES = tuple(
    Case("mesh.collectives.primitives.adjoint_pair.Pair", name, 2, partial(primitive, name)) for name in BOUND
)

# -- sequence -------------------------------------------------------------------------------------------------------


def attended(ranks: int, mode: str, length: int, dtype: torch.dtype, **settings: Any) -> Called:
    over, rows = mesh(ranks, "seq"), -(-length // (2 * ranks)) * 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mesh=over, mode=mode, length=length, **settings)

    queries, keys = (1, rows, 4, 8), (1, rows, 2, 8)
    return attend, (leaf(dtype, *queries), leaf(dtype, *keys, seed=1), leaf(dtype, *keys, seed=2))


SEQUENCE = (
    Case("sequence.ring._Ring", "alone", 1, partial(attended, 1, "ring", 8)),
    Case(
        "sequence.ring._Ring",
        "alone with documents",
        1,
        partial(attended, 1, "ring", 8, documents=(0, 3, 8)),
        breaks="where documents end is looked up by bisect, which is not traced",
    ),
    Case("sequence.ring._Ring", "", 2, partial(attended, 2, "ring", 15)),
    Case("sequence.ring_self_attention._RingSelf", "alone", 1, partial(attended, 1, "ring_self", 8)),
    Case("sequence.ring_self_attention._RingSelf", "", 2, partial(attended, 2, "ring_self", 15)),
)

# -- matrices -------------------------------------------------------------------------------------------------------


def deferred(bias: bool, dtype: torch.dtype) -> Called:
    linear = nn.Linear(WIDTH, WORDS, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(leaf(dtype, *parameter.shape, seed=1))
    defer_weight_gradients(linear)
    return lambda x, *_: linear(x), (leaf(dtype, *X), *linear.parameters())


@cache
def grid(ranks: int) -> Mesh:
    return Mesh({"row": 1, "col": ranks}, rank=None if ranks > 1 else 0)


def blocks(plan: MatmulPlan, over: Mesh, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's x and w."""
    x = Placement(shape=(ROWS, WIDTH), axes=(plan.x[plan.m], plan.x[plan.k]))
    w = Placement(shape=(WORDS, WIDTH), axes=(plan.w[plan.n], plan.w[plan.k]))
    return leaf(dtype, *x.local_shape(over)), leaf(dtype, *w.local_shape(over), seed=1)


def product(ranks: int, lowering: str, role: str, keep: frozenset[str], dtype: torch.dtype) -> Called:
    plan, over = MODES["2d"].plans[role], grid(ranks)
    return bind_matmul(plan, over, lowering=lowering, keep=keep), blocks(plan, over, dtype)


def deferred_product(ranks: int, lowering: str, dtype: torch.dtype) -> Called:
    plan, over = MODES["2d"].plans["column"], grid(ranks)
    multiply = bind_deferred_matmul(plan, over, lowering=lowering)
    x, w = blocks(plan, over, dtype)

    def add(pairs: Sequence[MatmulOperands]) -> None:
        for x, dy in pairs:
            accumulate_grad(w, weight_gradient(plan, over, x, w.detach(), dy, lowering=lowering))  # type: ignore[arg-type]

    site = WeightGradSite(add)
    return lambda x, w: multiply(x, w.detach(), site.ticket), (x, w)


def fp8_product(recipe: str, dtype: torch.dtype) -> Called:
    multiply, n = K.bind_fp8_matmul(K.FP8_RECIPES[recipe]), K.FP8_RECIPES[recipe].multiple
    return multiply, (leaf(dtype, ROWS, 2 * n), leaf(dtype, n, 2 * n, seed=1))


def split_fp8_product(ranks: int, recipe: str, dtype: torch.dtype) -> Called:
    column, on = find_mode("1d").plans["column"], mesh(ranks)
    multiply = bind_product(column, on, bind_fp8_lowering(column, on, K.FP8_RECIPES[recipe], ()))
    n = K.FP8_RECIPES[recipe].multiple
    return multiply, (leaf(dtype, ROWS, 2 * n), leaf(dtype, n, 2 * n, seed=1))


def deferred_fp8_product(recipe: str, dtype: torch.dtype) -> Called:
    products = Fp8Products.bind(K.FP8_RECIPES[recipe], None)

    def add(pairs: Sequence[MatmulOperands]) -> None:
        for x, dy in pairs:
            accumulate_grad(weight, products.weight_gradient(dy, x))

    weight = torch.nn.Parameter(leaf(dtype, 16, 32, seed=1).detach())
    site = WeightGradSite(add)
    return lambda x, w: products.deferred(x, w.detach(), site.ticket), (leaf(dtype, ROWS, 32), weight)


def cast_fp8_product(ranks: int, recipe: str, waits: bool, dtype: torch.dtype) -> Called:
    column, on, n = find_mode("1d").plans["column"], mesh(ranks), K.FP8_RECIPES[recipe].multiple
    lowering = bind_fp8_lowering(column, on, K.FP8_RECIPES[recipe], ())
    products, cast = lowering.cast_products(column, on), lowering.weight(column, on)
    assert cast is not None
    x, w = leaf(dtype, ROWS, 2 * n), leaf(dtype, n, 2 * n, seed=1)
    cast.open()
    operands = cast.refresh(w)
    assert operands is not None
    if not waits:
        return lambda x, w: products.product(x, w, operands), (x, w)
    weight = torch.nn.Parameter(w.detach())

    def add(pairs: Sequence[MatmulOperands]) -> None:
        for each, dy in pairs:
            accumulate_grad(weight, weight_gradient(column, on, each, weight.detach(), dy, lowering=lowering))

    site = WeightGradSite(add)
    return lambda x, w: products.deferred(x, operands, site.ticket), (x, weight)


NONE, BOTH = frozenset[str](), frozenset({"x", "w"})
MATRICES = (
    Case("pipeline.runtime.deferred_linear._Product", "", 1, partial(deferred, True)),
    Case("pipeline.runtime.deferred_linear._Product", "no bias", 1, partial(deferred, False)),
    *(
        Case(
            f"{MATMUL}._make_product.Matmul",
            f"{lowering} {role}{' kept' * bool(keep)} on {ranks}",
            ranks,
            partial(product, ranks, lowering, role, keep),
        )
        for ranks in (1, 2)
        for lowering in ("stream", "gather", "ring")
        for role in ("column", "row")
        for keep in (NONE, BOTH)
        if not LOWERINGS[lowering].refuses(MODES["2d"].plans[role])
        if (ranks, lowering) != (1, "gather")  # torch's own matmul
    ),
    *(
        Case(
            f"{MATMUL}._make_deferred_product.DeferredMatmul",
            f"{lowering} on {ranks}",
            ranks,
            partial(deferred_product, ranks, lowering),
        )
        for ranks in (1, 2)
        for lowering in ("stream", "gather", "ring")
        if not LOWERINGS[lowering].refuses(MODES["2d"].plans["column"])
    ),
)

FP8 = (
    *(
        Case("kernels.fp8_products.bind_fp8_matmul.Fp8Matmul", recipe, 1, partial(fp8_product, recipe))
        for recipe in K.FP8_RECIPES
    ),
    *(
        Case(
            f"{MATMUL}._make_product.Matmul",
            f"{recipe} on {ranks}",
            ranks,
            partial(split_fp8_product, ranks, recipe),
        )
        for ranks in (1, 2)
        for recipe in K.FP8_RECIPES
    ),
    *(
        Case(
            f"tensor_parallel.fp8_cast_products.bind_fp8_cast_products.{'Deferred' * waits}CastMatmul",
            f"{recipe} on {ranks}",
            ranks,
            partial(cast_fp8_product, ranks, recipe, waits),
        )
        for waits in (False, True)
        for ranks, recipe in ((1, "rowwise"), (2, "rowwise_hp_dw"), (1, "block128"))
    ),
    Case("engine.model.fp8_linear.Fp8Products.bind.Deferred", "", 1, partial(deferred_fp8_product, "rowwise")),
)

# -- layers of the hidden dim or the vocabulary split ---------------------------------------------------------------


def split_rms_norm(weighted: bool, dtype: torch.dtype) -> Called:
    normalise = bind_rms_norm(mesh(2), AXES, 2 * WIDTH, 1e-6)
    if not weighted:
        return lambda x: normalise(x, None), (leaf(dtype, *X),)
    return normalise, (leaf(dtype, *X), leaf(dtype, *V, seed=1))


def split_layer_norm(dtype: torch.dtype) -> Called:
    return bind_layer_norm(mesh(2), AXES, 2 * WIDTH, 1e-5), (
        leaf(dtype, *X),
        leaf(dtype, *V, seed=1),
        leaf(dtype, *V, seed=2),
    )


def split_cross_entropy(ranks: int, dtype: torch.dtype) -> Called:
    loss = bind_cross_entropy(mesh(ranks), find_mode("1d"), ranks * WORDS, -100, 0.1, 1e-2)
    return lambda logits: loss(logits, LABELS), (leaf(dtype, ROWS, WORDS),)


NORM, LOSS = "tensor_parallel.layers.norm", "tensor_parallel.layers.loss"
LAYERS = (
    Case(f"{NORM}.bind_rms_norm.SplitRMSNorm", "", 2, partial(split_rms_norm, True)),
    Case(f"{NORM}.bind_rms_norm.SplitRMSNorm", "no weight", 2, partial(split_rms_norm, False)),
    Case(f"{NORM}.bind_layer_norm.SplitLayerNorm", "", 2, split_layer_norm),
    Case(f"{LOSS}._make_function.VocabParallel", "alone", 1, partial(split_cross_entropy, 1)),
    Case(f"{LOSS}._make_function.VocabParallel", "", 2, partial(split_cross_entropy, 2)),
)


def watched(dtype: torch.dtype) -> Called:
    told: list[int] = []

    def through(x: Tensor, y: Tensor) -> Tensor:
        (x, y), _ = watch_inputs((x, y), {}, lambda: told.append(1))
        return x * y

    return through, (leaf(dtype, *X), leaf(dtype, *X, seed=1))


WATCHED = Case(
    "zero_gemini.runtime.gradient_arrival._Watched",
    "",
    1,
    watched,
    breaks="what it says in the backward changes things outside of a graph",
)

CASES = (*KERNELS, *EXPERTS, *PRIMITIVES, *SEQUENCE, *MATRICES, *FP8, *LAYERS, WATCHED)

NOT_COMPILED = {
    "experts.router_logits._Logits": "compiled code takes the products in float32",
    "experts.exchange._Back": "tokens are dispatched between graphs: how many rows travel may be read on the host",
    "experts.exchange._Routing": "the same",
    "experts.exchange._Finish": "the same",
    "experts.exchange._Start": "the same",
    "experts.spilled._Again": "the same",
    "folding.axial.overlap._Arrive": "blocks that are split over ranks are not compiled: axial refuses it",
    "folding.axial.overlap._Begin": "the same",
    "folding.axial.overlap._Move": "the same",
    "folding.axial.product._Product": "the same",
    "folding.axial.ring._Ring": "the same",
    "kernels.segment_attention._Attention": "compiled code has an operator of torch in its place: test_segment_attention.py",
    "mesh.model_io.dry_run._Attention": "it has no values: a plan's stand-in on the meta device, which counts",
    "mesh.model_io.lazy_tensor._Join": (
        "a model's output beside its loss, behind the compiled part: it gathers when the user's code reads it"
    ),
    "pipeline.runtime.stage_border._Enter": (
        "a stage is entered between its blocks, outside of their graphs: it gives a tensor other memory"
    ),
}
"""Functions that no compiled graph can hold, with the reason."""
