"""Packages that stand above the engine, and are imported only when one of their names is asked for."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def integration(module: str) -> ModuleType:
    """Import a module of a distribution that needs this one.

    Raises:
        ModuleNotFoundError: if it is not installed, with the line that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = ".".join(module.split(".")[:2])
        if error.name is None or not f"{package}.".startswith(f"{error.name}."):
            raise  # what is missing is something that the package needs
        distribution = package.replace(".", "-").replace("_", "-")
        raise ModuleNotFoundError(
            f"{package} is not installed: pip install {distribution}", name=error.name
        ) from error
