"""Kernels of a single row: found by rules, the same texts, and left alone where names mislead."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # for the helpers beside this file
from inference_models import greedy, hugging_face, own, prompts
from torch import Tensor, nn

from meshfold.engine import Engine
from meshfold.inference import Generator, Sampling, quantize
from meshfold.inference.forward import PagedForward
from meshfold.kernels import RowWeight, row_product, sum_add_norm
from meshfold.mesh import Group, SpecError, all_reduce
from meshfold.mesh.processes import only_ranks, running_world
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import head_of
from meshfold.tensor_parallel.few_rows.fused_sums import FusedSums
from meshfold.tensor_parallel.few_rows.one_shot_sums import OneShot, wrong_sums
from meshfold.tensor_parallel.few_rows.row_kernels import RowKernels
from meshfold.tensor_parallel.few_rows.split_words import SplitWords

GREEDY = Sampling(temperature=0.0, max_new_tokens=6)


def with_kernels(model: nn.Module) -> tuple[Generator, RowKernels]:
    generator = Generator(model, most_rows=1)
    assert isinstance(generator.runner, PagedForward)
    kernels = generator.runner.row_kernels = RowKernels(model, head_of(model))
    return generator, kernels


@pytest.mark.parametrize("kind", ["own llama", "own gpt", "llama", "qwen3", "mixtral", "int4"])
def test_texts_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = (
        own(kind.split()[-1]).eval()
        if kind.startswith("own")
        else own("llama").eval()
        if kind == "int4"
        else hugging_face(kind)
    )
    if kind == "int4":
        quantize(model, "int4", group=16)
    generator, kernels = with_kernels(model)
    rows = []
    from meshfold.tensor_parallel.few_rows import row_kernels

    real = row_kernels.row_product

    def counted(x: torch.Tensor, layer: Any, **around: Any) -> torch.Tensor:
        rows.append(sorted(name for name, value in around.items() if value is not None))
        return real(x, layer, **around)

    monkeypatch.setattr(row_kernels, "row_product", counted)
    prompt = prompts(2)[1]
    assert generator.generate([prompt], sampling=GREEDY).tokens == [greedy(model, prompt, 6)]
    layers = sum(isinstance(module, nn.Linear) for module in model.modules())
    gated = sum(around == ["gate", "norm"] for around in rows) // 5
    normed = sum(around == ["norm"] for around in rows) // 5
    added = sum(around == ["add"] for around in rows) // 5
    assert added == (4 if kind in ("own llama", "own gpt", "int4") else 0)
    wanted = {"own gpt": (0, 0), "mixtral": (0, 2 * 3 + 1), "llama": (2, 2 * 3 + 1), "qwen3": (2, 2 * 3 + 1)}
    assert (gated, normed) == wanted.get(kind, (2, 2 + 1))
    assert len(rows) // 5 == layers - (2 if kind in ("llama", "qwen3") else 0)  # gate and up are one
    assert len(kernels.calls()) == len(rows) // 5
    assert not any("forward" in vars(module) for module in model.modules())
    assert bool(kernels)


def on_ranks(form: str) -> tuple[list[list[int]], int, int, int]:
    from meshfold.tensor_parallel.few_rows import row_kernels

    with Engine(own("llama"), dict(tensor=2)) as engine:
        if form:
            quantize(engine.model, form, group=8)
        generator, _ = with_kernels(engine.generator)
        rows, real = [], row_kernels.row_product
        row_kernels.row_product = lambda x, *others, **more: (
            rows.append((more.get("gate") is not None, more.get("norm") is not None)),
            real(x, *others, **more),
        )[1]
        try:
            tokens = generator.generate([prompts(2)[1]], sampling=GREEDY).tokens
            return tokens, len(rows), sum(gate for gate, _ in rows), sum(norm for _, norm in rows)
        finally:
            row_kernels.row_product = real


@pytest.mark.few(2)
@pytest.mark.parametrize("form", ["", "int8", "int4"])
def test_ranks_multiply_their_part(form: str) -> None:
    model = own("llama").eval()
    if form:
        quantize(model, form, group=8)
    wanted = Generator(model).generate([prompts(2)[1]], sampling=GREEDY).tokens
    # All linear layers, for each token but the first; those of an MLP's gate include the other half and the activation. Both
    # norms of a block are computed by the products that read them.
    assert run_on_ranks(2, on_ranks, form) == [(wanted, 5 * (2 * 4 + 1), 5 * 2, 5 * 2 * 2)] * 2


def test_a_norm_that_its_name_belies_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of ours, but of a block whose second one is applied to what the MLP returns."""
    from meshfold.models import llama

    def forward(self: Any, x: torch.Tensor, seq_len: int, rotary: Any, mask: Any = None) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), seq_len, rotary, mask)
        return x + self.norm2(self.mlp(x))

    monkeypatch.setattr(llama.Block, "forward", forward)
    model = own("llama").eval()
    generator, _ = with_kernels(model)
    assert isinstance(generator.runner, PagedForward)
    generator.runner._check()
    assert generator.runner.row_kernels is None
    monkeypatch.undo()
    generator, kernels = with_kernels(own("llama").eval())
    generator.runner._check()  # type: ignore[attr-defined]
    assert generator.runner.row_kernels is kernels  # type: ignore[attr-defined]


