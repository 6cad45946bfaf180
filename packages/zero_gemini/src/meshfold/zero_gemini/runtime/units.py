"""Units: the parts of a model whose parameters are wanted at one time.

A block of a list of blocks is a unit with all that is in it; whatever stands outside of the lists is a unit by the
module that holds the parameter itself, or by the attention that reads it: torch's own never calls its ``out_proj``. A unit's
parameters are gathered before its forward and before its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is entered and left as a whole.

    Attributes:
        name: full name of the module.
        module: the module.
        parameters: of it and, for a block, of all modules in it; each once.
    """

    name: str
    module: nn.Module
    parameters: tuple[Tensor, ...]


def find_units(model: nn.Module) -> list[Unit]:
    """The units of a model in order of registration; every parameter is in at least one.

    A list counts if its elements are called by themselves, which is what an ``nn.ModuleList`` is for; of nested lists
    the innermost whose elements are more than single layers makes the units.
    """
    units: list[Unit] = []
    _collect("", model, units)
    return units


def _collect(name: str, module: nn.Module, units: list[Unit]) -> None:
    if isinstance(module, nn.MultiheadAttention):
        units.append(Unit(name, module, tuple(dict.fromkeys(module.parameters()))))
        return
    own = tuple(p for p in module._parameters.values() if p is not None)
    if own:
        units.append(Unit(name, module, own))
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child):
            for number, block in child.named_children():
                _collect_block(f"{path}.{number}", block, units)
        else:
            _collect(path, child, units)


def _collect_block(name: str, block: nn.Module, units: list[Unit]) -> None:
    inner = any(isinstance(m, nn.ModuleList | nn.Sequential) for m in block.modules())
    called = getattr(block, "_orig_mod", block)  # what torch.compile has wrapped
    if inner or type(called).forward is nn.Module.forward:  # a list in it, or nothing that could be called
        _collect(name, block, units)
        return
    parameters = tuple(dict.fromkeys(block.parameters()))
    if parameters:
        units.append(Unit(name, block, parameters))
