"""Units: the parts of a model whose parameters are needed together.

A block of a list of blocks is a unit with everything in it. Outside the lists, a unit is the module that holds a parameter. It
is the attention if that reads the parameter itself: torch's own never calls its ``out_proj``. A unit's parameters are gathered
before its forward and before its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from meshfold.kernels.fuse import is_compiled


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
    """Return the units of a model in order of registration; every parameter is in at least one.

    A list counts if its elements are called separately, as in an ``nn.ModuleList``. In nested lists, the innermost list whose
    elements are more than single layers gives the units.

    Parameters of a module without its own forward, such as an ``nn.ParameterList``, belong to the nearest module around it that has
    one: hooks see calls of that module.
    """
    units: list[Unit] = []
    _collect("", model, units)
    return units


def unit_of_each(model: nn.Module) -> dict[str, str]:
    """Return the name of the first unit that needs each parameter of a model, by the parameter's name."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, str] = {}
    for unit in find_units(model):
        for parameter in unit.parameters:
            found.setdefault(names[parameter], unit.name)
    return found


def _collect(name: str, module: nn.Module, units: list[Unit], *, of_blocks: bool = False) -> None:
    if isinstance(module, nn.MultiheadAttention):
        units.append(Unit(name, module, tuple(dict.fromkeys(module.parameters()))))
        return
    own = tuple(dict.fromkeys(_held_by(module))) if _is_called(module) or not name else ()
    if own:
        units.append(Unit(name, module, own))
    for leaf, child in module.named_children():
        path = f"{name}.{leaf}" if name else leaf
        if of_blocks:
            _collect_block(path, child, units)
        else:
            _collect(path, child, units, of_blocks=isinstance(child, nn.ModuleList | nn.Sequential))


def _held_by(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module and of its submodules that are never called."""
    yield from (p for p in module._parameters.values() if p is not None)
    for child in module.children():
        if not _is_called(child):
            yield from _held_by(child)


def _is_called(module: nn.Module) -> bool:
    """Return True if a module has a forward."""
    called = getattr(module, "_orig_mod", module)  # the module inside torch.compile's wrapper
    return type(called).forward is not nn.Module.forward


def _collect_block(name: str, block: nn.Module, units: list[Unit]) -> None:
    # A compiled block is one unit: hooks inside would break its graph.
    inner = not is_compiled(block) and any(map(_is_list_of_parts, block.modules()))
    if inner or not _is_called(block):  # a nested list of blocks, or nothing callable
        _collect(name, block, units)
        return
    parameters = tuple(dict.fromkeys(block.parameters()))
    if parameters:
        units.append(Unit(name, block, parameters))


def _is_list_of_parts(module: nn.Module) -> bool:
    """Return True for a list with an element of several layers. Lists of single layers, as in many MLPs, are part of a block."""
    return isinstance(module, nn.ModuleList | nn.Sequential) and any(
        sum(any(True for _ in part.parameters(recurse=False)) for part in element.modules()) > 1 for element in module
    )
