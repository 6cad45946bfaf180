"""GaLore's AdamW under Colossal-AI's names, with its arguments and its groups, and the engine's formulas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from meshfold import optimizers as ours
from meshfold.colossalai.arguments import Argument, Table, translate
from meshfold.colossalai.optimizer_classes import Named
from meshfold.mesh import SpecError

_QUANTISATION: Table = {
    "min_8bit_size": Argument(default=4096, word="moments of all projected gradients are in 8 bits, of no others"),
    "percentile_clipping": Argument(default=100, instead="use clip_grad_norm of the config or of Engine"),
    "block_wise": Argument(default=True, instead="scales belong to blocks of 256: leave it out"),
    "is_paged": Argument(default=False, instead="use a plugin with placement='auto', and leave it out"),
    "args": Argument(instead="it overrides settings of bitsandbytes: leave it out"),
}
_NOT_PROJECTED = "norms_and_biases"


def get_galore_param_groups(
    model: nn.Module, rank: int = 256, update_proj_gap: int = 200, scale: float = 0.25, proj_type: str = "std"
) -> list[dict[str, Any]]:
    """Return two groups of a model's parameters: weights of linear layers, whose gradients are projected, and all others.

    Args:
        model: whole. A weight that is tied to an embedding counts as a linear layer's.
        rank, update_proj_gap, scale: see :class:`meshfold.optimizers.GaLoreAdamW`.
        proj_type: ``"std"``; the optimizers refuse others.
    """
    projected = dict.fromkeys(module.weight for module in model.modules() if isinstance(module, nn.Linear))
    others = [parameter for parameter in model.parameters() if parameter not in projected]
    settings = dict(rank=rank, update_proj_gap=update_proj_gap, scale=scale, proj_type=proj_type)
    return [{"params": [*projected], **settings}, {"params": others}]


class GaLoreAdamW8bit(Named, ours.GaLoreAdamW):
    """GaLore on AdamW with 8-bit moments; see :class:`meshfold.optimizers.GaLoreAdamW`.

    Groups with a ``rank`` are projected, others are not. Colossal-AI's also has moments in 8 bits for large parameters that are not
    projected, and adds ``eps`` after the bias correction.
    """

    stands_for = ours.GaLoreAdamW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
    ) -> None:
        """Args:
        params: parameters, or groups of them such as :func:`get_galore_param_groups` returns.
        lr, betas, eps, weight_decay: see :class:`meshfold.optimizers.GaLoreAdamW`.
        args, percentile_clipping, block_wise, is_paged: refused if changed.
        min_8bit_size: does nothing, with a warning if changed.

        Raises:
            SpecError: for what is refused, and a ``proj_type`` other than ``"std"``.
        """
        given = dict(
            args=args,
            min_8bit_size=min_8bit_size,
            percentile_clipping=percentile_clipping,
            block_wise=block_wise,
            is_paged=is_paged,
        )
        self._set_up(params, lr, betas, eps, weight_decay, given, eight_bit=True)

    def _set_up(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        given: Mapping[str, Any],
        *,
        eight_bit: bool,
    ) -> None:
        name = type(self).__name__
        translate(name, given, _QUANTISATION).say(name)
        ours.GaLoreAdamW.__init__(self, _with_roles(name, params), lr, betas, eps, weight_decay, eight_bit=eight_bit)


class DistGaloreAwamW(GaLoreAdamW8bit):
    """GaLore on AdamW, spelled as there; see :class:`GaLoreAdamW8bit`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        nbits: int = 8,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        args: Any = None,
    ) -> None:
        """Args:
        nbits: 8, or 32 for moments as wide as the weights.
        params, others: see :class:`GaLoreAdamW8bit`.

        Raises:
            SpecError: for other bits, and as :class:`GaLoreAdamW8bit` does.
        """
        if nbits not in (8, 32):
            raise SpecError(f"{type(self).__name__}: nbits={nbits!r}; write 8 or 32")
        given = dict(
            args=args,
            min_8bit_size=min_8bit_size,
            percentile_clipping=percentile_clipping,
            block_wise=block_wise,
            is_paged=is_paged,
        )
        self._set_up(params, lr, betas, eps, weight_decay, given, eight_bit=nbits == 8)


def _with_roles(name: str, params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups without ``proj_type``; those without a rank have a role that is not projected."""
    groups = [*params]
    if all(isinstance(one, Tensor) for one in groups):
        groups = [{"params": groups}]
    found = []
    for group in groups:
        rest = {key: value for key, value in group.items() if key != "proj_type"}
        if (kind := group.get("proj_type", "std")) != "std":
            raise SpecError(f"{name}: proj_type={kind!r}; write 'std', which projects the smaller side of a matrix")
        found.append(rest if "rank" in rest else {**rest, "role": _NOT_PROJECTED})
    return found
