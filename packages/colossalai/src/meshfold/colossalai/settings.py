"""Configs of Colossal-AI, a dict or a Python file, and their translation to the arguments of an engine."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from meshfold.colossalai import tables
from meshfold.colossalai.arguments import Translation, translate
from meshfold.mesh import SpecError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments of :class:`meshfold.engine.Engine`, except model, optimizer, schedule and loss.

    Attributes:
        parallel: the spec.
        engine: the others, by name.
        words: messages about arguments without effect.
    """

    parallel: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def settings_of(config: Config) -> Settings:
    """Read a config. Names in capitals are the script's own, except ``NUM_MICRO_BATCHES``.

    Raises:
        SpecError: for an unknown name, and for unsupported values.
    """
    found = translate("config", _known(config), tables.CONFIG)
    aside = found.under("aside")
    parallel, zero = _parallel(aside.get("parallel")), aside.get("zero")
    if zero is not None:
        if "zero" in parallel:
            raise SpecError("config: zero is given both inside parallel and next to it: leave one of them out")
        zero = _zero(zero, found)
    if aside.get("fp16") is not None:
        _fp16(aside["fp16"], found)
    if aside.get("cudnn_benchmark") is not None:
        torch.backends.cudnn.benchmark = bool(aside["cudnn_benchmark"])
    if aside.get("cudnn_deterministic") is not None:
        torch.backends.cudnn.deterministic = bool(aside["cudnn_deterministic"])
    _pipeline(parallel, found.under("pipeline"))
    if zero is not None:
        parallel["zero"] = zero
    return Settings(parallel=parallel, engine=engine_settings(found), words=tuple(found.words))


def engine_settings(found: Translation) -> dict[str, Any]:
    """Return arguments of the engine, with the settings of the loss scale in the precision."""
    engine = found.under("engine")
    scale = found.under("scale")
    if scale and engine.get("precision") == "fp16":
        engine["precision"] = {"name": "fp16", **scale}
    return engine


def _known(config: Config) -> dict[str, Any]:
    """Return the entries of a config that this package reads.

    Raises:
        SpecError: for an unknown name.
    """
    for name, value in config.items():
        # used by the script only: optimizer = dict(type=HybridAdam, lr=1e-3)
        component = isinstance(value, Mapping) and "type" in value
        if name not in tables.CONFIG and not name.isupper() and not component:
            raise SpecError(
                f"config: there is no {name!r}.{did_you_mean(name, tables.CONFIG)} Known: {', '.join(tables.CONFIG)}. Names of "
                f"your own are in capitals, {name.upper()}, begin with an underscore, or are dicts with a 'type'"
            )
    return {name: value for name, value in config.items() if name in tables.CONFIG}


def _parallel(value: Any) -> dict[str, Any]:
    """Return the spec, translated where Colossal-AI's grammar differs."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SpecError(f"config: parallel={value!r}: a dict, such as dict(tensor=dict(mode='2d', size=4))")
    parallel = dict(value)
    if "moe" in parallel:
        raise SpecError(
            f"config: parallel: moe={parallel['moe']!r}: write expert=dict(size=...) instead; experts add no ranks here"
        )
    tensor = parallel.get("tensor")
    if tensor == 1 or (isinstance(tensor, Mapping) and tensor.get("size") == 1):  # in every config
        del parallel["tensor"]
        return parallel
    if isinstance(tensor, Mapping) and tensor.get("mode", "") is None:
        parallel["tensor"] = {key: entry for key, entry in tensor.items() if key != "mode"}
    elif isinstance(tensor, Mapping) and tensor.get("mode") == "sequence":  # a ring over tokens in Colossal-AI
        if "sequence" in parallel:
            raise SpecError("config: parallel: tensor=dict(mode='sequence') beside sequence: leave one of them out")
        del parallel["tensor"]
        parallel["sequence"] = {**tensor, "mode": "ring"}
    return parallel


def _zero(value: Any, found: Translation) -> dict[str, Any]:
    """Return the entry ``zero``: ours unchanged, Colossal-AI's translated by the tables; there fp16 is the default."""
    if not isinstance(value, Mapping):
        raise SpecError(f"config: zero={value!r}: a dict, such as dict(stage=3, placement='auto')")
    if not any(name in value for name in tables.ZERO_CONFIGS):
        return dict(value)
    for name in value:
        if name not in tables.ZERO_CONFIGS:
            raise SpecError(f"config: zero: {name!r} beside model_config: write zero=dict(stage=3, ...) without it")
    model, optimizer = (dict(value.get(name) or {}) for name in tables.ZERO_CONFIGS)
    theirs = translate("config: zero: model_config", model, tables.ZERO_MODEL)
    theirs.add(translate("config: zero: optimizer_config", optimizer, tables.ZERO_OPTIMIZER))
    theirs.settings.setdefault("engine.precision", "fp16")
    for path, setting in theirs.settings.items():
        found.settings.setdefault(path, setting)
    found.words += theirs.words
    return {"stage": 3, **theirs.under("zero")}


