"""Start a contestant's processes, hold them to their limit of host memory, and collect what they wrote."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.power import PowerLog
from benchmarks.zero_offload.job import GIB, Job
from benchmarks.zero_offload.worker import DOES_NOT_FIT

WORKER = Path(__file__).with_name("worker.py")
_LOOK_S = 0.25  # between two looks at the host memory of a contestant
_GRACE_S = 5.0  # for the other ranks once one has ended with an error


def run(job: Job, timeout_s: float) -> dict[str, Any]:
    """What a contestant found; after a search, in a start of its own with the most rows that fit."""
    if not job.search:
        return attempt(job, timeout_s)
    tries = []
    while True:
        found = attempt(job, timeout_s)
        fits, tried = found.get("fits", job.low), found.get("tried", 0)
        tries.append({"fits": fits, "does_not_fit": tried if "error" in found else None})
        if found.get("code") != DOES_NOT_FIT or tried <= 1:
            break
        job = dataclasses.replace(job, low=fits, high=tried)
    while "error" not in found:
        found = attempt(dataclasses.replace(job, search=False, rows=fits), timeout_s)
        if found["code"] != DOES_NOT_FIT or fits == 1:
            break
        tries.append({"fits": fits - 1, "does_not_fit": fits})  # what fit for two steps did not for more
        fits -= 1
        found.pop("error")
    return {**found, "searched": tries}


def attempt(job: Job, timeout_s: float) -> dict[str, Any]:
    """One start of all ranks."""
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        place = Path(folder)
        job = dataclasses.replace(job, out=str(place / "found.json"))
        job.save(place / "job.json")
        port = _free_port()
        ranks = [_start(job, place, rank, port) for rank in range(job.ranks)]
        power = PowerLog()
        try:
            with power:
                end, peak = _watch(job, ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        out = Path(job.out)
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"rows": job.rows}
        found["host_peak_bytes"] = max(peak, found.get("own_host_peak_bytes", 0) if job.ranks == 1 else 0)
        found["power"] = _power_of(found, power, job.ranks)
        codes = [rank.returncode for rank in ranks]
        found["code"] = DOES_NOT_FIT if DOES_NOT_FIT in codes else next((c for c in codes if c), 0)
        if end:
            found["error"] = end
        elif found["code"] and "error" not in found:
            found["error"] = _last_line(place, codes)
        if found.get("error"):
            found["log"] = "".join(_log(place, rank)[-3000:] for rank in range(min(job.ranks, 2)))
        return found


def _power_of(found: dict[str, Any], power: PowerLog, ranks: int) -> dict[str, float]:
    """Mean power and clock over the timed steps."""
    timed = [step for step in found.get("steps", []) if step["timed"]]
    if not timed:
        return {}
    return power.mean(timed[0]["ended"] - timed[0]["seconds"], timed[-1]["ended"], ranks)


def _start(job: Job, place: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.cores),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with open(place / f"{rank}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, str(WORKER), str(place / "job.json")],
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _watch(job: Job, ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> tuple[str, int]:
    """Why the job was ended, if it was, and the most host memory that it had at a time, in bytes."""
    begin, peak, before, failed = time.monotonic(), 0, 0, 0.0
    while any(rank.poll() is None for rank in ranks):
        # Twice in a row: a child that was just forked has all of its parent's pages, for a moment and without taking any.
        now_there = resident(rank.pid for rank in ranks)
        peak, before = max(peak, min(before, now_there)), now_there
        now = time.monotonic()
        if job.host_limit and peak > job.host_limit:
            return f"took more than the {job.host_limit / GIB:.0f} GiB of host memory that it may have", peak
        if now - begin > timeout_s:
            return f"not done after {timeout_s:.0f} s", peak
        if any(rank.poll() for rank in ranks):
            failed = failed or now
            if now - failed > _GRACE_S:
                break
        time.sleep(_LOOK_S)
    return "", peak


def resident(pids: Iterable[int]) -> int:
    """Resident bytes of processes and all that they started, as the kernel counts them now."""
    parents: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    total, left = 0, list(pids)
    while left:
        pid = left.pop()
        left += parents.get(pid, [])
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):
            continue
    return total


def _log(place: Path, rank: int) -> str:
    return (place / f"{rank}.log").read_text(errors="replace")


def _last_line(place: Path, codes: list[int | None]) -> str:
    rank = next(i for i, code in enumerate(codes) if code)
    lines = _log(place, rank).strip().splitlines()
    said = lines[-1][:400] if lines else "nothing"
    return f"rank {rank} ended with code {codes[rank]}; it said last: {said}"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
