"""Model with weights in files: an engine builds it on the meta device, then each rank loads its own shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from meshfold.mesh import ParallelSpec
from meshfold.mesh.initialization import ParameterInit


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Report on a folder's weights and a model's parameters; ``print(engine.loaded)``.

    Attributes:
        name: the model's class.
        folder: where from.
        tensors: number of the model's tensors in the folder; tied ones count once.
        new: missing names: initialised from the engine's seed.
        unused: names in the folder that the model does not use.
        mismatched: name to (shape in the folder, shape in the model): also initialised from the seed.
    """

    name: str
    folder: str
    tensors: int
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def __str__(self) -> str:
        lines = [f"{self.tensors} tensors of {self.name} from {self.folder}"]
        if self.new:
            lines.append(f"initialised from the seed, since the folder lacks them: {', '.join(self.new)}")
        lines += [
            f"initialised from the seed, since its shape is {there} in the folder and {here} in the model: {name}"
            for name, (there, here) in self.mismatched.items()
        ]
        if self.unused:
            lines.append(f"in the folder and not used: {', '.join(self.unused)}")
        return "\n".join(lines)

    @property
    def is_whole(self) -> bool:
        """Return True if the folder had all that the model needs, and nothing else."""
        return not (self.new or self.unused or self.mismatched)


class SourceValues(ABC):
    """Initial values of a model's tensors.

    Attributes:
        report: which tensors the source has.
    """

    report: Loaded

    @abstractmethod
    def over(self, fresh: ParameterInit, device: torch.device) -> ParameterInit:
        """Return what makes this rank's block of a parameter; ``fresh`` makes those that the source lacks."""

    @abstractmethod
    def fill_buffers(self, model: nn.Module) -> None:
        """Fill the buffers that the source has."""

    @abstractmethod
    def warn(self) -> None:
        """Warn about missing and unused tensors."""


class WeightSource(ABC):
    """A model before it is built, to be passed to an engine.

    Attributes:
        folder: where its weights are.
    """

    folder: Path

    @abstractmethod
    def __call__(self) -> nn.Module:
        """Build the model with fresh weights."""

    @abstractmethod
    def check(self, spec: ParallelSpec) -> None:
        """Raise a SpecError for a spec that such a model does not support."""

    @abstractmethod
    def verify(self, part: int, parts: int) -> None:
        """Compare every ``parts``-th tensor with its checksum, from number ``part`` on, where there are any.

        Raises:
            CheckpointError: for a tensor that differs from the one that was written.
        """

    @abstractmethod
    def weights(self, model: nn.Module) -> SourceValues:
        """Return the values for a model that was built by this.

        Raises:
            SpecError: if the files have none of the model's tensors, or tensors of other shapes.
        """
