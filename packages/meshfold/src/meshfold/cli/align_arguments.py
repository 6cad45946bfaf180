"""Arguments of ``meshfold align``."""

from __future__ import annotations

import argparse

from meshfold.cli.arguments import add_model, add_parallel, learning_rate, natural, positive, rate
from meshfold.cli.train_arguments import OPTIMIZER_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    _add_data(parser.add_argument_group("data"))
    add_model(parser.add_argument_group("model"))
    _add_start(parser.add_argument_group("start"))
    _add_work(parser.add_argument_group("parallel work"))
    _add_steps(parser.add_argument_group("optimization"))
    _add_loss(parser.add_argument_group("loss"))
    _add_samples(parser.add_argument_group("samples (grpo, ppo)"))
    _add_output(parser.add_argument_group("output"))


def _add_data(data: argparse._ArgumentGroup) -> None:
    """Add the arguments of the data."""
    data.add_argument("--data", metavar="FILE", help="training data, one JSON object per line (see above)")
    data.add_argument(
        "--tokenizer",
        metavar="byte|FOLDER",
        help="byte, or a folder with a tokenizer (default: the one in --hf, otherwise byte)",
    )
    data.add_argument(
        "--length",
        type=positive,
        metavar="N",
        help="sft: tokens of a packed row (512); others: longest sequence in tokens",
    )


def _add_start(more: argparse._ArgumentGroup) -> None:
    """Add the arguments of the weights that training starts from."""
    more.add_argument(
        "--start",
        metavar="DIR",
        help="start from this run or checkpoint: its weights, and its model and tokenizer unless you name a model",
    )
    more.add_argument(
        "--critic-start", metavar="DIR", help="ppo: load the critic's initial weights from this reward run"
    )
    more.add_argument(
        "--lora",
        type=positive,
        metavar="RANK",
        help="train LoRA adapters of this rank on --hf; the base model is the reference",
    )


def _add_work(work: argparse._ArgumentGroup) -> None:
    """Add the arguments that say how ranks divide the work, and its memory."""
    add_parallel(work)
    work.add_argument(
        "--ranks", type=positive, metavar="N", help="processes to start (default: as many as the spec needs)"
    )
    work.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda if there is a GPU for each rank)")
    work.add_argument("--precision", choices=("fp32", "fp64", "bf16", "fp16"), default="fp32", help="(fp32)")
    work.add_argument(
        "--recompute",
        choices=("blocks", "none"),
        default="none",
        help="blocks: compute activations again in backward instead of keeping them (none)",
    )
    work.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="dpo, grpo, ppo with zero.stage=3: GPU memory per rank for all models, such as 80GiB; models move "
        "to the host while they are not used",
    )
    work.add_argument("--host-memory", metavar="SIZE", help="with --gpu-memory: host memory per rank, such as 64GiB")
    work.add_argument(
        "--plan", action="store_true", help="with --gpu-memory: print where each model is in each phase, and exit"
    )


def _add_steps(steps: argparse._ArgumentGroup) -> None:
    """Add the arguments of steps, batches and the optimizer."""
    steps.add_argument("--steps", type=positive, default=100, metavar="N", help="training steps (100)")
    steps.add_argument("--batch-size", type=positive, default=8, metavar="N", help="examples or prompts per step (8)")
    steps.add_argument(
        "--micro-steps", type=positive, default=1, metavar="N", help="micro-steps per batch: more need less memory (1)"
    )
    steps.add_argument("--optimizer", choices=OPTIMIZER_NAMES, default="adamw", help="(adamw)")
    steps.add_argument("--lr", type=learning_rate, default=1e-5, help="highest learning rate (1e-5)")
    steps.add_argument(
        "--warmup", type=natural, default=0, metavar="N", help="optimizer steps until --lr is reached (0)"
    )
    steps.add_argument("--schedule", choices=("cosine", "linear", "constant"), default="constant", help="(constant)")
    steps.add_argument("--weight-decay", type=rate, default=0.0, metavar="X", help="weight decay of matrices (0)")
    steps.add_argument(
        "--clip", type=rate, default=1.0, metavar="NORM", help="largest gradient norm; 0: no clipping (1.0)"
    )
    steps.add_argument("--seed", type=natural, default=0, help="seed of weights, data order and samples (0)")


