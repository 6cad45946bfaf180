"""What a person can get wrong, and what the message says; GPU kernels as far as a machine without one can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshfold.mesh import Mesh
from meshfold.mesh.errors import LayoutError
from meshfold.sequence import attention, kernels, sequence_parallel, sequence_sharding, traffic


def tensors(*, s: int = 4, heads: int = 4, kv_heads: int = 2, d: int = 8, dtype: torch.dtype = torch.float32) -> Any:
    return tuple(torch.zeros(1, s, h, d, dtype=dtype) for h in (heads, kv_heads, kv_heads))


FOUR = {"seq": 4}
WRONG: list[tuple[dict[str, int], dict[str, Any], str]] = [
    (FOUR, dict(mode="rings"), "Did you mean 'ring'"),
    (FOUR, dict(mode="ulises"), "Did you mean 'ulysses'"),
    (FOUR, dict(mode="megatron"), "meshfold.tensor_parallel"),
    (FOUR, dict(mode="ring_ulysses"), "axis ring × ulysses, but .* over seq: write mode='ring'"),
    ({"ring": 2, "ulysses": 2}, dict(mode="ring"), "write mode='ring_ulysses'"),
    (FOUR, dict(order="zig-zag"), "Did you mean 'zigzag'"),
    (FOUR, dict(length=30), "each of 4 ranks 8 of them .32 with padding., but q has 4"),
    (FOUR, dict(length=0), "at least one"),
    (FOUR, dict(window=0), "window=0"),
    (FOUR, dict(window=2.5), "window=2.5"),
    (FOUR, dict(documents=(0, 4)), "end with the length of the sequence, here 16"),
    (FOUR, dict(documents=(0, 9, 4, 16)), "increase"),
    (FOUR, dict(dropout=0.1), "dropout=0.1.*set the model's attention dropout to 0"),
    (FOUR, dict(kernel="flesh"), "Did you mean 'flash'"),
    (FOUR, dict(kernel="cudnn"), "does not run on cpu"),
    (
        {"seq": 3},
        dict(mode="ulysses"),
        "4 query heads cannot be split over 3 ranks of ulysses: give it 2, 4 ranks",
    ),
    ({"seq": 8}, dict(mode="ulysses"), "use mode='ring'"),
]


@pytest.mark.parametrize(("axes", "given", "what"), WRONG, ids=str)
def test_settings(axes: dict[str, int], given: dict[str, Any], what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        attention(*tensors(), mesh=Mesh(axes, rank=0), **given)


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        (((1, 4, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8)), "the same b and s"),
        (((1, 4, 8), (1, 4, 8), (1, 4, 8)), r"q must be \[b, s, heads, d\]"),
        (((1, 4, 4, 8), (1, 4, 3, 8), (1, 4, 3, 8)), "3 heads of keys divide the 4 of queries"),
        (((1, 4, 4, 8), (1, 4, 2, 6), (1, 4, 2, 8)), "equally wide"),
    ],
)
def test_shapes(shapes: tuple[tuple[int, ...], ...], what: str) -> None:
    with pytest.raises(LayoutError, match=what):
        attention(*(torch.zeros(shape) for shape in shapes), mesh=Mesh({}))


def test_dtypes() -> None:
    q, k, v = tensors()
    with pytest.raises(LayoutError, match=r"one floating dtype, got torch\.float32, torch\.float32 and torch\.float64"):
        attention(q, k, v.double(), mesh=Mesh({}))


def test_models_are_refused_before_they_are_changed() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(LayoutError, match="Did you mean 'ring'"):
        sequence_parallel(model, Mesh({}), "rang")
    assert not model._forward_pre_hooks


def test_pure_functions_refuse_too() -> None:
    with pytest.raises(LayoutError, match="write mode='ring'"):
        sequence_sharding(8, Mesh({"seq": 2}, rank=0), "ring_ulysses")
    with pytest.raises(LayoutError, match="cannot be split"):
        traffic(8, 3, 3, 8, Mesh({"seq": 2}, rank=0), "ulysses")


@pytest.mark.parametrize("kernel", [kernels.FlashCUDA(), kernels.CuDNN(), kernels.Efficient()])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_gpu_operations_take_these_arguments(kernel: kernels.Kernel, kv_heads: int) -> None:
    """On tensors without values: names, order and number of arguments are those of this version of torch."""

    def empty(s: int, heads: int) -> Tensor:
        return torch.empty(2, s, heads, 16, dtype=torch.bfloat16, device="meta")

    q, k = empty(8, 4), empty(12, kv_heads)
    pairs = kernels.Pairs(q, k, k, False, 0.25)
    out, lse = kernel.forward(pairs)
    assert out.shape == q.shape and lse.shape == (2, 4, 8) and lse.dtype is torch.float32
    gradients = kernel.backward(pairs, q, q, lse)
    assert [x.shape for x in gradients] == [q.shape, k.shape, k.shape]


def test_which_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGPU:
        """What choosing looks at, of a tensor that is not here."""

        def __init__(self, d: int, dtype: torch.dtype) -> None:
            self.shape, self.dtype, self.device, self.is_cuda = (
                (1, 8, 4, d),
                dtype,
                torch.device("cuda", 0),
                True,
            )

    def chosen(d: int, dtype: torch.dtype, *, name: str = "auto", dv: int = 0, shapes: int = 3) -> str:
        q: Any = OnGPU(d, dtype)
        v: Any = OnGPU(dv or d, dtype)
        return type(kernels.choose(name, q, q, v, shapes)).__name__

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    bf16 = torch.bfloat16
    assert chosen(128, bf16) == "CuDNN" and chosen(128, torch.float16, name="flash") == "FlashCUDA"
    assert chosen(128, bf16, shapes=9) == "FlashCUDA"  # cuDNN would build a graph for each shape
    assert chosen(256, bf16) == "FlashCUDA"
    assert chosen(128, torch.float32) == "Efficient"
    assert chosen(128, torch.float64) == "Reference" and chosen(128, bf16, dv=64) == "Reference"
    with pytest.raises(LayoutError, match=r"takes torch\.float16, torch\.bfloat16, not torch\.float32"):
        chosen(128, torch.float32, name="flash")
    with pytest.raises(LayoutError, match="multiple of 8, not 100"):
        chosen(100, bf16, name="flash")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert chosen(128, bf16) == "FlashCUDA"
    x = torch.zeros(1, 2, 2, 8)
    assert isinstance(kernels.choose("auto", x, x, x), kernels.FlashCPU)
    assert isinstance(kernels.choose("auto", x, x, x[..., :4]), kernels.Reference)
