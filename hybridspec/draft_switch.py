"""Whether one request goes on drafting: plain decoding where drafts do not pay."""

from __future__ import annotations


class DraftCredit:
    """Time that drafting has saved lately over all requests of an engine, in plain rounds.

    New requests may risk a share of it, so a workload whose drafts pay explores freely and one
    whose drafts never pay soon stops paying for trials.
    """

    LIMIT_ROUNDS = 8.0

    def __init__(self) -> None:
        self.rounds = self.LIMIT_ROUNDS

    def add(self, saved_rounds: float) -> None:
        """Count what a drafted round saved (or lost, if negative)."""
        self.rounds = min(max(self.rounds + saved_rounds, 0.0), self.LIMIT_ROUNDS)


class DraftSwitch:
    """Decides round by round whether a request drafts, from what its drafts brought so far.

    Two rules, both in the predicted times of the cost table:

    * An estimate: discounted tokens and time of drafted rounds. Where their rate is not
      `LEAST_GAIN` of plain decoding's, drafting pauses; each further pause is twice as long, and
      one drafted round tries whether it pays again.
    * A budget, which holds even where the expectations are wrong: time lost against plain decoding
      never exceeds `grant_rounds` and `ALLOWANCE` of the tokens, but for one round. Savings pay
      back, up to `MOST_SAVED_ROUNDS`.

    Args:
        lam: fitted long-run throughput, tokens/us, the starting point.
        credit: shared by the requests of an engine; sets the grant of this one.

    Attributes:
        grant_rounds: plain rounds of time that this request may lose at first.
    """

    PRIOR_TOKENS, TRIAL_PRIOR_TOKENS = 4.0, 1.5
    # Plain rounds behind plain rounds are some percent faster than behind drafted ones, so a draft
    # that only breaks even in the table loses.
    LEAST_GAIN = 1.03
    MEMORY_ROUNDS = 24
    FIRST_PAUSE, LONGEST_PAUSE = 24, 192
    SMALLEST_GRANT_ROUNDS, LARGEST_GRANT_ROUNDS = 1.0, 4.0
    ALLOWANCE = 0.008
    RESTART_ROUNDS = 0.5
    MOST_SAVED_ROUNDS = 12.0

    def __init__(self, lam: float, credit: DraftCredit | None = None) -> None:
        self.lam_fit = lam
        self._credit = credit or DraftCredit()
        self.grant_rounds = min(
            self.SMALLEST_GRANT_ROUNDS + self._credit.rounds, self.LARGEST_GRANT_ROUNDS
        )
        self._budget_rounds = self.grant_rounds
        self._spent = False
        self._pause_left = 0
        self._next_pause = self.FIRST_PAUSE
        self._start_estimate(self.PRIOR_TOKENS)

    def _start_estimate(self, tokens: float) -> None:
        self._tokens, self._time_us = tokens, tokens / self.lam_fit

    @property
    def drafted_rate(self) -> float:
        """Estimated tokens/us of drafted rounds of this request."""
        return self._tokens / self._time_us

    @property
    def drafting(self) -> bool:
        """Whether the next round drafts."""
        return self._pause_left == 0 and not self._spent

    def lam(self, plain_us: float) -> float:
        """Price of time for this request: its own rate, never below plain decoding's."""
        return max(self.drafted_rate, 1.0 / plain_us)

    def after_draft(self, expected: float, emitted: int, round_us: float, plain_us: float) -> None:
        """Learn from a drafted round.

        Args:
            expected: E(L) that the policy saw; emitted: tokens it really brought.
            round_us: predicted time of the round; plain_us: of a round without a draft pass.
        """
        keep = 1.0 - 1.0 / self.MEMORY_ROUNDS
        # The calibrated expectation has less noise than one outcome, the outcome has no bias.
        self._tokens = self._tokens * keep + 0.5 * (expected + emitted)
        self._time_us = self._time_us * keep + round_us
        saved = emitted - round_us / plain_us
        self._credit.add(saved)
        self._add_budget(saved + self.ALLOWANCE * emitted)
        self._spent = self._budget_rounds <= 0.0
        if self.drafted_rate * plain_us < self.LEAST_GAIN:
            self._pause_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, self.LONGEST_PAUSE)
        elif saved > 0.0:
            self._next_pause = self.FIRST_PAUSE

    def after_plain(self) -> None:
        """Count a round without drafts; behind a pause one round tries from a fresh estimate."""
        self._add_budget(self.ALLOWANCE)
        if self._budget_rounds >= self.RESTART_ROUNDS:
            self._spent = False
        if self._pause_left > 0:
            self._pause_left -= 1
            if self._pause_left == 0:
                self._start_estimate(self.TRIAL_PRIOR_TOKENS)

    def _add_budget(self, rounds: float) -> None:
        self._budget_rounds = min(self._budget_rounds + rounds, self.MOST_SAVED_ROUNDS)
