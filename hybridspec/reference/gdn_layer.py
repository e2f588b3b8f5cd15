"""One Gated DeltaNet layer: projections, causal convolution, delta rule, gated norm."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gdn import decay_mask, fold_factors, verify_block
from hybridspec.reference.layers import Norm, accumulate_dtype, l2_normalise
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import StatePool

PREFILL_BLOCK_ROWS = 64

_mask = lru_cache(maxsize=128)(decay_mask)


class GdnFactors(NamedTuple):
    """All that a commit needs of one layer's block, about 1 % of its state.

    N is requests x value heads, T the widest block.

    Attributes:
        conv_BTC: conv window and block inputs behind one another, [B, kernel - 1 + T, channels].
        qk_N2TK: normalised queries and keys; commits read the keys.
        update_NTV: factors u. gate_NT1: log decays.
    """

    conv_BTC: torch.Tensor
    qk_N2TK: torch.Tensor
    update_NTV: torch.Tensor
    gate_NT1: torch.Tensor

    def rows(self, rows: int) -> GdnFactors:
        """Cut to shorter blocks; prefixes are exact."""
        width = self.gate_NT1.shape[1]
        return GdnFactors(
            self.conv_BTC[:, : self.conv_BTC.shape[1] - width + rows],
            self.qk_N2TK[:, width - rows : width + rows],
            self.update_NTV[:, :rows],
            self.gate_NT1[:, :rows],
        )


class GdnLayer:
    """Weights of one layer; states live in the pool under `index`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: TargetConfig,
        dtype: torch.dtype,
        index: int,
    ) -> None:
        self.index = index
        self.key_heads, self.value_heads = config.gdn_key_heads, config.gdn_value_heads
        self.key_dim, self.value_dim = config.gdn_key_dim, config.gdn_value_dim
        self.repeat = self.value_heads // self.key_heads
        self.keys_width = self.key_heads * self.key_dim
        self.values_width = self.value_heads * self.value_dim
        self.channels = config.conv_channels
        self._parts = (self.channels, self.values_width, self.value_heads, self.value_heads)
        hidden, wide = config.hidden_size, accumulate_dtype(dtype)

        def read(name: str, *shape: int, as_dtype: torch.dtype = dtype) -> torch.Tensor:
            return checkpoint.tensor(prefix + name, shape, as_dtype)

        if prefix + "in_proj_qkvz.weight" in checkpoint:
            front = self._regroup_qwen3_next(read, hidden)
        else:
            front = [
                read("in_proj_qkv.weight", self.channels, hidden),
                read("in_proj_z.weight", self.values_width, hidden),
                read("in_proj_b.weight", self.value_heads, hidden),
                read("in_proj_a.weight", self.value_heads, hidden),
            ]
        self.front = torch.cat(front)
        kernel = read("conv1d.weight", self.channels, 1, config.conv_kernel)
        self.kernel_WC = kernel[:, 0].t().contiguous()
        self.kernel_taps = self.kernel_WC.unbind(0)
        self.dt_bias = read("dt_bias", self.value_heads, as_dtype=wide)
        self.negative_a = -read("A_log", self.value_heads, as_dtype=wide).exp()
        # Queries carry a factor K ** -0.5. The norm takes it out again, all but its eps, so the
        # factor goes into the eps: norm(s x, eps) = norm(x, eps / s^2).
        self.norm = Norm.build(
            read("norm.weight", self.value_dim, as_dtype=wide), config.rms_norm_eps * self.key_dim
        )
        self.out = read("out_proj.weight", hidden, self.values_width)
        self.l2_floor = self.dt_bias.new_tensor(math.sqrt(1e-6))

    def _regroup_qwen3_next(self, read, hidden: int) -> list[torch.Tensor]:
        """Qwen3-Next stores q, k, v, z (and b, a) key head by key head; order them by kind."""
        ratio, values = self.repeat, self.repeat * self.value_dim
        qkvz = read("in_proj_qkvz.weight", 2 * (self.keys_width + self.values_width), hidden)
        q, k, v, z = qkvz.view(self.key_heads, -1, hidden).split(
            [self.key_dim, self.key_dim, values, values], 1
        )
        b, a = (
            read("in_proj_ba.weight", 2 * self.value_heads, hidden)
            .view(self.key_heads, 2 * ratio, hidden)
            .split([ratio, ratio], 1)
        )
        return [part.reshape(-1, hidden) for part in (q, k, v, z, b, a)]

    def _project(
        self, hidden_RH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Conv inputs [R, C], output gate z [R, Hv, V], log decay and write strength [R, Hv]."""
        front = F.linear(hidden_RH, self.front)
        conv_in, z, b, a = front.split(self._parts, 1)
        wide = self.dt_bias.dtype
        if front.dtype != wide:
            b, a = b.to(wide), a.to(wide)
        gate = F.softplus(a + self.dt_bias).mul_(self.negative_a)
        return conv_in, z, gate, b.sigmoid()

    def _convolve(self, conv_BTC: torch.Tensor, rows: int) -> torch.Tensor:
        """Causal convolution and SiLU over window + rows: [B, W - 1 + T, C] to [B, T, C]."""
        if rows == 1:
            return F.silu((conv_BTC * self.kernel_WC).sum(1, keepdim=True), inplace=True)
        taps = self.kernel_taps
        out = conv_BTC.narrow(1, 0, rows) * taps[0]
        for tap in range(1, len(taps)):
            out.addcmul_(conv_BTC.narrow(1, tap, rows), taps[tap])
        return F.silu(out, inplace=True)

    def _heads(self, mixed_BTC: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised queries and keys [B x Hv, 2T, K] and values [B x Hv, T, V]."""
        batch = mixed_BTC.shape[0]
        if mixed_BTC.dtype != self.dt_bias.dtype:
            mixed_BTC = mixed_BTC.to(self.dt_bias.dtype)
        qk, v = mixed_BTC.split((2 * self.keys_width, self.values_width), 2)
        qk = qk.view(batch, rows, 2, self.key_heads, self.key_dim).permute(0, 3, 2, 1, 4)
        qk = l2_normalise(qk, self.l2_floor)
        if self.repeat > 1:
            qk = qk.unsqueeze(2).expand(-1, -1, self.repeat, -1, -1, -1)
        qk = qk.reshape(batch * self.value_heads, 2 * rows, self.key_dim)
        v = v.view(batch, rows, self.value_heads, self.value_dim).transpose(1, 2)
        return qk, v.reshape(batch * self.value_heads, rows, self.value_dim)

    def _scalars(self, scalars_RH: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """One number a row and head, [R, Hv] to [B x Hv, T, 1]."""
        if layout.requests == 1:
            return scalars_RH.t().unsqueeze(2)
        return layout.pad(scalars_RH).transpose(1, 2).reshape(-1, layout.widest, 1)

    def _output(self, out_NTV: torch.Tensor, z_RX: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        """Gated norm and output projection: [B x Hv, T, V] and z [R, Hv x V] to [R, H]."""
        if layout.requests == 1:
            out = out_NTV.transpose(0, 1)
        else:
            out = out_NTV.view(layout.requests, self.value_heads, layout.widest, self.value_dim)
            out = layout.unpad(out.transpose(1, 2))
        z = z_RX if z_RX.dtype == out.dtype else z_RX.to(out.dtype)
        gated = self.norm(out).reshape(layout.rows, self.values_width).mul_(F.silu(z))
        return F.linear(
            gated if gated.dtype == self.out.dtype else gated.to(self.out.dtype), self.out
        )

    def verify(
        self, hidden_RH: torch.Tensor, layout: RowLayout, pool: StatePool
    ) -> tuple[torch.Tensor, GdnFactors]:
        """Outputs [R, H] and factors of every request's block; the pool is only read."""
        conv_in, z, gate, beta = self._project(hidden_RH)
        rows = layout.widest
        window = pool.conv_SXWC[layout.slot_index, self.index]
        conv = torch.cat([window, layout.pad(conv_in)], 1)
        qk, v = self._heads(self._convolve(conv, rows), rows)
        gate = self._scalars(gate, layout)
        state = pool.recurrent_SXHVK[layout.slot_index, self.index]
        out, update = verify_block(
            qk,
            v,
            gate,
            self._scalars(beta, layout),
            state.reshape(-1, self.value_dim, self.key_dim),
            _mask(rows, gate.dtype, gate.device),
        )
        return self._output(out, z, layout), GdnFactors(conv, qk, update, gate)

    def advance(self, hidden_RH: torch.Tensor, layout: RowLayout, pool: StatePool) -> torch.Tensor:
        """Plain decoding or prefill: outputs [R, H], states advanced over all rows at once.

        Every request has one row, or there is a single request (prefill).
        """
        conv_in, z, gate, beta = self._project(hidden_RH)
        index, rows = layout.slot_index, layout.widest
        window = pool.conv_SXWC[index, self.index]
        conv = torch.cat([window, layout.pad(conv_in)], 1)
        pool.conv_SXWC[index, self.index] = conv.narrow(1, rows, window.shape[1])
        qk, v = self._heads(self._convolve(conv, rows), rows)
        state = pool.recurrent_SXHVK[index, self.index]
        flat = state.reshape(-1, self.value_dim, self.key_dim)
        gate, beta = self._scalars(gate, layout), self._scalars(beta, layout)
        out = (self._one_row if rows == 1 else self._blocks)(flat, qk, v, gate, beta)
        if layout.requests > 1:
            # Several slots came as a copy; a single one is a view, already up to date.
            pool.recurrent_SXHVK[index, self.index] = flat.view(state.shape)
        return self._output(out, z, layout)

    def _one_row(
        self,
        state: torch.Tensor,
        qk: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """Advance the states [N, V, K] in place by one row; returns its outputs [N, 1, V]."""
        query, key = qk.split(1, 1)
        state.mul_(gate.exp_())
        update = torch.baddbmm(v, key, state.mT, alpha=-1).mul_(beta)
        state.baddbmm_(update.mT, key)
        return torch.bmm(query, state.mT)

    def _blocks(
        self,
        state: torch.Tensor,
        qk: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """As `_one_row` for any number of rows, a block after the other."""
        total, outputs = v.shape[1], []
        for start in range(0, total, PREFILL_BLOCK_ROWS):
            stop = min(start + PREFILL_BLOCK_ROWS, total)
            block = torch.cat([qk[:, start:stop], qk[:, total + start : total + stop]], 1)
            decay = gate[:, start:stop]
            out, update = verify_block(
                block,
                v[:, start:stop],
                decay,
                beta[:, start:stop],
                state,
                _mask(stop - start, gate.dtype, gate.device),
            )
            fold_factors(state, block, update, decay, stop - start)
            outputs.append(out)
        return torch.cat(outputs, 1)
