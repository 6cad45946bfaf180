"""Counting: run the real code on simulated ranks, record what it hands to torch.distributed.

Every count is compared with the plan's cost, collective by collective. Tensors are meta tensors: they have shapes
and no memory, so a transformer layer on 4096 ranks is counted in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import groupby

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from experiments.tensor_parallel_volume.config import ITEMSIZE, Sizes, ranks
from experiments.tensor_parallel_volume.records import Calls, Record
from meshfold.mesh import Entry, Log, Mesh, moved_bytes, record
from meshfold.mesh.recording.comm_log import Kind
from meshfold.mesh.testing import fake_world
from meshfold.models import GPT, GPTConfig
from meshfold.tensor_parallel import MODES, Cost, MatmulPlan, Mode, matmul, matmul_cost, parallelize, plan
from meshfold.tensor_parallel.lowerings import LOWERINGS

Issued = Counter[tuple[Kind, tuple[str, ...], Fraction]]
Rest = list[tuple[str, Kind, tuple[str, ...], int]]  # phase, kind, axes, elements

TESSERACT = plan(x="m:row k:depth,col", w="k:depth,row n:col", y="m:row,depth n:col")
"""The matmul that the account of Tesseract counts: k split over depth, y reduce-scattered over it."""


class CountError(RuntimeError):
    """What was counted is not what the plan says, or differs between ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A count to be made.

    Attributes:
        record: what it will be called.
        count: makes it, for one rank of a mesh.
    """

    record: Record
    count: Callable[[Mesh], tuple[Calls, ...]]


def run(jobs: Iterable[Job]) -> Iterator[Record]:
    """Make the counts, on the first and on the last rank of each mesh, which must agree.

    Raises:
        CountError: if they do not, or a count is not what the plan says.
    """
    for _, alike in groupby(jobs, key=lambda job: job.record.axes):
        batch = list(alike)
        axes, size = batch[0].record.axes, batch[0].record.ranks
        first, last = (_on_rank(rank, axes, batch) for rank in (0, size - 1))
        for job, calls, others in zip(batch, first, last, strict=True):
            if calls != others:
                raise CountError(f"{job.record}: rank 0 sends {calls}, rank {size - 1} sends {others}")
            yield replace(job.record, calls=calls)


def _on_rank(rank: int, axes: dict[str, int], batch: list[Job]) -> list[tuple[Calls, ...]]:
    with fake_world(ranks(axes), rank):
        mesh = Mesh(axes)
        found = [job.count(mesh) for job in batch]
        mesh.close()
    return found


def linear(mode: str, axes: dict[str, int], role: str, shape: str, sizes: Sizes, *, keep: bool) -> Job:
    """One linear layer, forward and backward."""
    kept = "xw" if keep else ""
    return Job(
        record=Record(what="linear", mode=mode, axes=axes, role=role, shape=shape, keep=kept),
        count=partial(count_matmul, MODES[mode].plans[role], sizes, keep=frozenset(kept)),
    )


def tesseract(axes: dict[str, int], shape: str, sizes: Sizes) -> Job:
    """One matmul with k split over depth, forward alone, by SUMMA's broadcasts."""
    return Job(
        record=Record(what="tesseract", mode="k over depth", axes=axes, shape=shape, lowering="stream"),
        count=partial(count_matmul, TESSERACT, sizes, lowering="stream", backward=False),
    )


def layer(
    mode: str,
    axes: dict[str, int],
    *,
    what: str = "layer",
    shape: str = "",
    hidden: int,
    heads: int,
    batch: int,
    sequence: int,
    lowering: str = "gather",
    recompute: bool = False,
) -> Job:
    """One transformer layer: norm, QKV, attention, out, norm, up, down, with biases, forward and backward."""
    config = GPTConfig(vocab_size=ranks(axes), hidden=hidden, layers=1, heads=heads, max_positions=sequence, tie=False)
    record = Record(what=what, mode=mode, axes=axes, shape=shape, lowering=lowering, recompute=recompute)
    return Job(record=record, count=partial(_count_layer, mode, config, batch * sequence, lowering, recompute))


def count_matmul(
    found: MatmulPlan,
    sizes: Sizes,
    mesh: Mesh,
    *,
    lowering: str = "gather",
    keep: frozenset[str] = frozenset(),
    backward: bool = True,
    device: str = "meta",
) -> tuple[Calls, ...]:
    """What one rank sends in a matmul; works in any world, a real one too.

    Raises:
        CountError: if it is not what the plan says.
    """
    at_rest = found.local_sizes("x", sizes, mesh), found.local_sizes("w", sizes, mesh)
    x = torch.ones(at_rest[0]["m"], at_rest[0]["k"], device=device, requires_grad=backward)
    w = torch.ones(at_rest[1]["n"], at_rest[1]["k"], device=device, requires_grad=backward)
    with record() as log:
        y = matmul(x, w, found, mesh, lowering=lowering, keep=keep)
        if backward:
            log.phase = "backward"
            y.backward(torch.ones_like(y))
    cost = matmul_cost(found, sizes, mesh, itemsize=ITEMSIZE, lowering=lowering, keep=keep)
    phases = {"forward": cost.count("forward"), "backward": cost.count("dx", "dw") if backward else Counter()}
    _must_equal(log, phases, f"{found.x} · {found.w} -> {found.y} on {mesh}")
    return _calls(log, phases)


