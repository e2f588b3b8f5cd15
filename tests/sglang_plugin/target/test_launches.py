"""Options of launches from the keys and the switches of a configuration."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.errors import UsageError
from hybridspec.sglang_plugin.target.launches import launch_options


@dataclass(frozen=True)
class Other:
    """Whose switches are somebody else's matter."""

    beside: bool = True


@pytest.mark.parametrize(
    ("switches", "small_moe", "gate"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"fused_router": False}, True, False),
        ({"small_moe": False}, True, False),
        ({"small_moe": True}, False, True),
        ({"fused_gate": False, "beside": False}, True, False),
    ],
)
def test_the_gate_follows_what_it_runs_between(
    switches: dict[str, bool], small_moe: bool, gate: bool
) -> None:
    options = launch_options(switches, Other, small_moe=small_moe, keep_routes=True)
    assert options.fused_gate is gate
    assert options.small_moe is switches.get("small_moe", small_moe)
    assert options.fused_router is switches.get("fused_router", True)
    assert options.keep_routes


@pytest.mark.parametrize(
    "switches", [{"fused_gate": True, "fused_router": False}, {"besides": True}]
)
def test_switches_that_do_not_fit_are_refused(switches: dict[str, bool]) -> None:
    with pytest.raises(UsageError):
        launch_options(switches, Other, small_moe=True, keep_routes=False)
