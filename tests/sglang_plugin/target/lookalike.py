"""Tensors and objects as SGLang 0.5.16 hands them to its GDN backend, without SGLang.

Strides are SGLang's: states [layers, slots + 1, HV, V, K], windows [layers, slots + 1, C, 3], rows
of all requests behind one another.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hybridspec.kernels.conv_window import naive as conv_naive
from hybridspec.kernels.gdn.naive import naive_states
from hybridspec.sglang_plugin.round_state import RoundState
from hybridspec.sglang_plugin.target.buffers import BlockShape, VerifyBuffers
from hybridspec.sglang_plugin.target.gdn import GdnVerification, StateCommit

ROWS = 16


class Mode:
    """A forward mode."""

    def __init__(self, verifies: bool) -> None:
        self.verifies = verifies

    def is_target_verify(self) -> bool:
        return self.verifies


def forward_batch(*, verifies: bool = True, rows: int = ROWS) -> Any:
    return SimpleNamespace(
        forward_mode=Mode(verifies), spec_info=SimpleNamespace(draft_token_num=rows)
    )


class Engine:
    """Pools, layers and a backend, with the target half on them."""

    def __init__(
        self,
        device: torch.device,
        *,
        layer_ids: tuple[int, ...] = (0, 2),
        key_heads: int = 1,
        value_heads: int = 1,
        dim: int = 64,
        slots: int = 4,
        requests: int = 2,
        last_router_layer: int = -1,
        seed: int = 0,
        sequential: bool = False,
    ) -> None:
        self.device, self.requests = device, requests
        self.generator = torch.Generator(device).manual_seed(seed)
        channels = (2 * key_heads + value_heads) * dim
        shape = BlockShape(layer_ids, key_heads, value_heads, dim, dim, channels)
        self.buffers = VerifyBuffers.allocate(shape, requests + 1, device=device)
        for tensor in (self.buffers.raw_XRTC, *vars(self.buffers.factors).values()):
            tensor.fill_(float("nan"))
        count = len(layer_ids)
        self.state_XSHVK = self.random(count, slots + 1, value_heads, dim, dim) * 0.1
        self.windows_XSCW = self.random(count, slots + 1, channels, 3).to(torch.bfloat16)
        self.layers = [self.layer(shape, layer_id) for layer_id in layer_ids]
        self.calls: list[dict[str, Any]] = []

        def layer_cache(layer_id: int) -> Any:
            index = layer_ids.index(layer_id)
            return SimpleNamespace(
                conv=[self.windows_XSCW[index]], temporal=self.state_XSHVK[index]
            )

        pool = SimpleNamespace(
            mamba_cache=SimpleNamespace(conv=[self.windows_XSCW], temporal=self.state_XSHVK)
        )
        self.backend = SimpleNamespace(
            forward_metadata=SimpleNamespace(retrieve_parent_token=None, mamba_cache_indices=None),
            req_to_token_pool=SimpleNamespace(mamba2_layer_cache=layer_cache, mamba_pool=pool),
            forward_extend=lambda **kwargs: self.calls.append(kwargs),
        )
        self.round = RoundState(requests, device)
        self.verification = GdnVerification(
            self.backend,
            self.buffers,
            self.round,
            last_router_layer=last_router_layer,
            dependent_launch=False,
            sequential=sequential,
        )
        self.verification.install()
        self.commit = StateCommit(self.backend, self.buffers)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def layer(self, shape: BlockShape, layer_id: int) -> Any:
        return SimpleNamespace(
            layer_id=layer_id,
            num_k_heads=shape.key_heads,
            num_v_heads=shape.value_heads,
            head_v_dim=shape.value_dim,
            conv_weights=(self.random(shape.channels, 4) * 0.5).to(torch.bfloat16),
            bias=None,
            A_log=torch.rand(shape.value_heads, generator=self.generator, device=self.device) - 2,
            dt_bias=self.random(shape.value_heads).to(torch.bfloat16),
        )

    def rows(self) -> list[dict[str, torch.Tensor]]:
        """Inputs of every layer for a full batch, each request's rows behind the last one's."""
        tokens, heads = self.requests * ROWS, self.layers[0].num_v_heads
        return [
            {
                "mixed_qkv": self.random(tokens, self.windows_XSCW.shape[2]).to(torch.bfloat16),
                "a": self.random(tokens, heads).to(torch.bfloat16),
                "b": self.random(tokens, heads).to(torch.bfloat16),
            }
            for _ in self.layers
        ]

    def set_round(
        self, slots: list[int], lengths: list[int], seen: list[int] | None = None
    ) -> None:
        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        self.backend.forward_metadata.mamba_cache_indices = column(slots)
        self.round.lengths_B.copy_(column(lengths))
        self.round.router_rows_B.copy_(column(seen or lengths))

    def verify(self, rows: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Outputs [requests, 16, HV, V] of every layer, through the patched backend."""
        found = [
            self.backend.forward_extend(
                layer=layer, forward_batch=forward_batch(), q=None, k=None, v=None, **inputs
            )
            for layer, inputs in zip(self.layers, rows, strict=True)
        ]
        return [out.view(self.requests, ROWS, *out.shape[2:]) for out in found]


class Decoding:
    """The same layers row by row, states in float64: what a chain of rounds must be."""

    def __init__(self, engine: Engine) -> None:
        self.layers = engine.layers
        self.state_XSHVK = engine.state_XSHVK.double()
        self.windows_XSCW = engine.windows_XSCW.clone()

    def step(
        self,
        index: int,
        slot: int,
        inputs: dict[str, torch.Tensor],
        first: int,
        count: int,
        *,
        keep: bool,
    ) -> torch.Tensor:
        """Outputs of `count` rows [count, HV, V] of one layer and request; moved on by `keep`."""
        layer = self.layers[index]
        rows = {name: tensor[first : first + count] for name, tensor in inputs.items()}
        window_CW = self.windows_XSCW[index, slot]
        mixed = []
        for row_C in rows["mixed_qkv"]:
            mixed.append(conv_naive.conv_row(window_CW, row_C, layer.conv_weights, None))
            window_CW = conv_naive.next_window(window_CW, row_C[None])
        outputs, states = naive_states(
            torch.stack(mixed),
            rows["a"],
            rows["b"],
            layer.A_log,
            layer.dt_bias,
            self.state_XSHVK[index, slot],
            key_heads=layer.num_k_heads,
        )
        if keep:
            self.state_XSHVK[index, slot] = states[-1]
            self.windows_XSCW[index, slot] = window_CW
        return outputs
