"""Contestants of ESMFold's trunk at inference: transformers' blocks in chunks of 64, and ours whole and in smaller memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers.absent import AbsentError
from meshfold.folding import EsmFoldStack, MemoryPlan, MemoryPlanError, Sizes, longest_chain, plan_memory

C_S, C_Z, HEAD = 1024, 128, 32
"""Channels of residues, of pairs and of a head in ESMFold."""
Step = Callable[[], Tensor]


class OwnParts(EsmFoldStack):
    """Blocks on this rank's part of the residues and pairs, which they change in place: what a trunk holds between its blocks."""

    def shapes(self, sizes: Sizes) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the shapes of this rank's parts under ``dap``, and of the masks, which are whole."""
        whole, masks = super().shapes(sizes)
        length = self.axes.padded(sizes.residues)
        rows = length // self.axes.multiple
        batch = sizes.batch
        return {"s": (batch, rows, whole["s"][-1]), "z": (batch, rows, length, whole["z"][-1])}, masks

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``s`` and ``z``, this rank's parts."""
        for block in self.blocks:
            s, z = block(s, z, mask, pair_mask, True)
        return s, z


def longest(*, gib: float, ranks: int, dtype: str, blocks: int, narrower: int) -> int:
    """Return the most residues, a multiple of 64, whose parts a plan fits into so many GiB of each rank; 0: none."""
    with torch.device("meta"):
        stack = _stack(OwnParts, blocks, narrower)
    return longest_chain(stack, limit=int(gib * 2**30), step=64 if narrower == 1 else 4, **_sizes(ranks, dtype))


def transformers(job: dict[str, Any]) -> Step:
    """Return the step of transformers' blocks after ``set_chunk_size(64)``.

    Raises:
        AbsentError: on more than one rank, and if transformers is not there or has no ESMFold.
    """
    try:
        from transformers.models.esm.configuration_esm import TrunkConfig
        from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock
    except ImportError as error:
        raise AbsentError(f"{error}: install transformers") from error
    if job["ranks"] > 1:
        raise AbsentError("transformers' trunk runs on one GPU")
    small = job["narrower"]
    widths = dict(sequence_head_width=HEAD // small, pairwise_head_width=HEAD // small)
    sizes = dict(sequence_state_dim=C_S // small, pairwise_state_dim=C_Z // small)
    config = TrunkConfig(num_blocks=job["blocks"], **sizes, **widths)
    blocks = nn.ModuleList(EsmFoldTriangularSelfAttentionBlock(config) for _ in range(job["blocks"]))
    s, z, mask, _ = inputs(job)
    blocks = fill(blocks).to(z.device, z.dtype).eval()

    def step() -> Tensor:
        one, two = s, z
        with torch.no_grad():
            for block in blocks:
                one, two = block(one, two, mask=mask, chunk_size=64)
        return _told(two)

    return step


def ours(job: dict[str, Any], share: float = 1.0) -> Step:
    """Return the step of our blocks on whole tensors, in the fastest chunks that need at most a share of the memory of none.

    Raises:
        AbsentError: if no chunks need so little.
    """
    stack = fill(_stack(EsmFoldStack, job["blocks"], job["narrower"]))
    sizes = dict(residues=job["residues"], **_sizes(job["ranks"], job["dtype"]))
    plan = plan_memory(stack, **sizes)
    if share < 1:
        try:
            plan = plan_memory(stack, limit=int(share * plan.bytes), **sizes)
        except MemoryPlanError as error:
            raise AbsentError(str(error)) from error
    s, z, mask, pair_mask = inputs(job)
    model = _split(stack, job, plan, z)

    def step() -> Tensor:
        with torch.no_grad():
            return _told(model(s, z, mask, pair_mask)[1])

    return step


def ours_in_parts(job: dict[str, Any]) -> Step:
    """Return the step of our blocks on this rank's part of the residues and pairs, in the least memory that a plan knows.

    The parts are changed in place, from step to step.
    """
    stack = fill(_stack(OwnParts, job["blocks"], job["narrower"]))
    sizes = dict(residues=job["residues"], **_sizes(job["ranks"], job["dtype"]))
    plan = plan_memory(stack, limit=int(job["gib"] * 2**30), **sizes)
    s, z, mask, pair_mask = inputs(job, own=True)
    model = _split(stack, job, plan, z)

    def step() -> Tensor:
        nonlocal s, z
        with torch.no_grad():
            s, z = model(s, z, mask, pair_mask)
        return _told(z)

    return step


def inputs(job: dict[str, Any], *, own: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return residues, pairs and their masks on this rank's device; ``own``: this rank's part of the first two."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    made: dict[str, Any] = dict(device=device, dtype=getattr(torch, job["dtype"]))
    n, small = job["residues"], job["narrower"]
    length = -(-n // job["ranks"]) * job["ranks"] if own else n
    rows = length // job["ranks"] if own else n
    torch.manual_seed(0)
    s, z = torch.randn(1, rows, C_S // small, **made), torch.randn(1, rows, length, C_Z // small, **made)
    return s, z, torch.ones(1, n, **made), torch.ones(1, n, n, **made)


def fill(model: nn.Module) -> Any:
    """Give every parameter values that depend on its name alone, so that all contestants have the same; return the model."""
    generator = torch.Generator()
    with torch.no_grad():
        for place, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.ndim == 2:
                generator.manual_seed(place)
                parameter.normal_(std=0.5 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(float(name.endswith("weight")))  # those of a norm
    return model


def _stack(cls: type[EsmFoldStack], blocks: int, narrower: int) -> EsmFoldStack:
    made = cls(blocks, C_S // narrower, C_Z // narrower, HEAD // narrower, HEAD // narrower)
    return made.eval()


def _sizes(ranks: int, dtype: str) -> dict[str, Any]:
    kernels = torch.cuda.is_available()
    return dict(mode="dap", axes={"axial": ranks}, training=False, dtype=getattr(torch, dtype), kernels=kernels)


def _split(stack: EsmFoldStack, job: dict[str, Any], plan: MemoryPlan, like: Tensor) -> EsmFoldStack:
    """Put a stack on the device of ``like``, split over the ranks; note the plan in the job, for the result."""
    from meshfold.folding import parallelize_folding
    from meshfold.mesh import Mesh

    model = stack.to(like.device, like.dtype)
    mesh = Mesh({"axial": job["ranks"]}, **({} if job["ranks"] > 1 else dict(rank=0)))
    parallelize_folding(model, mesh, "dap", memory=plan.settings)
    job["said"] = lambda: dict(bytes=plan.bytes, settings=str(plan.settings))
    return model


def _told(z: Tensor) -> Tensor:
    """Return a number by which results are compared: the mean square of the pairs of a rank's first residue."""
    return z[:, 0].float().square().mean()


CHUNKED = "transformers, chunks of 64"
TRUNK: dict[str, Callable[[dict[str, Any]], Step]] = {
    CHUNKED: transformers,
    "ours": ours,
    "ours in half of that": lambda job: ours(job, 0.5),
    "ours in 0.4 of that": lambda job: ours(job, 0.4),
}
"""Contestants of the case ``esmfold``."""
LONGEST: dict[str, Callable[[dict[str, Any]], Step]] = {"ours, parts of a rank": ours_in_parts}
"""Contestants of the case ``longest``."""
