"""`hybridspec profile-latency` on the embedded pair, and the pricing of its bundle."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from command_kit import NOISY, PROFILE, PROFILE_ATTEMPTS, Made, hybridspec

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.digest import config_digest
from hybridspec.cli import _output, _profile_run
from hybridspec.cli._bundle_folder import command_line
from hybridspec.cli._output import Output
from hybridspec.cli._profile_plan import Plan
from hybridspec.cli.main import run
from hybridspec.costmodels.anchors import read_anchors
from hybridspec.costmodels.measure import measure_interleaved
from hybridspec.demo import assets


def test_bundle_holds_what_the_result_says(made: Made) -> None:
    said = json.loads(made.profile.stdout)
    cost = load_bundle(made.bundle).cost
    assert cost is not None
    assert said["content_id"] == cost.content_id
    assert cost.step.batch_sizes.tolist() == said["batch_sizes"] == [1]
    assert cost.step.context_tokens.tolist() == said["contexts"] == [64]
    np.testing.assert_array_equal(cost.step.latency_us, np.asarray(said["latency_us"]))
    identity = cost.identity
    assert identity.architecture_digest == config_digest(assets.TARGET)
    assert (identity.threads, identity.max_batch, identity.engine) == (1, 1, "reference")
    assert cost.experts.num_rows > 0
    assert (made.bundle / "plots" / "step-cost.svg").stat().st_size > 1000
    assert (made.bundle / "plots" / "expert-slope.svg").stat().st_size > 1000


def test_prediction_is_ordered_as_it_must_be(made: Made) -> None:
    rates = json.loads(made.profile.stdout)["predicted_tokens_per_s"]
    fixed = {name: rate for name, rate in rates.items() if name.startswith("fixed-")}
    assert len(fixed) == 16
    assert rates["oracle"] >= max(fixed.values())
    assert rates["oracle"] >= rates["hybridspec"] > 0


def test_throughput_is_fitted_for_both_parts(made: Made) -> None:
    bundle = load_bundle(made.bundle)
    assert bundle.warnings == ()
    assert bundle.cost is not None
    throughput = bundle.cost.throughput
    assert throughput is not None
    assert throughput.batch_sizes.tolist() == [1]


class Rounds:
    """`measure`, whose rounds are measured once and told to whoever asks again."""

    def __init__(self) -> None:
        self.measure = _profile_run.measure
        self.told: tuple[pa.Table, pa.Table, int] | None = None

    def __call__(self, plan: Plan, *, seed: int, output: Output) -> tuple[pa.Table, pa.Table, int]:
        if self.told is None:
            self.told = self.measure(plan, seed=seed, output=output)
        return self.told


@pytest.fixture(scope="module")
def rounds() -> Rounds:
    return Rounds()


@pytest.fixture
def profile_here(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process; it measures again where a machine that drifts is refused."""
    monkeypatch.setattr(_profile_run, "measure", rounds)

    def command(*arguments: str) -> int:
        code = run(["profile-latency", *PROFILE, *arguments])
        for _ in range(PROFILE_ATTEMPTS - 1):
            if code == NOISY:
                rounds.told = None
                code = run(["profile-latency", *PROFILE, *arguments])
        return code

    return command


