"""The version of torch, checked when this package is imported: what an older one lacks would be missing in odd places."""

from __future__ import annotations

import re

import torch

OLDEST = (2, 11)
"""As in the dependencies of the packages"""


def check_version(version: str) -> None:
    """Check a version of torch.

    Raises:
        ImportError: for one that is too old.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise ImportError(
            f"Meshfold needs torch {wanted} or later, and this environment has torch {version}: "
            f"pip install --upgrade 'torch>={wanted}'"
        )


check_version(torch.__version__)
