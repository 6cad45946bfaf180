"""Random bits as a function of only (seed, key, global element index).

However a tensor is split, the rank that holds element ``i`` computes the same 64 bits for it, on any device and with
any implementation. The function is counter-based, two rounds of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014)::

    state = splitmix64(splitmix64(seed) ^ splitmix64(key))
    bits  = splitmix64(state + index * 0x9E3779B97F4A7C15)        all modulo 2**64

The state is symmetric in seed and key: (1, 2) and (2, 1) are one stream, and so are all (s, s). So make keys by hashing
a name, never from small numbers that may be another run's seed.

torch has no unsigned 64-bit arithmetic, so the reference computes in int64, which wraps in the same way. A logical shift is an
arithmetic one with the copies of the sign masked off. The numba and Triton versions of the hash are next to this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """Return the int64 with the same 64 bits as ``value`` modulo 2**64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


_GOLDEN, _MIX_1, _MIX_2 = signed(GOLDEN), signed(MIX_1), signed(MIX_2)


def splitmix64(z: int) -> int:
    """One step of SplitMix64 on Python integers: 64 bits in, 64 well-mixed bits out, as an unsigned number."""
    z = (z + GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * MIX_2) & _MASK
    return z ^ (z >> 31)


def splitmix64_tensor(z: Tensor) -> Tensor:
    """:func:`splitmix64` on every element of an int64 tensor; returns a new one."""
    z = z + _GOLDEN
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_2
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def stream(seed: int | Tensor, key: int | Tensor, device: torch.device | None = None) -> int | Tensor:
    """Return the state of the stream that belongs to ``(seed, key)``: a signed int64, or a 0-d int64 tensor.

    A tensor when either argument is one, and always inside torch.compile (then on ``device``), where Python integers
    may be symbols of 64 bits that cannot hold the products.
    """
    if isinstance(seed, int) and isinstance(key, int) and not torch.compiler.is_compiling():
        return signed(splitmix64(splitmix64(seed) ^ splitmix64(key)))
    return splitmix64_tensor(splitmix64_tensor(_scalar(seed, device)) ^ splitmix64_tensor(_scalar(key, device)))


def _scalar(value: int | Tensor, device: torch.device | None) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(torch.int64)
    if not torch.compiler.is_compiling():
        value = signed(value)
    return torch.full((), value, dtype=torch.int64, device=device)


def plain(index: Tensor) -> Tensor:
    """Return non-negative int64 numbers unchanged, kept out of Inductor's index arithmetic.

    Inductor treats sums and products of an arange as addresses and computes them itself: in 32 bits on a GPU, and with
    strides on a CPU that do not wrap as 64-bit products must. A bit operation makes them ordinary numbers.
    """
    return index & ((1 << 63) - 1) if torch.compiler.is_compiling() else index


def bits_of(state: int | Tensor, index: Tensor) -> Tensor:
    """Return the 64 bits of every element index under a stream's state, as int64."""
    return splitmix64_tensor(plain(index) * _GOLDEN + state)


def random_bits(seed: int | Tensor, key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for every global element index.

    Args:
        seed: the run's seed (any Python integer counts modulo 2**64; inside torch.compile it must fit int64), or a
            0-d int64 tensor, so that a compiled step or a CUDA graph need not be rebuilt for each seed.
        key: hash of the numbers' purpose: a parameter's name, a dropout layer at a step.
        index: global element indices, int64, any shape.

    Returns:
        int64 of the shape of ``index``, holding the bits of the unsigned number.
    """
    if index.dtype is not torch.int64:
        raise TypeError(f"element indices must be int64, got {index.dtype}")
    return bits_of(stream(seed, key, index.device), index)


def top24(bits: Tensor) -> Tensor:
    """Return the top 24 of 64 bits as int64 in [0, 2**24): divided by 2**24 a uniform number, exact in float32."""
    return (bits >> 40) & ((1 << 24) - 1)
