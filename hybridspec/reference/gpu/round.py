"""One decode round as two capturable parts over static buffers (`control.SplitRound`).

    prefix: caps > draft > signals > SELECT > embed > layer 0's GDN and router > CORRECT
    rest:   experts of layer 0 > other layers > LM head > inject > ACCEPT > COMMIT

Every mode of choosing lengths is a round of its own over the same buffers, so engines capture as
many graphs as they have modes and replay any of them in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from hybridspec.errors import UsageError
from hybridspec.kernels.accept.greedy import accept_greedy
from hybridspec.kernels.accept.sampled import accept_sampled
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.kernels.hazard_trees.ensemble import DeviceTrees
from hybridspec.kernels.select.correct import correct
from hybridspec.kernels.select.joint import select_jointly
from hybridspec.kernels.select.select import select
from hybridspec.kernels.select.selection import Selection
from hybridspec.kernels.select.tables import DeviceTables
from hybridspec.reference.gpu import cursors

if TYPE_CHECKING:
    from hybridspec.reference.gpu.engine import GpuEngine

LengthMode = Literal["policy", "fixed", "quotient", "plain", "prefill"]
Correction = Literal["off", "paper", "select"]
DRAFTED = ("policy", "fixed", "quotient")


@dataclass(frozen=True)
class RoundRules:
    """How a round chooses lengths and accepts.

    Attributes:
        mode: `policy` selects on the device from tables; `fixed` takes `buffers.fixed_B`;
            `quotient` is EVICT's rule on `buffers.verify_us_L`; `plain` decodes one row without
            drafts; `prefill` commits blocks of known tokens (`buffers.report.lengths_B` of them).
        tables: of `policy`.
        trees: of `policy`, hazards of their own in place of the tables'; the price of time in the
            tables must be fitted with them.
        correction: at the first router, of `policy`; `off` does not stop there.
        sampled: accept by coins instead of the argmax.
        keep_context: whether a plain round also feeds the drafter.
    """

    mode: LengthMode
    tables: DeviceTables | None = None
    trees: DeviceTrees | None = None
    correction: Correction = "off"
    sampled: bool = False
    keep_context: bool = False

    def __post_init__(self) -> None:
        if (self.mode == "policy") != (self.tables is not None):
            raise UsageError(f"mode {self.mode!r}: tables belong to mode 'policy' and only to it")
        if self.trees is not None and self.mode != "policy":
            raise UsageError(f"trees of mode {self.mode!r}; they belong to mode 'policy' only")
        if self.correction != "off" and self.mode != "policy":
            raise UsageError(f"correction {self.correction!r} of mode {self.mode!r}; policy only")


class GpuRound:
    """A round of one mode; see the module's docstring.

    Attributes:
        lengths_B: int32, rows verified in the round that ran last.
        max_rows: 16, or 1 of a plain round.
    """

    def __init__(self, engine: GpuEngine, rules: RoundRules) -> None:
        if rules.mode in DRAFTED and engine.drafter is None:
            raise UsageError(f"mode {rules.mode!r} needs a drafter: load the pair, or use 'plain'")
        self.engine, self.rules = engine, rules
        self.target, self.drafter, self.buffers = engine.target, engine.drafter, engine.buffers
        self.max_rows = 1 if rules.mode == "plain" else BLOCK_ROWS
        self.lengths_B = self.buffers.report.lengths_B
        buffers = self.buffers
        corrected = rules.correction != "off"
        chosen = buffers.selection
        self._selection = Selection(
            buffers.selected_B if corrected else self.lengths_B,
            chosen.expected_BL,
            chosen.score_BL,
            chosen.survival_BL,
            chosen.price_B,
            buffers.report.fallback_B,
        )
        if rules.sampled:
            engine.sampling_buffers()
        self._history = None if rules.trees is None else engine.history()

    # ------------------------------------------------------------------ parts

    def prefix(self) -> None:
        """Everything up to the last change of the lengths: layer 0's router, or its correction."""
        rules, target, rows = self.rules, self.target, self.max_rows
        if rules.mode != "prefill":
            self._begin()
        if rules.mode in DRAFTED:
            self._draft()
        corrected = rules.correction != "off"
        target.embed(rows)
        # A correction may keep any row up to the cap; rows past the final length are dropped.
        target.mix(
            0,
            rows,
            self.buffers.caps_B if corrected else self.lengths_B,
            decode=rules.mode == "plain",
        )
        target.router(0, rows, None if corrected else self.lengths_B)
        if corrected:
            self._correct()

    def rest(self, rows: int) -> None:
        """Everything behind `prefix`, launched for `rows` rows a request.

        Raises:
            UsageError: fewer than the round's rows of several requests; their rows of layer 0 are
                not behind one another.
        """
        if not 1 <= rows <= self.max_rows or (rows < self.max_rows and self.target.batch > 1):
            raise UsageError(
                f"a body of {rows} rows for {self.target.batch} requests; bodies below "
                f"{self.max_rows} rows are of a single request: use masked control"
            )
        plain = self.rules.mode == "plain"
        self.target.rest_of_layers(rows, self.lengths_B, decode=plain)
        self.target.head(rows)
        if self.drafter is not None and (not plain or self.rules.keep_context):
            self.drafter.inject(rows)
        self._accept(rows)
        commit_rows_B = self.buffers.report.commit_rows_B
        if plain:
            self.target.gdn.commit_decoded(commit_rows_B)
        else:
            self.target.gdn.commit(commit_rows_B)

    def run(self) -> None:
        """The whole round, as a masked graph captures it."""
        self.prefix()
        self.rest(self.max_rows)

    # ------------------------------------------------------------------ steps

    def _begin(self) -> None:
        buffers, mode = self.buffers, self.rules.mode
        fixed = {"plain": buffers.ones_B, "fixed": buffers.fixed_B}.get(mode)
        cursors.begin(
            buffers.limits_B,
            self.target.starts_B,
            buffers.caps_B,
            max_context=self.target.max_context,
            fixed_B=fixed,
            lengths_B=self.lengths_B,
            fallback_B=buffers.report.fallback_B,
        )

    def _draft(self) -> None:
        assert self.drafter is not None
        buffers, rules = self.buffers, self.rules
        signals = buffers.signals
        buffers.read_logits(self.drafter.draft(), signals)
        p1 = buffers.drafts(signals.p1_R)
        if rules.mode == "quotient":
            cursors.best_quotient(p1, buffers.verify_us_L, buffers.caps_B, self.lengths_B)
        elif rules.tables is not None:
            p2, entropy = buffers.drafts(signals.p2_R), buffers.drafts(signals.entropy_R)
            hazards = None
            if self._history is not None and rules.trees is not None:
                # The report is still that of the round before.
                hazards = self._history.hazards(
                    p1, p2, entropy, self.target.drafts_BD, buffers.report, rules.trees
                )
            choose = select if self.target.batch == 1 else select_jointly
            choose(
                p1,
                p2,
                entropy,
                self.target.starts_B,
                buffers.caps_B,
                buffers.batch_size,
                rules.tables,
                hazards_BD=hazards,
                out=self._selection,
            )

    def _correct(self) -> None:
        assert self.rules.tables is not None
        assert self.rules.correction != "off"
        target = self.target
        shape = (target.batch, BLOCK_ROWS, -1)
        correct(
            target.ids_RK.view(shape),
            self._selection,
            self.buffers.caps_B,
            self.rules.tables,
            num_experts=target.config.num_experts,
            rule=self.rules.correction,
            lookahead=1,
            out=(self.lengths_B, self.buffers.distinct_BL),
            mask=("drop", target.weights_RK.view(shape)),
        )

    def _accept(self, rows: int) -> None:
        buffers, target, report = self.buffers, self.target, self.buffers.report
        logits = target.logits_RV[: target.batch * rows]
        buffers.read_logits(logits, buffers.choices(rows))
        if self.rules.mode == "prefill":
            cursors.advance(
                buffers.known_tokens_BT(rows),
                self.lengths_B,
                target.starts_B,
                target.anchors_B,
                report.commit_rows_B,
            )
        elif self.rules.sampled:
            self._accept_sampled(rows, logits)
        else:
            accept_greedy(
                target.drafts_BD,
                self.lengths_B,
                buffers.tokens_BT(rows),
                cursors=buffers.cursors,
                out=report.outcome,
            )

    def _accept_sampled(self, rows: int, logits: torch.Tensor) -> None:
        sampling, target = self.engine.sampling_buffers(), self.target
        scaled = sampling.scaled_BTV[:, :rows]
        probabilities = sampling.probabilities_BTV[:, :rows]
        torch.mul(logits.view(target.batch, rows, -1), sampling.inverse_temperature_B11, out=scaled)
        torch.softmax(scaled, -1, out=probabilities)
        accept_sampled(
            target.drafts_BD,
            self.lengths_B,
            sampling.probabilities_BTV,
            sampling.coins_BC,
            cursors=self.buffers.cursors,
            out=self.buffers.report.outcome,
            workspace=sampling.workspace,
        )