def _count_layer(
    name: str, config: GPTConfig, tokens: int, lowering: str, recompute: bool, mesh: Mesh
) -> tuple[Calls, ...]:
    mode, sequence = MODES[name], config.max_positions
    with torch.device("meta"):
        model = GPT(config)
    parallelize(model, mesh, mode, lowering=lowering)
    residual = mode.layout("residual")
    local = (tokens // mesh.size(*residual["m"]), config.hidden // mesh.size(*residual["h"]))
    x = torch.empty(local, device="meta", requires_grad=True)
    block = model.blocks[0]
    # Without early stopping a recomputed layer is computed to its end, as the papers count it.
    with record() as log, set_checkpoint_early_stop(False):
        if recompute:
            y = checkpoint(block, x, sequence, use_reentrant=False, preserve_rng_state=False)
        else:
            y = block(x, sequence)
        log.phase = "backward"
        y.backward(torch.empty_like(y))
    matmuls = _layer_cost(mode, mesh, config, tokens, lowering)
    rest = _layer_rest(mode, mesh, config, tokens)
    by_phase = {"forward": matmuls.count("forward"), "backward": matmuls.count("dx", "dw")}
    other = {phase: _rest_count(rest, phase, mesh) for phase in by_phase}
    if recompute:
        by_phase["backward"] += by_phase["forward"]
        other["backward"] += other["forward"]
    _must_equal(log, {p: by_phase[p] + other[p] for p in by_phase}, f"a layer in mode {mode.name} on {mesh}")
    return _calls(log, by_phase)


def _layer_cost(mode: Mode, mesh: Mesh, config: GPTConfig, tokens: int, lowering: str) -> Cost:
    """The plans of the four matmuls of a layer."""
    h, inner = config.hidden, config.inner
    total = Cost(())
    for role, k, n in (("column", h, 3 * h), ("row", h, h), ("column", h, inner), ("row", inner, h)):
        found = mode.plans[role]
        way = "gather" if LOWERINGS[lowering].refuses(found) else lowering
        total += matmul_cost(found, {found.m: tokens, found.k: k, found.n: n}, mesh, itemsize=ITEMSIZE, lowering=way)
    return total


def _layer_rest(mode: Mode, mesh: Mesh, config: GPTConfig, tokens: int) -> Rest:
    """What the matmuls do not account for, written down by hand: two LayerNorms and four biases."""
    residual, hidden = mode.layout("residual"), mode.layout("hidden")
    rows, width = tokens // mesh.size(*residual["m"]), config.hidden // mesh.size(*residual["h"])
    heads = mesh.size(*hidden["n"])
    norm: Rest = [
        # mean and variance of each rank
        ("forward", "all_gather", residual["h"], 2 * rows * mesh.size(*residual["h"])),
        ("backward", "all_reduce", residual["h"], 2 * rows),  # two sums of the row's gradient
        ("backward", "all_reduce", residual["m"], width),  # gradient of the weight
        ("backward", "all_reduce", residual["m"], width),  # gradient of the bias
    ]
    biases: Rest = [
        ("backward", "all_reduce", hidden["m"], 3 * config.hidden // heads),
        ("backward", "all_reduce", residual["m"], width),
        ("backward", "all_reduce", hidden["m"], config.inner // heads),
        ("backward", "all_reduce", residual["m"], width),
    ]
    return norm + norm + biases


def _rest_count(rest: Rest, phase: str, mesh: Mesh) -> Issued:
    found: Issued = Counter()
    for issued, kind, axes, elements in rest:
        size = mesh.size(*axes)
        if issued == phase and size > 1:
            found[kind, mesh.spanned(*axes), moved_bytes(kind, elements * ITEMSIZE, size)] += 1
    return found


def _must_equal(log: Log, expected: dict[str, Issued], what: str) -> None:
    for phase, wanted in expected.items():
        seen = log.count(phase)
        if seen != wanted:
            raise CountError(
                f"{what}, {phase}: counted but not planned {dict(seen - wanted)}, "
                f"planned but not counted {dict(wanted - seen)}"
            )


def _calls(log: Log, matmuls: dict[str, Issued]) -> tuple[Calls, ...]:
    """The log's entries, those that are alike together; what the matmuls' plans do not hold is the rest."""
    left = {phase: Counter(count) for phase, count in matmuls.items()}
    found: dict[tuple[str, str, str, str, int], list[Fraction]] = {}
    for entry in log.entries:
        part = _part(entry, left[entry.phase])
        key = (entry.phase, part, entry.kind, ",".join(entry.axes), entry.group_size)
        found.setdefault(key, []).append(entry.bytes)
    return tuple(Calls(*key, times=len(sent), bytes=_whole(sum(sent))) for key, sent in found.items())


def _part(entry: Entry, left: Issued) -> str:
    key = (entry.kind, entry.axes, entry.bytes)
    if left[key] > 0:
        left[key] -= 1
        return "matmul"
    return "rest"


def _whole(sent: Fraction | int) -> int:
    if Fraction(sent).denominator != 1:
        raise CountError(f"{sent} bytes is not a whole number: choose sizes that the ranks divide")
    return int(sent)
