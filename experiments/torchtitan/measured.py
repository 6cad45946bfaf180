"""One rank of ``meshfold reproduce torchtitan --measure N``: ways to train Llama 3.1 8B, run for real.

Under FSDP: eager and compiled. With context parallelism: 1, 2, ... N ranks a sequence, which grows with them. Under tensor
parallelism over N: each way to interleave its traffic with matmuls, their asynchronous tensor parallelism.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.measuring import ON_CPU, Measured, Notes
from experiments.report import NONE, markdown
from experiments.trained import Job, trained
from meshfold.models import Llama, LlamaConfig

FSDP: dict[str, object] = {"zero": dict(stage=3, placement="cuda")}
EAGER, COMPILED, FUSED = "eager", "compiled", "fused kernels"
HOW: dict[str, dict[str, Any]] = {
    EAGER: dict(kernels="off"),
    COMPILED: dict(kernels="off", compiled=True),
    FUSED: dict(kernels="auto"),
}
"""Ways to run a model under FSDP: settings of :func:`experiments.trained.trained`."""
OVERLAPS = ("gather", "ring", "push")
"""How traffic of tensor parallelism and matmuls are interleaved; ``gather``: each is waited for, unless layers hide it."""
COMPILATION, ASYNCHRONOUS = 6667 / 5762, 4809.4 / 4378
CONTEXT = {1: 3890.0, 2: 2540.0, 4: 1071.0, 8: 548.0}
"""Published tokens a second of a GPU by ranks of a sequence, with linear layers in fp8; the sequence has 32,768 for each."""
PAGE = """<!-- made from measured.json by run.py --measure; edit neither -->

# torchtitan: Llama that ran

{ranks} ranks on {device}, {kind}; Llama with {layers} layers of {hidden}, all blocks recomputed; median of {steps} steps. Rows of a
part have the same model, and under FSDP and tensor parallelism the same batch. *Times*: tokens a second of a GPU by those of the
part's first row. Published, on eight GPUs and more: compilation 1.16; 32,768 tokens a GPU over 2 and 4 ranks, in fp8, 0.65 and
0.28; asynchronous tensor parallelism 1.10.

{table}

{verdict}
"""


def measure(notes: Notes) -> None:
    """Measure all rows, part by part."""
    o, ranks = notes.options, notes.ranks
    for how, settings in HOW.items():
        if how == COMPILED and not notes.cuda:  # traced, and run as it was: Inductor would take a minute
            settings = {**settings, "compiled": dict(backend="eager")}
        row = partial(one, notes, "FSDP", how, {"data": ranks, **FSDP}, o.tokens, o.rows * ranks, **settings)
        notes.add(f"FSDP, {how}", row)
    for context in (n for n in CONTEXT if ranks % n == 0):
        spec = {"data": ranks // context, **FSDP}
        if context > 1:
            spec["sequence"] = dict(mode="ring", size=context)
        name, tokens = f"{context} ranks a sequence", o.context * context
        notes.add(name, partial(one, notes, "context", name, spec, tokens, ranks // context))
    for overlap in OVERLAPS if ranks > 1 and o.heads % ranks == 0 else ():
        spec = {"tensor": dict(mode="1d", size=ranks, overlap=overlap), "sequence": dict(mode="megatron")}
        notes.add(f"tensor, {overlap}", partial(one, notes, "tensor", overlap, spec, o.tokens, o.rows))


def one(
    notes: Notes, part: str, how: str, spec: dict[str, object], tokens: int, batch: int, **settings: Any
) -> dict[str, Any]:
    """Train for a few steps with so many sequences of all ranks."""
    o = notes.options
    config = LlamaConfig(
        vocab_size=o.vocabulary,
        hidden=o.hidden,
        layers=o.layers,
        heads=o.heads,
        kv_heads=o.kv_heads,
        ffn=o.inner,
        max_positions=tokens,
    )
    job = Job(sequence=tokens, steps=o.steps, recompute="blocks", device=notes.device)
    ran = trained(lambda: Llama(config), config.vocab_size, spec, job, batch=batch, **settings)
    if ran["fits"]:
        ran["TPS"] = ran["samples/s"] * tokens / notes.ranks
    return {"part": part, "how": how, "tokens": tokens, "batch": batch, **ran}


def firsts(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The first row of each part that ran."""
    made: dict[str, Mapping[str, Any]] = {}
    for row in found["rows"]:
        if row["fits"]:
            made.setdefault(row["part"], row)
    return made


