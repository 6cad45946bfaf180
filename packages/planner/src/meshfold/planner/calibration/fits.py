"""Fits of a machine's numbers to samples: pure functions of what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from meshfold.planner.efficiency import Link


@dataclass(frozen=True, kw_only=True)
class MatmulSample:
    """One measured matmul.

    Attributes:
        precision: of its operands.
        side: of the squares.
        seconds: of one matmul: mean of the forward's, the input gradient's and the weight gradient's.
    """

    precision: str
    side: int
    seconds: float

    @property
    def flop(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.side**3

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flop / self.seconds


@dataclass(frozen=True, kw_only=True)
class MessageSample:
    """One measured collective.

    Attributes:
        kind: as in ``meshfold.mesh.recording.comm_log``.
        sent: bytes that a rank sends, by the ring count.
        seconds: of the slowest rank.
    """

    kind: str
    sent: float
    seconds: float


def matmul_rates(samples: Sequence[MatmulSample]) -> dict[str, float]:
    """Return the highest FLOP/s of each precision."""
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.precision] = max(found.get(sample.precision, 0.0), sample.rate)
    return found


def matmul_shares(
    samples: Sequence[MatmulSample], rates: Mapping[str, float]
) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return pairs of FLOP and share of a precision's rate, at most the whole, by precision and rising FLOP.

    Shares never fall with the size: a larger matmul with a lower share was disturbed, or limited by power, and a plan must not
    say that less work takes longer.

    Args:
        samples: of matmuls.
        rates: FLOP/s by precision.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        found.setdefault(sample.precision, []).append((sample.flop, min(1.0, sample.rate / rates[sample.precision])))
    return {precision: rising(pairs) for precision, pairs in found.items()}


def rising(pairs: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return pairs of size and share by rising size, with no share below that of a smaller size."""
    found: list[tuple[float, float]] = []
    for size, share in sorted(pairs):
        found.append((size, max(share, found[-1][1] if found else 0.0)))
    return tuple(found)


def share_and_lag(by_keys: Mapping[int, float]) -> tuple[float, float]:
    """Return (share, lag) of attention from its shares with few and with many keys a query: ``share · keys / (keys + lag)``.

    Args:
        by_keys: share of the matmuls' rate by keys a query; only the fewest and the most keys are used.
    """
    few, many = min(by_keys), max(by_keys)
    if few == many or by_keys[few] >= by_keys[many]:  # noise: few keys count as many
        return by_keys[many], 0.0
    # 1 / share is linear in 1 / keys.
    slope = (1 / by_keys[few] - 1 / by_keys[many]) / (1 / few - 1 / many)
    whole = 1 / by_keys[many] - slope / many
    if whole <= 0:  # the fit has no time left for pairs
        return by_keys[many], 0.0
    return 1 / whole, slope / whole


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (α, 1/β) of ``α + bytes / β`` by least squares of relative errors; neither is below zero.

    Errors are relative so that small messages count as much as large ones.

    Args:
        points: bytes and seconds.

    Raises:
        ValueError: without a point.
    """
    if not points:
        raise ValueError("a fit needs at least one point")
    # Divided by the seconds, α · (1/t) + slope · (x/t) should be 1.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        latency, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if latency >= 0 and slope >= 0:
            return latency, slope
        if latency < 0:
            return 0.0, b1 / bb
    return a1 / aa, 0.0


def relative_errors(link: Link, samples: Sequence[MessageSample]) -> list[float]:
    """Return the error of the link for each sample, as a share of the measured seconds."""
    return [abs(link.seconds(sample.sent) - sample.seconds) / sample.seconds for sample in samples]


def fit_link(samples: Sequence[MessageSample]) -> Link:
    """Return a collective's α–β, with its largest error: of a fit to every second size, for the sizes in between.

    The link itself is fitted to all samples.

    Raises:
        ValueError: without a sample.
    """
    ordered = sorted(samples, key=lambda sample: sample.sent)
    seen, held_out = ordered[::2], ordered[1::2]
    errors = relative_errors(_link(seen), held_out) if held_out else []
    whole = _link(ordered)
    return Link(latency=whole.latency, rate=whole.rate, error=max(errors, default=float("nan")))


def _link(samples: Sequence[MessageSample]) -> Link:
    latency, slope = fit_line([(sample.sent, sample.seconds) for sample in samples])
    return Link(latency=latency, rate=1 / slope if slope > 0 else 1e15)


def fit_links(samples: Sequence[MessageSample]) -> dict[str, Link]:
    """Return the link of each kind, by size."""
    kinds = dict.fromkeys(sample.kind for sample in samples)
    return {kind: measured_link([sample for sample in samples if sample.kind == kind]) for kind in kinds}


def seconds_by_size(samples: Sequence[MessageSample]) -> tuple[tuple[float, float], ...]:
    """Return pairs of bytes and seconds, both rising; neighbours whose seconds fall get their geometric mean.

    Small messages take equally long, apart from noise, and a plan must not say that fewer bytes take longer.
    """
    blocks: list[tuple[list[float], float]] = []  # sizes, and the mean of their seconds' logarithms
    for sample in sorted(samples, key=lambda sample: sample.sent):
        sizes, mean = [sample.sent], math.log(sample.seconds)
        while blocks and blocks[-1][1] >= mean:
            before, other = blocks.pop()
            mean = (len(before) * other + len(sizes) * mean) / (len(before) + len(sizes))
            sizes = before + sizes
        blocks.append((sizes, mean))
    return tuple((size, math.exp(mean)) for sizes, mean in blocks for size in sizes)


def measured_link(samples: Sequence[MessageSample]) -> Link:
    """Return a collective's seconds by size and its α–β, with the largest error as in :func:`fit_link`.

    Raises:
        ValueError: without a sample.
    """
    ordered = sorted(samples, key=lambda sample: sample.sent)
    seen, held_out = ordered[::2], ordered[1::2]
    errors = relative_errors(replace(_link(seen), by_size=seconds_by_size(seen)), held_out) if held_out else []
    return replace(_link(ordered), error=max(errors, default=math.nan), by_size=seconds_by_size(ordered))


def typical_link(links: Mapping[str, Link]) -> Link:
    """Return one link for kinds that were not measured: the mean latency, and the rate of all kinds if each sends equal bytes.

    Raises:
        ValueError: without a link.
    """
    if not links:
        raise ValueError("no link to take the mean of: measure one first")
    slope = fmean(1 / link.rate for link in links.values())
    return Link(latency=fmean(link.latency for link in links.values()), rate=1 / slope)
