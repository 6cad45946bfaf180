"""Everything a person can get wrong in a spec, and that the message says what to change."""

from __future__ import annotations

import doctest
import itertools
import re
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshfold.mesh.errors import (
    CollectiveError,
    LaunchError,
    LayoutError,
    MeshfoldError,
    SpecError,
    did_you_mean,
)
from meshfold.mesh.spec import ParallelSpec, TensorSpec


@dataclass(frozen=True)
class OwnMode:
    name: Any
    axes: Any


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def tensor(**entry: Any) -> dict[str, Any]:
    return {"tensor": entry}


def pipeline(**entry: Any) -> dict[str, Any]:
    return {"pipeline": {"size": 2, **entry}}


def sequence(**entry: Any) -> dict[str, Any]:
    return {"sequence": entry}


def zero(**entry: Any) -> dict[str, Any]:
    return {"zero": entry}


# (what was written, fragments the message must hold)
MALFORMED: list[tuple[Any, list[str]]] = [
    # not a dict at all
    (None, ["parallel=None", "is None, not a dict", "parallel=dict(data=2, tensor=4)", "parallel={}"]),
    ([], ["parallel=[]", "a list, not a dict"]),
    ("tensor=4", ["parallel='tensor=4'", "a string, not a dict"]),
    (4, ["parallel=4", "an int, not a dict"]),
    (True, ["parallel=True", "a bool, not a dict"]),
    (ParallelSpec(), ["a ParallelSpec, not a dict"]),
    # unknown entries
    (
        {"pipelin": 2},
        ["pipelin=2", "'pipelin'", "Did you mean 'pipeline'?", "data, pipeline, sequence, tensor, axial, expert, zero"],
    ),
    ({"Tensor": 4}, ["Tensor=4", "Did you mean 'tensor'?"]),
    ({"dp": 4}, ["dp=4", "Did you mean 'data'?"]),
    ({"tp": {"size": 4}}, ["tp=dict(size=4)", "Did you mean 'tensor'?"]),
    ({"seq": 4}, ["seq=4", "Did you mean 'sequence'?"]),
    ({"wibble": 1}, ["wibble=1", "there is no entry 'wibble'. Known"]),
    (
        dict(mode="2d", size=4),
        ["there is no entry 'mode'", "goes into tensor, sequence or axial, as tensor=dict(mode='2d', ...)."],
    ),
    (dict(stage=3), ["there is no entry 'stage'", "goes into zero, as zero=dict(stage=3, ...)."]),
    ({1: 2}, ["parallel={1: 2}", "the key 1 is an int, not a name"]),
    ({None: 2, "data": 2}, ["the key None is None, not a name"]),
    # data
    ({"data": True}, ["data=True is a bool, not an int", "Write data=2"]),
    ({"data": 0}, ["data=0 is zero", "the minimum is 1"]),
    ({"data": -2}, ["data=-2 is negative"]),
    ({"data": 3.0}, ["data=3.0 is a float, not an int", "Write data=3"]),
    ({"data": 2.5}, ["data=2.5 is a float", "Write data=2."]),
    ({"data": float("nan")}, ["data=nan is a float"]),
    ({"data": float("inf")}, ["data=inf is a float"]),
    ({"data": "4"}, ["data='4' is a string, not an int", "Write data=4"]),
    ({"data": None}, ["data=None is None, not an int"]),
    ({"data": {"size": 2}}, ["data=dict(size=2) is a dict, not an int"]),
    ({"data": np.int64(6)}, ["data=", "an int64, not an int", "Write data=6"]),
    ({"data": 10**5000}, ["data is more than any machine has"]),
    ({"data": Unprintable()}, ["data=<Unprintable> is a Unprintable, not an int"]),
    # tensor: the entry
    ({"tensor": None}, ["tensor=None", "not a dict", "tensor=4 (1d) or tensor=dict(mode='2d', size=4)"]),
    ({"tensor": True}, ["tensor=True is a bool"]),
    ({"tensor": 0}, ["tensor=0 is zero"]),
    ({"tensor": -4}, ["tensor=-4 is negative"]),
    ({"tensor": "2d"}, ["tensor='2d'", "a string, not a dict", "tensor=dict(mode='2d', size=4)"]),
    ({"tensor": 4.0}, ["tensor=4.0", "a float, not a dict"]),
    ({"tensor": (2, 2)}, ["tensor=(2, 2)", "a tuple, not a dict"]),
    (tensor(), ["tensor=dict()", "size is missing", "Write size=2"]),
    (tensor(mode="2d"), ["tensor=dict(mode='2d')", "size is missing", "size=4 or grid=(2, 2)"]),
    (tensor(mode="3d"), ["size is missing", "size=8 or grid=(2, 2, 2)"]),
    (tensor(mod="2d", size=4), ["tensor=dict(mod='2d', size=4)", "no key 'mod'", "Did you mean 'mode'?"]),
    (tensor(size=4, ranks=4), ["no key 'ranks'", "Did you mean 'size'?"]),
    (tensor(size=4, zzz=4), ["no key 'zzz'. Known keys: mode, size, depth, grid, overlap"]),
    ({"tensor": {2: 4}}, ["tensor={2: 4}", "the key 2 is an int, not a name"]),
    # tensor: sizes
    (tensor(size=True), ["tensor=dict(size=True)", "size=True is a bool"]),
    (tensor(mode="2d", size=0), ["tensor=dict(mode='2d', size=0)", "size=0 is zero"]),
    (tensor(mode="3d", size=-8), ["size=-8 is negative"]),
    (tensor(mode="2d", size="4"), ["size='4' is a string", "Write size=4."]),
    (tensor(mode="2d", size=4.0), ["size=4.0 is a float", "Write size=4."]),
    (tensor(size=None), ["size=None is None"]),
    (tensor(mode="2d", size=6), ["tensor=dict(mode='2d', size=6)", "a square", "size=4 or 9", "grid=(2, 3)"]),
    (tensor(mode="2d", size=8), ["size=4 or 9", "grid=(2, 4)"]),
    (tensor(mode="2d", size=2), ["size=1 or 4", "grid=(1, 2)"]),
    (
        tensor(mode="3d", size=4),
        ["tensor=dict(mode='3d', size=4)", "a cube", "size=1 or 8", "grid=(1, 2, 2)"],
    ),
    (tensor(mode="3d", size=12), ["size=8 or 27", "grid=(2, 2, 3)"]),
    # tensor: depth
    (tensor(mode="2.5d", size=8), ["needs depth", "size = depth × row × col", "Write depth=2 or 8"]),
    (tensor(mode="2.5d", grid=(2, 2)), ["needs depth", "Write depth=2"]),
    (tensor(mode="2.5d", grid=(3, 2, 2)), ["needs depth", "Write depth=3, grid=(2, 2)"]),
    (tensor(mode="2.5d", depth=2), ["size is missing", "size=8 or grid=(2, 2)"]),
    (
        tensor(mode="2.5d", size=8, depth=3),
        ["depth 3 does not divide size 8", "depth=2 or 8", "size=3, 12 or 27"],
    ),
    (
        tensor(mode="2.5d", size=12, depth=2),
        ["12 / depth 2 = 6", "size=8 or 18", "grid=(2, 3)", "depth=3 or 12"],
    ),
    (tensor(mode="2.5d", size=6, depth=1), ["depth × a square", "size=4 or 9", "depth=6"]),
    (tensor(mode="2.5d", size=8, depth=0), ["depth=0 is zero"]),
    (tensor(mode="2.5d", size=8, depth=True), ["depth=True is a bool"]),
    (tensor(mode="2.5d", size=8, depth=2.0), ["depth=2.0 is a float", "Write depth=2."]),
    (tensor(mode="2.5d", size=8, depth=None), ["depth=None is None"]),
    (tensor(mode="2d", size=4, depth=1), ["depth belongs to mode '2.5d'", "row, col", "Leave depth out"]),
    (tensor(size=4, depth=2), ["depth belongs to mode '2.5d'", "mode '1d'"]),
    # tensor: grid
    (tensor(mode="2d", grid=4), ["grid=4 is an int, not a tuple", "grid=(row, col), e.g. grid=(2, 2)"]),
    (tensor(mode="2d", grid="2x2"), ["grid='2x2' is a string"]),
    (tensor(mode="2d", grid=None), ["grid=None is None"]),
    (tensor(mode="2d", grid=()), ["grid=() has 0 entries", "takes 2"]),
    (tensor(mode="2d", grid=(2, 2, 2)), ["grid=(2, 2, 2) has 3 entries, but mode '2d' takes 2"]),
    (tensor(mode="3d", grid=(2, 2)), ["2 entries", "mode '3d' takes 3", "grid=(a, b, c)"]),
    (tensor(mode="2.5d", depth=2, grid=(2, 2, 2)), ["takes 2", "grid=(2, 2) beside depth"]),
    (tensor(mode="2d", grid=(2, 0)), ["grid[1]=0 is zero"]),
    (tensor(mode="2d", grid=(True, 2)), ["grid[0]=True is a bool"]),
    (tensor(mode="2d", grid=(2.0, 2)), ["grid[0]=2.0 is a float"]),
    (tensor(mode="2d", size=4, grid=(2, 4)), ["2 × 4 = 8 is not the size 4", "size=8", "grid=(2, 2)"]),
    (tensor(mode="2.5d", size=8, depth=2, grid=(2, 4)), ["depth 2 × 2 × 4 = 16", "size=16", "grid=(2, 2)"]),
    (tensor(mode="2.5d", size=9, depth=2, grid=(2, 2)), ["depth 2 × 2 × 2 = 8 is not the size 9", "size=8"]),
    (tensor(size=4, grid=(2, 2)), ["mode '1d' takes no grid", "size=4, or mode='2d'"]),
    # tensor: modes
    (tensor(mode="1d+sequence", size=4), ["two entries", "Write tensor=4, sequence=dict(mode='megatron')."]),
    (tensor(mode="1d+tokens", size=4), ["key of its own", "tensor=dict(mode='1d', size=4, attention='tokens')"]),
    (tensor(mode="1d", size=4, attention="token"), ["no attention 'token'", "Did you mean 'tokens'?"]),
    (
        tensor(mode="2d", size=4, attention="tokens"),
        ["needs a stream split by tokens", "mode is '2d'", "Write mode='1d'"],
    ),
    (
        dict(**tensor(size=2, attention="tokens"), sequence=dict(mode="ring", size=2)),
        ["attention='tokens'", "splits the sequence over the axis tensor by itself", "Leave sequence out"],
    ),
    (tensor(mode="2D", size=4), ["no mode '2D'", "Did you mean '2d'?", "1d, 2d, 2.5d, 3d"]),
    (tensor(mode="4d", size=4), ["no mode '4d'", "Known: 1d, 2d, 2.5d, 3d"]),
    (tensor(mode="", size=4), ["no mode ''"]),
    (
        tensor(mode="sequence", size=4),
        ["'sequence' is no mode of tensor", "sequence=dict(mode='ring', size=4)"],
    ),
    (tensor(mode=None, size=4), ["mode=None is None", "Known: 1d"]),
    (tensor(mode=2, size=4), ["mode=2 is an int"]),
    (tensor(mode=["2d"], size=4), ["mode=['2d'] is a list"]),
    (tensor(mode=OwnMode("m", None), size=4), [".axes"]),
    (tensor(mode=OwnMode(3, ("x",)), size=4), [".name"]),
    (tensor(mode=OwnMode("m", ("x", "data")), size=4), ["'data'", "belongs to another entry", "'data_t'"]),
    (tensor(mode=OwnMode("m", ("x", "y y")), size=4), ["'y y'", "not a plain name"]),
    (tensor(mode=OwnMode("m", ("x", 2)), size=4), ["the axis 2 of mode 'm' is not a plain name"]),
    (tensor(mode=OwnMode("m", ("x", "x")), size=4), ["has the axes ('x', 'x')", "different axes"]),
    (tensor(mode=OwnMode("m", ()), size=4), ["has the axes ()"]),
    (tensor(mode=OwnMode("m", ("depth",)), size=4), ["not 'depth' alone"]),
    (tensor(mode=OwnMode("m", ("x", "y")), size=6), ["mode 'm' needs a square", "grid=(2, 3)"]),
    (
        tensor(mode=OwnMode("m", tuple("wxyz")), size=6),
        ["to the power 4", "size=1 or 16", "grid=(1, 1, 2, 3)"],
    ),
    (tensor(mode=OwnMode("m", ("x", "y")), grid=(2,)), ["grid=(2,) has 1 entry,", "grid=(x, y)"]),
    (tensor(mode=OwnMode("m", ("x",)), grid=(2,)), ["takes no grid", "only free axis is x"]),
    # tensor: overlap
    (tensor(size=4, overlap="sumna"), ["no overlap 'sumna'", "Known: auto, gather, stream, ring, push, or None"]),
    (tensor(size=4, overlap="streem"), ["Did you mean 'stream'?"]),
    (tensor(size=4, overlap=True), ["overlap=True is a bool, not a name"]),
    (tensor(size=4, overlap="stream"), ["overlap='stream' needs panels", "'1d'", "overlap='ring'"]),
    # pipeline
    ({"pipeline": None}, ["pipeline=None", "pipeline=2 or pipeline=dict(size=2"]),
    ({"pipeline": True}, ["pipeline=True is a bool"]),
    ({"pipeline": -1}, ["pipeline=-1 is negative"]),
    ({"pipeline": 2.0}, ["pipeline=2.0", "a float, not a dict", "pipeline=2"]),
    ({"pipeline": "1f1b"}, ["pipeline='1f1b'", "pipeline=dict(size=2, schedule='1f1b')"]),
    ({"pipeline": {}}, ["pipeline=dict()", "size is missing", "Write size=2"]),
    (pipeline(size="2"), ["size='2' is a string"]),
    (pipeline(num_microbatches=4), ["no key 'num_microbatches'", "Did you mean 'microbatches'?"]),
    (
        pipeline(schedule="1F1B"),
        ["no schedule '1F1B'", "Did you mean '1f1b'?", "dualpipe-v, auto, or a callable"],
    ),
    (pipeline(schedule="zbh1"), ["Did you mean 'zb-h1'?"]),
    (pipeline(schedule=None), ["schedule=None is None, not a name", "or a callable"]),
    (pipeline(schedule=1), ["schedule=1 is an int"]),
    (pipeline(microbatches=0), ["microbatches=0 is zero", "Write microbatches=4"]),
    (pipeline(microbatches=8.0), ["microbatches=8.0 is a float", "Write microbatches=8."]),
    (pipeline(chunks=2), ["'1f1b' takes no chunks", "schedule='interleaved'"]),
    (pipeline(schedule="zb-v", chunks=3), ["'zb-v' takes no chunks: a rank always holds 2, not 3"]),
    (pipeline(schedule="hanayo", chunks=6), ["2 chunks a wave", "waves=3"]),
    (pipeline(schedule="interleaved", chunks=0), ["chunks=0 is zero"]),
    (pipeline(waves=2), ["waves belongs to schedule 'hanayo'", "'1f1b'", "Leave waves out"]),
    (pipeline(schedule=len, waves=2), ["waves belongs to schedule 'hanayo'", "a callable"]),
    (pipeline(schedule="hanayo", waves=-1), ["waves=-1 is negative"]),
    # sequence
    ({"sequence": None}, ["sequence=None", "sequence=dict(mode='ring', size=2)"]),
    ({"sequence": 2}, ["sequence=2", "sequence=dict(mode='ring', size=2)"]),
    ({"sequence": 4}, ["sequence=4", "sequence=dict(mode='ring', size=4)"]),
    (sequence(size=2), ["mode is missing", "'ring', 'ulysses', 'ring_ulysses' or 'megatron'"]),
    (sequence(mode="ring"), ["sequence=dict(mode='ring')", "size is missing"]),
    (sequence(mode="ring", size=False), ["size=False is a bool"]),
    (sequence(mode="Ring", size=2), ["no mode 'Ring'", "Did you mean 'ring'?"]),
    (sequence(mode="ulises", size=2), ["Did you mean 'ulysses'?"]),
    (sequence(mode=2, size=2), ["mode=2 is an int"]),
    (sequence(mode="ring", size=2, ring=2), ["no key 'ring'"]),
    (sequence(mode="ring", size=4, ulysses=2), ["ulysses belongs to mode 'ring_ulysses'", "'ring'"]),
    (sequence(mode="ulysses", size=4, ulysses=2), ["ulysses belongs to mode 'ring_ulysses'"]),
    (sequence(mode="ring_ulysses", size=6), ["needs ulysses", "ulysses=1, 2, 3 or 6"]),
    (sequence(mode="ring_ulysses", size=6, ulysses=4), ["ulysses 4 does not divide size 6", "1, 2, 3 or 6"]),
    (sequence(mode="ring_ulysses", size=6, ulysses="2"), ["ulysses='2' is a string"]),
    # combinations
    (sequence(mode="megatron"), ["there is no tensor entry", "tensor=dict(mode='1d', size=2)"]),
    (
        {**sequence(mode="megatron", size=4), **tensor(size=4)},
        ["takes no size", "tensor=dict(mode='1d', size=4)"],
    ),
    ({**sequence(mode="megatron", ulysses=2), **tensor(size=4)}, ["takes no ulysses"]),
    (
        {**sequence(mode="megatron"), **tensor(mode="2d", size=4)},
        ["needs tensor mode '1d'", "tensor=dict(mode='2d', size=4)", "tensor=dict(mode='1d', size=4)"],
    ),
    # expert
    ({"expert": None}, ["expert is None, not a dict", "Write expert=2 or expert=dict(size=2)"]),
    ({"expert": True}, ["expert=True is a bool, not an int"]),
    ({"expert": 0}, ["expert=0 is zero", "the minimum is 1"]),
    ({"expert": "4"}, ["expert='4'", "a string, not a dict"]),
    ({"expert": {}}, ["expert=dict()", "size is missing", "Write size=2"]),
    ({"expert": {"size": 2.0}}, ["size=2.0 is a float, not an int", "Write size=2"]),
    ({"expert": {"size": -2}}, ["size=-2 is negative"]),
    ({"expert": {"ranks": 2}}, ["expert has no key 'ranks'. Did you mean 'size'?", "Known keys: size"]),
    (
        {"expert": dict(size=2, exchange="padded")},
        ["exchange='padded'", "no exchange 'padded'", "auto, all_to_all, all_gather"],
    ),
    ({"ep": 2}, ["ep=2", "Did you mean 'expert'?"]),
    ({"moe": dict(size=2)}, ["Did you mean 'expert'?"]),
    (
        {"expert": 3, "data": 2, "tensor": 2},
        ["expert=dict(size=3)", "3 does not divide data=2 × tensor=2 = 4", "Write size=1, 2 or 4."],
    ),
    (
        {"expert": dict(size=4), "data": 2, "pipeline": 2},
        ["along data, sequence and tensor", "size 4 does not divide data=2.", "Write size=1 or 2."],
    ),
    ({"expert": 2, "data": 1}, ["size 2 does not divide data=1.", "Write data=2 beside it, or size=1."]),
    # zero
    ({"zero": None}, ["zero=None", "zero=dict(stage=3)"]),
    ({"zero": 2}, ["zero=2", "an int, not a dict", "zero=dict(stage=2)"]),
    ({"zero": True}, ["zero=True", "a bool, not a dict"]),
    (zero(stage=0), ["stage=0 is zero"]),
    (zero(stage=4), ["no stage 4", "1 (optimizer state), 2 (and gradients) or 3"]),
    (zero(stage="3"), ["stage='3' is a string", "Write stage=3"]),
    (zero(stage=True), ["stage=True is a bool"]),
    (zero(stage=3, placment="auto"), ["no key 'placment'", "Did you mean 'placement'?"]),
    (zero(tensor_placement_policy="auto"), ["Did you mean 'placement'?"]),
    (zero(placement="gpu"), ["no placement 'gpu'", "Did you mean 'cuda'?", "auto, cuda, cpu, static, const"]),
    (zero(placement=None), ["placement=None is None"]),
    (zero(transport="nvlink"), ["no transport 'nvlink'", "Known: nccl, auto, push"]),
    (zero(regime="D"), ["no regime 'D'", "Known: A, B, C"]),
    (zero(regime="a"), ["no regime 'a'", "Did you mean 'A'?"]),
    (zero(offload_path=""), ["offload_path='' is empty"]),
    (zero(offload_path=3), ["offload_path=3 is an int, not a path"]),
    (zero(offload_path=b"x"), ["a bytes, not a path"]),
    (zero(placement="cuda", offload_path="disk"), ["nothing would reach offload_path", "placement='auto'"]),
    (
        zero(placement="cuda", reshard_after_forward=0),
        ["reshard_after_forward=0 is an int, not a bool", "Write True"],
    ),
    (
        zero(stage=2, placement="cuda", reshard_after_forward=False),
        ["stage 2 keeps whole parameters", "write stage=3"],
    ),
    (zero(reshard_after_forward=False), ["placement 'auto' decides itself", "write placement='cuda'"]),
    (zero(gpu_memory_limit=0), ["gpu_memory_limit=0 is zero"]),
    (zero(gpu_memory_limit=-1), ["gpu_memory_limit=-1 is negative"]),
    (zero(gpu_memory_limit=24e9), ["a float, neither a whole number of bytes nor a string"]),
    (zero(host_memory_limit=True), ["host_memory_limit=True is a bool"]),
    (zero(host_memory_limit="24"), ["has no unit", "host_memory_limit='24GiB'"]),
    (zero(host_memory_limit="24GiBs"), ["no unit 'GiBs'", "Did you mean 'GiB'?"]),
    (zero(host_memory_limit="lots"), ["not an amount of memory"]),
    (zero(host_memory_limit="-3GiB"), ["not an amount of memory"]),
    (zero(gpu_memory_limit="0GiB"), ["less than one byte"]),
    (zero(offload_optim_frac=0.5), ["belongs to placement 'static'", "'auto'"]),
    (zero(placement="cpu", offload_param_frac=0.5), ["belongs to placement 'static'", "'cpu'"]),
    (zero(placement="static", offload_optim_frac=1.5), ["offload_optim_frac=1.5 is not between 0 and 1"]),
    (zero(placement="static", offload_param_frac=-0.1), ["offload_param_frac=-0.1 is not between 0 and 1"]),
    (zero(placement="static", offload_param_frac=float("nan")), ["nan is not between 0 and 1"]),
    (zero(placement="static", offload_param_frac="0.5"), ["a string, not a number"]),
    (zero(placement="static", offload_param_frac=True), ["a bool, not a number"]),
]


