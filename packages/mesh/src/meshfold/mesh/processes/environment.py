"""The only code that reads the process environment: which rank this is, and where ranks meet.

torchrun (and ``meshfold run``) set ``RANK`` and its companions; Slurm sets ``SLURM_PROCID`` and others; with neither, the process
is a world of one. Contradictory variables raise an error that names them: a job that starts with a wrong rank would hang instead of
failing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from meshfold.mesh.errors import LaunchError

Source = Literal["torchrun", "slurm", "single"]

# Slurm assigns no port. Jobs on one node must use different ports, and ranks of one job the same. The range is below the
# kernel's ephemeral ports, so that no outgoing connection can already use one.
_SLURM_FIRST_PORT, _SLURM_PORTS = 15000, 15000

_HELP = {
    "torchrun": "start the script with 'meshfold run --ranks N script.py' or torchrun, which set all of RANK, "
    "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or unset them all to run alone",
    "slurm": "start the script with srun, which sets all of SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID "
    "and SLURM_NODELIST",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Rank of this process and the size of its job.

    Attributes:
        rank: 0 to ``world_size - 1``, over all machines.
        world_size: how many processes run together.
        local_rank: the place among the processes of this machine; chooses the GPU.
        local_world_size: how many processes this machine runs.
        master_addr: host where the processes meet; empty for a single process.
        master_port: port there; 0 for a single process.
        source: where the values come from.
        attempt: how often torchrun has restarted these processes; the store in which they meet outlives them.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = ""
    master_port: int = 0
    source: Source = "single"
    attempt: int = 0

    @classmethod
    def detect(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Read the environment: torchrun's variables first, then a Slurm step's, otherwise a single process.

        Args:
            variables: read instead of ``os.environ``.

        Raises:
            LaunchError: for variables that are missing, not numbers, or contradict each other.
        """
        found = os.environ if variables is None else variables
        if "RANK" in found or "WORLD_SIZE" in found:
            return cls._from_torchrun(found)
        # An allocation (salloc, sbatch) already sets most of Slurm's variables; only srun tasks set these. An
        # interactive step (srun --pty) sets them too, for one task: a single process.
        if "SLURM_PROCID" in found and "SLURM_STEP_ID" in found and found.get("SLURM_NTASKS", "1") != "1":
            return cls._from_slurm(found)
        return cls()

    def variables(self) -> dict[str, str]:
        """Return the torchrun variables of this environment, for a process that is to be this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @classmethod
    def _from_torchrun(cls, found: Mapping[str, str]) -> Environment:
        rank, world_size = (
            _number(found, "RANK", "torchrun"),
            _number(found, "WORLD_SIZE", "torchrun", least=1),
        )
        alone = world_size == 1
        local_world_size = _number(found, "LOCAL_WORLD_SIZE", "torchrun", least=1, default=1 if alone else None)
        environment = cls(
            rank=rank,
            world_size=world_size,
            local_rank=_number(found, "LOCAL_RANK", "torchrun", default=0 if alone else None),
            local_world_size=local_world_size,
            master_addr=_text(found, "MASTER_ADDR", "torchrun", default="" if alone else None),
            master_port=_port(found, default=0 if alone else None),
            source="torchrun",
            attempt=_number(found, "TORCHELASTIC_RESTART_COUNT", "torchrun", default=0)
            if store_is_served(found)
            else 0,
        )
        environment._check("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return environment

    @classmethod
    def _from_slurm(cls, found: Mapping[str, str]) -> Environment:
        world_size = _number(found, "SLURM_NTASKS", "slurm", least=1)
        nodes = expand_nodes(
            _text(
                found,
                "SLURM_STEP_NODELIST",
                "slurm",
                default=found.get("SLURM_NODELIST") or None,
                name="SLURM_NODELIST",
            )
        )
        if "MASTER_PORT" in found:
            port = _port(found, default=None)
        else:
            port = _SLURM_FIRST_PORT + _number(found, "SLURM_JOB_ID", "slurm") % _SLURM_PORTS
        environment = cls(
            rank=_number(found, "SLURM_PROCID", "slurm"),
            world_size=world_size,
            local_rank=_number(found, "SLURM_LOCALID", "slurm"),
            local_world_size=_tasks_here(found, world_size, len(nodes)),
            master_addr=found.get("MASTER_ADDR") or nodes[0],
            master_port=port,
            source="slurm",
        )
        environment._check("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
        return environment

    def _check(self, rank: str, world_size: str, local_rank: str, local_world_size: str) -> None:
        """Raise if the numbers contradict each other; the arguments are the names of their variables."""
        for small, small_name, large, large_name in (
            (self.rank + 1, rank, self.world_size, world_size),
            (self.local_rank + 1, local_rank, self.local_world_size, local_world_size),
            (self.local_world_size, local_world_size, self.world_size, world_size),
        ):
            if small > large:
                value = small - (small_name in (rank, local_rank))  # ranks count from 0
                raise LaunchError(
                    f"the environment has {small_name}={value} but {large_name}={large}: {_HELP[self.source]}"
                )


def store_is_served(variables: Mapping[str, str] | None = None) -> bool:
    """Return True if the launcher serves the store in which the ranks meet, so that rank 0 must not."""
    found = os.environ if variables is None else variables
    return found.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def watchdog_settings(variables: Mapping[str, str] | None = None) -> tuple[float | None, bool]:
    """Return the settings of ``MESHFOLD_WATCHDOG`` (seconds; 0 for none) and ``MESHFOLD_DEBUG=collectives``.

    Returns:
        The limit in seconds, None if not set; and whether calls are compared between ranks.

    Raises:
        LaunchError: for values that are neither.
    """
    found = os.environ if variables is None else variables
    text, debug = found.get("MESHFOLD_WATCHDOG"), found.get("MESHFOLD_DEBUG", "")
    if debug not in ("", "0", "collectives"):
        raise LaunchError(f"the environment has MESHFOLD_DEBUG={debug!r}: write 'collectives', or unset it")
    if text is not None and not re.fullmatch(r"\s*\d+(\.\d*)?\s*", text):
        raise LaunchError(
            f"the environment has MESHFOLD_WATCHDOG={text!r}: give seconds, such as 600, or 0 for no watchdog"
        )
    return None if text is None else float(text), debug == "collectives"


def expand_nodes(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list, in order.

    >>> expand_nodes("login,node[003-005,012]-ib")
    ['login', 'node003-ib', 'node004-ib', 'node005-ib', 'node012-ib']

    Raises:
        LaunchError: for text that is not a node list.
    """
    # Commas inside brackets separate ranges, commas outside separate names.
    names = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist.strip())
    if not names or ",".join(names) != nodelist.strip():
        raise LaunchError(
            f"SLURM_NODELIST={nodelist!r} is not a node list such as 'node[003-007,012]': {_HELP['slurm']}"
        )
    return [host for name in names for host in _expand_name(name, nodelist)]


