"""Checks of an optimizer's settings: a wrong one raises an error with its value and what to write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


class OptimizerSettingError(ValueError):
    """A setting that an optimizer cannot use; the message has the value and the remedy."""


def learning_rate(optimizer: str, value: object) -> None:
    """Check a learning rate: a number of at least 0, or a tensor of one element.

    Raises:
        OptimizerSettingError: for anything else.
    """
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return
        raise OptimizerSettingError(
            f"{optimizer}: lr is a tensor of shape {tuple(value.shape)}; give a number, or a tensor of one element"
        )
    not_negative(optimizer, "lr", value, example="1e-3")


def not_negative(optimizer: str, name: str, value: object, *, example: str) -> None:
    """Check that a setting is a finite number of at least 0.

    Raises:
        OptimizerSettingError: for anything else.
    """
    if not _is_number(value) or value < 0:  # type: ignore[operator]
        raise OptimizerSettingError(
            f"{optimizer}: {name}={value!r}; give a number of at least 0, such as {name}={example}"
        )


def positive(optimizer: str, name: str, value: object, *, example: str) -> None:
    """Check that a setting is a finite number above 0.

    Raises:
        OptimizerSettingError: for anything else.
    """
    if not _is_number(value) or value <= 0:  # type: ignore[operator]
        raise OptimizerSettingError(f"{optimizer}: {name}={value!r}; give a number above 0, such as {name}={example}")


def decay_rates(optimizer: str, name: str, value: object, *, example: Sequence[float]) -> None:
    """Check decay rates of running means: as many numbers in [0, 1) as the example has.

    Raises:
        OptimizerSettingError: for anything else.
    """
    right = isinstance(value, tuple | list) and len(value) == len(example)
    if not right or any(not _is_number(one) or not 0 <= one < 1 for one in value):  # type: ignore[attr-defined]
        raise OptimizerSettingError(
            f"{optimizer}: {name}={value!r}; give {len(example)} numbers in [0, 1), such as {name}={tuple(example)}"
        )


def stabilizers(optimizer: str, value: object, *, example: str) -> None:
    """Check a pair of numbers above 0 that keep an optimizer from dividing by 0.

    Raises:
        OptimizerSettingError: for anything else.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptimizerSettingError(f"{optimizer}: eps={value!r}; give 2 numbers above 0, such as eps={example}")
    for one in value:
        positive(optimizer, "eps", one, example=example)


def adam_settings(optimizer: str, lr: object, betas: object, eps: object, weight_decay: object) -> None:
    """Check the settings that optimizers share with AdamW.

    Raises:
        OptimizerSettingError: for one that is out of range.
    """
    learning_rate(optimizer, lr)
    decay_rates(optimizer, "betas", betas, example=(0.9, 0.999))
    not_negative(optimizer, "eps", eps, example="1e-6")
    not_negative(optimizer, "weight_decay", weight_decay, example="0.01")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
