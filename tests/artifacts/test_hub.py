"""Push and pull against a hub on this machine; the network is never used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bundle_kit import cost_arguments, make_step
from hub_kit import Hub, running_hub

from hybridspec.artifacts.bundle import load_bundle, write_cost
from hybridspec.artifacts.hub import HubPlace, parse_place
from hybridspec.errors import UsageError

PLOT = b"\x89PNG\r\n\x1a\n" + b"0" * 50


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
    with running_hub() as server:
        yield server


def environment(hub: Hub, home: Path, **extra: str) -> dict[str, str]:
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_TOKEN": "hf_local",
        "OMP_NUM_THREADS": "1",
        **extra,
    }


def bundle_command(
    hub: Hub, home: Path, *arguments: object, **extra: str
) -> subprocess.CompletedProcess[str]:
    """A process of its own: huggingface_hub reads its endpoint when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "hybridspec.cli.main", "bundle", *map(str, arguments)],
        env=environment(hub, home, **extra),
        capture_output=True,
        text=True,
        check=False,
    )


def test_push_and_pull_through_a_hub(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    (bundle / "plots").mkdir()
    (bundle / "plots" / "step-cost.png").write_bytes(PLOT)
    home = tmp_path / "home"
    pushed = bundle_command(hub, home, "push", bundle, "hf://me/costs/h200", "--private", "--json")
    assert pushed.returncode == 0, pushed.stderr
    first = json.loads(pushed.stdout)["address"].rsplit("/", 1)[1]
    assert hub.private == {"me/costs"}
    files = hub.commits["me/costs"][-1]
    assert b"Content id" in files["h200/README.md"]
    assert all(name.startswith("h200/") for name in files)

    pulled = bundle_command(hub, home, "pull", "hf://me/costs/h200", "-o", tmp_path / "got")
    assert pulled.returncode == 0, pulled.stderr
    expected = load_bundle(bundle).content_id
    assert load_bundle(tmp_path / "got").content_id == expected
    assert (tmp_path / "got" / "plots" / "step-cost.png").read_bytes() == PLOT

    write_cost(bundle, **cost_arguments(step=make_step(factor=1.5)))
    assert bundle_command(hub, home, "push", bundle, "hf://me/costs/h200").returncode == 0
    later = hub.commits["me/costs"][-1]
    assert len(later) == len(files), "files of the bundle before were left behind"
    again = bundle_command(hub, home, "pull", "hf://me/costs/h200", "-o", tmp_path / "got")
    assert again.returncode == 3
    assert "holds another bundle" in again.stderr
    old = bundle_command(hub, home, "pull", f"hf://me/costs/h200@{first}", "-o", tmp_path / "old")
    assert old.returncode == 0, old.stderr
    assert load_bundle(tmp_path / "old").content_id == expected


MANY = """
import contextlib, io, json, sys
from hybridspec.cli.main import run
found = []
for arguments in json.loads(sys.argv[1]):
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = run(["bundle", *arguments])
    found.append([code, text.getvalue()])
print(json.dumps(found))
"""


def test_what_a_hub_can_get_wrong_is_refused(hub: Hub, bundle: Path, tmp_path: Path) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    assert bundle_command(hub, home, "push", bundle, "hf://me/good").returncode == 0
    files = hub.commits["me/good"][-1]
    step = next(name for name in files if name.startswith("cost/step"))
    hub.commits["me/damaged"] = [files | {step: files[step][:-1] + b"?"}]
    hub.commits["me/longer"] = [files | {step: files[step] + b"more"}]
    hub.commits["me/shorter"] = [{name: files[name] for name in files if name != step}]
    hub.commits["me/future"] = [
        files | {"manifest.json": files["manifest.json"].replace(b'"1.2"', b'"1.9"')}
    ]
    expected = {
        "hf://me/none": "is not there",
        "hf://me/good/sub": "holds no bundle",
        "hf://me/good@v9": "holds no bundle",
        "hf://me/damaged": "damaged",
        "hf://me/longer": "are allowed",
        "hf://me/shorter": "holds no bundle",
        "hf://me/future": "which wrote it, or newer",
    }
    wanted = json.dumps([["pull", place, "-o", str(out)] for place in expected])
    done = subprocess.run(
        [sys.executable, "-c", MANY, wanted],
        env=environment(hub, home),
        capture_output=True,
        text=True,
        check=True,
    )
    for (place, message), (code, text) in zip(
        expected.items(), json.loads(done.stdout), strict=True
    ):
        assert (code, message in text) == (3, True), f"{place}: {text}"
        assert "Traceback" not in text
    hub.fail_with = 403
    refused = bundle_command(hub, home, "pull", "hf://me/good", "-o", out)
    assert (refused.returncode, "access is refused" in refused.stderr) == (3, True), refused.stderr
    gone = bundle_command(
        hub, home, "pull", "hf://me/good", "-o", out, HF_ENDPOINT="http://127.0.0.1:1"
    )
    assert (gone.returncode, "cannot be reached" in gone.stderr) == (4, True), gone.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("hf://a/b", HubPlace("a/b")),
        ("hf://datasets/a/b", HubPlace("a/b")),
        ("hf://a/b/c/d@v1", HubPlace("a/b", "c/d", "v1")),
        ("hf://a/b@refs/pr/1", HubPlace("a/b", "", "refs/pr/1")),
        ("file:///tmp/a%20b", Path("/tmp/a b")),
        ("file://localhost/tmp/a", Path("/tmp/a")),
        ("a/b", Path("a/b")),
    ],
)
def test_places(text: str, place: Path | HubPlace) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hf://a",
        "hf://a/../b",
        "hf://a/b/..",
        "hf:///a/b",
        "hf://a/b@",
        "hf://a/b c",
        "s3://a/b",
        "file://host/a",
        "file:a",
    ],
)
def test_places_that_are_none(text: str) -> None:
    with pytest.raises(UsageError):
        parse_place(text)
