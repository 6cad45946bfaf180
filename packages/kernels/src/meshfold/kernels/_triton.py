"""Tools of the Triton kernels: their launch, their grids, and the hash of random_bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

P = TypeVar("P")


class _Compiled(NamedTuple):
    """A kernel that was compiled for arguments of one kind, and what its launcher takes."""

    kernel: Any  # kept, since keys have its id
    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]


_compiled: dict[tuple[object, ...], _Compiled] = {}
_MOST_COMPILED = 4096  # more kinds of arguments than models have; they are found again after that
_SMALL, _WIDE = 1 << 31, 1 << 63


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *arguments: Any, **settings: Any) -> None:
    """Run ``kernel`` over ``grid`` on the device of ``on``; an empty grid is no work.

    Triton launches on the current device, which need not be the tensor's. Its own launch looks at every argument, which takes the
    host several times as long as a launch by torch. Here the first launch with arguments of one kind goes that way, and later ones
    call the compiled kernel with addresses.
    """
    if 0 in grid:
        return
    if not on.is_cuda or torch.version.hip is not None:
        kernel[grid](*arguments, **settings)
        return
    device: int = on.device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, on, *arguments, **settings)
        return
    known = _kind(kernel, device, arguments, settings)
    if known is None or _is_observed():
        kernel[grid](*arguments, **settings)
        return
    key, given = known
    compiled = _compiled.get(key)
    if compiled is None:
        _remember(key, kernel, kernel[grid](*arguments, **settings), len(arguments), settings)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    run, function, metadata = compiled.run, compiled.function, compiled.metadata
    run(x, y, z, stream, function, metadata, None, None, None, *given, *compiled.constants)


class Prepared:
    """A kernel with all that a launch is made of but the tensors, for launches that a model makes again and again.

    The caller keeps one for each combination of dtypes, shapes and numbers. From the second launch on it calls the compiled kernel,
    and looks only at the addresses.
    """

    __slots__ = ("_compiled", "_device", "_grid", "_kernel", "_numbers", "_settings")

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], **settings: Any) -> None:
        """Args:
        kernel: takes tensors, then numbers, then settings.
        grid: of all launches; an empty one is no work.
        numbers: all arguments that are no tensors.
        settings: constants of the kernel, and what Triton takes, such as ``num_warps``.
        """
        self._kernel, self._grid, self._numbers, self._settings = kernel, grid, numbers, settings
        self._compiled: Callable[..., None] | None = None
        self._device = -1

    def run(self, *tensors: Tensor) -> None:
        """Run the kernel on tensors of the same dtypes as all others that it is given, on one device."""
        compiled = self._compiled
        if compiled is not None:
            addresses = [tensor.data_ptr() for tensor in tensors if tensor.is_cuda]
            low = 0
            for address in addresses:
                low |= address
            device = self._device
            # As when it was compiled: multiples of 16, all on the GPU, which is the current device.
            as_compiled = not low & 15 and len(addresses) == len(tensors) and device == torch._C._cuda_getDevice()
            if as_compiled and not _is_observed():
                compiled(torch._C._cuda_getCurrentRawStream(device), addresses)
                return
        launch(self._kernel, self._grid, tensors[0], *tensors, *self._numbers, **self._settings)
        if compiled is None and 0 not in self._grid:
            self._find(tensors)

    def _find(self, tensors: Sequence[Tensor]) -> None:
        """Find the compiled kernel, if Triton has compiled it for addresses that are multiples of 16."""
        on = tensors[0]
        if not on.is_cuda or any(tensor.data_ptr() % 16 for tensor in tensors):
            return
        device: int = on.device.index
        known = _kind(self._kernel, device, (*tensors, *self._numbers), self._settings)
        found = None if known is None else _compiled.get(known[0])
        if found is None:
            return
        (x, y, z), numbers = (*self._grid, 1, 1)[:3], self._numbers
        run, function, metadata, constants = found.run, found.function, found.metadata, found.constants

        def compiled(stream: int, addresses: list[int]) -> None:
            run(x, y, z, stream, function, metadata, None, None, None, *addresses, *numbers, *constants)

        self._compiled, self._device = compiled, device


def remember(known: dict[Any, Any], key: object, made: P) -> P:
    """Keep what was made for a key; at most as many as there are kinds of arguments."""
    if len(known) >= _MOST_COMPILED:
        known.clear()
    known[key] = made
    return made


def _kind(
    kernel: Any, device: int, arguments: Sequence[Any], settings: Mapping[str, Any]
) -> tuple[tuple[object, ...], list[Any]] | None:
    """Return all that Triton may compile a kernel for, and its arguments with addresses for tensors; None if unknown.

    Triton asks for the dtype of a tensor and whether its address is a multiple of 16; whether an integer is 1, or a multiple of 16,
    and which integer type holds it.
    """
    kind: list[object] = [id(kernel), device, *settings, *settings.values()]
    given: list[Any] = []
    note, give = kind.append, given.append
    for each in arguments:
        of = type(each)
        if of is int:
            note(_integers.get(each) or _kind_of_integer(each))
            give(each)
        elif of is Tensor or isinstance(each, Tensor):
            if not each.is_cuda:  # for Triton to refuse, or to find its address on the device
                return None
            address = each.data_ptr()
            note(each.dtype)
            note(address % 16)
            give(address)
        elif of is float or of is bool or each is None:
            note(of)
            note(None if of is float else each)
            give(each)
        else:
            return None
    return tuple(kind), given


_integers: dict[int, str] = {}  # most arguments of a model's kernels are the same few integers


def _kind_of_integer(number: int) -> str:
    """Return what Triton tells apart of an integer."""
    bits = 32 if -_SMALL <= number < _SMALL else 64 if number < _WIDE else 65
    kind = f"{bits} {number == 1} {number % 16 == 0}"
    if len(_integers) < _MOST_COMPILED:
        _integers[number] = kind
    return kind


def _is_observed() -> bool:
    """Return True while hooks, such as a profiler's, see Triton's launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    seen = enter is not None and getattr(enter, "calls", True)
    return bool(seen or (leave is not None and getattr(leave, "calls", True)))


