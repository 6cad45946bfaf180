"""A model's code on the meta device: what it asks of the values of a mask is answered as for one that masks nothing."""

from __future__ import annotations

import pytest
import torch

from meshfold.mesh.model_io.dry_run import DryRun


def test_a_mask_masks_nothing_whichever_way_that_is_asked() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool, device="meta")
    with DryRun():
        assert mask.all()
        assert not mask.any()
        assert mask.sum() == mask.numel()
        assert (mask.sum() == mask.numel()).item() is True
        with pytest.raises(RuntimeError, match="meta"):
            bool(mask.sum() == 5)
