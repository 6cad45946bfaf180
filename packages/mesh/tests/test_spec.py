"""ParallelSpec: every form of the grammar, axes and sizes, the world size, round trips, what a spec needs."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import meshfold.mesh.spec
from meshfold.mesh import Mesh
from meshfold.mesh.spec import ParallelSpec, PipelineSpec, SequenceSpec, SpecError, TensorSpec, ZeroSpec
from meshfold.mesh.spec.entry import balanced, divisors, is_power, powers_near, root
from meshfold.mesh.spec.parallel import is_importable


@dataclasses.dataclass(frozen=True)
class OwnMode:
    """A mode of one's own, as far as a spec sees it."""

    name: str
    axes: tuple[str, ...]


XY = OwnMode("slabs", ("x", "y"))
LINE = OwnMode("line", ("x",))
DEEP = OwnMode("deep", ("x", "depth", "y"))


def own_schedule(stages: int, microbatches: int) -> list[str]:
    """A schedule of one's own; a spec only keeps it."""
    return ["0F0"] * stages * microbatches


GOOD: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({}, {"data": 1}),
    ({"data": 3}, {"data": 3}),
    ({"pipeline": 2}, {"data": 1, "pipe": 2}),
    ({"pipeline": 1}, {"data": 1, "pipe": 1}),
    ({"pipeline": {"size": 2}}, {"data": 1, "pipe": 2}),
    ({"tensor": 4}, {"data": 1, "tensor": 4}),
    ({"tensor": 1}, {"data": 1, "tensor": 1}),
    ({"tensor": {"size": 4}}, {"data": 1, "tensor": 4}),
    ({"tensor": {"mode": "1d", "size": 6}}, {"data": 1, "tensor": 6}),
    ({"tensor": {"mode": "2d", "size": 4}}, {"data": 1, "row": 2, "col": 2}),
    ({"tensor": {"mode": "2d", "size": 1}}, {"data": 1, "row": 1, "col": 1}),
    ({"tensor": {"mode": "2d", "grid": (2, 4)}}, {"data": 1, "row": 2, "col": 4}),
    ({"tensor": {"mode": "2d", "grid": [4, 2]}}, {"data": 1, "row": 4, "col": 2}),
    ({"tensor": {"mode": "2d", "size": 8, "grid": (2, 4)}}, {"data": 1, "row": 2, "col": 4}),
    ({"tensor": {"mode": "2.5d", "depth": 1, "size": 4}}, {"data": 1, "depth": 1, "row": 2, "col": 2}),
    ({"tensor": {"mode": "2.5d", "size": 8, "depth": 2}}, {"data": 1, "depth": 2, "row": 2, "col": 2}),
    ({"tensor": {"mode": "2.5d", "size": 8, "depth": 8}}, {"data": 1, "depth": 8, "row": 1, "col": 1}),
    ({"tensor": {"mode": "2.5d", "depth": 3, "grid": (2, 4)}}, {"data": 1, "depth": 3, "row": 2, "col": 4}),
    ({"tensor": {"mode": "3d", "size": 27}}, {"data": 1, "a": 3, "b": 3, "c": 3}),
    ({"tensor": {"mode": "3d", "grid": (2, 2, 1)}}, {"data": 1, "a": 2, "b": 2, "c": 1}),
    ({"tensor": {"mode": XY, "grid": (2, 3)}}, {"data": 1, "x": 2, "y": 3}),
    ({"tensor": {"mode": XY, "size": 9}}, {"data": 1, "x": 3, "y": 3}),
    ({"tensor": {"mode": LINE, "size": 5}}, {"data": 1, "x": 5}),
    ({"tensor": {"mode": DEEP, "depth": 2, "grid": (3, 4)}}, {"data": 1, "x": 3, "depth": 2, "y": 4}),
    ({"sequence": {"mode": "ring", "size": 2}}, {"data": 1, "seq": 2}),
    ({"sequence": {"mode": "ulysses", "size": 4}}, {"data": 1, "seq": 4}),
    ({"sequence": {"mode": "ring_ulysses", "size": 6, "ulysses": 2}}, {"data": 1, "ring": 3, "ulysses": 2}),
    ({"sequence": {"mode": own_schedule, "size": 2}}, {"data": 1, "seq": 2}),
    ({"sequence": {"mode": "megatron"}, "tensor": 4}, {"data": 1, "tensor": 4}),
    ({"sequence": {"mode": "megatron"}, "tensor": {"mode": "1d", "size": 1}}, {"data": 1, "tensor": 1}),
    ({"zero": {"stage": 3, "placement": "auto"}}, {"data": 1}),
    ({"zero": {}, "tensor": {"mode": "2d", "size": 4}}, {"data": 1, "row": 2, "col": 2}),
    ({"expert": 4}, {"data": 1}),
    ({"expert": {"size": 2}, "data": 6, "pipeline": 2}, {"data": 6, "pipe": 2}),
    ({"expert": {"size": 8}, "data": 2, "tensor": 4}, {"data": 2, "tensor": 4}),
    (
        {
            "tensor": {"mode": "2.5d", "size": 8, "depth": 2, "overlap": "stream"},
            "zero": {"stage": 2},
            "sequence": {"mode": "ring_ulysses", "size": 4, "ulysses": 2},
            "pipeline": {"size": 3, "schedule": "1f1b", "microbatches": 8},
            "data": 5,
        },
        {"data": 5, "pipe": 3, "ring": 2, "ulysses": 2, "depth": 2, "row": 2, "col": 2},
    ),
]


