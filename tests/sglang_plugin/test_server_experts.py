"""Price of an expert from streams with forced routes, and what the command makes of it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sglang_server_kit
from sglang_server_kit import US_AN_EXPERT, Dying, Refusing, SglangLike, Unpriced

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.cli import _profile_sglang_experts, _profile_sglang_run
from hybridspec.cli._output import Output
from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.demo import assets
from hybridspec.errors import EnvironmentMissing, Interrupted, QualityGate
from hybridspec.reference.config import load_target_config
from hybridspec.sglang_plugin.server_api import ServerApi
from hybridspec.sglang_plugin.server_experts import forced_tokens, measure_server_experts
from hybridspec.sglang_plugin.server_rounds import FEWEST_ROUNDS, WARMUP_ROUNDS, Grid

PAIRS = ((2, 2), (2, 12), (2, 20), (4, 4), (4, 20))


def served(kind: type[SglangLike]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def url() -> Iterator[str]:
    yield from served(SglangLike)


@pytest.fixture
def refusing() -> Iterator[str]:
    yield from served(Refusing)


def grid() -> Grid:
    return Grid((1, 2), (7, 9), 5, 0, texts=[[1, 2, 3], [4, 5]])


def test_an_expert_is_priced_by_rounds_of_one_length(url: str) -> None:
    samples = measure_server_experts(ServerApi(url), grid(), PAIRS, budget_s=120.0)
    assert samples.num_rows == len(PAIRS) * 5
    assert set(samples.column("context_tokens").to_pylist()) == {7}
    assert set(samples.column("batch").to_pylist()) == {1}
    slope = fit_expert_slope(samples, num_layers=10)
    assert slope.usable
    assert slope.slope_us == pytest.approx(US_AN_EXPERT / 10, rel=0.1)


@pytest.mark.parametrize("length", range(1, 17))
def test_answers_are_long_enough_even_if_every_round_emits_all_rows(length: int) -> None:
    assert (forced_tokens(length) - 1) // length >= WARMUP_ROUNDS + FEWEST_ROUNDS


def test_a_server_whose_routers_choose_is_refused(refusing: str) -> None:
    with pytest.raises(EnvironmentMissing, match="routers choose experts here"):
        measure_server_experts(ServerApi(refusing), grid(), PAIRS, budget_s=60.0)


@dataclasses.dataclass
class Told:
    """What a run of the command left: the bundle's costs, what it said, what it showed."""

    cost: Any
    said: str
    result: dict[str, Any]
    plots: set[str]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Told]:
    """The command with servers of known times; `third` is the one that forces routes."""
    pair = (assets.TARGET, assets.DRAFTER)
    config = load_target_config(assets.TARGET)
    said: list[str] = []
    results: list[dict[str, Any]] = []
    monkeypatch.setattr(_profile_sglang_run, "LENGTHS", range(1, 17))
    monkeypatch.setattr(_profile_sglang_run, "check_installation", lambda: None)
    gpu = _profile_sglang_run._Gpu("NVIDIA H200", 132, "2.11.0")
    monkeypatch.setattr(_profile_sglang_run, "_gpu", lambda: gpu)
    few = [(2, count) for count in (config.experts_per_token, 2 * config.experts_per_token)]
    few.append((4, 4 * config.experts_per_token))
    few.append((4, config.experts_per_token))
    monkeypatch.setattr(_profile_sglang_run, "expert_grid", lambda **_: few)
    monkeypatch.setattr(Output, "warn", lambda self, message: said.append(message))
    monkeypatch.setattr(Output, "note", lambda self, message: said.append(message))
    monkeypatch.setattr(Output, "result", lambda self, text, data: results.append(data))

    def drafted(launch: Any) -> list[str]:
        return sglang_server_kit.words(SglangLike, launch.port, plain=False, pair=pair)

    def without(target: str, host: str, port: int, flags: Any) -> list[str]:
        return sglang_server_kit.words(SglangLike, port, plain=True, pair=pair)

    monkeypatch.setattr(_profile_sglang_run, "arguments", drafted)
    monkeypatch.setattr(_profile_sglang_run, "plain_arguments", without)

    def run(third: type[SglangLike] | None, *, budget_s: float = 600.0) -> Told:
        def forced(launch: Any) -> list[str]:
            if third is None:
                return ["-c", "raise SystemExit('no such flag')"]
            return sglang_server_kit.words(third, launch.port, plain=False, pair=pair)

        monkeypatch.setattr(_profile_sglang_experts, "arguments", forced)
        request = _profile_sglang_run.Request(
            target=assets.TARGET, drafter=assets.DRAFTER, out=tmp_path / "bundle",
            contexts=(32,), batch_sizes=(1,), repeats=5, budget_s=budget_s, quick=False, url=None,
            plain_url=None, seed=0, dry_run=False, given=frozenset(), flags=(),
        )  # fmt: skip
        try:
            _profile_sglang_run.run(request, Output())
        except Interrupted as stop:
            said.append(str(stop))
        cost = load_bundle(tmp_path / "bundle").cost
        plots = {path.name for path in (tmp_path / "bundle" / "plots").iterdir()}
        return Told(cost, "\n".join(said), results[-1] if results else {}, plots)

    return run


