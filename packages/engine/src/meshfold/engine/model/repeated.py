"""The repeated blocks of a model: what is worth recomputing as a whole."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a model, by name: elements of its outermost lists that are more than a single layer.

    An element counts if another of its list is of the same class, or if an ``nn.ModuleList`` has no other. Lists are
    looked for in elements that do not count, and in those that are but lists of such blocks themselves.
    """
    found: dict[str, nn.Module] = {}
    _collect("", model, found)
    return found


def _collect(name: str, module: nn.Module, found: dict[str, nn.Module]) -> None:
    children = {f"{name}.{leaf}" if name else leaf: child for leaf, child in module.named_children()}
    classes = [type(_called(child)) for child in children.values()]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    for path, child in children.items():
        called = _called(child)
        alone = len(classes) == 1 and isinstance(module, nn.ModuleList)
        repeated = is_list and (alone or classes.count(type(called)) > 1)
        if repeated and _is_block(called):
            found[path] = child
        else:
            _collect(path, child, found)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module can be called, is more than a layer, and more than a mere sequence of blocks."""
    parts = list(module.children())
    if not parts or type(module).forward is nn.Module.forward:
        return False
    return type(module) is not nn.Sequential or any(next(part.children(), None) is None for part in parts)


def _called(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile has wrapped, or the module itself."""
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found
