"""`replay` and `plan` as a person or a program runs them, on a small made-up trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_kit import Made, hybridspec
from trace_kit import LATENCY_US, make_trace, write_curve, write_trace

from hybridspec.cli.main import run
from hybridspec.costmodels.curve import read_curve
from hybridspec.costmodels.profile import verdict
from hybridspec.errors import BundleError

TARGET = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 256,
        "num_experts_per_tok": 8,
        "num_experts": 256,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        "partial_rotary_factor": 0.25,
        "eos_token_id": 0,
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    slow = [2.0 * value for value in LATENCY_US]
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(TARGET))
    return {
        "trace": write_trace(folder / "trace.parquet"),
        "here": write_curve(folder / "here.json"),
        "there": write_curve(folder / "there.json", name="twice", latency_us=slow),
        "target": target,
    }


def document(*arguments: object) -> dict[str, Any]:
    done = hybridspec(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_replay_for_a_program(files: dict[str, Path]) -> None:
    common = ("--hazard", "raw", "--resamples", "50")
    found = document(
        "replay", files["trace"], "--cost", files["here"], "--what-if", files["there"], *common
    )
    assert found["trace"]["rounds"] == 48 * 12
    assert found["hazard"] == "raw"
    assert found["priced_by_routes"] is True
    assert set(found["not_walked"]) == {"ema", "dspark"}
    here, there = found["costs"]
    assert there["name"] == "twice"
    for cost in (here, there):
        rows = cost["rows"]
        assert {row["loops"] for row in rows} == {"outside", "inside"}
        assert {row["category"] for row in rows} == {"all", "code", "prose"}
        oracle = [row for row in rows if row["policy"] == "oracle"]
        assert all(row["of_oracle"] == 1.0 for row in oracle)
    assert here["tokens_per_us"] == pytest.approx(2 * there["tokens_per_us"], rel=1e-6)


def test_replay_for_a_person(files: dict[str, Path]) -> None:
    names = "ar,fixed-16,hybridspec,oracle"
    done = hybridspec(
        "replay", files["trace"], "--cost", files["here"], "--hazard", "raw", "--policies", names
    )
    assert done.returncode == 0
    assert done.stdout.startswith("made up: hybridspec ")
    assert "of the oracle length" in done.stdout
    for word in (*names.split(","), "code", "prose", "(in loops)", "walked"):
        assert word in done.stderr
    quiet = hybridspec(
        "replay", files["trace"], "--cost", files["here"], "--hazard", "raw", "-q",
        "--policies", names,
    )  # fmt: skip
    assert quiet.stderr == ""
    assert quiet.stdout == done.stdout


def test_plan_from_rounds(files: dict[str, Path]) -> None:
    arguments = ("--trace", files["trace"], "--hazard", "raw", "--target", files["target"])
    found = document("plan", "--cost", files["here"], *arguments)
    assert found["pays"] in ("yes", "no", "unclear")
    gain = found["gain"]
    assert gain["over_ar_low"] <= gain["over_ar"] <= gain["over_ar_high"]
    assert set(found["pays_by_category"]) == {"code", "prose"}
    assert 0 <= found["best_fixed_length"] <= 16
    memory = found["memory_bytes_a_request"]
    window = 1024 * 3 * 2
    assert memory["snapshots"] == 3 * 16 * (4 * 128 * 128 * 4 + window)
    assert memory["factors"] == 3 * 16 * (2 * 128 * 2 + 4 * 129 * 4 + 1024 * 2)
    told = hybridspec("plan", "--cost", files["here"], *arguments)
    assert "of factors" in told.stdout
    assert "drafting pays from" in told.stderr


def test_plan_judges_nothing_by_a_prompt_or_two(
    tmp_path: Path, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridspec.cli.main import run

    trace = make_trace()
    names = np.asarray(trace["prompt_id"].to_pylist())
    rare = np.unique(names[np.asarray(trace["split"].to_pylist()) == "test"])[:2]
    words = np.where(np.isin(names, rare), "rare", "common").tolist()
    column = trace.schema.get_field_index("category")
    path = tmp_path / "rare.parquet"
    write_trace(path, trace.set_column(column, trace.schema.field(column), [words]))
    arguments = ["plan", "--cost", str(files["here"]), "--trace", str(path), "--hazard", "raw"]
    assert run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = (
        row
        for row in found["rows"]
        if (row["policy"], row["category"], row["loops"]) == ("hybridspec", "rare", "outside")
    )
    assert row["prompts"] == 2
    assert verdict(row["over_ar_low"], row["over_ar_high"]) == "yes"
    assert found["pays_by_category"] == {"common": "yes", "rare": "unclear"}
    assert run(arguments) == 0
    assert "unclear where fewer than 5 prompts were held out" in capsys.readouterr().err


def test_plan_from_acceptance(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def plan(acceptance: str) -> dict[str, Any]:
        words = ["plan", "--cost", str(files["here"]), "--acceptance", acceptance, "--json"]
        assert run(words) == 0
        value: dict[str, Any] = json.loads(capsys.readouterr().out)
        return value

    found = plan("0.9")
    assert found["pays"] == "yes"
    assert found["memory_bytes_a_request"] is None
    # A curve has no spread: no interval is made up.
    assert found["gain"]["over_ar_low"] is None
    assert found["gain"]["over_ar_high"] is None
    told = hybridspec("plan", "--cost", files["here"], "--acceptance", "0.9")
    assert "a curve has no spread" in told.stdout
    assert found["rows"][0]["length"] == found["best_fixed_length"] > 4
    never = plan("0.01")
    assert never["pays"] == "no"
    assert never["best_fixed_length"] == 0
    (even,) = found["break_even"]
    just = plan(str(even["acceptance"] + 1e-4))
    assert just["gain"]["over_ar"] == pytest.approx(1.0, abs=1e-3)
    assert just["best_fixed_length"] == even["length"]


REPLAY, PLAN = ("replay", "TRACE", "--cost", "HERE"), ("plan", "--cost", "HERE")


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (2, "did you mean hybridspec", (*REPLAY, "--policies", "hybridspek")),
        (2, "policy '' is unknown: known are ar", (*REPLAY, "--policies", "")),
        (2, "policy 'ar' is named twice", (*REPLAY, "--policies", "ar,ar")),
        (3, "beyond the largest measured batch", (*REPLAY, "--batch", "2", "--hazard", "raw")),
        (3, "not a readable Parquet file", ("replay", "HERE", "--cost", "HERE")),
        (3, "a row more cannot cost less", ("replay", "TRACE", "--cost", "ODD")),
        (3, "is no cost curve", ("replay", "TRACE", "--cost", "TRACE")),
        (3, '{"schema_id": "hybridspec.curve/1"', ("replay", "TRACE", "--cost", "BARE")),
        (3, "check the path", ("replay", "NONE", "--cost", "HERE")),
        (2, "no hazard model is called", (*REPLAY, "--hazard", "magic")),
        (2, "check the path", (*REPLAY, "--hazard", "./no/bundle")),
        (3, "no part-*.parquet", ("replay", "EMPTY", "--cost", "HERE")),
        (2, "neither --trace nor --acceptance is given", PLAN),
        (2, "are both given", (*PLAN, "--trace", "TRACE", "--acceptance", "0.5")),
        (2, "must lie in 0..1", (*PLAN, "--acceptance", "1.5")),
        (2, "at most one a draft", (*PLAN, "--acceptance", ",".join(["0.5"] * 16))),
        (2, "--hazard belongs to", (*PLAN, "--acceptance", "0.5", "--hazard", "raw")),
        (3, "config.json", (*PLAN, "--acceptance", "0.5", "--target", "EMPTY")),
    ],
)
def test_refusals_and_exit_codes(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    code: int,
    words: str,
    arguments: tuple[str, ...],
) -> None:
    from hybridspec.cli.main import run

    (tmp_path / "bare.json").write_text('{"base_us": 1800, "expert_us": 3.6}')
    falls = [*LATENCY_US[:9], 5000.0, *LATENCY_US[10:]]
    named = {
        "TRACE": files["trace"],
        "HERE": files["here"],
        "ODD": write_curve(tmp_path / "odd.json", latency_us=falls),
        "BARE": tmp_path / "bare.json",
        "NONE": tmp_path / "none",
        "EMPTY": tmp_path,
    }
    assert run([str(named.get(word, word)) for word in arguments]) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert words in written.err
    assert len(written.err.strip().splitlines()) == 1


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
@pytest.mark.parametrize(
    "arguments",
    [("replay", "trace", "--cost", "curve"), ("plan", "--cost", "curve"), ("calibrate",)],
)
def test_seeds_that_no_generator_takes(
    arguments: tuple[str, ...], seed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from hybridspec.cli.main import run

    assert run([*arguments, "--seed", seed]) == 2
    assert "--seed" in capsys.readouterr().err


def test_both_run_on_what_calibrate_and_profile_made(made: Made) -> None:
    found = document("replay", made.trace, "--cost", made.bundle, "--split", "all")
    assert found["hazard"].endswith(str(made.bundle))
    (cost,) = found["costs"]
    overall = [r for r in cost["rows"] if (r["category"], r["loops"]) == ("all", "outside")]
    rates = {row["policy"]: row["tokens_per_s"] for row in overall}
    assert rates["oracle"] == max(rates.values())
    planned = document("plan", "--trace", made.trace, "--cost", made.bundle)
    assert planned["pays"] in ("yes", "no", "unclear")
    assert len(planned["break_even"]) == 1


@pytest.mark.parametrize(("count", "says"), [(19, "20"), (10**10, "100000")])
def test_resamples_have_bounds(
    count: int, says: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    trace, cost = str(files["trace"]), ["--cost", str(files["here"])]
    for words in (["replay", trace, *cost], ["plan", "--trace", trace, *cost]):
        assert run([*words, "--resamples", str(count)]) == 2
        # How the rule is worded depends on the version of typer.
        assert re.search(rf"'--resamples'.*: '?{count}'? .*\b{says}\b", capsys.readouterr().err)


def written_curves(text: str) -> list[str]:
    """JSON objects of a text that name the curve's schema."""
    return re.findall(r'\{\s*"schema_id": "hybridspec\.curve/1"[^}]*\}', text)


@pytest.mark.parametrize("place", ["docs/policies.md", "replay --help", "plan --help"])
def test_documented_curves_load(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if place.endswith(".md"):
        page = Path(__file__).resolve().parents[2] / place
        if not page.is_file():
            pytest.skip("no docs in this tree (an sdist)")
        text = page.read_text()
    else:
        assert run(place.split()) == 0
        text = capsys.readouterr().out
    curves = []
    for number, written in enumerate(written_curves(text)):
        path = tmp_path / f"{number}.json"
        path.write_text(written)
        curves.append(read_curve(path))
    assert [curve.by_experts for curve in curves] == [False, True]


def test_refusal_of_a_curve_shows_one_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text('{"base_us": 1800, "expert_us": 3.6}')
    with pytest.raises(BundleError, match="schema_id: Field required") as refused:
        read_curve(path)
    (written,) = written_curves(str(refused.value))
    path.write_text(written)
    assert read_curve(path).layers == 40
