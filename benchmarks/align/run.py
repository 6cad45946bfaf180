"""A step of DPO, GRPO or PPO on one GPU or several: ours with and without shared prompts, beside TRL and its computation by hand.

`meshfold bench align` starts each contestant in a process of its own, in rounds, and warms it up until clocks have settled. It
writes JSON with the seconds of every step, peak memory, mean power and clock; `--report FILE.json` makes the table from it. All
begin with the same random weights, keep float32 masters, recompute every layer, clip by the norm and step with AdamW. A step of
DPO includes the reference's scores, one of GRPO its samples. PPO has no peer: it shows that actor and critic of 6.0 billion
parameters (`--shape 6B`) and their reference train within --gpu-gib and --host-gib.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks.align.worker import CONTESTANTS
from benchmarks.common import (
    add_output,
    add_starts,
    by_turns,
    check_contestants,
    check_out,
    median,
    parse_with_tiny,
    result_to_extend,
    run_contestant,
    start_settings,
    write,
)
from benchmarks.reports import JOULES, joules, mean_power, met, read_bars, table

BARS = read_bars("align", ("two", "shared", "grpo"))
JUDGED = dict(prompt=512, completion=512, dtype="bfloat16")
JUDGED_SHAPES = dict(dpo=("1.5B", "8B"), grpo=("1.5B",))
"""The work that the bars against TRL are for."""
KEPT = "activations kept"
"""In the names of contestants that recompute nothing; ours count only where TRL's was tried too."""
APART = ("ours", "ours, compiled", "ours, pushed", "ours, kept whole, pushed", f"ours, {KEPT}, pushed")
SHARED = (
    "ours, shared prompts",
    "ours, shared prompts, compiled",
    "ours, shared prompts, pushed",
    "ours, shared prompts, kept whole, pushed",
    f"ours, shared prompts, {KEPT}, pushed",
)
"""Ours with a row for each completion, and with shared prompts: the fastest counts, as the fastest of TRL's does."""
HEAD = ("contestant", "s a step", "tokens/s, prompts unshared", "× the best peer's speed", "peak GiB")
SHAPES: dict[str, dict[str, Any]] = {
    "8B": dict(
        model_type="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        tie_word_embeddings=False,
    ),
    "6B": dict(
        model_type="llama",
        vocab_size=40_960,
        hidden_size=4096,
        intermediate_size=11_008,
        num_hidden_layers=28,
        num_attention_heads=32,
        num_key_value_heads=32,
        tie_word_embeddings=False,
    ),
    "1.5B": dict(
        model_type="llama",
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
    ),
    "tiny": dict(
        model_type="llama",
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
}
"""Shapes by name: Llama 3.1's of 8B, one of 6.0B, Qwen2.5's of 1.5B without its biases, and one to try the command."""

TINY = dict(
    shape="tiny",
    rows=4,
    prompt=8,
    completion=6,
    group=2,
    dtype="float32",
    steps=2,
    settle_s=0.0,
    warm_up=1,
    timeout=240.0,
)


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench align`."""
    parser = argparse.ArgumentParser(prog="meshfold bench align", description=__doc__.split("\n")[0])
    parser.add_argument("--method", choices=CONTESTANTS, default="dpo")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, for ours and TRL")
    parser.add_argument("--rows", type=int, default=8, help="pairs (dpo) or prompts (grpo, ppo) of a step")
    parser.add_argument("--gpu-gib", type=float, default=78.0, help="ppo: limit of the GPU's memory")
    parser.add_argument("--host-gib", type=float, default=118.0, help="ppo: limit of the host's memory for models")
    parser.add_argument("--group", type=int, default=8, help="grpo: completions of a prompt")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--completion", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--micro-steps", type=int, default=1, help="parts that the rows of a step are run in")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--regime", choices=("A", "B", "C"), default="A", help="of our Adam's moments; B, C: ZeRO's")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="of our ZeRO, on several GPUs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some contestants")
    add_starts(parser, steps=5, warm_up=2, settle_s=10.0, timeout=300.0)
    add_output(parser, "align")
    options = parse_with_tiny(parser, argv, TINY)
    if options.report is not None:
        report(options.report)
        return 0
    known = CONTESTANTS[options.method]
    names = options.only or [name for name in known if options.ranks > 1 or "pushed" not in name]
    check_contestants(parser, names, known)
    check_out(options.out)
    kept = ["method", "shape", "ranks", "rows", "group", "prompt", "completion", "micro_steps", "dtype", "regime"]
    kept += ["gpu_gib", "host_gib"] if options.method == "ppo" else []
    kept += ["stage"] if options.stage != 3 else []
    work = {name: getattr(options, name) for name in kept}
    found = result_to_extend(options.out, "align", "transformers", "trl")
    case = found["cases"].setdefault(case_name(work), dict(work=work, runs={}))
    for name in by_turns(names, options.rounds):
        job = dict(**work, contestant=name, model=SHAPES[options.shape], **start_settings(options))
        run = run_contestant(Path(__file__).with_name("worker.py"), job, options.timeout)
        case["runs"].setdefault(name, []).append(run)
        write(options.out, found)
        print(f"{name}: {run['error'] if 'error' in run else median(run['seconds'])}", flush=True)
    report(options.out)
    return 0


def case_name(work: dict[str, Any]) -> str:
    """Return a work in words."""
    prompts = f"{work['rows']} prompts" + (f" × {work['group']} completions" if work["method"] == "grpo" else "")
    of = f"{work['rows']} pairs" if work["method"] == "dpo" else prompts
    parts = "" if work["micro_steps"] == 1 else f" in {work['micro_steps']} parts"
    ranks = f", {work['ranks']} GPUs" if work["ranks"] > 1 else ""
    ranks += f", within {work['gpu_gib']:g} + {work['host_gib']:g} GiB" if "gpu_gib" in work else ""
    ranks += f", our ZeRO of stage {work['stage']}" if "stage" in work else ""
    regime = "" if work["regime"] == "A" else f", regime {work['regime']}"
    return (
        f"{work['method'].upper()} of {work['shape']}, {of}{parts}, {work['prompt']} + {work['completion']} tokens, "
        f"{work['dtype']}{regime}{ranks}"
    )


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    found = json.loads(path.read_text())
    words = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    lines = [f"Measured on: {words}."]
    for name, case in found["cases"].items():
        work = case["work"]
        completions = work["rows"] * dict(dpo=2, grpo=work["group"], ppo=1)[work["method"]]
        tokens = completions * (work["prompt"] + work["completion"])
        seconds = {each: _seconds(runs) for each, runs in case["runs"].items()}
        peers = [value for each, value in seconds.items() if value is not None and not each.startswith("ours")]
        sampled = any(mean_power(runs) for runs in case["runs"].values())
        head, rows = (*HEAD, *(JOULES if sampled else ()), "note"), []
        for contestant, runs in case["runs"].items():
            spent, good = seconds[contestant], [run for run in runs if not run.get("error")]
            if spent is None:
                rows.append((contestant, *["–"] * (len(head) - 2), runs[0]["error"]))
                continue
            rows.append(
                (
                    contestant,
                    f"{spent:.4f}",
                    f"{tokens / spent:,.0f}",
                    f"{min(peers) / spent:.3f}" if peers else "–",
                    f"{max(run['peak_bytes'] for run in good) / 2**30:.1f}",
                    *(joules(mean_power(good), spent, tokens) if sampled else ()),
                    "; ".join(filter(None, (good[-1].get("plan", {}).get("shared", ""), good[-1].get("stopped", "")))),
                )
            )
        lines += ["", f"**{name}**", "", *table(head, rows)]
        if said := [*verdicts(work, seconds, case["runs"])]:
            lines += ["", *said]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def verdicts(
    work: dict[str, Any], seconds: dict[str, float | None], runs: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Yield a line for each aim that a case is judged by.

    Args:
        work: of the case.
        seconds: a step, by contestant; None for one that failed.
        runs: of each contestant.
    """
    trl = {name: value for name, value in seconds.items() if name.startswith("TRL") and value is not None}
    judged = all(work.get(name) == value for name, value in JUDGED.items())
    judged = judged and work["shape"] in JUDGED_SHAPES.get(work["method"], ())
    if trl and judged and (work["method"] == "dpo" or work["group"] == 8):
        best = min(trl, key=lambda name: trl[name])
        bars = dict(two=APART, shared=SHARED) if work["method"] == "dpo" else dict(grpo=("ours",))
        for key, names in bars.items():
            fair = [name for name in names if KEPT not in name or f"TRL, {KEPT}" in seconds]
            ours = {name: spent for name in fair if (spent := seconds.get(name)) is not None}
            if ours:
                mine = min(ours, key=lambda name: ours[name])
                yield BARS[key].line(trl[best] / ours[mine], work["ranks"], best=best, ours=mine, shape=work["shape"])
    if work.get("method") == "ppo" and work.get("shape") == "6B":
        for name, value in seconds.items():
            if value is not None:
                gib = max(run["peak_bytes"] for run in runs[name] if not run.get("error")) / 2**30
                fits = met(gib < work["gpu_gib"])
                yield f"- actor and critic of 6.0B and their reference train, {gib:.1f} of {work['gpu_gib']:g} GiB of GPU: {fits}"


def _seconds(runs: Sequence[dict[str, Any]]) -> float | None:
    """Return the median over starts of the median step; None if no start came to its end."""
    middles = [median(run["seconds"]) for run in runs if not run.get("error")]
    return median(middles) if middles else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
