"""Runs optimiser steps as fast as the device allows: eager, compiled, or one CUDA graph a step.

Models of a few million parameters keep a large GPU waiting for kernel launches. So the loss is
compiled, and after some steps the whole step (loss, gradients, optimiser) is captured once and
replayed. Whatever fails falls back to the slower form, with a line that says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridspec.demo.optim import Muon
from hybridspec.demo.stage import say

LossFunction = Callable[..., Tensor]
_CAPTURE_AFTER = 8
_STEPS_IN_FLIGHT = 3


class Stepper:
    """Steps of one module.

    Args:
        name: for messages.
        module: whose gradients the loss makes.
        optimiser: of all parameters of the module.
        eager: loss of the input tensors.
        compiled: the same loss, compiled, or None.
        inputs: example inputs; later ones have their shapes and dtypes.
        device: of the module. Inputs may be on the CPU.
    """

    def __init__(
        self, name: str, module: nn.Module, optimiser: Muon, *, eager: LossFunction,
        compiled: LossFunction | None, inputs: tuple[Tensor, ...], device: torch.device,
    ) -> None:  # fmt: skip
        self.name, self.module, self.optimiser, self.device = name, module, optimiser, device
        self.loss_function = eager
        self.eager, self.candidate = eager, compiled
        self.inputs = tuple(x.to(device, copy=True) for x in inputs)
        self.loss = torch.zeros((), device=device)
        self.steps = 0
        cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if cuda else None
        self.in_flight: deque[torch.cuda.Event] = deque()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.capture = cuda

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes the stepper's stream the current one; results are complete when it ends."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    @property
    def form(self) -> str:
        """Returns how steps run, for the log."""
        compiled = "compiled" if self.loss_function is not self.eager else "eager"
        return f"{compiled}, captured" if self.graph else compiled

    def step(self, rate: float, *inputs: Tensor) -> None:
        """Runs one step at `rate` times the learning rates; the loss is then in `self.loss`."""
        for buffer, value in zip(self.inputs, inputs, strict=True):
            buffer.copy_(value, non_blocking=True)
        self.optimiser.set_rate(rate)
        if self.candidate is not None:
            self._try_compiled()
        if self.capture and self.steps == _CAPTURE_AFTER:
            self._try_capture()
        if self.graph is None:
            self._step()
        else:
            self.graph.replay()
        self.steps += 1
        if self.stream is not None:
            # The host must not run far ahead, or the clock of a stage would mean nothing.
            done = torch.cuda.Event()
            done.record(self.stream)
            self.in_flight.append(done)
            if len(self.in_flight) > _STEPS_IN_FLIGHT:
                self.in_flight.popleft().synchronize()

    def _step(self) -> None:
        self.module.zero_grad(set_to_none=True)
        loss = self.loss_function(*self.inputs)
        loss.backward()
        self.loss = loss.detach()
        self.optimiser.step()

    def _try_compiled(self) -> None:
        """Takes the compiled loss if it runs and agrees with the eager one."""
        candidate, self.candidate = self.candidate, None
        assert candidate is not None
        started = time.monotonic()
        with torch.no_grad():
            expected = float(self.eager(*self.inputs))
        try:
            loss = candidate(*self.inputs)
            loss.backward()
            found = float(loss.detach())
            works = abs(found - expected) <= 0.02 * abs(expected)
            reason = f"eager loss {expected:.4f}, compiled {found:.4f}"
        except Exception as error:  # Whatever breaks the compiler has the same remedy.
            works, reason = False, f"{type(error).__name__}: {str(error)[:300]}"
        seconds = time.monotonic() - started
        if works:
            self.loss_function = candidate
            say(f"{self.name} compiled in {seconds:.1f} s ({reason})")
        else:
            torch._dynamo.reset()
            say(f"{self.name} NOT compiled after {seconds:.1f} s, running eagerly ({reason})")

    def _try_capture(self) -> None:
        """Captures a whole step; the captured work runs only when the graph is replayed."""
        graph = torch.cuda.CUDAGraph()
        before = self.loss
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._step()
        except RuntimeError as error:
            self.module.zero_grad(set_to_none=True)
            self.loss = before
            say(f"{self.name} step NOT captured, launching kernels one by one ({error})")
        else:
            self.graph = graph
            say(f"{self.name} step captured as a CUDA graph")
