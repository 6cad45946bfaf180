"""``get_accelerator()``: what scripts ask of the device, without naming its kind."""

from __future__ import annotations

from typing import Any

import torch

from meshfold.colossalai.script_tools import get_current_device
from meshfold.colossalai.submodules import find


class Accelerator:
    """This rank's GPU, or the CPU.

    Attributes:
        name: ``"cuda"`` or ``"cpu"``.
        communication_backend: of torch.distributed.
    """

    def __init__(self) -> None:
        self.name = get_current_device().type
        self.communication_backend = "gloo" if self.name == "cpu" else "nccl"

    def get_current_device(self) -> torch.device:
        """This rank's."""
        return get_current_device()

    def current_device(self) -> int | str:
        """Its number, or ``"cpu"``."""
        index = get_current_device().index
        return "cpu" if index is None else index

    def set_device(self, device: Any = None) -> None:
        """Nothing: each rank has its own device."""

    def set_to_device(self, models: Any) -> Any:
        """A model, or several, on this rank's device."""
        if isinstance(models, list):
            return [model.to(get_current_device()) for model in models]
        return models.to(get_current_device())

    def is_available(self) -> bool:
        """Tell whether the device exists."""
        return self.name == "cpu" or torch.cuda.is_available()

    def device_count(self) -> int:
        """Return the number of devices on this machine."""
        return 1 if self.name == "cpu" else torch.cuda.device_count()

    def synchronize(self, device: Any = None) -> None:
        """Wait for its work."""
        if self.name != "cpu":
            torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        """Give memory that nothing uses back."""
        if self.name != "cpu":
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random numbers of this process."""
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def memory_allocated(self, device: Any = None) -> int:
        """Bytes in tensors on the device; 0 on the CPU."""
        return 0 if self.name == "cpu" else torch.cuda.memory_allocated(device)

    def max_memory_allocated(self, device: Any = None) -> int:
        """The most that they were; 0 on the CPU."""
        return 0 if self.name == "cpu" else torch.cuda.max_memory_allocated(device)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The most is counted from here on."""
        if self.name != "cpu":
            torch.cuda.reset_peak_memory_stats(device)

    def __getattr__(self, name: str) -> Any:
        """All else of torch.cuda.

        Raises:
            AttributeError: on the CPU, and for what torch.cuda does not have: with what to write.
        """
        if name.startswith("_") or self.name == "cpu" or not hasattr(torch.cuda, name):
            raise AttributeError(
                f"get_accelerator() has no {name!r} on {self.name}: ask torch, or torch.cuda"
            )
        return getattr(torch.cuda, name)


def get_accelerator() -> Accelerator:
    """Return the device type that this rank computes on."""
    return Accelerator()


__path__: list[str] = []  # there it has submodules


def __getattr__(name: str) -> Any:
    """Other names that this module has there."""
    from meshfold import colossalai as compat

    return find(name, __name__, compat._HOMES)
