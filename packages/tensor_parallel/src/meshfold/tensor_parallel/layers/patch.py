"""Patch embedding: a convolution whose stride is its kernel is a matmul of unfolded patches."""

from __future__ import annotations

from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh, Placement
from meshfold.mesh.collectives import Primitive, bind_enter, bind_take
from meshfold.tensor_parallel.layers.base import ShardedLayer, lowered, shard_parameter
from meshfold.tensor_parallel.layers.linear import stem_plan
from meshfold.tensor_parallel.matmul import Product, bind_matmul
from meshfold.tensor_parallel.modes import Mode, split_evenly
from meshfold.tensor_parallel.module_kinds import is_patch
from meshfold.tensor_parallel.plan import MatmulPlan


class PatchEmbedding(ShardedLayer):
    """Embedding of images, whole on every rank, as patches in the residual layout: ``b c y x -> b h y/p x/p``, local b and h.

    The output keeps nn.Conv2d's order of dims, so that the model's own ``flatten(2).transpose(1, 2)`` still works.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    mode: Mode
    plan: MatmulPlan
    patch: tuple[int, ...]
    _take_rows: Primitive
    _enter_bias: Primitive
    _multiply: Product

    @classmethod
    def convert(cls, module: nn.Conv2d, mesh: Mesh, mode: Mode) -> PatchEmbedding:
        """Return the blocks of a convolution with kernel = stride and no padding; real or meta weights.

        Raises:
            LayoutError: for another convolution, or a number of channels that cannot be split.
        """
        plain = module.padding == "valid" or all(p == 0 for p in module.padding)
        if not is_patch(module) or not plain or any(d != 1 for d in module.dilation):
            raise LayoutError(
                f"{module} is not a patch embedding: kernel_size must equal stride, with padding=0, dilation=1 and groups=1"
            )
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.mesh, made.mode, made.plan, made.patch = mesh, mode, stem_plan(mode), module.kernel_size
        residual = mode.layout("residual")
        split_evenly(module.out_channels, residual["h"], mesh, f"out_channels={module.out_channels}")
        made._take_rows, made._enter_bias = bind_take(mesh, 0, residual["m"]), bind_enter(mesh, residual["m"])
        made._multiply = bind_matmul(made.plan, mesh)
        made.weight = _block(module.weight, residual["h"], mesh)
        if module.bias is None:
            made.register_parameter("bias", None)
        else:
            made.bias = _block(module.bias, residual["h"], mesh)
        made.train(module.training)
        return made

    def forward(self, images: Tensor) -> Tensor:
        (p, q), (b, c) = self.patch, images.shape[:2]
        height, width = images.shape[2] // p, images.shape[3] // q
        # Like a convolution, which leaves out what fills no patch.
        whole = images[:, :, : height * p, : width * q]
        patches = whole.reshape(b, c, height, p, width, q).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, c * p * q)
        mine = self._take_rows(patches)
        y = self._multiply(lowered(mine), lowered(self.weight.flatten(1)))
        if self.bias is not None:
            y = y + self._enter_bias(self.bias).to(y.dtype)
        return y.transpose(1, 2).reshape(mine.shape[0], -1, height, width)

    def extra_repr(self) -> str:
        return f"patch={self.patch}, mode={self.mode.name}"


def _block(parameter: Tensor, axes: tuple[str, ...], mesh: Mesh) -> nn.Parameter:
    shape = tuple(parameter.shape)
    return shard_parameter(parameter, Placement(shape=shape, axes=(axes, *((),) * (len(shape) - 1))), mesh)
