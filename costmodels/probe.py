"""What an engine must offer so that its rounds can be measured.

The engine implements `RoundProbe`; `costmodels.sweep` drives it. Everything that is not part of a
decode round (prefill, capturing graphs, restoring state) happens outside the engine's own clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hybridspec.artifacts.tables import BLOCK_SIZE

# Context that one reading may use behind the prepared one: rounds that warm up and the timed one.
READING_TOKENS = 3 * BLOCK_SIZE + 1


@dataclass(frozen=True)
class RoundTiming:
    """Time of one decode round of the whole prepared batch.

    Attributes:
        total_us: the round from the start of the draft pass to the committed state, host work
            included.
        draft_us: the draft pass; exactly 0 in a round of length 0, which must not draft.
        verify_us, commit_us: target forward with acceptance, and state commit. NaN where the
            engine cannot time them apart (one captured graph).
        rows_run: target rows that did real work, summed over the batch. Rows that a masked graph
            skips do not count.
    """

    total_us: float
    draft_us: float
    verify_us: float
    commit_us: float
    rows_run: int


@dataclass(frozen=True)
class ForcedRouteTiming:
    """Time of one round whose routers were overridden.

    Attributes:
        total_us: as in `RoundTiming`.
        rows_run: as in `RoundTiming`.
        distinct_experts: experts of each layer that really ran, over all rows of the batch.
    """

    total_us: float
    rows_run: int
    distinct_experts: int


class RoundProbe(Protocol):
    """An engine prepared to run the same decode round again and again.

    Every `run_*` call starts from the state that the last `prepare` left: it must not let the
    context grow, because repeats of one case must be the same work.
    """

    @property
    def max_batch(self) -> int:
        """Largest batch that `prepare` accepts."""
        ...

    @property
    def max_context(self) -> int:
        """Largest context that `prepare` accepts, with `READING_TOKENS` of room left."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers with routed experts; 0 for a dense target."""
        ...

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense target."""
        ...

    @property
    def experts_per_token(self) -> int:
        """Routed experts that one row activates in one layer."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Returns the facts that bind a measurement: device, engine, versions, dtype, graphs."""
        ...

    def prepare(self, *, context_tokens: int, batch_size: int) -> None:
        """Fills `batch_size` requests with `context_tokens` processed tokens each, untimed."""
        ...

    def run_round(self, verify_length: int) -> RoundTiming:
        """Runs one round that verifies `verify_length` rows a request.

        Args:
            verify_length: 0..16; 0 is a round without a draft pass (one row a request).
        """
        ...

    def run_forced_routes(self, verify_length: int, distinct_experts: int) -> ForcedRouteTiming:
        """Runs one round in which each layer's rows activate `distinct_experts` experts in total.

        Args:
            verify_length: 1..16 rows a request.
            distinct_experts: from `experts_per_token` to `min(num_experts, rows * top_k)`. Every
                row still activates `experts_per_token` experts; only their overlap is chosen.
        """
        ...


def rows_expected(*, batch: int, verify_length: int) -> int:
    """Returns the target rows that a round must run, `batch * max(verify_length, 1)`."""
    if not 0 <= verify_length <= BLOCK_SIZE:
        raise ValueError(f"verify length {verify_length} is not in 0..{BLOCK_SIZE}")
    return batch * max(verify_length, 1)
