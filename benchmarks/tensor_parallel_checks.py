"""Every tensor-parallel mode against the serial model on the machine's own devices: float32, bfloat16, compiled.

- float32 (no TF32): loss and every gradient within 1e-5 of the largest gradient of the float64 serial model.
- bfloat16: error of all gradients against float64 at most 1.25 times the serial bfloat16 model's own.
- blocks compile with torch.compile(fullgraph=True), forward and backward, and give the same gradients.

`meshfold bench tensor-parallel-checks --ranks 4` prints a row for each and writes JSON.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file runs on its own

import torch
import torch._dynamo
from torch import Tensor, nn

from benchmarks.common import check_out, machine, write

RESULTS = Path(__file__).parent / "results"


def cases(ranks: int) -> list[tuple[str, dict[str, int]]]:
    """The modes and meshes for so many ranks."""
    found: list[tuple[str, dict[str, int]]] = [("1d", {"tensor": ranks}), ("1d+sequence", {"tensor": ranks})]
    if ranks % 4 == 0:
        half = ranks // 2
        found += [
            ("2d", {"row": 2, "col": half}),
            ("2.5d", {"depth": 1, "row": 2, "col": half}),
            ("3d", {"a": 2, "b": half, "c": 1}),
            ("1d", {"data": 2, "tensor": half}),
        ]
    return found


def main(argv: list[str]) -> int:
    """Entry point of `meshfold bench tensor-parallel-checks`."""
    parser = argparse.ArgumentParser(prog="meshfold bench tensor-parallel-checks", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "tensor_parallel_checks.json")
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        check_out(args.out)
        from meshfold.mesh.processes import launch

        return launch([str(Path(__file__).resolve()), *argv], args.ranks)
    return _check(args)


def _check(args: argparse.Namespace) -> int:
    from meshfold.mesh.processes import process_group

    world = process_group.start()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    for name, build in models(args).items():
        serial = build().to(device, torch.bfloat16).double()  # weights that bfloat16 can hold: only arithmetic differs
        generator = torch.Generator().manual_seed(1)
        vocab = serial.config.vocab_size
        ids = torch.randint(0, vocab, (8, args.seq_len), generator=generator).to(device)
        labels = ids.clone()
        labels[0, : args.seq_len // 3] = -100
        exact = gradients(copy.deepcopy(serial), ids, labels)
        plain = {dtype: error(gradients(copy.deepcopy(serial).to(dtype), ids, labels), exact) for dtype in DTYPES}
        variants: list[tuple[torch.dtype, dict[str, Any]]] = [(dtype, {}) for dtype in DTYPES]
        if name in ("gpt", "llama"):
            variants.append((torch.float32, {"compiled": True}))
        if name == "llama":
            variants += [(torch.float32, {"lowering": lowering}) for lowering in ("stream", "ring")]
        for mode, axes in cases(args.ranks):
            for dtype, how in variants:
                rows.append(one(name, serial, mode, axes, dtype, ids, labels, exact, plain[dtype], **how))
        if world.rank == 0:
            for row in rows:
                if row["model"] == name:
                    print(line(row), flush=True)
    failed = [row for row in rows if not row["passed"]]
    if world.rank == 0:
        write(args.out, {"area": "tensor-parallel-checks", "machine": machine(), "rows": rows})
        print(f"{len(rows) - len(failed)} of {len(rows)} checks passed; written to {args.out}")
    world.close()
    return 1 if failed else 0


DTYPES = (torch.float32, torch.bfloat16)
Gradients = dict[str, Tensor]


def models(args: argparse.Namespace) -> dict[str, Any]:
    """Builders of the models, by name; Hugging Face's where transformers is installed."""
    from meshfold.models import GPT, GPTConfig, Llama, LlamaConfig

    sizes = dict(vocab_size=1009, hidden=args.hidden, layers=args.layers, heads=8, max_positions=args.seq_len)

    def seeded(make: Any) -> Any:
        def build() -> nn.Module:
            torch.manual_seed(0)
            return make()  # type: ignore[no-any-return]

        return build

    found = {
        "gpt": seeded(lambda: GPT(GPTConfig(**sizes))),
        "llama": seeded(lambda: Llama(LlamaConfig(**sizes, kv_heads=2))),
    }
    try:
        import transformers as hf
    except ImportError:
        return found
    h, n, v, s = args.hidden, args.layers, 1009, args.seq_len
    decoder = dict(
        vocab_size=v,
        hidden_size=h,
        intermediate_size=2 * h,
        num_hidden_layers=n,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=s,
        bos_token_id=0,
        eos_token_id=0,
    )
    found |= {
        "hf llama": seeded(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**decoder))),
        "hf qwen2": seeded(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**decoder, tie_word_embeddings=True))),
        "hf gpt2": seeded(
            lambda: hf.GPT2LMHeadModel(
                hf.GPT2Config(
                    vocab_size=v,
                    n_embd=h,
                    n_layer=n,
                    n_head=8,
                    n_positions=s,
                    resid_pdrop=0,
                    embd_pdrop=0,
                    attn_pdrop=0,
                    bos_token_id=0,
                    eos_token_id=0,
                )
            )
        ),
        "hf opt": seeded(
            lambda: hf.OPTForCausalLM(
                hf.OPTConfig(
                    vocab_size=v,
                    hidden_size=h,
                    ffn_dim=4 * h,
                    num_hidden_layers=n,
                    num_attention_heads=8,
                    max_position_embeddings=s,
                    word_embed_proj_dim=h,
                    dropout=0.0,
                    activation_function="gelu",  # at the kink of ReLU float32 and float64 differ whatever is done
                )
            )
        ),
    }
    return found


