"""Two versions of Meshfold on the same work on one machine, by turns: no change may make a training step slower.

`meshfold bench two-versions --before FOLDER` runs each case with the code in FOLDER (another checkout) and with this
checkout, in processes of their own: before, now, now, before, ... It writes JSON with the seconds of every step;
`--report FILE.json` makes the table from it. Small models run in this file, the other cases are other benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
if __name__ == "__main__" and "--work" not in sys.argv:
    sys.path.insert(0, str(HERE.parents[1]))  # so that this file runs on its own

RESULTS = HERE.parent / "results"
VERSIONS = ("before", "now")
BAR = 1.01
"""Largest seconds a step, in those of the version before."""

SIZES: dict[str, dict[str, int]] = {
    "2 layers of 128": dict(n_layer=2, n_embd=128, n_head=4, n_positions=256, vocab_size=1024),
    "6 layers of 384": dict(n_layer=6, n_embd=384, n_head=6, n_positions=256, vocab_size=8192),
    "gpt2": dict(n_layer=12, n_embd=768, n_head=12, n_positions=1024, vocab_size=50257),
}
SPECS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=1)),
    "zero 3": dict(parallel=dict(data=1, zero=dict(stage=3, placement="cuda"))),
}
SPECS_2 = ("zero 3", "tensor 2", "pipeline 2")


@dataclass(frozen=True)
class Case:
    """One work.

    Attributes:
        about: what the table calls it.
        words: what follows ``meshfold bench``; nothing: a small model, run by this file.
        tiny: what follows them with ``--tiny``.
        seconds: reads the seconds of all timed steps from the JSON that it wrote.
        power: reads the mean watts and MHz of these steps from it, if another benchmark sampled them.
    """

    about: str
    words: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    seconds: Callable[[dict[str, Any]], list[float]] = lambda found: list(found["seconds"])
    power: Callable[[dict[str, Any]], dict[str, float]] = lambda found: {}


def _specs(name: str, model: str = "llama-8b") -> Case:
    def seconds(found: dict[str, Any]) -> list[float]:
        (run,) = found["contestants"][name]
        if run.get("error"):
            raise RuntimeError(str(run["error"]))
        return list(run["seconds"][6:])

    words = (
        "specs",
        "--ranks",
        "2",
        "--rows",
        "4",
        "--model",
        model,
        "--only",
        name,
        "--steps",
        "16",
        "--warm-up",
        "6",
    )
    size = model.removeprefix("llama-").upper()
    return Case(
        f"Llama {size}, two ranks, {name}",
        words,
        ("--tiny", "--steps", "8"),
        seconds,
        lambda found: dict(found["contestants"][name][0]),
    )


def _tensor(name: str) -> Case:
    small = "--layers 1 --hidden 32 --heads 4 --kv-heads 4 --ffn 64 --batch 2 --seq-len 8 --dtype float32 --repeats 1"
    return Case(
        f"eight Llama-8B blocks, two ranks, {name}",
        ("tensor-parallel", "--ranks", "2", "--only", name, "--rounds", "6"),
        tuple(small.split()),
        lambda found: [one / 1e3 for one in found["milliseconds"][name]],
        lambda found: found.get("power", {}).get(name, {}),
    )


def _offload(name: str) -> Case:
    def seconds(found: dict[str, Any]) -> list[float]:
        run = found["cases"][name]["rows"]["ours"][0]
        if run.get("error"):
            raise RuntimeError(str(run["error"]))
        return [step["seconds"] for step in run["steps"] if step.get("timed", True)]

    return Case(
        f"{name} under zero-offload",
        ("zero-offload", "--case", name, "--only", "ours"),
        (),
        seconds,
        lambda found: found["cases"][name]["rows"]["ours"][0].get("power") or {},
    )


CASES: dict[str, Case] = {
    **{f"{size}, {spec}": Case(f"GPT-2 of transformers, {size}, {spec}, eager") for size in SIZES for spec in SPECS},
    **{name: _specs(name) for name in SPECS_2},
    **{f"1B, {name}": _specs(name, "llama-1b") for name in SPECS_2},
    **{name: _tensor(name) for name in ("1d+sequence", "1d", "2d")},
    **{name: _offload(name) for name in ("6.7B-40", "6.7B-24")},
}


def main(argv: Sequence[str]) -> int:
    """Entry point of `meshfold bench two-versions`."""
    parser = argparse.ArgumentParser(prog="meshfold bench two-versions", description=__doc__.split("\n")[0])
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout of the other version")
    parser.add_argument("--case", nargs="+", default=list(CASES), metavar="NAME", help=f"of {'; '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each version: before now now before")
    parser.add_argument("--steps", type=int, default=100, help="timed steps of a small model")
    parser.add_argument("--warm-up", type=int, default=30, help="steps of a small model that are not timed")
    parser.add_argument("--settle-s", type=float, default=20.0, help="least seconds of them on a GPU: clocks settle")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one start")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command without GPUs")
    parser.add_argument("--out", type=Path, default=RESULTS / "two_versions.json")
    parser.add_argument("--report", type=Path, help="make the table from this result; nothing is run")
    options = parser.parse_args(argv)
    if options.report is not None:
        report(options.report)
        return 0
    from benchmarks.common import check_out, machine, write

    check_out(options.out)
    unknown = [name for name in options.case if name not in CASES]
    if unknown:
        parser.error(f"--case {unknown[0]!r} does not exist: use one of {'; '.join(CASES)}")
    if options.before is None or not (options.before / "packages" / "engine").is_dir():
        parser.error("--before must name another checkout: git worktree add ../before COMMIT, then --before ../before")
    trees = {"before": options.before.resolve(), "now": HERE.parents[1]}
    found: dict[str, Any] = {
        "area": "two-versions",
        "machine": machine(),
        "commits": {version: _commit(tree) for version, tree in trees.items()},
        "cases": {},
    }
    if options.out.exists():
        known = json.loads(options.out.read_text())
        if known["machine"] != found["machine"] or known["commits"] != found["commits"]:
            parser.error(f"{options.out} is of another machine or of other commits: give another --out")
        found = known
    for name in options.case:
        runs: dict[str, Any] = found["cases"].setdefault(name, {version: [] for version in VERSIONS})
        for turn in range(options.rounds):
            for version in VERSIONS if turn % 2 == 0 else VERSIONS[::-1]:
                runs[version].append(_run(CASES[name], name, trees[version], options))
                write(options.out, found)
        print(line(name, runs), flush=True)
    report(options.out)
    return 0


def _run(case: Case, name: str, tree: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one start of a version: the seconds of its timed steps, mean watts and MHz where they were sampled, or the error."""
    from benchmarks.power import PowerLog
    from benchmarks.reports import mean_power

    sources = sorted(map(str, tree.glob("packages/*/src")))
    others = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if not Path(path, "meshfold").is_dir()
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, str(tree), *others])}
    with tempfile.TemporaryDirectory(prefix="two-versions-") as folder, PowerLog() as power:
        out = Path(folder) / "found.json"
        if case.words:
            command = next(tree.glob("packages/*/src/meshfold/**/cli/__main__.py")).parent
            module = ".".join(command.parts[command.parts.index("src") + 1 :])
            words = [
                sys.executable,
                "-m",
                module,
                "bench",
                *case.words,
                *(case.tiny if options.tiny else ()),
                "--out",
                str(out),
            ]
        else:
            job = dict(case=name, steps=options.steps, warm_up=options.warm_up, settle_s=options.settle_s, out=str(out))
            words = [sys.executable, str(HERE), "--work", json.dumps(job)]
        try:
            ended = subprocess.run(
                words, cwd=tree, env=environment, timeout=options.timeout, capture_output=True, text=True
            )
            found = json.loads(out.read_text())
            seconds, sampled = case.seconds(found), case.power(found)
        except subprocess.TimeoutExpired:
            return {"seconds": [], "error": f"not at its end after {options.timeout:.0f} s"}
        except (OSError, LookupError, RuntimeError, ValueError) as error:
            print(ended.stdout[-1500:], ended.stderr[-2500:], file=sys.stderr, flush=True)
            return {"seconds": [], "error": str(error) or type(error).__name__}
    if not case.words:
        sampled = power.mean(found["first"], found["last"], 1)
    return {"seconds": seconds, **mean_power([sampled])}


