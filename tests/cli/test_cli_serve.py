"""`hybridspec serve`: what it refuses before loading weights, and what it then serves."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from command_kit import Made
from safetensors.torch import load_file, save_file

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.calibrate.served import part_hazards
from hybridspec.calibrate.trace import read_trace
from hybridspec.cli.main import run
from hybridspec.costmodels.throughput import fit_throughput
from hybridspec.demo import assets
from hybridspec.pricing import rounds_of

THREADS = ("--threads", "1")


@contextmanager
def server(*arguments: object) -> Iterator[tuple[str, list[str], subprocess.Popen[str]]]:
    """A running server: its URL, the lines it wrote until it listened, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", "serve", "--port", "0", *THREADS]
        + [str(word) for word in arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line.rstrip())
            if line.startswith("listening "):
                break
        assert process.poll() is None, lines
        yield lines[-1].split()[1].removesuffix("/v1"), lines, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def lengths(answer: dict) -> set[int]:
    """Verify lengths that occurred; the answer counts the rounds of each."""
    return {length for length, rounds in enumerate(answer["hybridspec"]["lengths"]) if rounds}


def complete(url: str, model: str, **options: object) -> dict:
    answer = httpx.post(
        f"{url}/v1/completions",
        json={"model": model, "prompt": "import os\n", "max_tokens": 24, "temperature": 0}
        | options,
        timeout=60.0,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_bundle_makes_the_policy_active(made: Made) -> None:
    with server("--bundle", made.bundle) as (url, lines, process):
        assert any("active: yes" in line for line in lines)
        # The bundle was measured with one request at a time.
        assert any("1 slots" in line for line in lines)
        assert "engine    reference, float32 on cpu, threads: 1" in lines
        assert httpx.get(f"{url}/health").json()["policy_active"] is True
        with_policy = complete(url, "hybridspec-embedded")
        plain = complete(url, "hybridspec-embedded", hybridspec={"off": True})
        assert with_policy["choices"][0]["text"] == plain["choices"][0]["text"]
        assert lengths(plain) == {0}
        assert max(lengths(with_policy)) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_without_bundle_it_falls_back_aloud() -> None:
    with server("--served-model-name", "mine", "--max-batch", "2") as (url, lines, _):
        assert lines[0].startswith("warning: no bundle is given")
        assert "16 rows" in lines[0]
        assert any("active: no" in line for line in lines)
        assert httpx.get(f"{url}/health").json()["policy_active"] is False
        assert lengths(complete(url, "mine")) == {16}


def test_fixed_and_none_need_no_bundle() -> None:
    with server("--policy", "fixed", "--fixed-length", "3") as (url, lines, _):
        assert not any(line.startswith("warning") for line in lines)
        assert lengths(complete(url, "hybridspec-embedded")) == {3}
    with server(assets.TARGET, "--policy", "none") as (url, _, _):
        assert lengths(complete(url, "target")) == {0}


@pytest.mark.parametrize("policy", ["auto", "none"])
def test_fixed_length_of_another_policy_is_refused(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [] if policy == "auto" else ["--policy", policy]
    code, line = refused([*words, "--fixed-length", "16"], capsys)
    assert code == 2
    assert line.startswith(f"error: `--fixed-length 16` has no effect with `--policy {policy}`: ")
    assert "add `--policy fixed`" in line


def other_target(folder: Path) -> Path:
    """The embedded target with one weight changed."""
    shutil.copytree(assets.TARGET, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * 1.5
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def refused(arguments: Sequence[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run(["serve", "--port", "0", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    assert "loading" not in err
    return code, err.splitlines()[-1]


def test_bundle_of_other_weights_is_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = other_target(tmp_path / "target")
    words = [target, "--drafter", assets.DRAFTER, "--bundle", made.bundle, *THREADS]
    code, line = refused(words, capsys)
    assert code == 3
    assert line.startswith("error: target_digest: ")
    assert "hybridspec calibrate" in line


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--threads", "2"), "threads"),
        (("--threads", "1", "--dtype", "bfloat16"), "dtype"),
        (("--threads", "1", "--max-batch", "2"), "max_batch"),
    ],
    ids=["threads", "dtype", "max_batch"],
)
def test_bundle_of_another_setting_is_refused(
    made: Made,
    arguments: tuple[str, ...],
    field: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, line = refused(["--bundle", made.bundle, *arguments], capsys)
    assert code == 3
    assert line.startswith(f"error: {field}: ")


def test_half_a_bundle_is_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = tmp_path / "half"
    assert run(["calibrate", "--from-trace", str(made.trace), "--out", str(half), "-q"]) == 0
    capsys.readouterr()
    code, line = refused(["--bundle", half], capsys)
    assert code == 3
    assert "profile-latency" in line


def test_damaged_bundle_is_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = made.copy(tmp_path)
    (knots,) = bundle.glob("calibration/knots-*.parquet")
    knots.write_bytes(knots.read_bytes()[:-20])
    code, line = refused(["--bundle", bundle], capsys)
    assert code == 3
    assert "knots" in line


def test_taken_port_is_refused_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(["serve", "--port", str(port), "--bundle", "nothing-there"]) == 4
    assert f"port {port}" in capsys.readouterr().err


def test_bundle_without_drafter_is_refused(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    words = [assets.TARGET, "--policy", "none", "--bundle", made.bundle, *THREADS]
    code, line = refused(words, capsys)
    assert code == 2
    assert "--drafter" in line


def test_fields_that_may_differ_are_known(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    code, line = refused(["--bundle", made.bundle, *THREADS, "--allow", "colour"], capsys)
    assert code == 2
    assert "--allow colour is no field; known are" in line
    # What is not allowed is refused as ever.
    words = ["--bundle", made.bundle, "--threads", "2", "--allow", "dtype"]
    assert refused(words, capsys)[1].startswith("error: threads: ")


def test_boosted_trees_are_served_and_priced_and_allowed_fields_only_warn(
    made: Made, tmp_path: Path
) -> None:
    bundle = made.copy(tmp_path)
    fit = ["calibrate", "--from-trace", str(made.trace), "--out", str(bundle), "-q"]
    assert run([*fit, "--model", "boosted"]) == 0
    loaded = load_bundle(bundle)
    assert loaded.calibration is not None
    assert loaded.cost is not None
    throughput = loaded.cost.throughput
    assert throughput is not None
    assert throughput.hazard == "trees"
    hazards = part_hazards(loaded.calibration)
    rounds = rounds_of(read_trace(made.trace), hazards.predict, split="calibration")
    expected = fit_throughput(rounds, loaded.cost.step)
    assert throughput.tokens_per_us.tolist() == expected.tokens_per_us.tolist()
    with server("--bundle", bundle, "--max-batch", "2", "--allow", "max_batch") as (url, lines, _):
        assert any("max_batch" in line for line in lines if line.startswith("warning: "))
        assert any("boosted trees, router correction off" in line for line in lines)
        assert httpx.get(f"{url}/health").json()["policy_active"] is True
        with_policy = complete(url, "hybridspec-embedded")
        plain = complete(url, "hybridspec-embedded", hybridspec={"off": True})
        assert with_policy["choices"][0]["text"] == plain["choices"][0]["text"]
        assert max(lengths(with_policy)) > 0
