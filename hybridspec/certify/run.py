"""Runs the gates of a certificate one after the other and keeps each one as soon as it is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from hybridspec.artifacts.certificate import (
    Certificate,
    Evidence,
    Gate,
    Subject,
    folder_of,
    read_certificate,
    read_evidence,
    write_certificate,
)
from hybridspec.certify import gates
from hybridspec.certify.questions import Question, find_answer, is_correct
from hybridspec.certify.report import report
from hybridspec.certify.texts import AGAIN, HYBRID, PLAIN, QUESTIONS, Difference, Task, Text
from hybridspec.errors import BundleError


class Arms(Protocol):
    """What decodes: the engine in this process, or two servers."""

    def encode(self, tasks: Sequence[Task], *, max_new_tokens: int) -> list[Task]:
        """Check the tasks, and tokenize them where that is done here."""
        ...

    def decode(
        self,
        arm: str,
        tasks: Sequence[Task],
        *,
        drafts: bool,
        batch: int,
        backwards: bool,
        max_new_tokens: int,
        done: Callable[[int], None],
    ) -> list[Text]:
        """Greedy texts in the order of the tasks."""
        ...

    def compare(self, task: Task, plain: Text, other: Text) -> Difference | None:
        """The first difference of a text from plain decoding's."""
        ...


class Progress(Protocol):
    """A bar."""

    def advance(self, amount: float = 1.0) -> None:
        """Count `amount` as done."""
        ...


