"""Memory of host and device: free bytes, the ranks' agreement that memory runs short, and the details of out-of-memory errors."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine.world import World
from meshfold.kernels.fuse import leaves_out_logits
from meshfold.mesh import all_reduce
from meshfold.mesh.parameters import uncompiled_name
from meshfold.mesh.spec import format_bytes, parse_bytes
from meshfold.zero_gemini import OutOfBudget

PROCESS_BYTES = 5 * 2**28
"""What a process has of the host's memory besides a model: Python, torch and CUDA (measured: 1.2 to 1.3 GiB)."""


def free_host_bytes() -> int:
    """Return the host memory that is available now; 0 where the system does not say.

    No more than that: the memory of some virtual machines grows as it is touched.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    entries = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(entries.get("MemAvailable", "0 kB").split()[0]) * 1024


class Pressure:
    """Ranks of a stage warn each other after each step if a device is about to run out of memory.

    A rank that runs out in a forward leaves the others waiting in a collective, which cannot be undone. The answer is looked at
    a step later, when it has long arrived, so no rank waits for it.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._retries = retries(world.device)
        self._said: Tensor | None = None
        self._there: torch.cuda.Event | None = None

    def found(self, *, peak_bytes: int, most_bytes: int) -> bool:
        """Return True if some rank was short of memory in the step before the last. All ranks must call.

        Args:
            peak_bytes: the most that tensors took of this rank's device in the last step.
            most_bytes: that they should have taken.
        """
        said, there = self._said, self._there
        now = retries(self._world.device)
        short = now > self._retries or peak_bytes > most_bytes
        self._retries = now
        mine = torch.full((1,), int(short), device=self._world.device)
        told = all_reduce(mine, self._world.stage_group, "max")
        if told.is_cuda:
            self._said = torch.empty(1, dtype=told.dtype, pin_memory=True).copy_(told, non_blocking=True)
            self._there = torch.cuda.current_stream(self._world.device).record_event()
        else:
            self._said = told
        if there is not None:
            there.synchronize()
        return said is not None and bool(int(said))

    def forget(self) -> None:
        """Drop all reports so far: they belong to another plan."""
        self._said = self._there = None
        self._retries = retries(self._world.device)


def retries(device: torch.device) -> int:
    """Return how often the allocator had to release its cache before it found memory; each time it was close to failing."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


_ASKED = re.compile(r"Tried to allocate ([\d.]+ [GM]iB)")
_INSIDE = ("torch", "meshfold")
_CLOSE = 0.005
"""Share by which a size in a message, which has two digits behind the point, may be off."""
_NAMED = 3
_WORTH_NAMING = 0.05
"""Share of the largest tensor below which another one is not named."""


def describe_shortage(error: BaseException, model: nn.Module, tokens: int) -> str:
    """Describe the tensors that did not fit, as far as an out-of-memory error tells.

    Args:
        error: raised for want of memory.
        model: the one that was run.
        tokens: of the forward, to recognise the output of one of its layers by its size.

    Returns:
        Sentences that begin with the bytes asked for. Empty if nothing is known.
    """
    asked, frame = bytes_asked(error), _line_of_user(error)
    words = []
    if asked:
        made = _outputs_of(asked, model, tokens)
        words.append(f"The allocation that failed: {format_bytes(asked)}{f', the size of {made}' if made else ''}.")
    if frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line).strip()
        words.append(f"It was made at {file}:{line}{f': {text}' if text else ''}.")
    alive = _largest(error)
    if alive:
        words.append(f"The largest tensors in use there: {', '.join(alive)}.")
    return " ".join(words)


def largest_output(model: nn.Module, tokens: int) -> dict[str, Any]:
    """Describe the largest output of a linear layer that a micro-step holds whole, as fields of a Workload.

    Args:
        model: after a step, so that a head is known whose logits are left out.
        tokens: of a micro-step.
    """
    words = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    layers = [
        # Reading module.weight would compute it where it is parametrized: spectral_norm's changes its buffers each time.
        (module.out_features, uncompiled_name(name), next(module.parameters()).dtype)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not leaves_out_logits(module)
    ]
    if not layers:
        return {}
    features, name, dtype = max(layers, key=lambda layer: layer[0])
    count, is_head = tokens * features, features in words
    text = (
        f"{'logits of ' if is_head else 'that of '}{name!r}: {tokens:,} tokens × {features:,} = {count:,} elements, "
        f"{format_bytes(count * dtype.itemsize)} in {str(dtype).removeprefix('torch.')}"
    )
    return dict(largest_output=text, whole_logits=is_head)


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error says that memory ran out, or was raised because of one that does.

    cuBLAS, Triton, NCCL and the host's allocator raise their own errors, and compiled code wraps its errors.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | OutOfBudget | MemoryError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _OUT_OF_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def shortage_remedy(*, chunks_on_device: bool, recomputes: bool) -> str:
    """Return what to change when a micro-step does not fit.

    Args:
        chunks_on_device: some chunks could still leave the device.
        recomputes: activations are recomputed already.
    """
    if chunks_on_device:
        return (
            "The device has not enough memory: give zero=dict(placement='auto', gpu_memory_limit=...) a lower limit, so that "
            "more lives on the host, or take fewer tokens at once."
        )
    recompute = "" if recomputes else ", or recompute activations: Engine(..., recompute='blocks')"
    return (
        "No parameter and no optimizer state is on the device any more: what does not fit are tensors of forward and "
        "backward. Take fewer tokens at once (smaller batches with a larger gradient_accumulation, or shorter sequences)"
        f"{recompute}, or raise gpu_memory_limit."
    )


def bytes_asked(error: BaseException) -> int:
    """Return the bytes of the allocation that failed; 0 if the message does not say."""
    found = _ASKED.search(str(error))
    return parse_bytes(found[1]) if found else 0


def _outputs_of(asked: int, model: nn.Module, tokens: int) -> str:
    """Name a linear layer whose output, or its gradient, has the requested size."""
    for name, module in model.named_modules():
        features = getattr(module, "out_features", None)
        if not isinstance(features, int) or not tokens:
            continue
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            bytes_ = tokens * features * dtype.itemsize
            if abs(bytes_ - asked) <= _CLOSE * asked:
                kind = str(dtype).removeprefix("torch.")
                return f"{tokens:,} tokens × {features:,} outputs of {uncompiled_name(name)!r} in {kind}"
    return ""


def _line_of_user(error: BaseException) -> FrameType | None:
    """Return the innermost frame that is neither torch's nor ours."""
    found = None
    for frame in _frames(error):
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in _INSIDE:
            found = frame
    return found


def _largest(error: BaseException) -> list[str]:
    """Describe the largest tensors in local variables of the model's code, each storage once."""
    seen: dict[int, tuple[int, str]] = {}
    for frame in _frames(error):
        for name, tensor in _tensors(frame.f_locals):
            storage = tensor.untyped_storage()
            kind = str(tensor.dtype).removeprefix("torch.")
            shape = " × ".join(f"{n:,}" for n in tensor.shape)
            described = f"{name} ({shape}, {kind}, {format_bytes(storage.nbytes())})"
            seen.setdefault(storage._cdata, (storage.nbytes(), described))
    ordered = sorted(seen.values(), reverse=True)[:_NAMED]
    return [text for count, text in ordered if count >= _WORTH_NAMING * ordered[0][0] and count >= 2**20]


def _frames(error: BaseException) -> Iterator[FrameType]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield frame


def _tensors(values: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.device.type != "meta" and not isinstance(value, nn.Parameter):
            yield name, value
