"""Many rounds behind one another: states follow float64, and errors do not grow."""

from __future__ import annotations

import pytest
import torch
from gdn_cases import FORMS, quick
from gdn_chains import Chain, assert_no_drift, assert_no_worse_than_plain

ROUNDS = 200

# Of numpy in the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)


def chain(device: torch.device, form: str, **options) -> Chain:
    return Chain(
        device,
        FORMS[form],
        verify_options=quick(device),
        commit_options=quick(device),
        **options,
    )


@pytest.mark.parametrize("number", [ROUNDS // 2, pytest.param(ROUNDS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_states_that_forget_nothing_do_not_drift(device, form, number):
    """Gates near 0: whatever one round got wrong is still there at the end."""
    small = {}
    if device.type != "cuda":
        # Row after row takes its time in the interpreter.
        if form == "sequential":
            small["rows"] = 4
        if form == "sequential" or number < ROUNDS:
            small["value_heads"] = 1
    rounds = chain(device, form, regime="nodecay", **small)
    for _ in range(number):
        rounds.round()
    assert_no_drift(rounds.state_errors)
    assert_no_drift(rounds.output_errors)
    rounds.finish()


@pytest.mark.parametrize("form", FORMS)
def test_rounds_of_all_regimes(device, form):
    """Two layers, and two requests with lengths and acceptance of their own."""
    rounds = chain(device, form, batch=2, layers=2, value_heads=1, seed=1)
    for _ in range(16 if device.type != "cuda" else 20):
        rounds.round()
    assert_no_drift(rounds.output_errors)
    assert rounds.finish() < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("regime", [None, "normal"])
def test_many_rounds_of_every_regime(device, form, regime):
    rounds = chain(device, form, batch=2, layers=2, regime=regime, seed=2)
    for _ in range(ROUNDS):
        rounds.round()
    assert_no_drift(rounds.state_errors)
    assert_no_drift(rounds.output_errors)
    rounds.finish()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_repeated_keys_that_forget_little_drift_no_more_than_plain_decoding(device, form):
    rounds = chain(device, form, batch=2, layers=2, regime="repeat", seed=2, beside_plain=True)
    for _ in range(ROUNDS):
        rounds.round()
    assert_no_worse_than_plain(rounds.state_errors, rounds.plain_errors)
    rounds.finish()
