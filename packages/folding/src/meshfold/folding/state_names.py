"""Names that other versions of OpenFold have for the same parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


def accept_names(module: nn.Module, names: dict[str, str]) -> None:
    """Let ``load_state_dict`` take parameters under other names too.

    Args:
        module: whose parameters they are.
        names: beginning of a key, below the module, to what stands there instead.
    """

    def rename(state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix)]:
            inner = key.removeprefix(prefix)
            for old, new in names.items():
                if inner.startswith(old):
                    state[prefix + new + inner.removeprefix(old)] = state.pop(key)
                    break

    module._register_load_state_dict_pre_hook(rename)