@pytest.mark.parametrize(("parallel", "axes"), GOOD)
def test_good_forms_have_these_axes_in_this_order(parallel: dict[str, Any], axes: dict[str, int]) -> None:
    before = copy.deepcopy(parallel)
    spec = ParallelSpec.parse(parallel)
    assert list(spec.axes.items()) == list(axes.items())
    assert spec.world_size == math.prod(axes.values())
    assert spec.data == parallel.get("data")
    assert ParallelSpec.parse(spec.to_dict()) == spec
    assert parallel == before


def test_the_contracts_example() -> None:
    spec = ParallelSpec.parse(
        dict(
            data=2,
            pipeline=dict(size=2, schedule="1f1b", microbatches=8),
            tensor=dict(mode="2.5d", size=8, depth=2),
            sequence=dict(mode="ring", size=2),
            zero=dict(stage=3, placement="auto"),
        ),
        world_size=64,
    )
    assert list(spec.axes) == ["data", "pipe", "seq", "depth", "row", "col"]
    assert spec.pipeline == PipelineSpec(size=2, schedule="1f1b", microbatches=8, chunks=1)
    assert spec.tensor == TensorSpec(mode="2.5d", sizes=(2, 2, 2))
    assert spec.sequence == SequenceSpec(mode="ring", size=2)
    assert spec.zero == ZeroSpec(stage=3, placement="auto")
    assert spec.tensor is not None
    assert (spec.tensor.mode, spec.tensor.size, spec.tensor.depth, spec.tensor.grid) == ("2.5d", 8, 2, (2, 2))


