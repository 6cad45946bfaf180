"""The cases: which model under which limits, who runs, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import reports
from experiments.toml_tables import check_names, read_tables

OURS = "ours"
OURS_ON_GPU = "ours, everything on the GPU"
PLAIN = "plain torch"
DDP = "DDP"
DEEPSPEED = "DeepSpeed ZeRO-3 offload"
DEEPSPEED_DEFAULTS = "DeepSpeed ZeRO-3 offload, default buckets"
DEEPSPEED_PLAIN = "DeepSpeed ZeRO-3 offload, default buckets, non-reentrant"
DEEPSPEED_PART = "DeepSpeed ZeRO-3 offload of a part"
FSDP2_OFFLOAD = "FSDP2 offload"
FSDP2 = "FSDP2"
GEMINI = "Colossal-AI Gemini, fp16"

# Name: the module that builds it, and what that module is told.
CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("benchmarks.zero_offload.ours", {"placement": "auto"}),
    OURS_ON_GPU: ("benchmarks.zero_offload.ours", {"placement": "cuda"}),
    PLAIN: ("benchmarks.peers.plain_torch", {}),
    DDP: ("benchmarks.peers.plain_torch", {}),
    DEEPSPEED: ("benchmarks.peers.deepspeed_offload", {}),
    DEEPSPEED_DEFAULTS: ("benchmarks.peers.deepspeed_offload", {"buckets": "default"}),
    DEEPSPEED_PLAIN: ("benchmarks.peers.deepspeed_offload", {"buckets": "default", "reentrant": False}),
    DEEPSPEED_PART: ("benchmarks.peers.deepspeed_offload", {"ratio": 0.85}),
    FSDP2_OFFLOAD: ("benchmarks.peers.fsdp2_offload", {"offload": True}),
    FSDP2: ("benchmarks.peers.fsdp2_offload", {"offload": False}),
    GEMINI: ("benchmarks.peers.colossalai_gemini", {}),
}
MINE = (OURS, OURS_ON_GPU)
NEVER_CLIPPED = 1e9
KINDS = ("faster", "tflops", "gpu_gib", "trains", "largest", "predicted")


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Aim for ours: a table of bars/zero_offload.toml.

    Attributes:
        cases: the cases it is for; none: all.
        kind: ``"faster"`` than the fastest of ``than`` by ``value``; ``"tflops"`` at least; ``"gpu_gib"`` at most;
            ``"trains"``: all steps done and the loss lower at the end; ``"largest"``: most samples a second of all,
            in no more memory than each; ``"predicted"``: what the table's name says after "predicted_" is off by at
            most ``value``, relative to what was measured.
        value: the number, where the kind has one.
        than: names of contestants.
        factor: what the clip factor has to be in every timed step for the bar to apply: ``"below 1"``, ``"1"`` or "".
    """

    kind: str
    cases: tuple[str, ...] = ()
    value: float = 0.0
    than: tuple[str, ...] = ()
    factor: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        name: what ``--case`` takes.
        about: a line for the table.
        model: of ``decoder.SHAPES``, or the preset of a PaLM.
        rows, seq_len: sequences a step (of each rank), and their tokens.
        gpu_gib, host_gib: limits in GiB; 0: none beyond the machine's.
        contestants: who runs, in this order.
        regime: of ours.
        clip: largest norm; None: not clipped.
        lr: so small, where the factor is to stay below 1, that the norm hardly falls in a few steps.
        disk: whether ours may use one.
        warm_up, steps: not timed, and timed.
        ranks: one a GPU.
        search: with the largest number of rows that each can do.
        peers_of: case whose rows stand in for peers that were not run here: the same work for them. They count where both
            cases were run in one call.
        published: what others have published for it.
    """

    name: str
    about: str
    model: str
    rows: int = 16
    seq_len: int = 1024
    gpu_gib: float = 0.0
    host_gib: float = 0.0
    contestants: tuple[str, ...] = (OURS,)
    regime: str = "A"
    clip: float | None = 1.0
    lr: float = 1e-4
    disk: bool = False
    warm_up: int = 3
    steps: int = 3
    ranks: int = 1
    search: bool = False
    peers_of: str = ""
    published: str = ""


OFFLOADING = (DEEPSPEED, DEEPSPEED_DEFAULTS, GEMINI, FSDP2_OFFLOAD)
SMALL_LR = 2e-6
_HOST_125 = 121.0  # of 125 GiB: the rest is the system's


def _largest(model: str, regime: str, clip: float | None) -> Case:
    clipped = "" if clip else ", not clipped"
    lr = 1e-4 if clip else 1e-5  # what is not clipped is stepped gently: losses of such models jump otherwise
    return Case(
        name=f"largest-{regime}{'' if clip else '-unclipped'}",
        about=f"{model}, regime {regime}{clipped}, no GPU limit, 125 GiB of host memory",
        model=model,
        regime=regime,
        clip=clip,
        lr=lr,
        rows=1,
        host_gib=_HOST_125,
    )


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="6.7B",
            about="6.7B, no limit",
            model="6.7B",
            contestants=(OURS, PLAIN),
        ),
        Case(
            name="6.7B-40",
            about="6.7B, GPU limited to 40 GiB, clip factor below 1 in every timed step",
            model="6.7B",
            gpu_gib=40,
            lr=SMALL_LR,
            contestants=(OURS, *OFFLOADING),
        ),
        Case(
            name="6.7B-40-factor-1",
            about="6.7B, GPU limited to 40 GiB, 256 GiB of host memory, clip factor 1 in every timed step",
            model="6.7B",
            gpu_gib=40,
            host_gib=240,
            clip=NEVER_CLIPPED,
            peers_of="6.7B-40",
        ),
        Case(
            name="6.7B-24",
            about="6.7B, GPU limited to 24 GiB",
            model="6.7B",
            gpu_gib=24,
            rows=4,
            lr=SMALL_LR,
            contestants=(OURS, DEEPSPEED, DEEPSPEED_DEFAULTS, DEEPSPEED_PLAIN),
        ),
        Case(
            name="13B",
            about="13B, no GPU limit, 125 GiB of host memory",
            model="13B",
            host_gib=_HOST_125,
            published="DeepSpeed ZeRO-3 offload 191 TFLOP/s with 308 GiB of host memory; FSDP2 offload 109 with 220",
        ),
        _largest("18.5B", "A", 1.0),
        _largest("26B", "B", 1.0),
        _largest("21B", "A", None),
        _largest("32B", "B", None),
        Case(
            name="24B-40",
            about="24B, GPU limited to 40 GiB, 500 GiB of host memory",
            model="24B",
            rows=1,
            gpu_gib=40,
            host_gib=480,
            published="Colossal-AI 69.5 s a step, A100 of 40 GB, 500 GB of host memory",
        ),
        Case(
            name="18B-24",
            about="18B, GPU limited to 24 GiB, 256 GiB of host memory",
            model="18B",
            rows=1,
            gpu_gib=24,
            host_gib=240,
        ),
        Case(
            name="12B-10",
            about="12B, GPU limited to 10 GiB, 125 GiB of host memory, and a disk",
            model="12B",
            rows=1,
            gpu_gib=10,
            host_gib=_HOST_125,
            disk=True,
            lr=SMALL_LR,
            steps=2,
        ),
        Case(
            name="1.5B-6",
            about="1.5B, regime B, GPU limited to 6 GiB, 16 GiB of host memory",
            model="1.5B",
            rows=1,
            gpu_gib=6,
            host_gib=16,
            regime="B",
        ),
        Case(
            name="palm-16b-24",
            about="PaLM 16B, regime B, not clipped, GPU limited to 24 GiB, 125 GiB of host memory",
            model="palm-16b",
            rows=1,
            gpu_gib=24,
            host_gib=_HOST_125,
            regime="B",
            clip=None,
            lr=1e-5,
            steps=2,
        ),
        Case(
            name="palm-1b-6",
            about="PaLM 1B, GPU limited to 6 GiB, 16 GiB of host memory",
            model="palm-1b",
            rows=2,
            gpu_gib=6,
            host_gib=16,
        ),
        Case(
            name="gpt2-xl-4",
            about="GPT2-XL on four GPUs, each limited to 40 GiB, largest batch of each",
            model="1.5B",
            rows=2,
            gpu_gib=40,
            ranks=4,
            search=True,
            contestants=(DDP, FSDP2, OURS_ON_GPU),
            published="A100s: DDP 11.76, ZeRO-3 18.18, Colossal-AI 19.36 samples/s",
        ),
        Case(
            name="tiny",
            about="two small layers: to try the commands, not to compare",
            model="tiny",
            rows=2,
            seq_len=32,
            contestants=tuple(name for name in CONTESTANTS if name not in (DDP, FSDP2, OURS_ON_GPU)),
        ),
        Case(
            name="tiny-palm", about="a small PaLM: to try the commands", model="palm-tiny", rows=2, seq_len=32, steps=2
        ),
    )
}


def read_bars() -> dict[str, Bar]:
    """Read bars/zero_offload.toml.

    Raises:
        TableError: if the file is wrong, or names a kind, a case or a contestant that does not exist.
    """
    found = read_tables(reports.BARS / "zero_offload.toml", Bar)
    for name, bar in found.items():
        reports.check_known("zero_offload", name, "kind", [bar.kind], KINDS)
        reports.check_known("zero_offload", name, "cases", bar.cases, CASES)
        reports.check_known("zero_offload", name, "than", bar.than, CONTESTANTS)
    predicted = {name for name, bar in found.items() if bar.kind == "predicted"}
    check_names(reports.BARS / "zero_offload.toml", predicted, {"predicted_seconds", "predicted_peak_gpu_bytes"})
    return found


BARS = read_bars()


def chosen(names: Iterable[str]) -> list[Case]:
    """Cases by name, all but those for trying out if none is named.

    Raises:
        SystemExit: for a name that is not there.
    """
    wanted = list(names) or [name for name in CASES if not name.startswith("tiny")]
    for name in wanted:
        if name not in CASES:
            raise SystemExit(f"there is no case {name!r}; there are: {', '.join(CASES)}")
    return [CASES[name] for name in wanted]
