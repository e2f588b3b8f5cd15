"""From texts, fits and counts to verdicts. What a gate asks is said in its message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridspec.artifacts.certificate import Gate, Verdict
from hybridspec.certify.questions import Question, is_correct
from hybridspec.certify.statistics import (
    Fit,
    mcnemar_exact,
    paired,
    pairs_needed,
    tango_interval,
)
from hybridspec.certify.texts import Difference, Text, speed

if TYPE_CHECKING:
    from hybridspec.fuzz.run import Report

CONTROL, GREEDY, LAW, STATE = "control", "greedy", "law", "state"
DEGENERATE, QUALITY = "degenerate", "quality"
ALL_GATES = (CONTROL, GREEDY, LAW, STATE, DEGENERATE, QUALITY)
# Plain decoding that differs from itself by more than this many bounds is no yardstick.
MOST_BOUNDS = 10.0
LOOP_LEVEL = 0.01


def control(texts: int, differences: Sequence[Difference]) -> Gate:
    """Plain decoding against itself, one request at a time and many together."""
    gaps = [d.gap_logits for d in differences]
    unknown = sum(gap is None for gap in gaps)
    wild = [
        d for d in differences if d.gap_logits is not None and d.gap_logits > _most_of_control(d)
    ]
    largest = max((gap for gap in gaps if gap is not None and math.isfinite(gap)), default=0.0)
    figures = {
        "texts": float(texts),
        "different_texts": float(len(differences)),
        "largest_gap_logits": largest,
        "unknown_gaps": float(unknown),
    }
    if wild:
        first = wild[0]
        message = (
            f"plain decoding differs from itself by {_gap(first.gap_logits)} on prompt "
            f"{first.prompt_id}, more than {MOST_BOUNDS:g} times rounding "
            f"({first.bound_logits:.2g}): the engine is no yardstick for itself"
        )
        return _gate(CONTROL, "failed", message, figures)
    message = (
        f"{len(differences)} of {texts} texts of plain decoding differ between two runs"
        + (f", by at most {largest:.2g} logits" if differences else "")
        + (f"; {unknown} of them by an unknown amount" if unknown else "")
    )
    return _gate(CONTROL, "passed", message, figures)


def _most_of_control(difference: Difference) -> float:
    return MOST_BOUNDS * difference.bound_logits


def allowed(difference: Difference, control_gap: float) -> float:
    """Largest gap of this difference that is a tie: rounding, or what plain decoding shows."""
    return max(difference.bound_logits, control_gap)


def is_tie(difference: Difference, control_gap: float) -> bool:
    """Whether a difference is a tie; an unknown gap is none."""
    gap = difference.gap_logits
    return gap is not None and gap <= allowed(difference, control_gap)


def greedy(texts: int, differences: Sequence[Difference], *, control_gap: float) -> Gate:
    """Plain decoding against decoding with drafts, judged at the first difference."""
    faults = [d for d in differences if not is_tie(d, control_gap)]
    known = [d.gap_logits for d in differences if d.gap_logits is not None]
    figures = {
        "texts": float(texts),
        "different_texts": float(len(differences)),
        "ties": float(len(differences) - len(faults)),
        "faults": float(len(faults)),
        "largest_gap_logits": max((gap for gap in known if math.isfinite(gap)), default=0.0),
        "control_gap_logits": control_gap,
    }
    if differences:
        figures["smallest_bound_logits"] = min(d.bound_logits for d in differences)
    if faults:
        first = faults[0]
        message = (
            f"{len(faults)} of {texts} texts differ from plain decoding beyond ties, such as "
            f"prompt {first.prompt_id} at token {first.position}: {first.other} instead of "
            f"{first.plain}, {_gap(first.gap_logits)}, allowed {allowed(first, control_gap):.2g}"
        )
        return _gate(GREEDY, "failed", message, figures)
    ties = len(differences)
    message = f"{texts} texts are plain decoding's" + (
        f", {ties} of them up to ties of at most {figures['largest_gap_logits']:.2g} logits"
        if ties
        else ", token by token"
    )
    return _gate(GREEDY, "passed", message, figures)


def law(fits: Sequence[Fit], *, samples: int, level: float) -> Gate:
    """Joint law of sampled tokens; `level` is that of each prompt's tests."""
    worst = min(fit.p_value for fit in fits)
    beyond = sum(fit.total_variation > fit.limit for fit in fits)
    failed = worst < level or beyond > 0
    figures = {
        "prompts": float(len(fits)),
        "samples_each": float(samples),
        "smallest_p_value": worst,
        "level_each": level,
        "beyond_total_variation_limit": float(beyond),
        "largest_total_variation": max(fit.total_variation for fit in fits),
        "bins": float(sum(fit.bins for fit in fits)),
    }
    effects = [fit.effect for fit in fits if math.isfinite(fit.effect)]
    if effects:
        figures["largest_effect_found_with_power_0.9"] = max(effects)
    message = (
        f"sampled tokens {'do not follow' if failed else 'follow'} plain decoding's law on "
        f"{len(fits)} prompts of {samples} texts: smallest p-value {worst:.2g} at level "
        f"{level:.1g}, {beyond} total variation distances beyond their limits"
    )
    return _gate(LAW, "failed" if failed else "passed", message, figures)


