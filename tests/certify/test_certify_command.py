"""`hybridspec certify` as a person meets it: whole runs, Ctrl-C, refusals, what others then say."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
from certify_kit import serving

from hybridspec.acceptance import Verdict, accept_greedy
from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.artifacts.certificate import (
    SCHEMAS,
    Evidence,
    Gate,
    Subject,
    list_certificates,
    read_evidence,
    write_certificate,
)
from hybridspec.artifacts.digest import model_digest
from hybridspec.artifacts.verify import verify_folder
from hybridspec.certify import law
from hybridspec.certify.subject import lengths_name, reference_subject
from hybridspec.cli._certificates import say_match, say_served_match
from hybridspec.cli._output import Output
from hybridspec.cli.main import run
from hybridspec.demo import assets
from hybridspec.pair import Placement, pair_folders
from hybridspec.request import LengthRule

SHORT = ("--threads", "1", "--max-prompts", "3", "--max-new-tokens", "12", "--batch", "3")
FEW = ("--samples", "100", "--law-prompts", "1", "--rounds", "4")


def certify(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["certify", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "bundle")


def test_whole_run_and_what_others_say(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load_bundle(copy).content_id
    code, out, err = certify(capsys, "--bundle", copy, *SHORT, *FEW, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["verdict"] == "passed"
    assert told["subject"]["bundle"] == before
    assert told["subject"]["lengths"].startswith("policy")
    verdicts = {gate["name"]: gate["verdict"] for gate in told["gates"]}
    assert verdicts.pop("quality") == "not run"
    assert set(verdicts.values()) == {"passed"}
    # The certificate is none of the bundle's parts, so the bundle stays what it was.
    assert load_bundle(copy).content_id == before
    assert verify_folder(copy).warnings == verify_folder(copy).bundle.warnings
    (found,), _ = list_certificates(copy)
    rows = read_evidence(copy, found)
    assert sorted(set(rows.texts["arm"])) == ["hybridspec", "plain", "plain-again"]
    assert len(rows.texts["arm"]) == 9
    report = Path(told["file"]).with_name("report.md").read_text()
    title = "# Certificate of output preservation: passed, 5 of 6 gates run (not run: quality)"
    assert report.startswith(title + "\n")
    assert run(["bundle", "show", str(copy)]) == 0
    shown, _ = capsys.readouterr()
    assert f"certificate {found.content_id[:12]}: passed" in shown
    assert run(["bundle", "show", str(copy), "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr()[0])["certificates"]
    assert listed["for_this_bundle"] is True
    bundle = load_bundle(copy)
    assert served(bundle, "off", capsys).startswith(f"certificate {found.content_id[:12]} passed")
    assert "made for another lengths" in served(bundle, "paper", capsys)


def served(bundle: Bundle, correction: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `serve` says at its start."""
    folders = pair_folders(None, None)
    placement = Placement("cpu", "float32", 1)
    say_match(bundle, folders, placement, LengthRule("policy"), correction, Output())
    return capsys.readouterr().err


