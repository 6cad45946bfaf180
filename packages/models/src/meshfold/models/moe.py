"""Llama's architecture with a mixture of experts instead of each MLP: Mixtral's (Jiang et al., arXiv 2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from meshfold.experts import Experts, MixtureOfExperts, Router
from meshfold.mesh import SpecError
from meshfold.models.config import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class MoELlamaConfig(LlamaConfig):
    """Llama with experts; ``ffn`` is the inner size of each.

    Attributes:
        experts: of each block.
        top_k: experts a token.
        router: ``"softmax"``, or ``"sigmoid"`` with a bias that :func:`meshfold.experts.update_selection_bias` moves.
        shared: inner size of an expert that every token passes; None for none.
        balance: factor of the balance loss, taken over the global batch; 0 for none.
    """

    kind = "llama-moe"

    experts: int = 8
    top_k: int = 2
    router: str = "softmax"
    shared: int | None = None
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("experts", "top_k", "shared"):
            value = getattr(self, name)
            if not (name == "shared" and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise SpecError(f"MoELlamaConfig({name}={value!r}): give a whole number from 1 up")
        if self.top_k > self.experts:
            raise SpecError(
                f"MoELlamaConfig(experts={self.experts}, top_k={self.top_k}): give a top_k of at most {self.experts}"
            )
        if self.router not in ("softmax", "sigmoid"):
            raise SpecError(f"MoELlamaConfig(router={self.router!r}): write 'softmax' or 'sigmoid'")
        if not self.balance >= 0.0:
            raise SpecError(f"MoELlamaConfig(balance={self.balance!r}): give a factor from 0 up")

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.inner

    def matmul_parameters(self) -> int:
        """Return the number of parameters that multiply a token, with ``top_k`` experts, the shared one and the router."""
        attention = self.hidden * sum(self.qkv_parts) + self.heads * self.d * self.hidden
        shared = 0 if self.shared is None else 3 * self.hidden * self.shared
        block = attention + self.hidden * self.experts + self.top_k * self.expert_parameters + shared
        return self.layers * block + self.vocab_size * self.hidden

    def num_parameters(self) -> int:
        return super().num_parameters() + self.layers * (self.experts - self.top_k) * self.expert_parameters


def mixture(config: MoELlamaConfig) -> MixtureOfExperts:
    """Return the mixture of a block."""
    return MixtureOfExperts(
        config.hidden,
        config.inner,
        config.experts,
        config.top_k,
        router="softmax" if config.router == "softmax" else "sigmoid",
        shared=config.shared,
    )


def initialize_mixtures(model: nn.Module, std: float, layers: int) -> None:
    """Draw normal weights for routers and experts, those into the residual stream scaled by 1/√(2 layers)."""
    for module in model.modules():
        if isinstance(module, Router):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, Experts):
            nn.init.normal_(module.gate_up, std=std)
            nn.init.normal_(module.down, std=std / (2 * layers) ** 0.5)
