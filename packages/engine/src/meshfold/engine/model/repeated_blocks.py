"""The repeated blocks of a model, found in its lists of modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model, by name: elements of its outermost lists that are more than a single layer.

    An element counts if another in its list has the same class, or if it is alone in an ``nn.ModuleList``. Lists are
    also searched in elements that do not count, in those that are only lists of such blocks themselves, and in stages: the
    elements of a list that all differ in the shapes of their parameters, and all have blocks, as in a U-Net.
    """
    found: dict[str, nn.Module] = {}
    _collect("", model, found)
    return found


def _collect(name: str, module: nn.Module, found: dict[str, nn.Module]) -> None:
    children = {f"{name}.{leaf}" if name else leaf: child for leaf, child in module.named_children()}
    classes = [type(_called(child)) for child in children.values()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    of_stages = is_list and _are_stages([*children.values()])
    for path, child in children.items():
        called = _called(child)
        alone = len(classes) == 1 and isinstance(module, nn.ModuleList)
        repeated = is_list and (alone or classes.count(type(called)) > 1)
        if repeated and _is_block(called) and not of_stages:
            found[path] = child
        else:
            _collect(path, child, found)


def _are_stages(elements: Sequence[nn.Module]) -> bool:
    """Return True if no two elements of a list have parameters of the same shapes, and each of them has blocks."""
    if len(elements) < 2 or len({parameter_shapes(element) for element in elements}) < len(elements):
        return False
    return all(find_blocks(element) for element in elements)


def parameter_shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a module's parameters, in order of registration."""
    return tuple(tuple(parameter.shape) for parameter in module.parameters())


def _is_block(module: nn.Module) -> bool:
    """Return True if a module can be called, and is more than one layer but not a list of blocks."""
    parts = list(module.children())
    if not parts or type(module).forward is nn.Module.forward:
        return False
    return type(module) is not nn.Sequential or any(next(part.children(), None) is None for part in parts)


def _called(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, or the module itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found
