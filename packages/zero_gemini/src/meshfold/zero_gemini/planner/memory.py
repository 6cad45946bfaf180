"""Bytes of a choice: on the GPU at every timestep, on the host, on disk.

Source: design of the split master; per element ``parameter`` + ``state`` where the state lives (12 bytes in regime A), 2
more for a gradient that is held for clipping. Arenas on the host and on disk are allocated once, so they do not change
from timestep to timestep.
"""

from __future__ import annotations

import numpy as np

from meshfold.zero_gemini.planner.options import (
    GPU_ONLY,
    SPECULATIVE_STEP,
    SPLIT_STEP_ON_DEVICE,
    WITH_DISK,
    Bools,
    Builder,
    Floats,
    Ints,
    Table,
)
from meshfold.zero_gemini.planner.workload import ChunkCost, Workload

KINDS = ("non-model", "kept activations", "resident parameters", "gathered", "gradients", "optimizer state")


def gather_windows(chunk: ChunkCost, workload: Workload) -> tuple[tuple[int, int], ...]:
    """Return the windows (first and last timestep) in which the chunk is gathered.

    One window per use; uses that meet, or between which the chunk stays gathered, share one.
    """
    found: list[tuple[int, int]] = []
    for first, last in chunk.uses:
        begin = workload.ready_from(first)
        if found and (begin <= found[-1][1] + 1 or not workload.reshards):
            found[-1] = (found[-1][0], last)
        else:
            found.append((begin, last))
    return tuple(found)


def gpu_kinds(workload: Workload) -> dict[str, Floats]:
    """Return the bytes of every chunk on the GPU by kind; each: chunk option timestep."""
    n, timesteps, regime = len(workload.chunks), workload.timesteps, workload.regime
    out = {kind: np.zeros((n, 5, timesteps)) for kind in KINDS[2:]}
    for i, chunk in enumerate(workload.chunks):
        gathered = int(np.ceil(regime.parameter * chunk.gathered_elems))
        alone = chunk.elems == chunk.gathered_elems
        if workload.stage < 3:
            out["resident parameters"][i] = gathered
        else:
            out["resident parameters"][i, (0, 1, 3)] = int(np.ceil(regime.parameter * chunk.elems))
            for first, last in gather_windows(chunk, workload):
                # a resident shard that is the whole chunk is used in place
                out["gathered"][i, (2, 4) if alone else slice(None), first : last + 1] = gathered
        if chunk.trainable:
            out["gradients"][i] = _gradient_bytes(chunk, workload)
            out["optimizer state"][i, 0] = int(np.ceil(regime.state * chunk.elems))
    return out


def _gradient_bytes(chunk: ChunkCost, workload: Workload) -> Floats:
    """Return a chunk's gradient bytes on the GPU, (option, timestep): whole during its backward, then a shard until offloaded.

    While ranks sum a gradient, in parallel with the next unit's backward, the whole gradient and its sum are both there.
    """
    out = np.zeros((5, workload.timesteps))
    whole = int(np.ceil(workload.collected(chunk) * chunk.gathered_elems))
    shard = whole if workload.whole_gradients else int(np.ceil(workload.regime.gradient * chunk.elems))
    start, end = chunk.backward
    start = start if chunk.gradient_from is None else chunk.gradient_from
    end = end if chunk.reduced_in is None else chunk.reduced_in
    summed = workload.accumulation > 1  # the earlier micro-steps' sum is resident or fetched
    out[:, start : end + 1] = whole + shard * summed
    if workload.whole_gradients:
        out[0, start : end + 1] = whole  # added to in place
    out[:, end + 1 : end + 1 + workload.drain_timesteps] = shard
    if workload.clipping:
        out[0, end + 1 :] = shard
    if summed:
        out[0, :start] = shard
    if workload.adds_up_on_device:
        out[:] = whole
    if chunk.elems < chunk.gathered_elems and not workload.whole_gradients:
        under_way = workload.summed_in(end)
        out[:, under_way] = whole + shard
        if summed and not workload.adds_up_on_device:
            out[0, under_way] += shard
    return out


