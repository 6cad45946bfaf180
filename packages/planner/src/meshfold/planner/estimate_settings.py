"""The arguments of an estimate in one object, and the engine that they describe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshfold.engine import Engine
from meshfold.engine.precision import Fp8Settings, Precision
from meshfold.mesh import ParallelSpec
from meshfold.planner.machines import Machine


@dataclass(frozen=True, kw_only=True)
class EstimateSettings:
    """Arguments of :func:`meshfold.planner.estimate`, which describes them; ``recompute`` is checked."""

    build: Callable[[], nn.Module]
    spec: ParallelSpec
    batch_size: int
    seq_len: int
    precision: str
    fp8: str | None
    fp8_gather: str
    optimizer: str
    accumulate: int
    rules: Mapping[str, str] | None
    recompute: str | None
    kernels: object
    clip: bool
    machine: Machine
    name: str

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step, of all ranks."""
        return self.batch_size * self.seq_len

    @property
    def rows(self) -> int:
        """Sequences of a micro-step, of all data ranks."""
        return self.batch_size // self.accumulate

    @property
    def parameter_precision(self) -> Precision:
        """Precision of the parameters, without matmuls in fp8."""
        return Precision.parse(self.precision)

    @property
    def fp8_settings(self) -> Fp8Settings | None:
        """Settings of matmuls in fp8, with the gather of ``zero`` stage 3; None without any."""
        if self.fp8 is None:
            return None
        return Precision.parse(dict(name=self.precision, matmul="fp8", recipe=self.fp8, gather=self.fp8_gather)).fp8

    def engine(self, spec: ParallelSpec, **more: Any) -> Engine:
        """Make an engine on the meta device under another spec without ``zero``; ``more``: its further arguments."""
        fp8 = None if self.fp8 is None else dict(name=self.precision, matmul="fp8", recipe=self.fp8)
        return Engine(
            self.build,
            spec,
            precision=fp8 or self.precision,
            device="meta",
            rules=self.rules,
            recompute="blocks" if self.recompute == "auto" else self.recompute,
            **more,
        )
