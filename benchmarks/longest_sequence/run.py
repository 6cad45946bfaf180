"""The longest sequence that a 4-layer model of Llama-8B's shape can be trained on, on 1, 2 and 4 ranks.

Every rank has the whole model and its AdamW; the sequence is split over all ranks by meshfold.sequence, every block is
recomputed in backward, the head and its loss run in pieces. Peaks at two short lengths give a line; where it meets the
limit is the length to try. It is then confirmed by whole training steps: one that fits, and one slightly longer that is refused
for want of memory. `meshfold bench longest-sequence --counts 1 2 4` writes JSON with all attempts; `--report FILE.json` makes
the table, the bar and the plot from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs on its own

from benchmarks import reports
from benchmarks.common import (
    AVERAGED_S,
    add_output,
    check_out,
    how_it_ended,
    machine,
    parse_with_tiny,
    start_ranks,
    write,
)
from benchmarks.power import PowerLog
from experiments import plotting

GIB = 2**30
BAR = reports.read_bars("longest_sequence", ("growth",))["growth"]
HEAD = ("ranks", "foretold tokens", "trained", "refused", "against 1 rank", "s a step", "peak GiB")
TINY = dict(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    ffn=96,
    vocab=256,
    dtype="float32",
    memory=0.01,
    short=128,
    piece=64,
    multiple=16,
)


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench longest-sequence`."""
    parser = argparse.ArgumentParser(prog="meshfold bench longest-sequence", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--counts", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks, one after the other"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", default="ring", choices=["ring", "ulysses"])
    parser.add_argument("--kernel", default="auto")
    parser.add_argument(
        "--memory",
        type=float,
        default=40.0,
        help="GiB that a rank may allocate; 0: all of the GPU (steps take minutes then)",
    )
    parser.add_argument(
        "--short",
        type=int,
        default=24576,
        help="tokens a rank of the first measured step; the second has twice as many",
    )
    parser.add_argument("--piece", type=int, default=1024, help="tokens of which the loss is taken at a time")
    parser.add_argument("--multiple", type=int, default=512, help="tokens a rank are tried in multiples of this")
    parser.add_argument(
        "--margin", type=float, default=0.015, help="share by which the first try is shorter than foretold"
    )
    parser.add_argument(
        "--resolution",
        type=float,
        default=0.03,
        help="share by which a refused length may exceed one that fits",
    )
    parser.add_argument("--tries", type=int, default=6, help="most starts for a number of ranks")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one start")
    add_output(parser, "longest_sequence")
    parser.add_argument("--rank-job", default="", help=argparse.SUPPRESS)
    args = parse_with_tiny(parser, argv, TINY)
    if args.report:
        return report(args.report)
    if args.rank_job:
        from benchmarks.longest_sequence.steps import run

        return run(args, json.loads(args.rank_job))
    check_out(args.out)
    result: dict[str, Any] = {
        "area": "longest-sequence",
        "machine": machine(),
        "settings": {k: v for k, v in vars(args).items() if k not in ("out", "report", "rank_job")},
        "counts": {},
    }
    if args.out.exists():  # counts that were measured before stay
        known = json.loads(args.out.read_text())
        if known["settings"] | {"counts": None} == result["settings"] | {"counts": None}:
            result["counts"] = known["counts"]
    for count in args.counts:
        result["counts"][str(count)] = _search(args, list(argv), count)
        write(args.out, result)
    print(described(result))
    print(f"written to {args.out}")
    return 0


def _search(args: argparse.Namespace, argv: list[str], count: int) -> dict[str, Any]:
    """Start groups of ranks until a length that fits and one that is refused are close enough together."""
    attempts: list[dict[str, Any]] = []
    line: dict[str, float] | None = None
    fits, refused, reason = 0, 0, ""
    for _ in range(args.tries):
        job = {"count": count, "line": line, "fits": fits, "refused": refused}
        begin = time.monotonic()
        lines, reason = _started(args, argv, job)
        for found in lines:
            if found["kind"] == "line":
                line = found["line"]
                print(
                    f"{count} ranks: {line['fixed'] / GIB:.2f} GiB and {line['a_token'] / 1024:.1f} KiB a token of a rank, "
                    f"so {line['foretold']:,} tokens are foretold",
                    flush=True,
                )
                continue
            attempts.append(found)
            if found["fits"]:
                fits = max(fits, found["tokens"])
            elif not refused or found["tokens"] < refused:
                refused = found["tokens"]
        print(
            f"{count} ranks: {fits:,} tokens fit, {refused:,} do not; {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        if reason:
            print(f"{count} ranks: {reason}", flush=True)
            break
        if fits and refused and refused <= fits * (1 + args.resolution):
            break
    return {"line": line, "attempts": attempts, "fits": fits, "refused": refused, "note": reason}


def _started(args: argparse.Namespace, argv: list[str], job: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """One start: steps of growing length until one is refused, which ends the ranks. What each rank noted, once, and why
    the ranks ended if not for that."""
    with tempfile.TemporaryDirectory(prefix="longest-sequence-") as folder, PowerLog() as power:
        job = {**job, "folder": folder}
        rest = [*argv, "--rank-job", json.dumps(job)]
        ended, said = start_ranks(Path(__file__), rest, job["count"], args.timeout)
        notes = [
            json.loads(text)
            for file in sorted(Path(folder).glob("rank*.jsonl"))
            for text in file.read_text().splitlines()
        ]
    for note in notes:
        if "span" in note:  # readings are means of the second before them
            begin, end = note.pop("span")
            note["power"] = power.mean(begin + AVERAGED_S, end, job["count"])
    found = [note for note in notes if note["kind"] == "line" or note["fits"]]
    refusals = [note for note in notes if note["kind"] == "step" and not note["fits"]]
    if refusals:
        found.append(refusals[0])  # the first rank's that was refused; the others were ended
    if refusals or (found and ended == 0):
        return found, ""
    print(said[-3000:], file=sys.stderr, flush=True)
    return found, f"no refusal; the ranks {how_it_ended(ended, said, args.timeout)}"


def described(result: dict[str, Any]) -> str:
    """The table in Markdown and the bar."""
    s, m = result["settings"], result["machine"]
    limit = f"{s['memory']:g} GiB a rank" if s["memory"] else "all of the GPU's memory"
    lines = [
        f"{s['layers']} Llama blocks, hidden {s['hidden']}, {s['heads']} heads, {s['kv_heads']} key/value heads, inner "
        f"{s['ffn']}, {s['vocab']} words, {s['dtype']}, AdamW; every block recomputed, the loss in pieces of {s['piece']} "
        f"tokens; sequence={s['mode']!r}, kernel {s['kernel']}; {limit}; {m.get('gpu', 'CPU')}, torch {m['torch']}. A length "
        "fits when a whole training step of that length ran, and is refused when the step ran out of memory.",
        "",
        *_table(result["counts"]),
    ]
    counts = result["counts"]
    one = counts.get("1", {}).get("fits", 0)
    notes = [f"- {count} ranks: {found['note']}" for count, found in counts.items() if found.get("note")]
    lines += ["", *notes] if notes else []
    if one and str(BAR.ranks) in counts:
        ratio = counts[str(BAR.ranks)]["fits"] / one
        lines += [
            "",
            f"- {BAR.what}: {ratio:.2f} (bar {BAR.least:g}): {reports.met(BAR.met(ratio))}",
        ]
    elif one and len(counts) > 1:
        most = max(counts, key=int)
        ratio = counts[most]["fits"] / one
        lines += [
            "",
            f"- the bar is for 1 to {BAR.ranks} ranks and is not judged here; from 1 to {most}: {ratio:.2f}",
        ]
    return "\n".join(lines)


def _table(counts: dict[str, Any]) -> list[str]:
    sampled = any(attempt.get("power") for found in counts.values() for attempt in found["attempts"])
    return reports.table((*HEAD, *(reports.ENERGY if sampled else ())), _rows(counts, sampled))


def _rows(counts: dict[str, Any], sampled: bool) -> Iterator[list[str]]:
    one = counts.get("1", {}).get("fits", 0)
    for count, found in sorted(counts.items(), key=lambda item: int(item[0])):
        best = next((a for a in found["attempts"] if a["fits"] and a["tokens"] == found["fits"]), None)
        yield [
            count,
            f"{found['line']['foretold']:,}" if found["line"] else "–",
            f"{found['fits']:,}",
            f"{found['refused']:,}",
            f"{found['fits'] / one:.2f}" if one else "–",
            f"{best['seconds']:.1f}" if best else "–",
            f"{best['peak_bytes'] / GIB:.2f}" if best else "–",
            *(_energy(best) if sampled else ()),
        ]


def _energy(best: dict[str, Any] | None) -> tuple[str, str, str]:
    """Return the cells of the energy of a step; dashes where none fits."""
    if best is None:
        return reports.energy(None, 0.0, 1)
    return reports.energy(best.get("power"), 1e3 * best["seconds"], best["tokens"])


def report(path: Path) -> int:
    """Write the table and the plot next to a result."""
    result = json.loads(path.read_text())
    counts = {int(count): found for count, found in result["counts"].items()}
    figure, panels = reports.panels(1, 1, 3.8)
    panel = panels[0][0]
    for name, words, mark, colour in (
        ("fits", "longest that trains", "o-", reports.OURS),
        ("refused", "shortest that does not fit", "x", plotting.RED),
    ):
        shown = {count: counts[count][name] for count in sorted(counts) if counts[count][name]}
        panel.plot(list(shown), [value / 1000 for value in shown.values()], mark, color=colour, label=words)
    if counts.get(1, {}).get("fits"):
        proportional = [counts[1]["fits"] * count / 1000 for count in sorted(counts)]
        panel.plot(sorted(counts), proportional, ":", color=reports.PEER, label="proportional to GPUs")
    panel.set_xlabel("GPUs")
    panel.set_ylabel("length of a sequence, thousand tokens")
    panel.set_xticks(sorted(counts))
    panel.set_ylim(bottom=0)
    panel.legend()
    reports.save(figure, [described(result)], path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
