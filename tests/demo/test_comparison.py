"""Tallies outside loops, equality of outputs, and what people read of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridspec.demo.comparison import Decoded, Tally, compare, first_difference, loop_start, tally
from hybridspec.demo.page import result_table, write_page


def decoded(
    tokens: list[int],
    rounds: list[int],
    *,
    us: float = 100.0,
    length: int = 4,
    prompt: str = "p0",
    category: str = "code",
) -> Decoded:
    return Decoded(
        prompt,
        category,
        tuple(tokens),
        tuple(rounds),
        (us,) * len(rounds),
        (length,) * len(rounds),
    )


def plain(tokens: list[int], **more: object) -> Decoded:
    return decoded(tokens, [1] * (len(tokens) - 1), length=0, **more)  # type: ignore[arg-type]


def test_every_round_counts_where_there_is_no_loop() -> None:
    run = decoded(list(range(13)), [4, 4, 4])
    assert tally([run], stop_at=13) == Tally(tokens=12, time_us=300.0, rounds=3, rows=12)
    # A last round that runs past the end of the output still took its time and brought its tokens.
    assert tally([decoded(list(range(10)), [4, 4, 4])], stop_at=10).tokens == 12


def test_rounds_from_the_first_loop_token_on_are_left_out() -> None:
    tokens = [*range(100, 120), *[7, 8] * 20]
    assert loop_start(tokens) == 20
    part = tally([decoded(tokens, [5] * 12)], stop_at=20)
    assert (part.tokens, part.rounds) == (15, 3)
    assert tally([plain(tokens)], stop_at=20).tokens == 19


def test_round_times_are_medians_of_repeats() -> None:
    repeats = [decoded(list(range(9)), [4, 4], us=us) for us in (90.0, 100.0, 500.0)]
    assert tally(repeats, stop_at=9).time_us == 200.0
    with pytest.raises(ValueError, match="different rounds"):
        tally([repeats[0], decoded(list(range(9)), [3, 5])], stop_at=9)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=30), st.integers(1, 200))
def test_a_tally_never_counts_past_the_stop(rounds: list[int], stop: int) -> None:
    tokens = list(range(1 + sum(rounds)))
    part = tally([decoded(tokens, rounds)], stop_at=min(stop, len(tokens)))
    assert 1 + part.tokens <= max(min(stop, len(tokens)), 1)


def test_comparison_of_two_ways() -> None:
    text = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
    runs = {
        "AR": [
            [plain(text[0], us=100.0)],
            [plain(text[1], us=100.0, prompt="p1", category="prose")],
        ],
        "ours": [
            [decoded(text[0], [4, 4], us=200.0)],
            [decoded(text[1], [2] * 4, us=200.0, prompt="p1", category="prose")],
        ],
    }
    comparison = compare(runs, reference="AR")
    assert comparison.different == ()
    assert comparison.loop_prompts == 0
    assert comparison.category_over("ours", "AR") == pytest.approx({"code": 2.0, "prose": 1.0})
    assert comparison.over("ours", "AR") == pytest.approx(16 / 1200 * 100)
    table = result_table(comparison, base="AR")
    assert table.splitlines()[1].split()[:3] == ["AR", "10000", "1.00x"]


def test_a_different_output_is_named_with_its_place() -> None:
    runs = {
        "AR": [[plain([1, 2, 3, 4])]],
        "ours": [[decoded([1, 2, 9, 4], [3])]],
    }
    assert compare(runs, reference="AR").different == (("ours", "p0", 2),)
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None


def test_page_shows_ratios_and_escapes_names(tmp_path: Path) -> None:
    runs = {"AR": [[plain([1, 2, 3, 4])]], "ours <b>": [[decoded([1, 2, 3, 4], [3])]]}
    comparison = compare(runs, reference="AR")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "cost.svg").write_text('<?xml version="1.0"?><svg id="x"></svg>')
    summary = {
        "over_ar": 3.0,
        "over_dflash16": 1.5,
        "over_best_fixed": 1.2,
        "loop_prompts": 0,
        "different_outputs": 0,
        "logit_margins_at_difference": [],
    }
    write_page(tmp_path / "index.html", comparison, summary, plots=tmp_path / "plots")
    page = (tmp_path / "index.html").read_text()
    assert "3.00x plain decoding" in page
    assert '<svg id="x">' in page
    assert "<?xml" not in page
    assert "ours &lt;b&gt;" in page
    assert "took a fixed length" not in page
    summary["drift_fallback_share"] = 0.85
    write_page(tmp_path / "index.html", comparison, summary, plots=tmp_path / "plots")
    assert (
        "85 %\nof HybridSpec's rounds took a fixed length" in (tmp_path / "index.html").read_text()
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_demo_in_small(tmp_path: Path) -> None:
    from hybridspec.demo.run import run_demo

    lines: list[str] = []
    summary = run_demo(
        out=tmp_path / "demo",
        max_new_tokens=24,
        prompts_per_category=2,
        port=0,
        say=lines.append,
    )
    assert summary["different_outputs"] == 0
    assert set(summary["category_over_ar"]) == {
        "code", "prose", "legal", "config", "tables", "markdown", "chat",
    }  # fmt: skip
    told = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert told["over_ar"] > 0
    assert (tmp_path / "demo" / "index.html").stat().st_size > 10_000
    assert any("listening" in line for line in lines)
