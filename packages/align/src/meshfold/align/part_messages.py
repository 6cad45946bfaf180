"""Messages between the ranks that train and those that generate, which may work for hours before one comes.

Ranks wait for a message in the store in which all met, where no collective's limit counts, and take part in its broadcast once it
is there. An error of any rank is left in the store too, at once, and whoever waits raises it.
"""

from __future__ import annotations

import json
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from meshfold.engine.world import World
from meshfold.mesh import CollectiveError, LaunchError, SpecError, broadcast
from meshfold.mesh.collectives import all_gather_object
from meshfold.mesh.processes import ended_ranks, own_store

_LOOK_S = 1.0  # between two looks for ranks that have ended
_PAUSE_S = 0.005  # the longest pause between two looks for a message, and a bit more for each rank
_LONGEST = 20_000  # characters of a traceback


class PartMessages:
    """Messages of any rank to all others, inside a :meth:`round`. All make one, and call the same in the same order."""

    def __init__(self, world: World, roles: Callable[[int], str]) -> None:
        """Args:
        world: all ranks.
        roles: says in errors what a rank does: ``"trains"``.
        """
        self._group, self._device, self._roles = world.everyone, world.device, roles
        self._store = own_store()
        self._name = all_gather_object(secrets.token_hex(8), self._group, self._device)[0]
        self._rounds, self._count = 0, 0
        self._keys: list[tuple[int, str]] = []  # of this rank in the store, with their rounds

    @contextmanager
    def round(self) -> Iterator[None]:
        """Context manager around a part of the program that an error of any rank ends on all ranks; errors before it do not count.

        Raises:
            SpecError: where another rank refuses something, with its words.
            CollectiveError: for another error of that rank, with its traceback.
            LaunchError: if its process has ended.
        """
        self._rounds, self._count = self._rounds + 1, 0
        self._forget()
        try:
            yield
        except BaseException as error:
            self._leave(error)
            raise

    def broadcast(self, value: Any, source: int) -> Any:
        """Return a rank's value on all ranks; ranks wait for it as long as it takes."""
        group, device = self._group, self._device
        self._count += 1
        if self._store is not None:
            if group.index == source:
                self._arrive(self._key(f"{self._count}"))
            else:
                self._wait(self._key(f"{self._count}"))
        words = bytearray(json.dumps(value).encode()) if group.index == source else bytearray()
        count = int(broadcast(torch.tensor([len(words)], device=device), group, source))
        text = torch.frombuffer(words, dtype=torch.uint8) if words else torch.empty(count, dtype=torch.uint8)
        return json.loads(broadcast(text.to(device), group, source).cpu().numpy().tobytes())

    def meet(self) -> None:
        """Wait until all ranks are here, as long as it takes."""
        self._count += 1
        if self._store is None:
            return
        self._arrive(self._key(f"{self._count}/{self._group.index}"))
        for rank in range(self._group.size):
            self._wait(self._key(f"{self._count}/{rank}"))

    def _arrive(self, key: str) -> None:
        self._store.set(key, "")
        self._keys.append((self._rounds, key))

    def _forget(self) -> None:
        """Delete what no rank waits for any more: all were in the last round, so they have left those before."""
        while self._keys and self._keys[0][0] < self._rounds - 2:
            self._store.delete_key(self._keys.pop(0)[1])

    def _wait(self, key: str) -> None:
        pause, looked = 0.0005, time.monotonic()
        longest = _PAUSE_S + 0.0001 * self._group.size
        while not self._store.check([key]):
            self._raise_theirs()
            if time.monotonic() - looked > _LOOK_S:
                looked = time.monotonic()
                self._check_alive()
            time.sleep(pause)  # torch's own wait prints to standard error on a timeout
            pause = min(2 * pause, longest)

    def _check_alive(self) -> None:
        """Raise an error if a rank's process has ended without one of its own."""
        for rank in ended_ranks(self._group.ranks):
            self._raise_theirs()  # it may have left one just before
            raise LaunchError(
                f"rank {rank}, which {self._roles(rank)}, has ended, and rank {self._group.index} waits for a message: the output "
                f"of rank {rank} says why, or its machine's log (dmesg) if it was killed"
            )

    def _leave(self, error: BaseException) -> None:
        """Leave an error for the others, if it is the first one."""
        if self._store is None:
            return
        if isinstance(error, SpecError):
            told = dict(refused=str(error))
        else:
            rank, words = self._group.index, f"{type(error).__name__}: {error}".removesuffix(": ")
            trace = "".join(traceback.format_exception(error))[-_LONGEST:]
            told = dict(
                failed=f"rank {rank}, which {self._roles(rank)}, failed, so the others end: {words}\nOn rank {rank}:\n{trace}"
            )
        with suppress(RuntimeError):  # the store may be gone
            self._store.compare_set(self._key("error"), "", json.dumps(told))
            self._keys.append((self._rounds, self._key("error")))

    def _raise_theirs(self) -> None:
        if not self._store.check([self._key("error")]):
            return
        told: dict[str, str] = json.loads(self._store.get(self._key("error")))
        if "failed" in told:
            raise CollectiveError(told["failed"])
        raise SpecError(told["refused"])

    def _key(self, name: str) -> str:
        return f"meshfold parts/{self._name}/{self._rounds}/{name}"
