"""States for the radix cache: taken where the scheduler believes them, and which they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need triton")
sys.path.insert(0, str(Path(__file__).parent))

from lookalike import Decoding, Engine

from hybridspec.errors import UsageError
from hybridspec.kernels.state_snapshot import naive
from hybridspec.sglang_plugin import prefix_snapshots
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import LengthRequest, Row
from hybridspec.sglang_plugin.policy import fixed_policy
from hybridspec.sglang_plugin.prefix_snapshots import PrefixSnapshots, may_pass
from hybridspec.sglang_plugin.round_counters import RoundCounters
from hybridspec.sglang_plugin.rounds import Rounds

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of numpy in the interpreter.
pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore:Conversion of an array:DeprecationWarning"
)
any_text = settings(max_examples=150, deadline=None, derandomize=True)


class Scheduler:
    """SGLang's bookkeeping of one request, a round behind what it launches with `overlap`.

    Its rule is that of `_mamba_check_track_boundary`; the contract tests compare the two.
    """

    def __init__(self, prompt: int, interval: int, *, overlap: bool) -> None:
        self.interval, self.overlap = interval, overlap
        self.prompt, self.output = prompt, 0
        self.next, self.last_tracked = 0, 0
        # What each slot really holds: the length of the text whose state it is.
        self.slots = [-1, -1] if overlap else [-1]
        self.before = prompt
        self.unseen: list[int | None] = []

    @property
    def kept(self) -> int:
        """Length of the text whose state would go to the cache now."""
        return self.slots[1 - self.next if self.overlap else 0]

    def launch(self, rows: int) -> None:
        """A round that keeps `rows` rows; the device knows `before`, the host `context`."""
        context = self.prompt + self.output - 1
        if may_pass([context], self.interval):
            (taken,), (slot,) = naive.plan([self.before], [rows], [7], [self.next], self.interval)
            if taken:
                self.slots[slot] = self.before + taken
        self.before += rows
        self._later(rows)

    def prefill(self) -> None:
        """The pass that emits the first token."""
        self._later(None)

    def _later(self, rows: int | None) -> None:
        self.unseen.append(rows)
        if len(self.unseen) > self.overlap:
            self.see()

    def see(self) -> None:
        """The result of the oldest pass."""
        rows = self.unseen.pop(0)
        self.output += rows or 1
        if rows is None:
            return
        now = self.prompt + self.output - 1
        before = now - (rows - 1) - 1
        if now // self.interval != before // self.interval:
            self.last_tracked = now // self.interval * self.interval
            self.next = 1 - self.next if self.overlap else 0


def follow(prompt: int, rows: list[int], interval: int, *, overlap: bool) -> bool:
    """Whether the slot to keep holds what the scheduler says, whenever it may be asked."""
    scheduler = Scheduler(prompt, interval, overlap=overlap)
    scheduler.prefill()
    for count in rows:
        scheduler.launch(count)
        if scheduler.last_tracked and scheduler.kept != scheduler.last_tracked:
            return False
    return True


@any_text
@given(
    prompt=st.integers(1, 700),
    rows=st.lists(st.integers(1, 16), min_size=1, max_size=80),
    interval=st.sampled_from([32, 33, 48, 64, 256]),
    overlap=st.booleans(),
)
def test_the_slot_that_is_kept_holds_what_the_scheduler_says(
    prompt: int, rows: list[int], interval: int, overlap: bool
) -> None:
    # Wherever the request ends, also with tokens behind its end, which the scheduler counts too.
    assert follow(prompt, rows, interval, overlap=overlap)


def test_a_shorter_interval_would_keep_a_wrong_state_and_is_refused() -> None:
    assert not follow(1, [16, 16, 16, 16], 16, overlap=True)
    assert follow(1, [16, 16, 16, 16], 16, overlap=False)
    with pytest.raises(UsageError, match="--mamba-track-interval 32 or more"):
        PrefixSnapshots(Engine(DEVICE).commit, 31, 2)


@any_text
@given(
    context=st.integers(0, 3000),
    unseen=st.lists(st.integers(1, 16), max_size=prefix_snapshots.UNSEEN_ROUNDS),
    rows=st.integers(1, 16),
    interval=st.sampled_from([32, 100, 256]),
)
def test_rounds_that_cannot_pass_do_not(
    context: int, unseen: list[int], rows: int, interval: int
) -> None:
    before = context + sum(unseen)
    passes = before // interval != (before + rows) // interval
    assert may_pass([context], interval) or not passes
    assert may_pass([5, context], interval) == any(may_pass([n], interval) for n in (5, context))


def test_most_rounds_cannot_pass() -> None:
    share = sum(may_pass([context], 256) for context in range(256)) / 256
    assert share == 48 / 256


def verified(seed: int = 0) -> Engine:
    """Random factors and rows, as if two blocks had been verified."""
    engine = Engine(DEVICE, slots=6, seed=seed)
    factors = engine.buffers.factors
    for tensor in (factors.key_XRHTK, factors.update_XRHTV, engine.buffers.raw_XRTC):
        tensor.copy_(engine.random(*tensor.shape))
    factors.decay_XRHT.copy_(-engine.random(*factors.decay_XRHT.shape).abs())
    return engine


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(engine: Engine, *slots: int) -> None:
    for slot in slots:
        engine.state_XSHVK[:, slot] = float("nan")
        engine.windows_XSCW[:, slot] = float("nan")


@pytest.mark.parametrize(
    ("before", "commits", "taken"),
    [([255, 250], [16, 7], [1, 6]), ([300, 240], [16, 16], [0, 16]), ([0, 255], [1, 0], [0, 0])],
    ids=["first row and inside", "none and the last row", "none and idle"],
)
def test_a_snapshot_is_the_state_behind_the_boundary_alone(
    before: list[int], commits: list[int], taken: list[int]
) -> None:
    """Both slots of each request: states behind the snapshot's rows, and behind all that count."""
    engine, alone = verified(), verified()
    owners, tracks = [3, 1], [4, 6]
    poisoned(engine, *tracks)
    snapshots = PrefixSnapshots(engine.commit, 256, 2)
    snapshots.compile()
    untouched = engine.state_XSHVK.clone(), engine.windows_XSCW.clone()
    snapshots.expect(
        [before[0] - 1, before[1] - 16],
        lambda: (torch.tensor(before, device=DEVICE), torch.tensor(tracks, device=DEVICE)),
    )
    rows, slots = column(*commits), column(*owners)
    snapshots.take(rows, slots, 2)
    # The requests' own states have not moved yet.
    assert torch.equal(engine.state_XSHVK[:, owners], untouched[0][:, owners])
    assert torch.equal(engine.windows_XSCW[:, owners], untouched[1][:, owners])
    engine.commit(rows, slots, 2)

    alone.commit(rows, slots, 2)
    assert torch.equal(engine.state_XSHVK[:, owners], alone.state_XSHVK[:, owners])
    assert torch.equal(engine.windows_XSCW[:, owners], alone.windows_XSCW[:, owners])
    expected = verified()
    expected.commit(column(*taken), slots, 2)
    for owner, track, count in zip(owners, tracks, taken, strict=True):
        states, windows = engine.state_XSHVK[:, track], engine.windows_XSCW[:, track]
        if count:
            assert torch.equal(states, expected.state_XSHVK[:, owner])
            assert torch.equal(windows, expected.windows_XSCW[:, owner])
        else:
            assert states.isnan().all()
            assert windows.isnan().all()
    others = [0, 2, 5]
    assert torch.equal(engine.state_XSHVK[:, others], untouched[0][:, others])
    assert torch.equal(engine.windows_XSCW[:, others], untouched[1][:, others])


