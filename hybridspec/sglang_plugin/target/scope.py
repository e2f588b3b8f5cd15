"""Whether the target is verifying drafts: modules of the model are not told by their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridspec.compat import sglang_0_5_16_target as compat


class VerifyScope:
    """On while a verify pass is captured or runs without a graph; scopes may nest."""

    def __init__(self) -> None:
        self.depth = 0

    @property
    def active(self) -> bool:
        """Whether layers must take the lengths of the round into account."""
        return self.depth > 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """On until the block is left."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def watch(self, model: Any) -> None:
        """Enter the scope in every verify pass of a model, captures and their warm-ups included.

        Replaces `forward` of this instance. Its signature stays, because runners inspect it.
        """
        forward: Callable[..., Any] = model.forward

        @functools.wraps(forward)
        def forward_in_scope(*args: Any, **kwargs: Any) -> Any:
            forward_batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
            if not compat.is_verification(forward_batch):
                return forward(*args, **kwargs)
            with self.entered():
                return forward(*args, **kwargs)

        model.forward = forward_in_scope
