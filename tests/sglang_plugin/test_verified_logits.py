"""Logits that answer one argmax from our kernel, and are plain tensors otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from hybridspec.compat.sglang_0_5_16_logits import GreedyChoice, VerifiedLogits
from hybridspec.sglang_plugin.round_state import RoundState

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 70


def offered(lengths: list[int], dtype: torch.dtype = torch.float32, taken: bool = True):
    state = RoundState(4, DEVICE)
    state.lengths_B[: len(lengths)] = torch.tensor(lengths, dtype=torch.int32)
    choice = GreedyChoice(state)
    choice.compile(VOCAB)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(16 * len(lengths), VOCAB, generator=generator).to(dtype).to(DEVICE)
    output = SimpleNamespace(next_token_logits=logits)
    candidates = torch.arange(16 * len(lengths), device=DEVICE).view(-1, 16)
    assert choice.offer(output, candidates) == taken
    output.candidates = candidates
    return choice, output, logits


def test_argmax_comes_from_the_kernel_below_the_length() -> None:
    _, output, logits = offered([5, 16])
    assert isinstance(output.next_token_logits, VerifiedLogits)
    found = torch.argmax(output.next_token_logits, dim=-1)
    expected = logits.argmax(-1)
    # Rows that nobody verified are what tells the kernel from torch.
    expected[5:16] = 0
    assert type(found) is torch.Tensor
    assert found.view(2, 16).is_contiguous()
    assert output.candidates.tolist() == [[*range(5), *[-1] * 11], list(range(16, 32))]
    assert found.tolist() == expected.tolist()


def test_changes_in_place_are_seen() -> None:
    _, output, logits = offered([16])
    output.next_token_logits[:, 33] = 99.0
    output.next_token_logits.reshape(1, 16, -1)[0, 2, 7] = 100.0
    output.next_token_logits.add_(1.0)
    assert torch.argmax(output.next_token_logits, dim=-1).tolist() == [33, 33, 7, *[33] * 13]
    assert logits[0, 33] == 100.0


def test_everything_else_is_a_plain_tensor() -> None:
    _, output, logits = offered([3])
    held = output.next_token_logits
    for found, expected in (
        (torch.argmax(held), torch.argmax(logits)),
        (torch.argmax(held, dim=0), torch.argmax(logits, dim=0)),
        (torch.argmax(held, dim=-1, keepdim=True), torch.argmax(logits, dim=-1, keepdim=True)),
        (held.argmax(-1), logits.argmax(-1)),
        (torch.softmax(held, -1), torch.softmax(logits, -1)),
        (held[2], logits[2]),
        (held.float(), logits.float()),
    ):
        assert torch.equal(found, expected)
        assert found is held or type(found) is torch.Tensor
    assert held.shape == logits.shape
    assert held.data_ptr() == logits.data_ptr()


def test_offer_ends_with_the_round() -> None:
    choice, output, logits = offered([3])
    choice.taken(output)
    assert type(output.next_token_logits) is torch.Tensor
    assert output.next_token_logits.data_ptr() == logits.data_ptr()
    choice.taken(None)


@pytest.mark.parametrize("rows", [16, 40])
def test_other_rows_stay_plain(rows: int) -> None:
    choice = GreedyChoice(RoundState(4, DEVICE))
    output = SimpleNamespace(next_token_logits=torch.zeros(rows, VOCAB, device=DEVICE))
    assert not choice.offer(output, torch.zeros(2, 16, dtype=torch.int64, device=DEVICE))
    assert type(output.next_token_logits) is torch.Tensor


def test_logits_of_another_dtype_stay_plain() -> None:
    _, output, logits = offered([4], torch.float64, taken=False)
    assert output.next_token_logits is logits
    assert output.candidates.min() == 0