def test_a_spec_is_frozen_comparable_and_can_be_copied() -> None:
    spec = ParallelSpec.parse(dict(tensor=dict(mode="2d", size=4)), world_size=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.data = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        ParallelSpec(2)  # type: ignore[call-arg]
    spec.axes["row"] = 7
    assert spec.axes["row"] == 2
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    assert spec == ParallelSpec.parse(dict(data=2, tensor=dict(mode="2d", grid=(2, 2))))
    assert len({spec, ParallelSpec.parse(dict(tensor=4))}) == 2


def test_own_mode_and_own_schedule_are_kept_as_they_are() -> None:
    spec = ParallelSpec.parse(
        dict(tensor=dict(mode=XY, grid=(2, 2)), pipeline=dict(size=2, schedule=own_schedule, chunks=3))
    )
    assert spec.tensor is not None and spec.pipeline is not None
    assert spec.tensor.mode is XY and spec.tensor.mode_name == "slabs"
    assert spec.pipeline.schedule is own_schedule and spec.pipeline.schedule_name == "own_schedule"
    assert spec.pipeline.chunks == 3
    assert ParallelSpec.parse(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("entry", "chunks", "waves"),
    [
        (dict(schedule="gpipe"), 1, None),
        (dict(schedule="1f1b", chunks=1), 1, None),
        (dict(schedule="interleaved"), 2, None),
        (dict(schedule="interleaved", chunks=4), 4, None),
        (dict(schedule="zb-h1"), 1, None),
        (dict(schedule="zb-h2"), 1, None),
        (dict(schedule="zb-v"), 2, None),
        (dict(schedule="zb-v", chunks=2), 2, None),
        (dict(schedule="hanayo"), 2, 1),
        (dict(schedule="hanayo", waves=3), 6, 3),
        (dict(schedule="hanayo", waves=2, chunks=4), 4, 2),
        (dict(schedule="dualpipe-v"), 2, None),
        (dict(schedule="auto"), None, None),
        (dict(schedule="auto", chunks=2), 2, None),
    ],
)
def test_chunks_and_waves_of_each_schedule(entry: dict[str, Any], chunks: int | None, waves: int | None) -> None:
    pipeline = PipelineSpec.parse(dict(size=2, **entry))
    assert (pipeline.chunks, pipeline.waves) == (chunks, waves)
    assert PipelineSpec.parse(pipeline.to_dict()) == pipeline


@pytest.mark.parametrize("overlap", [None, "auto", "gather", "ring", "stream", "push"])
@pytest.mark.parametrize("mode", ["1d", "2d", "2.5d", "3d"])
def test_overlap_is_kept_wherever_the_mode_has_it(mode: str, overlap: str | None) -> None:
    entry: dict[str, Any] = dict(mode=mode, size=64, overlap=overlap, **({"depth": 1} if mode == "2.5d" else {}))
    if overlap == "stream" and mode in ("1d", "3d"):
        with pytest.raises(SpecError, match="overlap='ring'"):
            TensorSpec.parse(entry)
    elif overlap == "push" and mode != "1d":
        with pytest.raises(SpecError, match=r"Write mode='1d' with sequence=dict\(mode='megatron'\)"):
            TensorSpec.parse(entry)
    else:
        assert TensorSpec.parse(entry).overlap == overlap


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        ("80GB", 80 * 10**9),
        ("80G", 80 * 10**9),
        ("80gib", 80 * 2**30),
        ("80Gi", 80 * 2**30),
        ("0.5TiB", 2**39),
        ("1.5KB", 1500),
        ("512MiB", 2**29),
        ("7B", 7),
        (123456, 123456),
        ("0.1GB", 10**8),
    ],
)
def test_memory_limits_are_bytes(written: str | int, expected: int) -> None:
    zero = ZeroSpec.parse(dict(gpu_memory_limit=written, host_memory_limit=written))
    assert (zero.gpu_memory_limit, zero.host_memory_limit) == (expected, expected)
    assert ZeroSpec.parse(zero.to_dict()) == zero


@pytest.mark.parametrize("placement", ["cuda", "cpu", "auto", "const", "static"])
def test_placements_and_what_belongs_to_them(placement: str) -> None:
    zero = ZeroSpec.parse(dict(placement=placement))
    assert (zero.stage, zero.placement, zero.regime) == (3, placement, "A")
    assert zero.offload_optim_frac == zero.offload_param_frac == (0.0 if placement == "static" else None)
    if placement != "cuda":
        assert ZeroSpec.parse(dict(placement=placement, offload_path=Path("disk"))).offload_path == "disk"


def test_static_placement_takes_fractions() -> None:
    zero = ZeroSpec.parse(dict(stage=3, placement="static", offload_optim_frac=1, offload_param_frac=0.25))
    assert (zero.offload_optim_frac, zero.offload_param_frac) == (1.0, 0.25)
    assert ZeroSpec.parse(zero.to_dict()) == zero


