"""`python -m hybridspec.demo.inflate`: plan, files, refusals, and what a stopped run leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from padded_kit import SMALL, open_pair, sizes_of, write_source

from hybridspec.artifacts.digest import model_digest
from hybridspec.demo import inflate
from hybridspec.demo.padded_pair import PaddedPair
from hybridspec.errors import HybridSpecError, ModelError
from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.loading import load_pair
from hybridspec.reference.random_pair import PairShape

FP32 = ["--dtype", "float32"]
# Divides the full shape, as preset lab does, with few weights of its own.
LAB_LIKE = PairShape(
    hidden_size=256, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=256,
    gdn_key_heads=2, gdn_value_heads=4, gdn_key_dim=128, gdn_value_dim=128,
    num_experts=256, experts_per_token=8, expert_width=2,
    drafter_heads=4, drafter_kv_heads=1, drafter_head_dim=128,
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("pair") / "source")


@pytest.fixture(scope="module")
def lab_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("lab") / "source", LAB_LIKE)


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_dry_run_of_the_full_shape_prints_the_plan_and_writes_nothing(
    lab_like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inflate.run([str(lab_like), "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "target: 693 tensors, 34.661 B parameters, 69.321 GB in 21 files" in text
    assert "drafter: 91 tensors, 0.474 B parameters, 0.948 GB in 1 files" in text
    assert "layers.N.mlp.experts.gate_up_proj [256, 1024, 2048] bfloat16" in text
    assert "needs 70.269 GB" in text
    assert left_behind(tmp_path) == []


def test_json_plan_has_every_tensor(lab_like: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inflate.run([str(lab_like), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parts"]["target"]["tensors"] == len(plan["tensors"]["target"]) == 693
    assert plan["tensors"]["drafter"]["fc.weight"] == [2048, 5 * 2048]
    assert plan["live_layers"] == [0, 10, 20, 31]
    assert len(plan["router_layers"]) == 40


def test_shards_hold_what_the_generator_yields(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(source), "--out", str(out), *FP32, "--shard-gb", "0.003", *sizes_of(SMALL)]
    assert inflate.run(command) == 0
    assert left_behind(tmp_path) == ["out"]
    pair = open_pair(source, SMALL)
    for part, weights in (("target", pair.target_weights()), ("drafter", pair.drafter_weights())):
        written = Checkpoint(out / part, torch.device("cpu"))
        assert set(written.names()) == set(weights.names())
        for name, tensor in weights:
            found = written.tensor(name, tuple(tensor.shape), tensor.dtype)
            assert torch.equal(found, tensor), name
            assert torch.equal(weights.tensor(name, found.shape, tensor.dtype), tensor), name
    assert len(list((out / "target").glob("*.safetensors"))) > 3
    index = json.loads((out / "target" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == pair.target_weights().num_bytes
    with pytest.raises(ModelError, match="one of shape"):
        pair.target_weights().tensor("lm_head.weight", (1, 1), torch.float32)
    with pytest.raises(ModelError, match="no such tensor"):
        pair.target_weights().tensor("lm_head.bias", (1,), torch.float32)


@pytest.mark.gpu
def test_tensors_made_on_a_card_have_the_same_bits(source: Path) -> None:
    here = open_pair(source, SMALL)
    card = PaddedPair.open(source, SMALL, dtype=torch.float32, device=torch.device("cuda"))
    for part in ("target_weights", "drafter_weights"):
        for (name, ours), (_, theirs) in zip(
            getattr(here, part)(), getattr(card, part)(), strict=True
        ):
            assert theirs.is_cuda, name
            assert torch.equal(ours, theirs.cpu()), name


def test_configs_name_the_source_and_how_it_was_padded(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(source), "--out", str(out), *FP32, "--no-weights", *sizes_of(SMALL)]
    (source / "target" / "tokenizer_config.json").write_text("{}")
    (source / "prompts.jsonl").write_text("")
    assert inflate.run(command) == 0
    for part in ("target", "drafter"):
        config = json.loads((out / part / "config.json").read_text())
        record = config["hybridspec_padding"]
        assert record["source"] == {
            "target_sha256": model_digest(source / "target"),
            "drafter_sha256": model_digest(source / "drafter"),
        }
        assert record["copy_scales"] == [2.0, 2.0]
        assert record["shape"]["hidden"] == 512
    assert (out / "target" / "tokenizer_config.json").is_file()
    assert (out / "prompts.jsonl").is_file()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load_pair(out / "target", out / "drafter")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--set", "hidden=600"], 3, "9.375 times the pair's 64; a whole number"),
        (["--set", "hidden=32"], 3, "hidden = 32, smaller than the pair's 64"),
        (["--set", "hidden=192"], 3, "leaves no dimension to hold down the added vocabulary"),
        (["--set", "layers=3"], 3, "layers = 3, smaller than the pair's 4"),
        (["--set", "vocab=100"], 3, "vocab = 100, smaller than the pair's 320"),
        (["--set", "experts=16"], 3, "experts = 8 and the shape 16; padding cannot change it"),
        (["--set", "head_dim=64"], 3, "head_dim = 32 and the shape 64"),
        (["--set", "draft_target_layers=8"], 3, "at most all but the last"),
        (["--set", "heads=5"], 2, "heads = 5 must be a multiple of kv_heads = 2"),
        (["--set", "gdn_key_heads=8"], 3, "the pair has 2: use more heads or fewer groups"),
        (["--set", "depth=4"], 2, "use one of layers, hidden"),
        (["--set", "layers=many"], 2, "is not FIELD=INTEGER"),
        (["--set", "layers=0"], 2, "must be >= 1"),
        (["--set", "expert_width=40000000"], 4, "GB are free at"),
        (["--dtype", "bfloat16"], 3, "use --dtype float32"),
    ],
)
def test_refusals_say_value_rule_and_remedy(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    code: int,
    words: str,
) -> None:
    out = tmp_path / "out"
    command = [str(source), "--out", str(out), *FP32, *sizes_of(SMALL), *flags]
    assert inflate.run(command) == code
    error = capsys.readouterr().err.strip()
    assert words in error
    assert error.count("\n") == 0
    assert left_behind(tmp_path) == []


def test_no_pair_and_folders_in_use_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inflate.run([str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 3
    out = tmp_path / "used"
    out.mkdir()
    (out / "mine.txt").write_text("keep me")
    command = [str(source), *FP32, *sizes_of(SMALL), "--out"]
    assert inflate.run([*command, str(out)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert left_behind(out) == ["mine.txt"]
    with pytest.raises(SystemExit) as stop:
        inflate.run([str(source)])
    assert stop.value.code == 2
    other = tmp_path / "mixed"
    shutil.copytree(source, other)
    file = other / "drafter" / "config.json"
    file.write_text(file.read_text().replace('"hidden_size": 64', '"hidden_size": 128'))
    with pytest.raises(HybridSpecError, match="made for another target"):
        open_pair(other, SMALL)


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    code = (
        "import resource, sys; from hybridspec.demo import inflate;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "sys.exit(inflate.run(sys.argv[1:]))"
    )
    command = [str(source), "--out", str(tmp_path / "out"), *FP32, *sizes_of(SMALL)]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 4, done.stderr
    assert "cannot be written" in done.stderr
    assert left_behind(tmp_path) == []


def test_ctrl_c_removes_what_was_written(source: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "from-a-killed-run").write_text("")
    big = ["--set", "expert_width=4096", "--set", "layers=48"]
    running = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.demo.inflate", str(source), "--out",
         str(tmp_path / "out"), *FP32, *sizes_of(SMALL), *big],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial/target/*.safetensors")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130, error
    assert "interrupted:" in error
    assert "Traceback" not in error
    assert left_behind(tmp_path) == []
