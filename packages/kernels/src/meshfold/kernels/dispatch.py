"""Choice of a kernel's implementation between the torch reference, Triton and numba.

Every family of kernels is a module, or the folder ``adam``. The functions that have other implementations are the reference:

- ``norms.py``: formulas, public functions, autograd, and the reference in plain torch, which runs everywhere, in every dtype.
- ``norms_triton.py``: functions of the same names in Triton, for CUDA tensors in float32, bfloat16 and float16.
- ``norms_numba.py``, where torch operations are slow: the same in numba, for CPU tensors.

``"auto"`` uses Triton on a GPU, numba on a CPU if the family has it, and else the reference. Inside torch.compile it is the
reference: Inductor turns it into Triton itself and fuses it with its neighbours, except in ``fp8_casts`` and
``pair_attention``. :func:`use` or the environment variable ``MESHFOLD_KERNELS`` chooses by hand.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

ENVIRONMENT = "MESHFOLD_KERNELS"
CHOICES = ("auto", "reference", "triton", "numba")

# Each family: its public functions, and its implementations besides the reference.
FAMILIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "norms": ("rms_norm, layer_norm, add_rms_norm, add_layer_norm and their pieces", ("triton",)),
    "activations": ("swiglu, weighted_swiglu, swiglu2, geglu2", ("triton",)),
    "rotary": ("apply_rotary", ("triton",)),
    "merge_attention": ("merge_attention_", ("triton",)),
    "pair_attention": ("pair_attention, pair_attention_forward, pair_attention_backward", ("triton",)),
    "token_rows": ("take_rows, take_weighted_rows, sum_rows, add_rows_", ("triton",)),
    "expert_choice": ("softmax_choice, routing_totals", ("triton",)),
    "expert_places": ("expert_places", ("triton",)),
    "grouped_products": ("grouped_product", ("triton",)),
    "fp8_casts": ("to_fp8", ("triton",)),
    "cross_entropy": ("cross_entropy and its pieces, linear_cross_entropy, linear_log_probs", ("triton",)),
    "dropout": ("dropout", ("triton", "numba")),
    "float_bits": ("split_master, join_master", ("triton", "numba")),
    "adam": (
        "adam_step, adam_update_parameters, adam_update_moments",
        ("triton", "numba"),
    ),
    "tensor_lists": (
        "lamb_moment_lists, lamb_apply_lists, adamw_lists, lion_lists, average_lists, apply_lists",
        ("triton",),
    ),
    "factored_lists": (
        "square_sum_lists, factored_limit_lists, came_distance_lists, factored_apply_lists",
        ("triton",),
    ),
    "layerwise": ("lamb_direction, lars_step", ("numba",)),
    "grad_pass": (
        "write_gradient, sum_of_squares, sum_of_magnitudes, largest_magnitude",
        ("triton", "numba"),
    ),
}

_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

F = TypeVar("F", bound=Callable[..., object])
P = TypeVar("P")
Counted = Callable[[Callable[..., object]], Callable[..., object]]


class KernelError(RuntimeError):
    """An implementation that cannot run on the given tensor: the message says why and what to change."""


@dataclass(frozen=True, kw_only=True)
class Availability:
    """One row of :func:`available`.

    Attributes:
        family: the module of kernels.
        kernels: the public functions it serves.
        implementations: each existing one, with ``"ok"`` or the reason why it cannot be used here.
        cpu: the implementation for a float32 tensor on the CPU under the current choice; "" if it would be refused.
        cuda: the same for a CUDA tensor; "" if it would be refused or there is no CUDA device.
    """

    family: str
    kernels: str
    implementations: Mapping[str, str]
    cpu: str
    cuda: str


class _Restore(AbstractContextManager[None]):
    """Context manager that restores the earlier choice on exit."""

    def __init__(self, before: str) -> None:
        self._before = before

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _choice
        _choice = self._before


# A global, not a context variable: autograd's backward threads must see it too.
_choice: str | None = None


def _check(choice: str, source: str) -> str:
    if choice not in CHOICES:
        raise ValueError(f"{source} is {choice!r}; it must be one of {', '.join(map(repr, CHOICES))}")
    return choice


def choice() -> str:
    """Return the requested implementation: the last :func:`use`, else the environment's, else ``"auto"``."""
    global _choice
    if _choice is None:
        _choice = _check(os.environ.get(ENVIRONMENT, "auto"), f"the environment variable {ENVIRONMENT}")
    return _choice


