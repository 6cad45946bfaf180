"""Watts and clocks of the GPUs while something runs, as `nvidia-smi` samples them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import IO

_FIELDS = "timestamp,index,power.draw,clocks.sm"
_EVERY_MS = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading of one GPU.

    Attributes:
        at: seconds since the epoch.
        gpu: its number.
        watts: power drawn.
        mhz: clock of the multiprocessors.
    """

    at: float
    gpu: int
    watts: float
    mhz: float


class PowerLog:
    """Samples all GPUs in a process of its own while it is entered. Without `nvidia-smi` there are no samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._log: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None

    def __enter__(self) -> PowerLog:
        if has_power():
            self._out = tempfile.TemporaryFile()
            words = [
                "nvidia-smi",
                f"--query-gpu={_FIELDS}",
                "--format=csv,noheader,nounits",
                f"-lms={_EVERY_MS}",
            ]
            self._log = subprocess.Popen(words, stdout=self._out, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is None or self._out is None:
            return
        self._log.terminate()
        self._log.wait()
        self._out.seek(0)
        self.samples = list(parse(self._out.read().decode().splitlines()))
        self._out.close()

    def mean(self, begin: float, end: float, gpus: int) -> dict[str, float]:
        """Average over an interval.

        Args:
            begin, end: seconds since the epoch.
            gpus: how many of those that this process sees, from the first, work.

        Returns:
            ``watts`` of all these GPUs together and ``mhz`` of one; empty without a sample of each.
        """
        watts, clocks = 0.0, []
        for gpu in visible_gpus(gpus):
            found = [s for s in self.samples if s.gpu == gpu and begin <= s.at <= end]
            if not found:
                return {}
            watts += sum(s.watts for s in found) / len(found)
            clocks.append(sum(s.mhz for s in found) / len(found))
        return {"watts": watts, "mhz": sum(clocks) / len(clocks)}


def has_power() -> bool:
    """Return True if `nvidia-smi` can sample GPUs here."""
    return shutil.which("nvidia-smi") is not None


def visible_gpus(count: int) -> list[int]:
    """Return `nvidia-smi`'s numbers of this process's first ``count`` GPUs, as `CUDA_VISIBLE_DEVICES` names them."""
    words = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(word) for word in words if word.strip().isdigit()]
    return numbers[:count] if len(numbers) >= count else list(range(count))


def parse(lines: Iterable[str]) -> Iterable[Sample]:
    """Read what `nvidia-smi` prints; lines without numbers are left out.

    >>> [s.watts for s in parse(["2026/11/22 18:40:00.250, 0, 645.10, 1485", "2026/11/22 18:40:00.250, 1, [N/A], 1"])]
    [645.1]
    """
    for row in csv.reader(lines, skipinitialspace=True):
        try:
            at, gpu, watts, mhz = row
            when = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            yield Sample(when, int(gpu), float(watts), float(mhz))
        except ValueError:
            continue
