"""The spec's entry ``expert``: experts over the ranks of its axis, tokens on their way to them and back.

Each rank keeps a block of every stacked parameter, ``[experts, ...]``, along dim 0. A block's metadata says that it is split
over the expert axes, and that its gradient is summed over the axes whose ranks have the same experts. Tokens of the other ranks
were sent to it, so its gradient includes theirs already. Reductions, ZeRO, norms and checkpoints go by that alone.

Under tensor parallelism a rank gives the block tokens of its own (:class:`meshfold.tensor_parallel.convert.OwnTokens`), so the
gradients of the block's other parameters are parts of a sum over the tensor axes too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshfold.engine.world import World
from meshfold.mesh import ParallelSpec, ParameterMeta, Part, Placement, SpecError, all_reduce, annotate
from meshfold.mesh.collectives import adjoint_pair, bind_leave
from meshfold.mesh.parameters import copy_parameter_hooks
from meshfold.mesh.spec import join_choices
from meshfold.tensor_parallel.convert import OwnTokens

if TYPE_CHECKING:
    from meshfold.experts import ExpertBlock


def split_experts(model: nn.Module, world: World) -> Sequence[nn.Module]:
    """Split the experts of a model over the ranks of the expert axis, in place.

    Where ranks share a sequence, experts that are whole on each rank get its tokens alone in this way too. In other specs without
    the entry ``expert`` nothing changes.

    Args:
        model: whole, real or on the meta device; before anything else of it is split.
        world: where it will lie.

    Returns:
        The modules around the experts: call :func:`give_own_tokens` with them when the rest is split.

    Raises:
        SpecError: for a model without experts, or one whose experts cannot be split so; it is as it was then.
    """
    if not _have_own_tokens(world.spec):
        return ()
    from meshfold.experts import find_experts

    blocks = find_experts(model)
    if world.spec.expert is None and not blocks:
        return ()
    _check(model, blocks, world)
    made: dict[Tensor, nn.Parameter] = {}
    for block in blocks:
        _split(block, world, made)
        block.block.own_tokens = True  # type: ignore[assignment]
    return [block.block for block in blocks]


def give_own_tokens(mixtures: Iterable[nn.Module], world: World) -> None:
    """Give mixtures that tensor parallelism has not converted only this rank's tokens, without tracking."""
    for module in mixtures:
        hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        if not any(isinstance(owner, OwnTokens) for owner in hooks):
            OwnTokens(world.mesh, None).attach(module)


def check_fp8_dispatch(world: World) -> None:
    """Raise a SpecError unless tokens travel to experts of other ranks."""
    if world.expert_group.size == 1:
        written = world.spec.written or str(world.spec)
        raise SpecError(
            f"precision=dict(matmul='fp8', dispatch='fp8'): under {written} no token travels to the experts of another rank. Write "
            "expert=dict(size=2) in the spec, or leave dispatch out"
        )


def dispatch_in_fp8(model: nn.Module) -> None:
    """Send tokens to their experts in fp8, in every block of a model with split experts."""
    from meshfold.experts import DispatchingForward

    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, DispatchingForward):
            forward.fp8 = True


_IN_PIPELINES = (
    "a balance loss or z-loss of experts under pipeline: stages pass on the sums of routers only if each block of the model has at "
    "most one router and no router is outside of the blocks. Write the model like that, leave the loss out (SigmoidRouter balances "
    "by a bias), or use a spec without pipeline"
)


class RoutingSumsOverRanks:
    """The sum of a vector over all ranks that have different tokens of a micro-step, with gradients.

    Each rank counts its loss with a share, and the shares of the data coordinates add up to one; ranks along the tensor axes have
    one loss together, each with its own gradient of all of it.
    """

    def __init__(self, world: World) -> None:
        inner = tuple(a for a in world.token_axes if a not in world.outer_axes) if _have_own_tokens(world.spec) else ()
        self.mesh, self.outer = world.mesh, world.outer_axes
        self._leave = bind_leave(world.mesh, inner)

    def __call__(self, sums: Tensor) -> Tensor:
        """Return the sums over all ranks."""
        group = self.mesh.group(*self.outer)
        return adjoint_pair(lambda x: all_reduce(x, group), lambda g: all_reduce(g, group))(self._leave(sums))

    def __deepcopy__(self, memo: object) -> RoutingSumsOverRanks:
        return self


def share_routing_sums(model: nn.Module, world: World) -> None:
    """Compute balance losses of :mod:`meshfold.experts` over the global batch, under every spec.

    In pipelines they are refused until :mod:`meshfold.engine.model.carried_sums` finds that all sums come to the last stage.
    """
    for keeper in _keepers(model):
        keeper.over_ranks = RoutingSumsOverRanks(world)
        if world.pipelined:
            keeper.refusal = _IN_PIPELINES


def routers_by_name(model: nn.Module) -> list[tuple[str, Any]]:
    """Return who keeps the sums of each router of a model, with the name of the router's module."""
    found = sys.modules.get("meshfold.experts")
    if found is None:
        return []
    keepers = ((name, found.keeper_of(module)) for name, module in model.named_modules())
    return [(name, keeper) for name, keeper in keepers if keeper is not None]


def balances(model: nn.Module) -> bool:
    """Return True if a model has a router that keeps sums for a balance loss."""
    return bool(_keepers(model))