@pytest.mark.parametrize(("parallel", "fragments"), MALFORMED)
def test_a_malformed_spec_is_told_what_to_change(parallel: Any, fragments: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ParallelSpec.parse(parallel)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert re.search(r"\b(Write|Known|Leave|Name|Give)\b", message), f"no way out: {message}"
    assert message.endswith(".") and "\n" not in message and len(message) < 700
    if isinstance(parallel, dict) and len(parallel) == 1 and isinstance(next(iter(parallel)), str):
        assert next(iter(parallel)) in message.split(" ")[0]  # the entry is quoted first


def test_the_table_is_as_large_as_it_says() -> None:
    assert len({repr(fragments) for _, fragments in MALFORMED}) >= 150


WRONG_WORLDS: list[tuple[dict[str, Any], Any, list[str]]] = [
    (
        dict(data=2, tensor=4),
        16,
        [
            "parallel=dict(data=2, tensor=4)",
            "data=2 × tensor=4 makes 8 ranks",
            "size is 16",
            "data=4",
            "start 8",
        ],
    ),
    (dict(data=4, tensor=4), 8, ["makes 16 ranks", "Write data=2"]),
    (
        dict(data=2, tensor=4),
        6,
        ["4 does not divide 6", "Start 8 processes, or give tensor 3 ranks instead of 4."],
    ),
    (dict(data=2, tensor=3), 8, ["3 does not divide 8", "Start 6 processes, or give tensor 4 ranks instead of 3."]),
    (
        dict(data=2, tensor=dict(mode="2d", size=4)),
        1,
        ["makes 8 ranks, but the world size is 1", "'meshfold run --ranks 8 SCRIPT.py'", "leave data and tensor out."],
    ),
    (dict(data=8, tensor=3), 8, ["makes 24 ranks", "Start 24 processes, or leave tensor out."]),
    (
        dict(data=3, tensor=3),
        8,
        ["Start 9 processes, or leave data out and give tensor 1, 2, 4 or 8 ranks instead of 3."],
    ),
    (dict(tensor=dict(mode="3d", size=8)), 12, ["a=2 × b=2 × c=2", "Start 8 or 16 processes"]),
    (dict(pipeline=3), 2, ["parallel=dict(pipeline=3)", "pipeline=3 makes 3", "Start 3 processes", "1 or 2"]),
    (
        dict(pipeline=2, sequence=dict(mode="ring", size=3)),
        7,
        [
            "pipeline=2 × sequence=3",
            "6 does not divide 7",
            "6 or 12",
            "give pipeline and sequence together 1 or 7 ranks",
        ],
    ),
    (dict(tensor=4), 0, ["world_size=0 is zero"]),
    (dict(tensor=4), -4, ["world_size=-4 is negative"]),
    (dict(tensor=4), True, ["world_size=True is a bool"]),
    (dict(tensor=4), "8", ["world_size='8' is a string", "Write world_size=8"]),
    (dict(tensor=4), 8.0, ["world_size=8.0 is a float", "Write world_size=8"]),
]


@pytest.mark.parametrize(("parallel", "world_size", "fragments"), WRONG_WORLDS)
def test_a_product_that_misses_the_world_size(parallel: dict[str, Any], world_size: Any, fragments: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        ParallelSpec.parse(parallel, world_size=world_size)
    with pytest.raises(SpecError) as caught_later:
        ParallelSpec.parse(parallel).with_world_size(world_size)
    for fragment in fragments:
        assert fragment in str(caught.value), str(caught.value)
    assert str(caught_later.value) == str(caught.value)


def test_the_ranks_that_a_message_proposes_make_the_world_size() -> None:
    proposed = 0
    for data, size, world in itertools.product((None, 1, 2, 3, 4), range(2, 9), range(1, 17)):
        given: dict[str, Any] = {} if data is None else {"data": data}
        try:
            ParallelSpec.parse({**given, "tensor": size}, world_size=world)
        except SpecError as error:
            for left_out, ranks in re.findall(r"(leave data out and )?give tensor ([\d, or]+) ranks", str(error)):
                for number in re.findall(r"\d+", ranks):
                    proposed += 1
                    entries = {} if left_out else given
                    ParallelSpec.parse({**entries, "tensor": int(number)}, world_size=world)
    assert proposed > 200


def advice(message: str) -> list[dict[str, Any]]:
    """The changes that a message about sizes proposes, each as keys to put in place of the old ones."""
    _, _, change = message.partition(" Write ")
    changes: list[dict[str, Any]] = []
    for key, numbers in re.findall(r"\b(size|depth)=(\d+(?:, \d+)*(?: or \d+)?)", change):
        changes += [{key: int(number)} for number in re.findall(r"\d+", numbers)]
    for numbers in re.findall(r"grid=\(([\d, ]+)\)", change):
        changes.append({"grid": tuple(int(number) for number in numbers.split(", "))})
    return changes


@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_the_sizes_that_a_message_proposes_work(mode: str) -> None:
    refused = 0
    for size in range(1, 40):
        for depth in (1, 2, 3, 4) if mode == "2.5d" else (None,):
            entry: dict[str, Any] = dict(mode=mode, size=size, **({} if depth is None else {"depth": depth}))
            try:
                TensorSpec.parse(entry)
            except SpecError as error:
                refused += 1
                changes = advice(str(error))
                assert len(changes) >= 2
                for change in changes:
                    TensorSpec.parse({**entry, **change})
    assert refused > 20


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 9),
        st.floats(),
        st.text(
            [chr(code) for code in (*range(0x250), 0x4E2D, 0x1F600)], max_size=4
        ),  # of all Unicode would cost seconds
        st.sampled_from(
            ["1d", "2d", "2.5d", "3d", "ring", "ring_ulysses", "megatron", "hanayo", "static", "A", "9GiB"]
        ),
        st.just(OwnMode("own", ("x", "y"))),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.tuples(inner, inner)),
    max_leaves=3,
)
KEYS = [
    "mode",
    "size",
    "depth",
    "grid",
    "overlap",
    "schedule",
    "microbatches",
    "chunks",
    "waves",
    "ulysses",
    "stage",
]
ENTRY = st.one_of(
    JUNK, st.dictionaries(st.sampled_from([*KEYS, "placement", "offload_path", "other"]), JUNK, max_size=4)
)
ENTRY_NAMES = st.sampled_from(["data", "pipeline", "sequence", "tensor", "expert", "zero"])


