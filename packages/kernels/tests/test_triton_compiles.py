"""Every Triton kernel compiles to machine code of a Hopper GPU, which needs Triton but no GPU."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold import kernels as K
from meshfold.kernels import dispatch
from meshfold.kernels.activations import gated_and_cast
from meshfold.kernels.fp8_casts import cast_both, cast_scaled, turn
from meshfold.kernels.norms import whole_and_cast

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


class Compiler:
    """Stands in for a launch: compiles the kernel for the arguments it was given."""

    def __init__(self) -> None:
        self.compiled: set[str] = set()

    def launch(self, kernel: Any, grid: tuple[int, ...], on: Tensor, *arguments: Any, **settings: Any) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.tools.tensor_descriptor import TensorDescriptor

        options = {
            name: settings.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in settings
        }
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | settings
        signature, constants = {}, {}
        for parameter in kernel.params:
            value = given[parameter.name]
            if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                dtype = POINTERS[value.base.dtype].removeprefix("*")
                signature[parameter.name] = f"tensordesc<{dtype}{list(value.block_shape)}>"
            elif isinstance(value, Tensor):
                signature[parameter.name] = POINTERS[value.dtype]
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            else:
                signature[parameter.name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        made = triton.compile(
            ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options
        )
        assert made.asm["cubin"]
        if not options.get("enable_fp_fusion", True):
            assert "fma.rn.f32" not in made.asm["ptx"]  # what must give the bits of a CPU rounds every product
            assert not re.search(r"(div|sqrt)\.(approx|full)", made.asm["ptx"]) and ".ftz" not in made.asm["ptx"]
        self.compiled.add(f"{kernel.fn.__module__.split('.')[2].removesuffix('_triton')}.{kernel.fn.__name__}")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    from meshfold.kernels import _triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = Compiler()
    for family, (_, twins) in dispatch.FAMILIES.items():
        if "triton" in twins:
            module = importlib.import_module(dispatch.implementation_module(family, "triton"))
            monkeypatch.setattr(module, "launch", made.launch, raising=False)
    monkeypatch.setattr(_triton, "launch", made.launch)  # of prepared launches
    monkeypatch.setattr(dispatch, "_obstacle", lambda *arguments: "")
    with K.use("triton"):
        yield made


@pytest.mark.slow  # the interpreter runs them all but those of fp8
def test_products_of_one_row_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from meshfold.kernels import row_product_triton
    from meshfold.kernels.row_tiles import Tile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = Compiler()
    monkeypatch.setattr(row_product_triton, "launch", made.launch)
    x, w = torch.zeros(1, 4096, dtype=torch.bfloat16), torch.zeros(4096, 4096)
    product = row_product_triton.product
    weight = K.RowWeight(w.bfloat16())
    product(x, *weight._replace(bias=w[0].bfloat16()), norm=(x[0], 1e-5), add=x)
    product(x, *weight, gate=weight, norm=(x[0], 1e-5), tile=Tile(8, 64, 2, words=True))
    for form in K.PACKED_FORMATS:
        packed = K.pack_weight(w, form, 128, K.largest_magnitudes(w, form, 128))
        for scale in (packed.scale, torch.zeros(4096, 32)):
            for zero in (None, scale.to(torch.uint8)):
                layer = K.RowWeight(packed.codes, None, scale, zero)
                product(x, *layer)
                product(x, *layer, gate=layer, norm=(x[0], 1e-5))
                with K.overlapped_launches():
                    product(x, *layer, gate=layer, norm=(x[0], 1e-5), tile=Tile(8, 64, 2, words=True))
    assert made.compiled == {"row_product._product", "row_product._product_int4", "row_words.product_words"}


def test_codes_become_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import packed_weight_triton

    made, w = Compiler(), torch.zeros(4, 4096)
    monkeypatch.setattr(packed_weight_triton, "launch", made.launch)
    for form, zeros in (("fp8", False), ("int4", True)):
        packed = K.pack_weight(w, form, 128, K.largest_magnitudes(w, form, 128))
        zero = packed.scale.to(torch.uint8) if zeros else None
        packed_weight_triton.launch_unpack(packed.codes, packed.scale, zero, torch.bfloat16)
    assert made.compiled == {"packed_weight._unpack"}


def test_sums_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import one_shot_packets_triton, one_shot_triton

    made = Compiler()
    for module in (one_shot_packets_triton, one_shot_triton):
        monkeypatch.setattr(module, "launch", made.launch)
    for dtype, columns, ranks in ((torch.bfloat16, 4096, 2), (torch.float32, 2048, 4)):
        x, memory = (
            torch.zeros(8, columns, dtype=dtype),
            K.OneShotMemory(torch.zeros(ranks).long(), 1, 8, columns, dtype),
        )
        for stream, adds in ((x, True), (x.bfloat16(), False)):
            one_shot_packets_triton.launch_packets(
                x, stream, x[0].float(), 1e-5, memory, 2, adds=adds, norm=True, tries=0
            )
    one_shot_triton.launch_one_shot(x, x, x[0], 1e-5, memory, 2, adds=False)
    assert made.compiled == {"one_shot_packets._packets", "one_shot._one_shot"}


@pytest.mark.parametrize("begins_early", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_are_fetched_ahead(monkeypatch: pytest.MonkeyPatch, begins_early: bool) -> None:
    """By attention, which turns queries and combines its parts too, and by sums over ranks; products send rows."""
    from meshfold.kernels import (
        one_shot_packets_triton,
        one_shot_triton,
        paged_attention_triton,
        row_product_triton,
        weights_ahead,
    )
    from meshfold.kernels.overlap import overlapped_launches
    from meshfold.kernels.row_tiles import Tile

    made = Compiler()
    for module in (one_shot_packets_triton, one_shot_triton, paged_attention_triton, row_product_triton):
        monkeypatch.setattr(module, "launch", made.launch)
    ahead, w = weights_ahead.WeightsAhead(), torch.zeros(64, 4096, dtype=torch.bfloat16)
    x, q, kept = w[:1], torch.zeros(1, 8, 128).bfloat16(), torch.zeros(2, 40, 2, 16, 128).bfloat16()
    memory = K.OneShotMemory(torch.zeros(4).long(), 1, 8, 4096, torch.bfloat16)
    where, tables = torch.zeros(1, 20).long(), torch.zeros(1, 128)
    options = dict(rotary=(tables, tables), arrived=torch.zeros(8, dtype=torch.int32))
    for _ in range(2):
        with ahead.token(), overlapped_launches() if begins_early else nullcontext():
            given = (q, q[:, :2], q[:, :2], kept, None, where, where[0, :1], 1.0, None, 4)
            paged_attention_triton.attend_new(*given, **options)
            weights_ahead.take_product(w)
            one_shot_packets_triton.launch_packets(x, x, x[0], 1e-5, memory, 2, adds=True, norm=True, tries=0)
            weights_ahead.take_product(w, w)
            one_shot_triton.launch_one_shot(x, x, x[0], 1e-5, memory, 2, adds=True)
            weights_ahead.take_product(w)
    assert not ahead.problem
    # A product that sends its row, and the sum that finds it.
    codes = K.pack_weight(torch.zeros(4096, 128), "int4", 128, torch.ones(4096, 1))
    for layer, tile in (
        (K.RowWeight(w[:, :128].contiguous()), Tile(8, 64, 2, words=True)),
        (K.RowWeight(w[:, :128].contiguous()), Tile(1, 128, 1)),
        (K.RowWeight(codes.codes, None, codes.scale), Tile(8, 128, 2)),
    ):
        row_product_triton.product(x[:, :128], *layer, tile=tile, sends=(memory, 2))
    for norm in (True, False):
        one_shot_packets_triton.launch_packets(None, x, x[0], 1e-5, memory, 2, adds=True, norm=norm, tries=0)
    made.compiled -= {"row_product._product", "row_product._product_int4", "row_words.product_words"}
    assert made.compiled == {"paged_attention._attend", "one_shot_packets._packets", "one_shot._one_shot"}


def test_choices_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import token_state_triton, word_choice_triton

    made = Compiler()
    for module in (word_choice_triton, token_state_triton):
        monkeypatch.setattr(module, "launch", made.launch)
    for states, draws in ((None, None), (torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool))):
        parts = word_choice_triton.launch_parts(
            torch.zeros(2, 5000).bfloat16(), torch.ones(2, dtype=torch.float64), 0, states, draws
        )
        word_choice_triton.launch_merge(parts)
        word_choice_triton.launch_choice(parts)
    numbers = torch.zeros(2, dtype=torch.int64)
    state = K.TokenState(numbers, numbers, numbers, numbers[:1], numbers.view(1, 2), torch.zeros(1, 2).double())
    token_state_triton.launch_record(numbers, torch.zeros(2), state, 40)
    token_state_triton.launch_rows(numbers, torch.zeros(8, 4096).bfloat16(), 8)
    assert made.compiled == {"word_choice._words", "word_choice._merge", "token_state._record", "token_state._rows"}


@pytest.mark.slow  # the interpreter runs them all
def test_all_kernels_compile(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshfold.kernels import fp8_casts_triton, grouped_products_triton

    monkeypatch.setattr(grouped_products_triton, "_has_wgmma", lambda x: True)
    h = 4096
    x = torch.zeros(8, h, dtype=torch.bfloat16, requires_grad=True)
    r = torch.zeros(8, h, requires_grad=True)
    w, b = (torch.ones(h, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    labels = torch.zeros(8, dtype=torch.int64)
    K.rms_norm(x, w).sum().backward()
    K.layer_norm(x, w, b).sum().backward()
    sum(t.sum() for t in K.add_rms_norm(x, r, w)).backward()  # type: ignore[union-attr]
    K.swiglu(x).sum().backward()
    K.weighted_swiglu(x, torch.zeros(8)).sum().backward()
    for approximate in ("none", "tanh"):
        K.geglu2(x, x.detach(), approximate).sum().backward()
    K.cross_entropy(x, labels, label_smoothing=0.1).sum().backward()
    for converts in (False, True):
        monkeypatch.setattr(fp8_casts_triton, "converts", lambda x, converts=converts: converts)
        for turned in (x.detach(), x.detach().t()):
            K.to_fp8(turned, rows=True)
        dispatch.twin(cast_both, x)(x.detach())
        for centred in (False, True):
            dispatch.twin(whole_and_cast, x)(x.detach(), None, w.detach(), None, 1e-5, centred)
        wide = torch.zeros(8, 28672, dtype=torch.bfloat16)
        dispatch.twin(gated_and_cast, x)(*wide.chunk(2, 1))
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for along, count in (("rows", x.shape[0]), ("columns", x.shape[1]), ("none", 1)):
        dispatch.twin(cast_scaled, x)(x.detach(), torch.ones(count), values, along)
    dispatch.twin(turn, torch.ones(1))(values, torch.ones(1))
    for recompute in (False, True):
        K.linear_cross_entropy(x, x.detach(), labels, softcap=30.0, label_smoothing=0.1, recompute=recompute).backward()
    K.linear_log_probs(x, x.detach(), labels, entropy=True)[0].sum().backward()
    K.dropout(x, 0.5, 3, 4).sum().backward()
    K.dropout(x, 0.5, torch.tensor(3), 4, torch.arange(8)).sum().backward()
    q, k = (torch.zeros(2, 8, heads, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (32, 8))
    sum(t.sum() for t in K.apply_rotary(q, k, torch.zeros(8, 128), torch.zeros(8, 128))).backward()  # type: ignore[union-attr]
    for dtype in (torch.bfloat16, torch.float32):
        edges = [torch.zeros(1, 8, 64, 4, 32, dtype=dtype, requires_grad=True) for _ in range(3)]
        pair_bias = torch.zeros(1, 4, 64, 64, dtype=dtype, requires_grad=True)
        K.pair_attention(*edges, pair_bias, torch.zeros(1, 8, 64)).sum().backward()
    with torch.no_grad():
        K.merge_attention_(torch.zeros(2, 8, 32, 128), torch.zeros(2, 32, 8), q, torch.zeros(2, 32, 8))
        rstd = K.rms_norm_stats(x)
        K.rms_norm_apply(x, w, rstd)
        K.rms_norm_backward_apply(x, x, w, rstd, K.rms_norm_backward_stats(x, x, w, rstd), 2 * h)
        K.layer_norm_joined(K.layer_norm_stats(x).unsqueeze(0), 1e-6)
        K.layer_norm_apply(x, w, b, rstd, rstd)
        sums = K.layer_norm_backward_stats(x, x, w, rstd, rstd)
        K.layer_norm_backward_apply(x, x, w, rstd, rstd, sums, 2 * h)
        K.local_max(x)
        K.sum_exp_and_target(x, rstd, labels, 0)
    places = torch.arange(24).view(8, 3)
    K.sum_rows(
        K.take_rows(x, places.flatten(), places), places.flatten(), places, torch.ones(8, 3, requires_grad=True)
    ).sum().backward()
    K.add_rows_(torch.zeros(8, h), torch.zeros(24, h), places.flatten(), places, torch.ones(8, 3))
    copied, of_rows = K.take_weighted_rows(x, torch.ones(8, 3, requires_grad=True), places.flatten(), places)
    (copied.sum() + of_rows.sum()).backward()
    logits = torch.zeros(8, 128, requires_grad=True)
    chosen, weights, shares = K.softmax_choice(logits, 8, normalize=True)
    (weights.sum() + K.routing_totals(logits, shares, chosen)[1].sum()).backward()
    K.expert_places(chosen, 128)
    rows, ends = torch.zeros(256, h, dtype=torch.bfloat16), torch.tensor([128, 256], dtype=torch.int32)
    for matrices in (torch.zeros(2, h, 256).bfloat16(), torch.zeros(2, 256, h).bfloat16().transpose(1, 2)):
        K.grouped_product(rows, matrices, ends)
    p, grad, settings = torch.zeros(h), x[0].detach(), K.AdamSettings(weight_decay=0.1)
    for made in (
        K.WholeState.of(p, torch.bfloat16),
        K.WholeState.of(p, torch.float16),
        K.SplitState.of(p),
        K.SplitState.of(p, torch.bfloat16),
        K.QuantizedState.of(p),
    ):
        made.master()
        for grad_scale in (0.5, torch.tensor(0.5)):
            K.adam_step(made, grad, settings, step=1, grad_scale=grad_scale, start=1 << 33)
        K.adam_step(made, grad.half(), K.AdamSettings(weight_decay=0.1, adamw_mode=False), step=1)
        K.adam_update_parameters(made, p, settings, step=1)
        K.adam_update_moments(made, p, settings, step=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        K.sum_of_squares(p.to(dtype))
        K.sum_of_magnitudes(grad.to(dtype))
        K.write_gradient(grad.to(dtype), torch.zeros(h), add=True)
        K.write_gradient(p.to(torch.bfloat16), torch.zeros(h, dtype=dtype))
    tensors = [torch.zeros(h), torch.zeros(3, 16)]
    numbers: dict[str, Any] = dict(betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, corrections=(0.1, 0.2))
    for some in (tensors, [torch.zeros(5)]):
        copies = [one.to(torch.bfloat16) for one in some]
        K.lamb_moment_lists(some, some, some, some, **numbers)
        for copied in (None, copies, [one.half() for one in some]):
            K.adamw_lists(some, some, some, some, copied, lr=0.1, **numbers)
        del (rest := dict(numbers))["betas"]
        K.lamb_apply_lists(some, some, some, copies, torch.zeros(len(some)), **rest)
        K.lion_lists(some, some, some, None, lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
        K.average_lists(some, some, copies, momentum=0.9, nesterov=True)
        K.apply_lists(some, copies, copies, keep=0.9, rate=0.1)
    for wide in (32, 5):
        matrices, rows, columns = [torch.zeros(8, wide)] * 2, [torch.ones(8)] * 2, [torch.ones(wide)] * 2
        K.square_sum_lists(matrices)
        K.factored_limit_lists(matrices, rows, columns, floor=0.0, clip_threshold=1.0)
        K.came_distance_lists(matrices, matrices, rows, columns, clip_threshold=1.0)
        copies, ones = [one.to(torch.bfloat16) for one in matrices], torch.ones(2)
        K.factored_apply_lists(matrices, matrices, rows, columns, copies, ones, ones, ones, floor=1e-6)
        came: dict[str, Any] = dict(means=matrices, beta1=0.9, confidence=(rows, columns))
        K.factored_apply_lists(matrices, matrices, rows, columns, None, ones, ones, ones, **came)
    assert compiler.compiled == {
        "factored_lists._sums",
        "factored_lists._add_parts",
        "factored_lists._apply",
        "tensor_lists._lamb_moments",
        "tensor_lists._sum_tiles",
        "tensor_lists._lamb_apply",
        "tensor_lists._adamw",
        "tensor_lists._lion",
        "tensor_lists._average",
        "tensor_lists._apply",
        "norm_passes.normalise",
        "norm_passes.square_sums",
        "norm_passes.moments",
        "norm_passes.joined_moments",
        "norm_passes.gradient_sums",
        "norm_passes.gradients",
        "norm_passes.sum_parts",
        "activations._gated",
        "activations._gated_cast",
        "activations._gated_gradients",
        "activations._weighted",
        "activations._weighted_gradients",
        "rotary._rotate",
        "merge_attention._merge",
        "pair_attention._attend",
        "pair_attention._dq",
        "pair_attention._dkv",
        "pair_attention._dbias",
        "token_rows._take",
        "token_rows._sum",
        "token_rows._add",
        "token_rows._sum_gradients",
        "expert_choice._chosen",
        "expert_choice._choice_gradients",
        "expert_choice._totals",
        "expert_places._count",
        "expert_places._add_up",
        "expert_places._place",
        "grouped_products._list_tiles",
        "grouped_products._rows_times",
        "fp8_casts._rows",
        "fp8_casts._amax",
        "fp8_casts._columns",
        "fp8_casts._scaled",
        "fp8_casts._turn",
        "cross_entropy._sums",
        "cross_entropy._gradient",
        "cross_entropy._losses_and_gradient",
        "cross_entropy._multiply",
        "dropout._dropout",
        "adam._elementwise",
        "adam._quantized",
        "float_bits._split",
        "float_bits._join",
        "grad_pass._pass",
        "grad_pass._write",
    }