def _have_own_tokens(spec: ParallelSpec) -> bool:
    """Return True if a mixture on a rank gets its own tokens, none that other ranks get too."""
    return spec.expert is not None or (
        spec.sequence is not None and spec.sequence.size > 1
    )  # 1 also in Megatron's mode


def _keepers(model: nn.Module) -> Sequence[Any]:
    found = sys.modules.get("meshfold.experts")  # imported if the model has a router or a router hook
    return () if found is None else found.routing_keepers(model)


def _check(model: nn.Module, blocks: Sequence[ExpertBlock], world: World) -> None:
    spec = world.spec
    written = spec.written or str(spec)
    if not blocks:
        raise SpecError(
            f"{written}: expert spreads the experts of a mixture over ranks, but {type(model).__name__} has no mixture: a router "
            "with experts stacked in parameters [experts, ...], as in transformers and meshfold.experts.MixtureOfExperts. Leave "
            "expert out"
        )
    if spec.tensor is not None and getattr(getattr(model, "config", None), "output_router_logits", False) is True:
        raise SpecError(
            f"{written}: with config.output_router_logits=True the model computes a balance loss from each rank's own tokens, "
            "which differ along tensor, and each would count in full. Set it to False, or leave tensor out"
        )
    size, sharing = (1, 1) if spec.expert is None else (spec.expert.size, spec.expert.tensor)
    for block in blocks:
        where, number = block.experts_name or type(model).__name__, block.num_experts
        if block.ffn % sharing:
            fits = [each for each in range(1, block.ffn + 1) if block.ffn % each == 0]
            raise SpecError(
                f"{written}: experts of {where} have an inner size of {block.ffn}, of which {sharing} ranks cannot have equal "
                f"parts: write expert=dict(size={size}, tensor={join_choices(fits[:12])})"
            )
        if number % size:
            fits = [each for each in range(1, number + 1) if number % each == 0]
            raise SpecError(
                f"{written}: {where} has {number} experts, which {size} ranks cannot share evenly: write "
                f"expert=dict(size={join_choices(fits)})"
            )
        drops = [
            name for name, m in block.block.named_modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p
        ]
        if drops:
            raise SpecError(
                f"{written}: {'.'.join(filter(None, (block.name, drops[0])))} is dropout inside experts, where tokens are sorted "
                "by expert: it would drop other elements on another number of ranks. Put it after the mixture"
            )
        if spec.tensor is not None and not block.name:
            raise SpecError(
                f"{written}: the experts of {type(model).__name__} are its direct children, but under tensor the mixture must be a "
                "separate module with the router and the experts: make it one, or leave tensor out"
            )


def _split(block: ExpertBlock, world: World, made: dict[Tensor, nn.Parameter]) -> None:
    from meshfold.experts import DispatchingForward

    spec, mesh = world.spec, world.mesh
    for name in block.layout.names:
        whole = block.experts.get_parameter(name)
        if whole not in made:
            made[whole] = _shard(whole, _placement(block, name, world), world)
        block.experts._parameters[name] = made[whole]
    if spec.tensor is not None:
        stacked = set(made.values())
        for parameter in block.block.parameters():
            if parameter not in stacked:
                shape = tuple(parameter.shape)
                place = Placement(shape=shape, axes=((),) * len(shape))
                meta = ParameterMeta(mesh=mesh, placement=place, sum_axes=world.token_axes, own_sum_axes=True)
                annotate(parameter, meta)
    sharing, exchange = (1, "auto") if spec.expert is None else (spec.expert.tensor, spec.expert.exchange)
    forward: Any = DispatchingForward(block, world.expert_group, sharing=sharing, exchange=exchange)
    block.experts.forward = forward


def _placement(block: ExpertBlock, name: str, world: World) -> Placement:
    """Return where a stacked parameter lies: experts over their axes, the inner dim over those of ranks that share an expert."""
    layout, spec = block.layout, world.spec
    shape = tuple(block.experts.get_parameter(name).shape)
    inner = {layout.gate_up: 2 if layout.transposed else 1, layout.down: 1 if layout.transposed else 2}
    if layout.gate_up_bias is not None:
        inner[layout.gate_up_bias] = 1
    axes = [spec.expert_axes, *(() for _ in shape[1:])]
    parts: dict[int, tuple[Part, ...]] = {}
    if (dim := inner.get(name)) is not None:
        axes[dim] = spec.expert_tensor_axes
        if name != layout.down and not layout.interleaved:  # a rank has the same rows of gate and up
            parts[dim] = (Part(size=block.ffn), Part(size=block.ffn))
    return Placement(shape=shape, axes=tuple(axes), parts=parts)


def _shard(whole: Tensor, placement: Placement, world: World) -> nn.Parameter:
    """Return this rank's shard of a stacked parameter, real or meta."""
    if whole.is_meta:
        local = torch.empty(placement.local_shape(world.mesh), dtype=whole.dtype, device="meta")
    else:
        local = placement.shard(whole.detach(), world.mesh)
    block = nn.Parameter(local, requires_grad=whole.requires_grad)
    # The last bias is whole on all ranks that share an expert, each of which adds a part of it.
    shared = tuple(axis for axis in world.spec.expert_tensor_axes if axis not in placement.split_axes)
    sums = (*world.spec.expert_data_axes, *shared)
    annotate(block, ParameterMeta(mesh=world.mesh, placement=placement, sum_axes=sums, own_sum_axes=True))
    copy_parameter_hooks(whole, block)
    return block