def _fp16(value: Any, found: Translation) -> None:
    if not isinstance(value, Mapping):
        raise SpecError(f"config: fp16={value!r}: a dict, such as dict(mode=AMP_TYPE.NAIVE)")
    theirs = translate("config: fp16", value, tables.FP16)
    aside = theirs.under("aside")
    theirs.settings.setdefault("engine.precision", "fp16" if aside.get("enabled", True) else "fp32")
    for path, setting in theirs.settings.items():
        found.settings.setdefault(path, setting)
    found.words += theirs.words


def _pipeline(parallel: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Move pipeline settings that Colossal-AI has next to ``parallel`` into the entry ``pipeline``."""
    entry = parallel.get("pipeline")
    if entry is None or not given:
        return
    entry = dict(entry) if isinstance(entry, Mapping) else {"size": entry}
    if given.get("chunks", 1) == 1:
        given = {key: value for key, value in given.items() if key != "chunks"}
    else:
        entry.setdefault("schedule", "interleaved")
    for key, value in given.items():
        entry.setdefault(key, value)
    parallel["pipeline"] = entry


_DROPPED = (ModuleType, FunctionType, type)  # a config file may import and define these besides settings


class Config(dict[str, Any]):
    """A dict whose keys are also attributes, in nested dicts too: ``config.fp16.mode``."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        for name, value in self.items():
            if type(value) is dict:
                self[name] = Config(value)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}; it has {', '.join(self) or 'nothing'}") from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Config:
        """Run a Python file in a separate namespace; its names are the settings.

        Names that begin with an underscore, modules, classes and functions are left out.

        Raises:
            SpecError: if the file is missing, is not Python, or fails, with its line.
        """
        file = Path(path)
        if file.suffix != ".py":
            raise SpecError(f"config={str(path)!r}: a config is a dict or a Python file, whose name ends in .py")
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise SpecError(f"config={str(path)!r}: cannot be read: {error.strerror or error}") from error
        namespace: dict[str, Any] = {"__name__": "config", "__file__": str(file)}
        try:
            exec(compile(text, str(file), "exec"), namespace)
        except SyntaxError as error:
            raise SpecError(f"{file}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
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
        """Make a config from a dict or a path; None gives an empty one.

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
    """Return the line of the file that failed, and what to import instead if an import failed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    number = frames[-1].lineno or 0 if frames else 0
    line = text.splitlines()[number - 1].strip() if number else ""
    message = f"{file}, line {number}: {type(error).__name__}: {error}: {line}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "colossalai":
        message += ". Import it from meshfold.colossalai"
    return message


class AMP_TYPE(Enum):  # noqa: N801
    """Colossal-AI's three kinds of float16; all are a model in float16 with float32 master weights here."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
