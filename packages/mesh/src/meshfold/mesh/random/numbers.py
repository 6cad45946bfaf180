"""Random numbers by global element: a number depends on (seed, key, flat global index) and on nothing else.

The stream is counter based, in 64-bit arithmetic that wraps (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", 2014, for splitmix64):

    splitmix64(x): z = x + G;  z = (z ^ z >> 30) * M1;  z = (z ^ z >> 27) * M2;  return z ^ z >> 31
    state = splitmix64(splitmix64(seed) ^ splitmix64(key))
    bits  = splitmix64(state + index * G)
    uniform = (bits >> 40) * 2**-24 in float32 and narrower, (bits >> 11) * 2**-53 in float64

with G = 0x9E3779B97F4A7C15, M1 = 0xBF58476D1CE4E5B9, M2 = 0x94D049BB133111EB and logical shifts. The state is symmetric
in seed and key, so keys should be hashes (`key_of`), never small numbers that may be another stream's seed.

Normal numbers are computed only by additions, multiplications, divisions and square roots: IEEE 754 fixes how each is rounded. So
uniform and normal numbers have the same bits for every split of a tensor, number of threads and device. This file makes them
with torch; on a CPU a process that draws many uses the loops of ``numbers_numba.py``, which give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from meshfold.mesh.random.loops import Loop, NormalLoop, UniformLoop, is_compiled

_WORD = (1 << 64) - 1
GOLDEN, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SECOND_STREAM = 0x5851F42D4C957F2D  # xored into a key for the second uniform number of a normal

# 2 atanh(s) = s P(s^2) for |s| <= 3 - 2 sqrt(2), and sin(2 pi y) = y Q(y^2) for |y| <= 1/4, interpolated at Chebyshev
# nodes; relative errors 1.2e-18 and 3.3e-19. Written out because library log and cos may differ in the last bit between
# vector and scalar code, and between devices.
LOG = (
    2.0,
    0.6666666666666765,
    0.3999999999930234,
    0.2857142876064168,
    0.22222197056726048,
    0.18183631680229329,
    0.1531252814836419,
    0.14809710360655276,
)
SIN = (
    6.283185307179586,
    -41.341702240399755,
    81.60524927607362,
    -76.70585975282492,
    42.058693925428685,
    -15.0946416761179,
    3.8199280942271643,
    -0.7177337921413454,
    0.10089695501646812,
)
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD

_BLOCK_ON_CPU = 1 << 17  # elements per block: on a CPU temporaries stay in cache,
_BLOCK_ON_DEVICE = 1 << 22  # on a GPU kernels outweigh launches; at most 8 temporaries of 8 bytes
_BLOCK_OF_LOOP = 1 << 22  # a loop has no temporaries but a float32 block for narrower dtypes


def key_of(name: str) -> int:
    """Return a stable 63-bit key for a name (a parameter's, a dropout call's): it fits a signed 64-bit kernel argument."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def stream_state(seed: int, key: int) -> int:
    """Return the state of the stream (seed, key), in [0, 2**64): a kernel needs only this and the element index."""
    return _splitmix(_splitmix(seed) ^ _splitmix(key))


def random_bits(seed: int, key: int, index: Tensor) -> Tensor:
    """Return 64 random bits an element.

    Shapes:
        index: ... (int64, flat global element index)  ->  ... (int64)
    """
    return _mix_(_counter(index * _signed(GOLDEN), seed, key))


