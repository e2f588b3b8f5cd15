"""What a bundle part was made for, and whether it may be used here.

The two parts have independent identities: calibration depends on the models and the sampling, not
on the machine; cost depends on the machine, the engine and the architecture, not on the weights.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import BundleError, UsageError

Outcome = Literal["ok", "warn", "refuse"]
MAX_TEMPERATURE_DIFFERENCE = 0.3
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class CalibrationIdentity:
    """What hazards and routing were fitted on.

    Attributes:
        target_digest: `digest.model_digest` of the target folder.
        drafter_digest: the same of the drafter folder.
        dtype: of the weights and activations, e.g. `float32`, `bfloat16`.
        temperature: of the recorded rounds; 0 is greedy.
        prompts_digest: of the calibration prompts; None where it is not known (when serving).
        quantization: scheme of the target's weights, `none` without.
        block_size: anchor and drafts of one drafted block, in tokens.
    """

    target_digest: str
    drafter_digest: str
    dtype: str
    temperature: float = 0.0
    top_p: float = 1.0
    prompts_digest: str | None = None
    quantization: str = "none"
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        # An int and an equal float must give the same content id.
        for name in ("temperature", "top_p"):
            object.__setattr__(self, name, float(getattr(self, name)))
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise BundleError(f"identity temperature = {self.temperature}; it must be >= 0")
        if not 0.0 < self.top_p <= 1.0:
            raise BundleError(f"identity top_p = {self.top_p}; it must lie in (0, 1]")


@dataclass(frozen=True)
class CostIdentity:
    """What latencies were measured on.

    Attributes:
        device: `device_slug` of the processor or GPU name.
        memory_class: `ram`, `hbm`, `gddr` or `unknown`.
        cores: processor cores the process may use; on a GPU its multiprocessors.
        threads: threads the engine computes with.
        engine: name, e.g. `reference`.
        engine_version: `major.minor.patch`; another minor version counts as other hardware.
        dtype: of the weights and activations.
        architecture_digest: `digest.config_digest` of the target folder.
        max_batch: largest batch measured, in requests.
        torch_version: `major.minor`.
        quantization: scheme of the target's weights, `none` without.
        drafter_architecture_digest: `digest.config_digest` of the drafter folder; None if unknown.
        tp_size: devices that share the target by tensor parallelism.
        backends: kernels behind attention, linear attention and MoE, e.g.
            `attention=triton,linear=triton,moe=triton`; `default` where the engine has one choice.
        graph_tiers: how rounds are captured, e.g. `masked:1,2,4` (batch sizes); `none` without.
    """

    device: str
    memory_class: str
    cores: int
    threads: int
    engine: str
    engine_version: str
    dtype: str
    architecture_digest: str
    max_batch: int
    torch_version: str
    quantization: str = "none"
    drafter_architecture_digest: str | None = None
    tp_size: int = 1
    backends: str = "default"
    graph_tiers: str = "none"

    def __post_init__(self) -> None:
        for name in ("cores", "threads", "max_batch", "tp_size"):
            if getattr(self, name) < 1:
                raise BundleError(f"identity {name} = {getattr(self, name)}; it must be >= 1")


Identity = TypeVar("Identity", CalibrationIdentity, CostIdentity)
_ADDED_FIELDS: dict[type, dict[str, Any]] = {
    CostIdentity: {"tp_size": 1, "backends": "default", "graph_tiers": "none"}
}
_UNSET = object()


@dataclass(frozen=True)
class _Rule:
    compare: Callable[[Any, Any], Outcome]
    remedy: str


def _differs(outcome: Outcome) -> Callable[[Any, Any], Outcome]:
    return lambda saved, current: "ok" if saved == current else outcome


def _temperature(saved: float, current: float) -> Outcome:
    if saved == current:
        return "ok"
    return "warn" if abs(saved - current) <= MAX_TEMPERATURE_DIFFERENCE else "refuse"


def _version(saved: str, current: str) -> Outcome:
    if saved == current:
        return "ok"
    return "warn" if saved.split(".")[:2] == current.split(".")[:2] else "refuse"


def _capacity(saved: int, current: int) -> Outcome:
    return "ok" if current <= saved else "refuse"


_CALIBRATE = "run `hybridspec calibrate` for this pair"
_PROFILE = "run `hybridspec profile-latency` on this machine"
COMPATIBILITY: dict[type, dict[str, _Rule]] = {
    CalibrationIdentity: {
        "target_digest": _Rule(_differs("refuse"), _CALIBRATE),
        "drafter_digest": _Rule(_differs("refuse"), _CALIBRATE),
        "dtype": _Rule(_differs("refuse"), _CALIBRATE),
        "temperature": _Rule(
            _temperature,
            f"{_CALIBRATE} at this temperature (a difference up to {MAX_TEMPERATURE_DIFFERENCE} "
            "only warns)",
        ),
        "top_p": _Rule(_differs("warn"), "calibrate with the same top_p"),
        "prompts_digest": _Rule(_differs("warn"), "calibrate on these prompts"),
        "quantization": _Rule(_differs("refuse"), _CALIBRATE),
        "block_size": _Rule(_differs("refuse"), _CALIBRATE),
    },
    CostIdentity: {
        "device": _Rule(_differs("refuse"), _PROFILE),
        "memory_class": _Rule(_differs("refuse"), _PROFILE),
        "cores": _Rule(_differs("warn"), _PROFILE),
        "threads": _Rule(_differs("refuse"), f"use as many threads as measured, or {_PROFILE}"),
        "engine": _Rule(_differs("refuse"), _PROFILE),
        "engine_version": _Rule(_version, f"{_PROFILE} (another patch version only warns)"),
        "dtype": _Rule(_differs("refuse"), _PROFILE),
        "architecture_digest": _Rule(_differs("refuse"), f"{_PROFILE} with this target"),
        "max_batch": _Rule(_capacity, f"lower the largest batch, or {_PROFILE} up to it"),
        "torch_version": _Rule(_differs("warn"), _PROFILE),
        "quantization": _Rule(_differs("refuse"), _PROFILE),
        "drafter_architecture_digest": _Rule(_differs("refuse"), f"{_PROFILE} with this drafter"),
        "tp_size": _Rule(_differs("refuse"), f"{_PROFILE} with this tensor parallelism"),
        "backends": _Rule(_differs("refuse"), f"{_PROFILE} with these backends"),
        "graph_tiers": _Rule(
            _differs("refuse"), f"{_PROFILE} with these graphs (--graph-control eager for serve)"
        ),
    },
}


def check_identity(saved: Identity, current: Identity, *, allow: Collection[str] = ()) -> list[str]:
    """Compare a part's identity with the current one by the compatibility table.

    Args:
        saved: identity of the bundle's part.
        current: what is about to run; None in a field means that it is not known.
        allow: fields whose refusal the operator lowered to a warning.

    Returns:
        one warning a field that differs in a tolerable way or cannot be compared.

    Raises:
        BundleError: a field differs in a way that makes the part wrong here; the message names the
            first such field, both values and the remedy.
    """
    warnings = []
    for name, rule in COMPATIBILITY[type(saved)].items():
        before, now = getattr(saved, name), getattr(current, name)
        if before is None or now is None:
            if name != "prompts_digest" and before != now:
                warnings.append(f"{name} is unknown (saved {before!r}, current {now!r})")
            continue
        outcome = rule.compare(before, now)
        if outcome == "ok":
            continue
        message = f"{name}: the bundle was made for {before!r}, here it is {now!r}"
        if outcome == "refuse" and name not in allow:
            raise BundleError(f"{message}; it must be the same: {rule.remedy}")
        warnings.append(f"{message}; figures may be off: {rule.remedy}")
    return warnings


def check_field_names(names: Collection[str], *, also: Collection[str] = ()) -> None:
    """Refuse names of `--allow` that are no field of an identity, nor among `also`.

    Raises:
        UsageError: naming the first one and what is known.
    """
    known = {field.name for kind in COMPATIBILITY for field in fields(kind)}
    unknown = sorted(set(names) - known - set(also))
    if unknown:
        raise UsageError(
            f"--allow {unknown[0]} is no field; known are {', '.join([*also, *sorted(known)])}"
        )


def identity_fields(identity: CalibrationIdentity | CostIdentity) -> dict[str, Any]:
    """The identity as a JSON object."""
    return {field.name: getattr(identity, field.name) for field in fields(identity)}


def counted_fields(identity: CalibrationIdentity | CostIdentity) -> dict[str, Any]:
    """The fields that a content id is made of.

    Fields that came after schema 1.0 count only where they differ from their defaults, so that a
    bundle of before keeps its id.
    """
    found = identity_fields(identity)
    added = _ADDED_FIELDS.get(type(identity), {})
    return {name: value for name, value in found.items() if added.get(name, _UNSET) != value}


def device_slug(name: str) -> str:
    """A device's marketing name as `[a-z0-9-]`: no trade marks, clock, or the word CPU or GPU.

    >>> device_slug("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz")
    'intel-xeon-platinum-8480c'
    """
    text = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    text = re.sub(r"@.*$", " ", text)
    text = re.sub(r"\b(cpu|gpu|processor|[0-9]+-core)\b", " ", text)
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-") or "unknown"


def cpu_slug() -> str:
    """`device_slug` of this machine's processor; `unknown` where the system does not name it."""
    try:
        text = _CPUINFO.read_text(errors="replace")
    except OSError:
        return "unknown"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return device_slug(match[1]) if match else "unknown"


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    return len(os.sched_getaffinity(0))
