"""Rotary positions of a text-only block in three axes, written while the drafter waits.

SGLang 0.5.16 makes them between the drafter and the target, in three launches that both wait for:
zeros, a sum with them, three copies. Of text alone they are the positions three times, which are
known before the drafter runs.
"""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from typing import Any

import torch


class RotaryPositions:
    """Positions of one target.

    Args:
        runner: of the target.
        buffer_3T: of its graph.
    """

    def __init__(self, runner: Any, buffer_3T: torch.Tensor) -> None:
        self._runner = runner
        self._buffer_3T = buffer_3T
        self._tokens = self._address = 0

    @classmethod
    def of(cls, runner: Any) -> RotaryPositions | None:
        """For a target with graphs and positions in three axes, else None."""
        graphs = runner.decode_cuda_graph_runner
        if graphs is None or not runner.model_config.model_is_mrope:
            return None
        buffer_3T = graphs.buffers.mrope_positions
        return None if buffer_3T is None else cls(runner, buffer_3T)

    def install(self) -> None:
        """Replace the method of SGLang's class of batches, which makes one for every pass."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        stock = ForwardBatch.compute_spec_mrope_positions

        @functools.wraps(stock)
        def compute(
            forward_batch: Any, model_runner: Any, batch: Any, seq_positions: Any = None
        ) -> None:
            if (
                seq_positions is None
                and model_runner is self._runner
                and self._written(batch.spec_info.positions)
                and all(one is None for one in batch.multimodal_inputs)
            ):
                forward_batch.mrope_positions = self._buffer_3T[:, : self._tokens]
            else:
                stock(forward_batch, model_runner, batch, seq_positions)
            self._tokens = 0

        ForwardBatch.compute_spec_mrope_positions = compute

    def write(self, positions_T: torch.Tensor) -> None:
        """Positions of the block that the target will verify next, before the drafter runs."""
        tokens = positions_T.shape[0]
        self._tokens = 0
        if positions_T.dtype == torch.int64 and tokens <= self._buffer_3T.shape[1]:
            self._buffer_3T[:, :tokens].copy_(positions_T.expand(3, tokens))
            self._tokens = tokens
            self._address = positions_T.data_ptr()

    def _written(self, positions_T: torch.Tensor) -> bool:
        """Whether these positions, by their place in memory, were the last that were written."""
        return (
            self._tokens > 0
            and positions_T.numel() == self._tokens
            and positions_T.data_ptr() == self._address
        )
