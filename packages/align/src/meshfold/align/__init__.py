"""Alignment of language models on any mesh: losses of SFT, DPO, PPO and GRPO that are exact under data parallelism."""

from __future__ import annotations

from meshfold.align.dpo import DPO, KTO
from meshfold.align.grpo import GRPO, GRPO_KINDS
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
from meshfold.align.phases import ModelState, PhasePlan, PhaseUse, Plan, phases_of, plan_phases
from meshfold.align.policy import (
    clipped_policy_losses,
    clipped_value_losses,
    gae,
    importance_weights,
    kl_penalties,
    rewards_of_tokens,
)
from meshfold.align.ppo import PPO
from meshfold.align.preference import (
    DPO_LOSSES,
    dpo_losses,
    kto_baseline,
    kto_losses,
    odds_ratio_losses,
    reward_losses,
    simpo_losses,
)
from meshfold.align.records import (
    ChatTokenizer,
    Completion,
    Preference,
    Prompt,
    TextTokenizer,
    completion_of,
    preference_of,
    prompt_of,
    read_records,
    tokenized,
)
from meshfold.align.reference import AdapterReference, FrozenCopy, Reference
from meshfold.align.residency import ModelSize, Phases, WorkSize
from meshfold.align.reward import RewardModel, scorer
from meshfold.align.rewards import Rewards
from meshfold.align.rollout import Correction, EngineRollouts, Rollout
from meshfold.align.rows import completion_rows, group_rows, pack, pair_rows
from meshfold.align.run import Trainer, fit, latest_step, run_checkpoint, step_path
from meshfold.align.server_rollouts import ServerRollouts
from meshfold.align.sft import SFT
from meshfold.align.sharing import SharedPrompts, unfolded
from meshfold.align.transformers_rollouts import TransformersRollouts

__all__ = [
    "DPO",
    "DPO_LOSSES",
    "GRPO",
    "GRPO_KINDS",
    "KTO",
    "PPO",
    "SFT",
    "AdapterReference",
    "ChatTokenizer",
    "Completion",
    "Correction",
    "EngineRollouts",
    "FrozenCopy",
    "Mean",
    "ModelSize",
    "ModelState",
    "Objective",
    "PhasePlan",
    "PhaseUse",
    "Phases",
    "Plan",
    "Preference",
    "Prompt",
    "Reference",
    "RewardModel",
    "Rewards",
    "Rollout",
    "ServerRollouts",
    "SharedPrompts",
    "Terms",
    "TextTokenizer",
    "TokenLogProbs",
    "TokenValues",
    "Trainer",
    "TransformersRollouts",
    "WorkSize",
    "clipped_policy_losses",
    "clipped_value_losses",
    "completion_of",
    "completion_rows",
    "dpo_losses",
    "fit",
    "gae",
    "global_mean",
    "group_advantages",
    "group_rows",
    "importance_weights",
    "kl_penalties",
    "kto_baseline",
    "kto_losses",
    "latest_step",
    "leave_one_out",
    "mean_of_sequences",
    "mean_of_token_means",
    "mean_of_tokens",
    "mean_over_length",
    "odds_ratio_losses",
    "pack",
    "pair_rows",
    "phases_of",
    "plan_phases",
    "preference_of",
    "prompt_of",
    "read_records",
    "reward_losses",
    "rewards_of_tokens",
    "run_checkpoint",
    "scorer",
    "simpo_losses",
    "step_path",
    "tokenized",
    "unfolded",
    "whiten",
]