def state(report: Report, *, dtype: str) -> Gate:
    """Histories of rounds, compared with plain decoding after every operation."""
    largest = max(report.tally.worst.values(), default=0.0)
    figures = {
        "rounds": float(report.rounds),
        "histories": float(report.histories),
        "largest_difference": largest if math.isfinite(largest) else -1.0,
    }
    if report.finding is not None:
        where = report.path.name if report.path else "no file"
        message = f"{report.finding.violation.message} (kept in {where})"
        return _gate(STATE, "failed", message, figures)
    message = (
        f"{report.rounds} rounds in {dtype} leave KV, conv windows, recurrent states and logits "
        f"of plain decoding; largest difference {largest:.1e}"
    )
    return _gate(STATE, "passed", message, figures)


def degenerate(plain: Sequence[Text], hybrid: Sequence[Text], again: Sequence[Text]) -> Gate:
    """Repetition loops, counted; they are left out of the speed."""
    loops = [[text.loop_at >= 0 for text in arm] for arm in (plain, hybrid)]
    counts = paired(*loops)
    p_value = mcnemar_exact(counts)
    more = counts.only_second > counts.only_first and p_value < LOOP_LEVEL
    rate = speed(again, hybrid)
    figures = {
        "texts": float(len(plain)),
        "loops_plain": float(sum(loops[0])),
        "loops_hybridspec": float(sum(loops[1])),
        "loops_only_hybridspec": float(counts.only_second),
        "loops_only_plain": float(counts.only_first),
        "p_value": p_value,
        "compared_for_speed": float(rate.compared),
    }
    if rate.ratio is not None:
        figures["speedup_outside_loops"] = rate.ratio
    ratio = (
        "no text is left to time"
        if rate.ratio is None
        else f"{rate.ratio:.2f} x plain decoding on the {rate.compared} without one"
    )
    message = (
        f"{sum(loops[1])} of {len(plain)} texts run into a repetition loop, {sum(loops[0])} of "
        f"plain decoding's; {ratio}"
    )
    return _gate(DEGENERATE, "failed" if more else "passed", message, figures)


def quality(
    questions: Sequence[Question], plain: Sequence[Text], hybrid: Sequence[Text], *, margin: float
) -> Gate:
    """Noninferiority of the share of right answers, paired."""
    first, second = (
        [is_correct(text.text, question) for text, question in zip(arm, questions, strict=True)]
        for arm in (plain, hybrid)
    )
    counts = paired(first, second)
    lower, upper = tango_interval(counts)
    p_value = mcnemar_exact(counts)
    figures = {
        "questions": float(counts.n),
        "right_plain": float(sum(first)),
        "right_hybridspec": float(sum(second)),
        "only_plain_right": float(counts.only_first),
        "only_hybridspec_right": float(counts.only_second),
        "difference": counts.difference,
        "interval_low": lower,
        "interval_high": upper,
        "margin": margin,
        "mcnemar_p_value": p_value,
    }
    held = lower > -margin
    message = (
        f"{sum(second)} of {counts.n} right, {sum(first)} by plain decoding: difference "
        f"{100 * counts.difference:+.2f} points, 95 % interval {100 * lower:+.2f} to "
        f"{100 * upper:+.2f}, margin {-100 * margin:g}; McNemar p = {p_value:.2g}"
    )
    return _gate(QUALITY, "passed" if held else "failed", message, figures)


def least_questions(margin: float) -> int:
    """Questions below which the quality gate cannot pass."""
    return pairs_needed(margin)


def _gap(gap: float | None) -> str:
    if gap is None:
        return "a gap that the server does not tell"
    return f"{gap:.2g} logits" if math.isfinite(gap) else "an end that the other text has not"


def _gate(name: str, verdict: Verdict, message: str, figures: dict[str, float]) -> Gate:
    return Gate(name=name, verdict=verdict, message=message, figures=figures)