def test_a_request_that_goes_on_from_a_snapshot_is_as_one_that_read_all_of_it() -> None:
    """Rounds with the boundary inside, then rows behind it from the slot, against row by row."""
    engine = Engine(DEVICE, layer_ids=(0,), requests=1, slots=3, seed=5)
    decoding = Decoding(engine)
    snapshots = PrefixSnapshots(engine.commit, 32, 1)
    length, rows = 20, engine.rows()
    for kept in (9, 11):
        rows = engine.rows()
        engine.set_round([1], [kept + 2])
        engine.verify(rows)
        tensors = torch.tensor([length], device=DEVICE), torch.tensor([2], device=DEVICE)
        snapshots.expect([length - 1], lambda tensors=tensors: tensors)
        snapshots.take(column(kept), column(1), 1)
        engine.commit(column(kept), column(1), 1)
        count = min(kept, 32 - length)
        decoding.step(0, 1, rows[0], 0, count, keep=True)
        length += kept
    assert length == 40
    states, windows = engine.state_XSHVK, engine.windows_XSCW
    expected = decoding.state_XSHVK[:, 1]
    assert float((states[:, 2].double() - expected).norm() / expected.norm()) < 1e-6
    assert torch.equal(windows[:, 2], decoding.windows_XSCW[:, 1])
    # Another request reads the other eight rows behind the copy that a hit makes.
    states[:, 3], windows[:, 3] = states[:, 2], windows[:, 2]
    rest = {name: tensor.roll(-3, 0) for name, tensor in rows[0].items()}
    engine.set_round([3], [8])
    engine.verify([rest])
    engine.commit(column(8), column(3), 1)
    assert float((states[:, 3] - states[:, 1]).norm() / states[:, 1].norm()) < 1e-5
    assert torch.equal(windows[:, 3], windows[:, 1])


def test_idle_rows_and_rows_past_the_batch_take_none() -> None:
    engine = verified()
    snapshots = PrefixSnapshots(engine.commit, 32, 2)
    before = engine.state_XSHVK.clone()
    pairs = [((31, 31), (-1, -1), 2), ((31, 31), (3, 1), 1)]
    for contexts, owners, requests in pairs:
        first = torch.tensor(contexts[:requests], device=DEVICE)
        tracks = torch.tensor((4, 6)[:requests], device=DEVICE)
        snapshots.expect([30], lambda first=first, tracks=tracks: (first, tracks))
        snapshots.take(column(16, 16), column(*owners), requests)
    changed = (engine.state_XSHVK != before).flatten(2).any(-1).any(0)
    assert changed.tolist() == [False, False, False, False, True, False, False]


