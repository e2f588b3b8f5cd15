"""CUDA graphs of calls, replayed in turn; kernels compiled ahead in threads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

# Keeps the card busy while the host enqueues a replay, so that no sample holds host time.
HEAD_START_CYCLES = 400_000
COMPILE_THREADS = 12


def capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Run once for compilation, then capture.

    Not through `torch.cuda.graph`, which collects garbage at every capture.
    """
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        work()
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def medians_us(
    graphs: dict[str, torch.cuda.CUDAGraph],
    num_calls: int,
    repeats: int,
    refill: Callable[[], None],
    refill_x: Callable[[], None],
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Median microseconds a call; graphs take turns on the same inputs, fresh ones every repeat."""
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for name in names:
        graphs[name].replay()
    for repeat in range(repeats):
        refill()
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            refill_x()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
        after()
    torch.cuda.synchronize()
    return {
        name: statistics.median(1e3 * b.elapsed_time(e) / num_calls for b, e in pairs)
        for name, pairs in events.items()
    }


@contextmanager
def compiling_ahead(kernels: Sequence[Any]) -> Iterator[None]:
    """Inside, launches of these Triton kernels only start compilations; all are done at the end."""
    from triton.runtime._async_compile import AsyncCompileMode

    def compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
        def only(*arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            del warmup
            return run(*arguments, grid=grid, warmup=True, **options)

        return only

    with ThreadPoolExecutor(COMPILE_THREADS) as pool, ExitStack() as stack:
        # A configuration that does not fit is left for the launch to refuse.
        stack.enter_context(AsyncCompileMode(pool, ignore_errors=True))
        for kernel in kernels:
            stack.callback(kernel.__dict__.pop, "run")
            kernel.run = compile_only(kernel.run)
        yield