def use(implementation: str) -> AbstractContextManager[None]:
    """Choose the implementation of kernels from now on; as a context manager, until its block ends.

    ``with use("reference"): ...`` or simply ``use("reference")``. A family without the chosen implementation uses its reference. A
    family that has it but cannot run it on the given tensor raises :class:`KernelError`. A backward runs where its forward ran.

    Args:
        implementation: ``"auto"``, ``"reference"``, ``"triton"`` or ``"numba"``.

    Raises:
        ValueError: for any other word.
    """
    global _choice
    before = choice()
    _choice = _check(implementation, "the implementation given to use()")
    return _Restore(before)


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _triton_interprets() -> bool:
    """Return True if Triton runs kernels in its interpreter, on the CPU: slow, for tests."""
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def _obstacle(implementation: str, device: str, dtype: torch.dtype) -> str:
    """Return why an implementation cannot take a tensor; "" if it can."""
    if implementation == "triton":
        if not _installed("triton"):
            return "triton is not installed"
        if dtype not in _TRITON_DTYPES:
            return f"the Triton kernels compute in float32 and take no {dtype}"
        if device == "cuda" or (device == "cpu" and _triton_interprets()):
            return ""
        return f"Triton runs on CUDA devices, not on {device} (on the CPU only with TRITON_INTERPRET=1)"
    if implementation == "numba":
        if not _installed("numba"):
            return "numba is not installed"
        return "" if device == "cpu" else f"numba kernels run on the CPU, not on {device}"
    return ""


_BEST = {"cuda": "triton", "cpu": "numba"}
"""Implementation that is chosen by device, where there is one."""


def _uses(implementation: str, family: str) -> bool:
    """Return True if the current choice takes the family's kernels in an implementation, on its device."""
    return choice() in ("auto", implementation) and implementation in FAMILIES[family][1]


def implementation(family: str, device: str, dtype: torch.dtype) -> str:
    """Return the implementation for a tensor under the current choice: "reference", "triton" or "numba".

    Raises:
        KernelError: if the chosen one exists for this family but cannot take such a tensor.
    """
    twins = FAMILIES[family][1]
    chosen = choice()
    if chosen == "auto":
        best = _BEST.get(device, "reference")
        return best if best in twins and not _obstacle(best, device, dtype) else "reference"
    if chosen not in twins:
        return "reference"
    if reason := _obstacle(chosen, device, dtype):
        raise KernelError(
            f"kernels {family!r}: {chosen!r} was chosen, but {reason}. Choose another with "
            f"meshfold.kernels.use(...) or {ENVIRONMENT}: 'auto' takes what fits each tensor"
        )
    return chosen


def has_memory(x: Tensor) -> bool:
    """Return True for a tensor or a parameter of any class, whose memory a kernel can read; not for other subclasses.

    A fake or functional tensor, or a DTensor, has none of its own. torch lets ``isinstance`` take all of them for parameters.
    """
    kind = type(x)
    return kind is Tensor or issubclass(kind, torch.nn.Parameter)


def twin(reference: F, x: Tensor) -> F:
    """Return the function that computes ``reference`` on ``x``: itself, or the function of the same name in a twin module.

    ``norms_triton.py`` and ``norms_numba.py`` are next to ``norms.py``; their functions have the reference's signature.
    """
    if torch.compiler.is_compiling() or not has_memory(x):
        return reference
    if x.is_cuda:
        kind = (reference, x.dtype, choice())
        found = _on_cuda.get(kind)
        if found is None:
            found = _on_cuda[kind] = _twin(reference, x)
        return cast(F, found)
    return _as_counted(reference, x.dtype) if x.is_meta else _twin(reference, x)


_on_cuda: dict[
    tuple[object, torch.dtype, str], Callable[..., object]
] = {}  # a model asks for the same few at every call


def _twin(reference: F, x: Tensor) -> F:
    name = implementation(_family(reference), x.device.type, x.dtype)
    if name == "reference":
        return reference
    return cast(F, getattr(_load(implementation_module(_family(reference), name)), reference.__name__))


class _Counting(NamedTuple):
    """A function that counts kernels on meta tensors, and the implementation whose kernels it counts."""

    counted: Counted
    implementation: str


