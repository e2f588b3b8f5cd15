"""The command line and the configuration that `hybridspec serve --engine sglang` makes."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from hybridspec.artifacts.bundle import load_bundle, write_cost, write_throughput
from hybridspec.cli import _profile_sglang_run
from hybridspec.cli._serve_sglang_run import NOT_FOR_SGLANG, Request, make_launch
from hybridspec.cli.main import run
from hybridspec.demo import assets
from hybridspec.errors import BundleError, ModelError, UsageError
from hybridspec.reference.config import load_target_config
from hybridspec.sglang_plugin import installation
from hybridspec.sglang_plugin.config import read_config
from hybridspec.sglang_plugin.launch import (
    added_note,
    arguments,
    check_flags,
    with_defaults,
    write_config,
)
from hybridspec.sglang_plugin.server_rounds import MOST_TOKENS

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "benchmarks" / "results" / "cpu_demo_bundle"
needs_bundle = pytest.mark.skipif(not BUNDLE.is_dir(), reason="no demonstration bundle (an sdist)")


def request(**changes: object) -> Request:
    plain = Request(
        target=Path("org/target"),
        drafter=Path("org/drafter"),
        bundle=None,
        host="127.0.0.1",
        port=8000,
        served_model_name=None,
        policy="auto",
        fixed_length=16,
        router_correction="off",
        allow=(),
        given=frozenset(),
        flags=(),
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_arguments_name_the_pair_and_pass_the_rest_on() -> None:
    launch, note = make_launch(
        request(served_model_name="mine", flags=("--tp-size", "2", "--page-size=1"))
    )
    made = arguments(launch)
    assert made[:2] == ["-m", "sglang.launch_server"]
    flags = dict(zip(made[2:14:2], made[3:14:2], strict=True))
    assert flags == {
        "--model-path": "org/target",
        "--speculative-algorithm": "HYBRIDSPEC",
        "--speculative-draft-model-path": "org/drafter",
        "--host": "127.0.0.1",
        "--port": "8000",
        "--served-model-name": "mine",
    }
    assert made[14:] == ["--tp-size", "2", "--page-size=1", "--disable-radix-cache"]
    assert "16 rows" in note


def test_defaults_leave_what_was_said() -> None:
    said = ("--max-running-requests=3", "--disable-radix-cache")
    assert with_defaults(said, max_batch=8) == said
    assert with_defaults((), max_batch=8)[-2:] == ("--max-running-requests", "8")
    assert "--max-running-requests" not in with_defaults((), max_batch=None)


@pytest.mark.parametrize(
    "said",
    [
        ("--mamba-radix-cache-strategy", "extra_buffer"),
        ("--mamba-radix-cache-strategy=extra_buffer",),
        ("--mamba-scheduler-strategy", "extra_buffer"),
        ("--mamba-track-interval", "128"),
        # Refused when SGLang starts, by the name of what was asked for.
        ("--mamba-radix-cache-strategy", "no_buffer"),
    ],
)
def test_who_asks_for_a_radix_cache_gets_it(said: tuple[str, ...]) -> None:
    assert with_defaults(said, max_batch=None) == said
    assert with_defaults(("--mem-fraction-static", "0.8"), max_batch=None)[-1] == (
        "--disable-radix-cache"
    )


@pytest.mark.parametrize(
    "said",
    [
        ("--mamba-radix-cache", "extra_buffer"),
        ("--disable-radix",),
        ("--mamba-track=64",),
    ],
)
def test_abbreviations_count_as_the_flags_they_stand_for(said: tuple[str, ...]) -> None:
    assert with_defaults(said, max_batch=None) == said
    assert with_defaults(("--max-running-req=2", *said), max_batch=8) == (
        "--max-running-req=2",
        *said,
    )
    # Which of many flags this would be SGLang says itself.
    assert with_defaults(("--m",), max_batch=None)[-1] == "--disable-radix-cache"


def test_what_was_added_is_said() -> None:
    given = ("--tp-size", "2")
    said = added_note(given, with_defaults(given, max_batch=4))
    assert said is not None
    assert said.startswith(
        "added to SGLang's flags: --disable-radix-cache --max-running-requests 4;"
    )
    assert "`-- --mamba-radix-cache-strategy extra_buffer`" in said
    cached = (*given, "--mamba-radix-cache-strategy", "extra_buffer")
    assert added_note(cached, with_defaults(cached, max_batch=4)) == (
        "added to SGLang's flags: --max-running-requests 4"
    )
    assert added_note(cached, with_defaults(cached, max_batch=None)) is None
    file = ("--config", "flags.yaml")
    said = added_note(file, with_defaults(file, max_batch=None))
    assert said is not None
    assert said.endswith("the file of --config is not read here, and what it says of them loses")


def test_a_forced_length_of_the_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSPEC_FORCE_LENGTH", "4")
    _, note = make_launch(request(policy="fixed", fixed_length=9))
    assert note.startswith("HYBRIDSPEC_FORCE_LENGTH=4 is set, so every round verifies 4 rows")
    monkeypatch.setenv("HYBRIDSPEC_FORCE_LENGTH", "17")
    with pytest.raises(UsageError, match=r"set 1\.\.16, or unset it"):
        make_launch(request())


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("missing", ["../nowhere/model", "a/b/c", "/nowhere", "target"])
def test_mistyped_folders_are_refused_before_a_hub_is_asked(role: str, missing: str) -> None:
    with pytest.raises(ModelError, match=f"{role} {missing} is not there: name a folder, or ORG"):
        make_launch(request(**{role: Path(missing)}))


def test_folders_without_a_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json: name a model's folder"):
        make_launch(request(target=tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file is no folder"):
        make_launch(request(drafter=tmp_path / "file"))
    launch, _ = make_launch(request(target=Path("org/model"), drafter=assets.DRAFTER))
    assert launch.target == "org/model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ModelError, match="is not there, though models is a folder"):
        make_launch(request(target=Path("models/target")))


def test_a_home_folder_is_handed_on_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    launch, _ = make_launch(request(drafter=Path("~/m")))
    assert launch.drafter == str(tmp_path / "m")


@pytest.mark.parametrize("command", ["calibrate", "profile-latency"])
def test_measuring_commands_have_no_port_to_name(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(assets.TARGET), "--drafter", str(assets.DRAFTER), "--out"]
    arguments += [str(tmp_path / "b"), "--engine", "sglang", "--dry-run", "--", "--port", "3"]
    assert run(arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --port behind -- is set by hybridspec: leave it out, the")


@pytest.mark.parametrize(
    ("policy", "force", "fixed"), [("auto", None, 16), ("fixed", 5, 5)], ids=["auto", "fixed"]
)
def test_configuration_is_read_back_by_the_plugin(
    policy: str, force: int | None, fixed: int, tmp_path: Path
) -> None:
    launch, _ = make_launch(request(policy=policy, fixed_length=5, router_correction="select"))
    path = write_config(launch.config, tmp_path)
    read = read_config({"HYBRIDSPEC_CONFIG": str(path)})
    assert read == launch.config
    assert (read.force_length, read.fixed_length) == (force, fixed)
    assert read.correction == "select"
    assert write_config(launch.config, tmp_path) == path, "the same configuration, the same file"


def test_configuration_lies_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch, _ = make_launch(request())
    path = write_config(launch.config)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert json.loads(path.read_bytes())["bundle"] is None
    path.parent.chmod(0o755)
    with pytest.raises(UsageError, match="not a private folder"):
        write_config(launch.config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "3"], "use --port"),
        (["--model=x"], "name TARGET before --"),
        (["--po", "3"], r"--po \(--port\) behind -- is set by hybridspec: use --port"),
        (["--served-model", "x"], r"--served-model \(--served-model-name\) behind -- is set by"),
        (["--speculative-algorithm", "DFLASH"], "--engine sglang sets it"),
        (["word"], "no flag"),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else "",
)
def test_flags_of_our_own_are_refused_behind_the_dashes(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_flags(flags)


@pytest.mark.parametrize("name", NOT_FOR_SGLANG)
def test_options_of_the_reference_engine_are_refused_by_name(name: str) -> None:
    flag, instead = NOT_FOR_SGLANG[name]
    with pytest.raises(UsageError, match=f"{flag} is an option of --engine reference") as refused:
        make_launch(request(given=frozenset({name})))
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "sglang"], "needs TARGET and --drafter"),
        (["t", "--engine", "sglang"], "add --drafter DIR"),
        (["t", "--drafter", "d", "--engine", "sglang", "--threads", "3"], "--threads is an option"),
        (["t", "--drafter", "d", "--engine", "sglang", "--policy", "none"], "sglang serve t"),
        (
            ["t", "--drafter", "d", "--engine", "sglang", "--fixed-length", "8"],
            "`--fixed-length 8` has no effect with `--policy auto`: add `--policy fixed`",
        ),
        (["o/t", "--drafter", "o/d", "--engine", "sglang", "--port", "0"], "name a free port"),
        (["t", "--drafter", "d", "--", "--tp-size", "2"], "'--tp-size' is not understood"),
        (["t", "./d"], "'./d' is one word too many: one TARGET is taken, and its drafter with --d"),
        (["o/t", "--drafter", "o/d", "--engine", "sglang", "--", "2"], "'2' is no flag"),
    ],
)
def test_command_line_refuses_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


@pytest.mark.parametrize("engine", ["reference", "sglang"])
@pytest.mark.parametrize("command", ["serve", "profile-latency", "calibrate"])
@pytest.mark.parametrize("flags", [["--tp-size", "1"], ["-h"]], ids=" ".join)
def test_flag_in_the_place_of_the_target_is_named(
    command: str, engine: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--engine", engine, "--", *flags]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: TARGET is missing: '{flags[0]}' behind -- is taken for it")
    assert "name the target in front of --" in error


@pytest.mark.parametrize("command", ["serve", "profile-latency", "calibrate"])
def test_flag_among_the_options_is_sent_behind_the_dashes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--tp-size", "1"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("Error: No such option: --tp-size")
    assert error.endswith("; flags of SGLang go behind --")
    assert error.count("Possible options") <= 1
    assert run(["doctor", "--tp-size", "1"]) == 2
    assert "SGLang" not in capsys.readouterr().err


def profiling(**changes: object) -> _profile_sglang_run.Request:
    plain = _profile_sglang_run.Request(
        target=assets.TARGET,
        drafter=assets.DRAFTER,
        out=Path("nothing-there"),
        contexts=None,
        batch_sizes=None,
        repeats=None,
        budget_s=60.0,
        quick=False,
        url=None,
        plain_url=None,
        seed=0,
        dry_run=False,
        given=frozenset(),
        flags=(),
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_profiling_takes_the_default_contexts_that_fit() -> None:
    config = load_target_config(assets.TARGET)
    assert config.max_position_embeddings < 4096 + MOST_TOKENS
    assert _profile_sglang_run.make_plan(profiling()).contexts == (512,)
    with pytest.raises(UsageError, match="--contexts 4096 with room"):
        _profile_sglang_run.make_plan(profiling(contexts=(512, 4096)))


def test_profiling_a_target_that_no_default_context_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_profile_sglang_run, "MOST_TOKENS", 1 << 20)
    with pytest.raises(UsageError, match=r"default context 512 needs .* give --contexts"):
        _profile_sglang_run.make_plan(profiling())


def test_profiling_without_sglang_says_so_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "installed_version", lambda: None)
    words = ["profile-latency", "nothing-there", "--drafter", "d", "--engine", "sglang"]
    assert run([*words, "--contexts", "100000"]) == 4
    assert "needs SGLang, which is not installed" in capsys.readouterr().err


def test_dry_run_of_calibration_warns_of_what_a_run_would_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(assets.TARGET), "--drafter", str(assets.DRAFTER), "--engine", "sglang"]
    words = ["calibrate", *pair, "--prompts", str(assets.PROMPTS), "--dry-run"]
    words += ["--out", str(tmp_path / "bundle"), "--max-new-tokens", "10"]
    monkeypatch.setattr(installation, "installed_version", lambda: None)
    assert run(words) == 0
    told = capsys.readouterr()
    assert told.err.startswith("warning: SGLang is not installed here: install sglang==0.5.16")
    assert run([*words, "--url", ":1", "--recorded", str(tmp_path)]) == 0
    assert "not installed" not in capsys.readouterr().err


def test_dry_run_of_profiling_warns_of_what_a_run_would_refuse(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [str(assets.TARGET), "--drafter", str(assets.DRAFTER), "--engine", "sglang"]
    words = ["profile-latency", *pair, "--out", str(tmp_path / "bundle"), "--dry-run"]
    monkeypatch.setattr(installation, "installed_version", lambda: None)
    assert run([*words, "--", "--enable-lora"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("warning: SGLang is not installed here: install sglang==0.5.16")
    assert "flags behind -- are checked when the server starts" in told.out
    monkeypatch.setattr(installation, "installed_version", lambda: "0.5.23")
    assert run(words) == 0
    told = capsys.readouterr()
    assert told.err.startswith("warning: SGLang 0.5.23 is installed")
    assert "flags behind --" not in told.out
    assert run([*words, "--url", ":1", "--plain-url", ":2"]) == 0
    assert capsys.readouterr().err == "", "running servers need no SGLang here"
    assert run([*words, "--", "--port", "3"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_two_configurations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDSPEC_CONFIG", os.devnull)
    with pytest.raises(UsageError, match="HYBRIDSPEC_CONFIG is set"):
        make_launch(request())


@needs_bundle
def test_bundle_of_another_engine_is_refused_and_one_of_sglang_sets_the_batch(
    tmp_path: Path,
) -> None:
    with pytest.raises(BundleError, match="costs of the reference engine"):
        make_launch(request(bundle=BUNDLE))
    allowed, _ = make_launch(request(bundle=BUNDLE, allow=("engine", "engine_version")))
    assert allowed.config.allow == ("engine", "engine_version")
    folder = tmp_path / "bundle"
    shutil.copytree(BUNDLE, folder)
    cost = load_bundle(folder).cost
    assert cost is not None
    assert cost.throughput is not None

    def as_sglang(version: str) -> None:
        write_cost(
            folder,
            identity=dataclasses.replace(cost.identity, engine="sglang", engine_version=version),
            step=cost.step,
            samples=cost.samples,
            experts=cost.experts,
            throughput=None,
            provenance={},
        )

    as_sglang("0.4.9")
    with pytest.raises(BundleError, match=r"costs of SGLang 0\.4\.9"):
        make_launch(request(bundle=folder))
    as_sglang("0.5.16")
    with pytest.raises(BundleError, match="no throughput fitted"):
        make_launch(request(bundle=folder))
    write_throughput(folder, cost.throughput)
    launch, note = make_launch(request(bundle=folder))
    assert launch.config.bundle == folder.resolve()
    most = str(cost.identity.max_batch)
    assert launch.flags == ("--disable-radix-cache", "--max-running-requests", most)
    assert str(folder) in note