def test_costs_before_hazards(
    made: Made,
    tmp_path: Path,
    profile_here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bundle"
    assert profile_here("--out", str(out)) == 0
    said, told = capsys.readouterr()
    assert said == f"{out}\n"
    assert "next: `hybridspec calibrate" in told
    assert "L=16" in told
    assert run(["calibrate", "--from-trace", str(made.trace), "--out", str(out), "-q"]) == 0
    cost = load_bundle(out).cost
    assert cost is not None
    assert cost.throughput is not None


def test_lost_trace_is_said_and_can_be_named_later(
    made: Made,
    tmp_path: Path,
    profile_here: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = made.copy(tmp_path)
    shutil.rmtree(tmp_path / "bundle.trace")
    assert profile_here("--out", str(bundle), "-q") == 0
    told = capsys.readouterr().err
    assert "the trace is not where it was" in told
    assert "--from-trace" in told
    cost = load_bundle(bundle).cost
    assert cost is not None
    assert cost.throughput is None, "fitted for the old costs, so of no use"


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--contexts", "64,96", "--batch-sizes", "1,3", "--repeats", "6", "--threads", "1"]
    out = tmp_path / "bundle"
    assert run(["profile-latency", *arguments, "--dry-run", "--json", "--out", str(out)]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["step_rounds"] == 2 * 2 * 17 * 7
    assert plan["expert_rounds"] > 0
    assert plan["graph_control"] == "eager", "the embedded pair is too narrow for the kernels"
    assert list(tmp_path.iterdir()) == []


def test_anchors_are_a_file_of_few_lengths(tmp_path: Path) -> None:
    path = tmp_path / "anchors.parquet"
    arguments = ("--contexts", "64", "--batch-sizes", "1", "--repeats", "5", "--threads", "1")
    done = hybridspec("profile-latency", *arguments, "--anchors", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{path}\n"
    anchors = read_anchors(path)
    assert anchors.lengths.tolist() == [0, 1, 2, 4, 8, 16]
    assert (anchors.latency_us > 0).all()
    assert anchors.identity.graph_tiers == "none"
    assert [found.name for found in tmp_path.iterdir()] == ["anchors.parquet"], "no bundle"


class Clock:
    """Takes the place of `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown_while_measuring(
    budget_s: float, pace: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[float]]:
    """Sweeps kept of 20 over 10 cases, and the progress after each round of so many seconds."""
    clock, rounds = Clock(), itertools.count(1)
    shown = [0.0]

    class Bar:
        def advance(self, amount: float = 1.0, *, note: str = "") -> None:
            shown.append(shown[-1] + amount)

    def round_() -> float:
        clock.now += pace(next(rounds))
        return clock.now

    monkeypatch.setattr(_profile_run, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(Output, "progress", lambda *_: contextlib.nullcontext(Bar()))
    with _profile_run._rounds(Output(), "rounds", sweeps=21, budget_s=budget_s) as progress:
        measured = measure_interleaved(
            dict.fromkeys(range(10), round_),
            repeats=20,
            budget_s=budget_s,
            progress=progress,
            clock=clock,
        )
    return measured.sweeps, shown[1:]


@pytest.mark.parametrize(("budget_s", "sweeps"), [(1e6, 20), (211.0, 20), (95.0, 9), (60.0, 5)])
def test_progress_goes_towards_the_end_that_the_budget_sets(
    budget_s: float, sweeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, shown = shown_while_measuring(budget_s, lambda _: 1.0, monkeypatch)
    assert kept == sweeps
    np.testing.assert_allclose(shown, np.arange(1, len(shown) + 1) / len(shown))


@pytest.mark.parametrize("budget_s", [1e6, 130.0])
def test_progress_never_turns_back_and_ends_full(
    budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pace in (
        lambda number: 30.0 if number == 1 else 1.0,  # compiles first
        lambda number: 0.1 if number < 100 else 3.0,
    ):
        _, shown = shown_while_measuring(budget_s, pace, monkeypatch)
        assert min(np.diff([0.0, *shown])) >= 0
        assert shown[-1] == pytest.approx(1.0)


def test_progress_tells_the_time_that_the_budget_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    # Of these modules alone, not of the whole process, by whose clock other threads sleep.
    for module in (_profile_run, _output):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    with _profile_run._rounds(Output(), "rounds", sweeps=10, budget_s=60.0) as progress:
        for done in range(1, 61):
            clock.now += 1.0
            progress(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "rounds: 25%, about 45 s left",
        "rounds: 50%, about 30 s left",
        "rounds: 75%, about 15 s left",
        "rounds: 100%, about 0 s left",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--contexts", "100000"], 2, "target holds"),
        (["--contexts", "2"], 2, "at least 4"),
        (["--repeats", "4"], 2, "repeats"),
        (["nothing-there", "--drafter", "d"], 3, "nothing-there"),
        (["nothing-there"], 2, "--drafter"),
        (["--dtype", "int8"], 2, "int8"),
        (["--graph-control", "masked", "--device", "cpu"], 2, "need a GPU"),
        (["--graph-control", "graphs"], 2, "graphs"),
        (["--engine", "sglang", "--graph-control", "host"], 2, "--engine reference"),
        (["--out", "FULL"], 2, "notes.txt"),
        (["--quick", "--budget", "1", "--batch-sizes", "8", "--threads", "1"], 5, "budget"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "notes.txt").write_text("mine")
    assert run(["profile-latency", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["FULL"]


def test_costs_of_another_pair_than_the_hazards_are_refused(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(made.bundle, tmp_path / "bundle")
    other = shutil.copytree(assets.DRAFTER, tmp_path / "drafter")
    config = json.loads((other / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    pair = [str(assets.TARGET), "--drafter", str(other)]
    words = ["--dry-run", "--out", str(out), "--contexts", "64"]
    assert run(["profile-latency", *pair, *words]) == 3
    told = capsys.readouterr().err
    assert f"{out} has hazards of another pair: its drafter is " in told
    assert "TARGET is left out" not in told
    assert run(["profile-latency", *words]) == 0


def test_the_pair_left_out_is_named_where_it_is_the_wrong_one(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hybridspec.cli._bundle_folder.model_digest", lambda folder: "0" * 64)
    assert run(["profile-latency", "--dry-run", "--out", str(made.bundle)]) == 3
    told = capsys.readouterr().err
    assert "here it is 000000000000 (" in told
    assert "the embedded one, because TARGET is left out" in told


def test_the_next_command_names_what_was_named() -> None:
    line = command_line(
        "profile-latency",
        Path("my models/target"),
        Path("d"),
        engine="sglang",
        dtype="bfloat16",
        threads=2,
        out=Path("b"),
    )
    assert line == (
        "hybridspec profile-latency 'my models/target' --drafter d --engine sglang "
        "--dtype bfloat16 --threads 2 --out b"
    )
    assert command_line("calibrate", None, None, out=Path("b")) == "hybridspec calibrate --out b"
