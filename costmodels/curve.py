"""A round cost written down by hand: one JSON object, for what-ifs and machines without a bundle.

Two forms. Times by verify length:

    {"schema_id": "hybridspec.curve/1", "name": "...", "draft_us": 900, "latency_us": [17 numbers]}

index 0 a round without a draft pass, 1..16 rounds with one. Or times by experts, for which the
distinct experts of each length come from the trace:

    {"schema_id": "hybridspec.curve/1", "name": "...", "draft_us": 900, "base_us": 3738,
     "expert_us": 62.9, "layers": 40}

`base_us` is a round without its experts, `expert_us` one more distinct expert in every layer.
Written out in docs/policies.md and in the help of `hybridspec replay` and `plan`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from hybridspec.artifacts.store import read_file
from hybridspec.artifacts.tables import BLOCK_SIZE, FloatArray, StepCostTable
from hybridspec.errors import BundleError

CURVE_SCHEMA = "hybridspec.curve/1"
MAX_CURVE_BYTES = 1 << 20
EXAMPLE = (
    '{"schema_id": "hybridspec.curve/1", "name": "my machine", "draft_us": 900, "base_us": 3738, '
    '"expert_us": 62.9, "layers": 40}'
)


class _CurveFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_id: Literal["hybridspec.curve/1"]
    name: str
    source: str = ""
    draft_us: float
    latency_us: list[float] | None = None
    base_us: float | None = None
    expert_us: float | None = None
    layers: int | None = None


@dataclass(frozen=True)
class CostCurve:
    """A cost by verify length, or by distinct experts where `latency_us` is None.

    Attributes:
        name, source: what it stands for.
        draft_us: the draft pass, part of every drafted round.
        latency_us: float64 [17] or None.
        base_us: a round without its experts and its draft pass.
        expert_us: one more distinct expert in every layer.
        layers: layers with routed experts.
    """

    name: str
    source: str
    draft_us: float
    latency_us: FloatArray | None
    base_us: float = 0.0
    expert_us: float = 0.0
    layers: int = 1

    @property
    def by_experts(self) -> bool:
        """Whether the curve needs the distinct experts of a trace."""
        return self.latency_us is None

    def table(self, mean_distinct_L: FloatArray | None, *, topk: int) -> StepCostTable:
        """Returns the cost as a table of batch 1 and one context.

        Args:
            mean_distinct_L: float64 [16], mean distinct experts of a layer at L = 1..16.
            topk: experts of one row in a layer.

        Raises:
            BundleError: the curve is by experts and the trace has no routes.
        """
        latency = self.latency_us
        if latency is None:
            if mean_distinct_L is None:
                raise BundleError(
                    f"cost curve {self.name!r} is by distinct experts, and no recorded routes say "
                    "how many: give a trace with routes, or a curve with latency_us"
                )
            plain = self.base_us + self.expert_us * topk
            drafted = self.base_us + self.draft_us + self.expert_us * mean_distinct_L
            latency = np.concatenate([[plain], drafted])
        cells = latency[None, None]
        return StepCostTable(
            batch_sizes=np.array([1]),
            context_tokens=np.array([0]),
            latency_us=cells,
            latency_p10_us=cells,
            latency_p90_us=cells,
            draft_us=np.array([[self.draft_us]]),
            expert_slope_us=self.expert_us / self.layers,
            expert_slope_r2=1.0 if self.expert_us else 0.0,
        )


def read_curve(path: Path) -> CostCurve:
    """Returns the curve in a JSON file.

    Raises:
        BundleError: no such file, not this schema, missing lengths, NaN, times that are not above
            0, or times that fall when a row is added.
    """
    data = read_file(path, max_bytes=MAX_CURVE_BYTES)
    try:
        raw = _CurveFile.model_validate(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise BundleError(
            f"{path} is no cost curve ({_first(error)}): write it such as {EXAMPLE}, or with 17 "
            "latency_us (`hybridspec replay -h`)"
        ) from error
    experts = (raw.base_us, raw.expert_us, raw.layers)
    if (raw.latency_us is None) == any(value is None for value in experts) or (
        raw.latency_us is not None and any(value is not None for value in experts)
    ):
        raise BundleError(
            f"{path} must have either latency_us, or base_us, expert_us and layers: write one "
            f"form, such as {EXAMPLE}"
        )
    if raw.latency_us is None:
        assert raw.base_us is not None
        assert raw.expert_us is not None
        assert raw.layers is not None
        for name, value in (("base_us", raw.base_us), ("draft_us", raw.draft_us)):
            if value <= 0:
                raise BundleError(f"{path}: {name} is {value:g}; a time must be above 0 us")
        if raw.expert_us < 0 or raw.layers < 1:
            raise BundleError(
                f"{path}: expert_us is {raw.expert_us:g} and layers {raw.layers}; they must be at "
                "least 0 and 1: an expert more cannot make a round faster"
            )
        return CostCurve(
            raw.name, raw.source, raw.draft_us, None, raw.base_us, raw.expert_us, raw.layers
        )
    latency = check_lengths(np.asarray(raw.latency_us, dtype=np.float64), path=path)
    if not 0 < raw.draft_us < latency[1]:
        raise BundleError(
            f"{path}: draft_us is {raw.draft_us:g}; it must lie between 0 and the round of length "
            f"1 ({latency[1]:g} us), which it is part of: measure it again"
        )
    return CostCurve(raw.name, raw.source, raw.draft_us, latency)


def check_lengths(latency_us: FloatArray, *, path: object) -> FloatArray:
    """Refuse times by length that no machine has.

    Args:
        latency_us: float64 [17].
        path: named in the refusal.

    Raises:
        BundleError: missing lengths, NaN, times not above 0, or a fall when a row is added.
    """
    if latency_us.shape != (BLOCK_SIZE + 1,):
        raise BundleError(
            f"{path}: latency_us has {latency_us.size} values; {BLOCK_SIZE + 1} are needed, for "
            f"length 0 (no draft pass) and each length 1..{BLOCK_SIZE}: measure the missing ones"
        )
    if not np.all(np.isfinite(latency_us) & (latency_us > 0)):
        bad = int(np.flatnonzero(~(np.isfinite(latency_us) & (latency_us > 0)))[0])
        raise BundleError(
            f"{path}: length {bad} takes {latency_us[bad]:g} us; every time must be finite and "
            "above 0: measure it again"
        )
    falls = np.flatnonzero(np.diff(latency_us) < 0)
    if falls.size:
        length = int(falls[0])
        raise BundleError(
            f"{path}: length {length + 1} takes {latency_us[length + 1]:g} us, length {length} "
            f"{latency_us[length]:g} us; a row more cannot cost less: measure again, or use a "
            "bundle, which holds the samples behind such a step"
        )
    return latency_us


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        found = error.errors()[0]
        where = ".".join(str(part) for part in found["loc"])
        return f"{where}: {found['msg']}"
    return str(error).splitlines()[0]
