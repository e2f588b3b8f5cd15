"""Sessions on a live engine: the reference engine behind an event loop, with the plugin's probe."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from fault_kit import FAULTS

from hybridspec.demo.assets import require
from hybridspec.fuzz.sessions import (
    Heard,
    LiveFacts,
    Visit,
    check_ends,
    first_differences,
    judge_places,
    play_session,
    random_session,
)
from hybridspec.fuzz.sglang_adapter import (
    Digests,
    Pairing,
    StateReport,
    allowed_of,
    compare_states,
    read_digests,
    shared_tokens,
)
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.sequence import Request
from hybridspec.request import LengthRule
from hybridspec.sglang_plugin.round_state import RoundState
from hybridspec.sglang_plugin.state_probe import StateProbe, varied_length

FACTS = LiveFacts(vocab_size=300, max_context=160, max_new_tokens=14, boundaries=(64,))
SLOTS = 16
BY_NAME = {fault.name: fault for fault in FAULTS}


class ReferenceLive:
    """Steps everyone who is there, and lets the probe look and vary lengths before."""

    def __init__(self, engine: Engine, probe: StateProbe) -> None:
        self.engine, self.probe = engine, probe
        self.state = RoundState(SLOTS, "cpu")
        self.live: dict[str, tuple[Visit, Request]] = {}
        self.torn: set[str] = set()

    def abort(self, name: str) -> None:
        self.torn.add(name)

    async def stream(self, visit: Visit) -> AsyncIterator[Heard]:
        rule = LengthRule("fixed", visit.verify_length or 16)
        request = self.engine.add(visit.prompt, length_rule=rule)
        request.log.eos_token_ids = frozenset()
        request.log.finished, request.log.finish_reason = False, None
        self.live[visit.name] = (visit, request)
        rounds, lengths = 0, dict[int, int]()
        while True:
            output = list(request.tokens[len(visit.prompt) :])[: visit.max_new_tokens]
            full = len(output) == visit.max_new_tokens
            finish = "length" if full else "abort" if visit.name in self.torn else None
            if finish is not None:
                self.engine.remove(self.live.pop(visit.name)[1])
            yield Heard(output, finish, rounds, lengths)
            if finish is not None:
                return
            before = len(request.tokens)
            await asyncio.sleep(0)
            if next(iter(self.live)) == visit.name:
                self.round()
            while len(request.tokens) == before:
                await asyncio.sleep(0)
                if next(iter(self.live)) == visit.name:
                    self.round()
            rounds += 1

    def round(self) -> None:
        requests = [request for _, request in self.live.values()]
        pool = self.engine.pool
        self.state.caps_B.fill_(16)
        for row, (visit, _) in enumerate(self.live.values()):
            self.state.forced_B[row] = visit.verify_length or 16
        self.probe.before_round(
            list(self.live),
            torch.tensor([request.context_tokens for request in requests]),
            torch.tensor([request.slot for request in requests]),
            pool.recurrent_SXHVK.transpose(0, 1),
            [pool.conv_SXWC.transpose(0, 1)],
            self.state,
        )
        for row, request in enumerate(requests):
            request.rule = LengthRule("fixed", int(self.state.forced_B[row]))
        self.engine.step(requests)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target, drafter, _ = require()
    return load_pair(target, drafter, max_batch=SLOTS, max_context=FACTS.max_context)


def alone(live: ReferenceLive, visits: Sequence[Visit]) -> list[Heard]:
    """One row a round, one request after the other."""
    heard = []
    for index, visit in enumerate(visits):
        plain = Visit(f"fuzz-alone-{index:03d}", visit.prompt, visit.max_new_tokens, 1)
        heard += asyncio.run(play_session(live, [plain], timeout_s=60.0))
    return heard


@dataclass(frozen=True)
class Reference:
    """The session's texts one row a round, alone and with neighbours, and their digests."""

    session: tuple[Visit, ...]
    plain: list[list[int]]
    digests: Digests


