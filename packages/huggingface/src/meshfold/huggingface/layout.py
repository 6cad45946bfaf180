"""What transformers calls a model's tensors in files, where that is not what it calls them in memory.

Mixtures of experts, say, have all experts' matrices in one tensor in memory and one for each in files. The way back is that of
transformers itself, taken tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.checkpoint.tensors import TensorInfo
from meshfold.huggingface.our_names import Step, unchanged


def to_files(model: Any, given: Mapping[str, Tensor]) -> list[Step]:
    """The steps from what a model of transformers has in memory to what its folder has.

    Names stay as they are where transformers has no other ones, is too old to say, or makes one tensor of several, which
    it reads under either name.

    Args:
        model: one of transformers', real or without values; None: nothing is known.
        given: its tensors; only names, shapes and dtypes are looked at.
    """
    empty = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in given.items()
    }
    try:
        from transformers.core_model_loading import revert_weight_conversion

        whole = empty if model is None else revert_weight_conversion(model, empty)
        if whole is empty:  # there is nothing to convert
            return unchanged(given)
        steps = [_step(model, name, value, revert_weight_conversion) for name, value in empty.items()]
    except Exception:  # of a model that is none of transformers', or that its rules do not fit
        return unchanged(given)
    made = {name: one.shape for step in steps for name, one in step.results.items()}
    return steps if made == {name: tuple(value.shape) for name, value in whole.items()} else unchanged(given)


def _step(model: Any, name: str, value: Tensor, revert: Any) -> Step:
    results = {
        part: TensorInfo(dtype=one.dtype, shape=tuple(one.shape))
        for part, one in revert(model, {name: value}).items()
    }

    def make(read: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = revert(model, {name: read[0]})
        return [parts[part] for part in results]

    return Step(sources=(name,), results=results, make=make)


def model_of(config: Mapping[str, Any]) -> Any:
    """The model that a ``config.json`` describes, without values; None if it cannot be made here."""
    try:
        import transformers

        kind = getattr(transformers, config["architectures"][0])
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return None
        settings = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            return kind(settings)
    except Exception:  # no transformers, or one that does not know it: names stay as they are
        return None
