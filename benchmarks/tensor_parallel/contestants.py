"""Contestants: our modes and lowerings, torch's DTensor and FSDP2, and Colossal-AI's legacy 2D, on the same weights."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Contestant, synchronize
from benchmarks.tensor_parallel.parts import ARITHMETIC, MESSAGES, OF, PARTS, messages, without_messages
from benchmarks.tensor_parallel.work import Work

MODES: dict[str, tuple[str, dict[str, int]]] = {
    "1d+sequence": ("1d+sequence", {"tensor": 4}),
    "1d": ("1d", {"tensor": 4}),
    "1d+tokens": ("1d+tokens", {"tensor": 4}),
    "2d": ("2d", {"row": 2, "col": 2}),
    "3d": ("3d", {"a": 2, "b": 2, "c": 1}),
}
LOWERED = {
    "1d+sequence by ring": ("1d+sequence", "ring"),
    "2d by stream": ("2d", "stream"),
    "1d+sequence by push": ("1d+sequence", "push"),
    "1d+sequence by push compiled": ("1d+sequence", "push"),
    "1d+tokens by push compiled": ("1d+tokens", "push"),
}
COLOSSAL_AI = "Colossal-AI 2D"
PEERS = ("dtensor", "dtensor compiled", "dtensor compiled async", "FSDP2 compiled", COLOSSAL_AI)

NAMES = (*(f"{mode}{suffix}" for mode in MODES for suffix in ("", " compiled")), *LOWERED, *PEERS, *PARTS)


class _Stack(nn.Module):
    """Blocks in a list, called one by one: what parallelize converts."""

    flat_tokens = True

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def build(name: str, work: Work, args: argparse.Namespace) -> Contestant:
    synchronize()
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    try:
        made, inputs, check = _maker(name)(name, work, args)
    except Exception as error:  # a contestant that cannot run is a row with its reason
        if args.profile:
            raise
        return Contestant(name, note=f"could not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    x, dy = inputs

    def step() -> None:
        with without_messages() if name.startswith(ARITHMETIC) else nullcontext():
            out = made(x)
            if name != MESSAGES:
                out.backward(dy)
        x.grad = None

    contestant = Contestant(name, step)
    try:
        if name not in PARTS:  # these have no result
            with torch.no_grad():
                contestant.error = check(made(x))
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            step()
        synchronize()
        if torch.cuda.is_available():
            contestant.peak_bytes = torch.cuda.max_memory_allocated() - before
    except Exception as error:
        if args.profile:
            raise
        return Contestant(name, note=f"could not run: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
    return contestant


Built = tuple[Callable[[Tensor], Tensor], tuple[Tensor, Tensor], Callable[[Tensor], float]]


def _ours(name: str, work: Work, args: argparse.Namespace) -> Built:
    from meshfold.mesh import Mesh, Placement
    from meshfold.tensor_parallel import MODES as ALL
    from meshfold.tensor_parallel import parallelize

    of, lowering = LOWERED.get(name, (OF if name in PARTS else name.removesuffix(" compiled"), "gather"))
    mode, axes = MODES[of]
    if math.prod(axes.values()) != args.ranks:
        axes = (
            {"tensor": args.ranks}
            if mode.startswith("1d")
            else {**axes, next(iter(axes)): args.ranks // 2, list(axes)[1]: 2}
        )
    mesh = Mesh(axes)
    stack = _Stack([])
    for layer in range(args.layers):
        one = _Stack([work.block(layer)])
        parallelize(one, mesh, mode, lowering=lowering)
        stack.blocks.append(one.blocks[0])
    residual = ALL[mode].layout("residual")
    place = Placement(shape=tuple(work.x.shape), axes=(residual["m"], residual["h"]))
    x = place.shard(work.x, mesh).requires_grad_()
    dy = place.shard(work.dy, mesh)
    blocks = (
        [torch.compile(b, fullgraph=True, dynamic=False) for b in stack.blocks]
        if "compiled" in name
        else list(stack.blocks)
    )

    def forward(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, args.seq_len, work.rotary)
        return x

    parameters = list(stack.parameters())

    def run(x: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        return forward(x)

    made: Callable[[Tensor], Tensor] = run
    if name == MESSAGES:
        with torch.no_grad():
            made = messages(lambda: forward(x), mesh, x.dtype, x.device)
    return made, (x, dy), lambda out: work.error(out, place.shard(work.reference, mesh))


def _maker(name: str) -> Callable[[str, Work, argparse.Namespace], Built]:
    if name not in PEERS:
        return _ours
    if name == COLOSSAL_AI:
        return _colossal_ai
    return _fsdp2 if name.startswith("FSDP2") else _dtensor


def _fsdp2(name: str, work: Work, args: argparse.Namespace) -> Built:
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.peers.fsdp2_blocks import shard_blocks

    if args.batch % args.ranks:
        raise ValueError(f"--batch {args.batch}: FSDP2 takes whole sequences, as many on each of {args.ranks} ranks")
    device_mesh = init_device_mesh(work.device.type, (args.ranks,))
    stack = shard_blocks(_peer_blocks(work, args), device_mesh, compiled="compiled" in name)
    rank = device_mesh.get_local_rank()

    def cut(whole: Tensor) -> Tensor:
        return whole.view(args.batch, args.seq_len, -1).chunk(args.ranks)[rank].contiguous()

    def run(x: Tensor) -> Tensor:
        stack.zero_grad()
        found: Tensor = stack(x, *work.rotary)
        return found

    return run, (cut(work.x).requires_grad_(), cut(work.dy)), lambda out: work.error(out, cut(work.reference))


def _colossal_ai(name: str, work: Work, args: argparse.Namespace) -> Built:
    from benchmarks.peers.colossalai_2d import Block2D, Grid

    grid = Grid(args.ranks)
    stack = _Stack([])
    for layer in range(args.layers):
        stack.blocks.append(Block2D(grid, work.weights(layer), args.heads, args.kv_heads, 1e-5))

    def cut(whole: Tensor) -> Tensor:
        return grid.cut(whole.view(args.batch, args.seq_len, -1))

    def run(x: Tensor) -> Tensor:
        stack.zero_grad()
        for block in stack.blocks:
            x = block(x, *work.rotary)
        return x

    return run, (cut(work.x).requires_grad_(), cut(work.dy)), lambda out: work.error(out, cut(work.reference))


def _peer_blocks(work: Work, args: argparse.Namespace) -> list[Any]:
    from benchmarks.peers.dtensor import PeerBlock

    blocks = []
    for layer in range(args.layers):
        with torch.device("meta"):
            block = PeerBlock(args.hidden, args.heads, args.kv_heads, work.head_dim, args.ffn, 1e-5)
        block.fill(work.weights(layer))
        blocks.append(block)
    return blocks


def _dtensor(name: str, work: Work, args: argparse.Namespace) -> Built:
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.peers.dtensor import shard

    device_mesh = init_device_mesh(work.device.type, (args.ranks,))
    blocks = _peer_blocks(work, args)
    for block in blocks:
        shard(block, device_mesh)
    parameters = [p for block in blocks for p in block.parameters()]
    if "async" in name:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        enable_symm_mem_for_group(device_mesh.get_group().group_name)
    if "compiled" in name:
        options: dict[str, Any] | None = {"_micro_pipeline_tp": True} if "async" in name else None
        blocks = [torch.compile(b, fullgraph=True, dynamic=False, options=options) for b in blocks]
    rank = device_mesh.get_local_rank()

    def cut(whole: Tensor) -> Tensor:
        shaped = whole.view(args.batch, args.seq_len, -1)
        return shaped.chunk(args.ranks, 1)[rank].contiguous()

    x, dy = cut(work.x).requires_grad_(), cut(work.dy)

    def run(x: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        for block in blocks:
            x = block(x, *work.rotary)
        return x.to_local() if hasattr(x, "to_local") else x

    return run, (x, dy), lambda out: work.error(out, cut(work.reference))
