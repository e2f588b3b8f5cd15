"""What accepting one round's block leaves behind, for greedy decoding and for sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError

# The anchor and its 15 drafts; also the coins of one round and request.
BLOCK_SIZE = 16
NUM_DRAFTS = BLOCK_SIZE - 1
# In `emitted_BT` behind the last token, and the bonus of a request that emits nothing.
NO_TOKEN = -1

INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Outcome:
    """Verdicts of B requests.

    A request with verify length 0 (padding) emits nothing. Neither does one whose target values
    are unusable: it is marked in `valid_B`, and whoever runs the round has to stop it.

    Attributes:
        accepted_B: int32, drafts that stand, 0..L-1.
        bonus_B: int32 or int64, the target's own token behind them, else -1.
        emitted_BT: like `bonus_B`, [B, 16]: accepted drafts, then the bonus, then -1.
        commit_rows_B: int32, rows of the block whose state is kept: accepted + 1, or 0.
        valid_B: int32, 0 where the target's values were unusable, else 1.
    """

    accepted_B: torch.Tensor
    bonus_B: torch.Tensor
    emitted_BT: torch.Tensor
    commit_rows_B: torch.Tensor
    valid_B: torch.Tensor

    @classmethod
    def empty(
        cls, batch: int, device: torch.device | str, *, token_dtype: torch.dtype = torch.int64
    ) -> Outcome:
        """Uninitialised verdicts of `batch` requests."""
        counts = [torch.empty(batch, dtype=torch.int32, device=device) for _ in range(3)]
        return cls(
            counts[0],
            torch.empty(batch, dtype=token_dtype, device=device),
            torch.empty(batch, BLOCK_SIZE, dtype=token_dtype, device=device),
            counts[1],
            counts[2],
        )

    def check(self, batch: int) -> None:
        """Refuse what a kernel cannot write `batch` verdicts to.

        Raises:
            UsageError: a wrong shape, stride or dtype.
        """
        for name, values in vars(self).items():
            shape = (batch, BLOCK_SIZE) if name == "emitted_BT" else (batch,)
            wanted = INTEGERS if name in ("bonus_B", "emitted_BT") else (torch.int32,)
            require(name, values, shape, wanted)
            if not values.is_contiguous():
                raise UsageError(f"{name} is strided: pass a dense tensor")


@dataclass(frozen=True)
class Cursors:
    """Where each request stands; moved by the launch that accepts.

    Attributes:
        sequence_lengths_B: int32 or int64, += emitted tokens.
        anchors_B: int32 or int64, := bonus.
    """

    sequence_lengths_B: torch.Tensor
    anchors_B: torch.Tensor

    def check(self, batch: int) -> None:
        """Refuse what a kernel cannot move.

        Raises:
            UsageError: a wrong shape, stride or dtype.
        """
        for name, values in vars(self).items():
            require(name, values, (batch,), INTEGERS)
            if batch > 1 and values.stride(0) != 1:
                raise UsageError(f"{name} is strided: pass a dense tensor")


def require(
    name: str, values: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Refuse a tensor of another shape or dtype.

    Raises:
        UsageError: names both.
    """
    if values.shape != shape or values.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UsageError(
            f"{name} is {tuple(values.shape)} {values.dtype}: pass {wanted} {list(shape)}"
        )


def check_block(drafts_BD: torch.Tensor, lengths_B: torch.Tensor) -> int:
    """Batch size of a round's block.

    Raises:
        UsageError: drafts or lengths of a shape or dtype that no kernel takes.
    """
    batch = lengths_B.shape[0] if lengths_B.ndim == 1 else -1
    require("lengths_B", lengths_B, (batch,), (torch.int32,))
    require("drafts_BD", drafts_BD, (batch, NUM_DRAFTS), INTEGERS)
    for name, values in {"lengths_B": lengths_B, "drafts_BD": drafts_BD}.items():
        if values.stride(-1) != 1:
            raise UsageError(f"{name} has last stride {values.stride(-1)}: make it 1")
    return batch


def outcome_types(token: str) -> Mapping[str, str]:
    """Pointer types of an outcome and its cursors, in the order in which kernels take them."""
    return {
        "p_accepted": "*i32",
        "p_bonus": token,
        "p_emitted": token,
        "p_commit_rows": "*i32",
        "p_valid": "*i32",
        "p_sequence_lengths": "*i32",
        "p_anchors": token,
    }
