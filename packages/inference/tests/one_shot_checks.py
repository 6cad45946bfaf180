"""One-shot sums on the GPUs of one machine: right, beside NCCL, and in a whole decoded token.

    meshfold run --ranks 2 packages/inference/tests/one_shot_checks.py

Prints a line for each check, and milliseconds. ``--tiny`` takes a small model, also on CPUs, where there is no kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from meshfold.engine import Engine
from meshfold.inference import Generator, Sampling
from meshfold.inference.forward import SUMS, PagedForward
from meshfold.kernels import RowWeight, sum_add_norm
from meshfold.mesh import Environment, Group, all_gather, all_reduce
from meshfold.models import LlamaConfig, build
from meshfold.tensor_parallel.few_rows.one_shot_sums import OneShot

SIZES = dict(vocab_size=128256, hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, max_positions=512, tie=False)
TINY = dict(vocab_size=256, hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, max_positions=64, tie=False)
EPS = 1e-5


def right(group: Group, columns: int, device: torch.device, say: Callable[[str], None]) -> None:
    """Compare with a gather and a sum, over random rows and over every slot; ranks run apart from one another now and then."""
    for dtype, packets in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        sums, worst = OneShot(group, columns, dtype, device, packets=packets), 0.0
        same = RowWeight(torch.eye(columns, device=device, dtype=dtype))
        if packets and not sums.sends:
            say(f"{dtype}: products send no packets")
        if packets and sums.without:
            say(f"{dtype}: no packets: {sums.without}")
        for call in range(300):
            random = torch.Generator(device).manual_seed(1000 * call + group.index)
            rows = (1, 2, 7, 16)[call % 4]
            x = torch.randn(rows, columns, generator=random, device=device, dtype=dtype)
            random.manual_seed(call)
            stream = torch.randn(rows, columns, generator=random, device=device, dtype=dtype)
            gain = torch.rand(columns, generator=random, device=device, dtype=dtype)
            if call % 11 == group.index:
                torch.cuda._sleep(2_000_000)
            if rows == 1 and sums.sends:  # by a product that leaves it as it is
                total, normed = sums.of_product(x, same, stream, gain, EPS, call, norm=call % 8 > 0)
                y = sum_add_norm([total], stream, gain, EPS)[1] if normed is None else normed
            else:
                total, y = sums(x, stream, gain, EPS, call)
            parts = all_gather(x.unsqueeze(0), group, 0)
            wanted = sum_add_norm([*parts], stream, gain, EPS)
            every = all_gather(total.unsqueeze(0), group, 0)
            assert all(torch.equal(one, every[0]) for one in every), "ranks differ"
            for found, exact in ((total, wanted[0]), (y, wanted[1])):
                worst = max(worst, float((found.double() - exact.double()).norm() / exact.double().norm()))
        how = f"up to {sums.packet_rows} rows by packets" if packets else "flags"
        limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
        say(f"{dtype}, {how}: {'right' if worst < limit else 'WRONG'}, error {worst:.1e}")


def microseconds(step: Callable[[], object], times: int = 64) -> float:
    """Return what a step takes within a CUDA graph of several."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / times)
    return best


def timed(group: Group, columns: int, rows: int, device: torch.device) -> str:
    """Time the kernel, and NCCL's sum with an add and a norm after it."""
    x, stream = torch.randn(2, rows, columns, device=device, dtype=torch.bfloat16)
    gain = torch.rand(columns, device=device, dtype=torch.bfloat16)
    packets, flags = (OneShot(group, columns, x.dtype, device, packets=taken) for taken in (True, False))

    def fused(sums: OneShot) -> float:
        calls = itertools.count()
        return microseconds(lambda: sums(x, stream, gain, EPS, next(calls)))

    def apart() -> Tensor:
        return F.rms_norm(stream + all_reduce(x, group), (columns,), gain, EPS)

    one = f"{fused(packets):.1f} us" if rows <= packets.packet_rows else "-"
    return f"{rows} rows: packets {one}, flags {fused(flags):.1f} us, NCCL and kernels after it {microseconds(apart):.1f} us"


def decoded(size: int, tiny: bool, say: Callable[[str], None]) -> None:
    """Time a token of one sequence and of eight, with and without fused sums."""
    config = LlamaConfig(**(TINY if tiny else SIZES))  # type: ignore[arg-type]
    new = 8 if tiny else 128
    for rows in (1, 8):
        with Engine(lambda: build(config), dict(tensor=size), precision="fp32" if tiny else "bf16") as engine:
            given = [[7 + i, 5, 9, 11] for i in range(rows)]
            texts, device_is_gpu = {}, engine.device.type == "cuda"
            for name in SUMS:
                generator = Generator(
                    engine.generator, tokens=rows * 160, most_rows=rows, device=engine.device, sums=name
                )
                runner = generator.runner
                assert isinstance(runner, PagedForward), generator.reason
                lacking = (
                    runner.without.get("sums") or runner.without.get("packets", "") if device_is_gpu else "not a GPU"
                )
                used = f" (not: {lacking})" if lacking and name == SUMS[0] else ""
                best = float("inf")
                for _ in range(3):
                    start = time.perf_counter()
                    found = generator.generate(given, sampling=Sampling(temperature=0.0, max_new_tokens=new))
                    best = min(best, time.perf_counter() - start)
                texts[name] = found
                say(f"{rows} sequences, {name}{used}: {best / new * 1000:.3f} ms a token")
            first, *others = [torch.tensor(texts[name].logprobs[0][:2]) for name in SUMS]
            say(f"first log-probs apart by {', '.join(f'{(first - one).abs().max():.1e}' for one in others)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    tiny, size = parser.parse_args().tiny, Environment.detect().world_size
    with Engine(lambda: build(LlamaConfig(**TINY)), dict(tensor=size)) as engine:  # type: ignore[arg-type]
        group, device = engine.mesh.group("tensor"), engine.device

        def say(text: str) -> None:
            engine.print(text)

        if device.type == "cuda":
            columns = TINY["hidden"] if tiny else SIZES["hidden"]
            right(group, columns, device, say)
            for rows in (1, 8, 32):
                say(timed(group, columns, rows, device))
        decoded(size, tiny, lambda text: print(text, flush=True) if group.index == 0 else None)


if __name__ == "__main__":
    sys.exit(main())
