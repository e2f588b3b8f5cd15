"""The captured engine as something that can be measured in any place, with any length or routes.

Text is prefilled once, up to `TEXT_TOKENS` a request. Longer contexts repeat its keys and values:
attention reads as many positions as it will in use, while drafts and routes stay those of text, and
putting the requests elsewhere only moves their cursors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.select.tables import DeviceTables, pack_tables
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.round import GpuRound, RoundRules

TEXT_TOKENS = 512
# Any number between 0 and 1: every further row is then worth more than it costs.
_HAZARD = 0.9


def longest_tables(device: torch.device | str) -> DeviceTables:
    """Tables of a policy that costs what any costs and always takes the longest length allowed."""
    grid = np.ones(1, dtype=np.int64)
    return pack_tables(
        weights_F=np.array([1.0, 1.0, 0.0, 0.0, 0.0]),
        position_bias_D=np.zeros(15),
        knots_x=np.linspace(0.0, 1.0, 17),
        knots_y=np.full(17, _HAZARD),
        batch_sizes=grid,
        context_tokens=grid,
        latency_us=np.ones((1, 1, 17)),
        tokens_per_us=np.full(1, 1e-3),
        best_fixed_length=grid * 16,
        first_mean_L=np.ones(16),
        slope_L=np.zeros(16),
        device=device,
    )


class ForcedRoutes:
    """A round whose routers are overridden by `EngineRound.forced_XRK`; a `SplitRound`."""

    def __init__(self, round: GpuRound, forced_XRK: torch.Tensor) -> None:
        self._round, self._forced_XRK = round, forced_XRK
        self.lengths_B, self.max_rows = round.lengths_B, round.max_rows

    def prefix(self) -> None:
        """As the round's, captured with the table in place of the routers' choices."""
        self._round.target.forced_XRK = self._forced_XRK
        try:
            self._round.prefix()
        finally:
            self._round.target.forced_XRK = None

    def rest(self, rows: int) -> None:
        """As the round's, captured with the table in place of the routers' choices."""
        self._round.target.forced_XRK = self._forced_XRK
        try:
            self._round.rest(rows)
        finally:
            self._round.target.forced_XRK = None


class EngineRound:
    """Implements `profile.MeasurableRound` over an engine; see the module's docstring.

    Args:
        engine: of one batch size, with a drafter.
        texts: token ids; request i starts at the i-th, and they follow one another.
        rules: of the drafted rounds; by default a policy's that takes the longest length allowed.

    Attributes:
        drafted, forced: rounds with the routers' choices and with those of a table.
    """

    def __init__(
        self,
        engine: GpuEngine,
        texts: Sequence[Sequence[int]],
        *,
        rules: RoundRules | None = None,
    ) -> None:
        if engine.drafter is None:
            raise UsageError("profiling needs a drafter: give one with --drafter")
        stream = [token for text in texts for token in text]
        if not stream:
            raise UsageError("profiling needs some text to decode from; 0 tokens were given")
        self.engine = engine
        target, config = engine.target, engine.target.config
        self.batch, self.max_context = engine.batch, target.max_context
        self.num_layers, self.num_experts = config.num_layers, config.num_experts
        self.experts_per_token = config.experts_per_token
        rules = rules or RoundRules("policy", tables=longest_tables(target.device))
        self.drafted = engine.round(rules)
        self._plain = engine.round(RoundRules("plain"))
        self.forced_XRK = torch.zeros(
            self.num_layers, *target.ids_RK.shape, dtype=torch.int32, device=target.device
        )
        self.forced = ForcedRoutes(self.drafted, self.forced_XRK)
        self._fill(stream, np.cumsum([0, *[len(text) for text in texts]])[:-1].tolist())

    def _fill(self, stream: list[int], starts: list[int]) -> None:
        """Prefill text and repeat its keys and values over the rest of the caches."""
        engine, target = self.engine, self.engine.target
        assert engine.drafter is not None
        tokens = min(TEXT_TOKENS, self.max_context - 1)
        prompts = []
        for request in range(self.batch):
            start = starts[request % len(starts)] + request // len(starts)
            prompts.append([stream[(start + i) % len(stream)] for i in range(tokens)])
        engine.prefill(prompts)
        caches = (target.keys_XBCGD, target.values_XBCGD)
        for cache in (*caches, engine.drafter.keys_LBCGD, engine.drafter.values_LBCGD):
            filled = tokens
            while filled < cache.shape[2]:
                count = min(filled, cache.shape[2] - filled)
                cache[:, :, filled : filled + count] = cache[:, :, :count]
                filled += count
        self._state = (target.gdn.state_XSHVK, target.gdn.windows_XSCW, target.anchors_B)
        self._saved = tuple(part.clone() for part in self._state)
        self._context_B = torch.full_like(target.starts_B, tokens)
        self._limits_B = torch.full_like(target.starts_B, self.drafted.max_rows)
        self.restore()

    # ------------------------------------------------------------------ parts

    def draft(self) -> None:
        """The draft pass alone."""
        assert self.engine.drafter is not None
        self.engine.drafter.draft()

    def commit(self) -> None:
        """The commit of states and windows alone."""
        self.engine.target.gdn.commit(self.engine.buffers.report.commit_rows_B)

    def plain(self) -> None:
        """A round of one row a request without a draft pass."""
        self._plain.prefix()
        self._plain.rest(self._plain.max_rows)

    # ------------------------------------------------------------------ place

    def place(self, context_tokens: int) -> None:
        """Put all requests behind so many tokens."""
        self._context_B.fill_(context_tokens)
        self.restore()

    def restore(self) -> None:
        """States, windows and cursors as they were; nothing on the host waits."""
        for part, saved in zip(self._state, self._saved, strict=True):
            part.copy_(saved)
        self.engine.target.starts_B.copy_(self._context_B)
        self.engine.buffers.limits_B.copy_(self._limits_B)

    def force_length(self, length: int | None) -> None:
        """Every request verifies `length` rows; None: as many as there are."""
        self._limits_B.fill_(self.drafted.max_rows if length is None else length)
        self.engine.buffers.fixed_B.copy_(self._limits_B)
        self.engine.buffers.limits_B.copy_(self._limits_B)

    def force_routes(self, distinct_experts: int, *, length: int) -> None:
        """The first `length` rows of the requests activate so many experts of each layer together.

        Every row activates different experts, and every layer a different choice of them.
        """
        rows, top_k = self.batch * length, self.experts_per_token
        if not top_k <= distinct_experts <= min(self.num_experts, rows * top_k):
            raise UsageError(
                f"{distinct_experts} distinct experts of {rows} rows must lie in {top_k}.."
                f"{min(self.num_experts, rows * top_k)}"
            )
        places = (np.arange(rows * top_k) % distinct_experts).reshape(self.batch, length, top_k)
        rng = np.random.default_rng(distinct_experts * 1009 + length)
        shape = (self.num_layers, self.batch, self.drafted.max_rows, top_k)
        table = np.zeros(shape, dtype=np.int32)
        # Rows past the length load nothing; theirs are any valid ids.
        table[...] = np.arange(top_k)
        for layer in range(self.num_layers):
            table[layer, :, :length] = rng.permutation(self.num_experts)[places]
        self.forced_XRK.copy_(torch.from_numpy(table).view_as(self.forced_XRK))

    # ------------------------------------------------------------------ findings

    def rows_run(self) -> int:
        """Rows past the first router of the last round. Waits."""
        return int(self.drafted.lengths_B.sum())

    def distinct_experts_run(self) -> set[int]:
        """Distinct experts of the last layer's live rows, and of the tables of all. Waits."""
        lengths = self.drafted.lengths_B.tolist()
        shape = (self.batch, self.drafted.max_rows, self.experts_per_token)
        last = self.engine.target.ids_RK.view(shape)
        tables = [table.view(shape) for table in (*self.forced_XRK.cpu(), last.cpu())]
        found = set()
        for table in tables:
            live = [table[request, :length].flatten() for request, length in enumerate(lengths)]
            ids = torch.cat(live)
            found.add(int(ids[ids >= 0].unique().numel()))
        return found