def uniform(seed: int, key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform numbers in [0, 1): 53 random bits in float64, 24 in float32 (rounded from there to narrower dtypes).

    Shapes:
        index: ... (int64, flat global element index)  ->  ... (dtype)
    """
    return _uniform(index * _signed(GOLDEN), seed, key, dtype)


def normal(seed: int, key: int, index: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers: computed in float64, then rounded to the dtype.

    Shapes:
        index: ... (int64, flat global element index)  ->  ... (dtype)
    """
    return _normal(index * _signed(GOLDEN), seed, key).to(dtype)


def fill_uniform_(
    local: Tensor,
    coordinates: Sequence[Tensor],
    global_shape: Sequence[int],
    *,
    seed: int,
    key: int,
    low: float = 0.0,
    high: float = 1.0,
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> Tensor:
    """Fill a rank's block in place with uniform numbers in [low, high), determined by its global elements.

    A product within a rounding error of ``high`` may round to it.

    Shapes:
        local: n_0 n_1 ... (floating point, any strides); coordinates: one int64 vector of n_d global coordinates a dim

    Args:
        local: the block to fill.
        coordinates: for each dim, the global coordinate of every local position. One that is not below the global
            size is padding and filled with zero.
        global_shape: elements per dim, without padding.
        seed: the seed of the model.
        key: the stream, mostly ``key_of(name)``.
        low: least value.
        high: bound that is not reached.
        strides: elements by which the flat index grows along each dim; row-major over the global shape if left out.
        offset: the flat index at the origin.

    Raises:
        ValueError: if coordinates, shapes and strides do not belong together, or the dtype is not floating point.
    """
    dtype = torch.float64 if local.dtype == torch.float64 else torch.float32

    def sample(counter: Tensor) -> Tensor:
        return _uniform(counter, seed, key, dtype).mul_(high - low).add_(low)

    loop = UniformLoop(low=low, high=high, first=_first(seed, key))
    return _fill_(local, coordinates, global_shape, strides, offset, sample, loop)


def fill_normal_(
    local: Tensor,
    coordinates: Sequence[Tensor],
    global_shape: Sequence[int],
    *,
    seed: int,
    key: int,
    mean: float = 0.0,
    std: float = 1.0,
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> Tensor:
    """Fill a rank's block in place with normal numbers, determined by its global elements; otherwise as `fill_uniform_`.

    Computed in float64, then rounded to float32, then to narrower dtypes: a bfloat16 model is the float32 one, rounded.
    """

    def sample(counter: Tensor) -> Tensor:
        return _normal(counter, seed, key).mul_(std).add_(mean)

    loop = NormalLoop(mean=mean, std=std, first=_first(seed, key), second=_first(seed, key ^ SECOND_STREAM))
    return _fill_(local, coordinates, global_shape, strides, offset, sample, loop)


def fill_truncated_normal_(
    local: Tensor,
    coordinates: Sequence[Tensor],
    global_shape: Sequence[int],
    *,
    seed: int,
    key: int,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -2.0,
    high: float = 2.0,
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> Tensor:
    """Fill with normal numbers on the condition that they lie in [low, high]; otherwise as `fill_uniform_`.

    By the inverse of the normal distribution in float64, which devices may round differently in the last bit.
    """
    first, last = (low - mean) / std, (high - mean) / std
    if not first < last:
        raise ValueError(f"a normal number between {low} and {high} with std {std}: give low < high and std > 0")
    # ndtr is precise in the lower tail, so flip the sign if the range is above 0.
    sign = -1.0 if first > 0 else 1.0
    bounds = torch.special.ndtr(torch.tensor(sorted((sign * first, sign * last)), dtype=torch.float64))
    start, width = float(bounds[0]), float(bounds[1] - bounds[0])

    def sample(counter: Tensor) -> Tensor:
        quantile = _uniform(counter, seed, key, torch.float64).add_(2.0**-54).mul_(width).add_(start)
        values: Tensor = torch.special.ndtri(quantile)
        return values.mul_(sign * std).add_(mean).clamp_(low, high)

    return _fill_(local, coordinates, global_shape, strides, offset, sample)


def _fill_(
    local: Tensor,
    coordinates: Sequence[Tensor],
    global_shape: Sequence[int],
    strides: Sequence[int] | None,
    offset: int,
    sample: Callable[[Tensor], Tensor],
    loop: Loop | None = None,
) -> Tensor:
    """Write sample(flat index * G) to every element, in blocks that bound the temporaries; zero in padding.

    ``loop``: compiled code that writes the same; None: there is none.
    """
    if strides is None:
        strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(global_shape))]
    _check(local, coordinates, global_shape, strides)
    golden = _signed(GOLDEN)
    steps = [
        (points * _signed(stride * GOLDEN)).to(local.device)
        for points, stride in zip(coordinates, strides, strict=True)
    ]
    origin = torch.tensor(_signed(offset * golden), device=local.device)
    with torch.no_grad():
        if loop is not None and is_compiled(local):
            for window in _windows(local.shape, _BLOCK_OF_LOOP):
                loop.fill_(local[window], origin, [step[part] for step, part in zip(steps, window, strict=True)])
        else:
            limit = _BLOCK_ON_CPU if local.device.type == "cpu" else _BLOCK_ON_DEVICE
            for window in _windows(local.shape, limit):
                counter = origin
                for step, part in zip(steps, window, strict=True):
                    counter = counter.unsqueeze(-1) + step[part]
                local[window].copy_(sample(counter))
        for dim, (points, size) in enumerate(zip(coordinates, global_shape, strict=True)):
            padding = (points >= size).nonzero().flatten()
            if padding.numel():
                local.index_fill_(dim, padding.to(local.device), 0)
    return local


def _check(local: Tensor, coordinates: Sequence[Tensor], shape: Sequence[int], strides: Sequence[int]) -> None:
    if not local.is_floating_point():
        raise ValueError(f"random numbers for a tensor of {local.dtype}: use a floating point dtype")
    lengths = tuple(len(points) for points in coordinates)
    if lengths != tuple(local.shape) or len(shape) != local.dim() or len(strides) != local.dim():
        raise ValueError(
            f"a block of shape {tuple(local.shape)} with {lengths} coordinates in a tensor of shape {tuple(shape)} "
            f"and strides {tuple(strides)}: give one coordinate for each position along each dim"
        )
    for dim, points in enumerate(coordinates):
        if points.dtype != torch.int64 or (points < 0).any():
            raise ValueError(f"coordinates of dim {dim} must be int64 and not negative: {points}")


def _windows(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that tile a shape in blocks of at most ``limit`` elements: a range of one dim, indices of the dims before."""
    if math.prod(shape) == 0:
        return
    dim, inner = len(shape), 1  # inner: elements per index of dim
    while dim > 0 and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield tuple(slice(None) for _ in shape)
        return
    dim -= 1
    rows = max(limit // inner, 1)
    rest = tuple(slice(None) for _ in shape[dim + 1 :])
    for number in range(math.prod(shape[:dim])):
        before = []
        for size in reversed(shape[:dim]):
            number, index = divmod(number, size)
            before.append(slice(index, index + 1))
        for start in range(0, shape[dim], rows):
            yield (*reversed(before), slice(start, start + rows), *rest)


def _uniform(counter: Tensor, seed: int, key: int, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers from index * G, which is not changed."""
    bits = _mix_(_counter(counter, seed, key))
    if dtype == torch.float64:
        return _shift(bits, 11).to(dtype).mul_(2.0**-53)
    return _shift(bits, 40).to(torch.float32).mul_(2.0**-24).to(dtype)


def _normal(counter: Tensor, seed: int, key: int) -> Tensor:
    """Return standard normal numbers in float64 from index * G, by the Box-Muller transform.

    sqrt(-2 log u) cos(2 pi v), where cos(2 pi v) for v in [0, 1) is distributed as sin(2 pi y) for y in [-1/4, 1/4).
    """
    u = _shift(_mix_(_counter(counter, seed, key)), 11).add_(1).to(torch.float64).mul_(2.0**-53)  # in (0, 1]
    bits = u.view(torch.int64)
    exponent = bits.sub(SQRT_HALF_BITS).bitwise_right_shift_(52)  # u = 2**exponent * m with m in [sqrt(1/2), sqrt(2))
    m = bits.sub_(exponent << 52).view(torch.float64)
    s = (m - 1.0).div_(m + 1.0)
    radius = _polynomial(s * s, LOG).mul_(s).add_(exponent.to(torch.float64).mul_(math.log(2.0)))
    radius = _sqrt_(radius.mul_(-2.0))
    y = _shift(_mix_(_counter(counter, seed, key ^ SECOND_STREAM)), 11).to(torch.float64).mul_(2.0**-54).sub_(0.25)
    return _polynomial(y * y, SIN).mul_(y).mul_(radius)


def _sqrt_(x: Tensor) -> Tensor:
    """Take square roots in place, rounded as IEEE 754 fixes.

    On a CPU torch calls MKL, whose root in float64 differs in the last bit for some numbers, on some processors; numpy's does not.
    """
    if x.device.type == "cpu" and type(x) is Tensor:
        values = x.numpy()
        np.sqrt(values, out=values)
        return x
    return x.sqrt_()


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    value = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        value.add_(coefficient).mul_(x)
    return value.add_(coefficients[0])


def _counter(counter: Tensor, seed: int, key: int) -> Tensor:
    return counter + _signed(_first(seed, key))


def _first(seed: int, key: int) -> int:
    """Return what a stream adds to an element's counter, in [0, 2**64)."""
    return (stream_state(seed, key) + GOLDEN) & _WORD


def _mix_(z: Tensor) -> Tensor:
    """Apply splitmix64 without its first addition, in place."""
    z.bitwise_xor_(_shift(z, 30)).mul_(_signed(M1))
    z.bitwise_xor_(_shift(z, 27)).mul_(_signed(M2))
    return z.bitwise_xor_(_shift(z, 31))


def _shift(z: Tensor, by: int) -> Tensor:
    """Shift right logically; torch's shift is arithmetic."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)


def _splitmix(x: int) -> int:
    z = (x + GOLDEN) & _WORD
    z = (z ^ (z >> 30)) * M1 & _WORD
    z = (z ^ (z >> 27)) * M2 & _WORD
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word
