"""Frozen tables that a bundle holds and a policy reads. Plain numpy, no torch.

Index conventions used by every table:

* draft position `i` in 0..14 is the i-th drafted token (the anchor is not a draft).
* verify length `L` in 0..16: `L = 0` means *no draft pass at all* (plain decoding of the anchor),
  `L = 1` means the drafter ran and only the anchor row is verified, `L = 16` is stock DFlash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hybridspec.errors import BundleError

BLOCK_SIZE = 16
NUM_DRAFTS = BLOCK_SIZE - 1
FEATURE_NAMES = ("log_p1", "neg_log_1m_p1", "entropy", "margin", "log_context")

# Which hazards of a calibration part are meant: its table, or the boosted trees beside it.
HazardKind = Literal["table", "trees"]
TABLE: HazardKind = "table"
TREES: HazardKind = "trees"

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BundleError(message)


def _finite(name: str, values: FloatArray) -> None:
    bad = int(np.size(values) - np.count_nonzero(np.isfinite(values)))
    _require(
        bad == 0,
        f"{name} has {bad} NaN or infinite value(s); every value must be finite: "
        "measure or fit it again",
    )


@dataclass(frozen=True)
class HazardTable:
    """Hazard of each draft position as logistic regression followed by isotonic knots.

    `hazard = interp(sigmoid(features @ weights_F + position_bias_D[i]), knots_x, knots_y)`,
    clipped at the ends of the knots (DESIGN section 4).

    Attributes:
        method: name of the fit, e.g. `beta-position-isotonic` or `raw`.
        weights_F: float64 [5], one a feature in the order of `FEATURE_NAMES`.
        position_bias_D: float64 [15], intercept of each draft position.
        knots_x: float64 [K >= 2], strictly increasing in [0, 1].
        knots_y: float64 [K], non-decreasing in [0, 1].
    """

    method: str
    weights_F: FloatArray
    position_bias_D: FloatArray
    knots_x: FloatArray
    knots_y: FloatArray

    def __post_init__(self) -> None:
        _require(
            self.weights_F.shape == (len(FEATURE_NAMES),),
            f"hazard weights have shape {self.weights_F.shape}; "
            f"expected {len(FEATURE_NAMES)}, one a feature {FEATURE_NAMES}: calibrate again",
        )
        _require(
            self.position_bias_D.shape == (NUM_DRAFTS,),
            f"position bias has shape {self.position_bias_D.shape}; expected ({NUM_DRAFTS},): "
            "calibrate again",
        )
        _require(
            self.knots_x.ndim == 1
            and self.knots_x.shape == self.knots_y.shape
            and self.knots_x.size >= 2,
            f"hazard knots have shapes {self.knots_x.shape} and {self.knots_y.shape}; expected two "
            "equal one-dimensional arrays of at least 2 knots: calibrate again",
        )
        for name in ("weights_F", "position_bias_D", "knots_x", "knots_y"):
            _finite(f"hazard {name}", getattr(self, name))
        _require(
            bool(np.all(np.diff(self.knots_x) > 0)),
            "hazard knots_x are not strictly increasing: calibrate again",
        )
        _require(
            bool(np.all(np.diff(self.knots_y) >= 0))
            and self.knots_y[0] >= 0.0
            and self.knots_y[-1] <= 1.0,
            "hazard knots_y must be non-decreasing in [0, 1]: calibrate again",
        )


@dataclass(frozen=True)
class TemperatureTable:
    """One temperature of the top-1 probability a position, as SGLang's `dspark_sts.json` holds.

    Attributes:
        temperatures_D: float64 [15], above 0.
        ece_before_D, ece_after_D: float64 [15] in [0, 1], calibration error of the survival up to
            each position on the rounds fitted on, at temperature 1 and as fitted.
        num_rounds: fitted on.
    """

    temperatures_D: FloatArray
    ece_before_D: FloatArray
    ece_after_D: FloatArray
    num_rounds: int

    def __post_init__(self) -> None:
        for name in ("temperatures_D", "ece_before_D", "ece_after_D"):
            values = getattr(self, name)
            _require(
                values.shape == (NUM_DRAFTS,),
                f"{name} has shape {values.shape}; expected ({NUM_DRAFTS},): calibrate again",
            )
            _finite(name, values)
            lowest, highest = float(values.min()), float(values.max())
            _require(
                lowest >= 0.0 and (lowest > 0.0 if name == "temperatures_D" else highest <= 1.0),
                f"{name} lies in {lowest:g}..{highest:g}; temperatures must be > 0 and calibration "
                "errors in 0..1: calibrate again",
            )
        _require(self.num_rounds >= 1, "temperatures of no rounds: calibrate again")


@dataclass(frozen=True)
class RoutingTable:
    """What the first router's observed experts say about all routers, by verify length.

    `total_distinct(L) ~ total_mean_L[L-1] + slope_L[L-1] * (first_distinct - first_mean_L[L-1])`,
    a least-squares line a length fitted on recorded routes (DESIGN section 5).

    Attributes:
        num_layers: layers with routed experts that `total_mean_L` sums over.
        first_mean_L: float64 [16], mean distinct experts of layer 0 among the first L rows.
        total_mean_L: float64 [16], mean over rounds of the distinct experts summed over all layers.
        slope_L: float64 [16].
    """

    num_layers: int
    first_mean_L: FloatArray
    total_mean_L: FloatArray
    slope_L: FloatArray

    def __post_init__(self) -> None:
        _require(self.num_layers >= 1, f"routing table says {self.num_layers} layers; need >= 1")
        for name in ("first_mean_L", "total_mean_L", "slope_L"):
            values = getattr(self, name)
            _require(
                values.shape == (BLOCK_SIZE,),
                f"routing {name} has shape {values.shape}; expected ({BLOCK_SIZE},): "
                "calibrate again",
            )
            _finite(f"routing {name}", values)


@dataclass(frozen=True)
class StepCostTable:
    """Measured time of one whole round, by batch, context and verify length.

    Attributes:
        batch_sizes: int64 [B], strictly increasing, first >= 1.
        context_tokens: int64 [C], strictly increasing grid points.
        latency_us: float64 [B, C, 17], median round time in microseconds; index 0 is a round
            without any draft pass, L in 1..16 a drafted round that verifies L rows a request.
        latency_p10_us, latency_p90_us: float64 [B, C, 17], spread of the same samples.
        draft_us: float64 [B, C], the draft pass alone.
        expert_slope_us: microseconds a further distinct expert, summed over all layers
            (a slope a distinct expert *of one layer*; multiply by distinct experts over layers).
        expert_slope_r2: coefficient of determination of that line.
    """

    batch_sizes: IntArray
    context_tokens: IntArray
    latency_us: FloatArray
    latency_p10_us: FloatArray
    latency_p90_us: FloatArray
    draft_us: FloatArray
    expert_slope_us: float
    expert_slope_r2: float

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "context_tokens"):
            grid = getattr(self, name)
            _require(
                grid.ndim == 1 and grid.size >= 1 and bool(np.all(np.diff(grid) > 0)),
                f"cost {name} = {grid.tolist()} must be a strictly increasing list: profile again",
            )
        _require(int(self.batch_sizes[0]) >= 1, "cost batch_sizes start below 1: profile again")
        shape = (self.batch_sizes.size, self.context_tokens.size, BLOCK_SIZE + 1)
        for name in ("latency_us", "latency_p10_us", "latency_p90_us"):
            values = getattr(self, name)
            _require(
                values.shape == shape,
                f"cost {name} has shape {values.shape}; expected {shape}: profile again",
            )
            _finite(f"cost {name}", values)
            _require(
                bool(np.all(values > 0)),
                f"cost {name} has a value of {float(values.min()):g} us; latencies must be > 0: "
                "profile again",
            )
        _require(
            bool(
                np.all(self.latency_p10_us <= self.latency_us)
                and np.all(self.latency_us <= self.latency_p90_us)
            ),
            "cost spread does not hold its median (p10 <= median <= p90): profile again",
        )
        _require(
            self.draft_us.shape == shape[:2],
            f"cost draft_us has shape {self.draft_us.shape}; expected {shape[:2]}: profile again",
        )
        _finite("cost draft_us", self.draft_us)
        _require(bool(np.all(self.draft_us > 0)), "cost draft_us must be > 0: profile again")
        _finite("cost expert_slope_us", np.asarray([self.expert_slope_us, self.expert_slope_r2]))


@dataclass(frozen=True)
class TransferRecord:
    """Where the costs of a part come from that were not all measured on its machine.

    Attributes:
        source: content id of the measured cost part.
        source_device, source_engine_version: its machine and engine.
        anchors: cells measured on the part's own machine; all others are transferred.
        error_median, error_p90: of the anchors predicted from the other anchors, as shares.
        interval_share: half the width of the interval of transferred cells along the verify
            length, as a share of the latency.
    """

    source: str
    source_device: str
    source_engine_version: str
    anchors: int
    error_median: float
    error_p90: float
    interval_share: float

    def __post_init__(self) -> None:
        for name in ("error_median", "error_p90", "interval_share"):
            object.__setattr__(self, name, float(getattr(self, name)))
            value = getattr(self, name)
            _require(
                bool(np.isfinite(value)) and value >= 0.0,
                f"transfer {name} = {value}; it must be >= 0: transfer again",
            )
        _require(self.anchors >= 1, f"transfer has {self.anchors} anchors: transfer again")


@dataclass(frozen=True)
class ThroughputTable:
    """Long-run throughput that the policy maximises against, by batch size (DESIGN section 3).

    Attributes:
        batch_sizes: int64 [B].
        tokens_per_us: float64 [B], `lam*` a request (not summed over the batch).
        best_fixed_length: int64 [B], best single verify length in 0..16 under the same replay.
        hazard: the hazards that `lam*` is the fixed point of.
    """

    batch_sizes: IntArray
    tokens_per_us: FloatArray
    best_fixed_length: IntArray
    hazard: HazardKind = TABLE

    def __post_init__(self) -> None:
        shape = self.batch_sizes.shape
        _require(
            self.tokens_per_us.shape == shape and self.best_fixed_length.shape == shape,
            "throughput table columns differ in length: fit it again",
        )
        _finite("throughput tokens_per_us", self.tokens_per_us)
        _require(bool(np.all(self.tokens_per_us > 0)), "throughput must be > 0: fit it again")
        _require(
            bool(np.all((self.best_fixed_length >= 0) & (self.best_fixed_length <= BLOCK_SIZE))),
            f"best fixed lengths {self.best_fixed_length.tolist()} must lie in 0..{BLOCK_SIZE}",
        )
