"""What a way of running the GDN part of a round looks like to this benchmark."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from gdn.workload import Case, Workload


class Round(ABC):
    """A method with its buffers, ready for one workload; every call only launches kernels."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    @abstractmethod
    def verify_layer(self, index: int, layer: int) -> None:
        """Verify one layer of slot set `index`."""

    @abstractmethod
    def commit(self, index: int) -> None:
        """Commit the accepted rows of slot set `index`, all layers."""

    @abstractmethod
    def output_BTHV(self, index: int, layer: int) -> torch.Tensor:
        """Output of the last verify of that layer and slot set, `[B, T, HV, V]` bf16."""

    @abstractmethod
    def poison(self) -> None:
        """Fill buffers that a round must write before it reads them with NaN."""

    def settle(self, index: int) -> None:
        """Bring the state pool up to date, where a commit leaves that to a later round."""
        del index

    def begin_timing(self) -> None:
        """Put what the checks left behind into a steady state."""
        return

    def verify(self, index: int) -> None:
        for layer in range(self.workload.case.shape.layers):
            self.verify_layer(index, layer)


@dataclass(frozen=True)
class Method(ABC):
    """A row of the table.

    Attributes:
        name: short and unique.
        description: what runs, for the result file.
    """

    name: str
    description: str

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        return None

    def supports(self, case: Case) -> bool:
        del case
        return True

    @abstractmethod
    def prepare(self, workload: Workload) -> Round: ...
