"""One page of a certificate for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridspec.artifacts.certificate import Gate, Subject

_TITLES = {
    "control": "Plain decoding against itself",
    "greedy": "Plain decoding against decoding with drafts",
    "law": "Joint law of sampled tokens",
    "state": "State after rounds",
    "degenerate": "Repetition loops",
    "quality": "Task quality",
}
_LIMITS = """\
* Greedy texts are compared up to their first difference; behind it they are different texts.
* A difference is a tie where both tokens lie within rounding of plain decoding's best logit, or
  within what plain decoding shows against itself. Every gap is in `differences-*.parquet`.
* Tests of laws and shares bound what could be wrong; they do not prove equality.
* Speed is told as found beside the other work, on texts without repetition loops; it is no
  benchmark.
* A certificate holds for the engine, type, pair, bundle and rule of lengths above, and for nothing
  else."""


def report(
    subject: Subject, settings: Mapping[str, Any], gates: Sequence[Gate], *, verdict: str
) -> str:
    """Markdown: verdict, subject, gates with their figures, how to make it again, limits."""
    lines = [f"# Certificate of output preservation: {verdict_of(gates, verdict)}", ""]
    lines += ["| | |", "|---|---|"]
    rows = {
        "engine": f"{subject.engine} {subject.engine_version}, {subject.dtype}",
        "lengths": subject.lengths,
        "target": _short(subject.target_digest),
        "drafter": _short(subject.drafter_digest),
        "bundle": _short(subject.bundle),
    }
    lines += [f"| {name} | {value} |" for name, value in rows.items()]
    lines += ["", "| gate | verdict | finding |", "|---|---|---|"]
    lines += [
        f"| {_TITLES.get(gate.name, gate.name)} | {gate.verdict} | {_cell(gate.message)} |"
        for gate in gates
    ]
    lines += ["", "## Figures", "", "| gate | figure | value |", "|---|---|--:|"]
    lines += [
        f"| {gate.name} | {name.replace('_', ' ')} | {value:.6g} |"
        for gate in gates
        for name, value in gate.figures.items()
    ]
    lines += ["", "## Settings", "", "| | |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {_cell(value)} |" for name, value in settings.items()]
    lines += ["", "## Limits", "", _LIMITS, ""]
    return "\n".join(lines)


def verdict_of(gates: Sequence[Gate], verdict: str) -> str:
    """The verdict, and which gates it does not speak of."""
    missing = [gate.name for gate in gates if gate.verdict == "not run"]
    if not missing:
        return verdict
    done = len(gates) - len(missing)
    return f"{verdict}, {done} of {len(gates)} gates run (not run: {', '.join(missing)})"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
    return text if len(text) <= 400 else f"{text[:400]}..."


def _short(digest: str | None) -> str:
    return "not known" if digest is None else f"`{digest[:16]}`"
