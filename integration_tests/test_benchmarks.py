"""The benchmarks as commands: they run where there is no GPU, refuse before they measure, and draw what can be read."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import common, reports, timed_training
from benchmarks.align import run as align_bench
from benchmarks.decode import report as decode_report
from benchmarks.decode.contestants import errors_of
from benchmarks.decode.exact_forward import in_float32
from benchmarks.decode.run import reason_of
from benchmarks.experts import run as experts_run
from benchmarks.fp8_curve import rounded
from benchmarks.fp8_curve_report import Pairs, average, bias, distances, pairs_of, verdict_on
from benchmarks.hugging_face import run as hugging_face
from benchmarks.peers.lmdeploy_engine import LMDeployEngine
from benchmarks.power import PowerLog, parse
from benchmarks.tensor_parallel import report as tensor_parallel_report
from benchmarks.timed_training import train
from benchmarks.zero_offload import verdict
from benchmarks.zero_offload.cases import CASES, read_bars
from experiments.toml_tables import TableError
from meshfold.cli import main
from meshfold.inference import Generator, Sampling, quantize
from meshfold.kernels import Nf4Linear, packed_weight_of, unpack_nf4
from meshfold.mesh.testing import run_on_ranks
from meshfold.models import LlamaConfig, build


def test_steps_are_timed_once_a_memory_plan_has_come_to_rest(tmp_path: Path) -> None:
    """Steps before may move the state between host and device, which took 7 to 10 s in the middle of the timed ones."""
    taken: list[int] = []
    moves = 9  # steps until the plan rests

    def contestant(job: dict[str, Any]) -> Callable[[], Tensor]:
        job["settled"] = lambda: len(taken) >= moves
        job["said"] = lambda: dict(steps=len(taken))

        def step() -> Tensor:
            taken.append(1)
            return torch.tensor(float(len(taken)))

        return step

    out = tmp_path / "found.json"
    train(dict(steps=4, warm_up=2, settle_s=0.0, profile=False, out=str(out)), contestant)
    found = json.loads(out.read_text())
    assert found["plan"] == dict(steps=moves + 4) and len(found["seconds"]) == 4


def test_long_steps_are_written_as_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are warm-up, however many are asked for; one that is stopped leaves those before it."""
    monkeypatch.setattr(timed_training, "LONG_S", 0.0)
    out, kept = tmp_path / "found.json", []

    def step() -> Tensor:
        kept.append(len(json.loads(out.read_text())["seconds"]) if out.exists() else 0)
        if len(kept) == 6:
            raise KeyboardInterrupt
        return torch.tensor(1.0)

    with pytest.raises(KeyboardInterrupt):
        train(dict(steps=9, warm_up=6, settle_s=100.0, profile=False, out=str(out)), lambda job: step)
    assert kept == [0, 0, 0, 0, 1, 2] and len(json.loads(out.read_text())["seconds"]) == 2


def test_a_second_step_that_compiles_is_not_a_long_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flux on two GPUs had no warm-up for it: its first forward runs uncompiled, so the second step took 30 s."""
    monkeypatch.setattr(timed_training, "LONG_S", 0.05)
    taken: list[int] = []

    def step() -> Tensor:
        taken.append(1)
        time.sleep(0.1 if len(taken) == 2 else 0.0)
        return torch.tensor(1.0)

    out = tmp_path / "found.json"
    train(dict(steps=2, warm_up=6, settle_s=0.0, profile=False, out=str(out)), lambda job: step)
    assert len(taken) >= 6 + 2 and len(json.loads(out.read_text())["seconds"]) == 2


def test_without_warm_up_the_first_step_counts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    job = dict(steps=1, warm_up=0, settle_s=100.0, profile=False, out=str(out))
    train(job, lambda job: lambda: torch.tensor(2.0))
    found = json.loads(out.read_text())
    assert len(found["seconds"]) == 1 and found["losses"] == [2.0] and 0 < found["seconds"][0] < found["first_step_s"]


SMALL = [
    "--ranks",
    "2",
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--ffn",
    "48",
    "--batch",
    "2",
    "--seq-len",
    "16",
    "--dtype",
    "float32",
    "--rounds",
    "2",
    "--window-s",
    "0",
    "--settle-s",
    "0",
]


def _no_start(*given: object, **options: object) -> int:
    pytest.fail("ranks were started")


@pytest.mark.usefixtures("warm_commands")
def test_tensor_parallel_measures_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert (
        main(
            [
                "bench",
                "tensor-parallel",
                *SMALL,
                "--only",
                "1d+sequence by ring,2d by stream",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    found = json.loads(out.read_text())
    assert found["notes"] == {}
    assert list(found["milliseconds"]) == ["1d+sequence by ring", "2d by stream"]
    assert max(found["relative_error"].values()) < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("warm_commands")
def test_peers_that_keep_state_on_the_host_train_a_hugging_face_model(tmp_path: Path) -> None:
    """Both begin with the same weights and batch, so their first losses are ours; the host's memory has a column."""
    out = tmp_path / "found.json"
    words = ["--dtype", "bfloat16", "--recompute", "auto", "--gpu-memory", "4GiB", "--host-memory", "8GiB"]
    names = ["ours", "FSDP2 offload", "DeepSpeed ZeRO-3 offload"]
    assert main(["bench", "hugging-face", "--tiny", *words, "--only", *names, "--out", str(out)]) == 0
    [(case, found)] = json.loads(out.read_text())["cases"].items()
    assert case.endswith("4GiB, 8GiB of the host")
    [own], [fsdp2], [deepspeed] = (found["runs"][name] for name in names)
    few = min(len(own["losses"]), len(fsdp2["losses"]))  # ours takes steps until its plan rests
    assert few > 2 and own["losses"][:few] == pytest.approx(fsdp2["losses"][:few], rel=5e-3)
    assert own["losses"][2] < own["losses"][0]
    if find_spec("deepspeed") is None:
        assert deepspeed["error"] == "deepspeed is not installed: pip install deepspeed==0.19.8"
    assert "| host GiB a rank |" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        main(["bench", "hugging-face", "--tiny", "--host-memory", "8GiB", "--only", "ours", "--out", str(out)])


