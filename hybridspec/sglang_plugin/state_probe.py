"""Debugging aid: what recurrent states and conv windows are before every round, in a few numbers.

On where `HYBRIDSPEC_STATE_DIGEST` names a file, else `watch` does nothing. Requests whose id begins
with `fuzz-` get a line each in every round: id, tokens in the caches, and for every layer the norm
of its state and 16 sums of a sixteenth of it with fixed random signs. The squared difference of two
such sums is in expectation the squared distance of what they were taken of, so states can be
compared without being kept. A request whose id begins with `fuzz-varied-` gets another forced
length in every round, drawn from its id and its place in the text.

Every round then waits for the device. That is for looking, not for serving.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hybridspec import environ
from hybridspec.sglang_plugin.round_state import BLOCK_SIZE, RoundState

WATCHED, VARIED = "fuzz-", "fuzz-varied-"
CHUNKS = 16
_SEED = 20


def varied_length(name: str, context_tokens: int) -> int:
    """Forced length 1..16 of a request's round, the same whenever it is asked for."""
    return 1 + zlib.crc32(f"{name}/{context_tokens}".encode()) % BLOCK_SIZE


@cache
def _signs(size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    return (torch.randint(0, 2, (size,), generator=generator) * 2 - 1).float().to(device)


def digest(states_XN: torch.Tensor) -> dict[str, list[Any]]:
    """Norm and signed sums of each layer.

    Args:
        states_XN: one request's values of every layer, any floating dtype.

    Returns:
        `norm` [X] and `sums` [X][16].
    """
    wide = states_XN.float()
    pad = -wide.shape[1] % CHUNKS
    signed = torch.nn.functional.pad(wide * _signs(wide.shape[1], wide.device), (0, pad))
    sums = signed.view(len(wide), CHUNKS, -1).sum(-1)
    return {"norm": _short(wide.norm(dim=1).tolist()), "sums": [_short(s) for s in sums.tolist()]}


def _short(values: Sequence[float]) -> list[float]:
    # The digits that single precision has.
    return [float(f"{value:.8g}") for value in values]


class StateProbe:
    """Writes the lines and varies the lengths.

    Args:
        path: is added to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @torch.inference_mode()
    def before_round(
        self,
        names: Sequence[str],
        context_B: torch.Tensor,
        slots_B: torch.Tensor,
        recurrent_XSN: torch.Tensor,
        windows: Sequence[torch.Tensor],
        state: RoundState,
    ) -> None:
        """Look before a round runs. Waits for the device.

        Args:
            names: ids of the batch's requests. context_B: tokens of each in the caches.
            slots_B: of each in the pools. recurrent_XSN: [layers, slots, ...].
            windows: pools of conv windows, each [layers, slots, ...].
            state: whose forced lengths are changed, within the caps.
        """
        watched = [i for i, name in enumerate(names) if name.startswith(WATCHED)]
        if not watched:
            return
        contexts, slots = context_B.tolist(), slots_B.tolist()
        lines = []
        for i in watched:
            parts = {"recurrent_state": digest(recurrent_XSN[:, slots[i]].flatten(1))}
            for number, pool in enumerate(windows):
                parts[f"conv_window_{number}"] = digest(pool[:, slots[i]].flatten(1))
            lines.append(json.dumps({"name": names[i], "context_tokens": contexts[i], **parts}))
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
        for i in watched:
            if names[i].startswith(VARIED):
                length = varied_length(names[i], contexts[i])
                state.forced_B[i] = torch.clamp(state.caps_B[i], max=length)


@cache
def _probe(path: Path) -> StateProbe:
    return StateProbe(path)


def watch(worker: Any, batch: Any, variables: Mapping[str, str] = os.environ) -> None:
    """Look at a batch of SGLang's that is about to decode, behind `Rounds.begin`.

    Args:
        worker: of the plugin. batch: of the scheduler, with `reqs`, `seq_lens` and
            `req_pool_indices`.
    """
    path = environ.state_digest(variables)
    if path is None:
        return
    pool = worker.model_runner.req_to_token_pool
    slots_B = pool.translate_mamba_indices(pool.get_mamba_indices(batch.req_pool_indices))
    cache_ = pool.mamba_pool.mamba_cache
    _probe(path).before_round(
        [req.rid for req in batch.reqs],
        batch.seq_lens,
        slots_B,
        cache_.temporal,
        cache_.conv,
        worker.rounds.state,
    )