def work(job: dict[str, Any]) -> int:
    """Train one small model of transformers for a while, with whichever version is on the path; write its seconds."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from meshfold.engine import Engine

    size, _, spec = job["case"].rpartition(", ")
    config = GPT2Config(**SIZES[size], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    engine = Engine(
        GPT2LMHeadModel(config),
        precision="bf16" if torch.cuda.is_available() else "fp32",
        optimizer=dict(name="adamw", lr=1e-4),
        **SPECS[spec],
    )
    rows = torch.randint(config.vocab_size, (4, config.n_positions), generator=torch.Generator().manual_seed(0))
    batch = engine.shard_batch(dict(input_ids=rows, labels=rows))

    def synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def step() -> float:
        synchronize()
        begin = time.perf_counter()
        engine.train_step(batch)
        synchronize()
        return time.perf_counter() - begin

    begun = time.perf_counter()
    for _ in range(job["warm_up"]):
        step()
    while torch.cuda.is_available() and time.perf_counter() - begun < job["settle_s"]:
        step()
    first = time.time()
    seconds = [step() for _ in range(job["steps"])]
    Path(job["out"]).write_text(json.dumps({"seconds": seconds, "first": first, "last": time.time()}))
    return 0


def _commit(tree: Path) -> str:
    """Return the commit of a checkout, or the folder's name where it is not the root of one."""
    words = ["git", "-C", str(tree), "rev-parse", "--show-toplevel", "--short=9", "HEAD"]
    ended = subprocess.run(words, capture_output=True, text=True)
    root, _, commit = ended.stdout.strip().partition("\n")
    return commit if ended.returncode == 0 and Path(root).resolve() == tree.resolve() else tree.name


