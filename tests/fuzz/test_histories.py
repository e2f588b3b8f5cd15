"""Histories: drawn, kept in files, shrunk. No engine here but one that counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridspec.errors import BundleError
from hybridspec.fuzz.adapter import EngineFacts
from hybridspec.fuzz.generate import OPERATIONS, random_history
from hybridspec.fuzz.history_file import Finding, Setting, read_finding, write_finding
from hybridspec.fuzz.operations import History, Join, Leave, Plan, Step
from hybridspec.fuzz.play import Violation
from hybridspec.fuzz.shrink import Shrunk, shrink

FACTS = EngineFacts("none", "float64", 50, 3, 560, (64, 256), False, {}, 0.0)
SETTING = Setting("none", "float64", "target", "drafter", 3, 560)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 1000))
def test_random_history_is_one_that_an_engine_can_serve(seed: int, number: int) -> None:
    history = random_history(FACTS, seed=seed, number=number)
    assert history == random_history(FACTS, seed=seed, number=number)
    assert history != random_history(FACTS, seed=seed + 1, number=number)
    assert len(history) == OPERATIONS
    live: set[int] = set()
    joined: set[int] = set()
    for operation in history:
        if isinstance(operation, Join):
            assert operation.key not in joined
            assert operation.follows is None or operation.follows in joined
            assert all(0 <= token < FACTS.vocab_size for token in operation.prompt)
            assert len(operation.prompt) < FACTS.max_context
            joined.add(operation.key)
            live.add(operation.key)
            assert len(live) <= FACTS.max_requests
        elif isinstance(operation, Leave):
            live.remove(operation.key)
        else:
            assert operation.plans
            assert set(operation.plans) <= live


def test_random_histories_hold_every_kind_of_round() -> None:
    histories = [random_history(FACTS, seed=1, number=n) for n in range(60)]
    operations = [operation for history in histories for operation in history]
    plans = [plan for op in operations if isinstance(op, Step) for plan in op.plans.values()]
    assert {plan.rows for plan in plans} == set(range(17))
    assert {min(p.right, p.rows - 1) for p in plans if p.rows} == set(range(16))
    assert any(plan.dropped for plan in plans)
    joins = [op for op in operations if isinstance(op, Join)]
    lengths = {len(join.prompt) for join in joins}
    assert {63, 64, 65, 255, 256, 257, 511, 512, 513} <= lengths
    assert any(join.temperature > 0 for join in joins)
    assert any(join.follows is not None for join in joins)
    assert {op.aborted for op in operations if isinstance(op, Leave)} == {False, True}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 500))
def test_file_gives_the_finding_back(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    path = tmp_path_factory.mktemp("file") / "finding.json"
    violation = Violation("logits", 3, None, "a message", 0.25)
    history = random_history(FACTS, seed=9, number=number)
    finding = Finding(SETTING, 9, number, history, violation, minimal=False)
    write_finding(path, finding)
    assert read_finding(path) == finding


def broken(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return apply


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda text: text[: len(text) // 2], "JSON"),
        (lambda _: "[]", "object"),
        (broken(lambda c: c.update(schema="hybridspec.fuzz/2")), "schema"),
        (broken(lambda c: c.update(operations=[])), "operations"),
        (broken(lambda c: c["operations"][0].update(do="jump")), "operations.0"),
        (broken(lambda c: c["operations"][0].update(prompt=[])), "prompt"),
        (broken(lambda c: c["operations"][1]["plans"][0].update(rows=17)), "rows"),
        (broken(lambda c: c["operations"][1]["plans"][0].update(rows=12, dropped=9)), "dropped"),
        (broken(lambda c: c.update(extra=1)), "extra"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, damage: Callable[[str], str], word: str) -> None:
    path = tmp_path / "finding.json"
    history = (Join(0, (1,)), Step({0: Plan(3, 1)}))
    write_finding(path, Finding(SETTING, 0, 0, history, Violation("x", 1, 0, "m"), minimal=True))
    path.write_text(damage(path.read_text()))
    with pytest.raises(BundleError, match=word):
        read_finding(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        read_finding(tmp_path / "none.json")


# ---------------------------------------------------------------------------- shrinking


def fails_on(wanted: Callable[[History], int | None]) -> Callable[[History], Violation | None]:
    """A check that needs no engine: `wanted` names the operation that shows the fault."""

    def check(history: History) -> Violation | None:
        place = wanted(history)
        return None if place is None else Violation("fault", place, None, "shown")

    return check


def full_block_behind_a_long_prompt(history: History) -> int | None:
    """Request of 20 tokens or more, then a round of it with 9 rows or more and one right."""
    long = set()
    for place, operation in enumerate(history):
        if isinstance(operation, Join) and len(operation.prompt) >= 20:
            long.add(operation.key)
        elif isinstance(operation, Leave):
            long.discard(operation.key)
        elif isinstance(operation, Step):
            for key, plan in operation.plans.items():
                if key in long and plan.rows >= 9 and plan.right >= 1:
                    return place
    return None


@pytest.mark.parametrize("number", range(6))
def test_shrinking_finds_the_smallest_history(number: int) -> None:
    check = fails_on(full_block_behind_a_long_prompt)
    history = random_history(FACTS, seed=2, number=number)
    violation = check(history)
    assert violation is not None
    kept: list[Shrunk] = []
    best = shrink(history, violation, check, seconds=60.0, keep=kept.append)
    join, step = best.history
    assert isinstance(join, Join)
    assert join == Join(join.key, join.prompt[:20])
    assert step == Step({join.key: Plan(9, 1)})
    assert best.minimal
    assert best.violation == check(best.history)
    assert kept[-1] == best
    sizes = [len(shrunk.history) for shrunk in kept]
    assert sizes == sorted(sizes, reverse=True)


def test_another_kind_of_violation_is_no_smaller_form() -> None:
    def check(history: History) -> Violation | None:
        kind = "fault" if len(history) >= 5 else "other"
        return Violation(kind, len(history) - 1, None, "shown")

    history = random_history(FACTS, seed=3, number=0)
    violation = check(history)
    assert violation is not None
    best = shrink(history, violation, check, seconds=60.0)
    assert len(best.history) == 5
    assert best.violation.kind == "fault"


def test_time_that_runs_out_leaves_the_best_so_far() -> None:
    check = fails_on(full_block_behind_a_long_prompt)
    history = random_history(FACTS, seed=2, number=0)
    violation = check(history)
    assert violation is not None
    best = shrink(history, violation, check, seconds=0.0)
    assert not best.minimal
    assert best.history == history[: violation.operation + 1]
