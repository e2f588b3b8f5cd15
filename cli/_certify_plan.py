"""What `hybridspec certify` is asked for, read and checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.certificate import Subject
from hybridspec.artifacts.digest import json_digest
from hybridspec.cli._options import DtypeName
from hybridspec.errors import PromptError, UsageError

if TYPE_CHECKING:
    from hybridspec.certify.questions import Question
    from hybridspec.certify.run import Arms, Plan
    from hybridspec.certify.texts import Task

LEAST_PROMPTS = 2


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec certify`, in its words."""

    target: Path | None
    drafter: Path | None
    bundle: Path | None
    out: Path | None
    prompts: str | None
    questions: Path | None
    gates: str | None
    max_prompts: int
    max_questions: int | None
    max_new_tokens: int
    max_answer_tokens: int
    batch: int | None
    samples: int
    law_prompts: int
    rounds: int
    margin: float
    fixed_length: int
    url: str | None
    baseline_url: str | None
    chat: bool
    fresh: bool
    seed: int
    dtype: DtypeName
    device: str
    threads: int | None


@dataclass(frozen=True)
class Asked:
    """What is read before anything is loaded."""

    root: Path
    gates: tuple[str, ...]
    tasks: tuple[Task, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Arranged:
    """Arms, what the certificate is about, and the plan that the arms can carry out."""

    arms: Arms
    subject: Subject
    plan: Plan


def read(request: Request) -> Asked:
    """Check the command line and read prompts and questions.

    Raises:
        UsageError: flags that exclude or need each other, unknown gates.
        PromptError: prompts or questions that cannot be read, or too few of them.
        BundleError: no bundle, or a damaged one.
    """
    from hybridspec.certify.questions import load_questions

    if (request.url is None) != (request.baseline_url is None):
        raise UsageError(
            "--url and --baseline-url belong together; outputs of two servers are compared: name "
            "both, or neither for the reference engine"
        )
    root = request.out or request.bundle
    if root is None:
        raise UsageError(
            "neither --bundle nor --out is given; the certificate is written there: name a folder"
        )
    if request.bundle is not None:
        load_bundle(request.bundle)
    gates = _gates(request)
    questions = (
        load_questions(request.questions, limit=request.max_questions)
        if request.questions is not None
        else []
    )
    _check_questions(request, gates, len(questions))
    tasks = _tasks(request)
    if len(tasks) < LEAST_PROMPTS:
        raise PromptError(
            f"{len(tasks)} prompt is given; at least {LEAST_PROMPTS} are needed, because requests "
            "are also decoded together: add some"
        )
    return Asked(root, gates, tuple(tasks), tuple(questions))


def _gates(request: Request) -> tuple[str, ...]:
    from hybridspec.certify.gates import ALL_GATES, CONTROL, GREEDY, LAW, QUALITY, STATE

    remote = request.url is not None
    cannot: dict[str, str] = {}
    if remote:
        cannot |= dict.fromkeys((LAW, STATE), "needs the engine in this process")
    if request.questions is None:
        cannot[QUALITY] = "needs --questions"
    if request.gates is None:
        return tuple(name for name in ALL_GATES if name not in cannot)
    wanted = [name.strip() for name in request.gates.split(",")]
    for name in wanted:
        if name not in ALL_GATES:
            raise UsageError(f"gate {name!r} is unknown: use {', '.join(ALL_GATES)}")
        if name in cannot:
            raise UsageError(f"gate {name!r} {cannot[name]}: add it, or leave the gate out")
    if GREEDY in wanted:
        wanted.append(CONTROL)  # its gaps are part of the rule
    return tuple(name for name in ALL_GATES if name in wanted)


def _check_questions(request: Request, gates: Sequence[str], count: int) -> None:
    from hybridspec.certify.gates import QUALITY, least_questions

    needed = least_questions(request.margin)
    if QUALITY in gates and count < needed:
        raise PromptError(
            f"{count} questions cannot show a margin of {request.margin:g} even if every answer "
            f"agrees; at least {needed} are needed: add questions, raise --margin, or leave "
            "--questions out"
        )


def _tasks(request: Request) -> list[Task]:
    from hybridspec.calibrate.prompts import load_prompts
    from hybridspec.certify.texts import Task

    source = request.prompts
    if source is None:
        if request.target is not None or request.url is not None:
            raise UsageError(
                "no prompts are given; only the embedded pair brings its own: add --prompts FILE"
            )
        from hybridspec.demo import assets

        _, _, embedded = assets.require()
        source = str(embedded)
    prompts = load_prompts(source)
    held_out = [p for p in prompts if p.split == "test"] if request.prompts is None else prompts
    # Evenly over categories, in the file's order.
    chosen, turn = [], 0
    by_category: dict[str, list[Any]] = {}
    for prompt in held_out:
        by_category.setdefault(prompt.category, []).append(prompt)
    while len(chosen) < min(request.max_prompts, len(held_out)):
        chosen += [group[turn] for group in by_category.values() if turn < len(group)]
        turn += 1
    return [Task(p.prompt_id, p.category, p.text) for p in chosen[: request.max_prompts]]


def settings(request: Request, asked: Asked, *, batch: int) -> dict[str, Any]:
    """What a certificate depends on besides its subject."""
    from hybridspec.certify.questions import questions_digest

    found: dict[str, Any] = {
        "gates": list(asked.gates),
        "prompts": len(asked.tasks),
        "prompts_digest": json_digest([[t.prompt_id, t.text] for t in asked.tasks]),
        "max_new_tokens": request.max_new_tokens,
        "batch": batch,
        "seed": request.seed,
    }
    if asked.questions:
        found |= {
            "questions": len(asked.questions),
            "questions_digest": questions_digest(asked.questions),
            "max_answer_tokens": request.max_answer_tokens,
            "margin": request.margin,
        }
    if request.url is None:
        found |= {
            "samples": request.samples,
            "law_prompts": request.law_prompts,
            "rounds": request.rounds,
        }
    else:
        found["chat"] = request.chat
    return found