def _add_loss(losses: argparse._ArgumentGroup) -> None:
    """Add the arguments of the loss."""
    losses.add_argument(
        "--loss",
        metavar="NAME",
        help="dpo: sigmoid, hinge, ipo, robust, simpo, orpo; grpo: grpo, dr_grpo, dapo, rloo",
    )
    losses.add_argument(
        "--beta",
        type=rate,
        metavar="X",
        help="strength of the penalty for leaving the reference (default: the loss decides)",
    )
    losses.add_argument("--gamma", type=rate, metavar="X", help="simpo: the margin (1.0)")
    losses.add_argument("--label-smoothing", type=rate, metavar="X", help="dpo: share of labels assumed wrong (0)")
    losses.add_argument(
        "--centering", type=rate, metavar="X", help="reward: strength of the penalty that keeps scores near 0 (0)"
    )
    losses.add_argument(
        "--shared-prompt",
        choices=("auto", "yes", "no"),
        default="auto",
        help="dpo, reward, grpo: compute a prompt once for all its completions (auto: if the model supports it)",
    )


def _add_samples(samples: argparse._ArgumentGroup) -> None:
    """Add the arguments of rewards and of what samples completions."""
    samples.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="FILE.py:NAME",
        help="reward function with TRL's signature; give it several times to add rewards",
    )
    samples.add_argument(
        "--reward-model", metavar="DIR", help="folder of a meshfold align reward run of the same model"
    )
    samples.add_argument("--group", type=positive, default=8, metavar="N", help="grpo: completions per prompt (8)")
    samples.add_argument(
        "--max-new-tokens", type=positive, default=128, metavar="N", help="longest completion in tokens (128)"
    )
    samples.add_argument("--temperature", type=rate, default=1.0, metavar="X", help="sampling temperature (1.0)")
    samples.add_argument(
        "--updates", type=positive, default=1, metavar="N", help="optimizer steps that share the samples of a step (1)"
    )
    samples.add_argument(
        "--epochs", type=positive, default=2, metavar="N", help="ppo: passes over the samples of a step (2)"
    )
    samples.add_argument(
        "--rollout",
        default="engine",
        metavar="engine|transformers|URL",
        help="what samples completions: the trained model itself, transformers' generate_batch, or a vLLM server (engine)",
    )
    samples.add_argument(
        "--rollout-weights", metavar="DIR", help="folder in which the server finds the new weights at each step"
    )
    samples.add_argument(
        "--rollout-sleep", action="store_true", help="the server frees its GPU memory between rollouts"
    )
    samples.add_argument(
        "--rollout-ranks",
        type=natural,
        default=0,
        metavar="N",
        help="processes, beside those of --parallel, that only sample (0: those that train sample)",
    )
    samples.add_argument(
        "--rollout-parallel", nargs="+", metavar="SPEC", help="spec of the ranks that only sample, as for --parallel"
    )
    samples.add_argument(
        "--rollout-every",
        type=positive,
        default=1,
        metavar="N",
        help="steps after which ranks that only sample get new weights; more than 1 needs --max-staleness (1)",
    )
    samples.add_argument(
        "--importance-high",
        type=rate,
        default=2.0,
        metavar="X",
        help="upper bound of a token's importance weight if transformers, a server or older weights sampled it (2.0)",
    )
    samples.add_argument(
        "--max-staleness",
        type=natural,
        default=0,
        metavar="N",
        help="optimizer steps that weights which sample may be behind (0)",
    )


def _add_output(out: argparse._ArgumentGroup) -> None:
    """Add the arguments of the folder, checkpoints and what is printed."""
    out.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    out.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in DIR, with its options unless you give others",
    )
    out.add_argument(
        "--save-every", type=natural, default=0, metavar="N", help="steps between checkpoints (default: one at the end)"
    )
    out.add_argument("--json", action="store_true", help="print each step as JSON")
