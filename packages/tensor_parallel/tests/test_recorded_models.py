"""The collectives of whole models, recorded on ranks that are not there, are those derived by hand from the mode's
layouts: kind, axes and bytes, one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from tensor_parallel_models import Classic, Flat
from torch import nn

from meshfold.mesh import Mesh, record
from meshfold.mesh.testing import fake_world
from meshfold.tensor_parallel import Cost, MatmulPlan, find_mode, matmul_cost, parallelize
from meshfold.tensor_parallel.cost import CostBuilder
from meshfold.tensor_parallel.modes import Mode, outside_blocks, vocabulary_multiple

HIDDEN, HEADS, BATCH, SEQUENCE, LAYERS, POSITIONS = 1024, 512, 64, 8, 2, 16
TOKENS, HEAD_DIM = BATCH * SEQUENCE, HIDDEN // HEADS
ITEMSIZE, WIDE = 2, 4  # bfloat16; statistics and losses are float32

MESHES: tuple[tuple[str, dict[str, int]], ...] = (
    ("1d", {"tensor": 4}),
    ("1d", {"data": 8, "tensor": 64}),
    ("1d", {"tensor": 512}),
    ("1d+sequence", {"tensor": 8}),
    ("1d+sequence", {"tensor": 512}),
    ("1d+tokens", {"tensor": 8}),
    ("1d+tokens", {"data": 8, "tensor": 64}),
    ("2d", {"row": 2, "col": 2}),
    ("2d", {"row": 4, "col": 8}),
    ("2d", {"data": 2, "row": 16, "col": 16}),
    ("2.5d", {"depth": 1, "row": 2, "col": 2}),
    ("2.5d", {"depth": 2, "row": 2, "col": 4}),
    ("2.5d", {"depth": 8, "row": 8, "col": 8}),
    ("3d", {"a": 2, "b": 2, "c": 1}),
    ("3d", {"a": 2, "b": 4, "c": 8}),
    ("3d", {"a": 8, "b": 8, "c": 8}),
)


@dataclass
class ByHand:
    """Adds up what the layers of a model move, from the layouts of a mode alone."""

    mode: Mode
    mesh: Mesh
    cost: Cost = field(default_factory=lambda: Cost(()))

    def plan(self, plan: MatmulPlan, k: int, n: int, *phases: str) -> None:
        chosen = phases or ("forward", "dx", "dw")
        sizes = {plan.m: TOKENS, plan.k: k, plan.n: n}
        self.cost += matmul_cost(plan, sizes, self.mesh, itemsize=ITEMSIZE, phases=chosen)

    def add(self, phase: str, kind: str, axes: tuple[str, ...], elements: int, itemsize: int = ITEMSIZE) -> None:
        entry = CostBuilder(self.mesh, itemsize)
        entry.add(phase, kind, "", axes, elements)  # type: ignore[arg-type]
        self.cost += entry.done()

    def local(self, elements: int, *axes: str) -> int:
        return elements // self.mesh.size(*axes)

    def bias(self, plan: MatmulPlan, n: int) -> None:
        """Summed over the axes that split tokens."""
        self.add("dw", "all_reduce", plan.y[plan.m], self.local(n, *plan.y[plan.n]))

    def by_tokens(self, *widths: int, bias: bool) -> None:
        """Attention by tokens: each projection's features, then those that it sends with key/value heads repeated."""
        plan, axes = self.mode.attention_plans["column"], self.mode.layout("hidden")["n"]
        for features, sent in zip(widths[::2], widths[1::2], strict=True):
            self.plan(plan, HIDDEN, features)
            for phase in ("forward", "dx"):
                self.add(phase, "all_to_all", axes, self.local(TOKENS * sent, *axes))
        self.plan(plan, HIDDEN, HIDDEN)
        for phase in ("forward", "dx"):
            self.add(phase, "all_to_all", axes, self.local(TOKENS * HIDDEN, *axes))
        for features in (*widths[::2], HIDDEN) if bias else ():
            self.add("dw", "all_reduce", axes, features)

    def norm(self, mode: Mode, layer: bool) -> None:
        """Row statistics over the axes of the hidden dim; weights summed over those of the tokens."""
        residual = mode.layout("residual")
        rows, columns = self.local(TOKENS, *residual["m"]), residual["h"]
        if layer:  # each rank's mean and variance
            self.add("forward", "all_gather", columns, 2 * rows * self.mesh.size(*columns), WIDE)
        else:
            self.add("forward", "all_reduce", columns, rows, WIDE)
        for _ in range(2 if layer else 1):
            self.add("dw", "all_reduce", residual["m"], self.local(HIDDEN, *columns))
        self.add("dx", "all_reduce", columns, rows * (2 if layer else 1), WIDE)

    def embedding(self, mode: Mode, vocab: int) -> None:
        plan = mode.plans["embedding"]
        assert not plan.extras("x"), "ids are whole"
        self.plan(plan, padded(vocab, mode, self.mesh), HIDDEN, "forward", "dw")

    def positions(self, mode: Mode) -> None:
        residual = mode.layout("residual")
        self.add("dw", "all_reduce", residual["m"], POSITIONS * self.local(HIDDEN, *residual["h"]))

    def loss(self, mode: Mode, smoothing: bool) -> None:
        logits = mode.layout("logits")
        rows = self.local(TOKENS, *logits["m"])
        self.add("forward", "all_reduce", logits["v"], rows, WIDE)
        self.add("forward", "all_reduce", logits["v"], rows * (3 if smoothing else 2), WIDE)
        self.add("forward", "all_reduce", logits["m"], 1, WIDE)

    def gathered_logits(self, mode: Mode, vocab: int) -> None:
        """Logits put together for a loss that the caller computes; no traffic in backward."""
        logits = mode.layout("logits")
        block = padded(vocab, mode, self.mesh) * TOKENS // self.mesh.size(*logits.axes)
        builder = CostBuilder(self.mesh, ITEMSIZE)
        block = builder.gather("forward", "", reversed(logits["v"]), block)
        builder.gather("forward", "", reversed(logits["m"]), block)
        self.cost += builder.done()

    def region(self, plan: MatmulPlan) -> None:
        """One gather of x and one departure of dx for several matmuls."""
        builder, block = CostBuilder(self.mesh, ITEMSIZE), self.local(TOKENS * HIDDEN, *plan.x.axes)
        axes = [axis for _, axis in plan.extras("x")]
        whole = builder.gather("forward", "x", reversed(axes), block)
        left = builder.scatter("dx", "dx", axes, whole)
        builder.add("dx", "all_reduce", "dx", plan.sums("x"), left)
        self.cost += builder.done()

    def boundary(self, mode: Mode) -> None:
        """The stream joined behind the blocks; its gradient joined before them."""
        residual = mode.layout("residual")
        for phase in ("forward", "dx"):
            builder = CostBuilder(self.mesh, ITEMSIZE)
            block = self.local(TOKENS * HIDDEN, *residual.axes)
            block = builder.gather(phase, "", reversed(residual["h"]), block)
            builder.gather(phase, "", reversed(residual["m"]), block)
            self.cost += builder.done()


