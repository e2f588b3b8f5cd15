"""The compatibility table: what is used, warned about or refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from bundle_kit import CALIBRATION_IDENTITY, COST_IDENTITY

from hybridspec.artifacts.identity import (
    COMPATIBILITY,
    CalibrationIdentity,
    CostIdentity,
    check_identity,
    device_slug,
    identity_fields,
)
from hybridspec.errors import BundleError


def changed(value: Any) -> Any:
    return value + "x" if isinstance(value, str) else value + 1


def test_the_table_covers_every_field() -> None:
    for kind, rules in COMPATIBILITY.items():
        assert set(rules) == {field.name for field in fields(kind)}


@pytest.mark.parametrize("identity", [CALIBRATION_IDENTITY, COST_IDENTITY], ids=["cal", "cost"])
def test_same_identity_is_used_silently(identity: Any) -> None:
    known = {name: "x" for name, value in identity_fields(identity).items() if value is None}
    identity = replace(identity, **known)
    assert check_identity(identity, identity) == []


@pytest.mark.parametrize(
    ("field", "outcome"),
    [
        ("target_digest", "refuse"),
        ("drafter_digest", "refuse"),
        ("dtype", "refuse"),
        ("quantization", "refuse"),
        ("block_size", "refuse"),
        ("temperature", "refuse"),
        ("prompts_digest", "warn"),
    ],
)
def test_calibration_fields(field: str, outcome: str) -> None:
    current = replace(
        CALIBRATION_IDENTITY, **{field: changed(getattr(CALIBRATION_IDENTITY, field))}
    )
    expect(CALIBRATION_IDENTITY, current, field, outcome)


@pytest.mark.parametrize(
    ("field", "value", "outcome"),
    [
        ("device", "other", "refuse"),
        ("memory_class", "hbm", "refuse"),
        ("cores", 64, "warn"),
        ("threads", 2, "refuse"),
        ("engine", "sglang", "refuse"),
        ("engine_version", "0.1.7", "warn"),
        ("engine_version", "0.2.0", "refuse"),
        ("engine_version", "1.1.0", "refuse"),
        ("dtype", "bfloat16", "refuse"),
        ("architecture_digest", "e" * 64, "refuse"),
        ("drafter_architecture_digest", "e" * 64, "refuse"),
        ("quantization", "fp8", "refuse"),
        ("max_batch", 8, "refuse"),
        ("max_batch", 2, "ok"),
        ("torch_version", "2.12", "warn"),
    ],
)
def test_cost_fields(field: str, value: Any, outcome: str) -> None:
    saved = replace(COST_IDENTITY, drafter_architecture_digest="f" * 64)
    expect(saved, replace(saved, **{field: value}), field, outcome)


def expect(saved: Any, current: Any, field: str, outcome: str) -> None:
    if outcome == "refuse":
        with pytest.raises(BundleError) as refusal:
            check_identity(saved, current)
        message = str(refusal.value)
        assert message.startswith(f"{field}: ")
        for part in (
            repr(getattr(saved, field)),
            repr(getattr(current, field)),
            "must be the same",
        ):
            assert part in message
        warnings = check_identity(saved, current, allow=[field])
    else:
        warnings = check_identity(saved, current)
    assert len(warnings) == (0 if outcome == "ok" else 1)
    assert all(field in warning for warning in warnings)


def test_small_temperature_difference_warns() -> None:
    near = replace(CALIBRATION_IDENTITY, temperature=0.3)
    assert len(check_identity(CALIBRATION_IDENTITY, near)) == 1
    far = replace(CALIBRATION_IDENTITY, temperature=0.31)
    with pytest.raises(BundleError, match=r"temperature: the bundle was made for 0.0, here it is"):
        check_identity(CALIBRATION_IDENTITY, far)


def test_unknown_values_warn_but_prompts_do_not() -> None:
    serving = replace(CALIBRATION_IDENTITY, prompts_digest=None)
    assert check_identity(CALIBRATION_IDENTITY, serving) == []
    known = replace(COST_IDENTITY, drafter_architecture_digest="f" * 64)
    assert "unknown" in check_identity(COST_IDENTITY, known)[0]


def test_int_and_float_temperature_are_one_identity() -> None:
    as_int = CalibrationIdentity("a", "b", "float32", temperature=0, top_p=1)
    assert repr(as_int) == repr(CalibrationIdentity("a", "b", "float32"))


@pytest.mark.parametrize(
    "change", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_impossible_sampling_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(BundleError, match=next(iter(change))):
        replace(CALIBRATION_IDENTITY, **change)


@pytest.mark.parametrize("name", ["cores", "threads", "max_batch"])
def test_impossible_counts_are_refused(name: str) -> None:
    with pytest.raises(BundleError, match=f"{name} = 0"):
        replace(COST_IDENTITY, **{name: 0})


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "intel-xeon-platinum-8480c"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654"),
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("  ", "unknown"),
    ],
)
def test_device_slug(name: str, slug: str) -> None:
    assert device_slug(name) == slug
    assert device_slug(slug) == slug


def test_identities_are_made_of_json_values() -> None:
    for identity in (CALIBRATION_IDENTITY, COST_IDENTITY):
        for value in identity_fields(identity).values():
            assert value is None or type(value) in (str, int, float)
    assert CostIdentity is type(COST_IDENTITY)
