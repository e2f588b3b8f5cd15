"""A second stream for what the next launches of a round do not wait for.

Two rules keep it safe. It starts behind everything that the main stream was given so far. And
whoever reads what it writes, or writes what it reads, joins it first. For the commit of states that
is every pass of the target, prefill included, and the host's columns when the batch changes. The
state pools have no other users: SGLang clears and copies slots at the start of a prefill, its radix
cache passes on their numbers alone, and it synchronises the device before it copies states to the
host. For the append to the drafter's caches
it is the drafter's next pass, and every pass of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Fork and join of one device; without CUDA everything simply runs in order.

    Args:
        device: of the engine.
        urgent: blocks of its kernels go before those of other streams that wait for a place.

    Attributes:
        stream: None without CUDA.
    """

    def __init__(self, device: torch.device | str, *, urgent: bool = False) -> None:
        self.stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self.stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)
            self._main_so_far = torch.cuda.Event()
            self._done = torch.cuda.Event()

    @contextmanager
    def beside(self, *read: torch.Tensor) -> Iterator[None]:
        """What is launched inside runs beside the main stream, behind what that was given before.

        Args:
            read: tensors of the main stream's allocator that are read and may be freed before the
                join.
        """
        if self.stream is None:
            yield
            return
        self._main_so_far.record()
        self.stream.wait_event(self._main_so_far)
        for tensor in read:
            tensor.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            yield
            self._done.record()

    def join(self) -> None:
        """The current stream waits for everything launched beside it; costs nothing once done."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self._done)
