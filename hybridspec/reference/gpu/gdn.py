"""Gated DeltaNet layers of a captured round: conv, verification, and the commit of all of them.

`GdnKernels` is what runs on a GPU (bf16, lengths on the device). `GdnPlain` is the same in plain
PyTorch for any dtype: it reads lengths on the host, so it is for tests and cannot be captured.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hybridspec.kernels.conv_window import naive as plain_conv
from hybridspec.kernels.conv_window.commit import commit as commit_windows
from hybridspec.kernels.conv_window.verify import verify as convolve
from hybridspec.kernels.gdn import naive as plain_gdn
from hybridspec.kernels.gdn.commit import ConvWindows, commit
from hybridspec.kernels.gdn.decode import decode_step
from hybridspec.kernels.gdn.dispatch import architecture_of, verify
from hybridspec.kernels.gdn.factors import BLOCK_ROWS, Factors
from hybridspec.kernels.gdn.sequential import LANE_WIDTH
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gpu.weights import GdnWeights


class GdnBlocks(Protocol):
    """All GDN layers of a target with their states, one slot a request.

    Attributes:
        state_XSHVK: fp32 recurrent states of all layers.
        windows_XSCW: conv windows of all layers.
    """

    state_XSHVK: torch.Tensor
    windows_XSCW: torch.Tensor

    def verify(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """Outputs [B x rows, HV, V] of GDN layer `index`; states stay as they are.

        Args:
            front_RF: projections q, k, v, z, b, a of the rows; must stay alive until the commit.
            lengths_B: int32 rows of each request that count.
        """
        ...

    def decode(self, index: int, front_RF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """As `verify` for one row a request, which is committed at once but for the windows."""
        ...

    def commit(self, rows_B: torch.Tensor) -> None:
        """Advance states and windows of all layers by so many verified rows."""
        ...

    def commit_decoded(self, rows_B: torch.Tensor) -> None:
        """Advance the windows behind `decode`."""
        ...


class _Shapes:
    """Sizes and static buffers that every form needs."""

    def __init__(
        self,
        config: TargetConfig,
        weights: list[GdnWeights],
        fronts_XRF: torch.Tensor,
        batch: int,
    ) -> None:
        self.config, self.weights, self.batch = config, weights, batch
        self.channels, self.heads = config.conv_channels, config.gdn_value_heads
        self.fronts_XRF = fronts_XRF
        device, dtype = fronts_XRF.device, fronts_XRF.dtype
        self.slots_B = torch.arange(batch, dtype=torch.int32, device=device)
        layers = len(weights)
        self.state_XSHVK = torch.zeros(
            layers, batch, self.heads, config.gdn_value_dim, config.gdn_key_dim, device=device
        )
        self.windows_XSCW = torch.zeros(
            layers, batch, self.channels, config.conv_kernel - 1, dtype=dtype, device=device
        )

    def raw_rows(self, rows: int) -> torch.Tensor:
        """Rows of all layers as they went into the conv, [X, B, rows, C]."""
        wide = self.fronts_XRF[:, : self.batch * rows].unflatten(1, (self.batch, rows))
        return wide[..., : self.channels]

    def parts(
        self, front_RF: torch.Tensor, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Conv inputs, a and b of a layer's rows, [B, rows, ...]."""
        front = front_RF.view(self.batch, rows, -1)
        b_start = front.shape[2] - 2 * self.heads
        return (
            front[..., : self.channels],
            front[..., b_start + self.heads :],
            front[..., b_start : b_start + self.heads],
        )


