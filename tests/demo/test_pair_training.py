from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridspec.demo.optim import Muon, StageClock
from hybridspec.demo.presets import get_preset
from hybridspec.demo.stepping import Stepper
from hybridspec.demo.train import main
from hybridspec.errors import UsageError


def digests(folder: Path) -> dict[str, str]:
    return {
        str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(folder.rglob("*"))
        if f.is_file() and f.name != "train_log.json"
    }


def test_training_is_repeatable_and_lowers_the_loss(corpus_file: Path, tmp_path: Path) -> None:
    common = ["--preset", "micro-test", "--corpus", str(corpus_file), "--device", "cpu"]
    common += ["--target-steps", "30", "--drafter-steps", "15"]
    main([*common, "--out", str(tmp_path / "a")])
    for stage in ("tokenizer", "target", "drafter"):
        main([*common, "--out", str(tmp_path / "b"), "--stage", stage])
    first = digests(tmp_path / "a")
    assert first == digests(tmp_path / "b")
    assert {"target/model.safetensors", "drafter/model.safetensors"} < first.keys()
    log = json.loads((tmp_path / "a" / "train_log.json").read_text())
    assert log["target"]["steps"] == 30
    assert log["drafter"]["steps"] == 15
    # A uniform guess costs ln(384) = 5.95 nats.
    assert all(loss < 5.5 for loss in log["target"]["held_out_nats"].values())
    other = ["--seed", "4", "--tokenizer", str(tmp_path / "a" / "target"), "--stage", "target"]
    main([*common, "--out", str(tmp_path / "c"), *other])
    changed = digests(tmp_path / "c")
    assert changed["target/tokenizer.json"] == first["target/tokenizer.json"]
    assert changed["target/model.safetensors"] != first["target/model.safetensors"]


def test_learning_rate_warms_up_stays_and_falls() -> None:
    clock = StageClock(steps=1000)
    rates = []
    for clock.done in (0, 50, 300, 749, 1000):
        rates.append(clock.rate(0.5))
    assert rates[0] < 0.02 < rates[1] < 0.6
    assert rates[2] == 1.0
    assert rates[3] == pytest.approx(0.5, abs=0.01)
    assert 0 < rates[4] <= 0.02


def test_a_time_limit_ends_a_stage_and_moves_its_schedule() -> None:
    clock = StageClock(steps=10**9, limit_s=1.0)
    clock.started -= 0.5
    assert 0.4 < clock.progress() < 0.9
    clock.started -= 1.0
    assert clock.progress() == 1.0


@pytest.mark.parametrize(
    "assignment", ["layers=6", "vocab=many", "colour=1", "target_layer_ids=0,3", "experts=1"]
)
def test_impossible_overrides_are_refused(assignment: str) -> None:
    with pytest.raises(UsageError):
        get_preset("micro-test", [assignment])


def test_overrides_keep_their_types() -> None:
    preset = get_preset("demo", ["layers=4", "target_layer_ids=0,2", "muon_lr=0.01"])
    assert (preset.layers, preset.target_layer_ids, preset.muon_lr) == (4, (0, 2), 0.01)


@pytest.mark.parametrize("fault", ["none", "raises", "disagrees"])
def test_a_broken_compiled_loss_falls_back_to_the_eager_one(fault: str) -> None:
    module = torch.nn.Linear(16, 16)
    optimiser = Muon(module.named_parameters(), muon_lr=0.02, adam_lr=0.01, weight_decay=0.0)

    def eager(x: Tensor) -> Tensor:
        return (module(x) - x).square().mean()

    def compiled(x: Tensor) -> Tensor:
        if fault == "raises":
            raise RuntimeError("no compiler")
        return eager(x) * (2.0 if fault == "disagrees" else 1.0)

    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    stepper = Stepper(
        "linear", module, optimiser, eager=eager, compiled=compiled, inputs=(x,),
        device=torch.device("cpu"),
    )  # fmt: skip
    first = float(eager(x))
    with stepper.running():
        for _ in range(60):
            stepper.step(1.0, x)
    assert stepper.form == ("compiled" if fault == "none" else "eager")
    assert float(stepper.loss) < 0.3 * first