def _expand_name(name: str, nodelist: str) -> list[str]:
    head, bracket, rest = name.partition("[")
    if not bracket:
        return [head]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for part in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise LaunchError(
                f"SLURM_NODELIST={nodelist!r} has the range {part!r}, which is not one like '003-007': {_HELP['slurm']}"
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return [head + number + end for number in numbers for end in _expand_name(tail, nodelist)]


def _tasks_here(found: Mapping[str, str], world_size: int, nodes: int) -> int:
    """Return the number of tasks on this node; Slurm lists the nodes' tasks in order, as ``4(x2),3``."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in found else "SLURM_TASKS_PER_NODE"
    if name not in found:
        return -(-world_size // nodes)
    counts: list[int] = []
    for part in found[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"{name}={found[name]!r} is not a list such as '4(x2),3': {_HELP['slurm']}")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(found, "SLURM_NODEID", "slurm", default=0)
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node} but {name}={found[name]!r} has {len(counts)} nodes: {_HELP['slurm']}")
    return counts[node]


def _text(found: Mapping[str, str], name_read: str, source: str, *, default: str | None, name: str = "") -> str:
    value = found.get(name_read) or default
    if value is None:
        raise LaunchError(f"the environment lacks {name or name_read}: {_HELP[source]}")
    return value


def _number(found: Mapping[str, str], name: str, source: str, *, least: int = 0, default: int | None = None) -> int:
    value = found.get(name)
    if value is None:
        if default is not None:
            return default
        raise LaunchError(f"the environment lacks {name}: {_HELP[source]}")
    if not re.fullmatch(r"\s*\d+\s*", value) or int(value) < least:
        raise LaunchError(
            f"the environment has {name}={value!r}, which is not a whole number from {least} up: {_HELP[source]}"
        )
    return int(value)


def _port(found: Mapping[str, str], *, default: int | None) -> int:
    port = _number(found, "MASTER_PORT", "torchrun", default=default)
    if port > 65535:
        raise LaunchError(f"the environment has MASTER_PORT={port}: a port is a number from 1 to 65535")
    return port