# The world size


@pytest.mark.parametrize("data", range(1, 6))
@pytest.mark.parametrize("parallel", [entry for entry, _ in GOOD if not {"data", "expert"} & set(entry)])
def test_data_is_inferred_from_the_world_size(parallel: dict[str, Any], data: int) -> None:
    open_spec = ParallelSpec.parse(parallel)
    spec = ParallelSpec.parse(parallel, world_size=data * open_spec.world_size)
    assert spec.data == spec.axes["data"] == data
    assert spec == open_spec.with_world_size(data * open_spec.world_size)
    assert spec == ParallelSpec.parse({**parallel, "data": data}, world_size=spec.world_size)
    assert spec.with_world_size(spec.world_size) == spec


@given(data=st.integers(1, 9), tensor=st.integers(1, 9), pipe=st.integers(1, 4), world=st.integers(1, 200))
def test_the_product_is_the_world_size_or_an_error(data: int, tensor: int, pipe: int, world: int) -> None:
    parallel: dict[str, Any] = dict(data=data, tensor=tensor, pipeline=pipe)
    if data * tensor * pipe == world:
        assert ParallelSpec.parse(parallel, world).world_size == world
    else:
        with pytest.raises(SpecError) as caught:
            ParallelSpec.parse(parallel, world)
        assert f"makes {data * tensor * pipe} ranks, but the world size is {world}" in str(caught.value)
        assert f"data={data}, tensor={tensor}, pipeline={pipe}" in str(caught.value)
        alone = world == 1  # most often a script that was started as python script.py
        assert (f"meshfold run --ranks {data * tensor * pipe} SCRIPT.py" in str(caught.value)) == alone
        fits = world // (tensor * pipe) if world % (tensor * pipe) == 0 and not alone else None
        assert (f"Write data={fits}," in str(caught.value)) == (fits is not None)


# Round trips


def tensors() -> st.SearchStrategy[Any]:
    side = st.integers(1, 5)
    grids = st.tuples(side, side)
    overlap = st.sampled_from([None, "auto", "gather", "ring"])
    return st.one_of(
        side,
        st.builds(lambda n, o: dict(size=n, overlap=o), side, overlap | st.just("push")),
        st.builds(lambda n, o: dict(mode="2d", size=n * n, overlap=o), side, overlap),
        st.builds(lambda g: dict(mode="2d", grid=g, overlap="stream"), grids),
        st.builds(lambda d, n: dict(mode="2.5d", depth=d, size=d * n * n), side, side),
        st.builds(lambda d, g: dict(mode="2.5d", depth=d, grid=list(g)), side, grids),
        st.builds(lambda n: dict(mode="3d", size=n**3), side),
        st.builds(lambda g: dict(mode="3d", grid=g), st.tuples(side, side, side)),
        st.builds(lambda g: dict(mode=XY, grid=g), grids),
    )


def pipelines() -> st.SearchStrategy[Any]:
    count = st.integers(1, 9)
    microbatches = st.builds(lambda n: {} if n == 9 else {"microbatches": n}, count)
    schedule = st.one_of(
        st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "hanayo", "dualpipe-v", "auto"]).map(
            lambda name: {"schedule": name}
        ),
        st.builds(lambda n: dict(schedule="interleaved", chunks=n), count),
        st.builds(lambda n: dict(schedule="hanayo", waves=n), count),
        st.just({"schedule": own_schedule}),
    )
    return st.one_of(count, st.builds(lambda n, m, s: dict(size=n, **m, **s), count, microbatches, schedule))


def sequences() -> st.SearchStrategy[Any]:
    count = st.integers(1, 6)
    return st.one_of(
        st.builds(lambda m, n: dict(mode=m, size=n), st.sampled_from(["ring", "ulysses"]), count),
        st.builds(lambda r, u: dict(mode="ring_ulysses", size=r * u, ulysses=u), count, count),
    )


