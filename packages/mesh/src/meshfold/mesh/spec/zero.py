"""The entry ``zero``: which model state is sharded over the data axis, and where it is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from meshfold.mesh.spec.entry import Entry, format_value, kind

PLACEMENTS = ("auto", "cuda", "cpu", "static", "const")
REGIMES = ("A", "B", "C")
TRANSPORTS = ("nccl", "auto", "push")
_FRACTIONS = ("offload_optim_frac", "offload_param_frac")
_LIMITS = ("gpu_memory_limit", "host_memory_limit")
KEYS = ("stage", "placement", "regime", "reshard_after_forward", "transport", "offload_path", *_LIMITS, *_FRACTIONS)


@dataclass(frozen=True, kw_only=True)
class ZeroSpec:
    """The checked entry ``zero``.

    Shards optimizer state (stage 1), gradients too (2), parameters too (3). ``placement`` says where chunks
    live, ``regime`` how many bytes a parameter's state takes (A: exact). ``reshard_after_forward=False`` keeps
    what stage 3 has gathered for a forward until its backward. ``transport`` carries gathers and reductions of
    chunks: ``"nccl"``, the process group's collectives; ``"push"``, copy engines; ``"auto"``, copy engines for blocks
    from 16 MiB on GPUs. ``offload_path`` is a folder on a disk. The limits,
    in bytes, are for one rank's GPU and for one host. The fractions are shares of bytes
    on the host, set for placement static only. Rajbhandari et al. 2020, arXiv 1910.02054.
    """

    stage: int = 3
    placement: str = "auto"
    regime: str = "A"
    reshard_after_forward: bool = True
    transport: str = "nccl"
    offload_path: str | None = None
    gpu_memory_limit: int | None = None
    host_memory_limit: int | None = None
    offload_optim_frac: float | None = None
    offload_param_frac: float | None = None

    @classmethod
    def parse(cls, value: object) -> ZeroSpec:
        """Check a dict with any of the keys above. Raises SpecError."""
        entry = Entry(name="zero", value=value)
        whole = isinstance(value, int) and not isinstance(value, bool) and value in (1, 2, 3)
        fields = entry.fields(KEYS, f"zero=dict(stage={value if whole else 3})")
        placement = entry.choice("placement", fields.get("placement", "auto"), PLACEMENTS)
        fractions = _fractions(entry, placement, fields)
        limits = {key: entry.bytes(key, fields[key], "24GiB") for key in _LIMITS if key in fields}
        stage = _stage(entry, fields.get("stage", 3))
        return cls(
            stage=stage,
            placement=placement,
            regime=entry.choice("regime", fields.get("regime", "A"), REGIMES),
            reshard_after_forward=_reshards(entry, stage, placement, fields),
            transport=entry.choice("transport", fields.get("transport", "nccl"), TRANSPORTS),
            offload_path=_path(entry, placement, fields),
            gpu_memory_limit=limits.get("gpu_memory_limit"),
            host_memory_limit=limits.get("host_memory_limit"),
            offload_optim_frac=fractions.get("offload_optim_frac"),
            offload_param_frac=fractions.get("offload_param_frac"),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the entry that parses to this."""
        said = {key: getattr(self, key) for key in KEYS if getattr(self, key) is not None}
        if self.reshard_after_forward:
            del said["reshard_after_forward"]
        if self.transport == "nccl":
            del said["transport"]
        return said


def _stage(entry: Entry, value: object) -> int:
    stage = entry.count("stage", value, 3)
    if stage > 3:
        change = "Write stage=1 (optimizer state), 2 (and gradients) or 3 (and parameters)."
        raise entry.error(f"there is no stage {stage}.", change)
    return stage


def _reshards(entry: Entry, stage: int, placement: str, fields: Mapping[str, object]) -> bool:
    value = fields.get("reshard_after_forward", True)
    if not isinstance(value, bool):
        problem = f"reshard_after_forward={format_value(value)} is {kind(value)}, not a bool."
        raise entry.error(problem, "Write True, or False to keep gathered parameters from forward to backward.")
    if not value and stage < 3:
        problem = f"stage {stage} keeps whole parameters on the device, so there is nothing to reshard."
        raise entry.error(problem, "Leave reshard_after_forward out, or write stage=3.")
    if not value and placement != "cuda":
        problem = f"placement {placement!r} decides itself how long gathered parameters stay."
        raise entry.error(problem, "Leave reshard_after_forward out, or write placement='cuda'.")
    return value


def _fractions(entry: Entry, placement: str, fields: Mapping[str, object]) -> dict[str, float]:
    """Return both fractions under placement static, 0 if not given; nothing under other placements."""
    found = dict.fromkeys(_FRACTIONS, 0.0) if placement == "static" else {}
    for key in _FRACTIONS:
        if key not in fields:
            continue
        value = fields[key]
        change = f"Write {key}=0.5, say: 0.0 is all on the GPU, 1.0 all on the host."
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise entry.error(f"{key}={format_value(value)} is {kind(value)}, not a number.", change)
        if not 0 <= value <= 1:  # also False for NaN
            raise entry.error(f"{key}={format_value(value)} is not between 0 and 1.", change)
        if placement != "static":
            raise entry.error(
                f"{key} belongs to placement 'static', and the placement is {placement!r}.",
                f"Write placement='static', or leave {key} out.",
            )
        found[key] = float(value)
    return found


def _path(entry: Entry, placement: str, fields: Mapping[str, object]) -> str | None:
    if "offload_path" not in fields:
        return None
    value = fields["offload_path"]
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path.strip():
        problem = "is empty" if isinstance(path, str) else f"is {kind(value)}, not a path"
        change = "Write a folder on a fast disk, e.g. offload_path='/scratch/offload'."
        raise entry.error(f"offload_path={format_value(value)} {problem}.", change)
    if placement == "cuda":
        raise entry.error(
            "placement 'cuda' keeps everything on the GPU, so nothing would reach offload_path.",
            "Leave offload_path out, or write placement='auto'.",
        )
    return path
