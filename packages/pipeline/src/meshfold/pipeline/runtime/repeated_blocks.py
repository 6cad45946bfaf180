"""A module of its own for every place in a list of blocks, where one module stands at several.

Stages, and what waits at the gates, go by places. A module that stands twice in the list, or in the list and elsewhere in the
model, is replaced in it by a *twin*: another module object with the same parameters and buffers. So its weights are tied, as
those of an embedding and a head may be, and what ties need is done for it as for these.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from meshfold.mesh import LayoutError
from meshfold.pipeline.runtime.blocks import Blocks


def separate_repeated_blocks(model: nn.Module, blocks: Blocks) -> list[int]:
    """Let each block stand at one place of the model alone, in place. Return for each place the first that had the same block."""
    lists = {path for path, module in model.named_modules(remove_duplicate=False) if module is blocks.home}
    places = {f"{path}.{key}" if path else key for path in lists for key in blocks.keys}
    stands = Counter(
        module for path, module in model.named_modules(remove_duplicate=False) if path not in places
    )
    first: dict[nn.Module, int] = {}
    same = []
    for index, key in enumerate(blocks.keys):
        block = blocks.home._modules[key]
        assert block is not None  # a block has parameters or is called
        same.append(first.setdefault(block, index))
        if stands[block]:
            blocks.home._modules[key] = shallow_twin(block)
        stands[block] += 1
    return same


def shallow_twin(module: nn.Module, made: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Another module with the same parameters, buffers and attributes; the modules in it are twins too."""
    made = {} if made is None else made
    if module not in made:
        if "_orig_mod" in module._modules:
            kind = type(module._modules["_orig_mod"]).__name__
            raise LayoutError(
                f"a compiled {kind} stands at several places of the model: write block.compile() in place of torch.compile(block)"
            )
        twin = made[module] = object.__new__(type(module))
        for name, value in module.__dict__.items():
            twin.__dict__[name] = _own(value)
        twin._compiled_call_impl = None  # of the first
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else shallow_twin(child, made)
    return made[module]


def _own(value: Any) -> Any:
    """An attribute: parameters, hooks and whatever else a dict holds are to change in one of two twins alone."""
    return value.copy() if isinstance(value, dict) else value
