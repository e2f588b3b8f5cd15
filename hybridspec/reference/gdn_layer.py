"""One Gated DeltaNet layer: projections, causal convolution, delta rule, gated norm."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from hybridspec.reference.checkpoint import Checkpoint
from hybridspec.reference.config import TargetConfig
from hybridspec.reference.gdn import BlockConstants, block_constants, fold_factors, verify_block
from hybridspec.reference.layers import Norm, accumulate_dtype, l2_normalise
from hybridspec.reference.rows import RowLayout
from hybridspec.reference.state import StatePool

PREFILL_BLOCK_ROWS = 64

_constants = lru_cache(maxsize=128)(block_constants)


class GdnFactors(NamedTuple):
    """All that a commit needs of one layer's block, about 1 % of its state.

    Attributes:
        conv_BTC: conv window and block inputs behind one another, [B, kernel - 1 + T, channels].
        keys_BHTK: normalised keys. update_BHTV: factors u. gate_BHT: log decays.
    """

    conv_BTC: torch.Tensor
    keys_BHTK: torch.Tensor
    update_BHTV: torch.Tensor
    gate_BHT: torch.Tensor

    def rows(self, keep: RowLayout) -> GdnFactors:
        """Cut to the rows of shorter blocks; prefixes are exact."""
        rows, window = keep.widest, self.conv_BTC.shape[1] - self.gate_BHT.shape[2]
        return GdnFactors(
            self.conv_BTC[:, : window + rows],
            self.keys_BHTK[:, :, :rows],
            self.update_BHTV[:, :, :rows],
            self.gate_BHT[:, :, :rows],
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
        self.dt_bias = read("dt_bias", self.value_heads, as_dtype=wide)
        self.negative_a = -read("A_log", self.value_heads, as_dtype=wide).exp()
        self.norm = Norm.build(
            read("norm.weight", self.value_dim, as_dtype=wide), config.rms_norm_eps
        )
        self.out = read("out_proj.weight", hidden, self.values_width)
        self.query_scale = self.key_dim**-0.5
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
        z_stop = self.channels + self.values_width
        scalars = front[:, z_stop:].to(self.dt_bias.dtype)
        beta = scalars[:, : self.value_heads].sigmoid()
        gate = F.softplus(scalars[:, self.value_heads :] + self.dt_bias).mul_(self.negative_a)
        z = front[:, self.channels : z_stop].view(-1, self.value_heads, self.value_dim)
        return front[:, : self.channels], z, gate, beta

    def _convolve(self, conv_BTC: torch.Tensor) -> torch.Tensor:
        """Causal convolution and SiLU over window + rows: [B, W - 1 + T, C] to [B, T, C]."""
        taps = self.kernel_WC.shape[0]
        rows = conv_BTC.shape[1] - taps + 1
        if rows == 1:
            return F.silu((conv_BTC * self.kernel_WC).sum(1, keepdim=True), inplace=True)
        out = conv_BTC[:, :rows] * self.kernel_WC[0]
        for tap in range(1, taps):
            out.addcmul_(conv_BTC[:, tap : tap + rows], self.kernel_WC[tap])
        return F.silu(out, inplace=True)

    def _heads(self, mixed_BTC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised queries and keys [B, Hv, 2T, K] and values [B, Hv, T, V]."""
        batch, rows, _ = mixed_BTC.shape
        mixed = mixed_BTC.to(self.dt_bias.dtype)
        qk = mixed[..., : 2 * self.keys_width].view(batch, rows, 2, self.key_heads, self.key_dim)
        qk = l2_normalise(qk.permute(0, 3, 2, 1, 4), self.l2_floor).reshape(
            batch, self.key_heads, 2 * rows, self.key_dim
        )
        if self.repeat > 1:
            qk = qk.repeat_interleave(self.repeat, 1)
        v = mixed[..., 2 * self.keys_width :].view(batch, rows, self.value_heads, self.value_dim)
        return qk, v.transpose(1, 2)

    def _output(self, out_RHV: torch.Tensor, z_RHV: torch.Tensor) -> torch.Tensor:
        gated = self.norm(out_RHV).mul_(F.silu(z_RHV.to(out_RHV.dtype)))
        return F.linear(gated.reshape(-1, self.values_width).to(self.out.dtype), self.out)

    def verify(
        self, hidden_RH: torch.Tensor, layout: RowLayout, pool: StatePool
    ) -> tuple[torch.Tensor, GdnFactors]:
        """Outputs [R, H] and factors of every request's block; the pool is only read."""
        conv_in, z, gate, beta = self._project(hidden_RH)
        window = pool.conv_XSWC[self.index][layout.slot_index]
        conv = torch.cat([window, layout.pad(conv_in)], 1)
        qk, v = self._heads(self._convolve(conv))
        batch, heads, rows, _ = v.shape
        gate_BHT = layout.pad(gate).transpose(1, 2)
        flat = batch * heads
        state = pool.recurrent_XSHVK[self.index][layout.slot_index]
        out, update = verify_block(
            qk.view(flat, 2 * rows, self.key_dim),
            v.reshape(flat, rows, self.value_dim),
            gate_BHT.reshape(flat, rows),
            layout.pad(beta).transpose(1, 2).reshape(flat, rows),
            state.reshape(flat, self.value_dim, self.key_dim),
            _mask(rows, out_dtype=gate.dtype, device=gate.device),
            self.query_scale,
        )
        out = layout.unpad(out.view(batch, heads, rows, self.value_dim).transpose(1, 2))
        factors = GdnFactors(
            conv, qk[:, :, rows:], update.view(batch, heads, rows, self.value_dim), gate_BHT
        )
        return self._output(out, z), factors

    def advance(self, hidden_RH: torch.Tensor, layout: RowLayout, pool: StatePool) -> torch.Tensor:
        """Plain decoding or prefill: outputs [R, H], states advanced over all rows at once.

        Every request has one row, or there is a single request (prefill).
        """
        conv_in, z, gate, beta = self._project(hidden_RH)
        index = layout.slot_index
        window = pool.conv_XSWC[self.index]
        conv = torch.cat([window[index], layout.pad(conv_in)], 1)
        taps = conv.shape[1] - layout.widest
        window[index] = conv[:, -taps:]
        qk, v = self._heads(self._convolve(conv))
        batch, heads, rows, _ = v.shape
        flat = batch * heads
        states = pool.recurrent_XSHVK[self.index]
        state = states[index].reshape(flat, self.value_dim, self.key_dim)
        gate = layout.pad(gate).transpose(1, 2).reshape(flat, rows)
        beta = layout.pad(beta).transpose(1, 2).reshape(flat, rows)
        qk = qk.view(flat, 2 * rows, self.key_dim)
        v = v.reshape(flat, rows, self.value_dim)
        if rows == 1:
            state, out = self._one_row(state, qk, v, gate, beta)
        else:
            state, out = self._blocks(state, qk, v, gate, beta)
        states[index] = state.view(batch, heads, self.value_dim, self.key_dim)
        out = out.view(batch, heads, rows, self.value_dim).transpose(1, 2)
        return self._output(out.reshape(-1, heads, self.value_dim), z)

    def _one_row(
        self,
        state: torch.Tensor,
        qk: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = qk[:, 1:]
        state = state * gate.exp_().unsqueeze(-1)
        read = torch.bmm(key, state.transpose(1, 2))
        update = (v - read).mul_(beta.unsqueeze(-1))
        state = torch.baddbmm(state, update.transpose(1, 2), key)
        return state, torch.bmm(qk[:, :1], state.transpose(1, 2)).mul_(self.query_scale)

    def _blocks(
        self,
        state: torch.Tensor,
        qk: torch.Tensor,
        v: torch.Tensor,
        gate: torch.Tensor,
        beta: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, outputs = v.shape[1], []
        for start in range(0, total, PREFILL_BLOCK_ROWS):
            stop = min(start + PREFILL_BLOCK_ROWS, total)
            keys = qk[:, total + start : total + stop]
            out, update = verify_block(
                torch.cat([qk[:, start:stop], keys], 1),
                v[:, start:stop],
                gate[:, start:stop],
                beta[:, start:stop],
                state,
                _mask(stop - start, out_dtype=gate.dtype, device=gate.device),
                self.query_scale,
            )
            state = fold_factors(state, keys, update, gate[:, start:stop], stop - start)
            outputs.append(out)
        return state, torch.cat(outputs, 1)


def _mask(rows: int, *, out_dtype: torch.dtype, device: torch.device) -> BlockConstants:
    return _constants(rows, out_dtype, device)