def gradients(model: nn.Module, ids: Tensor, labels: Tensor) -> Gradients:
    """Loss (under the name ``loss``) and every gradient, float64."""
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach().double()} | {
        name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None
    }


def error(found: Gradients, exact: Gradients) -> dict[str, float]:
    """Largest difference over the largest gradient, and ‖difference‖ / ‖gradient‖ over all gradients."""
    names = [name for name in exact if name != "loss"]
    top = max(float(exact[name].abs().max()) for name in names)
    worst = max(names, key=lambda name: float((found[name] - exact[name]).abs().max()))
    square = sum(float((found[name] - exact[name]).square().sum()) for name in names)
    return {
        "largest": float((found[worst] - exact[worst]).abs().max()) / top,
        "relative": math.sqrt(square / sum(float(exact[name].square().sum()) for name in names)),
        "loss": abs(float(found["loss"] - exact["loss"])),
    }


def one(
    name: str,
    serial: nn.Module,
    mode: str,
    axes: dict[str, int],
    dtype: torch.dtype,
    ids: Tensor,
    labels: Tensor,
    exact: Gradients,
    plain: dict[str, float],
    *,
    compiled: bool = False,
    lowering: str = "gather",
) -> dict[str, Any]:
    """One check: a row of the result."""
    from meshfold.mesh import Mesh, metadata
    from meshfold.tensor_parallel import parallelize

    model = copy.deepcopy(serial).to(dtype)
    mesh = Mesh(axes)
    row: dict[str, Any] = {
        "model": name,
        "mode": mode,
        "axes": axes,
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": compiled,
        "lowering": lowering,
    }
    try:
        parallelize(model, mesh, mode, lowering=lowering)
        if compiled:
            blocks: Any = model.blocks
            for i, block in enumerate(blocks):
                blocks[i] = torch.compile(block, fullgraph=True, dynamic=False)
        local = gradients(model, ids, labels)
        found = {"loss": local["loss"]}
        for key, parameter in model.named_parameters():
            meta = metadata(parameter)
            plain_name = key.replace("_orig_mod.", "")
            if plain_name in exact and meta is not None:
                found[plain_name] = meta.placement.gather(local[key], mesh)
        row |= error(found, exact)
        row["serial"] = plain
        limit = 1e-5 if dtype == torch.float32 else 1.25 * plain["relative"]
        row["passed"] = (row["largest"] if dtype == torch.float32 else row["relative"]) <= limit
    except Exception as failure:
        row |= {"passed": False, "failure": f"{type(failure).__name__}: {str(failure)[:400]}"}
    mesh.close()
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    compiled = "compiled" if row["compiled"] else ""
    what = f"{row['model']:<9} {row['mode']:<12} {row['axes']!s:<34} {row['dtype']:<9}{compiled:<9}"
    if "failure" in row:
        return f"FAIL {what} {row['failure'][:160]}"
    ratio = row["relative"] / row["serial"]["relative"]
    word = "ok  " if row["passed"] else "FAIL"
    return f"{word} {what} largest {row['largest']:.1e}  relative {row['relative']:.2e} ({ratio:.2f} × serial)"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
