"""One engine with the graphs of its rounds that a benchmark compares."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from moe.graphs import COMPILE_THREADS
from rounds.timing import Case

from hybridspec.errors import QualityGate
from hybridspec.reference.gpu.capture import CapturedGraph, capture, warm
from hybridspec.reference.gpu.control import GraphControl, make_control
from hybridspec.reference.gpu.engine import GpuEngine
from hybridspec.reference.gpu.measured import EngineRound, ForcedRoutes, longest_tables
from hybridspec.reference.gpu.round import RoundRules

MAX_ROWS = 16


class Subject:
    """An engine, placed, whose routers are overridden by a table of routes.

    Args:
        engine: of one batch size.
        routes: int32 [layers, batch x 16, top-k].
    """

    def __init__(self, engine: GpuEngine, routes: torch.Tensor) -> None:
        self.engine = engine
        device = engine.target.device
        self.rules = RoundRules("policy", tables=longest_tables(device), correction="select")
        vocab = engine.target.config.vocab_size
        texts = [[(i * 7919 + 13) % vocab for i in range(601)]]
        self.placed = EngineRound(engine, texts, rules=self.rules)
        self.placed.forced_XRK.copy_(routes)
        self.round = self.placed.forced
        self.logits_RV = engine.target.logits_RV

    def route(self, routes: torch.Tensor) -> None:
        """Other routes, for all graphs."""
        self.placed.forced_XRK.copy_(routes)

    def of_rows(self, rows: int) -> ForcedRoutes:
        """The round launched for `rows` rows throughout, as a graph of one length is."""
        round = self.engine.round(self.rules)
        round.max_rows = rows
        return ForcedRoutes(round, self.placed.forced_XRK)

    def launch(self, rows: int) -> None:
        """A round for `rows` rows, launched at once, as compiling needs it."""
        round = self.of_rows(rows)
        round.prefix()
        round.rest(rows)

    def controlled(self, name: str, bodies: Sequence[int]) -> GraphControl:
        """A captured round under one of the mechanisms."""
        control = make_control(name, bodies=bodies)
        self.placed.restore()
        control.capture(self.round)
        self.placed.restore()
        return control

    def graph(self, work: Callable[[], Any]) -> CapturedGraph:
        """What `work` launches, as a graph."""
        self.placed.restore()
        warm(work)
        # A pool of its own: one that several graphs share ends with the last of them, and stages
        # drop the graphs that they measured.
        graph = capture(work, pool=torch.cuda.graph_pool_handle())
        self.placed.restore()
        return graph

    def per_length(self, length: int) -> CapturedGraph:
        """The graph of one length."""
        return self.graph(lambda: self.launch(length))

    def plain(self) -> CapturedGraph:
        """A round without a draft pass."""
        return self.graph(self.placed.plain)

    def launches(self, rows: int) -> Callable[[], None]:
        """Prefix and body of a mechanism, launched one by one on the stream that captures."""

        def run() -> None:
            self.round.prefix()
            self.round.rest(rows)

        return lambda: warm(run)

    def case(self, replay: Callable[[], Any], length: int, *, poison: bool = True) -> Case:
        """Timed at one length, from the placed state, with poisoned logits."""

        def before() -> None:
            self.placed.force_length(length)
            self.placed.restore()
            if poison:
                self.logits_RV.fill_(float("nan"))

        return Case(replay, before)

    def mix(self, replay: Callable[[], Any], schedule_N1: torch.Tensor) -> Case:
        """Rounds in turn, lengths taken from a table on the device that the host does not know."""
        limits_B = self.engine.buffers.limits_B

        def run() -> None:
            for length_1 in schedule_N1:
                limits_B.copy_(length_1.expand_as(limits_B))
                replay()

        return Case(run, self.placed.restore, rounds=len(schedule_N1))

    def outcome(self, replay: Callable[[], Any], length: int) -> torch.Tensor:
        """Logits [length, V] of a round of one request; the rest of the buffer was poisoned."""
        self.case(replay, length).before()
        replay()
        torch.cuda.synchronize()
        ran = int(self.placed.drafted.lengths_B[0])
        if ran != length:
            raise QualityGate(f"{ran} rows ran where {length} were asked for")
        logits = self.logits_RV[:length].clone()
        if not bool(logits.isfinite().all()):
            raise QualityGate(f"a live row of length {length} is not finite")
        return logits


def our_kernels() -> list[Any]:
    """Every Triton kernel of this project that is imported by now."""
    from triton.runtime.jit import JITFunction

    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("hybridspec."):
            for value in list(vars(module).values()):
                if isinstance(value, JITFunction):
                    found[id(value)] = value
    return list(found.values())


@contextmanager
def compiling() -> Iterator[None]:
    """Inside, launches of our kernels only start compilations; all are done at the end.

    A launch like an earlier one costs nothing: a model launches few kernels many times.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    seen: set[Any] = set()

    def compile_once(kernel: Any) -> Callable[..., Any]:
        run = kernel.run

        def once(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            del warmup
            kinds = tuple(_kind(argument) for argument in arguments)
            named = tuple((name, _kind(value)) for name, value in sorted(options.items()))
            key = (id(kernel), kinds, named)
            if key not in seen:
                seen.add(key)
                run(*arguments, grid=grid, warmup=True, **options)

        return once

    with ThreadPoolExecutor(COMPILE_THREADS) as pool, ExitStack() as stack:
        # What does not compile is left for the launch to report.
        stack.enter_context(AsyncCompileMode(pool, ignore_errors=True))
        for kernel in our_kernels():
            once = compile_once(kernel)
            stack.callback(kernel.__dict__.pop, "run")
            kernel.run = once
        yield


def _kind(value: Any) -> Any:
    """What of an argument a compilation can depend on, or more."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    return type(value), value
