"""The loss of a language model whose tokens are split over ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from meshfold.mesh import Mesh, collectives
from meshfold.sequence.modes import sequence_mode


def loss_share(
    logits: Tensor,
    targets: Tensor,
    mesh: Mesh,
    mode: str | Callable[..., object] = "ring",
    *,
    ignore_index: int = -100,
) -> Tensor:
    """This rank's share of the mean cross entropy over all tokens that count; the shares of all ranks add up to it.

    So do their gradients: sum those of the parameters over the sequence axes, do not average them.

    Args:
        logits: ``... v``, of this rank's tokens.
        targets: ``...``, already moved by one token (:func:`meshfold.sequence.next_tokens`) and then dealt with
            ``pad=ignore_index``; as many as there are logits.
        mesh, mode: as the sequence is dealt.
        ignore_index: the target of a token that does not count.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    wide = rows if rows.itemsize == 8 else rows.float()
    total = F.cross_entropy(wide, targets.reshape(-1), ignore_index=ignore_index, reduction="sum")
    counted = (targets != ignore_index).sum().to(total.dtype)
    return total / collectives.all_reduce(counted, mesh.group(*sequence_mode(mode, mesh).axes)).clamp(min=1)