def padded(vocab: int, mode: Mode, mesh: Mesh) -> int:
    multiple = vocabulary_multiple(mode, mesh)
    return math.ceil(vocab / multiple) * multiple


def derive_flat(hand: ByHand, gated: bool, kv_heads: int, vocab: int) -> Cost:
    """The plain decoder over a flat stream: GPT with biases and a tied head, or Llama with a fused gate and GQA."""
    mode, mesh = hand.mode, hand.mesh
    column, row = mode.plans["column"], mode.plans["row"]
    blocks = mode.head_divisor(mesh)
    repeat = max(1, blocks // kv_heads)
    hand.embedding(mode, vocab)
    if not gated:
        hand.positions(mode)
    for _ in range(LAYERS):
        for _ in range(2):
            hand.norm(mode, layer=not gated)
        qkv = HIDDEN + 2 * kv_heads * repeat * HEAD_DIM
        if mode.attention:
            hand.by_tokens(HIDDEN + 2 * kv_heads * HEAD_DIM, qkv, bias=not gated)
        else:
            hand.plan(column, HIDDEN, qkv)
            hand.plan(row, HIDDEN, HIDDEN)
        if (
            repeat > 1 and not mode.attention
        ):  # the gradient of keys and values is summed over the ranks that hold the same
            (axis,) = mode.layout("hidden")["n"]
            span = kv_heads * repeat * HEAD_DIM // blocks * hand.local(HIDDEN, *column.w[column.k])
            for _ in range(2):
                hand.add("dw", "all_reduce", (f"{axis}%{repeat}",), span)
        inner = 3 * HIDDEN if gated else 4 * HIDDEN
        hand.plan(column, HIDDEN, 2 * inner if gated else inner)
        hand.plan(row, inner, HIDDEN)
        if not gated:
            hand.bias(column, inner), hand.bias(row, HIDDEN)
        if not gated and not mode.attention:
            hand.bias(column, qkv), hand.bias(row, HIDDEN)
    hand.norm(mode, layer=not gated)
    hand.plan(mode.plans["head" if gated else "tied_head"], HIDDEN, padded(vocab, mode, mesh))
    hand.loss(mode, smoothing=True)
    return hand.cost


def derive_classic(hand: ByHand, vocab: int) -> Cost:
    """The decoder on ``b s h`` with separate projections, whose loss is computed by the caller."""
    mode, mesh = hand.mode, hand.mesh
    split_in_sequences = mode.name in ("1d+sequence", "1d+tokens")
    outer = outside_blocks(mode) if split_in_sequences else mode
    column, row = mode.plans["column"], mode.plans["row"]
    hand.embedding(outer, vocab)
    hand.positions(outer)
    if split_in_sequences:
        hand.boundary(mode)
    for _ in range(LAYERS):
        hand.norm(mode, layer=True), hand.norm(mode, layer=True)
        if mode.attention:
            hand.by_tokens(HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, HIDDEN, bias=True)
        else:
            hand.region(column)
            for _ in range(3):
                hand.plan(column.enter(), HIDDEN, HIDDEN)
                hand.bias(column, HIDDEN)
            hand.plan(row, HIDDEN, HIDDEN)
            hand.bias(row, HIDDEN)
        hand.plan(column, HIDDEN, 4 * HIDDEN)
        hand.plan(row, 4 * HIDDEN, HIDDEN)
        hand.bias(column, 4 * HIDDEN), hand.bias(row, HIDDEN)
    hand.norm(outer, layer=True)
    head = outer.plans["head"]
    hand.plan(head, HIDDEN, padded(vocab, outer, mesh))
    hand.bias(head, padded(vocab, outer, mesh))
    hand.gathered_logits(outer, vocab)
    return hand.cost


def recorded(make: Callable[[], nn.Module], mode: str, mesh: Mesh) -> tuple[Counter[object], Counter[object]]:
    """(forward, backward) of a training step on tensors without values."""
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        parallelize(model, mesh, mode)
        ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
        with record() as log:
            loss = model(ids).float().mean() if isinstance(model, Classic) else model(ids, labels=ids).loss
            log.phase = "backward"
            loss.backward()
    return log.count("forward"), log.count("backward")


def compare(mode: str, axes: dict[str, int], make: Callable[[], nn.Module], derive: Callable[[ByHand], Cost]) -> None:
    ranks = math.prod(axes.values())
    for rank in sorted({0, ranks - 1}):
        with fake_world(ranks, rank):
            mesh = Mesh(axes)
            forward, backward = recorded(make, mode, mesh)
            planned = derive(ByHand(find_mode(mode), mesh))
            what = f"{mode} on {axes}, rank {rank}"
            assert forward == planned.count("forward"), f"{what}: {difference(forward, planned.count('forward'))}"
            summed = planned.count("dx", "dw")
            assert backward == summed, f"{what}: {difference(backward, summed)}"
            assert sum(forward.values()) > 0 and sum(backward.values()) > 0


def difference(seen: Counter[object], planned: Counter[object]) -> str:
    return f"recorded and not planned {dict(seen - planned)}, planned and not recorded {dict(planned - seen)}"


IDS = [f"{mode} {'x'.join(map(str, axes.values()))}" for mode, axes in MESHES]


@pytest.fixture(autouse=True)
def short_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor_parallel_models.POSITIONS", POSITIONS)


@pytest.mark.few(3)
@pytest.mark.parametrize(("mode", "axes"), MESHES, ids=IDS)
def test_a_gpt(mode: str, axes: dict[str, int]) -> None:
    vocab = 1000
    compare(
        mode,
        axes,
        lambda: Flat(gated=False, kv_heads=HEADS, vocab=vocab, hidden=HIDDEN, heads=HEADS, layers=LAYERS),
        lambda hand: derive_flat(hand, gated=False, kv_heads=HEADS, vocab=vocab),
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(("mode", "axes"), MESHES, ids=IDS)
def test_a_llama_with_four_key_value_heads(mode: str, axes: dict[str, int]) -> None:
    vocab = 777
    compare(
        mode,
        axes,
        lambda: Flat(gated=True, kv_heads=4, vocab=vocab, hidden=HIDDEN, heads=HEADS, layers=LAYERS),
        lambda hand: derive_flat(hand, gated=True, kv_heads=4, vocab=vocab),
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(("mode", "axes"), MESHES, ids=IDS)
def test_a_decoder_of_sequences(mode: str, axes: dict[str, int]) -> None:
    compare(mode, axes, lambda: Classic(hidden=HIDDEN, heads=HEADS), lambda hand: derive_classic(hand, vocab=37))


def test_a_mode_of_ones_own_is_costed_as_it_runs() -> None:
    """2.5d whose weights are split over depth too: more gathers, no all-reduce over depth in dW."""
    rows = dict(
        column="k:row,depth n:col",
        row="k:row,depth n:col",
        head="k:row,depth v:col",
        embedding="v:row,depth h:col",
    )
    mine = replace(find_mode("2.5d"), name="mine", **rows)
    axes = {"depth": 2, "row": 2, "col": 4}
    with fake_world(16, 3):
        mesh = Mesh(axes)
        forward, backward = recorded(
            lambda: Flat(gated=False, hidden=HIDDEN, heads=HEADS, kv_heads=HEADS, vocab=1000), mine, mesh
        )
        planned = derive_flat(ByHand(mine, mesh), gated=False, kv_heads=HEADS, vocab=1000)
        assert forward == planned.count("forward"), difference(forward, planned.count("forward"))
        assert backward == planned.count("dx", "dw"), difference(backward, planned.count("dx", "dw"))
