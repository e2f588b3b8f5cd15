"""What a request and the configuration ask for: read, limited, refused; sent when it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.config import PluginConfig, read_config
from hybridspec.sglang_plugin.controls import BatchControls, LengthRequest, Row, length_request
from hybridspec.sglang_plugin.round_state import RoundState
from hybridspec.sglang_plugin.rounds import default_lengths


@pytest.mark.parametrize(
    ("asked", "default", "forced", "cap"),
    [
        (None, LengthRequest(), 0, 16),
        (None, LengthRequest(5, 8), 5, 8),
        ({"other": 1, "__req__": object()}, LengthRequest(), 0, 16),
        ({"hybridspec": {"verify_length": 5}}, LengthRequest(), 5, 16),
        ({"hybridspec": {"verify_length": 12}}, LengthRequest(0, 8), 8, 8),
        ({"hybridspec": {"max_verify_length": 8}}, LengthRequest(), 0, 8),
        ({"hybridspec": {"max_verify_length": 8}}, LengthRequest(16, 16), 0, 8),
        ({"hybridspec": {"policy": "auto"}}, LengthRequest(16, 16), 0, 16),
        ({"hybridspec": {"policy": "fixed", "verify_length": 1}}, LengthRequest(), 1, 16),
    ],
)
def test_lengths_of_a_request(asked: Any, default: LengthRequest, forced: int, cap: int) -> None:
    assert length_request(asked, default) == LengthRequest(forced, cap)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"verify_length": 0}, "verify_length = 0"),
        ({"verify_length": 17}, "1..16"),
        ({"verify_length": True}, "True"),
        ({"max_verify_length": "8"}, "'8'"),
        ({"length": 4}, "length is unknown"),
        ({"policy": "best"}, "'best'"),
        ({"policy": "fixed"}, "add verify_length"),
        ({"distinct_experts": 8}, "add verify_length"),
        ({"distinct_experts": 0, "verify_length": 4}, "distinct_experts = 0"),
        ({"distinct_experts": True, "verify_length": 4}, "distinct_experts = True"),
        (7, "pass an object"),
    ],
)
def test_wrong_requests_are_refused(asked: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        length_request({"hybridspec": asked}, LengthRequest())


def test_experts_of_a_request() -> None:
    asked = {"hybridspec": {"verify_length": 4, "distinct_experts": 20}}
    assert length_request(asked, LengthRequest()) == LengthRequest(4, 16, 20)


def test_controls_are_sent_when_the_batch_changes_and_only_then() -> None:
    state = RoundState(4, "cpu")
    controls = BatchControls(state, lambda size: 0.25 * size, spare_slots=100)
    rows = [Row(("a", 3), 3, LengthRequest(0, 8)), Row(("b", 1), 1, LengthRequest(5, 16))]
    assert controls.update(("a", "b"), lambda: rows)
    assert state.caps_B.tolist() == [8, 16, 0, 0]
    assert state.forced_B.tolist() == [0, 5, 0, 0]
    assert state.history_slots_B.tolist() == [3, 1, 100, 101]
    assert state.batch_size.tolist() == [2]
    assert state.lam_B.tolist() == [0.5] * 4

    def unexpected() -> list[Row]:
        raise AssertionError("the batch is the same")

    assert not controls.update(("a", "b"), unexpected)
    controls.forget()
    assert controls.update(("a", "b"), lambda: rows)
    assert controls.update(("b",), lambda: rows[1:])
    assert state.caps_B.tolist() == [16, 0, 0, 0]
    assert state.batch_size.tolist() == [1]


def test_configuration(tmp_path: Path) -> None:
    assert read_config({}) == PluginConfig()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"bundle": "b", "correction": "paper", "max_length": 12}))
    config = read_config({"HYBRIDSPEC_CONFIG": str(path)})
    assert (config.bundle, config.correction, config.max_length) == (Path("b"), "paper", 12)
    forced = read_config({"HYBRIDSPEC_CONFIG": str(path), "HYBRIDSPEC_FORCE_LENGTH": "16"})
    assert forced.force_length == 16
    # The longest length that is allowed stays the longest.
    assert default_lengths(forced) == LengthRequest(12, 12)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"lenght": 4}', "lenght"),
        ('{"force_length": 17}', "force_length = 17"),
        ("{", "known keys"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=named):
        read_config({"HYBRIDSPEC_CONFIG": str(path)})


def test_wrong_variables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_config({"HYBRIDSPEC_CONFIG": str(tmp_path / "none.json")})
    with pytest.raises(UsageError, match=r"set 1\.\.16"):
        read_config({"HYBRIDSPEC_FORCE_LENGTH": "0"})


def test_columns_start_at_16_bytes() -> None:
    state = RoundState(12, torch.device("cpu"))
    for column in (state.caps_B, state.forced_B, state.history_slots_B, state.batch_size):
        assert column.data_ptr() % 16 == 0