# A global like the choice: backward runs in threads of autograd.
_counting: _Counting | None = None


@contextmanager
def count_kernels(counted: Counted, device: str = "cuda") -> Iterator[None]:
    """Context manager: on meta tensors, a function that a device has a kernel for runs as ``counted(reference)``.

    There the reference's many operators represent one kernel, which reads its inputs and writes its outputs once.

    Args:
        counted: returns a function that calls the reference and counts it as one.
        device: type of the device that meta tensors stand for: ``"cuda"`` runs kernels in Triton, ``"cpu"`` in numba.
    """
    global _counting
    before, _counting = _counting, _Counting(counted, _BEST[device])
    try:
        yield
    finally:
        _counting = before


def on_gpu(x: Tensor) -> bool:
    """Return True for a tensor on a GPU, and for a meta tensor that stands for one inside of :func:`count_kernels`."""
    return x.is_cuda or (x.is_meta and _counting is not None and _counting.implementation == _BEST["cuda"])


Some = Callable[[Sequence[Any]], Iterable[Any]]
_some_parts: Some | None = None


@contextmanager
def count_parts(some: Some) -> Iterator[None]:
    """Context manager: on meta tensors, references that compute in many equal parts run ``some(parts)`` of them.

    A count of memory runs a few parts; one of operators runs one, and counts it as many.

    Args:
        some: takes all parts, of which the last may be smaller, and yields those that run.
    """
    global _some_parts
    before, _some_parts = _some_parts, some
    try:
        yield
    finally:
        _some_parts = before


def parts_to_run(parts: Sequence[P], x: Tensor) -> Iterable[P]:
    """Return the parts of a reference that run: all, or those that :func:`count_parts` takes if ``x`` is a meta tensor."""
    return parts if _some_parts is None or not x.is_meta else _some_parts(parts)


def _as_counted(reference: F, dtype: torch.dtype) -> F:
    """Return the reference for meta tensors, counted as one kernel if the device that they stand for would run one."""
    if _counting is None:
        return reference
    kind, family = _counting.implementation, _family(reference)
    takes = dtype in _TRITON_DTYPES if kind == "triton" else not _obstacle(kind, "cpu", dtype)
    return cast(F, _counting.counted(reference)) if takes and _uses(kind, family) else reference


def reference_of(family: str) -> str:
    """Return the module that holds a family's reference."""
    return f"meshfold.kernels.{'adam.update' if family == 'adam' else family}"


def implementation_module(family: str, implementation: str) -> str:
    """Return the module that holds a family's implementation in Triton or numba: ``...norms_triton``."""
    return f"{reference_of(family)}_{implementation}"


def _family(reference: Callable[..., object]) -> str:
    return reference.__module__.split(".")[2]


@functools.cache
def _load(module: str) -> object:
    return importlib.import_module(module)


def piece(reference: F, x: Tensor, *others: Tensor | None) -> F:
    """Return :func:`twin` for a piece of a kernel, which has no backward of its own.

    Raises:
        KernelError: if autograd would have to go through the piece, where it would silently lose gradients.
    """
    if torch.compiler.is_compiling():
        return reference
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        raise KernelError(
            f"a piece of {_family(reference)!r} was called on a tensor that requires a gradient, and these functions have no "
            "backward: call it inside a torch.autograd.Function or under torch.no_grad(), or use the whole kernel"
        )
    return twin(reference, x)


def available() -> tuple[Availability, ...]:
    """Return what can be used, family by family, for ``meshfold doctor``. Imports numba or Triton only if it is chosen."""
    cuda_seen = torch.cuda.is_available()

    def state(name: str) -> str:
        if name == "triton" and not cuda_seen and _installed("triton"):
            return "no CUDA device"
        return _obstacle(name, "cuda" if name == "triton" else "cpu", torch.float32) or "ok"

    def picked(family: str, device: str) -> str:
        try:
            return implementation(family, device, torch.float32)
        except KernelError:
            return ""

    return tuple(
        Availability(
            family=family,
            kernels=kernels,
            implementations={name: state(name) for name in ("reference", *twins)},
            cpu=picked(family, "cpu"),
            cuda=picked(family, "cuda") if cuda_seen else "",
        )
        for family, (kernels, twins) in FAMILIES.items()
    )
