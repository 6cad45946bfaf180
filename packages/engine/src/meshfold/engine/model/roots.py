"""A module that is called through its parts: which of them are models, and how each is split separately.

A user's training loop in a module (such as Lightning's) calls ``self.generator(x)`` and never the module's own forward. So the
adapters at the edge of a model, which take whole inputs and return whole outputs, are put around each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import nn

from meshfold.mesh import LayoutError, SpecError
from meshfold.tensor_parallel import Report
from meshfold.tensor_parallel.convert import check_rules

Split = Callable[[nn.Module, Mapping[str, str] | None], Report | None]


def roots_of(module: nn.Module) -> list[str]:
    """Return the names of the models in a module: its children with parameters; lists of models are expanded.

    If single layers are children, the module itself is the model, ``[""]``, and its own forward is called.
    """
    found = [*_called("", module)]
    single = any(not [*part.children()] for _, part in found)
    own = any(p is not None for p in module._parameters.values())
    return [""] if single or own or not found else [name for name, _ in found]


def callable_parts(module: nn.Module) -> list[nn.Module]:
    """Return the children with parameters that are called from outside; members of lists one by one."""
    return [part for _, part in _called("", module)]


def _called(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for leaf, child in module.named_children():
        name = f"{prefix}{leaf}"
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _called(f"{name}.", child)
        else:
            yield name, child


def split_roots(
    module: nn.Module,
    roots: Sequence[str],
    rules: Mapping[str, str] | None,
    split: Split,
    drops: Callable[[nn.Module], bool],
) -> tuple[Report | None, bool]:
    """Split each root separately, by ``split(root, rules)``.

    Args:
        module: holds the roots.
        roots: their names.
        rules: role by pattern of full names in the module; ``"replicate"`` for a root's own name leaves it whole.
        split: splits one; returns None if it was left unchanged.
        drops: whether a root has dropout.

    Returns:
        One report of all, None if nothing was split; and whether an unsplit root uses torch's own dropout.

    Raises:
        SpecError: for a rule that matches nothing.
    """
    if rules is not None:
        try:
            check_rules(module, rules)
        except LayoutError as error:
            raise SpecError(str(error)) from error
    reports, torch_drops = [], False
    for name in roots:
        root = module.get_submodule(name)
        if name and (rules or {}).get(name) == "replicate":
            report = None
        else:
            report = split(root, _inside(root, name, rules))
        torch_drops = torch_drops or (report is None and drops(root))
        if report is not None:
            prefix = f"{name}." if name else ""
            for place, entry in enumerate(report.placed):
                report.placed[place] = replace(entry, name=f"{prefix}{entry.name}".rstrip("."))
            reports.append(report)
    return _together(reports), torch_drops


def _inside(root: nn.Module, name: str, rules: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the rules by names relative to a root."""
    if rules is None or not name:
        return None if rules is None else dict(rules)
    found = {}
    for inner, _ in root.named_modules():
        role = next((role for p, role in rules.items() if fnmatchcase(f"{name}.{inner}", p)), None)
        if inner and role is not None:
            found[inner] = role
    return found or None


def _together(reports: Sequence[Report]) -> Report | None:
    if not reports:
        return None
    first, *rest = reports
    for report in rest:
        first.placed += report.placed
        first.notes += report.notes
        first.parameters += report.parameters
        first.local_parameters += report.local_parameters
    return first
