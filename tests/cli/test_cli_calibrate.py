"""`hybridspec calibrate` on the embedded pair: plan, record, interrupt, resume, fit again."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_kit import CALIBRATE, Made, hybridspec

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.digest import model_digest
from hybridspec.calibrate.trace import read_trace
from hybridspec.cli import _calibrate_run
from hybridspec.cli.main import run
from hybridspec.demo import assets
from hybridspec.pricing import TRACE_KEY


def test_bundle_holds_what_the_result_says(made: Made) -> None:
    said = json.loads(made.calibrate.stdout)
    bundle = load_bundle(made.bundle)
    assert bundle.calibration is not None
    assert said["content_id"] == bundle.calibration.content_id
    assert said["bundle"] == str(made.bundle)
    identity = bundle.calibration.identity
    assert identity.target_digest == model_digest(assets.TARGET)
    assert identity.drafter_digest == model_digest(assets.DRAFTER)
    assert bundle.calibration.routing is not None
    assert said["summary"]["num_prompts"] == 28
    assert said["rounds"] == read_trace(made.trace).num_rows
    assert (made.bundle / "plots" / "reliability.svg").stat().st_size > 1000


def test_provenance_names_no_machine(made: Made) -> None:
    part = load_bundle(made.bundle).calibration
    assert part is not None
    text = json.dumps(dict(part.provenance))
    assert part.provenance[TRACE_KEY] == "../bundle.trace"
    assert str(made.bundle.parent) not in text
    assert str(Path.home()) not in text
    assert part.provenance["packages"]["torch"]


def test_trace_is_one_unbroken_story_a_prompt(made: Made) -> None:
    rows = read_trace(made.trace).to_pylist()
    assert {row["split"] for row in rows} == {"calibration", "test"}
    by_prompt: dict[str, list[dict]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt_id"], []).append(row)
    assert len(by_prompt) == 28
    for story in by_prompt.values():
        assert [row["round"] for row in story] == list(range(len(story)))
        assert story[0]["generated_tokens"] == 1
        for row, after in itertools.pairwise(story):
            accepted = row["accepted"]
            assert row["draft_tokens"][:accepted] == row["target_tokens"][:accepted]
            assert after["anchor"] == row["target_tokens"][accepted]
            assert after["context_tokens"] == row["context_tokens"] + accepted + 1
            assert after["generated_tokens"] == row["generated_tokens"] + accepted + 1


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bundle"
    arguments = ["calibrate", "--out", str(out), "--dry-run", "--json", "--max-new-tokens", "10"]
    assert run([*arguments, "--batch-size", "8", "--max-prompts", "28", "--threads", "1"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["prompts"] == 28
    assert plan["groups"] == 4
    assert plan["max_emitted_tokens"] == 280
    assert plan["max_trace_bytes"] > 280 * 500
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_resumes_to_the_same_trace(
    made: Made, tmp_path: Path, how: signal.Signals
) -> None:
    bundle, trace = tmp_path / "bundle", tmp_path / "bundle.trace"
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "calibrate", "--out", bundle, *CALIBRATE],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(trace.glob("part-*.parquet")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    assert out == ""
    assert not bundle.exists()
    if how is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[how], err
        last = err.splitlines()[-1]
        assert last.startswith("interrupted: ")
        assert "--resume" in last
    kept = len(list(trace.glob("part-*.parquet")))
    assert 1 <= kept < 7

    resumed = hybridspec("calibrate", "--out", bundle, *CALIBRATE, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert f"{kept} of 7 groups of prompts were recorded before and kept" in resumed.stderr
    assert read_trace(trace).equals(read_trace(made.trace))
    one, other = load_bundle(bundle).calibration, load_bundle(made.bundle).calibration
    assert one is not None
    assert other is not None
    assert one.content_id == other.content_id


def test_a_stopped_fit_names_the_command_that_goes_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_calibrate_run, "fit_calibration", stopped)
    words = ["--model", "boosted", "--seed", "7", "--out", str(tmp_path / "b")]
    assert run(["calibrate", "--from-trace", str(made.trace), *words]) == 130
    line = f"hybridspec calibrate --from-trace {made.trace} {' '.join(words)}"
    assert f"run `{line}` to fit it" in capsys.readouterr().err


def test_complete_trace_is_fitted_without_the_model(made: Made, tmp_path: Path) -> None:
    bundle = made.copy(tmp_path)
    again = hybridspec("calibrate", "--out", bundle, *CALIBRATE, "--resume")
    assert again.returncode == 0, again.stderr
    assert "loading" not in again.stderr
    assert again.stdout == f"{bundle}\n"
    assert "hazard: log loss" in again.stderr
    assert "HybridSpec" in again.stderr, "the bundle has costs, so speeds are predicted"


@pytest.mark.parametrize(
    ("extra", "field"),
    [(("--seed", "1"), "seed"), (("--no-record-routes",), "routes"), (("--top-p", "0.9"), "top_p")],
    ids=["seed", "routes", "top_p"],
)
def test_resuming_with_something_else_is_refused(
    made: Made,
    tmp_path: Path,
    extra: tuple[str, ...],
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = made.copy(tmp_path)
    assert run(["calibrate", "--out", str(bundle), *CALIBRATE, "--resume", *extra]) == 3
    assert field in capsys.readouterr().err


def test_resuming_with_other_prompts_names_the_options(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = made.copy(tmp_path)
    arguments = ["calibrate", "--out", str(bundle), *CALIBRATE, "--resume"]
    assert run([*arguments, "--max-prompts", "35"]) == 3
    said = capsys.readouterr().err
    assert "7 groups, at most 28 prompts then, 9 groups, at most 36 prompts now" in said
    assert "--max-prompts" in said


def test_used_trace_folder_needs_resume(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = made.copy(tmp_path)
    assert run(["calibrate", "--out", str(bundle), *CALIBRATE]) == 2
    assert "--resume" in capsys.readouterr().err


def test_fit_from_trace_is_the_same_fit(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert run(["calibrate", "--from-trace", str(made.trace), "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["content_id"] == json.loads(made.calibrate.stdout)["content_id"]
    assert load_bundle(out).cost is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--from-trace", "t", "--drafter", "d"], 2, "--drafter"),
        (["--from-trace", "t", "--dry-run"], 2, "--dry-run"),
        (["--from-trace", "nothing-there"], 3, "nothing-there"),
        (["--drafter", "d"], 2, "without TARGET"),
        (["TARGET", "--prompts", "p.jsonl"], 2, "--drafter"),
        (["TARGET", "--drafter", "DRAFTER"], 2, "--prompts"),
        (["nothing-there", "--drafter", "DRAFTER", "--prompts", "PROMPTS"], 3, "nothing-there"),
        (["TARGET", "--drafter", "TARGET", "--prompts", "PROMPTS"], 3, "DFlash"),
        (["--prompts", "nothing-there.jsonl"], 2, "nothing-there.jsonl"),
        (["--prompts", "owner/no-such-set"], 4, "datasets"),
        (["--max-new-tokens", "100000"], 2, "--max-new-tokens"),
        (["--max-prompts", "4"], 5, "calibration split"),
        (["--device", "tpu"], 2, "tpu"),
        (["--device", "cuda:99"], 4, "cuda:99"),
        (["--top-p", "0"], 3, "top_p"),
        (["--out", "FULL"], 2, "notes.txt"),
        (["--out", "DAMAGED"], 3, "manifest.json"),
        (["--out", "FULL/notes.txt"], 2, "is a file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals_come_before_any_work(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("FULL", "notes.txt"), ("DAMAGED", "manifest.json")):
        Path(name).mkdir()
        (Path(name) / file).write_text("{")
    places = {"TARGET": assets.TARGET, "DRAFTER": assets.DRAFTER, "PROMPTS": assets.PROMPTS}
    words = [str(places.get(word, word)) for word in arguments]
    before = sorted(tmp_path.rglob("*"))
    assert run(["calibrate", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.splitlines()[-1].startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def refusal_of(capsys: pytest.CaptureFixture[str], out: Path, *arguments: object) -> str:
    words = ["calibrate", "--dry-run", "--out", str(out), *map(str, arguments)]
    assert run(words) == 5
    return capsys.readouterr().err.partition("to fit on: ")[2].strip()


def test_too_few_bundled_prompts_name_the_limit_that_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "b"
    told = refusal_of(capsys, out, "--max-prompts", 12)
    found = re.fullmatch(r"give --max-prompts (\d+) or more", told)
    assert found is not None, told
    least = int(found[1])
    assert refusal_of(capsys, out, "--max-prompts", least - 1) == told
    for enough in (least, least + 1):
        assert run(["calibrate", "--dry-run", "--out", str(out), "--max-prompts", str(enough)]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("count", "splits", "extra", "remedy"),
    [
        (12, (None,), (), "give more prompts, or lower --test-fraction"),
        (9, (None,), (), "give more prompts"),
        (
            12,
            ("calibration", "test"),
            (),
            "give more prompts of that split, which the prompts name themselves",
        ),
        (
            40,
            (None,),
            ("--max-prompts", 12),
            "give --max-prompts 14 or more, or lower --test-fraction",
        ),
    ],
)
def test_too_few_prompts_are_told_only_what_helps(
    count: int,
    splits: tuple[str | None, ...],
    extra: tuple[object, ...],
    remedy: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"number {n}", "split": splits[n % len(splits)]} for n in range(count)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert refusal_of(capsys, tmp_path / "b", "--prompts", prompts, *extra) == remedy


def test_own_folders_and_chat_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"Tell me about the number {n}." for n in range(40)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    target, drafter = tmp_path / "my-model", tmp_path / "my-drafter"
    shutil.copytree(assets.TARGET, target)
    shutil.copytree(assets.DRAFTER, drafter)
    arguments = [str(target), "--drafter", str(drafter), "--prompts", str(prompts), "--dry-run"]
    context = []
    for extra in ([], ["--chat"]):
        assert run(["calibrate", *arguments, *extra, "--json", "--out", str(tmp_path / "b")]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["pair"] == "my-model"
        context.append(plan["max_context_tokens"])
    assert context[1] > context[0], "the chat template adds tokens around each prompt"


def test_boosted_model_is_stored_beside_its_table(made: Made, tmp_path: Path) -> None:
    bundle = tmp_path / "boosted"
    done = hybridspec(
        "calibrate", "--from-trace", made.trace, "--model", "boosted", "--out", bundle, "--json"
    )
    assert done.returncode == 0, done.stderr
    part, plain = load_bundle(bundle).calibration, load_bundle(made.bundle).calibration
    assert part is not None
    assert plain is not None
    assert part.trees is not None
    assert plain.trees is None
    shown = hybridspec("bundle", "show", bundle, "-q").stdout
    assert f"hazards boosted-distilled and {part.trees.num_trees} trees" in shown
    assert part.hazard.method == "boosted-distilled"
    assert part.provenance["settings"]["model"] == "boosted"
    summary = json.loads(done.stdout)["summary"]
    assert summary["model"] == "boosted"
    assert summary["after"]["hazard_auc"] != summary["distilled"]["hazard_auc"]
    assert json.loads(made.calibrate.stdout)["summary"]["distilled"] == {}