@pytest.mark.slow
def test_costs_outlive_what_happens_to_the_third_server(
    command: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = load_target_config(assets.TARGET).num_layers
    told = command(SglangLike)
    assert told.cost.step.expert_slope_us == pytest.approx(US_AN_EXPERT / layers, rel=0.15)
    assert told.result["expert_slope_usable"]
    assert "a distinct expert of one layer costs" in told.said
    assert "expert-slope.svg" in told.plots
    latency_us = told.cost.step.latency_us[0, 0]
    assert latency_us[0] == pytest.approx(1500.0, rel=0.1)
    assert latency_us[16] == pytest.approx(3600.0, rel=0.1)

    # What follows measures its rounds once; the third server is what differs.
    kept = _profile_sglang_run._measure
    readings: dict[tuple[int, ...], Any] = {}

    def once(api: Any, request: Any, plan: Any, known: Any, lengths: Any, *rest: Any) -> Any:
        key = tuple(lengths)
        if key not in readings:
            readings[key] = kept(api, request, plan, known, lengths, *rest)
        return readings[key]

    monkeypatch.setattr(_profile_sglang_run, "_measure", once)
    for third, named in (
        (None, "no such flag"),
        (Refusing, "routers choose experts here"),
        (Dying, "does not answer"),
    ):
        told = command(third)
        assert told.cost.step.latency_us[0, 0, 16] == pytest.approx(3600.0, rel=0.1), third
        assert told.cost.step.expert_slope_us == 0.0
        assert not told.result["expert_slope_usable"]
        assert "gets no price of an expert" in told.said
        assert named in told.said
        assert "the servers' logs are in" in told.said
        assert not any(name.startswith("expert-slope") for name in told.plots)

    told = command(Unpriced)
    assert not told.result["expert_slope_usable"]
    assert told.cost.step.expert_slope_us == 0.0
    assert "not usable" in told.said

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for module, name in (
        (_profile_sglang_experts, "measure_server_experts"),
        (_profile_sglang_run, "_experts"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, interrupted)
            told = command(SglangLike)
        assert "has the costs of all lengths and no price of an expert" in told.said
        assert told.cost.step.latency_us[0, 0, 16] == pytest.approx(3600.0, rel=0.1)

    def unforeseen(*_: object, **__: object) -> None:
        raise KeyError("meta_info")

    with monkeypatch.context() as patched:
        patched.setattr(_profile_sglang_experts, "measure_server_experts", unforeseen)
        assert "KeyError('meta_info')" in command(SglangLike).said


def test_a_budget_that_is_too_small_names_one_that_is_enough(command: Callable[..., Told]) -> None:
    with pytest.raises(
        QualityGate, match=r"--budget 1 leaves 1 s for drafted .* use --budget \d+0,"
    ):
        command(SglangLike, budget_s=1.0)
