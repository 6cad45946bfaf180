"""Steps of training that are timed in processes of their own, on each rank: warm-up, times, the rank's largest memory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import first_step_file, host_peak_bytes, synchronize
from benchmarks.kernel_times import host_of, kernels_of
from benchmarks.peers.absent import AbsentError

Step = Callable[[], Tensor]
"""Trains once: the loss, on the device; of this rank's rows or of all."""


LONG_S = 5.0
"""Seconds of a step that is not repeated only to warm up; it is written as it ends, for a run that is stopped."""
MOST_SETTLING = 80
"""Steps at most until a memory plan that changes during training has come to rest."""


def take_device() -> None:
    """Take this rank's GPU; without one, a single thread, since ranks share the cores."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)


def train_or_absent(job: dict[str, Any], contestant: Callable[[dict[str, Any]], Step]) -> None:
    """:func:`train`, but a peer that cannot take part is no failure: rank 0 writes why."""
    try:
        train(job, contestant)
    except AbsentError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            Path(job["out"]).write_text(json.dumps({"error": str(error)}))


def train(job: dict[str, Any], contestant: Callable[[dict[str, Any]], Step]) -> None:
    """Warm up until clocks have settled, then time each step; rank 0 writes what it found.

    Three steps are all of the warm-up where the second and the third take ``LONG_S`` seconds; the second alone may, as it compiles
    blocks that the first ran uncompiled. Such steps are written one by one. With
    ``warm_up`` 0 the first step counts too, without the making of the model: for steps of minutes.

    Args:
        job: ``steps``, ``warm_up``, ``settle_s``, ``profile`` and ``out``, beside what the contestant reads. It may add ``said``, a
            function that returns what is known of the plan, and ``settled``, one that returns False while steps still change where
            state lies: they are warm-up too, up to ``MOST_SETTLING`` of them. ``captured``: steps are a CUDA graph. Its memory
            counts as allocated only while it is captured, so the peak is that of all steps. The seconds until the end of the first
            step, which makes and compiles the model, are in the file of :func:`benchmarks.common.first_step_file` as soon as they
            are known.
        contestant: makes the step of a job.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    is_first = int(os.environ.get("RANK", "0")) == 0
    begun = time.perf_counter()
    step = contestant(job)
    made = time.perf_counter()
    losses = [step()]
    synchronize()
    first_step_s, alone_s = time.perf_counter() - begun, time.perf_counter() - made
    cold = job.get("warm_up") == 0
    if is_first:
        first_step_file(job["out"]).write_text(json.dumps(first_step_s))

    def timed() -> float:
        begun = time.perf_counter()
        losses.append(step())
        synchronize()
        return time.perf_counter() - begun

    def agreed(seconds: float) -> float:
        """Make all ranks take as many steps, whatever their clocks say."""
        one = torch.tensor(seconds)
        if torch.distributed.is_initialized():
            one = one.to(losses[0].device)
            torch.distributed.broadcast(one, 0)
        return float(one)

    is_long = cold or all(agreed(timed()) > LONG_S for _ in range(2))  # the third is made only if the second was long
    if not is_long:
        for _ in range(max(job["warm_up"], 2) - 2):
            losses.append(step())
        synchronize()
        for _ in range(int(job["settle_s"] / agreed(timed()))):
            timed()
    is_settled: Callable[[], bool] = job.pop("settled", lambda: True)
    for _ in range(MOST_SETTLING):
        if is_settled():
            break
        losses.append(step())
        synchronize()
    if torch.cuda.is_available() and not job.get("captured") and not cold:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = [alone_s] if cold else []
    first, said = time.time() - sum(seconds), job.pop("said", dict)

    def found(peak: int, **more: Any) -> None:
        if is_first:
            part = Path(job["out"] + ".part")
            part.write_text(
                json.dumps(
                    dict(
                        seconds=seconds,
                        first_step_s=first_step_s,
                        peak_bytes=peak,
                        host_bytes=host_peak_bytes(),
                        losses=[float(each) for each in losses[:8]],
                        first=first,
                        last=last,
                        plan=said(),
                        **more,
                    )
                )
            )
            part.replace(job["out"])

    for number in range(job["steps"]):
        if not cold or number:
            seconds.append(timed())
        last = time.time()
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        if job.get("captured"):  # under a plan the peak starts again with each step, and a replay allocates nothing
            peak = max(peak, ((said().get("measured") or {}).get("gpu_bytes", 0)))
        if is_long:
            found(peak)
    if torch.distributed.is_initialized():
        most = torch.tensor(peak, device=losses[0].device)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        peak = int(most)
        for each in losses[:8]:  # those of a rank's own rows become those of all rows
            torch.distributed.all_reduce(each)
            each /= torch.distributed.get_world_size()
    more: dict[str, Any] = {}
    if job["profile"]:
        more = dict(profile=kernels_of(step), profile_host=host_of(step))
    found(peak, **more)
