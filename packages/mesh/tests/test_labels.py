"""Labels of a loss: the arguments of a call of torch's cross entropy by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshfold.mesh.model_io import CrossEntropyCall


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_call_says_whether_it_is_a_mean(size_average: bool | None, reduce: bool | None, reduction: str) -> None:
    scores, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    given: dict[str, Any] = dict(size_average=size_average, reduce=reduce, reduction=reduction)
    with warnings.catch_warnings(action="ignore"):  # torch's, about size_average
        loss = F.cross_entropy(scores, targets, **given)
    mean = F.cross_entropy(scores, targets)
    is_mean = loss.dim() == 0 and torch.equal(loss, mean)
    assert CrossEntropyCall(scores, targets, **given).is_mean_over_classes == is_mean
    assert not CrossEntropyCall(scores, scores, **given).is_mean_over_classes
