"""`hybridspec bundle drift`: no drift, inputs that moved, calibration that moved, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from trace_kit import make_identity, make_trace, write_trace

from hybridspec.artifacts.bundle import write_calibration
from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.artifacts.schemas import TRACE_SCHEMA, table_from
from hybridspec.calibrate.fit import fit_calibration
from hybridspec.calibrate.rounds import check_trace, sealed, trace_identity, with_identity
from hybridspec.cli.main import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle and the trace that it was calibrated on."""
    folder = tmp_path_factory.mktemp("drift")
    trace = make_trace(prompts=120)
    write_trace(folder / "old.parquet", sealed(trace))
    result = fit_calibration(trace, resamples=20)
    saved = trace_identity(trace, path="made")
    write_calibration(
        folder / "bundle",
        identity=CalibrationIdentity(
            target_digest=saved.target_digest,
            drafter_digest=saved.drafter_digest,
            dtype=saved.dtype,
            temperature=saved.temperature,
            top_p=saved.top_p,
            prompts_digest=saved.prompts_digest,
        ),
        hazard=result.hazard,
        routing=result.routing,
        reliability=result.reliability,
        metrics=result.metrics,
        temperatures=result.temperatures,
        provenance={"trace": "../old.parquet"},
    )
    return folder


@pytest.fixture
def drift(folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def call(trace: pa.Table | Path, *arguments: object) -> tuple[int, str, str]:
        path = trace
        if isinstance(trace, pa.Table):
            path = write_trace(folder / "new.parquet", sealed(trace))
        code = run(["bundle", "drift", *map(str, (folder / "bundle", path, *arguments))])
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return code, written.out, written.err

    return call


def rejected_more_often(trace: pa.Table, seed: int) -> pa.Table:
    """The same drafts and probabilities, most rounds cut at their first draft."""
    columns: dict[str, Any] = {
        name: (
            np.asarray(trace[name].combine_chunks().flatten()).reshape(len(trace), -1)
            if pa.types.is_fixed_size_list(trace.schema.field(name).type)
            else np.asarray(trace[name].to_pylist(), dtype=object)
        )
        for name in TRACE_SCHEMA.names
    }
    cut = np.random.default_rng(seed).random(len(trace)) < 0.6
    targets = columns["target_tokens"].copy()
    targets[cut, 0] = (columns["draft_tokens"][cut, 0] + 1) % 99
    accepted = np.cumprod(targets[:, :15] == columns["draft_tokens"], axis=1).sum(axis=1)
    story = columns["round"].astype(int)
    ended = targets[np.arange(len(trace)), accepted]
    emitted = np.where(story == 0, 0, np.roll(accepted + 1, 1))
    generated = np.zeros(len(trace), dtype=int)
    for row in range(len(trace)):
        generated[row] = 1 if story[row] == 0 else generated[row - 1] + emitted[row]
    columns |= {
        "target_tokens": targets,
        "accepted": accepted,
        "anchor": np.where(story == 0, columns["anchor"], np.roll(ended, 1)).astype(int),
        "generated_tokens": generated,
        "context_tokens": 39 + generated,
    }
    table = table_from({name: list(values) for name, values in columns.items()}, TRACE_SCHEMA)
    return check_trace(with_identity(table, make_identity()), path="made")


def test_rounds_of_the_same_kind_do_not_drift(drift: Any) -> None:
    code, out, err = drift(make_trace(prompts=60, seed=5), "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["verdict"] == "no drift found"
    assert found["moved"] == []
    assert found["hazard"] == "beta-position-isotonic"
    assert found["current_prompts"] == 60
    assert {test["name"] for test in found["tests"]} > {"p1", "residual_mean"}


def test_calibration_that_moved_fails_the_gate(drift: Any) -> None:
    code, out, err = drift(rejected_more_often(make_trace(prompts=120, seed=6), 6), "--json")
    assert code == 5, err
    found = json.loads(out)
    assert found["verdict"] == "calibration moved"
    assert "residual_mean" in found["moved"]
    assert found["current_residual"] < found["reference_residual"] - 0.05
    assert err.splitlines()[-1].startswith("error: the hazards of")
    assert "calibrate again" in err
    code, out, _ = drift(rejected_more_often(make_trace(prompts=120, seed=6), 6), "-q")
    assert code == 5
    assert "calibration moved" in out


def test_prompts_are_named_by_where_they_are_from(drift: Any, folder: Path) -> None:
    _, _, err = drift(make_trace(prompts=60, seed=5))
    own = f"the trace that {folder / 'bundle'} was calibrated on"
    assert f"60 prompts of {folder / 'new.parquet'} and " in err
    assert f"held-out ones of {own}; significant below 0.01" in err
    assert "warning" not in err
    _, _, err = drift(make_trace(prompts=60, seed=5), "--reference", folder / "old.parquet")
    assert f"held-out ones of {folder / 'old.parquet'}; significant" in err


def test_rounds_of_the_reference_cannot_show_drift(drift: Any, folder: Path) -> None:
    own = f"the trace that {folder / 'bundle'} was calibrated on"
    code, out, err = drift(folder / "old.parquet", "--json")
    assert (code, json.loads(out)["rounds_of_the_reference"]) == (0, True), err
    assert f"warning: all rounds of {folder / 'old.parquet'} are from {own}" in err
    assert "new prompts" not in err
    # Some of its prompts, in another order.
    trace = make_trace(prompts=120)
    names = trace["prompt_id"].to_numpy()
    prompts = trace["prompt_id"].unique().to_pylist()[60:0:-1]
    rows = np.concatenate([np.flatnonzero(names == prompt) for prompt in prompts])
    _, out, err = drift(trace.take(rows), "--json")
    assert json.loads(out)["rounds_of_the_reference"], err
    _, out, err = drift(make_trace(prompts=60, seed=5), "--json")
    assert (json.loads(out)["rounds_of_the_reference"], "warning" in err) == (False, False), err
    _, _, err = drift(
        make_trace(prompts=60, seed=5), "--reference", folder / "new.parquet", "--json"
    )
    assert f"are from {folder / 'new.parquet'}, so they cannot show drift" in err


def test_what_cannot_be_compared_is_refused(
    drift: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = drift(make_trace(prompts=60, identity=make_identity(target_digest="other")))
    assert (code, "the trace has target_digest = 'other'" in err) == (3, True), err
    code, _, err = drift(make_trace(prompts=6))
    assert (code, "a drift test needs 200 of 10" in err) == (5, True), err
    code, _, err = drift(folder / "nowhere.parquet")
    assert (code, "check the path" in err) == (3, True), err
    code, _, err = drift(make_trace(prompts=60, seed=5), "--reference", folder / "old.parquet")
    assert code == 0, err
    (folder / "old.parquet").rename(folder / "gone.parquet")
    code, _, err = drift(make_trace(prompts=60))
    assert (code, "pass --reference TRACE" in err) == (3, True), err
    (folder / "gone.parquet").rename(folder / "old.parquet")
