"""Configs of Colossal-AI: a dict, or a Python file whose names are the settings."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from meshfold.mesh import SpecError

_DROPPED = (ModuleType, FunctionType, type)  # what a file imports or defines on its way to the settings


class Config(dict[str, Any]):
    """A dict whose names are attributes too, and those of the dicts in it: ``config.fp16.mode``."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        for name, value in self.items():
            if type(value) is dict:
                self[name] = Config(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the config has no {name!r}; it has {', '.join(self) or 'nothing'}"
            ) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Run a Python file in a namespace of its own; its names are the settings.

        Names that begin with an underscore, modules, classes and functions are left out.

        Raises:
            SpecError: if there is no such file, it is no Python, or it fails: with its line.
        """
        file = Path(path)
        if file.suffix != ".py":
            raise SpecError(
                f"config={str(path)!r}: a config is a dict or a Python file, whose name ends in .py"
            )
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"config={str(path)!r}: cannot be read: {error.strerror or error}") from error
        namespace: dict[str, Any] = {"__name__": "config", "__file__": str(file)}
        try:
            exec(compile(text, str(file), "exec"), namespace)
        except SyntaxError as error:
            raise SpecError(
                f"{file}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
            ) from error
        except Exception as error:
            raise SpecError(_where(file, text, error)) from error
        return cls(
            {
                name: value
                for name, value in namespace.items()
                if not name.startswith("_") and not isinstance(value, _DROPPED)
            }
        )

    @classmethod
    def of(cls, config: object) -> Config:
        """Make a config of a dict or a path; None gives an empty one.

        Raises:
            SpecError: for anything else.
        """
        match config:
            case None:
                return cls()
            case Mapping():
                return cls(config)
            case str() | os.PathLike():
                return cls.from_file(config)
        raise SpecError(f"config={config!r}: a dict, or the path of a Python file")


def _where(file: Path, text: str, error: Exception) -> str:
    """Return which line of the file failed, and what to import instead if an import failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    number = frames[-1].lineno or 0 if frames else 0
    line = text.splitlines()[number - 1].strip() if number else ""
    message = f"{file}, line {number}: {type(error).__name__}: {error}: {line}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "colossalai":
        message += ". Import it from meshfold.colossalai"
    return message
