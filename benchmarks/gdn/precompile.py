"""Compiles every variant in parallel into Triton's cache on disk, and runs it once.

Each process has its own CUDA context, so a kernel that faults costs one process and a marked row
instead of the whole run.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from gdn.method import Method
from gdn.workload import Case, make_workload

LAYERS = 2
Task = tuple[int, Method, Case]


def run_once(method: Method, case: Case, device: torch.device) -> None:
    """One round of two layers: compiles what the full case needs."""
    workload = make_workload(case.smaller(LAYERS), device, seed=1)
    round_ = method.prepare(workload)
    round_.begin_timing()
    round_.verify(0)
    round_.commit(0)
    round_.settle(0)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _work(tasks: Any, results: Any, device: torch.device) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            number, method, case = tasks.get(timeout=0.5)
        except queue.Empty:
            return
        results.put((number, "started", os.getpid()))
        try:
            run_once(method, case, device)
        except Exception as error:
            text = str(error).strip()
            first = text.splitlines()[0] if text else ""
            where = traceback.extract_tb(error.__traceback__)[-1]
            results.put((number, f"{type(error).__name__}: {first} ({where.name})", os.getpid()))
            if "CUDA" in text or "device-side" in text:
                # The context is lost with everything in it. Results are flushed at exit.
                return
        else:
            results.put((number, "", os.getpid()))


def precompile(
    tasks: Sequence[tuple[Method, Case]],
    *,
    device: torch.device,
    processes: int,
    limit_s: float,
    report: Callable[[str], None] = print,
) -> dict[tuple[str, Case], str]:
    """Compile and run each once.

    Args:
        tasks: the slowest to compile first.
        limit_s: what is not done by then is left to the caller's process.

    Returns:
        First line of the error of each that failed.
    """
    context = multiprocessing.get_context("spawn")
    waiting, results = context.Queue(), context.Queue()
    for number, (method, case) in enumerate(tasks):
        waiting.put((number, method, case))
    workers: list[BaseProcess] = [
        context.Process(target=_work, args=(waiting, results, device), daemon=True)
        for _ in range(min(processes, len(tasks)))
    ]
    for worker in workers:
        worker.start()
    began, done, failed = time.monotonic(), set[int](), dict[tuple[str, Case], str]()
    running: dict[int, int] = {}
    while len(done) < len(tasks) and time.monotonic() - began < limit_s:
        try:
            number, text, process_id = results.get(timeout=0.2)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        if text == "started":
            running[process_id] = number
            continue
        running.pop(process_id, None)
        done.add(number)
        if text:
            method, case = tasks[number]
            failed[method.name, case] = text
            report(f"  {method.name} at batch {case.batch}, T={case.tokens}: {text}")
    alive = {worker.pid for worker in workers if worker.is_alive()}
    for process_id, number in running.items():
        if process_id not in alive and number not in done:
            method, case = tasks[number]
            failed[method.name, case] = "its process died"
            report(f"  {method.name} at batch {case.batch}, T={case.tokens}: its process died")
    # Tearing down a CUDA context takes a second, and nothing is left in it.
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - began
    report(f"compiled {len(done)} of {len(tasks)} variants in {seconds:.0f} s")
    return failed