def test_kernels_that_cannot_be_made_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.tensor_parallel.few_rows import row_kernels

    def broken(*arguments: Any, **more: Any) -> torch.Tensor:
        raise RuntimeError("ptxas: no such file\nand more")

    monkeypatch.setattr(row_kernels, "row_product", broken)
    model = own("llama").eval()
    generator, _ = with_kernels(model)
    assert isinstance(generator.runner, PagedForward)
    with pytest.warns(UserWarning, match="no kernels for a single row, which is slower: ptxas: no such file"):
        generator.runner._check()
    assert generator.runner.row_kernels is None
    prompt = prompts(2)[1]
    assert generator.generate([prompt], sampling=GREEDY).tokens == [greedy(model, prompt, 6)]


def measured_on_ranks(first: int = 0) -> list[tuple[int, int] | None]:
    """Rows of the programs that a rank takes: each measures another, then none of them, then one fails; ``first``: of two ranks."""
    from meshfold.kernels.row_tiles import Tile
    from meshfold.tensor_parallel.few_rows import measured

    found: list[tuple[int, int] | None] = []
    with only_ranks(range(first, first + 2)):
        engine = Engine(own("llama"), dict(tensor=2))
    with engine:
        group = engine.mesh.group("tensor")
        kernels, cpu = RowKernels(engine.model, head_of(engine.model)), torch.device("cpu")

        def mine(calls: Any, dtype: torch.dtype) -> dict[Any, Tile]:
            return {call.kind(dtype): Tile(1 << group.index, len(calls), 1) for call in calls}

        def fails(calls: Any, dtype: torch.dtype) -> dict[Any, Tile]:
            if group.index:
                raise RuntimeError("out of memory")
            return mine(calls, dtype)

        for measure, over in ((mine, group), (mine, None), (fails, group)):
            taken: list[Any] = []
            with warnings.catch_warnings(record=True) as told, pytest.MonkeyPatch.context() as patch:
                warnings.simplefilter("always")
                patch.setattr(measured, "take_row_tiles", taken.append)
                patch.setattr(measured, "measured_row_tiles", measure)
                measured.choose_row_programs(kernels, torch.float32, over, cpu)
            assert [str(each.message).endswith("slower: out of memory") for each in told] == [True] * (
                measure is fails and group.index
            )
            tiles = {tile[:2] for tiles in taken for tile in tiles.values()}
            found.append(tiles.pop() if tiles else None)
            assert not tiles
    return found


def test_ranks_take_the_programs_that_the_first_has_measured() -> None:
    # qkv, out, the gated pair and down of two layers, and the head; ranks that share a model in another way measure nothing.
    assert run_on_ranks(2, measured_on_ranks) == [[(1, 9), None, None]] * 2


