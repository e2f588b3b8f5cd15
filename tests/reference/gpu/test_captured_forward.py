"""The captured engine against the eager one: logits, drafts, greedy text and state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from captured_kit import (
    DEVICE,
    PROMPT,
    SHAPE,
    Pair,
    ScriptedRound,
    drafts_with_error,
    make_pair,
    plain_text,
)

from hybridspec.acceptance import Coins
from hybridspec.errors import PromptError, UsageError
from hybridspec.reference.gpu.decode import Decoder
from hybridspec.reference.gpu.round import RoundRules
from hybridspec.reference.gpu.target import TargetPass
from hybridspec.request import LengthRule, SamplingParams

TOKENS = 44
# Of the bf16 passes: the interpreter takes its time.
ROWS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def text(pair: Pair) -> list[int]:
    return plain_text(pair.eager(), PROMPT, TOKENS)


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        ours.float().cpu(), theirs.float().cpu(), atol=tolerance, rtol=tolerance
    )


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@torch.inference_mode()
def test_rounds_of_any_length_equal_plain_decoding(pair: Pair, text: list[int]) -> None:
    engine, eager = pair.captured(torch.float32), pair.eager()
    assert engine.prefill([PROMPT]) == text[:1]
    rounds = ScriptedRound(engine)
    emitted = text[:1]
    # (drafts that are right, rows verified): rejected in the middle, cut by the length, none right.
    for right, length in ((5, 16), (15, 4), (0, 2)):
        drafts = drafts_with_error(text, len(emitted), right, SHAPE.vocab_size)
        new = rounds.verify([drafts], [length])[0]
        assert len(new) == min(right, length - 1) + 1
        emitted += new
    assert emitted == text[: len(emitted)]

    # The eager engine reaches the same state by a prefill of the same tokens.
    request = eager.add([*PROMPT, *emitted[:-1]], length_rule=LengthRule("fixed", 16))
    assert int(engine.target.starts_B[0]) == request.context_tokens
    states = eager.pool.recurrent_SXHVK[request.slot]
    close(engine.target.gdn.state_XSHVK[:, 0], states)
    windows = eager.pool.conv_SXWC[request.slot].transpose(1, 2)
    close(engine.target.gdn.windows_XSCW[:, 0], windows)
    count = request.context_tokens
    close(engine.target.keys_XBCGD[:, 0, :count].transpose(1, 2), request.cache.keys[:, :, :count])

    # And drafts from it as the eager engine does, then verifies to the same probabilities.
    record = eager.step([request], record=True)[0].record
    assert record is not None
    fixed = engine.round(RoundRules("fixed"))
    engine.buffers.fixed_B.fill_(16)
    fixed.run()
    assert engine.target.drafts_BD[0].tolist() == record.draft_tokens
    close(engine.buffers.signals.p1_R, torch.tensor(record.p1))
    close(engine.buffers.signals.entropy_R, torch.tensor(record.entropy_nats))
    close(engine.buffers.report.p1_R, torch.tensor(record.target_p1))


@torch.inference_mode()
def test_plain_rounds_decode_the_same_text(pair: Pair, text: list[int]) -> None:
    engine = pair.captured(torch.float32)
    emitted = engine.prefill([PROMPT])
    plain = engine.round(RoundRules("plain", keep_context=True))
    for _ in range(4):
        plain.run()
        emitted += engine.buffers.report.emitted_BT[0, :1].tolist()
    assert emitted == text[:5]
    # A drafted round may follow: states, windows and the drafter's context are where they belong.
    rounds = ScriptedRound(engine)
    drafts = drafts_with_error(text, 5, 6, SHAPE.vocab_size)
    assert rounds.verify([drafts], [12])[0] == text[5:12]


@torch.inference_mode()
def test_requests_of_a_batch_are_independent(pair: Pair, text: list[int]) -> None:
    other = [9, 3, 250, 77]
    second = plain_text(pair.eager(), other, 12)
    engine = pair.captured(torch.float32, batch=2)
    assert engine.prefill([PROMPT, other]) == [text[0], second[0]]
    rounds = ScriptedRound(engine)
    drafts = [
        drafts_with_error(text, 1, 4, SHAPE.vocab_size),
        drafts_with_error([*second, *range(8)], 1, 2, SHAPE.vocab_size),
    ]
    assert rounds.verify(drafts, [3, 16]) == [text[1:4], second[1:4]]
    # A request without a limit takes no part, and nothing of it moves.
    engine.buffers.limits_B[0] = 0
    before = engine.target.gdn.state_XSHVK[:, 0].clone()
    drafts[1] = drafts_with_error([*second, *range(12)], 4, 1, SHAPE.vocab_size)
    assert rounds.verify(drafts, [16, 16]) == [[], second[4:6]]
    assert torch.equal(engine.target.gdn.state_XSHVK[:, 0], before)
    assert engine.target.starts_B.tolist() == [len(PROMPT) + 3, len(other) + 5]


@torch.inference_mode()
def test_kernels_in_bf16_keep_rows_bitwise(pair: Pair) -> None:
    """Rows below the length have the same bits whatever the length, before and behind a commit."""
    exact, kernels = (pair.captured(dtype).target for dtype in (torch.float32, torch.bfloat16))
    lengths = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def logits(
        target: TargetPass, length: int, *, rows: int = ROWS, decode: bool = False
    ) -> torch.Tensor:
        lengths.fill_(length)
        target.embed(rows)
        target.mix(0, rows, lengths, decode=decode)
        target.router(0, rows, lengths)
        target.rest_of_layers(rows, lengths, decode=decode)
        return target.head(rows)[:length].float().clone()

    for target in (exact, kernels):
        target.anchors_B.fill_(7)
        target.drafts_BD.copy_(torch.tensor([PROMPT + PROMPT[:6]]))
    near = logits(exact, ROWS)
    assert float(near.abs().max()) > 3.0
    long = logits(kernels, ROWS)
    assert relative(long, near) < 0.05
    assert torch.equal(logits(kernels, 2), long[:2])
    for target in (exact, kernels):
        target.gdn.commit(lengths)
        target.starts_B += lengths
    assert relative(kernels.gdn.state_XSHVK, exact.gdn.state_XSHVK) < 0.05
    # Plain decoding goes on from there, and leaves states that the next block starts from.
    for target in (exact, kernels):
        logits(target, 1, rows=1, decode=True)
        target.gdn.commit_decoded(lengths)
        target.starts_B += lengths
    assert relative(kernels.gdn.state_XSHVK, exact.gdn.state_XSHVK) < 0.05
    assert relative(logits(kernels, 2, rows=2), logits(exact, 2, rows=2)) < 0.05
    assert bool(torch.isfinite(kernels.logits_RV.float()).all())


def test_refusals(pair: Pair) -> None:
    engine = pair.captured(torch.float32)
    with pytest.raises(PromptError, match="no tokens"):
        engine.prefill([[]])
    with pytest.raises(PromptError, match="outside the vocabulary"):
        engine.prefill([[SHAPE.vocab_size]])
    with pytest.raises(UsageError, match="1 slots"):
        engine.prefill([PROMPT, PROMPT])
    with pytest.raises(UsageError, match="tables belong"):
        RoundRules("policy")
    with pytest.raises(UsageError, match="body of 17 rows"):
        engine.round(RoundRules("fixed")).rest(17)


def test_weights_of_another_model_are_refused(pair: Pair, tmp_path: Path) -> None:
    from hybridspec.errors import ModelError
    from hybridspec.reference.config import load_target_config
    from hybridspec.reference.gpu.weights import folder_tensors, load_target

    config, device = load_target_config(pair.target), torch.device("cpu")
    names = [n for n, _ in folder_tensors(pair.target, device)]
    left_out = next(name for name in names if name.endswith("A_log"))
    stream = ((n, t) for n, t in folder_tensors(pair.target, device) if n != left_out)
    with pytest.raises(ModelError, match="lacks 1 tensors"):
        load_target(config, stream, dtype=torch.float32, device=device)


@torch.inference_mode()
def test_decoder_reads_one_round_late_and_drops_the_rest(pair: Pair, text: list[int]) -> None:
    engine = pair.captured(torch.float32)
    first = engine.prefill([PROMPT])
    saved = engine.snapshot()
    plain = engine.round(RoundRules("plain"))
    decoder = Decoder(engine)
    found = decoder.decode(plain.run, first, max_new_tokens=5, rows=1)[0]
    assert found.tokens == text[:5]
    assert [line.length for line in found.lines] == [1, 1, 1, 1]
    assert all(line.us > 0.0 and line.margins[0] > 0.0 for line in found.lines)
    # Four rounds were needed; a fifth ran before the fourth was read.
    assert decoder.rounds_launched == 5
    # An end-of-sequence token ends the text, also in the middle of what a round emits.
    engine.restore(saved)
    rounds = ScriptedRound(engine)
    rounds.script_BD.copy_(torch.tensor(text[1:16]))
    engine.buffers.fixed_B.fill_(16)
    stopping = Decoder(engine, stop_tokens=frozenset((text[3],)))
    assert text.index(text[3]) == 3
    found = stopping.decode(rounds.run, first, max_new_tokens=40)[0]
    assert found.tokens == text[:4]
    assert found.lines[0].accepted >= 2


@torch.inference_mode()
def test_sampled_rounds_draw_what_the_eager_engine_draws(pair: Pair) -> None:
    """The same coins give the same tokens; a fixed number of coins a round, whatever happens."""
    engine, eager = pair.captured(torch.float32), pair.eager()
    sampling = SamplingParams(temperature=0.7, seed=11)
    request = eager.add(PROMPT, sampling=sampling, length_rule=LengthRule("none"))
    first = request.tokens[-1]
    for _ in range(3):
        eager.step([request])
    engine.prefill([PROMPT])
    engine.target.anchors_B.fill_(first)
    engine.sampling_buffers().inverse_temperature_B11.fill_(1 / sampling.temperature)
    coins = Coins(sampling.seed)
    coins.next_round()  # of the first token
    plain = engine.round(RoundRules("plain", sampled=True))
    found = Decoder(engine).decode(plain.run, [first], max_new_tokens=4, coins=[coins], rows=1)[0]
    assert found.tokens == request.tokens[len(PROMPT) :]