def zeros() -> st.SearchStrategy[Any]:
    share = st.floats(0, 1, allow_nan=False)
    base = {
        "stage": st.integers(1, 3),
        "regime": st.sampled_from("ABC"),
        "transport": st.sampled_from(["nccl", "auto", "push"]),
    }
    limit = st.one_of(st.integers(1, 2**50), st.integers(1, 99).map(lambda n: f"{n}GiB"))
    planned = {
        "placement": st.sampled_from(["auto", "cpu", "const"]),
        "gpu_memory_limit": limit,
        "host_memory_limit": limit,
        "offload_path": st.just("disk"),
    }
    static = {"offload_optim_frac": share, "offload_param_frac": share}
    return st.one_of(
        st.fixed_dictionaries({}, optional={**base, **planned}),
        st.fixed_dictionaries({"placement": st.just("static")}, optional={**base, **static}),
    )


def _fit_experts(parallel: dict[str, Any]) -> dict[str, Any]:
    """Let experts divide the ranks, if it is known how many there are."""
    if {"data", "expert"} <= set(parallel):
        size = parallel["expert"]
        parallel["data"] *= size["size"] * size.get("tensor", 1) if isinstance(size, dict) else size
    return parallel


SPECS = st.fixed_dictionaries(
    {},
    optional={
        "data": st.integers(1, 9),
        "pipeline": pipelines(),
        "sequence": sequences(),
        "tensor": tensors(),
        "expert": st.one_of(st.integers(1, 8), st.builds(lambda n: dict(size=n), st.integers(1, 8))),
        "zero": zeros(),
    },
).map(_fit_experts)


@given(parallel=SPECS)
@settings(max_examples=2 * settings().max_examples)
def test_every_spec_round_trips_and_its_axes_are_in_order(parallel: dict[str, Any]) -> None:
    spec = ParallelSpec.parse(parallel)
    again = ParallelSpec.parse(spec.to_dict())
    assert again == spec and again.to_dict() == spec.to_dict()
    rank = [
        "data",
        "pipe",
        "seq",
        "ring",
        "ulysses",
        "tensor",
        "depth",
        "row",
        "col",
        "a",
        "b",
        "c",
        "x",
        "y",
    ]
    places = [rank.index(axis) for axis in spec.axes]
    assert places == sorted(places)
    assert spec.world_size == math.prod(spec.axes.values())
    lines = spec.describe().splitlines()
    others = [name for name in parallel if name != "data"]
    has_data = spec.data != 1 or not others  # one data rank is no axis beside others
    assert len(lines) == 2 + has_data + len(others)
    assert lines[-1].split()[1] == str(spec.world_size)


def test_a_spec_of_names_goes_through_json() -> None:
    parallel = dict(data=2, pipeline=4, tensor=dict(mode="2d", grid=(2, 4)), zero=dict(gpu_memory_limit="1GiB"))
    spec = ParallelSpec.parse(parallel)
    assert ParallelSpec.parse(json.loads(json.dumps(spec.to_dict()))) == spec


def test_describe_is_a_table() -> None:
    spec = ParallelSpec.parse(
        dict(
            pipeline=dict(size=2, schedule="hanayo", microbatches=8),
            sequence=dict(mode="megatron"),
            tensor=4,
            zero=dict(stage=1, gpu_memory_limit="24GiB"),
        ),
        world_size=16,
    )
    assert spec.describe() == (
        "entry     ranks  axes      how\n"
        "data          2  data=2    each its own part of the batch\n"
        "pipeline      2  pipe=2    hanayo, microbatches 8, chunks 2, waves 1\n"
        "sequence      1            megatron over the axis tensor\n"
        "tensor        4  tensor=4  1d\n"
        "zero                       stage 1, placement auto, regime A, GPU at most 24 GiB\n"
        "world        16            rank order data > pipe > tensor, the last varies fastest"
    )


def test_small_memory_limits_are_described_in_their_own_unit() -> None:
    spec = ParallelSpec.parse(dict(zero=dict(gpu_memory_limit="1KiB", host_memory_limit="1.5MiB")))
    assert "GPU at most 1 KiB, host at most 1.50 MiB" in spec.describe()


