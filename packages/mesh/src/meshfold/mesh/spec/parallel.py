"""The whole spec: seven entries, their axes in rank order, and checks across entries."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from meshfold.mesh.errors import SpecError
from meshfold.mesh.spec.axial import KEYS as AXIAL_KEYS
from meshfold.mesh.spec.axial import AxialSpec
from meshfold.mesh.spec.entry import Entry, divisors, format_value, join_choices, kind, suggest
from meshfold.mesh.spec.expert import KEYS as EXPERT_KEYS
from meshfold.mesh.spec.expert import ExpertSpec
from meshfold.mesh.spec.pipeline import KEYS as PIPELINE_KEYS
from meshfold.mesh.spec.pipeline import PipelineSpec
from meshfold.mesh.spec.sequence import KEYS as SEQUENCE_KEYS
from meshfold.mesh.spec.sequence import SequenceSpec
from meshfold.mesh.spec.tensor import KEYS as TENSOR_KEYS
from meshfold.mesh.spec.tensor import TensorSpec
from meshfold.mesh.spec.text import format_bytes, format_table
from meshfold.mesh.spec.zero import KEYS as ZERO_KEYS
from meshfold.mesh.spec.zero import ZeroSpec

ENTRIES = ("data", "pipeline", "sequence", "tensor", "axial", "expert", "zero")
_KEYS = {
    "tensor": TENSOR_KEYS,
    "pipeline": PIPELINE_KEYS,
    "sequence": SEQUENCE_KEYS,
    "zero": ZERO_KEYS,
    "expert": EXPERT_KEYS,
    "axial": AXIAL_KEYS,
}


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """The checked spec of how a model is split over ranks. Made by ``ParallelSpec.parse``; an entry that was left out is None.

    ``data`` is None, and counts as 1, until the world size is known. ``written`` is the spec as the user wrote it, for messages.
    """

    data: int | None = None
    pipeline: PipelineSpec | None = None
    sequence: SequenceSpec | None = None
    tensor: TensorSpec | None = None
    axial: AxialSpec | None = None
    expert: ExpertSpec | None = None
    zero: ZeroSpec | None = None
    written: str = field(default="", compare=False, repr=False)

    @classmethod
    def parse(cls, parallel: object, world_size: int | None = None) -> ParallelSpec:
        """Check ``parallel=dict(data=..., pipeline=..., tensor=..., zero=..., ...)``; return the spec.

        Pure: needs no process group and accepts the whole grammar whatever is installed. With ``world_size`` (ranks) given,
        ``data`` is inferred where it was left out, and the product must be the world size. Raises SpecError for any mistake.
        """
        if not isinstance(parallel, dict):
            raise SpecError(
                f"parallel={format_value(parallel)}: parallel is {kind(parallel)}, not a dict. "
                "Write parallel=dict(data=2, tensor=4), or parallel={} for plain data parallelism."
            )
        for key, value in parallel.items():
            if key not in ENTRIES:
                known = f"Known entries: {', '.join(ENTRIES)}."
                if isinstance(key, str):
                    hint = _belongs(key, value) or suggest(key, ENTRIES)
                    raise Entry(name=key, value=value).error(f"there is no entry {key!r}.{hint}", known)
                raise SpecError(
                    f"parallel={format_value(parallel)}: the key {format_value(key)} is {kind(key)}, not a name. {known}"
                )
        spec = cls(
            data=_data(parallel["data"]) if "data" in parallel else None,
            pipeline=PipelineSpec.parse(parallel["pipeline"]) if "pipeline" in parallel else None,
            sequence=SequenceSpec.parse(parallel["sequence"]) if "sequence" in parallel else None,
            tensor=TensorSpec.parse(parallel["tensor"]) if "tensor" in parallel else None,
            axial=AxialSpec.parse(parallel["axial"]) if "axial" in parallel else None,
            expert=ExpertSpec.parse(parallel["expert"]) if "expert" in parallel else None,
            zero=ZeroSpec.parse(parallel["zero"]) if "zero" in parallel else None,
            written=f"parallel={format_value(parallel)}",
        )
        spec._check_megatron(parallel)
        spec._check_attention(parallel)
        spec._check_axial(parallel)
        if spec.data is not None:
            spec._check_experts()
        return spec if world_size is None else spec.with_world_size(world_size)

    def with_world_size(self, world_size: int) -> ParallelSpec:
        """Return this spec on ``world_size`` ranks: ``data`` filled in if left out, the product checked."""
        total = Entry(name="world_size", value=world_size).count("world_size", world_size, 1)
        rest = math.prod(size for name, size in self.axes.items() if name != "data")
        if total % rest == 0 and self.data in (None, total // rest):
            fitted = replace(self, data=total // rest)
            fitted._check_experts()
            return fitted
        written = self.written or f"parallel={format_value(self.to_dict())}"
        shown = {name: size for name, size in self.axes.items() if name != "data" or self.data is not None}
        entries = {
            "pipe": "pipeline",
            "seq": "sequence",
        }  # axes whose entry has another name
        sizes = " × ".join(f"{entries.get(name, name)}={size}" for name, size in shown.items())
        problem = f"{written}: {sizes} makes {self.world_size} ranks, but the world size is {total}"
        if total == 1:  # most often a script that was started as python script.py
            given = [*(["data"] if self.axes["data"] > 1 else []), *self._split]
            raise SpecError(
                f"{problem}. Start {self.world_size} processes, as with 'meshfold run --ranks {self.world_size} SCRIPT.py' or "
                f"torchrun, or leave {join_choices(given, 'and')} out."
            )
        if total % rest == 0:
            raise SpecError(
                f"{problem}. Write data={total // rest}, leave it out, or start {self.world_size} processes."
            )
        below = total // rest * rest
        near = [number for number in (below, below + rest) if number > 0]
        fitting = join_choices(near) if self.data is None else str(self.world_size)
        raise SpecError(
            f"{problem}, and {rest} does not divide {total}. Start {fitting} processes, or {self._smaller(total)}."
        )

    @property
    def _split(self) -> dict[str, int]:
        """Ranks of each entry, other than data, that has several."""
        entries = {name: getattr(self, name) for name in ("pipeline", "sequence", "tensor", "axial")}
        return {name: entry.size for name, entry in entries.items() if entry is not None and entry.size > 1}

    def _smaller(self, total: int) -> str:
        """Return advice on sizes of the entries other than data that make ``total`` ranks."""
        split = self._split
        names = join_choices(split, "and")
        ranks = math.prod(split.values())
        now = f"{names} {'together ' if len(split) > 1 else ''}{{}} ranks instead of {ranks}"
        if self.data is None:
            return "give " + now.format(join_choices(divisors(total)[:12]))
        if total % self.data:
            return "leave data out and give " + now.format(join_choices(divisors(total)[:12]))
        left = total // self.data
        return f"leave {names} out" if left == 1 else "give " + now.format(left)

    def _check_megatron(self, parallel: dict[str, object]) -> None:
        if self.sequence is None or self.sequence.mode != "megatron":
            return
        entry = Entry(name="sequence", value=parallel["sequence"])
        size = 2 if self.tensor is None else self.tensor.size
        change = f"Write tensor=dict(mode='1d', size={size}), or sequence=dict(mode='ring', size=2)."
        if self.tensor is None:
            problem = "mode 'megatron' splits the sequence over the axis tensor, and there is no tensor entry."
            raise entry.error(problem, change)
        if self.tensor.mode_name != "1d":
            written = f"tensor={format_value(parallel['tensor'])}"
            raise entry.error(f"mode 'megatron' needs tensor mode '1d', and there is {written}.", change)

    def _check_attention(self, parallel: dict[str, object]) -> None:
        """Refuse attention by tokens together with a sequence that another axis splits."""
        if self.tensor is None or not self.tensor.by_tokens:
            return
        if self.sequence is not None and self.sequence.mode != "megatron":
            raise Entry(name="sequence", value=parallel["sequence"]).error(
                f"tensor has attention={self.tensor.attention!r}, which splits the sequence over the axis tensor by itself.",
                "Leave sequence out, or leave attention out of tensor.",
            )

    def _check_axial(self, parallel: dict[str, object]) -> None:
        """Refuse other entries that split the tensors or the weights of a forward."""
        for other in ("tensor", "sequence", "expert"):
            if self.axial is not None and getattr(self, other) is not None:
                raise Entry(name="axial", value=parallel["axial"]).error(
                    f"axial splits pair and MSA tensors and keeps weights whole, and works with data, pipeline and zero; there is "
                    f"{other}={format_value(parallel[other])} too.",
                    f"Leave {other} out.",
                )

    def _check_experts(self) -> None:
        if self.expert is not None:
            self.expert.fold(self._without_pipeline)

    @property
    def _without_pipeline(self) -> dict[str, int]:
        stages = {} if self.pipeline is None else self.pipeline.axes
        return {name: size for name, size in self.axes.items() if name not in stages}

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes, or factors of axes, whose ranks hold different experts; none without the entry ``expert``.

        Raises:
            SpecError: while ``data`` is not known, if the other axes have too few ranks.
        """
        return () if self.expert is None else self.expert.fold(self._without_pipeline)[0]

    @property
    def expert_tensor_axes(self) -> tuple[str, ...]:
        """The axes, or factors of axes, whose ranks hold parts of the same experts."""
        return () if self.expert is None else self.expert.fold(self._without_pipeline)[1]

    @property
    def expert_data_axes(self) -> tuple[str, ...]:
        """The other axes of data, sequence and tensor, or the rest of their factors: their ranks hold the same experts."""
        folded = ExpertSpec(size=1) if self.expert is None else self.expert
        return folded.fold(self._without_pipeline)[2]

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size, outermost first: data, pipe, seq (or ring, ulysses), then the tensor mode's or the axial mode's.

        Ranks are row-major over it, so these vary fastest. An entry left out has no axis, save
        ``data``; experts have none of their own, see ``expert_axes``.
        """
        axes = {"data": 1 if self.data is None else self.data}
        for entry in (self.pipeline, self.sequence, self.tensor, self.axial):
            axes.update({} if entry is None else entry.axes)
        return axes

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of all axes; ``data`` counts as 1 until it is known."""
        return math.prod(self.axes.values())

    def to_dict(self) -> dict[str, object]:
        """Return the spec as a dict: ``ParallelSpec.parse(spec.to_dict()) == spec``."""
        given = {} if self.data is None else {"data": self.data}
        entries = {name: getattr(self, name) for name in ENTRIES[1:]}
        return {**given, **{name: entry.to_dict() for name, entry in entries.items() if entry is not None}}

    def describe(self) -> str:
        """Return the spec as a table of several lines: each entry with its ranks, its axes and how it works."""
        return _table(self)

    def _needs(self) -> list[Need]:
        needs = []
        if self.tensor is not None:
            needs.append(Need("tensor", "meshfold-tensor-parallel", "meshfold.tensor_parallel"))
        if self.pipeline is not None and self.pipeline.size > 1:
            needs.append(Need("pipeline", "meshfold-pipeline", "meshfold.pipeline"))
        if self.sequence is not None and self.sequence.size > 1:
            needs.append(Need("sequence", "meshfold-pipeline", "meshfold.sequence"))
        if self.axial is not None and (self.axial.size > 1 or self.axial.memory is not None):
            needs.append(Need("axial", "meshfold-folding", "meshfold.folding"))
        if self.expert is not None:
            needs.append(Need("expert", "meshfold-experts", "meshfold.experts"))
        if self.zero is not None:
            needs.append(Need("zero", "meshfold-zero-gemini", "meshfold.zero_gemini"))
        return needs

    def required_distributions(self) -> tuple[str, ...]:
        """Return the distributions beyond meshfold-mesh that this spec needs, each once."""
        return tuple(dict.fromkeys(need.distribution for need in self._needs()))

    def require_installed(self) -> None:
        """Raise a SpecError that names what is missing and how to install it; do nothing if nothing is missing."""
        if missing := [need for need in self._needs() if not is_importable(need.module)]:
            written = self.written or f"parallel={format_value(self.to_dict())}"
            raise SpecError(f"{written}: {why_missing(missing)}")


