"""Alignment of language models on any mesh: losses of SFT, DPO, PPO and GRPO that are exact under data parallelism."""

from __future__ import annotations

from meshfold.align.log_probs import TokenLogProbs, TokenValues
from meshfold.align.means import (
    Mean,
    global_mean,
    group_advantages,
    leave_one_out,
    mean_of_sequences,
    mean_of_token_means,
    mean_of_tokens,
    mean_over_length,
    whiten,
)
from meshfold.align.objective import Objective, Terms
from meshfold.align.policy import (
    clipped_policy_losses,
    clipped_value_losses,
    gae,
    importance_weights,
    kl_penalties,
    rewards_of_tokens,
)
from meshfold.align.preference import (
    DPO_LOSSES,
    dpo_losses,
    kto_baseline,
    kto_losses,
    odds_ratio_losses,
    reward_losses,
    simpo_losses,
)

__all__ = [
    "DPO_LOSSES",
    "Mean",
    "Objective",
    "Terms",
    "TokenLogProbs",
    "TokenValues",
    "clipped_policy_losses",
    "clipped_value_losses",
    "dpo_losses",
    "gae",
    "global_mean",
    "group_advantages",
    "importance_weights",
    "kl_penalties",
    "kto_baseline",
    "kto_losses",
    "leave_one_out",
    "mean_of_sequences",
    "mean_of_token_means",
    "mean_of_tokens",
    "mean_over_length",
    "odds_ratio_losses",
    "reward_losses",
    "rewards_of_tokens",
    "simpo_losses",
    "whiten",
]
