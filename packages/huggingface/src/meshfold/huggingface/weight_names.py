"""Names of tensors in a folder and in a model, matched by transformers' own rules.

Old names (``LayerNorm.gamma``), a missing or additional base model's prefix, tensors that are split or fused in the files (the
experts of a mixture), tied tensors under any of their names: this module applies transformers' conversions to one tensor at a time,
when it is needed. No rank holds all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.checkpoint.tensors import TensorInfo
from meshfold.huggingface.decoder_names import Step, unchanged
from meshfold.mesh import SpecError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Rule that makes a tensor of the model from tensors of the files.

    Attributes:
        sources: names in the files, each with the pattern of the converter that it matched.
        converter: transformers' conversion; None: the only source is the tensor.
        first: the name that the converter knows its result by.
    """

    sources: tuple[tuple[str, str], ...]
    converter: Any = None
    first: str = ""

    def make(self, name: str, files: Mapping[str, Tensor], model: nn.Module) -> Tensor:
        """Return the tensor; in memory only if several make it."""
        if self.converter is None:
            return files[self.sources[0][0]]
        return self.convert({source: files[source] for source, _ in self.sources}, model)[name]

    def convert(self, given: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
        """Return all tensors that the conversion makes, by their names in the model."""
        converter = copy.deepcopy(self.converter)
        for source, pattern in self.sources:
            converter.add_tensor(self.first, source, pattern, given[source])
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Comparison of a folder's names with a model's.

    Attributes:
        recipes: of every tensor of the model that the files have, by each of its names.
        missing: names in the model that the files lack; a tied tensor that they have under another name is not missing.
        unexpected: names in the files that the model does not use.
        mismatched: name to (shape in the files, shape in the model).
        tensors: how many of the model's the files have, tied ones once.
    """

    recipes: dict[str, Recipe]
    missing: list[str]
    unexpected: list[str]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    tensors: int


def match(model: Any, files: Mapping[str, Tensor], wanted: Mapping[str, Tensor] | None = None) -> Matched:
    """Find each tensor of a model in a folder's files by names and shapes.

    Args:
        model: one of transformers', whole, on the meta device or not.
        files: tensors by their names in the files.
        wanted: the model's tensors by name, if these differ from its state dict: for a model with adapters.

    Raises:
        SpecError: if transformers is too old to have the naming rules.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        raise SpecError(
            "loading a Hugging Face folder needs transformers 5.23 or later: pip install --upgrade meshfold[hf]"
        ) from None
    wanted = model.state_dict(keep_vars=True) if wanted is None else wanted
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    plain: dict[str, Recipe] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    unexpected: list[str] = []
    for key in sorted(files, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if name not in wanted:
            unexpected.append(name)
        elif pattern is None:
            plain[name] = Recipe(sources=((key, key),))
        else:
            groups.setdefault(name, []).append((key, pattern))
    recipes, shapes = (
        dict(plain),
        {name: tuple(files[one.sources[0][0]].shape) for name, one in plain.items()},
    )
    for first, sources in groups.items():
        recipe = Recipe(sources=tuple(sources), converter=by_pattern[sources[0][1]], first=first)
        given = {key: torch.empty_like(files[key], device="meta") for key, _ in sources}
        for name, made in recipe.convert(given, model).items():
            recipes[name], shapes[name] = recipe, tuple(made.shape)
    mismatched = {
        name: (shape, tuple(wanted[name].shape))
        for name, shape in shapes.items()
        if name in wanted and shape != tuple(wanted[name].shape)
    }
    recipes = {name: one for name, one in recipes.items() if name in wanted and name not in mismatched}
    for names in _tied(wanted):
        present = [name for name in names if name in recipes]
        _check_alike(present, recipes, files)
        recipes.update({name: recipes[present[0]] for name in names if present and name not in present})
    missing = [name for name in wanted if name not in recipes and name not in mismatched]
    missing, unexpected = _as_told(model, missing, unexpected)
    return Matched(
        recipes=recipes,
        missing=missing,
        unexpected=unexpected,
        mismatched=mismatched,
        tensors=len({wanted[name] for name in recipes}),
    )


def _tied(wanted: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """Return the names of each tensor that has more than one."""
    names: dict[Tensor, list[str]] = {}
    for name, tensor in wanted.items():
        names.setdefault(tensor, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def _check_alike(names: list[str], recipes: Mapping[str, Recipe], files: Mapping[str, Tensor]) -> None:
    """Check that tensors which the model ties are equal in the files."""
    for name in names[1:]:
        one, other = recipes[names[0]], recipes[name]
        if one.converter is None and other.converter is None:
            a, b = files[one.sources[0][0]], files[other.sources[0][0]]
            if a.shape != b.shape or not _equal(a, b):
                raise SpecError(
                    f"{names[0]!r} and {name!r} are one tensor by the configuration, but the folder has two that differ: write "
                    "tie_word_embeddings: false into its config.json, or pretrained(folder, tie_word_embeddings=False)"
                )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal, reading some rows at a time."""
    rows = max(1, 2**22 // max(1, a[:1].numel())) if a.dim() else 1
    parts = range(0, a.shape[0], rows) if a.dim() else (None,)
    return all(torch.equal(a, b) if at is None else torch.equal(a[at : at + rows], b[at : at + rows]) for at in parts)


def _as_told(model: Any, missing: list[str], unexpected: list[str]) -> tuple[list[str], list[str]]:
    """Drop the names that the model's class allows to be missing or unexpected."""
    told = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
    model._adjust_missing_and_unexpected_keys(told)
    return (
        [name for name in missing if name in told.missing_keys],
        sorted({name for name in unexpected if name in told.unexpected_keys}),
    )


def _natural(key: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that orders numbers by value: the ninth expert comes before the tenth."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split("."))


# -- from a model to files ------------------------------------------------------------------------------------------------


def to_files(model: Any, given: Mapping[str, Tensor]) -> list[Step]:
    """Return the steps from the tensors of a transformers model to those of its folder.

    Names are unchanged if transformers has no others, is too old to have rules, or fuses several tensors, which it reads
    under either name.

    Args:
        model: one of transformers', real or without values; None: nothing is known.
        given: its tensors; only names, shapes and dtypes are used.
    """
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in given.items()}
    try:
        from transformers.core_model_loading import revert_weight_conversion

        whole = empty if model is None else revert_weight_conversion(model, empty)
        if whole is empty:  # nothing to convert
            return unchanged(given)
        steps = [_step(model, name, value, revert_weight_conversion) for name, value in empty.items()]
    except Exception:  # not a model of transformers, or its rules do not fit
        return unchanged(given)
    made = {name: one.shape for step in steps for name, one in step.results.items()}
    return steps if made == {name: tuple(value.shape) for name, value in whole.items()} else unchanged(given)


def _step(model: Any, name: str, value: Tensor, revert: Any) -> Step:
    results = {
        part: TensorInfo(dtype=one.dtype, shape=tuple(one.shape)) for part, one in revert(model, {name: value}).items()
    }

    def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = revert(model, {name: read[0]})
        return [parts[part] for part in results]

    return Step(sources=(name,), results=results, make=make)


def model_of(config: Mapping[str, Any]) -> Any:
    """Return the model of a ``config.json`` on the meta device; None if it cannot be made here."""
    try:
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return None
        settings = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            return kind(settings)
    except Exception:  # no transformers, or it does not know the model: keep the names
        return None