def _belongs(key: str, value: object) -> str:
    """Return the entry that a misplaced key belongs to: ``mode='2d'`` is a key of tensor."""
    owners = [name for name, keys in _KEYS.items() if key in keys]
    return (
        f" {key!r} goes into {join_choices(owners)}, as {owners[0]}=dict({key}={format_value(value)}, ...)."
        if owners
        else ""
    )


def _data(value: object) -> int:
    return Entry(name="data", value=value).count("data", value, 2)


def _table(spec: ParallelSpec) -> str:
    """Return a table with one line per entry (name, ranks, axes, how), then the world size and the order of ranks."""
    rows = [("entry", "ranks", "axes", "how")]

    def add(entry: str, axes: dict[str, int], how: str) -> None:
        sizes = " ".join(f"{name}={size}" for name, size in axes.items())
        rows.append((entry, str(math.prod(axes.values())), sizes, how))

    entries = (spec.pipeline, spec.sequence, spec.tensor, spec.axial, spec.expert, spec.zero)
    shown = [axis for axis in spec.axes if axis != "data" or spec.data != 1 or not any(entries)]
    if "data" in shown:
        how = "1 until the world size is known" if spec.data is None else "each its own part of the batch"
        add("data", {"data": spec.axes["data"]}, how)
    if spec.pipeline is not None:
        counts = {key: getattr(spec.pipeline, key) for key in ("microbatches", "chunks", "waves")}
        given = [f"{key} {count}" for key, count in counts.items() if count is not None]
        add("pipeline", spec.pipeline.axes, ", ".join([spec.pipeline.schedule_name, *given]))
    if spec.sequence is not None:
        over = " over the axis tensor" if spec.sequence.mode == "megatron" else ""
        add("sequence", spec.sequence.axes, spec.sequence.mode_name + over)
    if spec.tensor is not None:
        overlap = "" if spec.tensor.overlap is None else f", overlap {spec.tensor.overlap}"
        attention = "" if spec.tensor.attention is None else f", attention by {spec.tensor.attention}"
        add("tensor", spec.tensor.axes, spec.tensor.mode_name + attention + overlap)
    if spec.axial is not None:
        room = "" if spec.axial.memory is None else f", tensors at most {_limit(spec.axial.memory)}"
        add("axial", spec.axial.axes, spec.axial.mode_name + room)
    if spec.expert is not None:
        rows.append(("expert", str(spec.expert.ranks), *_expert_places(spec, spec.expert)))
    if spec.zero is not None:
        rows.append(("zero", "", "", _zero_settings(spec.zero)))
    order = f"rank order {' > '.join(shown)}, the last varies fastest" if shown else "one rank"
    rows.append(("world", str(spec.world_size), "", order))
    return "\n".join(format_table(rows, "<><"))


