from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import Round
from hybridspec.server.output import OutputAssembler, RequestStats

EOS = 0


def chunks(ids: list[int], size: int) -> list[list[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def test_length_cuts_inside_a_round(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four five six")
    output = OutputAssembler(tokenizer, max_tokens=3)
    assert output.push(ids) == tokenizer.decode(ids[:3])
    assert output.finish_reason == "length"
    assert output.token_ids == ids[:3]
    assert output.push(ids) == ""


def test_end_token_counts_but_has_no_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("done")
    output = OutputAssembler(tokenizer, max_tokens=50, stop_token_ids=[EOS])
    output.push([*ids, EOS, *ids])
    assert (output.text, output.finish_reason) == ("done", "stop")
    assert output.token_ids == [*ids, EOS]


def test_stop_string_across_tokens_and_rounds(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("alpha beta gamma delta")
    for size in (1, 2, 3, 16):
        output = OutputAssembler(tokenizer, max_tokens=50, stops=["ta gam", "zzz"])
        sent = [output.push(part) for part in chunks(ids, size)]
        assert "".join(sent) == output.text == "alpha be"
        assert output.finish_reason == "stop"
        # Counted up to the token that completes the stop string, whatever the rounds were.
        assert "ta gam" in tokenizer.decode(output.token_ids)
        assert "ta gam" not in tokenizer.decode(output.token_ids[:-1])


def test_held_back_text_is_delivered_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("count to ten")
    output = OutputAssembler(tokenizer, max_tokens=len(ids), stops=["tension"])
    sent = [output.push([index]) for index in ids]
    assert "".join(sent) == "count to ten"
    assert output.finish_reason == "length"


def test_context_end_flushes_half_a_character(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("😀")[:-1]
    output = OutputAssembler(tokenizer, max_tokens=50)
    assert output.push(half) == ""
    assert output.close("length") == "\ufffd"
    assert output.close("length") == ""
    assert (output.text, output.finish_reason) == ("\ufffd", "length")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ids=st.lists(st.integers(0, 2047), max_size=30),
    limit=st.integers(1, 40),
    size=st.integers(1, 16),
)
def test_streamed_text_is_the_decoded_output(
    tokenizer: Tokenizer, ids: list[int], limit: int, size: int
) -> None:
    output = OutputAssembler(tokenizer, max_tokens=limit, stop_token_ids=[EOS])
    sent = [output.push(part) for part in chunks(ids, size)]
    sent.append(output.close("length"))
    assert "".join(sent) == output.text == tokenizer.decode(output.token_ids)
    assert len(output.token_ids) <= limit


def test_statistics() -> None:
    stats = RequestStats(prefill_us=1000.0)
    stats.add_round(Round([1, 2, 3], 4, 5, 2, None, 50.0), delivered=3)
    stats.add_round(Round([4], 0, 0, 0, None, 30.0, "does not pay"), delivered=1)
    stats.add_round(Round([5, 6, 7], 16, 16, 2, None, 70.0), delivered=1)
    found = stats.to_json()
    assert found["rounds"] == sum(found["lengths"]) == 3
    assert (found["emitted"], found["accepted"]) == (5, 4)
    assert found["mean_verify_length"] == round(20 / 3, 4)
    assert found["tokens_per_round"] == round(5 / 3, 4)
    assert (found["decode_us"], found["prefill_us"]) == (150.0, 1000.0)
    assert (found["lengths"][0], found["lengths"][4], found["lengths"][16]) == (1, 1, 1)
    assert found["fallbacks"] == {"does not pay": 1}


def test_statistics_without_rounds_have_no_means() -> None:
    found = RequestStats().to_json()
    assert found["mean_verify_length"] is None
    assert found["tokens_per_round"] is None
