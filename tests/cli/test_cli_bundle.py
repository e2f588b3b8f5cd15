"""`hybridspec bundle ...` on the committed demonstration bundle and on what goes wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridspec.artifacts.bundle import CostPart, load_bundle, write_calibration, write_cost
from hybridspec.artifacts.tables import StepCostTable, TemperatureTable
from hybridspec.cli.main import run
from hybridspec.costmodels.anchors import Anchors, anchors_of_table, write_anchors

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "benchmarks" / "results" / "cpu_demo_bundle"

pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason="no demonstration bundle (an sdist)")

DEMO_ID = "a74d4b2b3880d4cceead2f13c07677d753a43f2f73b3af1f85c94bd4a68d73a6"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `hybridspec bundle` in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = run(["bundle", *map(str, arguments)])
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return code, written.out, written.err

    return call


def demo_cost() -> CostPart:
    cost = load_bundle(DEMO).cost
    assert cost is not None
    return cost


def write_machine(folder: Path, step: StepCostTable, **identity: Any) -> Path:
    """A bundle with the demonstration's cost part on another machine."""
    cost = demo_cost()
    write_cost(
        folder,
        identity=replace(cost.identity, **identity),
        step=step,
        samples=cost.samples.slice(0, 0),
        experts=cost.experts.slice(0, 0),
        throughput=None,
        provenance={},
    )
    return folder


def lengths_of(anchors: Anchors, lengths: tuple[int, ...]) -> Anchors:
    kept = np.isin(anchors.lengths, lengths)
    arrays = {
        name: value[kept] for name, value in vars(anchors).items() if isinstance(value, np.ndarray)
    }
    return replace(anchors, **arrays)


def faster(step: StepCostTable, factor: float, power: float) -> StepCostTable:
    ratio = factor * np.maximum(np.arange(17), 1.0) ** power
    return replace(
        step,
        latency_us=step.latency_us * ratio,
        latency_p10_us=step.latency_p10_us * ratio,
        latency_p90_us=step.latency_p90_us * ratio,
        draft_us=step.draft_us * factor,
    )


def test_show_for_people_and_for_programs(command: Any) -> None:
    code, out, err = command("show", DEMO)
    assert code == 0
    assert DEMO_ID in out
    assert "amd-epyc (ram), reference 0.1.0, float32" in out
    assert "batch 1, context 96" in err
    code, out, _ = command("show", DEMO, "--json")
    shown = json.loads(out)
    assert shown["content_id"] == DEMO_ID
    assert shown["cost"]["source"] == "measured"
    assert np.shape(shown["cost"]["latency_us"]) == (1, 2, 17)
    fit, slope = shown["cost"]["expert_fit"], shown["cost"]["expert_slope_us"]
    assert 0 < fit["slope_low_us"] < slope < fit["slope_high_us"] < 2 * slope
    assert [row["verify_length"] for row in fit["intercept_us"]] == [2, 4, 8, 16]
    assert set(fit["largest_residual_share_by_length"]) == {"2", "4", "8", "16"}
    assert shown["calibration"]["identity"]["block_size"] == 16
    assert {row["split"] for row in shown["calibration"]["held_out"]} == {"test"}


def test_verify_passes_and_names_what_is_wrong(command: Any, tmp_path: Path) -> None:
    code, out, _ = command("verify", DEMO, "--json")
    assert code == 0
    assert json.loads(out)["warnings"] == []
    broken = shutil.copytree(DEMO, tmp_path / "broken")
    table = next((broken / "cost").glob("step-*"))
    table.write_bytes(table.read_bytes()[:-1])
    code, out, err = command("verify", broken)
    assert (code, out) == (3, "")
    assert err.startswith("error: ")
    assert "the manifest says" in err
    assert len(err.splitlines()) == 1
    code, _, err = command("verify", tmp_path / "none")
    assert (code, "does not exist" in err) == (3, True)


def test_a_file_of_a_bundle_is_no_bundle(command: Any) -> None:
    for verb in ("show", "verify"):
        code, out, err = command(verb, DEMO / "manifest.json")
        assert (code, out) == (3, "")
        assert (
            f"manifest.json is a file; a bundle is a folder: name the one that it lies in, {DEMO}"
            in err
        )