def _expert_places(spec: ParallelSpec, expert: ExpertSpec) -> tuple[str, str]:
    """Return the axes over which experts are spread, and how many ranks have a copy of each."""
    ranks = math.prod(spec._without_pipeline.values())
    if ranks % expert.ranks:
        return "", "folded out of data once the world size is known"
    copies = ranks // expert.ranks
    each = "one copy" if copies == 1 else f"{copies} copies"
    shared = f", each over {expert.tensor} ranks" if expert.tensor > 1 else ""
    return " ".join(
        (*spec.expert_axes, *spec.expert_tensor_axes)
    ), f"{each} of each expert{shared}, no ranks of their own"


def _limit(count: float) -> str:
    """Return a limit in bytes as text, whole numbers of a unit without decimals: ``40 GiB``."""
    return format_bytes(count).replace(".00 ", " ")


def _zero_settings(zero: ZeroSpec) -> str:
    parts = [f"stage {zero.stage}", f"placement {zero.placement}", f"regime {zero.regime}"]
    parts += [] if zero.reshard_after_forward else ["gathered from forward to backward"]
    parts += [] if zero.transport == "nccl" else [f"transport {zero.transport}"]
    parts += [] if zero.offload_path is None else [f"offload to {zero.offload_path}"]
    limits = ((zero.gpu_memory_limit, "GPU"), (zero.host_memory_limit, "host"))
    parts += [f"{where} at most {_limit(limit)}" for limit, where in limits if limit is not None]
    shares = ((zero.offload_optim_frac, "optimizer state"), (zero.offload_param_frac, "parameters"))
    parts += [f"{share:.0%} of {what} on the host" for share, what in shares if share is not None]
    return ", ".join(parts)


class Need(NamedTuple):
    """A distribution that an entry of a spec needs, and the module that shows if it is installed."""

    entry: str
    distribution: str
    module: str


def is_importable(module: str) -> bool:
    """Return True if ``module`` could be imported, without importing it. A folder without code does not count."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # its parent is missing or is not a package
        return False
    return found is not None and found.origin is not None


def why_missing(needs: Sequence[Need]) -> str:
    """Return the packages that a spec needs and are not installed, and how to install them."""
    entries: dict[str, list[str]] = {}
    for need in needs:
        entries.setdefault(need.distribution, []).append(need.entry)
    wants = (f"{join_choices(names, 'and')} {'need' if names[1:] else 'needs'} {d}" for d, names in entries.items())
    folders = " ".join(f"./packages/{d.removeprefix('meshfold-').replace('-', '_')}" for d in entries)
    return (
        f"{join_choices(wants, 'and')}, which this installation does not have. In a clone of Meshfold's repository, run: "
        f"pip install {folders}."
    )
