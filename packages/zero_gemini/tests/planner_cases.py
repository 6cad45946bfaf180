"""A machine and workloads for tests of the planner."""

from __future__ import annotations

from math import ceil

from meshfold.zero_gemini.planner import REGIMES, ChunkCost, GiB, Layer, Machine, MiB, Workload

EMULATED = Machine(
    name="emulated",
    flops=1e12,
    gpu_memory=100e9,
    h2d=2e9,
    d2h=2e9,
    pcie_both=3.5e9,
    host_memory=8e9,
    disk_read=0.4e9,
    disk_write=0.3e9,
    collective=4e9,
    gpu_bytes=64 * MiB,
    host_bytes=256 * MiB,
    disk_bytes=GiB,
    cpu_optimizer={"A": 1e9, "B": 0.9e9, "C": 0.15e9},
)
"""A small machine with the proportions of a real one: its compute device is an arena with a budget."""


def stack(
    *,
    machine: Machine,
    layers: int,
    layer_elems: int,
    tokens: int,
    regime: str = "A",
    clipping: bool = True,
    clip_probability: float = 1.0,
    data_ranks: int = 1,
    kept_bytes: int = 0,
    checkpoint_bytes: int = 0,
    working_bytes: int = 0,
    disk_buffer_bytes: int = 2**28,
    name: str = "stack",
) -> Workload:
    """Return a stack of equal layers, one chunk each: 2 FLOP an element and token in the forward, 4 in the backward.

    Args:
        layer_elems: elements of a whole layer, over all data ranks.
        tokens: of this rank.
        kept_bytes: activations of one layer that keeping holds besides its checkpoint.
        checkpoint_bytes: the input of one layer, held from its forward to its backward.
        working_bytes: what any timestep needs besides.
    """
    forward = machine.seconds(2.0 * layer_elems * tokens)
    last = 2 * layers - 1
    chunks = tuple(
        ChunkCost(
            name=f"layer{i}",
            elems=ceil(layer_elems / data_ranks),
            gathered_elems=ceil(layer_elems / data_ranks) * data_ranks,
            forward=(i, i),
            backward=(last - i, last - i),
            forward_seconds=forward,
            backward_seconds=2 * forward,
        )
        for i in range(layers)
    )
    kept = tuple(
        Layer(
            name=f"layer{i}",
            kept_bytes=kept_bytes,
            recompute_seconds=forward,
            first=i,
            last=max(i, last - i - 1),
        )
        for i in range(layers)
    )
    held = [checkpoint_bytes * (min(t, last - t) + 1) + working_bytes for t in range(2 * layers)]
    return Workload(
        name=name,
        chunks=chunks,
        layers=kept,
        non_model_bytes=tuple(held),
        forward_timesteps=layers,
        tokens=tokens,
        regime=REGIMES[regime],
        clipping=clipping,
        clip_probability=clip_probability,
        data_ranks=data_ranks,
        disk_buffer_bytes=disk_buffer_bytes,
    )
