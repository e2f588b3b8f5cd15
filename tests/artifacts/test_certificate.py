"""A certificate is read back as written, or refused: never with other numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.artifacts.certificate import (
    Certificate,
    Evidence,
    Gate,
    Subject,
    folder_of,
    list_certificates,
    read_certificate,
    read_evidence,
    write_certificate,
)
from hybridspec.errors import BundleError

SUBJECT = Subject("reference", "0.1.0", "float32", "a" * 64, "b" * 64, "c" * 64, "fixed 16")
GATES = [
    Gate(name="control", verdict="passed", message="fine", figures={"texts": 2.0}),
    Gate(name="greedy", verdict="passed", message="fine", figures={"texts": 2.0, "gap": 1e-6}),
    Gate(name="quality", verdict="not run", message="not asked for"),
]
EVIDENCE = Evidence(
    texts={
        "arm": ["plain", "hybridspec"],
        "prompt_id": ["p", "p"],
        "category": ["c", "c"],
        "text": ["é\n", ""],
        "token_ids": [[1, 2, 3], []],
        "num_tokens": [3, 0],
        "loop_at": [-1, -1],
        "decode_us": [1.5, 0.0],
    },
    differences={
        "comparison": ["greedy"],
        "prompt_id": ["p"],
        "position": [1],
        "plain": ["token 1"],
        "other": ["token 2"],
        "gap_logits": [1e-6],
        "allowed_logits": [1e-5],
        "kind": ["tie"],
    },
    answers={
        name: []
        for name in (
            "prompt_id", "expected", "plain", "hybridspec", "plain_correct", "hybridspec_correct"
        )
    },
)  # fmt: skip


def write(root: Path, **changes: Any) -> Certificate:
    arguments: dict[str, Any] = {
        "subject": SUBJECT,
        "settings": {"gates": ["control", "greedy"], "seed": 0},
        "gates": GATES,
        "evidence": EVIDENCE,
        "report": "# Certificate\n",
        "created": "2026-01-01T00:00:00+00:00",
    }
    return write_certificate(root, **arguments | changes)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("certificate")
    write(root)
    return root


def name_of(root: Path) -> str:
    return folder_of(root, SUBJECT).name


def test_round_trip(shared: Path) -> None:
    found = read_certificate(shared, name_of(shared))
    assert found.subject == SUBJECT
    assert found.verdict == "passed"
    assert [gate.figures for gate in found.gates] == [gate.figures for gate in GATES]
    assert read_evidence(shared, found) == EVIDENCE
    assert list_certificates(shared) == ([found], [])
    assert (folder_of(shared, SUBJECT) / "report.md").read_text() == "# Certificate\n"


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (("passed", "passed"), "passed"),
        (("passed", "not run"), "incomplete"),
        (("failed", "not run"), "failed"),
        (("passed", "failed"), "failed"),
    ],
)
def test_verdict(tmp_path: Path, verdicts: tuple[Any, Any], verdict: str) -> None:
    gates = [
        gate.model_copy(update={"verdict": v}) for gate, v in zip(GATES, verdicts, strict=False)
    ]
    assert write(tmp_path, gates=gates).verdict == verdict


def test_nothing_asked_is_not_passed(tmp_path: Path) -> None:
    assert write(tmp_path, settings={"gates": []}).verdict == "incomplete"


def test_same_subject_is_replaced_others_stay(tmp_path: Path) -> None:
    first = write(tmp_path)
    write(tmp_path, subject=replace(SUBJECT, dtype="bfloat16"), created="2026-01-02T00:00:00+00:00")
    again = write(tmp_path, gates=GATES[:1])
    assert again.content_id != first.content_id
    found, refused = list_certificates(tmp_path)
    assert [c.subject.dtype for c in found] == ["bfloat16", "float32"]
    assert refused == []
    assert len(list(folder_of(tmp_path, SUBJECT).glob("*.parquet"))) == 4


def test_time_does_not_count(tmp_path: Path) -> None:
    one, two = write(tmp_path), write(tmp_path, created="2027-01-01T00:00:00+00:00")
    assert one.content_id == two.content_id


def load(root: Path) -> tuple[Certificate, Evidence] | str:
    try:
        found = read_certificate(root, name_of(root))
        return found, read_evidence(root, found)
    except BundleError as error:
        refusal = str(error)
    assert "\n" not in refusal
    return refusal


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_random_damage_is_refused_or_harmless(shared: Path, data: st.DataObject) -> None:
    intact = load(shared)
    assert not isinstance(intact, str)
    files = sorted(p for p in folder_of(shared, SUBJECT).iterdir() if p.suffix != ".md")
    path = data.draw(st.sampled_from([*files, *[p for p in files if p.suffix == ".json"] * 4]))
    original = path.read_bytes()
    damaged = bytearray(original)
    at = data.draw(st.integers(0, len(damaged) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "swap", "insert"])):
        case "flip":
            damaged[at] ^= data.draw(st.integers(1, 255))
        case "cut":
            del damaged[at:]
        case "swap":
            damaged = bytearray(data.draw(st.sampled_from(files)).read_bytes())
        case _:
            damaged[at:at] = data.draw(st.binary(max_size=4))
    try:
        path.write_bytes(damaged)
        found = load(shared)
        if not isinstance(found, str):
            # No digest covers the time, the writer and spaces.
            same = {"created": intact[0].created, "writer": intact[0].writer}
            assert found[0].model_copy(update=same) == intact[0]
            assert found[1] == intact[1]
    finally:
        path.write_bytes(original)


def edit(root: Path, change: Any) -> None:
    path = folder_of(root, SUBJECT) / "certificate.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["subject"].update(dtype="bfloat16"), "does not belong to the content"),
        (lambda raw: raw["gates"][0].update(verdict="failed"), "does not belong to the content"),
        (lambda raw: raw["settings"].update(seed=1), "does not belong to the content"),
        (lambda raw: raw.update(schema_version="2.0"), "this version reads 1.0"),
        (lambda raw: raw["gates"][0].update(verdict="fine"), "gates.0.verdict"),
        (lambda raw: raw["files"].pop(), "other files than a certificate has"),
        (lambda raw: raw["files"][0].update(path="cost/step-0.parquet"), "which is not its own"),
        (lambda raw: raw["files"][0].update(path="../../x/y"), "files.0.path"),
    ],
)
def test_edits_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(BundleError, match=message):
        read_certificate(tmp_path, name_of(tmp_path))
    assert list_certificates(tmp_path)[0] == []


def test_certificate_of_another_place_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    folder = folder_of(tmp_path, SUBJECT)
    shutil.copytree(folder, folder.with_name("0" * 16))
    with pytest.raises(BundleError, match="which is not its own"):
        read_certificate(tmp_path, "0" * 16)


def test_links_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "real")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "certificates").symlink_to(tmp_path / "real" / "certificates")
    with pytest.raises(BundleError, match="is a link"):
        read_certificate(tmp_path / "copy", name_of(tmp_path))
    assert "is a link" in list_certificates(tmp_path / "copy")[1][0]
