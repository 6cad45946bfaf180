"""Write the model in one folder into another: between checkpoints and Hugging Face folders, in both directions.

  meshfold convert runs/a/checkpoint gpt2-mine                      # a checkpoint, as transformers loads it
  meshfold convert runs/b/checkpoint llama-mine --like ~/models/llama --dtype bfloat16
  meshfold convert ~/models/llama start --to checkpoint --names meshfold
  meshfold convert ~/models/opt opt-safe                            # .bin to safetensors
  meshfold convert runs/a/checkpoint whole --to checkpoint          # rectangles to whole tensors
  meshfold convert ~/models/llama mixture --experts 8 --top-k 2     # a dense model to a mixture of experts

Tensors are converted one by one. A checkpoint may be of any spec; only its model is written (to keep optimizer state
again, load it into an engine and save). Tensors keep their bytes unless --dtype says otherwise.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from meshfold.cli.arguments import Failure, byte_size, positive, read_changes


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``meshfold convert``."""
    parser.usage = "meshfold convert SOURCE TARGET [options]"
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, or a Hugging Face folder (safetensors or .bin)")
    parser.add_argument("target", metavar="TARGET", help="a new or empty folder")
    parser.add_argument("--to", choices=("hf", "checkpoint"), default="hf", help="format of TARGET (hf)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="of floating tensors (as they are)",
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        help="a Hugging Face folder that gives tokenizer files, and config.json if SOURCE does not know it",
    )
    parser.add_argument(
        "--names",
        choices=("hf", "meshfold"),
        help="with --to checkpoint: Hugging Face's, or those of our own GPT or Llama (as in SOURCE)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="preset of an old checkpoint that does not name it",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        dest="changes",
        help="what was changed of the preset",
    )
    parser.add_argument(
        "--shard-size",
        type=byte_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="of a file of weights: 5GB, 200MiB (5GB)",
    )
    parser.add_argument(
        "--experts",
        type=positive,
        metavar="N",
        help="upcycle: a mixture with N copies of each feed-forward, which computes the same",
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="with --experts: experts a token (2)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run ``meshfold convert``."""
    if arguments.names is not None and arguments.to != "checkpoint":
        raise Failure(
            f"--names {arguments.names} goes with --to checkpoint: a Hugging Face folder has Hugging Face's names"
        )
    if arguments.experts is None and arguments.top_k is not None:
        raise Failure(f"--top-k {arguments.top_k} goes with --experts, the number of copies of each feed-forward")
    if arguments.experts is not None and arguments.to != "hf":
        raise Failure(
            f"--experts {arguments.experts} writes a Hugging Face folder: leave --to checkpoint out, then convert what is written: "
            f"meshfold convert {arguments.target} CHECKPOINT --to checkpoint"
        )
    if arguments.changes and arguments.model is None:
        raise Failure(f"--set {' '.join(arguments.changes)}: name the preset that it changes with --model")
    from meshfold.huggingface import convert_folder
    from meshfold.mesh.spec import format_bytes
    from meshfold.models import preset

    config = None
    if arguments.model is not None:
        config = preset(arguments.model, **read_changes(arguments.changes))
    done = convert_folder(
        arguments.source,
        arguments.target,
        to=arguments.to,
        dtype=arguments.dtype,
        like=arguments.like,
        names=arguments.names,
        config=config,
        shard_bytes=arguments.shard_size,
        experts=arguments.experts,
        top_k=arguments.top_k or 2,
    )
    if arguments.json:
        print(json.dumps(dict(target=str(Path(arguments.target)), **done.__dict__)))
        return 0
    what = "a Hugging Face folder" if done.kind == "hf" else "a checkpoint, to be loaded with weights_only=True"
    files = "one file" if done.files == 1 else f"{done.files} files"
    print(f"{arguments.target}: {what}; {done.tensors} tensors, {format_bytes(done.bytes)} in {files}")
    return 0
