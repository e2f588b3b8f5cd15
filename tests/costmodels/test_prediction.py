"""From files to predicted rates: costs by hand, hazards of bundles and models, what-ifs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from trace_kit import (
    LATENCY_US,
    as_recording,
    make_identity,
    make_trace,
    write_curve,
    write_trace,
)

from hybridspec.artifacts.bundle import write_calibration
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.rounds import with_identity
from hybridspec.costmodels.curve import CURVE_SCHEMA, read_curve
from hybridspec.costmodels.memory import GdnShape, rollback_memory
from hybridspec.costmodels.prediction import load_price, predict
from hybridspec.costmodels.profile import profile_gains, read_profile, verdict
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import BundleError, NotEnoughData, UsageError

NAMES = ("ar", "fixed-16", "hybridspec", "oracle")


def overall(rows: Any) -> dict[str, dict[str, Any]]:
    return {
        row["policy"]: row
        for row in rows.to_pylist()
        if (row["category"], row["loops"]) == ("all", "outside")
    }


def test_a_curve_is_replayed_and_what_if_scales_with_it(tmp_path: Path) -> None:
    stream = open_trace(write_trace(tmp_path / "t.parquet"))
    here = load_price(write_curve(tmp_path / "here.json"))
    slow = [2.0 * value for value in LATENCY_US]
    there = load_price(write_curve(tmp_path / "there.json", latency_us=slow, draft_us=1600.0))
    counted: list[int] = []
    found = predict(stream, [here, there], NAMES, hazards="raw", progress=counted.append)
    assert sum(counted) == 16 * 12
    first, second = (overall(outcome.rows) for outcome in found.outcomes)
    assert first["ar"]["tokens_per_s"] == pytest.approx(250.0)
    for name in NAMES:
        assert second[name]["tokens_per_s"] == pytest.approx(first[name]["tokens_per_s"] / 2)
        assert second[name]["mean_length"] == first[name]["mean_length"]
    assert first["ar"]["rounds"] == 16 * 11
    assert first["hybridspec"]["tokens_per_s"] > first["fixed-16"]["tokens_per_s"]
    assert first["oracle"]["of_oracle"] == 1.0
    assert found.hazards == "raw"


def test_a_curve_by_experts_prices_each_round_by_its_own(tmp_path: Path) -> None:
    stream = open_trace(write_trace(tmp_path / "t.parquet"))
    curve = write_curve(
        tmp_path / "c.json", latency_us=None, base_us=3000.0, expert_us=50.0, layers=40
    )
    found = predict(stream, [load_price(curve)], (*NAMES, "oracle-cost"), hazards="raw")
    (outcome,) = found.outcomes
    # A plain round activates top-k experts in every layer.
    assert outcome.table.latency_us[0, 0, 0] == pytest.approx(3000.0 + 50.0 * 2)
    assert outcome.table.latency_us[0, 0, 1] == pytest.approx(3000.0 + 800.0 + 50.0 * 2)
    assert outcome.table.expert_slope_us == pytest.approx(50.0 / 40)
    assert found.has_routes
    bare = open_trace(write_trace(tmp_path / "bare.parquet", make_trace(routes=False)))
    with pytest.raises(BundleError, match="no recorded routes say how many"):
        predict(bare, [load_price(curve)], NAMES, hazards="raw")
    by_length = load_price(write_curve(tmp_path / "l.json"))
    with pytest.raises(UsageError, match="policies by true-experts need recorded routes"):
        predict(bare, [by_length], ("oracle-cost",), hazards="raw")
    left = predict(bare, [by_length], ("ar", "oracle-cost"), hazards="raw", drop_unroutable=True)
    assert set(overall(left.outcomes[0].rows)) == {"ar"}


def test_bundles_give_costs_and_hazards_of_their_own_pair(tmp_path: Path) -> None:
    from bundle_kit import make_bundle  # pyright: ignore[reportMissingImports]

    make_bundle(tmp_path / "bundle")
    bundle = load_price(tmp_path / "bundle")
    path = write_trace(tmp_path / "t.parquet")
    found = predict(open_trace(path), [bundle], NAMES, batch=4)
    assert found.hazards == f"beta-position-isotonic of {tmp_path / 'bundle'}"
    assert found.warnings == ()
    assert overall(found.outcomes[0].rows)["ar"]["batch"] == 4
    curve = load_price(write_curve(tmp_path / "c.json"))
    by_flag = predict(open_trace(path), [curve], NAMES, hazards=str(tmp_path / "bundle"))
    assert by_flag.hazards == found.hazards
    stranger = with_identity(make_trace(), make_identity(target_digest="e" * 64))
    other = open_trace(write_trace(tmp_path / "other.parquet", stranger))
    with pytest.raises(BundleError, match="target_digest = 'eee"):
        predict(other, [bundle], NAMES)
    # An older recording does not name its models: nothing can be checked, and it is said.
    pq.write_table(as_recording(make_trace()), tmp_path / "old.parquet")
    old = predict(open_trace(tmp_path / "old.parquet"), [bundle], NAMES)
    assert "does not name its models" in old.warnings[0]


def test_refusals_of_prediction(tmp_path: Path) -> None:
    stream = open_trace(write_trace(tmp_path / "t.parquet"))
    curve = load_price(write_curve(tmp_path / "c.json"))
    with pytest.raises(UsageError, match="split 'dev' is unknown"):
        predict(stream, [curve], NAMES, split="dev")
    with pytest.raises(UsageError, match="no hazard model is called 'magic'"):
        predict(stream, [curve], NAMES, hazards="magic")
    with pytest.raises(BundleError, match="beyond the largest measured batch 1"):
        predict(stream, [curve], NAMES, hazards="raw", batch=2)
    trace = make_trace()
    calibration = trace.filter(np.asarray(trace["split"].to_pylist()) == "calibration")
    only = open_trace(write_trace(tmp_path / "only.parquet", calibration))
    with pytest.raises(NotEnoughData, match="no round in split 'test'"):
        predict(only, [curve], NAMES, hazards="raw")
    held_out = trace.filter(np.asarray(trace["split"].to_pylist()) == "test")
    unfit = open_trace(write_trace(tmp_path / "unfit.parquet", held_out))
    with pytest.raises(NotEnoughData, match="record both splits"):
        predict(unfit, [curve], NAMES, hazards="raw")
    few = open_trace(write_trace(tmp_path / "few.parquet", make_trace(prompts=6, rounds=5)))
    with pytest.raises(NotEnoughData, match="16 calibration rounds"):
        predict(few, [curve], NAMES, hazards="raw")
    with pytest.raises(BundleError, match=r"manifest\.json does not exist"):
        load_price(tmp_path)


def test_hazards_that_no_engine_evaluates_come_with_a_warning(tmp_path: Path) -> None:
    stream = open_trace(write_trace(tmp_path / "t.parquet"))
    curve = load_price(write_curve(tmp_path / "c.json"))
    for name in ("beta", "distilled", "boosted"):
        assert not predict(stream, [curve], NAMES, hazards=name).warnings
    (warning,) = predict(stream, [curve], NAMES, hazards="cells").warnings
    assert "which a bundle does not hold" in warning
    from bundle_kit import (  # pyright: ignore[reportMissingImports]
        calibration_arguments,
        make_bundle,
    )

    trees = fit_calibration(make_trace(), model="boosted", resamples=20).trees
    make_bundle(tmp_path / "bundle")
    write_calibration(tmp_path / "bundle", **(calibration_arguments() | {"trees": trees}))
    found = predict(stream, [load_price(tmp_path / "bundle")], NAMES)
    assert found.hazards.startswith("boosted trees (32) of ")
    assert not found.warnings


def test_figures_of_the_rounds_that_were_fitted_on_come_with_a_warning(tmp_path: Path) -> None:
    stream = open_trace(write_trace(tmp_path / "t.parquet"))
    curve = load_price(write_curve(tmp_path / "c.json"))
    assert not predict(stream, [curve], NAMES, hazards="raw").warnings
    for split in ("calibration", "all"):
        (warning,) = predict(stream, [curve], NAMES, hazards="raw", split=split).warnings
        assert f"split {split!r}" in warning
        assert "flatter" in warning


def test_prompts_without_a_category_are_told_once(tmp_path: Path) -> None:
    trace = make_trace()
    column = trace.schema.get_field_index("category")
    words = ["all" if word == "code" else word for word in trace["category"].to_pylist()]
    some = trace.set_column(column, trace.schema.field(column), [words])
    curve = load_price(write_curve(tmp_path / "c.json"))
    for number, (table, named) in enumerate([(trace, {"code", "prose"}), (some, {"prose"})]):
        stream = open_trace(write_trace(tmp_path / f"{number}.parquet", table))
        rows = predict(stream, [curve], ["ar", "oracle"], hazards="raw").outcomes[0].rows
        found = [(row["policy"], row["category"], row["loops"]) for row in rows.to_pylist()]
        assert len(set(found)) == len(found)
        assert {category for _, category, _ in found} == {"all"} | named
        # Rounds without a category count for the whole.
        (whole,) = {
            row["rounds"]
            for row in rows.to_pylist()
            if (row["category"], row["loops"]) == ("all", "outside")
        }
        test = np.asarray(trace["split"].to_pylist()) == "test"
        assert whole == int((test & (trace["loop_period"].to_numpy() == 0)).sum())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"latency_us": LATENCY_US[:16]}, "latency_us has 16 values; 17 are needed"),
        (
            {"latency_us": [*LATENCY_US[:9], 5000.0, *LATENCY_US[10:]]},
            "a row more cannot cost less",
        ),
        ({"latency_us": [4900.0, *LATENCY_US[1:]]}, "length 1 takes 4800 us, length 0 4900 us"),
        ({"latency_us": [float("nan"), *LATENCY_US[1:]]}, "latency_us.0"),
        ({"latency_us": [-1.0, *LATENCY_US[1:]]}, "length 0 takes -1 us"),
        ({"latency_us": [str(x) for x in LATENCY_US]}, "latency_us.0"),
        ({"draft_us": 4800.0}, "draft_us is 4800"),
        ({"draft_us": None}, "draft_us: Field required"),
        ({"latency_us": None}, "must have either latency_us"),
        ({"base_us": 10.0}, "must have either latency_us"),
        ({"latency_us": None, "base_us": -1.0, "expert_us": 1.0, "layers": 4}, "base_us is -1"),
        ({"latency_us": None, "base_us": 9.0, "expert_us": -1.0, "layers": 4}, "expert_us is -1"),
        ({"schema_id": "hybridspec.curve/9"}, "schema_id"),
        ({"speed": 1.0}, "speed: Extra inputs"),
    ],
)
def test_impossible_curves_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_curve(tmp_path / "curve.json", **changes)
    with pytest.raises(BundleError) as refusal:
        read_curve(path)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_what_is_no_json_is_no_curve(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    for text in ("", "[1, 2", "[]", "3", "\x00", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(BundleError, match="is no cost curve"):
            read_curve(path)
    path.write_text(json.dumps({"schema_id": CURVE_SCHEMA}) + " " * (2 << 20))
    with pytest.raises(BundleError, match="bytes; at most"):
        read_curve(path)


def test_profile_gain_by_hand_and_spread(tmp_path: Path) -> None:
    table = load_price(write_curve(tmp_path / "c.json")).table(None, topk=0)
    wide = replace(
        table, latency_p10_us=table.latency_us * 0.9, latency_p90_us=table.latency_us * 1.2
    )
    (gain,) = profile_gains(read_profile("0.5"), wide, batch=1)
    # E(L) / T(L): 1/4000, 1/4800, 1.5/5100, 1.75/5400, 1.875/5700, ...
    rates = [1 / 4000, *((2 - 0.5 ** (k - 1)) / (4500 + 300 * k) for k in range(1, 17))]
    assert gain.length == int(np.argmax(rates))
    assert gain.tokens_per_s == pytest.approx(max(rates) * 1e6)
    assert gain.over_ar == pytest.approx(max(rates) * 4000)
    assert gain.over_ar_low == pytest.approx(gain.over_ar * 0.9 / 1.2)
    assert gain.over_ar_high == pytest.approx(gain.over_ar * 1.2 / 0.9)
    (never,) = profile_gains(read_profile("0"), wide, batch=1)
    assert (never.length, never.over_ar_low, never.over_ar_high) == (0, 1.0, 1.0)
    assert [verdict(1.1, 1.2), verdict(0.9, 1.2), verdict(0.8, 1.0)] == ["yes", "unclear", "no"]
    assert read_profile("0.8,0.7").tolist() == [0.8, *[0.7] * 14]
    for text in ("", "a", "0.5,1.2", "-0.1", "nan", ",".join(["0.5"] * 16)):
        with pytest.raises(UsageError):
            read_profile(text)


def test_memory_of_the_full_target() -> None:
    """Qwen3.6-35B-A3B: 30 Gated DeltaNet layers, 16 key and 32 value heads of 128, width 4."""
    shape = GdnShape(30, 16, 32, 128, 128, 4)
    memory = rollback_memory(shape)
    window = 8192 * 3 * 2
    assert memory.state == 30 * (32 * 128 * 128 * 4 + window)
    assert memory.snapshots == 16 * memory.state
    assert memory.factors == 30 * 16 * (16 * 128 * 2 + 32 * 128 * 4 + 32 * 4 + 8192 * 2)
    # Design: 0.94 GiB of snapshots of the state alone.
    snapshots_gib = 16 * 30 * 32 * 128 * 128 * 4 / 2**30
    assert snapshots_gib == pytest.approx(0.94, abs=0.005)
    assert rollback_memory(shape, rows=4).factors * 4 == memory.factors
    assert rollback_memory(GdnShape(0, 1, 1, 1, 1, 1)).factors == 0
    with pytest.raises(UsageError, match="17 rows"):
        rollback_memory(shape, rows=17)
    with pytest.raises(UsageError, match="value_heads = 0"):
        GdnShape(1, 1, 0, 1, 1, 1)
