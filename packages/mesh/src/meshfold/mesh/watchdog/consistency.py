"""The debug mode of collectives: ranks compare their calls before each one runs.

gloo and NCCL do not check: tensors of different shapes give wrong numbers, different collectives hang. Here every rank writes its
call to the store and reads the other ranks' calls. This costs a round trip to the store for every collective, some tenths of a
millisecond: use it to find a fault, not to train.
"""

from __future__ import annotations

import json
from typing import Any

from meshfold.mesh.errors import CollectiveError
from meshfold.mesh.recording.flight_recorder import Call, shortened
from meshfold.mesh.recording.program_line import own_line


class CallComparison:
    """Compares calls through a store."""

    def __init__(self, store: Any, rank: int) -> None:
        """``store``: a connection not shared with other code; its timeout is how long to wait for a rank."""
        self._store, self._rank = store, rank

    def announce(self, call: Call) -> None:
        """Publish a call for the others, without waiting."""
        words = [call.kind, list(call.shape), str(call.dtype).removeprefix("torch."), call.detail]
        self._store.set(self._key(call, self._rank), json.dumps([words, own_line()]))

    def look(self, call: Call) -> None:
        """Compare with the calls that are already there, so that if two ranks differ, the later one sends nothing.

        (gloo ends the process of a rank that is sent more than it expects.)

        Raises:
            CollectiveError: as :meth:`compare`.
        """
        if call.peer is not None:
            return
        mine = json.loads(self._store.get(self._key(call, self._rank)))[0]
        for rank in call.group.ranks:
            key = self._key(call, rank)
            if self._store.check([key]) and json.loads(self._store.get(key))[0] != mine:
                self.compare(call)

    def compare(self, call: Call) -> None:
        """Wait for the others' calls of this number; one that receives waits for the one that sends.

        Raises:
            CollectiveError: with all calls, if they are not the same; the same error on every rank.
        """
        if call.kind == "send":
            return  # a sender must not wait: the receiver compares
        me = call.group.ranks[call.group.index]
        ranks = call.group.ranks if call.peer is None else tuple(sorted((me, call.peer)))
        keys = [self._key(call, rank) for rank in ranks]
        found = [json.loads(text) for text in self._store.multi_get(keys)]
        readers = len(ranks) if call.peer is None else 1
        read = f"{self._key(call, -1)}"
        if readers == 1 or self._store.add(read, 1) == readers:  # the last reader cleans up
            for key in (*keys, *([read] if readers > 1 else [])):
                self._store.delete_key(key)
        different: dict[str, list[int]] = {}
        for rank, (words, _) in zip(ranks, found, strict=True):
            if call.peer is not None:
                words[0] = "message"
            different.setdefault(json.dumps(words), []).append(rank)
        if len(different) > 1:
            places = {rank: place for rank, (_, place) in zip(ranks, found, strict=True)}
            lines = [
                f"  rank{'s'[: len(who) > 1]} {shortened(tuple(who))}: {_readable(words)}, called at {places[who[0]]}"
                for words, who in different.items()
            ]
            step = "" if call.step is None else f", in step {call.step}"
            raise CollectiveError(
                f"the ranks do not call the same: collective number {call.number} over {', '.join(call.group.axes)} "
                f"(ranks {shortened(ranks)}){step} is\n" + "\n".join(lines)
            )

    def _key(self, call: Call, rank: int) -> str:
        return f"meshfold call/{call.channel}/{call.number}/{rank}"


_DETAIL = {
    "all_reduce": "op",
    "all_gather": "dim",
    "reduce_scatter": "dim",
    "all_to_all": "dims",
    "broadcast": "source",
    "shift": "steps",
}


def _readable(words: str) -> str:
    kind, shape, dtype, detail = json.loads(words)
    extra = f", {_DETAIL[kind]} {detail}" if kind in _DETAIL else ""
    return f"{kind} of {tuple(shape)} {dtype}{extra}"
