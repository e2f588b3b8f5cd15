"""What the policy reads of one row of draft logits, and the parts that are merged into it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.errors import UsageError

# One part of a row: everything that is needed to merge it with the other parts, all fp32.
#   max         largest logit
#   second      second largest (equal to `max` where that occurs twice)
#   token       its id; the lowest one on ties
#   sum_exp     sum of exp(x - max)
#   sum_x_exp   sum of (x - max) exp(x - max)
PART_FIELDS = ("max", "second", "token", "sum_exp", "sum_x_exp")
NUM_FIELDS = len(PART_FIELDS)
# Token ids travel as fp32, which holds every integer up to here.
MAX_VOCAB = 1 << 24


def next_power_of_2(number: int) -> int:
    """Smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True)
class DraftFeatures:
    """Features of R rows of draft logits (R = batch x 15).

    A row with a NaN or +inf logit, or with nothing but -inf, has NaN in every feature, so that the
    policy falls back; its token is an id of the vocabulary all the same.

    Attributes:
        tokens_R: int32 or int64, most probable token; the lowest id on ties.
        p1_R, p2_R: fp32, probability of it and of the runner-up.
        entropy_R: fp32, nats, over the whole vocabulary.
    """

    tokens_R: torch.Tensor
    p1_R: torch.Tensor
    p2_R: torch.Tensor
    entropy_R: torch.Tensor

    @classmethod
    def empty(
        cls, rows: int, device: torch.device | str, *, token_dtype: torch.dtype = torch.int64
    ) -> DraftFeatures:
        """Uninitialised features of `rows` rows."""
        tokens_R = torch.empty(rows, dtype=token_dtype, device=device)
        return cls(tokens_R, *(torch.empty(rows, device=device) for _ in range(3)))

    def check(self, rows: int) -> None:
        """Refuse what a kernel cannot write `rows` rows to.

        Raises:
            UsageError: a wrong shape, stride or dtype.
        """
        for name in ("tokens_R", "p1_R", "p2_R", "entropy_R"):
            values = getattr(self, name)
            integers = (torch.int32, torch.int64)
            wanted = integers if name == "tokens_R" else (torch.float32,)
            dense = values.shape == (rows,) and values.is_contiguous()
            if not dense or values.dtype not in wanted:
                raise UsageError(
                    f"{name} is {tuple(values.shape)} {values.dtype}: "
                    f"pass a dense [{rows}] of {' or '.join(str(dtype) for dtype in wanted)}"
                )
