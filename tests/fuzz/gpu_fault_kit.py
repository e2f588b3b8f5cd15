"""Faults of the captured engine, planted in the interface of its GDN layers.

They are work of the device and read nothing on the host, so graphs capture them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gpu.gdn import GdnKernels, GdnPlain
from hybridspec.reference.gpu.target import MakeGdn
from hybridspec.reference.gpu.weights import GdnWeights

# Prefill commits as rounds do, so its token and logits may show a fault first.
SHOWN_BY = frozenset({"conv_window", "recurrent_state", "token", "logits"})


class Wrong:
    """GDN layers that are right; faults override one step.

    Attributes:
        real: what does the work. lengths_B: of the last verification.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: list[GdnWeights],
        fronts_XRF: torch.Tensor,
        batch: int,
    ) -> None:
        kernels = fronts_XRF.dtype == torch.bfloat16
        make = GdnKernels if kernels else GdnPlain
        self.real: GdnKernels | GdnPlain = make(config, weights, fronts_XRF, batch)
        self.state_XSHVK, self.windows_XSCW = self.real.state_XSHVK, self.real.windows_XSCW
        self.lengths_B = torch.zeros(batch, dtype=torch.int32, device=fronts_XRF.device)
        self.rows = 0

    def verify(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        self.lengths_B, self.rows = lengths_B, rows
        return self.real.verify(index, rows, front_RF, lengths_B)

    def decode(self, index: int, front_RF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        return self.real.decode(index, front_RF, lengths_B)

    def commit(self, rows_B: torch.Tensor) -> None:
        self.real.commit(rows_B)

    def commit_decoded(self, rows_B: torch.Tensor) -> None:
        self.real.commit_decoded(rows_B)


class OneRowTooMany(Wrong):
    def commit(self, rows_B: torch.Tensor) -> None:
        more = torch.minimum(rows_B + 1, self.lengths_B)
        self.real.commit(torch.where(rows_B > 0, more, rows_B))


class OneRowTooFew(Wrong):
    def commit(self, rows_B: torch.Tensor) -> None:
        self.real.commit((rows_B - 1).clamp(min=0))


class WindowNotRolledBack(Wrong):
    """Recurrent states go back to the accepted rows, conv windows do not."""

    def commit(self, rows_B: torch.Tensor) -> None:
        taps = self.windows_XSCW.shape[3]
        raw_XBCR = self.real.raw_rows(self.rows).transpose(2, 3)
        wide = torch.cat([self.windows_XSCW, raw_XBCR], dim=3)
        places = self.lengths_B[:, None].long() + torch.arange(taps, device=rows_B.device)
        self.real.commit(rows_B)
        places = places[None, :, None, :].expand(*self.windows_XSCW.shape)
        self.windows_XSCW.copy_(wide.gather(3, places))


class WrongSlot(Wrong):
    """States are committed to the neighbour's slot."""

    def commit(self, rows_B: torch.Tensor) -> None:
        self.real.commit(rows_B)
        self.state_XSHVK.copy_(self.state_XSHVK.roll(1, 1))


class StaleAfterPlainRounds(Wrong):
    """A round without drafts computes from the state and does not write it back."""

    def decode(self, index: int, front_RF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        kept = self.state_XSHVK[index].clone()
        out = self.real.decode(index, front_RF, lengths_B)
        self.state_XSHVK[index].copy_(kept)
        return out


@dataclass(frozen=True)
class GpuFault:
    """One planted fault, and the violations that may show it first."""

    name: str
    make_gdn: MakeGdn
    kinds: frozenset[str] = SHOWN_BY


_CLASSES: tuple[tuple[str, Callable[..., Wrong]], ...] = (
    ("commits one row too many", OneRowTooMany),
    ("commits one row too few", OneRowTooFew),
    ("conv window not rolled back", WindowNotRolledBack),
    ("wrong slot", WrongSlot),
    ("stale state after a no-draft round", StaleAfterPlainRounds),
)
GPU_FAULTS = tuple(GpuFault(name, make) for name, make in _CLASSES)
