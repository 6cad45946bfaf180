"""The engine's argument ``kernels``: fused kernels that replace the model's own operations."""

from __future__ import annotations

from collections.abc import Mapping

from meshfold.kernels.fuse import RULES
from meshfold.mesh import SpecError, did_you_mean
from meshfold.mesh.spec import argument_checks as settings

WAYS = ("auto", "off")


def check_kernels(kernels: object) -> dict[str, bool | None] | None:
    """Return the rules of ``meshfold.kernels.fuse`` that an argument asks for, as its arguments; None for none.

    Raises:
        SpecError: for any other word, rule or value.
    """
    if kernels == "off":
        return None
    if kernels == "auto":
        return {}
    if not isinstance(kernels, Mapping):
        hint = did_you_mean(kernels, WAYS) if isinstance(kernels, str) else ""
        raise SpecError(
            f"kernels={kernels!r}: write 'auto' (fused kernels where they pay), 'off' (the model's own operations), or a dict of "
            f"{', '.join(RULES)}, as in kernels=dict(loss=False).{hint}"
        )
    settings.known_keys("kernels", kernels, kernels, RULES)
    for name, value in kernels.items():
        if not isinstance(value, bool | None):
            raise SpecError(
                f"kernels=dict({name}={value!r}): write True (always), False (never) or None (where it pays)"
            )
    return dict(kernels)