# Experts


@pytest.mark.parametrize(
    ("parallel", "spread", "alike"),
    [
        (dict(data=4), (), ("data",)),
        (dict(data=4, expert=1), (), ("data",)),
        (dict(data=4, expert=2), ("data%2",), ("data/2",)),
        (dict(data=4, expert=4), ("data",), ()),
        (dict(data=2, expert=2, pipeline=4), ("data",), ()),
        (dict(data=2, expert=2, tensor=2), ("data",), ("tensor",)),
        (dict(data=2, expert=4, tensor=2), ("data", "tensor"), ()),
        (dict(data=2, expert=4, tensor=4), ("data", "tensor%2"), ("tensor/2",)),
        (dict(data=3, expert=2, tensor=2), ("tensor",), ("data",)),
        (dict(data=6, expert=4, sequence=dict(mode="ring", size=2)), ("data%2", "seq"), ("data/3",)),
        (dict(data=2, expert=2, tensor=dict(mode="2d", size=4)), ("data",), ("row", "col")),
        (dict(data=1, expert=2, tensor=dict(mode="2d", size=4)), ("row",), ("col",)),
    ],
)
def test_experts_are_folded_out_of_the_ranks_of_data_sequence_and_tensor(
    parallel: dict[str, Any], spread: tuple[str, ...], alike: tuple[str, ...]
) -> None:
    spec = ParallelSpec.parse(parallel)
    assert (spec.expert_axes, spec.expert_data_axes) == (spread, alike)
    mesh = Mesh(spec.axes, rank=0)
    assert mesh.size(*spread) == (1 if spec.expert is None else spec.expert.size)
    stages = mesh.size("pipe")
    assert mesh.size(*spread) * mesh.size(*alike) * stages == mesh.world_size
    for rank in range(mesh.world_size):  # a group of experts and one of their copies meet in one rank, within a stage
        experts = next(group for group in mesh.groups(*spread) if rank in group)
        copies = next(group for group in mesh.groups(*alike) if rank in group)
        assert set(experts) & set(copies) == {rank}
        assert {mesh.index("pipe", rank=one) for one in (*experts, *copies)} == {mesh.index("pipe", rank=rank)}
        assert [mesh.index(*spread, rank=one) for one in experts] == list(range(len(experts)))


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    pipe=st.integers(1, 3),
    size=st.integers(1, 24),
)
def test_every_size_that_divides_the_ranks_is_folded_and_every_other_refused(
    sizes: tuple[int, int, int], pipe: int, size: int
) -> None:
    data, seq, tensor = sizes
    parallel = dict(data=data, pipeline=pipe, sequence=dict(mode="ring", size=seq), tensor=tensor, expert=size)
    if data * seq * tensor % size:
        with pytest.raises(SpecError, match=f"size {size} does not divide"):
            ParallelSpec.parse(parallel)
        return
    spec = ParallelSpec.parse(parallel)
    mesh = Mesh(spec.axes, rank=0)
    assert mesh.size(*spec.expert_axes) == size
    assert mesh.size(*spec.expert_data_axes) == data * seq * tensor // size


