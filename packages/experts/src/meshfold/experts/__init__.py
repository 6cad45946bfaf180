"""Mixtures of experts: routers, balance, dispatch over ranks, a layer, and the experts of third-party models."""

from __future__ import annotations

from meshfold.experts.balance import (
    Reduce,
    RoutingSums,
    balance_loss_of,
    moved_bias,
    over_ranks,
    routing_sums,
    z_loss_of,
)
from meshfold.experts.dispatch import chosen_exchange, dispatch
from meshfold.experts.expert_rows import ExpertRows
from meshfold.experts.feed_forward import ExpertLayout, feed_forward
from meshfold.experts.find import ExpertBlock, find_experts
from meshfold.experts.grouped import grouped_matmul
from meshfold.experts.keep import (
    RoutingKeeper,
    RoutingSumsElsewhere,
    keep_routing,
    keeper_of,
    routing_keepers,
)
from meshfold.experts.layer import Experts, MixtureOfExperts, SharedExpert
from meshfold.experts.losses import balance_loss, z_loss
from meshfold.experts.routers import Router, SigmoidRouter, SoftmaxRouter, update_selection_bias
from meshfold.experts.routing import Routing, sigmoid_top_k, softmax_top_k
from meshfold.experts.shard import DispatchingForward, ExpertShard, ShardedExperts, shard_experts
from meshfold.experts.upcycling import upcycle

__all__ = [
    "DispatchingForward",
    "ExpertBlock",
    "ExpertLayout",
    "ExpertRows",
    "ExpertShard",
    "Experts",
    "MixtureOfExperts",
    "Reduce",
    "Router",
    "Routing",
    "RoutingKeeper",
    "RoutingSums",
    "RoutingSumsElsewhere",
    "ShardedExperts",
    "SharedExpert",
    "SigmoidRouter",
    "SoftmaxRouter",
    "balance_loss",
    "balance_loss_of",
    "chosen_exchange",
    "dispatch",
    "feed_forward",
    "find_experts",
    "grouped_matmul",
    "keep_routing",
    "keeper_of",
    "moved_bias",
    "over_ranks",
    "routing_keepers",
    "routing_sums",
    "shard_experts",
    "sigmoid_top_k",
    "softmax_top_k",
    "upcycle",
    "update_selection_bias",
    "z_loss",
    "z_loss_of",
]