def measured_on_half() -> list[tuple[int, int] | None]:
    """Programs of a model that two of four ranks have, twice: the other ranks of the job have another one, or none."""
    world = running_world()
    assert world is not None
    return measured_on_ranks(world.rank // 2 * 2)


def test_a_model_on_part_of_the_ranks_takes_measured_programs_too() -> None:
    assert run_on_ranks(4, measured_on_half) == [[(1, 9), None, None]] * 4


class PlainSum:
    """What the one-shot kernel computes, by a collective."""

    rows = 4

    def __init__(self, group: Group) -> None:
        self.group, self.calls, self.tables, self.left = group, [], [], 0  # type: ignore[var-annotated]

    def __call__(
        self, x: torch.Tensor, stream: torch.Tensor, gain: torch.Tensor, eps: float, call: int, adds: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((x.shape[0], call, adds))
        return sum_add_norm([all_reduce(x, self.group)], stream, gain, eps, adds=adds)

    def plain(self, x: torch.Tensor, call: int) -> torch.Tensor:
        self.tables.append((x.shape[0], call))
        return all_reduce(x, self.group)

    def of_product(self, x: torch.Tensor, layer: RowWeight, *others: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        *others, norm = others
        total, y = self(row_product(x, layer).view(1, -1), *others)
        self.left += not norm
        return total, y if norm else None


def with_sums(model: nn.Module, **settings: Any) -> tuple[Generator, PlainSum]:
    generator = Generator(model, **settings)
    assert isinstance(generator.runner, PagedForward) and generator.runner.sums is None  # not on CPUs
    sums = generator.runner.sums = FusedSums(model)
    plain = PlainSum(sums.group)
    sums.use(plain)
    return generator, plain


def test_sums_of_products_have_a_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A try of them that fails leaves epochs that differ. Of rows so long no two are summed by packets, so all else is equal."""
    from meshfold.tensor_parallel.few_rows import one_shot_sums

    made: dict[tuple[str, int], Any] = {}

    def memory(group: Any, purpose: str, length: int, device: torch.device) -> Any:
        return made.setdefault((purpose, length), SimpleNamespace(addresses=torch.zeros(2, dtype=torch.int64)))

    monkeypatch.setattr(one_shot_sums, "peer_memory", memory)
    monkeypatch.setattr(one_shot_sums, "_tried", lambda *_: "")
    group: Any = SimpleNamespace(size=2, index=0)
    sums = OneShot(group, 20480, torch.bfloat16, torch.device("meta"))
    assert sums.packet_rows == 1 and sums.sends and len(made) == 3


def fused_on_ranks(kinds: list[str]) -> list[Any]:
    from meshfold.models import llama

    found: list[Any] = []
    for kind in kinds:
        model = hugging_face(kind) if kind != "own" else own("llama")
        # As on a GPU, where a block's norms compute the sums that they are given.
        with Engine(model, dict(tensor=2), kernels=dict(residual=True, norm=True)) as engine:
            generator, plain = with_sums(engine.generator, most_rows=6, page_size=4)
            runner: Any = generator.runner
            runner.row_kernels = RowKernels(engine.model, head_of(engine.model))
            one = generator.generate([prompts(2)[1]], sampling=GREEDY).tokens
            # All norms but the last, which the head reads, are left to products.
            assert plain.left == len(plain.calls) - sum(call == plain.calls[-1][1] for _, call, _ in plain.calls)
            assert plain.tables == [(1, 0)] * 5
            calls, plain.calls = plain.calls, []
            three = generator.generate(prompts(3), sampling=GREEDY).tokens
            many, before = [*plain.calls], len(plain.calls)
            generator.generate(prompts(6), sampling=GREEDY)  # more rows than are fused
            runner._check()
            found.append((one, calls, three, many, len(plain.calls) - before, runner.sums is not None))
            runner.row_kernels = RowKernels(engine.model, head_of(engine.model), split_norms=False)
            plain.left = 0
            assert generator.generate([prompts(2)[1]], sampling=GREEDY).tokens == one
            assert plain.left == 0  # sums compute all norms
            with pytest.raises(SpecError, match="GPUs"):
                OneShot(runner.sums.group, 32, torch.float32, torch.device("cpu"))

    def parallel(self: Any, x: torch.Tensor, seq_len: int, rotary: Any, mask: Any = None) -> torch.Tensor:
        return x + self.attn(self.norm1(x), seq_len, rotary, mask) + self.mlp(self.norm2(x))

    real, llama.Block.forward = llama.Block.forward, parallel  # type: ignore[method-assign]
    try:
        with Engine(own("llama"), dict(tensor=2)) as engine:
            generator, _ = with_sums(engine.generator)
            runner = generator.runner
            runner._check()
            found.append((runner.sums is None, runner.without["sums"]))
    finally:
        llama.Block.forward = real  # type: ignore[method-assign]
    with Engine(own("gpt"), dict(tensor=2)) as engine, pytest.raises(SpecError, match="not followed by a norm"):
        FusedSums(engine.model)
    return found


def tried_on_ranks() -> list[str]:
    with Engine(own("llama"), dict(tensor=2)) as engine:
        group, slots = engine.mesh.group("tensor"), []

        def right(x: Tensor, stream: Tensor, gain: Tensor, eps: float, *, slot: int) -> tuple[Tensor, Tensor]:
            slots.append(slot)
            return sum_add_norm([all_reduce(x, group)], stream, gain, eps)

        def late(x: Tensor, stream: Tensor, gain: Tensor, eps: float, *, slot: int) -> tuple[Tensor, Tensor]:
            """Rows come without the peer's part, if there are several."""
            both = right(x, stream, gain, eps, slot=slot)
            return both if x.shape[0] == 1 else sum_add_norm([x], stream, gain, eps)

        def broken(*given: Any, slot: int) -> tuple[Tensor, Tensor]:
            if group.index:
                raise RuntimeError("ptxas: no such file\nand more")
            return sum_add_norm(list(given[:1]), *given[1:])

        reasons = [
            wrong_sums(one, group, (1, 3), 32, torch.float32, torch.device("cpu")) for one in (right, late, broken)
        ]
        assert slots == [0, 1, 2, 1, 2, 1, 0, 1]  # no call after a wrong sum
        return reasons


def test_sums_are_tried_before_they_are_taken_on_all_ranks() -> None:
    for right, late, broken in run_on_ranks(2, tried_on_ranks):
        assert right == "" and late.startswith("sums of 3 rows differ from their reference by")
        assert "rows differ" in broken or broken == "ptxas: no such file"


def test_the_way_of_sums_is_checked() -> None:
    with pytest.raises(
        SpecError, match=r"sums='packet': write 'packets', 'flags', 'collectives'\. Did you mean 'packets'"
    ):
        Generator(own("llama"), sums="packet")


@pytest.mark.parametrize("kinds", [["own"], pytest.param(["qwen3", "mistral"], marks=pytest.mark.slow)])
def test_sums_over_ranks_take_the_norms_after_them_along(kinds: list[str]) -> None:
    for rank in run_on_ranks(2, fused_on_ranks, kinds):
        for kind, (one, calls, three, many, others, fits) in zip(kinds, rank[:-1], strict=True):
            model = hugging_face(kind) if kind != "own" else own("llama").eval()
            assert one == [greedy(model, prompts(2)[1], 6)]
            assert three == [greedy(model, prompt, 6) for prompt in prompts(3)]
            # Two sums in each of two layers after that of the words' rows, for each token but the first, which the prompt gives.
            assert calls == [(1, call, kind == "own") for _ in range(5) for call in range(1, 5)]
            assert many == [(4, call, kind == "own") for _ in range(5) for call in range(1, 5)]
            assert others == 4 and fits  # of the check alone
        fell, why = rank[-1]  # a block whose second norm does not follow its first sum is found out
        assert fell and re.fullmatch(r"logits differ by [\d.]+%: norms and layers are not what their names say", why)


def choosing_on_ranks() -> list[list[tuple[int, ...]]]:
    """Shapes that ranks gather while they generate two greedy sequences, three drawn ones, and one that is truncated."""
    split_words: Any = sys.modules[SplitWords.__module__]
    found: list[list[tuple[int, ...]]] = []
    real = split_words.all_gather
    with Engine(own("llama"), dict(tensor=2)) as engine:
        generator = Generator(engine.generator, most_rows=4)
        for count, settings in ((2, dict(temperature=0.0)), (3, dict(temperature=0.7)), (1, dict(top_k=5))):
            shapes: list[tuple[int, ...]] = []
            split_words.all_gather = lambda x, *others, to=shapes: (to.append(tuple(x.shape)), real(x, *others))[1]
            try:
                generator.generate(prompts(count), sampling=Sampling(max_new_tokens=4, **settings))  # type: ignore[arg-type]
            finally:
                split_words.all_gather = real
            found.append(shapes)
    return found


def test_ranks_exchange_five_numbers_a_row_to_choose_its_token() -> None:
    # 3 of the 4 tokens: the prompt's forward gives the first. Three sequences are a batch of four rows.
    assert run_on_ranks(2, choosing_on_ranks) == [[[(1, 2, 5)] * 3, [(1, 4, 5)] * 3, []]] * 2