@pytest.mark.parametrize(
    ("parallel", "experts", "parts", "copies"),
    [
        (dict(data=8, expert=dict(size=2, tensor=2)), ("data%4/2",), ("data%2",), ("data/2",)),
        (dict(data=4, expert=dict(size=2, tensor=2)), ("data/2",), ("data%2",), ()),
        (dict(data=4, expert=dict(size=1, tensor=2)), (), ("data%2",), ("data/2",)),
        (dict(data=4, expert=dict(size=1, tensor=4)), (), ("data",), ()),
        (dict(data=4, tensor=2, expert=dict(size=4, tensor=2)), ("data",), ("tensor",), ()),
        (dict(data=4, tensor=2, expert=dict(size=2, tensor=4)), ("data/2",), ("data%2", "tensor"), ()),
        (dict(data=2, tensor=4, expert=dict(size=2, tensor=2)), ("data",), ("tensor%2",), ("tensor/2",)),
    ],
)
def test_experts_are_shared_by_the_nearest_ranks(
    parallel: dict[str, Any], experts: tuple[str, ...], parts: tuple[str, ...], copies: tuple[str, ...]
) -> None:
    spec = ParallelSpec.parse(parallel)
    assert (spec.expert_axes, spec.expert_tensor_axes, spec.expert_data_axes) == (experts, parts, copies)
    assert spec.expert is not None and ParallelSpec.parse(spec.to_dict()) == spec
    mesh = Mesh(spec.axes, rank=0)
    for group in mesh.groups(*experts, *parts):  # in mesh order, neighbours share an expert
        numbers = [(mesh.index(*experts, rank=rank), mesh.index(*parts, rank=rank)) for rank in sorted(group)]
        assert numbers == [(e, p) for e in range(spec.expert.size) for p in range(spec.expert.tensor)]


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
    size=st.integers(1, 6),
    sharing=st.integers(2, 6),
)
@settings(max_examples=100, deadline=None)
def test_shared_experts_are_folded_with_neighbours_or_refused(
    sizes: tuple[int, int, int], size: int, sharing: int
) -> None:
    data, seq, tensor = sizes
    entry = dict(size=size, tensor=sharing)
    parallel = dict(data=data, sequence=dict(mode="ring", size=seq), tensor=tensor, expert=entry)
    if data * seq * tensor % (size * sharing):
        with pytest.raises(SpecError, match=r"does not divide .* Write "):
            ParallelSpec.parse(parallel)
        return
    try:
        spec = ParallelSpec.parse(parallel)
    except SpecError:  # neighbours would not share experts
        with pytest.raises(SpecError, match=r"cannot be shared by .* Write tensor="):
            ParallelSpec.parse(parallel)
        return
    mesh = Mesh(spec.axes, rank=0)
    axes = (*spec.expert_axes, *spec.expert_tensor_axes)
    assert (mesh.size(*spec.expert_axes), mesh.size(*spec.expert_tensor_axes)) == (size, sharing)
    assert mesh.size(*axes, *spec.expert_data_axes) == mesh.world_size
    for group in mesh.groups(*axes):
        places = [mesh.index(*axes, rank=rank) for rank in sorted(group)]
        assert places == list(range(size * sharing))


def test_the_exchange_of_experts_is_kept_as_it_was_written() -> None:
    for written in (dict(size=2), dict(size=2, exchange="all_gather"), dict(size=2, tensor=2, exchange="all_to_all")):
        spec = ParallelSpec.parse(dict(data=4, expert=written))
        assert spec.to_dict()["expert"] == written and ParallelSpec.parse(spec.to_dict()) == spec


def test_describe_says_where_experts_are() -> None:
    spec = ParallelSpec.parse(dict(data=4, tensor=2, expert=dict(size=2)))
    expert = "expert      2  data%2    4 copies of each expert, no ranks of their own"
    assert spec.describe().splitlines()[3] == expert
    shared = ParallelSpec.parse(dict(data=8, expert=dict(size=2, tensor=2))).describe().splitlines()[2]
    assert shared == "expert      4  data%4/2 data%2  2 copies of each expert, each over 2 ranks, no ranks of their own"
    open_spec = ParallelSpec.parse(dict(expert=3))
    assert "folded out of data once the world size is known" in open_spec.describe()
    assert "one copy of each expert" in open_spec.with_world_size(3).describe()


# What a spec needs