class GdnKernels(_Shapes):
    """The kernels, launched for a fixed number of rows and told lengths on the device.

    Args:
        fronts_XRF: where the projections of each layer are, [layers, B x rows, F]; commits read it.
        dependent_launch: programmatic dependent launch; None: where the device has it.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: list[GdnWeights],
        fronts_XRF: torch.Tensor,
        batch: int,
        *,
        dependent_launch: bool | None = None,
    ) -> None:
        super().__init__(config, weights, fronts_XRF, batch)
        device = fronts_XRF.device
        if dependent_launch is None:
            dependent_launch = architecture_of(device) >= 90
        self.dependent = dependent_launch
        self.factors = Factors.allocate(
            len(weights),
            batch,
            config.gdn_key_heads,
            self.heads,
            config.gdn_key_dim,
            config.gdn_value_dim,
            device=device,
        )
        for part in (self.factors.key_XRHTK, self.factors.update_XRHTV, self.factors.decay_XRHT):
            # What was never verified is never committed, but a warm-up may try.
            part.zero_()
        rows = batch * BLOCK_ROWS
        self._mixed_RC = torch.empty(rows, self.channels, dtype=fronts_XRF.dtype, device=device)
        # The norm behind it is taken in fp32, as the eager engine takes it.
        self._out_RHV = torch.empty(rows, self.heads, config.gdn_value_dim, device=device)
        self._last_rows = BLOCK_ROWS

    def _convolved(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        conv_in, a, b = self.parts(front_RF, rows)
        mixed = self._mixed_RC[: self.batch * rows].view(self.batch, rows, self.channels)
        convolve(
            conv_in,
            self.windows_XSCW[index],
            self.weights[index].conv_WC.t(),
            self.slots_B,
            lengths_B,
            out=mixed,
            dependent_launch=self.dependent,
        )
        return mixed, a, b

    def verify(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """See `GdnBlocks`."""
        mixed, a, b = self._convolved(index, rows, front_RF, lengths_B)
        weights = self.weights[index]
        out = self._out_RHV[: self.batch * rows]
        verify(
            mixed,
            a,
            b,
            weights.A_log_H,
            weights.dt_bias_H,
            self.state_XSHVK[index],
            self.slots_B,
            lengths_B,
            self.factors,
            index,
            out.view(self.batch, rows, *out.shape[1:]),
            key_heads=self.config.gdn_key_heads,
            dependent_launch=self.dependent,
        )
        self._last_rows = rows
        return out

    def decode(self, index: int, front_RF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """See `GdnBlocks`."""
        mixed, a, b = self._convolved(index, 1, front_RF, lengths_B)
        weights = self.weights[index]
        out = self._out_RHV[: self.batch]
        decode_step(
            mixed,
            a,
            b,
            weights.A_log_H,
            weights.dt_bias_H,
            self.state_XSHVK[index],
            self.slots_B,
            lengths_B,
            out.view(self.batch, 1, *out.shape[1:]),
            key_heads=self.config.gdn_key_heads,
            key_lanes=min(8, self.config.gdn_key_dim // LANE_WIDTH),
            dependent_launch=self.dependent,
        )
        return out

    def commit(self, rows_B: torch.Tensor) -> None:
        """See `GdnBlocks`."""
        commit(
            self.state_XSHVK,
            self.slots_B,
            rows_B,
            self.factors,
            windows=ConvWindows(self.windows_XSCW, self.raw_rows(self._last_rows)),
        )

    def commit_decoded(self, rows_B: torch.Tensor) -> None:
        """See `GdnBlocks`."""
        commit_windows(self.windows_XSCW, self.raw_rows(1), self.slots_B, rows_B)


class GdnPlain(_Shapes):
    """Row by row in the model's dtype; see the module's docstring."""

    def __init__(
        self,
        config: TargetConfig,
        weights: list[GdnWeights],
        fronts_XRF: torch.Tensor,
        batch: int,
    ) -> None:
        super().__init__(config, weights, fronts_XRF, batch)
        self._states: dict[tuple[int, int], torch.Tensor] = {}
        self._last_rows = BLOCK_ROWS

    def verify(
        self, index: int, rows: int, front_RF: torch.Tensor, lengths_B: torch.Tensor
    ) -> torch.Tensor:
        """See `GdnBlocks`."""
        conv_in, a, b = self.parts(front_RF, rows)
        weights, config = self.weights[index], self.config
        shape = (self.batch, rows, self.heads, config.gdn_value_dim)
        out = torch.zeros(shape, device=front_RF.device)
        live = lengths_B.clamp(max=rows)
        mixed = plain_conv.verify(
            conv_in, self.windows_XSCW[index], weights.conv_WC.t(), self.slots_B, live
        )
        for request, length in enumerate(live.tolist()):
            outputs, states = plain_gdn.naive_states(
                mixed[request, :length],
                a[request, :length].float(),
                b[request, :length].float(),
                weights.A_log_H,
                weights.dt_bias_H,
                self.state_XSHVK[index, request],
                key_heads=config.gdn_key_heads,
            )
            out[request, :length] = outputs
            self._states[index, request] = states
        self._last_rows = rows
        return out.flatten(0, 1)

    def decode(self, index: int, front_RF: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """See `GdnBlocks`."""
        out = self.verify(index, 1, front_RF, lengths_B)
        for request, length in enumerate(lengths_B.tolist()):
            self.state_XSHVK[index, request] = self._states[index, request][min(length, 1)]
        return out

    def commit(self, rows_B: torch.Tensor) -> None:
        """See `GdnBlocks`."""
        for (index, request), states in self._states.items():
            self.state_XSHVK[index, request] = states[int(rows_B[request])]
        self._commit_windows(rows_B, self._last_rows)

    def commit_decoded(self, rows_B: torch.Tensor) -> None:
        """See `GdnBlocks`."""
        self._commit_windows(rows_B, 1)

    def _commit_windows(self, rows_B: torch.Tensor, rows: int) -> None:
        self.windows_XSCW.copy_(
            plain_conv.commit(self.windows_XSCW, self.raw_rows(rows), self.slots_B, rows_B)
        )