def test_verify_refuses_falling_costs_unless_allowed(command: Any, tmp_path: Path) -> None:
    step = demo_cost().step
    fall = faster(step, 1.0, 0.0)
    for values in (fall.latency_us, fall.latency_p10_us, fall.latency_p90_us):
        values[0, 0, 16] *= 0.5
    bundle = write_machine(tmp_path / "b", fall)
    code, _, err = command("verify", bundle)
    assert (code, "costs must not fall" in err) == (5, True)
    code, _, err = command("verify", bundle, "--allow", "falling-cost")
    assert (code, "length 16 costs" in err) == (0, True)
    code, _, err = command("verify", bundle, "--allow", "everything")
    assert (code, "is no field" in err) == (2, True)


@pytest.mark.parametrize(
    "option", [("--threads", "1"), ("--device", "cpu"), ("--dtype", "float32")]
)
def test_verify_takes_no_placement_where_it_compares_with_none(
    command: Any, option: tuple[str, str]
) -> None:
    code, out, err = command("verify", DEMO, *option)
    assert (code, out) == (2, "")
    assert f"add --here, or leave {option[0]} out" in err


def test_verify_here_refuses_another_machine(command: Any, tmp_path: Path) -> None:
    elsewhere = write_machine(tmp_path / "b", demo_cost().step, device="pdp-11")
    code, _, err = command("verify", elsewhere, "--here")
    assert code == 3
    assert "device: the bundle was made for 'pdp-11', here it is" in err
    code, _, err = command("verify", elsewhere, "--here", "--allow", "device")
    assert "architecture" not in err
    assert (code, "figures may be off" in err) == (0, True), err
    code, _, err = command("verify", DEMO, "--drafter", "x")
    assert (code, "--drafter is given without --target" in err) == (2, True)


