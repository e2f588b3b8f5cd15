"""Make a failing history small: fewer operations and requests, shorter prompts, plainer plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from hybridspec.fuzz.operations import History, Join, Leave, Operation, Plan, Step
from hybridspec.fuzz.play import Violation

# Added to a prompt in place of what a round emits.
MORE_PROMPT_TOKENS = (16, 8, 4, 2, 1)

Check = Callable[[History], Violation | None]


@dataclass(frozen=True)
class Shrunk:
    """A failing history, and the violation that it shows.

    Attributes:
        minimal: no single simplification is left that still fails; False where time ran out.
    """

    history: History
    violation: Violation
    minimal: bool


def shrink(
    history: History,
    violation: Violation,
    check: Check,
    *,
    seconds: float,
    keep: Callable[[Shrunk], None] = lambda _: None,
) -> Shrunk:
    """Smallest history found that still shows a violation of the same kind.

    Args:
        history: shows `violation`.
        check: plays a history; called again and again.
        seconds: time after which the best so far is returned.
        keep: is given every improvement.
    """
    deadline = time.monotonic() + seconds
    best = Shrunk(_cut(history, violation), violation, minimal=False)
    keep(best)
    improved = True
    while improved:
        improved = False
        # Each list of candidates starts from the best so far and is left as soon as one is better,
        # so nothing is tried twice for a history that is gone.
        for candidates in (_without_runs, _with_longer_prompts, _plainer):
            while True:
                better = None
                for candidate in candidates(best.history):
                    if time.monotonic() > deadline:
                        return best
                    found = check(candidate)
                    if found is not None and found.kind == violation.kind:
                        better = Shrunk(_cut(candidate, found), found, minimal=False)
                        break
                if better is None:
                    break
                best, improved = better, True
                keep(best)
    best = replace(best, minimal=True)
    keep(best)
    return best


def _cut(history: History, violation: Violation) -> History:
    """Nothing behind the violation matters."""
    return history[: violation.operation + 1]


def _without_runs(history: History) -> Iterator[History]:
    """Without half of the operations, a quarter, ... , one; then without one request at all."""
    size = len(history) // 2
    while size >= 1:
        for start in range(0, len(history), size):
            rest = history[:start] + history[start + size :]
            if rest:
                yield rest
        size //= 2
    for key in [op.key for op in history if isinstance(op, Join)]:
        rest = _without_request(history, key)
        if rest and rest != history:
            yield rest


def _without_request(history: History, key: int) -> History:
    rest: list[Operation] = []
    for operation in history:
        if isinstance(operation, Step):
            plans = {k: plan for k, plan in operation.plans.items() if k != key}
            if plans:
                rest.append(Step(plans))
        elif operation.key != key:
            rest.append(operation)
    return tuple(rest)


def _with_longer_prompts(history: History) -> Iterator[History]:
    """Without one round, a prompt longer instead: to stand at a boundary needs no rounds."""
    for index, join in enumerate(history):
        if not isinstance(join, Join):
            continue
        for place, step in enumerate(history):
            if not isinstance(step, Step) or join.key not in step.plans:
                continue
            for more in MORE_PROMPT_TOKENS:
                longer = replace(join, prompt=join.prompt + join.prompt[-1:] * more)
                changed = (*history[:index], longer, *history[index + 1 :])
                yield changed[:place] + changed[place + 1 :]


def _plainer(history: History) -> Iterator[History]:
    for index, operation in enumerate(history):
        for simpler in _simpler(operation):
            yield (*history[:index], simpler, *history[index + 1 :])


def _simpler(operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, Join):
        if operation.follows is not None:
            yield replace(operation, follows=None)
        if operation.temperature:
            yield replace(operation, temperature=0.0, seed=0)
        for length in _lower(len(operation.prompt), 1):
            yield replace(operation, prompt=operation.prompt[:length])
    elif isinstance(operation, Leave):
        if operation.aborted:
            yield replace(operation, aborted=False)
    else:
        for key, plan in operation.plans.items():
            if len(operation.plans) > 1:
                yield Step({k: p for k, p in operation.plans.items() if k != key})
            for simpler in _simpler_plans(plan):
                yield Step({**operation.plans, key: simpler})


def _simpler_plans(plan: Plan) -> Iterator[Plan]:
    if plan.dropped:
        yield replace(plan, dropped=0)
    if plan.rows:
        yield Plan(0)
        if plan.dropped > 1:
            yield replace(plan, dropped=1)
    for rows in _lower(plan.rows, 1):
        yield replace(plan, rows=rows, right=min(plan.right, rows - 1))
    for right in _lower(plan.right, 0):
        yield replace(plan, right=right)


def _lower(value: int, least: int) -> Iterator[int]:
    """Smaller values, boldest first."""
    seen = set()
    for smaller in (least, value // 2, value - value // 4, value - 1):
        if least <= smaller < value and smaller not in seen:
            seen.add(smaller)
            yield smaller
