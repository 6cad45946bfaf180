"""What an asynchronous save takes from the thread that launches kernels; needs no GPU.

A GPU is stood in for: every launch is one operation of torch, which leaves the interpreter to others for some ten microseconds,
as a launch does, and some Python around it; behind it stands a kernel of a length that is told. A clock says when the GPU would
have come to its end, since a kernel begins when it is launched and the one before is over. The model has as many tensors as gpt2
and is narrow, so that copying and writing take next to nothing: what is left is the Python of the save, in this thread (``save``
itself) and in its own, with which the training shares the interpreter. What the bus and the memory of a GPU add is for
`meshfold bench saving`.

Rounds without and with a save take turns. On a box that does other things too, look at the least.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
from torch import Tensor

from benchmarks.common import machine, median
from meshfold.checkpoint.staging import CopyPair, HostCopyQueue
from meshfold.engine import Engine
from meshfold.models import GPT, GPTConfig


class Bus(HostCopyQueue):
    """Takes everything, as the stream of a GPU does, and has copied it when it is waited for."""

    def takes(self, tensor: Tensor) -> bool:
        return True

    def queue(self, pairs: Sequence[CopyPair]) -> Callable[[], None]:
        with torch.no_grad():
            torch._foreach_copy_([to for to, _ in pairs], [of for _, of in pairs])
        return lambda: None


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench saving-launches`."""
    parser = argparse.ArgumentParser(prog="meshfold bench saving-launches", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--launches", type=int, default=1500, help="of a step")
    parser.add_argument("--kernel", type=float, default=90.0, help="length of each, in microseconds")
    parser.add_argument("--elements", type=int, default=32768, help="of a launch's operation")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), help="stage (none)")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    args = parser.parse_args(argv)
    config = GPTConfig(vocab_size=512, hidden=96, layers=args.layers, heads=12, max_positions=64)
    folder = Path(tempfile.mkdtemp(prefix="meshfold-bench-"))
    parallel = {} if args.zero is None else dict(zero=dict(stage=args.zero, placement="cuda"))
    engine = Engine(lambda: GPT(config), parallel, optimizer="adamw", precision="bf16", clip_grad_norm=1.0)
    engine.saver._lane = Bus()
    try:
        engine.train_step(engine.shard_batch(torch.randint(512, (2, 16))))
        result = measure(engine, folder, args.launches, args.kernel * 1e-6, args.elements, args.rounds)
    finally:
        engine.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(table(result))
    if args.out is not None:
        settings = {key: value for key, value in vars(args).items() if key != "out"}
        args.out.write_text(json.dumps({"machine": machine(), "settings": settings, **result}, indent=1) + "\n")
    return 0


def measure(engine: Engine, folder: Path, launches: int, kernel: float, elements: int, rounds: int) -> dict[str, Any]:
    """Seconds of steps with and without a save, in turns: until all is launched, and until the GPU would be done."""
    spent: dict[str, list[float]] = {
        f"{what}, {way}": [] for what in ("launched", "done") for way in ("no save", "save")
    }
    returned: list[float] = []
    for number in range(rounds + 1):  # the first save plans, and takes memory
        for way in ("no save", "save"):
            began = time.perf_counter()
            save = engine.save(folder / "checkpoint", asynchronous=True) if way == "save" else None
            back = time.perf_counter() - began
            launched, done = step(launches, kernel, elements)
            if save is not None:
                save.wait()
            if number:
                spent[f"launched, {way}"].append(launched - began)
                spent[f"done, {way}"].append(done - began)
                if save is not None:
                    returned.append(back)
    tensors = len(engine.model_state.sources()) + len(engine.model_state.optimizer_sources())
    return {"tensors": tensors, "returned": returned, **spent}


def step(launches: int, kernel: float, elements: int) -> tuple[float, float]:
    """When the last kernel was launched, and when the GPU would be done with it."""
    x, free, clock = torch.zeros(elements), 0.0, time.perf_counter
    for _ in range(launches):
        x.add_(1.0)
        now = clock()
        free = (free if free > now else now) + kernel
    return now, free


def table(result: dict[str, Any]) -> str:
    """The numbers as a person wants them."""
    lines = [f"{result['tensors']} tensors; ms{'':18}{'least':>10}{'median':>10}"]

    def line(what: str, values: Sequence[float]) -> None:
        lines.append(f"{what:32}{min(values) * 1e3:10.2f}{median(values) * 1e3:10.2f}")

    line("save() returned after", result["returned"])
    for what in ("launched", "done"):
        line(f"{what}, no save", result[f"{what}, no save"])
        line(f"{what}, save", result[f"{what}, save"])
    for what, of in (("launched", "the launching thread lost"), ("done", "the GPU would have lost")):
        without, with_it = result[f"{what}, no save"], result[f"{what}, save"]
        least, middle = min(with_it) - min(without), median(with_it) - median(without)
        lines.append(f"{of:32}{least * 1e3:10.2f}{middle * 1e3:10.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
