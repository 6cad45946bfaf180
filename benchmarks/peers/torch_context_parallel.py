"""torch.distributed.tensor.experimental.context_parallel around one attention whose tensors are sharded already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``b heads s d``, keys and values with fewer heads -> ``b heads s d``."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def attend_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with keys and values repeated for every head of queries, for kernels that do not share them."""
    times = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(times, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@contextlib.contextmanager
def around(kernel: str, mesh: Any, device: torch.device) -> Iterator[None]:
    """In it, attention runs over the mesh with this kernel, or with torch's choice for ``"default"``.

    The buffer that context_parallel wants to deal out is one that nobody needs.
    """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if device.type == "cpu":
        _teach_cpu()
    unused = torch.zeros(1, 2 * mesh.size(), device=device)
    alone = F.scaled_dot_product_attention
    try:
        with contextlib.ExitStack() as stack:
            if kernel != "default":
                stack.enter_context(sdpa_kernel(getattr(SDPBackend, BACKENDS[kernel])))
            stack.enter_context(
                context_parallel(mesh, buffers=[unused], buffer_seq_dims=[1], no_restore_buffers={unused})
            )
            yield
    finally:
        # torch 2.11 leaves its own function in place where what ran inside has failed.
        setattr(F, "scaled_dot_product_attention", alone)  # noqa: B010  (mypy knows it as a function)


def _teach_cpu() -> None:
    """torch's ring knows the kernels of GPUs; to try the benchmark without one, tell it of the CPU's as well."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    if forward in ring.custom_ops:
        return

    def answering(template: Callable[..., Any]) -> Callable[..., Any]:
        def answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            mesh = args[0].device_mesh
            local = [x._local_tensor if isinstance(x, DTensor) else x for x in args]
            found = template(mesh.get_group(), local, kwargs)
            with torch.no_grad():
                return tuple(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in found)

        return answer

    def ahead(group: Any, local: list[Any], kwargs: dict[str, Any]) -> Any:
        causal = local[4] if len(local) > 4 else False
        return ring._templated_ring_attention(
            group,
            2,
            forward,
            query=local[0],
            key=local[1],
            value=local[2],
            is_causal=causal,
            dropout_p=0.0,
            scale=kwargs.get("scale"),
        )

    def back(group: Any, local: list[Any], kwargs: dict[str, Any]) -> Any:
        grad, q, k, v, out, lse, _, causal = local[:8]
        return ring._templated_ring_attention_backward(
            group,
            2,
            backward,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            causal,
            dropout_p=0.0,
            scale=kwargs.get("scale"),
        )

    ring.custom_ops[forward], ring.custom_ops[backward] = answering(ahead), answering(back)