def test_a_round_that_cannot_pass_asks_for_nothing_and_launches_nothing() -> None:
    engine = verified()
    snapshots = PrefixSnapshots(engine.commit, 256, 2)

    def never() -> Any:
        raise AssertionError("asked for slots")

    snapshots.expect([100, 200], never)
    assert snapshots.reads == ()
    before = engine.state_XSHVK.clone()
    snapshots.take(column(16, 16), column(3, 1), 2)
    assert torch.equal(engine.state_XSHVK, before)
    # What was expected of a round is not taken in the next one.
    snapshots.expect([250], lambda: (column(255), column(4)))
    assert len(snapshots.reads) == 2
    snapshots.expect([100], never)
    assert snapshots.reads == ()


class Target:
    """A target half on lookalike pools."""

    def __init__(self, engine: Engine) -> None:
        self.commit = engine.commit

    def capture_scope(self) -> Any:
        raise AssertionError("not verified here")


def test_rounds_take_snapshots_before_they_commit() -> None:
    engine, expected = verified(), verified()
    rounds = Rounds(
        PluginConfig(),
        fixed_policy(16, "no bundle"),
        max_requests=4,
        history_slots=10,
        device=DEVICE,
        counters=RoundCounters(DEVICE, max_requests=4, path=None),
    )
    rounds.target = Target(engine)
    rounds.snapshots = PrefixSnapshots(engine.commit, 256, 4)
    batch = [Row((i,), i + 2, LengthRequest()) for i in range(2)]
    rounds.begin(((0,), (1,)), lambda: batch, lambda: column(3, 1))
    rounds.snapshots.expect(
        [250, 9],
        lambda: (torch.tensor([251, 10], device=DEVICE), torch.tensor([4, 6], device=DEVICE)),
    )
    poisoned(engine, 4, 6)
    assert rounds.commit(column(9, 16))
    rounds.join()
    expected.commit(column(5, 0), column(3, 1), 2)
    assert torch.equal(engine.state_XSHVK[:, 4], expected.state_XSHVK[:, 3])
    assert torch.equal(engine.windows_XSCW[:, 4], expected.windows_XSCW[:, 3])
    assert engine.state_XSHVK[:, 6].isnan().all()
    whole = verified()
    whole.commit(column(9, 16), column(3, 1), 2)
    assert torch.equal(engine.state_XSHVK[:, [3, 1]], whole.state_XSHVK[:, [3, 1]])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="graphs and streams need a GPU")
def test_snapshots_ahead_of_the_commit_that_runs_beside() -> None:
    from hybridspec.sglang_plugin.commit_graphs import CommitGraphs

    engine, expected = verified(3), verified(3)
    rounds = Rounds(
        PluginConfig(),
        fixed_policy(16, "no bundle"),
        max_requests=4,
        history_slots=10,
        device=DEVICE,
        counters=RoundCounters(DEVICE, max_requests=4, path=None),
    )
    state, stream = rounds.state, rounds.side.stream
    assert stream is not None
    rounds.target = Target(engine)
    rounds.snapshots = PrefixSnapshots(engine.commit, 32, 4)
    rounds.snapshots.compile()
    rounds.commit_graphs = CommitGraphs(
        engine.commit, state.commit_rows_B, state.state_slots_B, (1, 2), stream
    )
    batch = [Row((i,), i + 2, LengthRequest()) for i in range(2)]
    rounds.begin(((0,), (1,)), lambda: batch, lambda: column(3, 1))
    length, track = [20, 3], [4, 6]
    for turn in range(12):
        kept = [1 + (5 * turn + i) % 16 for i in range(2)]
        tensors = torch.tensor(length, device=DEVICE), torch.tensor(track, device=DEVICE)
        rounds.snapshots.expect([n - 1 for n in length], lambda tensors=tensors: tensors)
        taken, slots = naive.plan(length, kept, [3, 1], track, 32)
        for owner, slot, count in zip((3, 1), slots, taken, strict=True):
            if count:
                expected.state_XSHVK[:, slot] = expected.state_XSHVK[:, owner]
                expected.windows_XSCW[:, slot] = expected.windows_XSCW[:, owner]
        expected.commit(column(*taken), column(*slots), 2)
        expected.commit(column(*kept), column(3, 1), 2)
        busy = torch.randn(2000, 2000, device=DEVICE)
        busy = busy @ busy
        assert rounds.commit(column(*kept))
        del tensors
        busy = busy @ busy
        rounds.join()
        assert torch.equal(engine.state_XSHVK, expected.state_XSHVK)
        assert torch.equal(engine.windows_XSCW, expected.windows_XSCW)
        length = [n + k for n, k in zip(length, kept, strict=True)]