@settings(max_examples=6 * settings().max_examples // 5)
@given(parallel=st.one_of(JUNK, st.dictionaries(ENTRY_NAMES, ENTRY, max_size=2)), world=st.none() | JUNK)
def test_whatever_is_written_gives_a_spec_or_a_spec_error(parallel: Any, world: Any) -> None:
    try:
        spec = ParallelSpec.parse(parallel, world)
    except SpecError:  # any other exception fails the test
        return
    assert ParallelSpec.parse(spec.to_dict()) == spec


def test_dict_subclasses_are_dicts() -> None:
    assert ParallelSpec.parse(OrderedDict(tensor=OrderedDict(mode="2d", size=4))).world_size == 4


def test_the_errors_are_what_people_catch() -> None:
    assert issubclass(SpecError, ValueError) and issubclass(LayoutError, ValueError)
    assert issubclass(LaunchError, RuntimeError) and issubclass(CollectiveError, RuntimeError)
    for error in (SpecError, LayoutError, LaunchError, CollectiveError):
        assert issubclass(error, MeshfoldError)


def test_nearest() -> None:
    known = ["data", "pipeline", "tensor"]
    assert did_you_mean("pipelin", known) == " Did you mean 'pipeline'?"
    assert did_you_mean("TENSOR", known) == " Did you mean 'tensor'?"
    assert did_you_mean("quux", known) == ""
    assert did_you_mean("data", []) == ""
    assert did_you_mean("Row", (name for name in ("row", "col"))) == " Did you mean 'row'?"


def test_the_example_of_did_you_mean_is_what_it_prints() -> None:
    assert doctest.testmod(sys.modules["meshfold.mesh.errors"]) == doctest.TestResults(failed=0, attempted=2)
