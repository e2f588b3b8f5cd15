"""Batched continuation of equally long prompts by the target, with a CUDA graph on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hybridspec.demo.gated_delta import DeltaState
from hybridspec.demo.presets import PairPreset
from hybridspec.demo.target_module import AttentionState, LayerState, Target


def mixed_precision(device: torch.device) -> torch.autocast:
    """Returns bf16 autocast on a GPU, a context that does nothing on a CPU."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class Continuation:
    """Fixed buffers for decoding one batch at a time, one token a step.

    Every row has its own noise scale: 0 takes the most likely token, T samples at temperature T
    (argmax of logits + T * Gumbel noise).
    """

    def __init__(self, target: Target, *, batch: int, capacity: int) -> None:
        self.target = target
        self.device = target.embed_tokens.weight.device
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.capacity = capacity
        preset = target.preset
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.forced = torch.zeros(batch, dtype=torch.bool, device=self.device)
        self.noise = torch.ones(batch, preset.vocab, device=self.device)
        self.scale = torch.zeros(batch, 1, device=self.device)
        self.position = torch.zeros((), dtype=torch.int64, device=self.device)
        self.states = [self._empty_state(preset, i, batch) for i in range(preset.layers)]
        self.graph: torch.cuda.CUDAGraph | None = None
        if self.device.type == "cuda":
            self._capture()

    def _empty_state(self, preset: PairPreset, layer: int, batch: int) -> LayerState:
        device = self.device
        if preset.is_full_attention(layer):
            shape = (batch, preset.kv_heads, self.capacity, preset.head_dim)
            keys, values = (torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(2))
            return AttentionState(keys, values, self.position)
        keys_dim = preset.gdn_key_heads * preset.gdn_key_dim
        channels = 2 * keys_dim + preset.gdn_value_heads * preset.gdn_value_dim
        return DeltaState(
            conv=torch.zeros(batch, 3, channels, dtype=self.dtype, device=device),
            recurrent=torch.zeros(
                batch, preset.gdn_value_heads, preset.gdn_key_dim, preset.gdn_value_dim,
                device=device,
            ),
        )  # fmt: skip

    def _choose(self, hidden: Tensor) -> None:
        """Writes the next tokens from hidden states [batch, hidden]."""
        logits = self.target.logits(hidden)
        best = logits.argmax(-1)
        gumbel = -self.noise.clamp_min(1e-20).log()  # The noise is exponential.
        self.tokens.copy_((logits + self.scale * gumbel).argmax(-1))
        self.forced.copy_(self.tokens != best)

    def _step(self) -> None:
        with mixed_precision(self.device):
            out = self.target(
                self.tokens.unsqueeze(1), states=self.states, position=self.position, keep=True
            )
        for state, new in zip(self.states, out.states, strict=True):
            if isinstance(state, DeltaState) and isinstance(new, DeltaState):
                state.conv.copy_(new.conv)
                state.recurrent.copy_(new.recurrent)
        self._choose(out.hidden[:, 0])
        self.position.add_(1)

    @torch.no_grad()
    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        self.position.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except RuntimeError as error:
            print(f"decode step is not captured, running it eagerly: {error}", flush=True)
        else:
            self.graph = graph

    @torch.no_grad()
    def _prefill(self, prompts: Tensor, generator: torch.Generator) -> None:
        with mixed_precision(self.device):
            out = self.target(prompts, keep=True)
        length = prompts.shape[1]
        for state, new in zip(self.states, out.states, strict=True):
            if isinstance(state, AttentionState) and isinstance(new, AttentionState):
                state.keys[:, :, :length].copy_(new.keys)
                state.values[:, :, :length].copy_(new.values)
            elif isinstance(state, DeltaState) and isinstance(new, DeltaState):
                state.conv.copy_(new.conv)
                state.recurrent.copy_(new.recurrent)
        self.position.fill_(length)
        self.noise.exponential_(generator=generator)
        self._choose(out.hidden[:, -1])

    @torch.no_grad()
    def run(
        self, prompts: Tensor, scales: Iterator[Tensor], *, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Continues prompts up to the capacity.

        Args:
            prompts: int64 [batch, prompt tokens].
            scales: noise scale of every row for each new token, fp32 [batch].
            generator: source of the noise, on the device.

        Returns:
            Tokens int64 [batch, capacity] and, of the same shape, where the token was drawn and is
            not the most likely one (false inside prompts).
        """
        tokens = [prompts]
        forced = [torch.zeros_like(prompts, dtype=torch.bool)]
        self.scale.copy_(next(scales).unsqueeze(1))
        self._prefill(prompts, generator)
        for produced in range(prompts.shape[1] + 1, self.capacity + 1):
            tokens.append(self.tokens.unsqueeze(1).clone())
            forced.append(self.forced.unsqueeze(1).clone())
            if produced == self.capacity:
                break
            self.scale.copy_(next(scales).unsqueeze(1))
            self.noise.exponential_(generator=generator)
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
        return torch.cat(tokens, dim=1), torch.cat(forced, dim=1)
