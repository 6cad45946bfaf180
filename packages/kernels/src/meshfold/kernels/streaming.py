"""Copies past the caches: what will not be read soon need not be brought in to be written over. For numba's kernels.

A core that writes to memory reads the line first, unless it is told to write past the caches. A pass that reads 14 bytes an
element and writes 12 others then moves 26 instead of 38.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

LINE = 64
"""Bytes that are written at a time."""


@intrinsic  # type: ignore[untyped-decorator]
def _write_line(typingctx: Any, target: Any, at: Any, source: Any, of: Any) -> Any:
    """64 bytes of an array from element ``of`` on, to another from element ``at`` on, whose address is a multiple of 64."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()

        def place(number: int) -> Any:
            array = context.make_array(signature.args[number])(context, builder, arguments[number])
            return builder.bitcast(builder.gep(array.data, [arguments[number + 1]], inbounds=True), line)

        value = builder.load(place(2))
        value.align = 1
        written = builder.store(value, place(0))
        written.align = LINE
        one = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        written.set_metadata("nontemporal", one)
        return context.get_dummy_value()

    return types.void(target, at, source, of), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _address(typingctx: Any, array: Any) -> Any:
    """Where an array begins; its ``ctypes.data``, which takes as long as a thousand elements do."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


@intrinsic  # type: ignore[untyped-decorator]
def written_out(typingctx: Any) -> Any:
    """Others see what was written past the caches before they see what is written from now on."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True)  # type: ignore[untyped-decorator]
def stream(target: Any, at: int, source: Any, count: int) -> None:
    """Copy the first elements of a flat array to another of the same dtype, from ``at`` on.

    ``written_out`` must follow before another thread looks. No views: to make one of memory that threads share takes as long
    as to copy hundreds of elements.
    """
    each = LINE // target.itemsize
    ahead = (
        -(_address(target) + at * target.itemsize) % LINE
    ) // target.itemsize  # up to the first whole line
    begin = min(ahead, count)
    for i in range(begin):
        target[at + i] = source[i]
    end = begin + (count - begin) // each * each
    for i in range(begin, end, each):
        _write_line(target, at + i, source, i)
    for i in range(end, count):
        target[at + i] = source[i]