def test_diff_tells_same_from_different(command: Any, tmp_path: Path) -> None:
    code, out, _ = command("diff", DEMO, DEMO)
    assert (code, "the same bundle" in out) == (0, True)
    other = write_machine(tmp_path / "b", faster(demo_cost().step, 2.0, 0.0), device="other")
    code, out, _ = command("diff", DEMO, other)
    assert code == 0
    assert "calibration: only in A" in out
    assert "device: amd-epyc -> other" in out
    assert "largest +100.0%" in out
    code, out, _ = command("diff", DEMO, other, "--json")
    found = json.loads(out)
    assert not found["same"]
    assert found["cost"]["latency"]["median_share"] == pytest.approx(1.0)


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A measured source with three contexts."""
    step = demo_cost().step
    three = replace(
        step,
        context_tokens=np.array([96, 224, 448]),
        **{
            name: np.concatenate([getattr(step, name), 1.1 * getattr(step, name)[:, -1:]], axis=1)
            for name in ("latency_us", "latency_p10_us", "latency_p90_us", "draft_us")
        },
    )
    return write_machine(tmp_path / "wide", three)


def narrow(step: StepCostTable, columns: list[int]) -> StepCostTable:
    return replace(
        step,
        context_tokens=step.context_tokens[columns],
        latency_us=step.latency_us[:, columns],
        latency_p10_us=step.latency_p10_us[:, columns],
        latency_p90_us=step.latency_p90_us[:, columns],
        draft_us=step.draft_us[:, columns],
    )


def test_transfer_marks_its_costs_and_their_source(
    command: Any, tmp_path: Path, wide: Path
) -> None:
    source = load_bundle(wide).cost
    assert source is not None
    target = faster(source.step, 0.5, 0.05)
    few = write_machine(tmp_path / "few", narrow(target, [0, 2]), device="fast-cpu")
    out = tmp_path / "out"
    code, text, _ = command("transfer", wide, "--anchors", few, "-o", out, "--dry-run")
    assert (code, text.startswith("would transfer 17 of 51 cells"), out.exists()) == (
        0,
        True,
        False,
    )
    code, text, _ = command("transfer", wide, "--anchors", few, "-o", out, "--json")
    assert code == 0
    done = json.loads(text)
    assert done["cells_transferred"] == 17
    moved = load_bundle(out).cost
    assert moved is not None
    assert moved.transfer is not None
    assert moved.transfer.source == source.content_id
    assert moved.identity.device == "fast-cpu"
    assert moved.anchors is not None
    assert moved.anchors.num_rows == 34
    np.testing.assert_allclose(moved.step.latency_us, target.latency_us, rtol=0.02)
    assert np.all(moved.step.latency_p10_us[0, 1] < 0.99 * moved.step.latency_us[0, 1])
    _, shown, _ = command("show", out)
    assert "TRANSFERRED from amd-epyc" in shown
    _, _, warned = command("verify", out)
    assert "costs are transferred from amd-epyc with 34 anchors" in warned
    code, _, err = command("transfer", out, "--anchors", few, "-o", tmp_path / "again")
    assert (code, "two transfers" in err) == (3, True)
    code, _, err = command("transfer", wide, "--anchors", out, "-o", tmp_path / "again")
    assert (code, "anchors must be measured" in err) == (3, True)
    code, _, err = command("transfer", wide, "--anchors", few, "-o", few)
    assert (code, "holds measured costs" in err) == (3, True)


def test_transfer_keeps_the_calibration_of_the_source(command: Any, tmp_path: Path) -> None:
    few = write_machine(tmp_path / "few", demo_cost().step, device="other")
    code, _, err = command("transfer", DEMO, "--anchors", few, "-o", tmp_path / "out", "-q")
    assert code == 0
    assert "the throughput is not fitted" in err
    copied, original = load_bundle(tmp_path / "out").calibration, load_bundle(DEMO).calibration
    assert copied is not None
    assert original is not None
    assert copied.content_id == original.content_id


def test_transfer_refuses_what_it_cannot_know(command: Any, tmp_path: Path) -> None:
    step, out = demo_cost().step, tmp_path / "out"
    gpu = write_machine(tmp_path / "gpu", step, memory_class="hbm", device="nvidia-h200")
    code, _, err = command("transfer", DEMO, "--anchors", gpu, "-o", out)
    assert (code, "across classes" in err) == (3, True)
    fp8 = write_machine(tmp_path / "fp8", step, quantization="fp8")
    code, _, err = command("transfer", DEMO, "--anchors", fp8, "-o", out)
    assert (code, "quantization: the source" in err) == (3, True)
    code, _, err = command("transfer", DEMO, "--anchors", tmp_path / "none", "-o", out)
    assert (code, "does not exist" in err) == (4, True)
    wild = faster(step, 1.0, 0.0)
    for values in (wild.latency_us, wild.latency_p10_us, wild.latency_p90_us):
        values[:, :, 1:] *= np.where(np.arange(1, 17) % 2, 1.0, 1.6)
    noisy = write_machine(tmp_path / "wild", wild, device="other")
    code, _, err = command("transfer", DEMO, "--anchors", noisy, "-o", out)
    assert (code, "costs must not fall" in err) == (3, True), err
    steep = faster(step, 1.0, 0.0)
    for values in (steep.latency_us, steep.latency_p10_us, steep.latency_p90_us):
        values *= 1.6 ** (np.arange(17) // 4)
    steep_at = write_machine(tmp_path / "steep", steep, device="other")
    code, _, err = command("transfer", DEMO, "--anchors", steep_at, "-o", out)
    assert (code, "are off by" in err) == (5, True), err
    every = anchors_of_table(demo_cost().identity, step)
    write_anchors(tmp_path / "three.parquet", lengths_of(every, (0, 1, 8, 16)))
    code, _, err = command("transfer", DEMO, "--anchors", tmp_path / "three.parquet", "-o", out)
    assert (code, "one factor for all is refused" in err) == (5, True), err
    write_anchors(tmp_path / "four.parquet", lengths_of(every, (0, 1, 4, 8, 16)))
    code, _, err = command(
        "transfer", DEMO, "--anchors", tmp_path / "four.parquet", "-o", out, "--dry-run"
    )
    assert code == 0, err
    assert not out.exists()


@pytest.mark.parametrize("name", ["b.tar.gz", "b.zip"])
def test_export_and_import_an_archive(command: Any, tmp_path: Path, name: str) -> None:
    code, out, _ = command("export", DEMO, "-o", tmp_path / name, "--json")
    assert (code, json.loads(out)["content_id"]) == (0, DEMO_ID)
    code, out, _ = command("import", tmp_path / name, "-o", tmp_path / "got", "--json")
    assert (code, json.loads(out)["written"]) == (0, True)
    assert load_bundle(tmp_path / "got").content_id == DEMO_ID
    code, out, _ = command("import", tmp_path / name, "-o", tmp_path / "got", "--json")
    assert (code, json.loads(out)["written"]) == (0, False)
    other = write_machine(tmp_path / "other", demo_cost().step)
    code, _, err = command("import", tmp_path / name, "-o", other)
    assert (code, "holds another bundle" in err) == (3, True)
    assert command("import", tmp_path / name, "-o", other, "--replace")[0] == 0
    assert load_bundle(other).content_id == DEMO_ID
    (tmp_path / name).write_bytes(b"PK")
    code, _, err = command("import", tmp_path / name, "-o", tmp_path / "new")
    assert (code, (tmp_path / "new").exists()) == (3, False), err


def test_export_for_sglang(command: Any, tmp_path: Path) -> None:
    made = tmp_path / "made"
    shutil.copytree(DEMO, made)
    part = load_bundle(DEMO).calibration
    assert part is not None
    kept = ("identity", "hazard", "routing", "reliability", "metrics", "provenance")
    write_calibration(
        made,
        **{name: getattr(part, name) for name in kept},
        temperatures=TemperatureTable(np.ones(15), np.zeros(15), np.zeros(15), num_rounds=400),
    )
    code, out, err = command("export", made, "--format", "sglang", "-o", tmp_path, "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert facts["sts_rounds"] == 400
    assert facts["sps_context_tokens"] == 224
    assert len(facts["sts_temperatures"]) == 15
    assert "hold no identity" in err
    sps = json.loads((tmp_path / "dspark_sps.json").read_text())
    assert set(sps) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    # Schema 1.0 held no temperatures.
    code, _, err = command("export", DEMO, "--format", "sglang", "-o", tmp_path / "old")
    assert (code, "before bundles held temperatures" in err) == (0, True)
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["dspark_sps.json"]
    code, _, err = command("export", DEMO, "--format", "sglang", "-o", tmp_path, "--context", 7)
    assert (code, "context 7 was not measured" in err) == (3, True)
    code, _, err = command("export", DEMO, "-o", tmp_path / "a.zip", "--context", 96)
    assert (code, "--context is for --format sglang" in err) == (2, True)
    code, _, err = command("export", DEMO, "-o", tmp_path / "a.rar")
    assert (code, "known endings" in err) == (2, True)


def test_push_and_pull_folders(command: Any, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/share/b"
    code, out, _ = command("push", DEMO, place, "--json")
    assert (code, json.loads(out)["content_id"]) == (0, DEMO_ID)
    assert (tmp_path / "share" / "b" / "README.md").read_text().startswith("---\ntags:")
    assert command("push", DEMO, place)[0] == 0
    code, out, _ = command("pull", place, "-o", tmp_path / "got")
    assert (code, load_bundle(tmp_path / "got").content_id) == (0, DEMO_ID)
    other = write_machine(tmp_path / "other", demo_cost().step)
    code, _, err = command("push", other, place)
    assert (code, "holds another bundle" in err) == (3, True)
    assert command("push", other, place, "--replace")[0] == 0
    assert load_bundle(tmp_path / "share" / "b").content_id == load_bundle(other).content_id
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").write_text("x")
    code, _, err = command("push", DEMO, tmp_path / "papers")
    assert (code, "holds 'thesis.tex' and no bundle" in err) == (2, True)
    code, _, err = command("push", DEMO, DEMO)
    assert (code, "is the bundle itself" in err) == (2, True)
    code, _, err = command("push", DEMO, tmp_path / "p", "--private")
    assert (code, "--private is for hf://" in err) == (2, True)
    code, _, err = command("pull", "s3://bucket", "-o", tmp_path / "n")
    assert (code, "known are hf://" in err) == (2, True)


def test_pull_offline_is_an_environment_error(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYBRIDSPEC_OFFLINE", "1")
    code, _, err = command("pull", "hf://a/b", "-o", tmp_path / "n")
    assert (code, "OFFLINE is set" in err) == (4, True)


def test_verify_here_says_what_it_compared(command: Any, tmp_path: Path) -> None:
    part, bare = load_bundle(DEMO).calibration, tmp_path / "bare"
    assert part is not None
    kept = ("identity", "hazard", "routing", "reliability", "metrics", "provenance")
    write_calibration(bare, **{name: getattr(part, name) for name in kept})
    code, out, err = command("verify", bare, "--here")
    assert code == 0, err
    assert "fits this pair" in out
    assert "this machine" not in out
    assert f"run `hybridspec profile-latency --out {bare}` for this pair" in err
