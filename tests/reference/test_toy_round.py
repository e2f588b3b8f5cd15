"""The toy round that controls are tested with does what its check says, in the interpreter too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from toy_round_kit import MAX_ROWS, ToyRound


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_past_the_length_stay_untouched(rows: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    toy = ToyRound(device, batch=2)
    lengths = (3, 4)
    toy.plan([lengths])
    toy.prefix()
    toy.rest(rows)
    toy.check(lengths)
    assert toy.log_N[:2].tolist() == [rows, -1]
    with pytest.raises(AssertionError, match="was written"):
        toy.check((2, 4))
    with pytest.raises(AssertionError):
        toy.check((4, 4))
    assert toy.max_rows == MAX_ROWS
