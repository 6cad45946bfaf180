"""An unmodified model of transformers, trained by Meshfold, plain torch and Liger; on several GPUs beside FSDP2.

`meshfold bench hugging-face` starts each contestant in a process of its own, in rounds, and warms it up until clocks have
settled. It writes JSON with the seconds of every step, peak memory, mean power and clock; `--report FILE.json` makes the
table from it. All begin with the same weights, keep float32 masters, clip by the norm and step with AdamW.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.common import (
    add_output,
    add_starts,
    by_turns,
    check_out,
    median,
    parse_with_tiny,
    result_to_extend,
    run_contestant,
    start_settings,
    write,
)
from benchmarks.hugging_face.worker import CONTESTANTS
from benchmarks.reports import table

SHAPES: dict[str, dict[str, Any]] = {
    "3B": dict(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    "1B": dict(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": dict(
        model_type="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_theta=1_000_000.0,
        tie_word_embeddings=False,
    ),
    "gpt2": dict(
        model_type="gpt2",
        vocab_size=50_257,
        n_embd=768,
        n_layer=12,
        n_head=12,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        summary_first_dropout=0.0,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        model_type="llama",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
"""Shapes by name: Llama 3.2's, Qwen3-8B's, GPT-2's of 124M, and one to try the command."""

_NAMES = {"qwen3-8b": "Qwen3 8B", "gpt2": "GPT-2 124M"}

TINY = dict(
    shape="tiny",
    rows=2,
    length=32,
    dtype="float32",
    steps=2,
    settle_s=0.0,
    warm_up=1,
    rounds=1,
    timeout=120.0,
)


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench hugging-face`."""
    parser = argparse.ArgumentParser(prog="meshfold bench hugging-face", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs: ours and FSDP2's stage 3 split the rows over them")
    parser.add_argument("--untied", action="store_true", help="the head has a weight of its own")
    parser.add_argument("--rows", type=int, default=8, help="sequences a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens a sequence")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--recompute",
        choices=("blocks", "auto", "none"),
        default="blocks",
        help="which activations backward recomputes; auto, of a plan: every layer for peers",
    )
    parser.add_argument("--gpu-memory", default="", help="limit of the device, as in 24GB; for Meshfold alone")
    parser.add_argument("--host-memory", default="", help="limit of host memory, with --gpu-memory; for Meshfold alone")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=["torch", "Liger", "ours"], metavar="NAME")
    add_starts(parser, steps=12, warm_up=4, settle_s=20.0, timeout=240.0)
    add_output(parser, "hugging_face")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    if options.host_memory and not options.gpu_memory:
        parser.error(f"--host-memory {options.host_memory} needs --gpu-memory: without it everything is on the device")
    check_out(options.out)
    work = {
        name: getattr(options, name)
        for name in ("shape", "untied", "ranks", "rows", "length", "dtype", "recompute", "gpu_memory", "host_memory")
    }
    found = result_to_extend(options.out, "hugging-face", "transformers", "liger-kernel")
    case = found["cases"].setdefault(case_name(work), dict(work=work, runs={}))
    for name in by_turns(options.only, options.rounds):
        run = _run(name, work, options)
        case["runs"].setdefault(name, []).append(run)
        write(options.out, found)
        middle = _seconds([run])
        print(f"{name}: {run['error'] if middle is None else f'{middle:.4f} s'}", flush=True)
    report(options.out)
    return 0


def _model(work: dict[str, Any]) -> dict[str, Any]:
    shape = SHAPES[work["shape"]]
    return {**shape, "tie_word_embeddings": False} if work["untied"] else shape


def case_name(work: dict[str, Any]) -> str:
    """Return a work in words."""
    limit = f", {work['gpu_memory']}" if work["gpu_memory"] else ""
    if host := work.get("host_memory"):
        limit += f", {host} of the host"
    recompute = dict(blocks="every layer recomputed", auto="recomputed by plan", none="nothing recomputed")
    ranks = f", {work['ranks']} GPUs" if work["ranks"] > 1 else ""
    model = f"{_NAMES.get(work['shape'], 'Llama ' + work['shape'])}{' with a head of its own' if work['untied'] else ''}{ranks}"
    return f"{model}, {work['rows']} × {work['length']} tokens, {recompute[work['recompute']]}{limit}"


def _run(name: str, work: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run one start of a contestant; its result, or the error."""
    job = dict(**work, contestant=name, model=_model(work), **start_settings(options))
    return run_contestant(Path(__file__).with_name("worker.py"), job, options.timeout)


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    words = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    lines = [f"Measured on: {words}."]
    for name, case in found["cases"].items():
        tokens = case["work"]["rows"] * case["work"]["length"]
        peers = {name: _seconds(runs) for name, runs in case["runs"].items() if not name.startswith("ours")}
        known = [seconds for seconds in peers.values() if seconds is not None]
        best = min(known) if known else None
        has_host = any("host_bytes" in run for runs in case["runs"].values() for run in runs)
        rows = []
        for contestant, runs in case["runs"].items():
            seconds, good = _seconds(runs), [run for run in runs if not run.get("error")]
            if seconds is None:
                rows.append((contestant, *["–"] * (5 + has_host), runs[0]["error"]))
                continue
            watts = [run["watts"] for run in good if "watts" in run]
            clocks = [run["mhz"] for run in good if "mhz" in run]
            plans = [run["plan"] for run in good if run.get("plan")]
            rows.append(
                (
                    contestant,
                    f"{seconds:.4f}",
                    f"{best / seconds:.3f}" if best else "–",
                    f"{max(run['peak_bytes'] for run in good) / 2**30:.1f}",
                    *([_host_of(good)] if has_host else []),
                    f"{sum(watts) / len(watts) * seconds / tokens * 1e3:.2f}" if watts else "–",
                    f"{sum(clocks) / len(clocks):.0f}" if clocks else "–",
                    _expected(plans[-1]) if plans else "",
                )
            )
        head = (
            "contestant",
            "s a step",
            "× the best peer's speed",
            "peak GiB",
            *(["host GiB a rank"] if has_host else []),
            "mJ a token",
            "mean MHz",
            "note",
        )
        lines += ["", f"**{name}**", "", *table(head, rows)]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def _host_of(runs: Sequence[dict[str, Any]]) -> str:
    """Say the most host memory that a start's first rank had resident, libraries and pinned memory included."""
    known = [run["host_bytes"] for run in runs if "host_bytes" in run]
    return f"{max(known) / 2**30:.1f}" if known else "–"


def _expected(plan: dict[str, Any]) -> str:
    """Say what a memory plan expected, and whether a step ran out of memory."""
    short = plan.get("out_of_memory", 0)
    ran_out = f"ran out of memory {short} times" if short else "never ran out of memory"
    if retries := plan.get("retries_while_timed"):
        ran_out += f", and the allocator released its cache {retries} times in the timed steps"
    held = ""
    if "reserved_bytes" in plan:  # what a limit is for
        reserved, outside = (plan[f"{name}_bytes"] / 2**30 for name in ("reserved", "outside"))
        held = (
            f"; {reserved + outside:.1f} GiB of the GPU taken: {reserved:.1f} by the allocator, {outside:.2f} by CUDA"
        )
    return f"planned {plan['seconds']:.4f} s, {plan['gpu_bytes'] / 2**30:.1f} GiB; {ran_out}{held}"


def _seconds(runs: Sequence[dict[str, Any]]) -> float | None:
    """Return the median over starts of the median step; None if no start came to its end."""
    middles = [median(run["seconds"]) for run in runs if not run.get("error")]
    return median(middles) if middles else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
