"""1D, 2D and 3D on 64 V100s over batches; and gradients of 3D on eight CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.tensor_layers import Grid, Layers
from experiments.tensor_parity import parity
from experiments.tensor_sweep import sweep
from experiments.toml_tables import read_tables
from meshfold.planner import Machine, find_machine

FOLDER = Path(__file__).resolve().parent
BATCHES = (16, 32, 64, 128, 256, 512, 1024)
GRIDS = {
    "1d": Grid(mode="1d", sizes=(64,)),
    "2d, trees": Grid(mode="2d", sizes=(8, 8)),
    "3d": Grid(mode="3d", sizes=(4, 4, 4)),
    "2d": Grid(mode="2d", sizes=(8, 8)),
}
"""1D and 3D gather and reduce by rings; 2D by broadcasts along trees as Optimus does, and by rings as our code sends."""
RUN = Grid(mode="3d", sizes=(2, 2, 2))
"""Run with values, on CPU ranks."""


@dataclass(frozen=True, kw_only=True)
class Setting(Layers):
    """The table of settings.toml.

    Attributes:
        machine: a preset of the planner, for devices and links inside of a node.
        devices: of a node.
        port: GB/s of the node's only port.
        reached: share of it.
    """

    machine: str
    devices: int
    port: float
    reached: float

    def nodes(self) -> Machine:
        """The machine; a device's share of the port is what its node's devices leave it."""
        between = 1e9 * self.reached * self.port / self.devices
        return replace(find_machine(self.machine), devices=self.devices, between=between)


def setting() -> Setting:
    """The only one."""
    return read_tables(FOLDER / "settings.toml", Setting)["v100"]


def everything() -> dict[str, Any]:
    """All numbers; runs with values start eight CPU ranks."""
    return {"sweep": swept(BATCHES), "runs": [parity(RUN)]}


def swept(batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds a sequence by batch and grid."""
    one = setting()
    return sweep(GRIDS, one.size, batches, one.nodes(), one.layers)