@pytest.mark.parametrize(
    ("parallel", "needs"),
    [
        (dict(data=2), ()),
        (dict(data=2, pipeline=1), ()),
        (dict(tensor=1), ("meshfold-tensor-parallel",)),
        (dict(tensor=2, sequence=dict(mode="megatron")), ("meshfold-tensor-parallel",)),
        (dict(pipeline=2), ("meshfold-pipeline",)),
        (dict(sequence=dict(mode="ring", size=2)), ("meshfold-pipeline",)),
        (dict(sequence=dict(mode="ulysses", size=2), pipeline=2), ("meshfold-pipeline",)),
        (dict(sequence=dict(mode="ring_ulysses", size=4, ulysses=2)), ("meshfold-pipeline",)),
        (dict(zero=dict(stage=1)), ("meshfold-zero-gemini",)),
        (dict(expert=2), ("meshfold-experts",)),
        (
            dict(zero=dict(stage=1), tensor=2, pipeline=2),
            ("meshfold-tensor-parallel", "meshfold-pipeline", "meshfold-zero-gemini"),
        ),
    ],
)
def test_required_distributions(parallel: dict[str, Any], needs: tuple[str, ...]) -> None:
    assert ParallelSpec.parse(parallel).required_distributions() == needs


def test_what_is_missing_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = dict(pipeline=2, zero=dict(stage=3), tensor=2, sequence=dict(mode="ring", size=2))
    spec = ParallelSpec.parse(parallel)
    present = {"meshfold.tensor_parallel"}
    monkeypatch.setattr("meshfold.mesh.spec.parallel.is_importable", lambda module: module in present)
    with pytest.raises(SpecError) as caught:
        spec.require_installed()
    for fragment in (
        "pipeline=2",
        "pipeline and sequence need meshfold-pipeline",
        "zero needs meshfold-zero-gemini",
        "run: pip install ./packages/pipeline ./packages/zero_gemini.",
    ):
        assert fragment in str(caught.value)
    with pytest.raises(SpecError) as caught:
        ParallelSpec.parse(dict(pipeline=2)).require_installed()
    assert str(caught.value) == (
        "parallel=dict(pipeline=2): pipeline needs meshfold-pipeline, which this installation does not have. "
        "In a clone of Meshfold's repository, run: pip install ./packages/pipeline."
    )
    present |= {"meshfold.pipeline", "meshfold.sequence", "meshfold.zero_gemini"}
    spec.require_installed()


def test_importable_sees_code_and_only_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_importable("meshfold.mesh")
    assert not is_importable("meshfold.no_such_package")
    assert not is_importable("no_such_namespace.child")
    (tmp_path / "spec_probe" / "empty").mkdir(parents=True)
    (tmp_path / "spec_probe" / "full").mkdir()
    (tmp_path / "spec_probe" / "full" / "__init__.py").write_text("raise RuntimeError('must not run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_importable("spec_probe.empty")
    assert is_importable("spec_probe.full")


def test_the_spec_imports_nothing_but_the_standard_library_and_the_errors() -> None:
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "fractions",
        "functools",
        "importlib",
        "inspect",
        "keyword",
        "math",
        "operator",
    }
    allowed |= {"os", "re", "typing"}
    files = sorted(Path(meshfold.mesh.spec.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name in ("meshfold.mesh.errors", "meshfold.mesh.spec") or name.startswith("meshfold.mesh.spec.")
                assert own or name.split(".")[0] in allowed, f"{file.name} imports {name}"


# The arithmetic behind the advice


@given(number=st.integers(0, 10**40), degree=st.integers(1, 5))
def test_root_is_exact(number: int, degree: int) -> None:
    base = root(number, degree)
    assert base**degree <= number < (base + 1) ** degree
    assert is_power(base**degree, degree)
    assert is_power(number, degree) == (base**degree == number)


def test_factors_against_counting() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
        for parts in (1, 2, 3, 4):
            split = balanced(number, parts)
            assert math.prod(split) == number and len(split) == parts
        pairs = [(a, b) for a, b in itertools.product(range(1, number + 1), repeat=2) if a * b == number and a <= b]
        assert balanced(number, 2) == min(pairs, key=lambda pair: pair[1] - pair[0])
    assert powers_near(6, 2) == (4, 9) and powers_near(2, 3) == (1, 8)
    assert balanced(12, 3) == (2, 2, 3)
    assert math.prod(balanced(10**18 + 3, 3)) == 10**18 + 3
