"""Eight layers of Qwen3-30B-A3B's shape, experts over ranks: ours beside transformers' own expert parallel and torchtitan's."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import (
    add_output,
    add_starts,
    by_turns,
    check_out,
    median,
    new_call,
    parse_with_tiny,
    result_to_extend,
    run_contestant,
    start_settings,
    write,
)
from benchmarks.experts.planned import planned_bytes
from benchmarks.experts.report import report
from benchmarks.experts.run import add_case
from benchmarks.experts.worker import CONTESTANTS, DEFAULT

SHAPES: dict[str, dict[str, Any]] = {
    "30B-A3B": dict(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    ),
    "tiny": dict(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    ),
}
"""Qwen3-MoE's settings by name, and one to try the command."""
TINY = dict(
    shape="tiny",
    rows=4,
    length=16,
    dtype="float32",
    steps=2,
    settle_s=0.0,
    warm_up=1,
    backend="aot_eager",
    timeout=120.0,
)
WORK = ("shape", "ranks", "rows", "length", "dtype", "recompute", "backend")


def main(argv: Sequence[str]) -> int:
    """Train a model."""
    parser = argparse.ArgumentParser(prog="meshfold bench experts --case model", description=__doc__.split("\n")[0])
    add_case(parser)
    parser.add_argument("--shape", choices=SHAPES, default="30B-A3B")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs; as many ranks share the experts and the rows")
    parser.add_argument(
        "--rows", type=int, default=0, help="sequences a step; by default 8 if a GPU has 100 GiB, else 4"
    )
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--recompute", choices=("blocks", "none"), default="none", help="what backward recomputes")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[*DEFAULT], metavar="NAME")
    add_starts(parser, steps=20, warm_up=4, settle_s=20.0, timeout=120.0)
    parser.add_argument("--list", action="store_true", help="the contestants")
    add_output(parser, "experts_model")
    options = parse_with_tiny(parser, argv, TINY)
    if options.list:
        print("\n".join(CONTESTANTS))
        return 0
    if options.report is not None:
        report(options.report)
        return 0
    check_out(options.out)
    options.rows = options.rows or default_rows()
    if options.rows % options.ranks or SHAPES[options.shape]["num_experts"] % options.ranks:
        parser.error(f"--ranks {options.ranks} must divide --rows {options.rows} and the experts")
    work = {name: getattr(options, name) for name in WORK}
    found = result_to_extend(options.out, "experts", "transformers", "torchtitan")
    name = f"{options.shape}, {options.ranks} ranks, {options.rows} × {options.length}, {options.dtype}, {options.recompute}"
    case = found["cases"].setdefault(name, dict(work=work, model=SHAPES[options.shape], planned={}, runs={}))
    call = new_call()
    for name in by_turns(options.only, options.rounds):
        if name.startswith("ours") and name not in case["planned"]:
            case["planned"][name] = planned_bytes(work, SHAPES[options.shape], name)
        run = start(name, work, options)
        case["runs"].setdefault(name, []).append({**run, "call": call})
        write(options.out, found)
        print(f"{name}: {run['error'] if 'error' in run else format(median(run['seconds']), '.4f')}", flush=True)
    report(options.out)
    return 0


def default_rows() -> int:
    """Return the sequences that fit the smallest GPU: peers hold float32 weights and whole logits."""
    import torch

    memories = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    return 8 if min(memories, default=0) >= 100 * 2**30 else 4


def start(name: str, work: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one start of a contestant; its result, or the error."""
    job = dict(**work, contestant=name, model=SHAPES[work["shape"]], **start_settings(options))
    return run_contestant(Path(__file__).with_name("worker.py"), job, options.timeout, _why)


def _why(said: str) -> str:
    """Return the last line that names an error, so that a launcher's own last words do not hide it."""
    lines = [line.strip() for line in said.splitlines() if "Error: " in line and not line.startswith(" ")]
    return lines[-1][:200] if lines else ""
