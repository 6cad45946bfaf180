"""Random specs for a number of ranks: entries alone mostly, and all of them together."""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "hanayo", "dualpipe-v", "auto")
GRIDS: dict[int, dict[str, list[Spec]]] = {
    2: {
        "1d": [dict(size=2)],
        "2d": [dict(grid=[1, 2]), dict(grid=[2, 1])],
        "2.5d": [dict(depth=2, grid=[1, 1]), dict(depth=1, grid=[1, 2])],
        "3d": [dict(grid=[2, 1, 1]), dict(grid=[1, 2, 1]), dict(grid=[1, 1, 2])],
    },
    4: {
        "1d": [dict(size=4)],
        "2d": [dict(size=4), dict(grid=[1, 4]), dict(grid=[4, 1])],
        "2.5d": [dict(depth=2, grid=[1, 2]), dict(depth=2, grid=[2, 1]), dict(depth=4, grid=[1, 1])],
        "3d": [dict(grid=[2, 2, 1]), dict(grid=[1, 2, 2]), dict(grid=[2, 1, 2])],
    },
    8: {
        "1d": [dict(size=8)],
        "2d": [dict(grid=[2, 4]), dict(grid=[4, 2])],
        "2.5d": [dict(size=8, depth=2)],
        "3d": [dict(size=8)],
    },
}


def tensor(draw: random.Random, size: int) -> Any:
    """An entry ``tensor`` of so many ranks."""
    if draw.random() < 0.15:
        return size
    mode = draw.choice(["1d", "1d", "2d", "2.5d", "3d"])
    entry = dict(mode=mode, **draw.choice(GRIDS[size][mode]))
    if draw.random() < 0.15:
        entry["overlap"] = draw.choice(["auto", "gather", "ring"] + ["stream"] * (mode in ("2d", "2.5d")))
    return entry


def pipeline(draw: random.Random, size: int) -> Any:
    """An entry ``pipeline`` of so many ranks."""
    if draw.random() < 0.15:
        return size
    entry: Spec = dict(size=size, schedule=draw.choice(SCHEDULES))
    if draw.random() < 0.6:
        entry["microbatches"] = draw.choice([1, 2, 2, 3, 4, 6])
    if entry["schedule"] == "interleaved" and draw.random() < 0.3:
        entry["chunks"] = 3
    if entry["schedule"] == "hanayo" and draw.random() < 0.2:
        entry["waves"] = 2
    return entry


def sequence(draw: random.Random, size: int) -> Spec:
    """An entry ``sequence`` of so many ranks of its own."""
    mode = draw.choice(["ring", "ring", "ulysses", "ulysses", "ring_ulysses"])
    if mode == "ring_ulysses":
        return dict(mode=mode, size=size, ulysses=draw.choice([u for u in (1, 2, 4) if size % u == 0]))
    return dict(mode=mode, size=size)


def zero(draw: random.Random) -> Spec:
    """An entry ``zero``."""
    stage = draw.choice([1, 2, 3, 3])
    entry: Spec = dict(stage=stage)
    placement = draw.choice([None, "auto", "cuda", "cpu", "static", "const"])
    if placement is not None:
        entry["placement"] = placement
    if placement == "static" and draw.random() < 0.7:
        entry["offload_optim_frac"] = draw.choice([0.0, 0.5, 1.0])
        if stage == 3 and draw.random() < 0.5:
            entry["offload_param_frac"] = draw.choice([0.0, 0.5, 1.0])
    if placement == "cuda" and stage == 3 and draw.random() < 0.3:
        entry["reshard_after_forward"] = False
    if placement in (None, "auto") and draw.random() < 0.2:
        entry["gpu_memory_limit"] = draw.choice(["64MiB", "1GiB"])
    return entry


def alone(draw: random.Random, ranks: int) -> Spec:
    """A spec with one entry, and ``zero`` beside ``data`` sometimes."""
    kind = draw.choice(
        ["data", "pipeline", "pipeline", "tensor", "tensor", "tensor", "sequence", "megatron", "zero", "zero"]
    )
    if kind == "data":
        return dict(data=ranks)
    if kind == "pipeline":
        return dict(pipeline=pipeline(draw, ranks))
    if kind == "tensor":
        return dict(tensor=tensor(draw, ranks))
    if kind == "sequence":
        return dict(sequence=sequence(draw, ranks))
    if kind == "megatron":
        return dict(tensor=dict(mode="1d", size=ranks), sequence=dict(mode="megatron"))
    return dict(data=ranks, zero=zero(draw))


def together(draw: random.Random, ranks: int) -> Spec:
    """A spec with several entries."""
    left, spec = ranks, Spec()
    kinds = ["data", "pipeline", "sequence", "tensor"]
    draw.shuffle(kinds)
    for kind in kinds:
        if left == 1:
            break
        size = draw.choice([n for n in (1, 2, 2, 4) if left % n == 0 and n <= left])
        if size == 1:
            continue
        left //= size
        made: Any = dict(data=lambda s: s, pipeline=pipeline, sequence=sequence, tensor=tensor)[kind]
        spec[kind] = size if kind == "data" else made(draw, size)
    if left > 1:
        spec["data"] = spec.get("data", 1) * left
    one_dim = spec.get("tensor")
    if (
        "sequence" not in spec
        and (isinstance(one_dim, int) or (one_dim and one_dim["mode"] == "1d"))
        and draw.random() < 0.2
    ):
        spec["sequence"] = dict(mode="megatron")
    if draw.random() < 0.3:
        spec["zero"] = zero(draw)
    return {kind: spec[kind] for kind in ("data", "pipeline", "sequence", "tensor", "zero") if kind in spec}


def spec_for(draw: random.Random, ranks: int) -> Spec:
    """Any spec of so many ranks."""
    if ranks == 1:
        return draw.choice([{}, dict(zero=zero(draw)), dict(data=1), dict(tensor=dict(mode="2d", grid=[1, 1]))])
    if ranks == 3:
        return draw.choice([dict(data=3), dict(pipeline=pipeline(draw, 3)), dict(data=3, zero=zero(draw))])
    return alone(draw, ranks) if draw.random() < (0.75 if ranks == 2 else 0.35) else together(draw, ranks)