def layer_bytes(workload: Workload) -> Floats:
    """Return the bytes of kept activations; layer kept timestep."""
    out = np.zeros((len(workload.layers), 2, workload.timesteps))
    for j, layer in enumerate(workload.layers):
        out[j, 1, layer.first : layer.last + 1] = layer.kept_bytes
        out[j, 1, layer.first] -= layer.counted_bytes
        out[j, 1, layer.last + 1 : layer.last + 2] = layer.own_bytes
    return out


def host_and_disk_bytes(workload: Workload, strategy: str) -> tuple[Floats, Floats]:
    """Return the bytes of every chunk on the host and on disk, of all ranks that share them; each: chunk option."""
    regime = workload.regime
    elems: Ints = np.array([chunk.elems for chunk in workload.chunks])
    trainable = np.array([chunk.trainable for chunk in workload.chunks])
    plane = np.ceil(regime.parameter * elems)
    state = np.ceil(regime.state * elems) * trainable
    summed = np.array(
        [c.gathered_elems if workload.whole_gradients else c.elems for c in workload.chunks],
        dtype=elems.dtype,
    )
    held = np.ceil(regime.gradient * summed) * trainable * held_on_host(workload)
    copies = 1 + has_shadow_copy(workload, strategy)
    host, disk = np.zeros((len(elems), 5)), np.zeros((len(elems), 5))
    host[:, (1, 2)] = copies[:, (1, 2)] * (plane + state)[:, None] + held[:, None]
    host[:, (3, 4)] = copies[:, (3, 4)] * plane[:, None] + held[:, None]
    disk[:, (3, 4)] = copies[:, (3, 4)] * state[:, None]
    # a frozen chunk has one plane, on the GPU or on the host
    host[:, (1, 3)] *= trainable[:, None]
    streamed = plane if workload.stage == 3 else np.zeros_like(plane)
    host[:, (2, 4)] = np.where(trainable[:, None], host[:, (2, 4)], streamed[:, None])
    return workload.ranks_per_host * host, workload.ranks_per_host * disk


def has_shadow_copy(workload: Workload, strategy: str) -> Bools:
    """Return whether a chunk's state has a shadow copy: chunk option.

    If only some chunks have one, none on disk has.
    """
    found = np.full((len(workload.chunks), 5), strategy == SPECULATIVE_STEP)
    if workload.shadow_copies is not None:
        found[workload.shadow_copies :] = False
        found[:, (3, 4)] = False
    return found


def device_steps_halves(workload: Workload, strategy: str) -> bool:
    """Return True if GPU streaming writes only the parameters of chunks without a shadow copy, and the cores write all moments."""
    return strategy == SPLIT_STEP_ON_DEVICE or (strategy == SPECULATIVE_STEP and workload.shadow_copies is not None)


def held_on_host(workload: Workload) -> bool:
    """Return True if gradients wait on the host: for the norm, or for later micro-steps."""
    return workload.clipping or (workload.accumulation > 1 and workload.stage > 1)


def gradient_ring(workload: Workload) -> int:
    """Return the host bytes for gradients on their way to the CPU step if gradients are not held: twice the largest chunk's."""
    if held_on_host(workload):
        return 0
    sizes = [chunk.elems for chunk in workload.chunks if chunk.trainable]
    return 2 * int(np.ceil(workload.regime.gradient * max(sizes, default=0)))


def memory_table(workload: Workload, strategy: str, mode: str, gpu: Floats, streaming_bytes: int = 0) -> Table:
    """Return the rows of memory: GPU bytes at every timestep, then host, then disk.

    ``gpu``: the sum of :func:`gpu_kinds`. ``streaming_bytes``: of GPU memory that is used as soon as state is on the host.
    """
    build = Builder(len(workload.chunks), len(workload.layers))
    timesteps = [f"gpu at timestep {t}" for t in range(workload.timesteps)]
    others = np.array(workload.non_model_bytes) + (0 if mode == GPU_ONLY else streaming_bytes)
    build.add(*timesteps, base=others, chunk=gpu, layer=layer_bytes(workload))
    host, disk = host_and_disk_bytes(workload, strategy)
    base = workload.host_base_bytes
    if mode != GPU_ONLY:
        base += gradient_ring(workload)
    if mode == WITH_DISK:
        base += workload.disk_buffer_bytes
    build.add("host", base=base * workload.ranks_per_host, chunk=host)
    build.add("disk", chunk=disk)
    return build.table()
