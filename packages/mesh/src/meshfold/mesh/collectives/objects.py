"""All-gather of small objects, as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch

from meshfold.mesh.collectives.operations import all_gather, all_reduce
from meshfold.mesh.group import Group


def all_gather_object(mine: Any, group: Group, device: torch.device) -> list[Any]:
    """Return every rank's object, in group order. All ranks of the group must call."""
    words = json.dumps(mine).encode()
    if group.size == 1:  # without the device, which may be busy
        return [json.loads(words)]
    text = torch.frombuffer(bytearray(words), dtype=torch.uint8).to(device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=device), group, "max"))
    padded = torch.full((1, longest), ord(" "), dtype=torch.uint8, device=device)
    padded[0, : text.numel()] = text
    return [json.loads(row.numpy().tobytes()) for row in all_gather(padded, group, 0).cpu()]