@pytest.fixture(scope="module")
def reference(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    probe = StateProbe(tmp_path_factory.mktemp("digests") / "reference.jsonl")
    session = random_session(FACTS, seed=1, number=0)
    plain = [said.tokens for said in alone(ReferenceLive(engine, probe), session)]
    together = [
        replace(v, name=f"fuzz-rows-{i:03d}", verify_length=1, abort_after=None, behind=None)
        for i, v in enumerate(session)
    ]
    asyncio.run(play_session(ReferenceLive(engine, probe), together, timeout_s=60.0))
    return Reference(session, plain, read_digests(probe.path))


def run(
    engine: Engine, reference: Reference, folder: Path, fault: str | None = None
) -> tuple[list[str], StateReport]:
    """Kinds of the faults of the session and of its states, judged as those of SGLang are."""
    probe, session = StateProbe(folder / "digests.jsonl"), reference.session
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            BY_NAME[fault].plant(patch)
        heard = asyncio.run(play_session(ReferenceLive(engine, probe), session, timeout_s=60.0))
    faults = check_ends(session, heard)
    places = first_differences(session, heard, reference.plain)
    faults += judge_places(places, [1.0] * len(places), tie=1e-3)
    checks, controls = [], []
    for index, (visit, said) in enumerate(zip(session, heard, strict=True)):
        name, prompt, text = f"fuzz-alone-{index:03d}", len(visit.prompt), reference.plain[index]
        shared = shared_tokens(visit.prompt, said.tokens, text)
        checks.append(Pairing(visit.name, name, prompt, shared))
        controls.append(Pairing(f"fuzz-rows-{index:03d}", name, prompt, prompt + len(text)))
    digests = reference.digests | read_digests(probe.path)
    report = compare_states(digests, checks, controls, layers=4)
    return [found.kind for found in faults], report


def test_sessions_leave_the_states_of_one_row_a_round(
    engine: Engine, reference: Reference, tmp_path: Path
) -> None:
    kinds, report = run(engine, reference, tmp_path)
    assert kinds == []
    assert report.faults == []
    assert report.blind == []
    assert report.compared > 50
    assert max(report.largest.values()) < 1e-4
    assert engine.pool.free_slots == SLOTS


@pytest.mark.parametrize(
    "fault", ["commits one row too many", "conv window not rolled back", "wrong slot"]
)
def test_planted_fault_is_found_in_the_digests(
    engine: Engine, reference: Reference, tmp_path: Path, fault: str
) -> None:
    _, report = run(engine, reference, tmp_path, fault)
    assert report.faults


@pytest.mark.parametrize(
    ("control", "signal", "floor", "allowed", "sees"),
    [
        (0.04, 0.72, 0.0, 0.32, True),  # 8 times the control leaves a token visible
        (0.08, 0.72, 0.0, 0.36, True),  # else what does, which is more than 4 times
        (0.10, 0.72, 0.0, 0.40, False),  # never less than 4 times
        (0.0, 0.72, 0.1, 0.1, True),
        (0.0, 0.1, 0.2, 0.2, False),
        (0.04, 0.0, 0.0, 0.16, False),
    ],
)
def test_what_rounding_may_make_of_a_state(
    control: float, signal: float, floor: float, allowed: float, sees: bool
) -> None:
    found = allowed_of(control, signal, floor)
    assert found == pytest.approx(allowed)
    assert (signal >= 2.0 * found) == sees


def test_names_are_apart_and_sessions_repeat() -> None:
    sessions = [random_session(FACTS, seed=3, number=number) for number in range(50)]
    assert sessions == [random_session(FACTS, seed=3, number=number) for number in range(50)]
    visits = [visit for session in sessions for visit in session]
    names = sorted(visit.name for visit in visits)
    # SGLang aborts whatever begins with the name that it is given.
    assert not any(b.startswith(a) for a, b in itertools.pairwise(names))
    assert {visit.verify_length for visit in visits} >= {None, 1, 16}
    assert {bool(v.abort_after) for v in visits if v.abort_after is not None} == {True, False}
    assert any(len(visit.prompt) in (63, 64, 65) for visit in visits)
    assert {varied_length(name, 5) for name in names} == set(range(1, 17))


def test_a_gap_that_is_unknown_is_no_tie() -> None:
    visit = Visit("fuzz-0", (1,), 3)
    places = first_differences([visit], [Heard([4, 5], "length")], [[4, 6, 7]])
    assert [place.prefix([4, 5]) for place in places] == [[1, 4]]
    for gap, count in ((None, 1), (float("nan"), 1), (0.2, 1), (0.1, 0)):
        assert len(judge_places(places, [gap], tie=0.1)) == count
