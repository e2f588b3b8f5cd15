"""`hybridspec certify` on the reference engine in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.certificate import Gate, folder_of
from hybridspec.artifacts.digest import model_digest
from hybridspec.cli import _serve_run
from hybridspec.cli._certify_plan import Arranged, Asked, Request
from hybridspec.cli._output import Output
from hybridspec.pair import PairFolders, pair_folders, place
from hybridspec.request import LengthRule

if TYPE_CHECKING:
    from hybridspec.certify.engine_arms import EngineArms
    from hybridspec.certify.texts import Task

CORRECTION = "off"
MOST_CONTEXT = 4096


def arrange(request: Request, asked: Asked, output: Output) -> Arranged:
    """Load the pair, with the bundle's policy where there is one."""
    from hybridspec.certify.engine_arms import EngineArms
    from hybridspec.certify.run import Plan
    from hybridspec.certify.subject import lengths_name, reference_subject
    from hybridspec.reference.config import load_target_config
    from hybridspec.reference.loading import load_pair
    from hybridspec.reference.tokenizer import Tokenizer

    folders = pair_folders(request.target, request.drafter)
    bundle = None if request.bundle is None else load_bundle(request.bundle)
    cost = None if bundle is None else bundle.cost
    threads = request.threads
    if threads is None and cost is not None:
        threads = cost.identity.threads
    placement = place(device=request.device, dtype=request.dtype, threads=threads)
    batch = request.batch or 4
    if request.batch is None and cost is not None:
        batch = min(batch, cost.identity.max_batch)
    policy, rule = None, LengthRule("fixed", request.fixed_length)
    if bundle is not None:
        _serve_run.check_fits(bundle, folders, placement, max_batch=batch, output=output)
        policy, rule = (
            _serve_run.make_policy(bundle, placement, CORRECTION, output),
            LengthRule("policy"),
        )
    engine = load_pair(
        folders.target,
        folders.drafter,
        dtype=placement.dtype,
        device=placement.device,
        max_batch=batch,
        max_context=min(MOST_CONTEXT, load_target_config(folders.target).max_position_embeddings),
        policy=policy,
    )
    arms = EngineArms(engine, Tokenizer.load(folders.target), rule=rule)
    subject = reference_subject(
        folders,
        dtype=placement.dtype,
        bundle=None if bundle is None else bundle.content_id,
        lengths=lengths_name(rule, CORRECTION),
    )
    law_tasks = asked.tasks[: request.law_prompts]
    plan = Plan(
        gates=asked.gates,
        tasks=asked.tasks,
        questions=asked.questions,
        batch=batch,
        max_new_tokens=request.max_new_tokens,
        max_answer_tokens=request.max_answer_tokens,
        margin=request.margin,
        extra={
            "law": lambda done: _law(request, arms, law_tasks, batch, done),
            "state": lambda done: _state(
                request, folders, folder_of(asked.root, subject), output, done
            ),
        },
        totals={"law": request.samples * len(law_tasks), "state": request.rounds},
    )
    return Arranged(arms, subject, plan)


def _law(
    request: Request,
    arms: EngineArms,
    tasks: tuple[Task, ...],
    batch: int,
    done: Callable[[int], None],
) -> Gate:
    from hybridspec.certify import gates
    from hybridspec.certify.law import LEVEL, law_fit

    # Two tests a prompt share the level.
    level = LEVEL / (2 * len(tasks))
    fits = [
        law_fit(
            arms,
            task,
            samples=request.samples,
            batch=batch,
            level=level,
            seed=request.seed + index * request.samples,
            done=done,
        )
        for index, task in enumerate(arms.encode(tasks, max_new_tokens=1))
    ]
    return gates.law(fits, samples=request.samples, level=level)


def _state(
    request: Request,
    folders: PairFolders,
    folder: Path,
    output: Output,
    done: Callable[[int], None],
) -> Gate:
    from hybridspec.artifacts.atomic import make_folder
    from hybridspec.certify import gates
    from hybridspec.fuzz.history_file import Setting
    from hybridspec.fuzz.reference_adapter import MAX_CONTEXT, ReferenceAdapter
    from hybridspec.fuzz.run import Report, fuzz
    from hybridspec.reference.config import load_target_config

    assert folders.drafter is not None
    limit = load_target_config(folders.target).max_position_embeddings
    adapter = ReferenceAdapter(folders.target, folders.drafter, max_context=min(MAX_CONTEXT, limit))
    facts = adapter.facts
    setting = Setting(
        facts.name,
        facts.dtype,
        model_digest(folders.target),
        model_digest(folders.drafter),
        facts.max_requests,
        facts.max_context,
    )
    make_folder(folder)
    report = Report()
    fuzz(
        adapter,
        setting,
        report,
        seed=request.seed,
        rounds=request.rounds,
        seconds=None,
        folder=folder,
        progress=done,
        say=output.warn,
    )
    return gates.state(report, dtype=facts.dtype)
