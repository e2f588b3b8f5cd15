"""Masked, SWITCH and host control run the same round, for lengths that the device chose."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from toy_round_kit import LOG_ROUNDS, MAX_ROWS, ToyRound

from hybridspec.errors import UsageError
from hybridspec.reference.gpu.capture import capture
from hybridspec.reference.gpu.conditional import SwitchGraph
from hybridspec.reference.gpu.control import (
    CONTROL_NAMES,
    DEFAULT_BODIES,
    GraphControl,
    body_of_length,
    check_bodies,
    make_control,
)
from hybridspec.reference.gpu.driver import driver

pytestmark = pytest.mark.gpu

# Head start of a busy device over the host: about a tenth of a second.
BUSY_CYCLES = 200_000_000


def made(name: str, toy: ToyRound, bodies: tuple[int, ...] = DEFAULT_BODIES) -> GraphControl:
    control = make_control(name, bodies=bodies)
    control.capture(toy)
    return control


def geometry(name: str, length: int, bodies: tuple[int, ...] = DEFAULT_BODIES) -> int:
    """Rows that should be launched for a length."""
    if name == "masked":
        return MAX_ROWS
    bodies = check_bodies(bodies, max_rows=MAX_ROWS)
    return bodies[body_of_length(bodies, max_rows=MAX_ROWS)[min(max(length, 0), MAX_ROWS)]]


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bodies", [DEFAULT_BODIES, (4, 8), tuple(range(1, 17))], ids=str)
@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_every_length(cuda: torch.device, name: str, bodies: tuple[int, ...]) -> None:
    toy = ToyRound(cuda)
    control = made(name, toy, bodies)
    for length in range(MAX_ROWS + 1):
        toy.plan([[length]])
        control.replay()
        toy.check([length])
        assert int(toy.log_N[0]) == geometry(name, length, bodies)


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_lengths_out_of_range_run_the_nearest_body(cuda: torch.device, name: str) -> None:
    toy = ToyRound(cuda)
    control = made(name, toy)
    for length in (17, 2_000_000_000, -1, -2_000_000_000):
        toy.plan([[length]])
        control.replay()
        toy.check([length])
        assert int(toy.log_N[0]) == geometry(name, length)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_lengths_of_many_rounds_are_chosen_on_the_device(
    cuda: torch.device, name: str, batch: int
) -> None:
    rng = random.Random(batch)
    schedule = [[rng.randint(1, 16) for _ in range(batch)] for _ in range(LOG_ROUNDS)]
    toy = ToyRound(cuda, batch=batch)
    control = made(name, toy)
    toy.plan(schedule)
    for _ in schedule:
        control.replay()
    assert toy.log_N.tolist() == [geometry(name, max(lengths)) for lengths in schedule]
    toy.plan(schedule[:1])
    control.replay()
    toy.check(schedule[0])


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_a_second_capture_replaces_the_first(cuda: torch.device, name: str) -> None:
    first, second = ToyRound(cuda, seed=1), ToyRound(cuda, seed=2)
    control = made(name, first)
    control.capture(second)
    first.poison()
    second.plan([[5]])
    control.replay()
    second.check([5])
    first.check([0])


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_two_captured_rounds_take_turns(cuda: torch.device, name: str) -> None:
    toys = [ToyRound(cuda, seed=seed) for seed in (1, 2)]
    controls = [made(name, toy) for toy in toys]
    for length in (3, 16, 1):
        for toy in toys:
            toy.plan([[length]])
        for _ in range(3):
            for control in controls:
                control.replay()
            for toy in toys:
                toy.round.zero_()
        for toy in toys:
            toy.check([length])


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_memory_of_bodies_is_theirs(cuda: torch.device, name: str) -> None:
    """Whatever is allocated after capturing must not lie in what the graphs write."""
    toy = ToyRound(cuda)
    control = made(name, toy)
    gc.collect()
    torch.cuda.empty_cache()
    # All sizes of the round's temporaries, many times over.
    others = [
        torch.full((rows * 64,), float("nan"), device=cuda)
        for rows in range(1, 65)
        for _ in range(20)
    ]
    for length in (1, 2, 4, 7, 16):
        toy.plan([[length]])
        control.replay()
        toy.check([length])
    assert all(bool(other.isnan().all()) for other in others), "a replay wrote into other memory"


@pytest.mark.parametrize("name", ["masked", "switch"])
def test_no_call_of_torch_waits(cuda: torch.device, name: str) -> None:
    toy = ToyRound(cuda)
    control = made(name, toy)
    with sync_is_an_error():
        for _ in range(20):
            control.replay()
        with pytest.raises(RuntimeError, match="synchroniz"):
            toy.log_N[0].item()


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_the_host_waits_only_where_it_says_so(cuda: torch.device, name: str) -> None:
    """Behind a device that is busy for a while, a control that waits cannot return at once."""
    toy = ToyRound(cuda)
    control = made(name, toy)
    control.replay()
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(BUSY_CYCLES)
    busy.record()
    began = time.perf_counter()
    for _ in range(5):
        control.replay()
    took_s = time.perf_counter() - began
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy != control.waits, f"5 replays returned after {took_s:.4f} s"


def test_switch_is_one_launch_of_the_prefix_a_setter_and_one_node(cuda: torch.device) -> None:
    toy = ToyRound(cuda)
    pool = torch.cuda.graph_pool_handle()
    toy.prefix()
    toy.rest(4)
    prefix = capture(toy.prefix, pool=pool, keep_graph=True)
    body = capture(lambda: toy.rest(4), pool=pool, keep_graph=True)
    switch = SwitchGraph(driver(), prefix, [body], [0] * 17, toy.lengths_B)
    assert driver().count_nodes(switch.graph) == {"kernel": 2, "conditional": 1}
    assert driver().count_nodes(body.raw_cuda_graph())["kernel"] >= 4
    toy.plan([[3]])
    switch.launch()
    toy.check([3])
    switch.close()
    switch.close()


def test_an_empty_body_is_refused(cuda: torch.device) -> None:
    toy = ToyRound(cuda)
    pool = torch.cuda.graph_pool_handle()
    toy.prefix()
    prefix = capture(toy.prefix, pool=pool, keep_graph=True)
    nothing = capture(lambda: None, pool=pool, keep_graph=True)
    with pytest.raises(UsageError, match="empty"):
        SwitchGraph(driver(), prefix, [nothing], [0] * 17, toy.lengths_B)


@pytest.mark.parametrize("name", CONTROL_NAMES)
def test_bodies_may_launch_dependently(cuda: torch.device, name: str) -> None:
    if torch.cuda.get_device_capability(cuda) < (9, 0):
        pytest.skip("dependent launches need compute capability 9")
    toy = ToyRound(cuda, batch=2, dependent=True)
    control = made(name, toy)
    for lengths in ([1, 2], [9, 3], [16, 16]):
        toy.plan([lengths])
        for _ in range(4):
            control.replay()
            toy.round.zero_()
        toy.check(lengths)