def page(found: Mapping[str, Any]) -> str:
    """measured.md."""
    first = firsts(found)
    rows = [
        [
            row["part"],
            row["how"],
            f"{row['tokens']:,}",
            str(row["batch"]),
            *(
                [
                    NONE if row["GB"] is None else f"{row['GB']:.1f}",
                    f"{row['TPS']:.0f}",
                    f"{row['TPS'] / first[row['part']]['TPS']:.3f}",
                    f"{row['loss']:.4f}",
                ]
                if row["fits"]
                else [NONE, "does not fit", NONE, NONE]
            ),
        ]
        for row in found["rows"]
    ]
    keys = ("ranks", "device", "kind", "layers", "hidden", "steps")
    table = markdown(["part", "how", "tokens", "sequences", "GB", "tokens/s of a GPU", "times", "loss"], rows)
    return PAGE.format(**{key: found[key] for key in keys}, table=table, verdict=said(found))


def said(found: Mapping[str, Any]) -> str:
    """Return what the numbers say of the published claims, by their direction: the GPUs are others."""
    if found["device"] == "CPU":
        return ON_CPU
    by = {(row["part"], row["how"]): row["TPS"] for row in found["rows"] if row["fits"]}
    parts = []
    if {("FSDP", EAGER), ("FSDP", COMPILED)} <= set(by):
        gain = by["FSDP", COMPILED] / by["FSDP", EAGER]
        parts.append(
            f"Compilation makes FSDP {gain:.2f} times as fast (published {COMPILATION:.2f}): {_same(gain > 1)}."
        )
    alone = by.get(("context", "1 ranks a sequence"))
    for n in (2, 4, 8):
        share = by.get(("context", f"{n} ranks a sequence"))
        if alone and share:
            published = CONTEXT[n] / CONTEXT[1]
            parts.append(
                f"Sequences {n} times as long over {n} ranks leave {share / alone:.2f} of the speed (published "
                f"{published:.2f}): {_same(share < alone)}, {abs(share / alone / published - 1):.0%} off."
            )
    gathered = by.get(("tensor", "gather"))
    beside = {how: by["tensor", how] for how in OVERLAPS[1:] if ("tensor", how) in by}
    if gathered and beside:
        how = max(beside, key=beside.__getitem__)
        gain = beside[how] / gathered
        parts.append(
            f"Tensor parallelism by {how} is {gain:.2f} times as fast as by gather (published for asynchronous traffic "
            f"{ASYNCHRONOUS:.2f}): {_same(gain > 1)}."
        )
    return " ".join(parts)


def _same(holds: bool) -> str:
    return "the published direction" if holds else "not the published direction"


MEASURED = Measured(
    file=__file__,
    about=__doc__,
    sizes=(  # Sizes; on GPUs by default those of Llama 3.1 8B.
        ("layers", 1, 32, None),
        ("hidden", 32, 4096, None),
        ("heads", 4, 32, None),
        ("kv-heads", 4, 8, "of keys and values"),
        ("inner", 64, 14_336, None),
        ("vocabulary", 128, 128_256, None),
        ("tokens", 16, 8192, "of a sequence under FSDP and tensor parallelism"),
        ("rows", 2, 2, "sequences of a rank under FSDP; of all under tensor parallelism"),
        ("context", 16, 32_768, "tokens of a rank where a sequence is split"),
        ("steps", 1, 2, "that count; two more run before them, four with compiled blocks"),
    ),
    shown=("layers", "hidden", "tokens", "rows", "context", "steps"),
    run=measure,
    page=page,
)
main = MEASURED.main

if __name__ == "__main__":
    sys.exit(main())