def _remember(key: tuple[object, ...], kernel: Any, compiled: Any, given: int, settings: Mapping[str, Any]) -> None:
    """Keep the kernel that Triton has launched for arguments of a kind.

    Not one whose constants are among the arguments or have defaults, since the kind has only those that are given by name.
    """
    rest = kernel.arg_names[given:]
    if (
        kernel.pre_run_hooks
        or any(each.is_constexpr for each in kernel.params[:given])
        or not set(rest) <= settings.keys()
    ):
        return
    if len(_compiled) >= _MOST_COMPILED:
        _compiled.clear()
    constants = tuple(settings[name] for name in rest)
    _compiled[key] = _Compiled(kernel, compiled.run, compiled.function, compiled.packed_metadata, constants)


def cdiv(size: int, block: int) -> int:
    """Return the number of blocks that cover a size. Triton's own, which kernels can call too, takes the host 10 times as long."""
    return -(-size // block)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(blocks: int, on: Tensor, per_multiprocessor: int = 4) -> int:
    """Return the number of programs that share ``blocks`` blocks of work when each goes through several of them."""
    return min(blocks, _multiprocessors(on.device.index) * per_multiprocessor if on.is_cuda else 3)


def tile(columns: int, elements: int = 2048, widest: int = 65536) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a block of about ``elements`` elements over rows of ``columns``; powers of two."""
    wide = min(1 << max(columns - 1, 0).bit_length(), widest)
    rows = max(1, min(32, elements // wide))
    size = rows * wide
    return rows, wide, 4 if size <= 2048 else 8 if size <= 8192 else 16 if size <= 32768 else 32


@triton.jit
def bits_at(state, index):
    """Return the bits ``splitmix64(state + index * GOLDEN)`` as uint64."""
    z = state.to(tl.uint64) + index.to(tl.uint64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