@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        gates: names in the order of `gates.ALL_GATES`.
        batch: requests decoded together in all but the first run of plain decoding.
        extra: of the gates that need the engine in this process, by name; each is told how much is
            done, and returns its gate.
        totals: of their progress bars.
    """

    gates: tuple[str, ...]
    tasks: tuple[Task, ...]
    questions: tuple[Question, ...]
    batch: int
    max_new_tokens: int
    max_answer_tokens: int
    margin: float
    extra: Mapping[str, Callable[[Callable[[int], None]], Gate]] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)


class Certifier:
    """One certificate in the making.

    Args:
        root: folder that it is written into. subject, settings: see `Certificate`.
        bar: a progress bar of that title and total.
        fresh: make every gate again instead of keeping those of an unfinished certificate.
    """

    def __init__(
        self,
        root: Path,
        *,
        subject: Subject,
        settings: Mapping[str, Any],
        plan: Plan,
        arms: Arms,
        bar: Callable[[str, float], AbstractContextManager[Progress]],
        fresh: bool = False,
    ) -> None:
        self.root, self.subject, self.settings = root, subject, dict(settings)
        self.plan, self.arms, self._bar = plan, arms, bar
        self.gates: dict[str, Gate] = {}
        self.texts: dict[str, list[Text]] = {}
        self.differences: dict[str, list[Difference]] = {}
        self.kept = 0
        self.tasks = arms.encode(plan.tasks, max_new_tokens=plan.max_new_tokens)
        asked = [Task(q.prompt_id, q.category, q.text) for q in plan.questions]
        self.asked = arms.encode(asked, max_new_tokens=plan.max_answer_tokens)
        if not fresh:
            self._take_up()

    def _take_up(self) -> None:
        """Keep what an unfinished run under the same settings left."""
        try:
            old = read_certificate(self.root, folder_of(self.root, self.subject).name)
            if old.settings != self.settings or old.verdict != "incomplete":
                return
            rows = read_evidence(self.root, old)
        except BundleError:
            return
        columns = rows.texts
        for i, arm in enumerate(columns["arm"]):
            self.texts.setdefault(arm, []).append(
                Text(
                    arm,
                    columns["prompt_id"][i],
                    columns["category"][i],
                    columns["text"][i],
                    tuple(columns["token_ids"][i]),
                    columns["num_tokens"][i],
                    columns["decode_us"][i],
                )
            )
        # Differences are found again from the texts, where these hold token ids.
        if any(not text.token_ids for arm in self.texts.values() for text in arm):
            self.texts = {}
            return
        self.gates = {gate.name: gate for gate in old.gates if gate.verdict == "passed"}
        self.kept = len(self.gates)

    def run(self) -> Certificate:
        """Run what is missing; every gate is written as soon as it is done.

        Raises:
            KeyboardInterrupt: what was finished is on disk.
        """
        for name in self.plan.gates:
            # The first two cost little where the texts are there, and find the differences again.
            if name in self.gates and name not in (gates.CONTROL, gates.GREEDY):
                continue
            try:
                self.gates[name] = self._gate(name)
            except KeyboardInterrupt:
                self.write()
                raise
            self.write()
        return self.write()

    def _gate(self, name: str) -> Gate:
        match name:
            case gates.CONTROL:
                self.differences[name] = self._compare(AGAIN)
                return gates.control(len(self.tasks), self.differences[name])
            case gates.GREEDY:
                self.differences[name] = self._compare(HYBRID)
                return gates.greedy(
                    len(self.tasks), self.differences[name], control_gap=self._control_gap()
                )
            case gates.DEGENERATE:
                plain, hybrid, again = (self._texts(arm) for arm in (PLAIN, HYBRID, AGAIN))
                return gates.degenerate(plain, hybrid, again)
            case gates.QUALITY:
                plain, hybrid = (self._texts(arm + QUESTIONS) for arm in (PLAIN, HYBRID))
                return gates.quality(self.plan.questions, plain, hybrid, margin=self.plan.margin)
        with self._bar(name, float(self.plan.totals.get(name, 1))) as bar:
            return self.plan.extra[name](lambda amount: bar.advance(float(amount)))

    def _control_gap(self) -> float:
        gate = self.gates.get(gates.CONTROL)
        return gate.figures.get("largest_gap_logits", 0.0) if gate else 0.0

    def _texts(self, arm: str) -> list[Text]:
        """Texts of an arm, decoded once."""
        asked = arm.endswith(QUESTIONS)
        tasks = self.asked if asked else self.tasks
        if len(self.texts.get(arm, ())) == len(tasks):
            return self.texts[arm]
        limit = self.plan.max_answer_tokens if asked else self.plan.max_new_tokens
        alone = arm == PLAIN
        with self._bar(f"decoding, {arm}", float(len(tasks) * limit)) as bar:
            self.texts[arm] = self.arms.decode(
                arm,
                tasks,
                drafts=arm.startswith(HYBRID),
                batch=1 if alone else self.plan.batch,
                backwards=not alone,
                max_new_tokens=limit,
                done=lambda _: bar.advance(float(limit)),
            )
        return self.texts[arm]

    def _compare(self, arm: str) -> list[Difference]:
        triples = zip(self.tasks, self._texts(PLAIN), self._texts(arm), strict=True)
        found = [self.arms.compare(*triple) for triple in triples]
        return [difference for difference in found if difference is not None]

    def write(self) -> Certificate:
        """Write the certificate as it stands."""
        listed = [
            self.gates.get(name)
            or Gate(name=name, verdict="not run", message=self._why_not(name), figures={})
            for name in gates.ALL_GATES
        ]
        found = {gate.verdict for gate in self.gates.values()}
        done = set(self.plan.gates) <= set(self.gates)
        verdict = "failed" if "failed" in found else "passed" if done else "incomplete"
        return write_certificate(
            self.root,
            subject=self.subject,
            settings=self.settings,
            gates=listed,
            evidence=self._evidence(),
            report=report(self.subject, self.settings, listed, verdict=verdict),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _why_not(self, name: str) -> str:
        return "not reached yet" if name in self.plan.gates else "not asked for"

    def _evidence(self) -> Evidence:
        texts = [text for arm in self.texts.values() for text in arm]
        compared = [(name, d) for name, found in self.differences.items() for d in found]
        names = ("arm", "prompt_id", "category", "text", "token_ids", "num_tokens", "loop_at")
        names += ("decode_us",)
        return Evidence(
            texts={name: [getattr(text, name) for text in texts] for name in names},
            differences={
                "comparison": [name for name, _ in compared],
                "prompt_id": [d.prompt_id for _, d in compared],
                "position": [d.position for _, d in compared],
                "plain": [d.plain for _, d in compared],
                "other": [d.other for _, d in compared],
                "gap_logits": [_known(d.gap_logits) for _, d in compared],
                "allowed_logits": [self._allowed(name, d) for name, d in compared],
                "kind": [
                    "tie" if _within(d, self._allowed(name, d)) else "fault" for name, d in compared
                ],
            },
            answers=self._answers(),
        )

    def _allowed(self, comparison: str, difference: Difference) -> float:
        if comparison == gates.CONTROL:
            return gates.MOST_BOUNDS * difference.bound_logits
        return gates.allowed(difference, self._control_gap())

    def _answers(self) -> dict[str, list[Any]]:
        plain, hybrid = (self.texts.get(arm + QUESTIONS) for arm in (PLAIN, HYBRID))
        rows = []
        if plain and hybrid:
            rows = list(zip(self.plan.questions, plain, hybrid, strict=True))
        return {
            "prompt_id": [q.prompt_id for q, _, _ in rows],
            "expected": [q.expected for q, _, _ in rows],
            "plain": [find_answer(text.text, q.match) for q, text, _ in rows],
            "hybridspec": [find_answer(text.text, q.match) for q, _, text in rows],
            "plain_correct": [int(is_correct(text.text, q)) for q, text, _ in rows],
            "hybridspec_correct": [int(is_correct(text.text, q)) for q, _, text in rows],
        }


def _within(difference: Difference, allowed: float) -> bool:
    return difference.gap_logits is not None and difference.gap_logits <= allowed


def _known(gap: float | None) -> float:
    return gap if gap is not None and math.isfinite(gap) else -1.0