def test_serve_says_what_is_wrong(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = load_bundle(copy)
    assert "certificate none; `hybridspec certify` makes one" in served(bundle, "off", capsys)
    subject = reference_subject(
        pair_folders(None, None),
        dtype="float32",
        bundle=bundle.content_id,
        lengths=lengths_name(LengthRule("policy"), "off"),
    )
    nothing = {name: {column: [] for column in schema.names} for name, schema in SCHEMAS.items()}
    failed = Gate(name="greedy", verdict="failed", message="it differs")
    write_certificate(
        copy, subject=subject, settings={"gates": ["greedy"]}, gates=[failed],
        evidence=Evidence(**nothing), report="", created="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    assert served(bundle, "off", capsys).startswith("warning: certificate ")
    for path in copy.glob("certificates/*/certificate.json"):
        path.write_text("{")
    assert "is not valid JSON" in served(bundle, "off", capsys)


def certified(folder: Path, subject: Subject, verdict: Literal["passed", "failed"]) -> None:
    nothing = {name: {column: [] for column in schema.names} for name, schema in SCHEMAS.items()}
    gate = Gate(name="greedy", verdict=verdict, message="as it is")
    write_certificate(
        folder, subject=subject, settings={"gates": ["greedy"]}, gates=[gate],
        evidence=Evidence(**nothing), report="", created="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def test_serve_in_sglang_says_whether_a_certificate_over_http_matches(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, folders = load_bundle(copy), pair_folders(None, None)
    assert folders.drafter is not None
    right = Subject(
        engine="sglang over HTTP (pair)",
        engine_version="0.5.16",
        dtype="bfloat16",
        target_digest=model_digest(folders.target),
        drafter_digest=model_digest(folders.drafter),
        bundle=bundle.content_id,
        lengths="as the server chooses",
    )

    def said() -> str:
        say_served_match(bundle, folders, Output())
        return capsys.readouterr().err

    assert "certificate none over HTTP; `hybridspec certify --url`" in said()
    for field, value, why in (
        ("engine", "hybridspec over HTTP (pair)", "none over HTTP"),
        ("engine_version", "0.5.15", "none of sglang 0.5.16"),
        ("bundle", None, "none for this bundle"),
        ("target_digest", None, "none that names this pair"),
        ("drafter_digest", "0" * 64, "none for this pair"),
    ):
        certified(copy, dataclasses.replace(right, **{field: value}), "passed")
        assert f"certificate {why}" in said(), field
        shutil.rmtree(copy / "certificates")
    certified(copy, right, "failed")
    assert said().startswith("warning: certificate ")
    shutil.rmtree(copy / "certificates")
    certified(copy, right, "passed")
    (found,), _ = list_certificates(copy)
    assert said().startswith(f"certificate {found.content_id[:12]} ")


def test_ctrl_c_keeps_gates_and_the_same_command_goes_on(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    words = ("--bundle", copy, *SHORT, *FEW, "--gates", "greedy,law", "-q")
    with monkeypatch.context() as patch:
        patch.setattr(law, "law_fit", stop)
        code, out, err = certify(capsys, *words)
    assert (code, out) == (130, "")
    assert "2 of 3 gates are finished and kept" in err
    (kept,), _ = list_certificates(copy)
    assert kept.verdict == "incomplete"
    assert [g.verdict for g in kept.gates[:3]] == ["passed", "passed", "not run"]

    with monkeypatch.context() as patch:
        # Nothing is decoded again.
        patch.setattr("hybridspec.certify.engine_arms.EngineArms.decode", stop)
        code, out, err = certify(capsys, *words)
    assert code == 0, err
    (done,), _ = list_certificates(copy)
    assert done.verdict == "passed"
    assert done.files[3].digest == kept.files[3].digest  # the texts


def test_failed_gate_leaves_with_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_few(drafts: list[int], best: list[int]) -> Verdict:
        verdict = accept_greedy(drafts, best)
        return Verdict(verdict.accepted, best[0])

    monkeypatch.setattr("hybridspec.reference.engine.accept_greedy", too_few)
    code, out, err = certify(capsys, "--out", tmp_path, *SHORT, "--gates", "greedy")
    assert code == 5
    assert out.startswith("failed, 2 of 6 gates run (not run: law, state, degenerate, quality): ")
    assert "failed  greedy:" in err
    (found,), _ = list_certificates(tmp_path)
    assert found.subject.bundle is None
    assert "fault" in read_evidence(tmp_path, found).differences["kind"]


def questions(path: Path, count: int) -> Path:
    rows = [{"prompt": f"{i} = ", "answer": i, "id": i, "match": "prefix"} for i in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_servers_with_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(drafts=False) as plain, serving(drafts=True) as tested:
        code, out, err = certify(
            capsys, "--url", tested, "--baseline-url", plain.removeprefix("http://127.0.0.1"),
            "--prompts", assets.PROMPTS, "--questions", questions(tmp_path / "q.jsonl", 40),
            "--margin", "0.1", "--max-answer-tokens", "3", "--out", tmp_path, "--json",
            "--max-prompts", "3", "--max-new-tokens", "8", "--dtype", "float32",
        )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    verdicts = {gate["name"]: gate["verdict"] for gate in told["gates"]}
    assert verdicts == {
        "control": "passed", "greedy": "passed", "law": "not run", "state": "not run",
        "degenerate": "passed", "quality": "passed",
    }  # fmt: skip
    assert told["subject"]["engine"] == "hybridspec over HTTP (embedded)"
    assert told["settings"]["questions"] == 40
    (found,), _ = list_certificates(tmp_path)
    assert len(read_evidence(tmp_path, found).answers["expected"]) == 40


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "neither --bundle nor --out"),
        (("--out", "{tmp}", "--url", "http://x"), 2, "belong together"),
        (("--out", "{tmp}", "--gates", "magic"), 2, "gate 'magic' is unknown"),
        (("--out", "{tmp}", "--gates", "quality"), 2, "needs --questions"),
        (("--bundle", "{tmp}/nowhere"), 3, "does not exist"),
        (("--out", "{tmp}", "--prompts", "{tmp}/none.jsonl"), 2, "does not exist"),
        (("--out", "{tmp}", "--prompts", "{tmp}/empty.jsonl"), 2, "has no prompts; at least one"),
        (("--out", "{tmp}", "--prompts", "{tmp}/one.jsonl"), 2, "at least 2 are needed"),
        (("--out", "{tmp}", "--questions", "{tmp}/few.jsonl"), 2, "at least 381 are needed"),
        (("--out", "{tmp}", "--questions", "{tmp}/one.jsonl"), 2, "has no answer"),
        (("--out", "{tmp}", "--url", ":9", "--baseline-url", ":9"), 2, "add --prompts FILE"),
        (("--out", "{tmp}", "--url", ":9", "--baseline-url", ":9", "--prompts", "{tmp}/two.jsonl"),
         4, "does not answer"),
        (("--out", "{tmp}", "--gates", "law", "--url", ":9", "--baseline-url", ":9"),
         2, "needs the engine in this process"),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "one.jsonl").write_text('{"prompt": "one"}\n')
    (tmp_path / "two.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    questions(tmp_path / "few.jsonl", 20)
    found, out, err = certify(capsys, *(word.format(tmp=tmp_path) for word in words))
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) <= 2
    assert list_certificates(tmp_path) == ([], [])