def ratio(runs: dict[str, Any]) -> float:
    """Return the median seconds of a step now, in those of the version before; nan if one of them did not run."""
    from benchmarks.common import median

    pooled = {version: [one for run in runs[version] for one in run["seconds"]] for version in VERSIONS}
    return median(pooled["now"]) / median(pooled["before"]) if all(pooled.values()) else float("nan")


def line(name: str, runs: dict[str, Any]) -> str:
    """Return a case in one line."""
    errors = errors_of(runs)
    return f"{name}: {ratio(runs):.3f} of the seconds before" + (f" ({errors[0]})" if errors else "")


def errors_of(runs: dict[str, Any]) -> list[str]:
    """Return why starts of a case did not end."""
    return [run["error"] for version in VERSIONS for run in runs[version] if run.get("error")]


def energy(runs: dict[str, Any]) -> list[str]:
    """Return two cells of a case: joules of a step and MHz, before and now; a dash where none were sampled.

    Older results have ``mean_mhz``, of all samples above 150 W, and no watts.
    """
    from benchmarks.common import median
    from benchmarks.reports import mean_power

    spent, clocks = [], []
    for version in VERSIONS:
        power = mean_power(runs[version])
        seconds = [one for run in runs[version] for one in run["seconds"]]
        spent.append(f"{power['watts'] * median(seconds):,.1f}" if power and seconds else "–")
        known = [mhz for run in runs[version] if (mhz := run.get("mhz", run.get("mean_mhz"))) is not None]
        clocks.append(f"{sum(known) / len(known):.0f}" if known else "–")
    return [", ".join(cells) if {*cells} != {"–"} else "–" for cells in (spent, clocks)]


def report(path: Path) -> None:
    """Write the table beside a result, and print it."""
    from benchmarks.common import median
    from benchmarks.reports import met, table

    found = json.loads(path.read_text())
    rows, notes = [], {}
    energies = {name: energy(runs) for name, runs in found["cases"].items()}
    kept = [place for place in range(2) if any(cells[place] != "–" for cells in energies.values())]
    for name, runs in found["cases"].items():
        cells = []
        for version in VERSIONS:
            middles = [median(run["seconds"]) * 1e3 for run in runs[version] if run["seconds"]]
            cells.append(", ".join(f"{one:.2f}" for one in middles) or "–")
        errors = errors_of(runs)
        if errors:
            notes[name] = errors[0]
        now = ratio(runs)
        known = (energies[name][place] for place in kept)
        rows.append((CASES[name].about, *cells, f"{now:.3f}", met(now <= BAR), *known))
    heads = ("J a step, before and now", "MHz, before and now")
    head = ("work", "before, ms a step", "now, ms a step", "now / before", f"at most {BAR}", *(heads[k] for k in kept))
    words = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value is not None)
    commits = f"before: commit {found['commits']['before']}; now: commit {found['commits']['now']}."
    lines = [
        f"Measured on: {words}.",
        "",
        f"Each start's median; {commits}",
        "",
        *table(head, rows),
        *(["", *table(("work", "note"), notes.items())] if notes else []),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        raise SystemExit(work(json.loads(sys.argv[2])))
    raise SystemExit(main(sys.argv[1:]))