@pytest.mark.usefixtures("warm_commands")
def test_pushes_are_measured_beside_a_matmul(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    small = ["--mib", "0.01", "--matmul", "8,8,8", "--settle-s", "0", "--rounds", "1", "--repeats", "1"]
    assert main(["bench", "push", *small, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["no_push"] == "" and set(found["cases"]) == {"all_gather 0.01 MiB", "reduce_scatter 0.01 MiB"}
    assert all(case["agrees"] == 0 for case in found["cases"].values())  # of two parts the sum is the same
    assert {"matmul", "push alone", "push matmul beside"} <= set(found["cases"]["all_gather 0.01 MiB"]["milliseconds"])


@pytest.mark.usefixtures("warm_commands")
def test_pipelines_are_measured_beside_torchs(tmp_path: Path) -> None:
    names, out = ["1f1b", "torch 1f1b", "torch interleaved"], tmp_path / "found.json"
    words = [
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--rounds",
        "1",
        "--layers",
        "4",
        "--only",
        ",".join(names),
    ]
    assert main(["bench", "pipeline", "--tiny", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    case = found["cases"]["4"]
    assert found["notes"] == {}
    assert set(case["milliseconds"]) == set(names)
    assert max(case["norm_error"].values()) < 1e-5


@pytest.mark.usefixtures("warm_commands")
def test_the_longest_sequence_is_foretold_and_tried(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--counts", "2", "--tries", "1", "--out", str(out)]
    assert main(["bench", "longest-sequence", "--tiny", *words]) == 0
    two = json.loads(out.read_text())["counts"]["2"]
    assert two["line"]["foretold"] > 0 and two["attempts"]


def test_the_linear_loss_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["bench", "linear-loss", "--tiny", "--variants", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours = [name for name in found["milliseconds"] if name.startswith("ours") and "entropy" not in name]
    assert len(ours) == 4 and all(len(found["milliseconds"][name]) == 2 for name in ours)
    assert max(found["error"][name] for name in ours) < 1e-5
    assert "| ours, chunks of 64 |" in out.with_suffix(".md").read_text()


def test_decoding_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    few = ["--profile", "--only", "ours,ours compiled,ours int8,transformers static compiled"]
    assert main(["bench", "decode", "--tiny", *few, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert len(found["milliseconds"]) == 4 and not found["notes"]
    ours = [name for name in found["milliseconds"] if name.startswith("ours")]
    assert all(found["error"][name] < 1e-5 and found["parts"][name]["prefill"] > 0 for name in ours)
    assert all(found["settings"]["memory"][name]["planned"] > 0 for name in ours)
    assert "| transformers static compiled |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("form", ["", "int8", "fp8", "int4", "nf4"])
def test_errors_of_decoding_are_found_for_every_format_of_bfloat16_weights(form: str) -> None:
    """A forward in float32 decodes packed weights to float32, and leaves the model as it was."""
    model = build(
        LlamaConfig(vocab_size=64, hidden=64, layers=1, heads=2, kv_heads=1, ffn=64, max_positions=16, tie=False)
    ).bfloat16()
    if form == "nf4":
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is torch.nn.Linear:
                    parent._modules[name] = Nf4Linear.of(child)
    elif form:
        quantize(model, form, group=32)
    ids = torch.arange(9)[None]
    before = model(ids).logits
    with in_float32(model):
        exact = model(ids).logits
        assert exact.dtype == torch.float32
    assert torch.equal(model(ids).logits, before) and before.dtype == torch.bfloat16
    wide = build(model.config)  # the same weights, all in float32
    for name, module in wide.named_modules():
        if (packed := packed_weight_of(there := model.get_submodule(name))) is not None:
            module.weight.data = packed.unpack(torch.float32)
        elif isinstance(there, Nf4Linear):
            module.weight.data = unpack_nf4(there.weight, there.in_features)
        else:
            for each, parameter in module.named_parameters(recurse=False):
                parameter.data = getattr(there, each).data.float()
    torch.testing.assert_close(exact, wide(ids).logits, rtol=1e-5, atol=1e-6)
    prompt = [1, 2, 3]
    found = Generator(model, tokens=32).generate([prompt], sampling=Sampling(temperature=0.0, max_new_tokens=4))
    assert all(0.0 < error < 0.1 for error in errors_of(model, prompt, found))


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize(
    ("method", "peer"), [("dpo", "by hand"), pytest.param("grpo", "by hand, generate", marks=pytest.mark.slow)]
)
def test_alignment_is_measured_without_a_gpu(method: str, peer: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    few = ["--method", method, "--steps", "1", "--warm-up", "1", "--only", "ours, shared prompts", peer]
    assert main(["bench", "align", "--tiny", *few, "--out", str(out)]) == 0
    [case] = json.loads(out.read_text())["cases"].values()
    [ours], [theirs] = case["runs"]["ours, shared prompts"], case["runs"][peer]
    assert ours["seconds"] and ours["losses"] == pytest.approx(theirs["losses"], abs=1e-5)
    assert "25% saved" in out.with_suffix(".md").read_text()


@pytest.mark.usefixtures("warm_commands")
def test_ppo_is_measured_within_limits_of_memory(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    few = ["--method", "ppo", "--steps", "1", "--warm-up", "1", "--gpu-gib", "1", "--host-gib", "1"]
    assert main(["bench", "align", "--tiny", *few, "--out", str(out)]) == 0
    [(name, case)] = json.loads(out.read_text())["cases"].items()
    [run] = case["runs"]["ours"]
    assert name.endswith("within 1 + 1 GiB") and run["seconds"] and "train critic" in run["plan"]["phases"]


@pytest.mark.slow  # transformers takes seconds for a few tokens
@pytest.mark.parametrize(("most", "note"), [("60", "timed once"), ("1e-3", "stopped after 0.004 s")])
def test_many_requests_have_a_limit_of_time(most: str, note: str, tmp_path: Path) -> None:
    out, peer = tmp_path / "found.json", "transformers continuous batching"
    assert (
        main(
            [
                "bench",
                "decode",
                "--tiny",
                "--new",
                "2",
                "--rounds",
                "1",
                "--most-s",
                most,
                "--only",
                peer,
                "--out",
                str(out),
            ]
        )
        == 0
    )
    found = json.loads(out.read_text())
    assert note in found["notes"][peer] and (peer in found["milliseconds"]) == (note == "timed once")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_trl_takes_part_or_says_what_to_install(method: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    few = ["--method", method, "--steps", "1", "--warm-up", "1", "--only", "TRL"]
    assert main(["bench", "align", "--tiny", *few, "--out", str(out)]) == 0
    [case] = json.loads(out.read_text())["cases"].values()
    [run] = case["runs"]["TRL"]
    if importlib.util.find_spec("trl") is None:
        assert run == {"error": "trl is not installed: pip install trl==1.16.0"}
    else:
        assert len(run["seconds"]) == 1 and "error" not in run


def test_bars_of_tensor_parallelism_compare_the_best_of_each() -> None:
    """2d is judged only where there are many tokens, and no bar where the blocks are others."""
    times = {
        "1d+sequence": [2.0, 2.0],
        "2d compiled": [1.0, 1.0],
        "dtensor compiled": [1.2, 1.2],
        "FSDP2 compiled": [1.0, 1.0],
    }
    settings = dict(tensor_parallel_report.JUDGED, ranks=4, batch=4, seq_len=4096)
    found = dict(settings=settings, milliseconds=times, peak_bytes=dict.fromkeys(times, 2))
    lines = list(tensor_parallel_report.bars(found))
    assert [line.rpartition(": ")[2] for line in lines] == ["met", "**not met**"]
    assert "(2d compiled)" in lines[0] and "1.200" in lines[0]
    many = list(tensor_parallel_report.bars({**found, "settings": {**settings, "batch": 8}}))
    assert len(many) == 4 and "2.000 (bar 1): met" in many[2] and many[3].endswith("1.000 (bar 1): met")
    assert not list(tensor_parallel_report.bars({**found, "settings": {**settings, "hidden": 32}}))


def test_bars_of_decoding_judge_bf16_by_itself() -> None:
    """Packed weights are faster, and meet no bar of bf16."""
    settings = dict(decode_report.JUDGED, batch=1, new=10)
    times = {"ours": [50.0], "ours int8": [25.0], "ours int4": [40.0], decode_report.PEER: [100.0]}
    verdicts = [line.rpartition(": ")[2] for line in decode_report.bars(settings, times)]
    assert verdicts == ["**not met**", "met", "met", "**not met**"]  # 5 ms, 2.0 x transformers, 2.0 x bf16, 1.25 x bf16
    two = list(decode_report.bars({**settings, "ranks": 2}, {"ours": [25.0]}))
    assert len(two) == 1 and two[0].endswith("2.500 (bar 2.6): met")


def test_a_peer_that_was_stopped_is_slower_at_least() -> None:
    settings = {**decode_report.JUDGED, **decode_report.MANY}
    times = {"ours": [8e3, 9e3, 8e3], decode_report.CONTINUOUS: [60e3]}
    [line] = decode_report.many(settings, times, {decode_report.CONTINUOUS: "stopped after 60 s, ..."})
    assert line.endswith("7.500 (bar 1.3): met (at least: it was stopped)")
    [line] = decode_report.many(settings, {**times, decode_report.CONTINUOUS: [9e3]}, {})
    assert line.endswith("1.125 (bar 1.3): **not met**")
    assert not list(decode_report.many({**settings, "batch": 64}, times, {}))
    [line] = decode_report.many(settings, {"ours": [8e3], decode_report.LMDEPLOY: [7e3, 7.1e3, 7.3e3]}, {})
    assert line.endswith("0.887 (bar 0.9): **not met**")
    both = {"ours": [8e3], "ours compiled": [7.8e3], decode_report.LMDEPLOY: [7.1e3]}
    [line] = decode_report.many(settings, both, {})
    assert "(ours compiled)" in line and line.endswith("0.910 (bar 0.9): met")


@pytest.mark.parametrize(("short", "delay", "error"), [(0, 0.0, None), (1, 0.0, RuntimeError), (0, 0.2, TimeoutError)])
def test_texts_of_lmdeploy_are_counted(
    short: int, delay: float, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with LMDeploy's interface gives each text's tokens in pieces; one whose text is shorter, or late, is told."""

    class Engine:
        @classmethod
        def from_pretrained(cls, folder: str, engine_config: Any) -> Engine:
            files = {file.name for file in Path(folder).iterdir()}
            assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
            assert (engine_config.dtype, engine_config.session_len, engine_config.max_batch_size) == ("float32", 9, 2)
            return cls()

        def start(self) -> None:
            asyncio.get_running_loop()

        def create_instance(self) -> Engine:
            return self

        async def async_stream_infer(self, number: int, ids: list[int], gen_config: Any) -> AsyncIterator[Any]:
            assert gen_config.ignore_eos and gen_config.min_new_tokens == gen_config.max_new_tokens
            for _ in range(gen_config.max_new_tokens - short * number):
                await asyncio.sleep(delay)
                yield SimpleNamespace(token_ids=[number])
            yield SimpleNamespace(token_ids=[])

        async def async_end(self, number: int) -> None:
            pass

    config = type("Config", (SimpleNamespace,), {})
    package = SimpleNamespace(GenerationConfig=config, PytorchEngineConfig=config)
    monkeypatch.setitem(sys.modules, "lmdeploy", package)
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.engine", SimpleNamespace(Engine=Engine))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    texts = LMDeployEngine(LlamaForCausalLM(LlamaConfig(**sizes)), [[1, 2], [3, 4, 5]], new=5)
    with nullcontext() if error is None else pytest.raises(error):
        assert 0 < texts(4, limit_s=0.1 if delay else 10.0) < 10


def test_an_engine_that_ends_the_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDeploy's check of a machine ends its process: the other contestants go on."""

    def ends(folder: str, engine_config: Any) -> None:
        raise SystemExit(1)

    package = SimpleNamespace(GenerationConfig=SimpleNamespace, PytorchEngineConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "lmdeploy", package)
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch", SimpleNamespace())
    engine = SimpleNamespace(Engine=SimpleNamespace(from_pretrained=ends))
    monkeypatch.setitem(sys.modules, "lmdeploy.pytorch.engine", engine)
    model = SimpleNamespace(dtype=torch.bfloat16, save_pretrained=lambda folder: None)
    with pytest.raises(RuntimeError, match="its log above says why"):
        LMDeployEngine(model, [[1]], new=1)


def test_planned_memory_is_judged_beside_what_was_taken() -> None:
    found = dict(
        planned=100 << 30, parts="100.00 GiB a rank: weights 100.00 GiB", allocated=99 << 30, reserved=104 << 30
    )
    lines = list(decode_report.memory(dict(memory=dict(ours=found))))
    assert "0.010 (bar 0.03): met" in lines[1] and "104.00 GiB, off by: 0.040 (bar 0.03): **not met**" in lines[2]
    assert len(list(decode_report.memory(dict(memory=dict(ours={**found, "allocated": None, "reserved": None}))))) == 1


def test_bars_of_alignment_take_the_best_of_trl() -> None:
    work = dict(method="dpo", shape="1.5B", prompt=512, completion=512, dtype="bfloat16", ranks=2, group=8)
    seconds = {
        "ours": 0.4,
        "ours, shared prompts": 0.3,
        "TRL": 0.5,
        "TRL, DeepSpeed ZeRO 2": 0.42,
        "TRL, DeepSpeed ZeRO 3": None,
    }
    two, shared = align_bench.verdicts(work, seconds, {})
    assert "(TRL, DeepSpeed ZeRO 2)" in two and two.endswith("1.050 (bar 1.15): **not met**")
    assert shared.endswith("1.400 (bar 1.35): met")
    assert "bar" not in next(align_bench.verdicts({**work, "ranks": 1}, seconds, {}))
    kept = {**seconds, "ours, activations kept, pushed": 0.1}
    assert next(align_bench.verdicts(work, kept, {})) == two  # TRL's may have been faster with its activations kept
    fair = next(align_bench.verdicts(work, {**kept, "TRL, activations kept": None}, {}))  # which ran out of memory
    assert "ours, activations kept, pushed" in fair
    assert not list(align_bench.verdicts({**work, "shape": "tiny"}, seconds, {}))
    ppo = {**work, "method": "ppo", "shape": "6B", "gpu_gib": 78.0}
    [line] = align_bench.verdicts(ppo, {"ours": 90.0}, {"ours": [dict(peak_bytes=75 << 30)]})
    assert line.endswith("75.0 of 78 GiB of GPU: met")


def test_gpt_fast_by_hand_computes_what_ours_does() -> None:
    """Logits and greedy texts of the same weights; it turns neighbours in a head, and ours turns halves."""
    from benchmarks.peers.gpt_fast import Decoder, generator

    sizes: dict[str, Any] = dict(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48)
    config = LlamaConfig(vocab_size=61, max_positions=32, tie=False, rope_theta=10_000.0, **sizes)
    torch.manual_seed(0)
    ours: Any = build(config).eval()
    peer: Any = Decoder(61, *sizes.values(), batch=2, longest=11)
    neighbours = torch.arange(8).view(2, 4).T.flatten()
    with torch.no_grad():
        for parameter in ours.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
        pairs = [("embed", "embed"), ("norm", "norm"), ("output", "head")]
        for number, block in enumerate(ours.blocks):
            named = dict(wo="attn.out", w2="mlp.down", attention_norm="norm1", ffn_norm="norm2")
            pairs += [(f"blocks.{number}.{its}", f"blocks.{number}.{mine}") for its, mine in named.items()]
            q_and_k, v = block.attn.qkv.weight.split((48, 16))
            turned = q_and_k.unflatten(0, (-1, 8))[:, neighbours].flatten(0, 1)
            peer.blocks[number].wqkv.weight.copy_(torch.cat((turned, v)))
            gate, up = block.mlp.gate_up.weight.chunk(2)
            peer.blocks[number].w1.weight.copy_(gate)
            peer.blocks[number].w3.weight.copy_(up)
        for its, mine in pairs:
            peer.get_submodule(its).weight.copy_(ours.get_submodule(mine).weight)
        given = torch.randint(61, (2, 5))
        torch.testing.assert_close(peer(given, torch.arange(5)), ours(given).logits, rtol=1e-5, atol=1e-5)
        text = given
        for _ in range(6):
            text = torch.cat((text, ours(text).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(generator(peer, "eager")(given, 6), text[:, 5:])


@pytest.mark.slow
def test_decoding_on_ranks_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["bench", "decode", "--tiny", "--ranks", "2", "--only", "ours", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["settings"]["ranks"] == 2 and list(found["milliseconds"]) == ["ours"]
    assert found["error"]["ours"] < 1e-5 and found["parts"]["ours"]["prefill"] > 0


def test_a_note_quotes_the_generated_code_that_an_error_is_about(tmp_path: Path) -> None:
    made = tmp_path / "made.py"
    made.write_text("x = 1\ny = (\nz = 3\n")
    error = RuntimeError(f"Failed to import {made}\nSyntaxError: '(' was never closed (made.py, line 2)")
    said = reason_of(error)
    assert "never closed" in said and "its lines 1: x = 1 / 2: y = ( / 3: z = 3" in said
    assert reason_of(ValueError("no file")) == "ValueError: no file"


def test_the_blocks_of_openfold_are_those_of_ours() -> None:
    """Outputs and every gradient in float64, so that the benchmark compares the same work."""
    from benchmarks.folding.worker import blocks_of, eager, ours
    from benchmarks.peers.transformers_folding import eager_block

    job = dict(blocks=1, narrower=8, dtype="float64", ranks=1, sequences=3, residues=5, recompute="none")
    (block,) = blocks_of(job)
    names = {name for name, _ in block.named_parameters()}
    peer = eager_block(block)
    assert {name.replace("msa_att_col.", "msa_att_col._msa_att.") for name, _ in peer.named_parameters()} == names
    inputs = torch.randn(1, 3, 5, 32, dtype=torch.float64), torch.randn(1, 5, 5, 16, dtype=torch.float64)
    for mine, theirs in zip(block(*inputs), peer(*inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    sum(y.square().sum() for y in block(*inputs)).backward()
    sum(y.square().sum() for y in peer(*inputs)).backward()
    found = {name.replace("msa_att_col.", "msa_att_col._msa_att."): p.grad for name, p in peer.named_parameters()}
    for name, parameter in block.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours(job)(), eager(job)(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ours({**job, "recompute": "blocks"})(), ours(job)(), rtol=0, atol=0)


FOLDING = dict(blocks=1, narrower=8, dtype="float64", sequences=6, residues=4, recompute="blocks")


def _folding_loss(ranks: int, **grid: list[int]) -> float:
    from benchmarks.folding.worker import ours

    loss = ours({**FOLDING, "ranks": ranks, **grid})()
    if ranks > 1:  # each has the mean of its own part
        torch.distributed.all_reduce(loss)
    return float(loss) / ranks


def test_ranks_compute_what_one_does_in_the_benchmark_of_folding() -> None:
    assert run_on_ranks(2, _folding_loss, 2) == pytest.approx([_folding_loss(1)] * 2)
    assert run_on_ranks(4, _folding_loss, 4, grid=[2, 2]) == pytest.approx([_folding_loss(1)] * 4)


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ("1", ["ours"]),
        pytest.param("1", ["ours", "OpenFold eager"], marks=pytest.mark.slow),
        pytest.param("2", ["ours"], marks=pytest.mark.slow),
    ],
)
def test_folding_is_measured_without_a_gpu(ranks: str, names: list[str], tmp_path: Path) -> None:
    out = tmp_path / "folding.json"
    assert main(["bench", "folding", "--tiny", "--ranks", ranks, "--only", *names, "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"].values()
    (run,) = case["runs"]["ours"]
    assert len(run["seconds"]) == 2 and run["losses"][0] > 0
    text = out.with_suffix(".md").read_text()
    assert ("against OpenFold's attention and triangle modules" in text) == (len(names) > 1) and "bar" not in text


def test_two_gpus_are_compared_with_one(tmp_path: Path) -> None:
    def case(ranks: int, seconds: float, peak: int) -> dict[str, Any]:
        work = dict(ranks=ranks, blocks=12, narrower=1, dtype="bfloat16", recompute="none", sequences=8, residues=8)
        return dict(work=work, runs={"ours": [dict(seconds=[seconds], peak_bytes=peak, losses=[1.0])]})

    out = tmp_path / "folding.json"
    out.write_text(json.dumps(dict(machine={}, cases=dict(one=case(1, 1.0, 10), two=case(2, 0.5, 6)))))
    assert main(["bench", "folding", "--report", str(out)]) == 0
    text = out.with_suffix(".md").read_text()
    assert "- two GPUs (ours) against one, same sizes: 2.000 (bar 1.7): met" in text
    assert "in that of one: 0.600 (bar 0.55): **not met**" in text


@pytest.mark.usefixtures("warm_commands")
@pytest.mark.parametrize(
    "words",
    [
        ["esmfold", "--only", "ours"],
        pytest.param(["esmfold"], marks=pytest.mark.slow),
        pytest.param(["longest"], marks=pytest.mark.slow),
        pytest.param(["longest", "--ranks", "2"], marks=pytest.mark.slow),
    ],
)
def test_the_trunk_is_measured_without_a_gpu(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "trunk.json"
    assert main(["bench", "folding", "--tiny", "--steps", "1", "--case", *words, "--out", str(out)]) == 0
    (case,) = json.loads(out.read_text())["cases"].values()
    good = {name: run for name, (run,) in case["runs"].items() if "error" not in run}
    assert all(len(run["seconds"]) == 1 for run in good.values())
    losses = [run["losses"][0] for run in good.values()]
    assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-5)
    ours = next(run for name, run in good.items() if name.startswith("ours"))
    assert ours["plan"]["bytes"] > 0 and "chunks" in ours["plan"]["settings"]
    assert (len(good) > 1) == (words == ["esmfold"])


def test_the_trunk_is_judged_beside_transformers_and_on_two_gpus(tmp_path: Path) -> None:
    def runs(**found: tuple[float, int]) -> dict[str, Any]:
        plan = dict(bytes=1, settings="no chunks")
        return {
            {"theirs": "transformers, chunks of 64"}.get(name, name): [
                dict(seconds=[seconds], peak_bytes=peak, losses=[1.0], plan=plan)
            ]
            for name, (seconds, peak) in found.items()
        }

    work = dict(case="esmfold", ranks=1, blocks=2, narrower=1, dtype="bfloat16", residues=4096)
    one = {**work, "case": "longest", "gib": 8.0, "residues": 1000}
    cases = dict(
        a=dict(work=work, runs=runs(theirs=(6.0, 10), ours=(1.0, 9), ours_half=(2.0, 5), ours_least=(5.0, 2))),
        b=dict(work={**work, "residues": 768}, runs=runs(theirs=(6.0, 10), ours=(1.0, 9))),
        c=dict(work=one, runs=runs(ours=(1.0, 9))),
        d=dict(work={**one, "ranks": 2, "residues": 1390}, runs=runs(ours=(1.0, 9))),
    )
    out = tmp_path / "trunk.json"
    out.write_text(json.dumps(dict(machine={}, cases=cases)))
    assert main(["bench", "folding", "--report", str(out)]) == 0
    lines = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("- ")]
    assert lines == [
        "- peak of ours (ours_half) in that of transformers in chunks of 64, 4,096 residues: 0.500 (bar 0.5): met",
        "- ours (ours_half) against transformers in chunks of 64, 4,096 residues: 3.000 (bar 1.5): met",
        "- peak of ours (ours) in that of transformers in chunks of 64, 768 residues: 0.900",
        "- ours (ours) against transformers in chunks of 64, 768 residues: 6.000",
        "- the longest chain on two GPUs by that on one, 8 GiB of each: 1.390 (bar 1.4): **not met**",
    ]


def test_sizes_that_ranks_do_not_divide_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--ranks", "2", "--sizes", "128x255"], "--ranks 2 must divide"),
        (["--sizes", "8"], "write"),
        (["--case", "esmfold", "--only", "OpenFold eager"], "--case esmfold has transformers, chunks of 64, ours,"),
        (["--case", "longest", "--gib", "0.01"], "not even the shortest chain fits"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "folding", *words])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["none", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_fp8_is_measured_without_a_gpu(backend: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["bench", "fp8", "--tiny", "--blocks", "1", "--backend", backend, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours = [name for name in found["milliseconds"] if name.startswith("ours, fp8")]
    assert len(ours) == 4 and all(len(found["milliseconds"][name]) == 2 for name in ours)
    assert found["error"]["ours, bf16"] < 1e-6
    assert all(1e-6 < found["error"][name] < 0.03 for name in ours), found["error"]
    assert "| ours, fp8 rowwise_hp_dw |" in out.with_suffix(".md").read_text()
    words = ["--blocks", "1", "--backend", "none", "--only", "ours, fp8 rowwise", "ours, fp8 rowwise, c", "ours, fp8 t"]
    assert main(["bench", "fp8", "--tiny", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours = ["ours, fp8 rowwise", "ours, fp8 tensorwise", "ours, fp8 rowwise, casts apart"]
    assert [*found["milliseconds"]] == ["ours, bf16", *ours]
    assert found["error"][ours[0]] == found["error"][ours[2]] != found["error"][ours[1]]


def test_a_loss_curve_in_fp8_is_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = ["--backend", "none", "--steps", "30", "--warmup", "5", "--settled", "10", "--controls", "1"]
    assert main(["bench", "fp8-curve", "--tiny", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    bf16, again, fp8 = (found["runs"][name] for name in ("bf16", "bf16 again, weights rounded (1)", "fp8 rowwise"))
    assert len(bf16["losses"]) == len(fp8["losses"]) == 30
    assert bf16["layers"] == "None" and fp8["layers"].startswith("fp8 (rowwise): blocks.0.attn.qkv and 3 more")
    assert bf16["final"] < 0.8 * bf16["losses"][0]  # it learns
    final, worst, step = distances(fp8, bf16, found["settings"])
    assert 0 < final < 0.01 and 0 < worst < 0.005 and step in (10, 20)
    moved = [abs(one / other - 1) for one, other in zip(again["losses"], bf16["losses"], strict=True)]
    assert 0 < max(moved[:3]) < 1e-3  # one rounding of each weight
    assert 0 < distances(again, bf16, found["settings"])[1] < 0.005
    table = out.with_suffix(".md").read_text()
    assert "| fp8 rowwise |" in table and "bar" not in table  # which is for the large model
    assert "| bf16 again, weights rounded (1) |" in table and "what chance makes of one rounding" in table
    assert "J a token" not in table
    found["runs"]["fp8 rowwise"] |= {"watts": 500.0, "mhz": 1500.0}
    out.write_text(json.dumps(found))
    assert main(["bench", "fp8-curve", "--report", str(out)]) == 0
    table = out.with_suffix(".md").read_text()
    assert "| seconds | J a step | J a token | W | MHz |" in table and "| 500 | 1500 |" in table
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_loss_curves_of_several_runs_are_made_in_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tiny", "--backend", "none", "--steps", "12", "--warmup", "2", "--window", "4", "--settled", "4"]
    parts, out = [tmp_path / "0.json", tmp_path / "1.json"], tmp_path / "all.json"
    for number, part in enumerate(parts):
        repeats = ["--repeats", "3", "--only", *(["0", "2"] if number == 0 else ["1"])]
        assert main(["bench", "fp8-curve", *words, *repeats, "--out", str(part)]) == 0
    assert "has no run 'bf16' from weights as they are" in capsys.readouterr().out
    assert main(["bench", "fp8-curve", "--report", *map(str, parts), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    again = [" again, weights rounded (1)", " again, weights rounded (2)"]
    assert [*found["runs"]] == [name + each for name in ("bf16", "fp8 rowwise") for each in ("", *again)]
    (pairs,) = pairs_of(found["runs"], found["settings"])
    assert pairs.count == 3 and 0 < pairs.errors[1] < 0.01
    assert found["runs"]["fp8 rowwise"]["losses"] != found["runs"]["fp8 rowwise" + again[0]]["losses"]
    table = out.with_suffix(".md").read_text()
    assert "| fp8 rowwise | 3 |" in table and f"| fp8 rowwise{again[1]} |" in table and "bar" not in table
    assert main(["bench", "fp8-curve", "--report", *map(str, [*parts, parts[1]]), "--out", str(out)]) == 2
    assert "run 'bf16 again, weights rounded (1)' is in a file before it" in capsys.readouterr().err
    parts[1].write_text(json.dumps(json.loads(parts[1].read_text()) | dict(text_tokens=1)))
    assert main(["bench", "fp8-curve", "--report", *map(str, parts), "--out", str(out)]) == 2
    assert "has other text_tokens than" in capsys.readouterr().err


def test_mean_curves_of_pairs_and_their_standard_errors() -> None:
    settings = dict(window=2, settled=2)
    bf16 = [dict(losses=[9.0, 9.0, low, low, 2.0, 2.0], final=2.0) for low in (3.9, 4.1)]
    fp8 = [dict(losses=[5.0, 5.0, low, low, 2.0, 2.0], final=2.0) for low in (4.0, 4.2)]
    found = Pairs("fp8", fp8, bf16, settings)
    assert average(bf16)["losses"] == pytest.approx([9.0, 9.0, 4.0, 4.0, 2.0, 2.0])
    assert found.worst == pytest.approx(0.1 / 4.0) and found.step == 2 and found.final == 0.0
    assert found.errors == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)  # both pairs are as far apart
    found = Pairs("fp8", fp8[::-1], bf16, settings)  # 0.3 and -0.1 apart: 0.1 ± 0.2
    assert found.worst == pytest.approx(0.1 / 4.0) and found.errors[1] == pytest.approx(0.2 / 4.0)
    assert verdict_on("means", 0.003, 0.0005) == "met" and verdict_on("means", 0.007, 0.0005) == "**not met**"
    assert verdict_on("means", 0.0045, 0.001) == "met, but within two standard errors of the bar: more runs can tell"
    assert verdict_on("means", float("inf"), float("nan")).startswith("**not met**")


def test_weights_are_rounded_up_or_down_by_chance() -> None:
    exact = torch.tensor([1.0, -0.5, 0.0])
    assert torch.equal(rounded(exact, torch.Generator()), exact)
    odd = torch.full((10_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next number of bf16
    found = rounded(odd, torch.Generator().manual_seed(0))
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert float((found - 1).mean()) == pytest.approx(2**-9, rel=0.05)


def test_the_distance_of_two_loss_curves() -> None:
    settings = dict(window=2, settled=2)
    bf16 = dict(losses=[9.0, 9.0, 4.0, 4.0, 2.0, 2.0], final=2.0)
    near = dict(losses=[5.0, 5.0, 4.0, 4.08, 2.0, 1.92], final=2.01)
    assert distances(near, bf16, settings) == pytest.approx((0.005, 0.02, 4))
    assert bias(near, bf16, settings) == 0.0
    assert distances(near | dict(losses=[5.0, 5.0, 4.0, float("nan"), 2.0, 2.0]), bf16, settings)[1:] == (math.inf, 2)
    assert distances(near | dict(final=float("nan")), bf16, settings)[0] == math.inf


def test_steps_of_optimizers_are_measured_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["bench", "optimizers", "--tiny", "--only", "LAMB", "Lion", "Muon", "CAME", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    ours = {"LAMB", "Lion", "Muon", "CAME"}
    assert ours <= found["milliseconds"].keys() and all(len(times) == 2 for times in found["milliseconds"].values())
    assert all(0 < found["error"][name] < (0.03 if name == "Muon" else 1e-4) for name in ours), found["error"]
    assert found["launches"]["LAMB"] > 0
    assert "| LAMB |" in out.with_suffix(".md").read_text()
    assert main(["bench", "optimizers", "--tiny", "--case", "galore", "--steps", "4", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["power"] == {} and " J a step" not in out.with_suffix(".md").read_text()
    assert found["losses"][-1] < found["losses"][0] and 0 < found["eight_bit_bytes"] < found["state_bytes"]


class _Muon:
    def __init__(self, params: Any, lr: float = 0.01, mu: float = 0.95) -> None: ...


def test_settings_that_the_installed_dion_lacks_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.optimizer_contestants import Rival, without_missing

    make: Any = _Muon
    some = [Rival("plain", make), Rival("a", make, needs=("mu",)), Rival("b", make, needs=("use_triton",))]
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=_Muon))
    kept, said = without_missing(some)
    assert [one.name for one in kept] == ["plain", "a"]
    assert said == "left out 'b': this version of dion has no use_triton; its Muon has lr, mu"
    monkeypatch.setitem(sys.modules, "dion", None)
    kept, said = without_missing(some)
    assert [one.name for one in kept] == ["plain"] and said == "left out 'a', 'b': dion is not installed"
    assert without_missing(some[:1]) == (some[:1], "")


def test_optimizers_are_written_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the command in its second round has all of the first one, and a table of it."""
    from benchmarks import optimizers

    out, made = tmp_path / "found.json", optimizers._window
    seen: list[list[str]] = []

    def window(rival: Any, *given: Any) -> Any:
        seen.append(list(json.loads(out.read_text())["milliseconds"]) if out.exists() else [])
        if len(seen) == 4:
            raise KeyboardInterrupt
        return made(rival, *given)

    monkeypatch.setattr(optimizers, "_window", window)
    assert main(["bench", "optimizers", "--tiny", "--only", "Lion", "torch Muon", "--out", str(out)]) != 0
    assert seen == [[], ["Lion"], ["Lion", "torch Muon"], ["Lion", "torch Muon"]]
    assert {name: len(times) for name, times in json.loads(out.read_text())["milliseconds"].items()} == {
        "Lion": 2,
        "torch Muon": 1,
    }
    optimizers.report(out)
    assert "| torch Muon |" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("area", ["tensor-parallel", "attention", "pipeline"])
def test_a_contestant_that_is_not_there_is_refused_before_ranks_start(
    area: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("meshfold.mesh.processes.launcher"), "launch", _no_start)
    said = ""
    try:
        assert main(["bench", area, "--ranks", "2", "--only", "nobody"]) == 2
        said = capsys.readouterr().err
    except SystemExit as end:
        said = str(end.code)
    assert "there is no contestant 'nobody'; there are: " in said


@pytest.mark.parametrize(
    "area",
    [
        "tensor-parallel",
        "tensor-parallel-checks",
        "attention",
        "pipeline",
        "cpu-adam",
        "linear-loss",
        "fp8",
        "fp8-curve",
        "experts",
        "folding",
        "diffusion",
        "optimizers",
    ],
)
def test_a_result_that_could_not_be_written_is_refused_before_anything_is_measured(
    area: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("meshfold.mesh.processes.launcher"), "launch", _no_start)
    (tmp_path / "file").touch()
    assert main(["bench", area, "--out", str(tmp_path / "file" / "found.json")]) == 2
    assert (
        f"--out {tmp_path / 'file' / 'found.json'} cannot be written to: give another file" in capsys.readouterr().err
    )
    assert main(["bench", area, "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} is a folder: name a file in it" in capsys.readouterr().err


class PowerOfAnyTime(PowerLog):
    """Reads 500 W and 1,500 MHz of each GPU."""

    def __enter__(self) -> PowerLog:
        return self

    def mean(self, begin: float, end: float, gpus: int) -> dict[str, float]:
        return {"watts": 500.0 * gpus, "mhz": 1500.0}


def test_joules_are_those_of_a_window_of_each_contestant(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[str] = []
    steps: Counter[str] = Counter()

    @contextmanager
    def around() -> Iterator[None]:
        inside.append("b")
        yield
        inside.clear()

    def step(name: str) -> None:
        steps[name] += 1
        assert ("b" in inside) == (name == "b")

    some = [common.Contestant("a", partial(step, "a")), common.Contestant("b", partial(step, "b"), around=around)]
    given: dict[str, Any] = dict(ranks=2, window_s=0.0, settle_s=0.0, gpus=2)
    monkeypatch.setattr(common, "PowerLog", PowerOfAnyTime)
    monkeypatch.setattr(common, "has_power", lambda: False)
    assert common.energy_windows(some, **given) == {} and not steps
    monkeypatch.setattr(common, "has_power", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = common.energy_windows([*some, common.Contestant("could not be built")], **given)
    assert {name: (each["watts"], each["mhz"]) for name, each in found.items()} == dict.fromkeys("ab", (1000.0, 1500.0))
    assert steps["a"] >= 3 and steps["b"] >= 3 and all(each["milliseconds"] > 0 for each in found.values())
    assert (
        reports.energy(found["a"], 20.0, 8) == ("20.0", "2.50", "1500") and reports.energy(None, 20.0, 8) == ("–",) * 3
    )


@pytest.mark.parametrize("area", ["attention", "pipeline", "longest_sequence"])
def test_tables_have_joules_and_clocks_where_power_was_sampled(area: str) -> None:
    module = import_module(f"benchmarks.{area}.{'run' if area == 'longest_sequence' else 'report'}")
    result = json.loads((Path(reports.__file__).parent / "results" / f"{area}.json").read_text())
    power = {"watts": 2000.0, "mhz": 1650.0, "milliseconds": 50.0}
    head = "J a step, all ranks | J a token | MHz |"
    for case in result.get("cases", {}).values():
        case.pop("power", None)
    assert head not in module.described(result)
    if area == "longest_sequence":
        (best, *_) = [each for each in result["counts"]["4"]["attempts"] if each["fits"]]
        best |= {"tokens": result["counts"]["4"]["fits"], "seconds": 0.05, "power": power}
    else:
        for case in result["cases"].values():
            case["power"] = {next(iter(case["milliseconds"])): power}
    said = module.described(result)
    tokens = dict(
        attention=32768, pipeline=8 * 2048, longest_sequence=result.get("counts", {}).get("4", {}).get("fits")
    )
    assert head in said and f"| 100.0 | {100 / tokens[area]:#.3g} | 1650 |" in said and "| – | – | – |" in said


@pytest.mark.parametrize(
    ("area", "cells"), [("decode", "| 0.500 | 2000 | 1650 |"), ("align", "| 100.0 | 6.25 | 2000 | 1650 |")]
)
def test_tables_have_joules_of_a_token_where_power_was_sampled(area: str, cells: str, tmp_path: Path) -> None:
    """50 ms at 2,000 W are 100 J, of 200 tokens or of 16; without samples there are no such columns."""
    power, file = {"watts": 2000.0, "mhz": 1650.0}, tmp_path / "found.json"
    for sampled in (power, {}):
        if area == "decode":
            settings = dict(
                decode_report.JUDGED, batch=2, new=100, prompt=3, dtype="fp32", weight_bytes=1, bandwidth=1.0
            )
            of = dict(milliseconds={"ours": [50.0], "ours int8": [50.0]}, notes={"absent": "why"})
            numbers = {key: {"ours": 0.0, "ours int8": 0.0} for key in ("peak_bytes", "error")}
            result = dict(settings=settings, machine={}, power={"ours": sampled, "ours int8": {}}, **of, **numbers)
        else:
            work = dict(method="dpo", rows=2, group=1, prompt=2, completion=2)
            runs = {"ours": [dict(seconds=[0.05], peak_bytes=1, **sampled)], "by hand": [dict(error="absent")]}
            result = dict(machine={}, cases={"a": dict(work=work, runs=runs)})
        file.write_text(json.dumps(result))
        assert main(["bench", area, "--report", str(file)]) == 0
        lines = file.with_suffix(".md").read_text().splitlines()
        table = [line for line in lines if line.startswith("|")]
        assert len({line.count("|") for line in table}) == 1
        assert any("J a token | W | MHz |" in line for line in table) == bool(sampled)
        assert any(cells in line for line in table) == bool(sampled)


@pytest.mark.usefixtures("warm_commands")
def test_placements_have_joules_where_power_was_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are those of the first steps, however many it took to settle."""
    out = tmp_path / "found.json"
    words = ["--model", "tiny", "--rows", "2", "--seq-len", "8", "--steps", "2", "--settle-s", "0.05"]
    words += ["--only", "everything on the GPU, no zero", "--out", str(out)]
    monkeypatch.setattr("benchmarks.zero_placements.PowerLog", PowerOfAnyTime)
    assert main(["bench", "zero-placements", *words]) == 0
    head, _, row = [line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
    assert head.endswith("| J a step | J a token | W | MHz | loss of step 4 |") and "| 500 | 1500 |" in row
    found = json.loads(out.read_text())
    (one,) = found["rows"].values()
    assert len(one["seconds"]) == 2 and len(one["losses"]) == len(one["grad_norms"]) == 4
    del one["watts"], one["mhz"]
    out.write_text(json.dumps(found))
    assert main(["bench", "zero-placements", "--report", str(out)]) == 0
    assert "MHz" not in out.with_suffix(".md").read_text()


def test_a_plan_is_shown_beside_what_was_taken_of_the_gpu() -> None:
    """Say what allocator and CUDA have taken where they were asked; results from before have the plan alone."""
    plan = dict(seconds=0.5, gpu_bytes=11 * 2**30, out_of_memory=0)
    said = "planned 0.5000 s, 11.0 GiB; never ran out of memory"
    assert hugging_face._expected(plan) == said
    taken = dict(reserved_bytes=11 * 2**30, outside_bytes=2**29)
    assert (
        hugging_face._expected(plan | taken)
        == f"{said}; 11.5 GiB of the GPU taken: 11.0 by the allocator, 0.50 by CUDA"
    )


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('Traceback\n  File "a.py"\nValueError: no\n', "ended with 1: ValueError: no"),
        (
            "  what():  CUDA error: an illegal memory access\nFatal Python error: Aborted\n\nThread 0x1:\n"
            '  File "/a/ErrorOf.py", line 3 in f\nExtension modules: numpy.linalg, torch._C\n',
            "ended with 1: what():  CUDA error: an illegal memory access",
        ),
        ("Killed\n", "ended with 1: Killed"),
        (
            "double free or corruption (!prev)\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"
            "  <no Python frame>\nExtension modules: numpy._core (total: 1)\n",
            "ended with 1: double free or corruption (!prev)",
        ),
        ("", "ended with 1: "),
    ],
)
def test_an_aborted_contestant_tells_its_error(said: str, told: str) -> None:
    assert common.how_it_ended(1, said, 3.0) == told


def test_the_report_of_experts_finds_the_case_in_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for case, word in (("model", "tokens/s a GPU"), ("layer", "dense ÷ this")):
        kept = tmp_path / f"{case}.json"
        kept.write_bytes((reports.BARS.parent / "results" / f"experts_{case}.json").read_bytes())
        assert experts_run.main(["--report", str(kept)]) == 0
        assert word in capsys.readouterr().out


def test_no_number_stands_on_the_stroke_of_its_limit() -> None:
    figure, panels = reports.panels(1, 1, 3)
    values = {"near": 38.2, "far": 15.8, "beyond": 41.0, "without": 134.5}
    limits = {"near": 40.0, "far": 40.0, "beyond": 40.0, "without": 0.0}
    reports.draw_bars(panels[0][0], values, ["near"], "GiB", limits=limits)
    figure.canvas.draw()
    panel = panels[0][0]
    for number, (text, limit) in enumerate(zip(panel.texts, limits.values(), strict=True)):
        assert text.get_text() == f"{list(values.values())[number]:.1f}"
        box = text.get_window_extent()
        stroke = panel.transData.transform((limit, number))[0]
        assert not box.x0 <= stroke <= box.x1, text.get_text()
        assert box.x1 <= panel.get_window_extent().x1 + 1


@pytest.mark.slow
def test_a_palm_is_trained_under_limits_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "palm.json"
    assert main(["bench", "zero-offload", "--case", "tiny-palm", "--out", str(out)]) == 0
    (run,) = json.loads(out.read_text())["cases"]["tiny-palm"]["rows"]["ours"]
    assert "error" not in run and run["parameters"] > 64 * 50304
    assert run["steps"][-1]["loss"] < run["steps"][0]["loss"]
    assert "- trains: all steps done, loss lower at the end: " in out.with_suffix(".md").read_text()


def test_a_large_model_is_not_trained_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, on which the case would run for minutes")
    out = tmp_path / "result.json"
    assert main(["bench", "zero-offload", "--case", "6.7B-40", "--out", str(out)]) == 2
    assert "--case 6.7B-40 needs a GPU, and torch sees none here: --case tiny shows" in capsys.readouterr().err
    assert not out.exists()


def test_a_palm_has_the_sizes_of_its_preset() -> None:
    from benchmarks.zero_offload.decoder import shape_of

    assert shape_of("palm-16b") == (64, 4096, 16) and shape_of("6.7B") == (32, 4096, 32)
    kinds = {bar.kind for bar in verdict.bars_of(CASES["palm-16b-24"])}
    assert kinds == {"gpu_gib", "trains"}


def run_of(seconds: float, call: str | None) -> dict[str, object]:
    return {"rows": 4, "call": call, "steps": [{"seconds": seconds, "timed": True, "clip_factor": None}]}


def test_runs_of_different_calls_are_never_compared() -> None:
    """Two calls may be on two machines: a ratio across them says nothing."""
    ours, peer = [run_of(1.0, "a"), run_of(2.0, "b")], [run_of(3.0, "b"), run_of(9.0, "c")]
    assert verdict.ratios(ours, peer) == [1.5]
    assert verdict.ratios(ours, [run_of(3.0, "c")]) == []
    assert verdict.ratios([run_of(1.0, None)], [run_of(3.0, None)]) == []  # nobody knows which
    case = CASES["6.7B-24"]
    (bar, *_) = verdict.bars(case, {"ours": ours, "DeepSpeed ZeRO-3 offload": [run_of(9.0, "c")]})
    assert bar.endswith("no peer measured in the same call")
    found = {"ours": ours, "DeepSpeed ZeRO-3 offload": [run_of(9.0, "b")]}
    (bar, *_) = verdict.bars(case, found)
    assert "4.50 against DeepSpeed ZeRO-3 offload" in bar and bar.endswith("met")


@pytest.mark.parametrize(
    ("area", "module"),
    [
        ("attention", "attention.report"),
        ("cpu_adam", "cpu_adam"),
        ("longest_sequence", "longest_sequence.run"),
        ("pipeline", "pipeline.report"),
        ("specs", "specs.report"),
        ("zero_offload", "zero_offload.report"),
    ],
)
def test_committed_tables_and_verdicts_are_what_the_bars_give(
    area: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Path(reports.__file__).parent / "results"
    lines: list[str] = []
    monkeypatch.setattr(reports, "save", lambda figure, text, path: lines.extend(text))
    import_module(f"benchmarks.{module}").report(results / f"{area}.json")
    assert "\n".join(lines) + "\n" == (results / f"{area}.md").read_text()


def test_a_bar_is_judged_on_its_own_number_of_ranks() -> None:
    bar = reports.Bar(what="ours ({best}) against theirs", least=1.2, ranks=4)
    assert bar.line(1.25, 4, best="a") == "- ours (a) against theirs: 1.250 (bar 1.2): met"
    assert bar.line(1.1, 4, best="a") == "- ours (a) against theirs: 1.100 (bar 1.2): **not met**"
    assert bar.line(1.1, 2, best="a") == "- ours (a) against theirs: 1.100"
    assert reports.not_judged({"x": bar}, 2) == ["- the bars are for 4 ranks and are not judged on 2"]
    assert reports.not_judged({"x": bar, "y": reports.Bar(what="")}, 4) == []


def test_a_bar_names_only_cases_and_contestants_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = (reports.BARS / "zero_offload.toml").read_text()
    monkeypatch.setattr(reports, "BARS", tmp_path)
    file = tmp_path / "zero_offload.toml"
    for right, wrong, error in (
        (
            'than = ["plain torch"]',
            'than = ["plain"]',
            r"\[speed_without_limit\], than: 'plain' does not exist: use",
        ),
        (
            'cases = ["13B"]',
            'cases = ["14B"]',
            r"\[tflops_13b\], cases: '14B' does not exist: use one of 6.7B, ",
        ),
        (
            'kind = "tflops"',
            'kind = "flops"',
            r"\[tflops_13b\], kind: 'flops' does not exist: use one of faster, ",
        ),
        ("[predicted_seconds]", "[predicted_time]", r"has no table \[predicted_seconds\]: add it"),
    ):
        file.write_text(committed.replace(right, wrong, 1))
        with pytest.raises(TableError, match=error):
            read_bars()


def test_power_is_averaged_over_the_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lines = [
        f"2026/11/22 18:40:0{s}.000, {gpu}, {watts}, 1500"
        for s, gpu, watts in [(0, 0, 100), (1, 0, 600), (2, 0, 700), (1, 1, 500), (2, 1, 500), (3, 0, 100)]
    ]
    log = PowerLog()
    log.samples = list(parse([*lines, "2026/11/22 18:40:00.000, 0, [N/A], 1500", ""]))
    begin = log.samples[1].at
    assert log.mean(begin, begin + 1, 1) == {"watts": 650.0, "mhz": 1500.0}
    assert log.mean(begin, begin + 1, 2) == {"watts": 1150.0, "mhz": 1500.0}
    assert log.mean(begin, begin + 1, 3) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert log.mean(begin, begin + 1, 1) == {"watts": 500.0, "mhz": 1500.0}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["warm_commands", pytest.param("cold", marks=pytest.mark.slow)])
def test_two_versions_are_compared_by_turns(
    start: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This checkout beside itself: both versions run in processes of their own, from their own folders."""
    monkeypatch.setattr("benchmarks.power.PowerLog", PowerOfAnyTime)
    if start != "cold":
        request.getfixturevalue(start)
    out, tree = tmp_path / "found.json", Path(reports.__file__).parents[1]
    words = ["bench", "two-versions", "--before", str(tree), "--case", "2 layers of 128, zero 3"]
    assert main([*words, "--rounds", "2", "--steps", "2", "--warm-up", "1", "--out", str(out)]) == 0
    (runs,) = json.loads(out.read_text())["cases"].values()
    assert [len(run["seconds"]) for version in ("before", "now") for run in runs[version]] == [2] * 4
    assert all((run["watts"], run["mhz"]) == (500.0, 1500.0) for version in runs for run in runs[version])
    assert "| GPT-2 of transformers, 2 layers of 128, zero 3, eager |" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        main([*words[:3], str(tmp_path), "--out", str(out)])
    assert "git worktree add ../before COMMIT" in capsys.readouterr().err


def test_two_versions_have_joules_and_clocks_where_they_were_sampled(tmp_path: Path) -> None:
    """1 s at 300 W are 300 J; results from before watts were kept have the clock alone, and those of a CPU neither."""
    file, case = tmp_path / "found.json", "2 layers of 128, data"
    for sampled, cells in (
        ({"watts": 300.0, "mhz": 1700.0}, "| J a step, before and now | MHz, before and now |"),
        ({"mean_mhz": 1700.0}, "| at most 1.01 | MHz, before and now |"),
        ({"mean_mhz": None}, "| at most 1.01 |"),
    ):
        runs = {"before": [dict(seconds=[1.0], **sampled)], "now": [dict(seconds=[1.0], **sampled)]}
        commits = dict.fromkeys(runs, "a")
        file.write_text(json.dumps(dict(machine={}, commits=commits, cases={case: runs})))
        assert main(["bench", "two-versions", "--report", str(file)]) == 0
        head, _, row = [line for line in file.with_suffix(".md").read_text().splitlines() if line.startswith("|")]
        assert head.endswith(cells) and head.count("|") == row.count("|")
        assert ("300.0, 300.0" in row) == ("watts" in sampled) and ("1700, 1700" in row) == (1700.0 in sampled.values())


def test_a_version_that_takes_longer_than_the_bar_is_said() -> None:
    from benchmarks import two_versions

    runs = {"before": [{"seconds": [1.0, 1.0]}], "now": [{"seconds": [1.1, 1.1]}]}
    assert two_versions.ratio(runs) == pytest.approx(1.1)
    assert two_versions.line("x", {**runs, "now": [{"seconds": [], "error": "gone"}]}).endswith("(gone)")
