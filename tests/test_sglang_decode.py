"""Load and report of the comparison in SGLang: lengths of answers, prompts read, texts, files."""

# Modules of benchmarks are found by the path that this test adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
if not BENCHMARKS.is_dir():
    pytest.skip("no benchmarks in this tree (an sdist)", allow_module_level=True)
sys.path.insert(0, str(BENCHMARKS))

from serving.arms import NO_PREFILL_GRAPHS, boots_of  # noqa: E402
from serving.decoding import Looping  # noqa: E402
from serving.load import Ask, Prompt, Stream  # noqa: E402
from serving.reading import reading_of, reading_rows, reading_table  # noqa: E402
from serving.report import (  # noqa: E402
    Arms,
    beside_rows,
    read_recording,
    report,
    rows_of,
    text_rows,
    whole_runs,
)
from serving.servers import Server  # noqa: E402
from serving.sizes import Size, sizes_of, spread_length  # noqa: E402
from serving.texts import compare, differences_of, scored  # noqa: E402

TOKENIZER = ROOT / "hybridspec" / "demo" / "pair" / "target" / "tokenizer.json"
LAB_TOKENIZER = ROOT.parent / "shared" / "pairs" / "lab" / "target" / "tokenizer.json"
RESULTS = BENCHMARKS / "results"


@given(first=st.integers(0, 2000), tokens=st.integers(24, 512), count=st.integers(14, 60))
def test_lengths_spread_around_their_mean(first: int, tokens: int, count: int) -> None:
    lengths = [spread_length(number, tokens) for number in range(first, first + count)]
    assert min(lengths) >= int(2 * tokens / 3)
    assert max(lengths) <= round(4 * tokens / 3)
    assert sum(lengths) / count == pytest.approx(tokens, rel=0.05)
    # What keeps four clients from ending together: neighbours are far apart.
    gaps = [abs(a - b) for a, b in itertools.pairwise(lengths)]
    assert min(gaps) >= tokens // 5


def prompts_of(categories: int, each: int) -> list[Prompt]:
    return [
        Prompt(100 * category + turn, f"c{category}", [1, 2, 3])
        for turn in range(each)
        for category in range(categories)
    ]


def test_sizes_by_client_count() -> None:
    sizes = sizes_of([1, 4, 8], per_category=4, tokens=96, at="8:3:192,16:1:10", spread=True)
    assert sizes == {
        1: Size(1, 4, 96, spread=False), 4: Size(4, 4, 96, spread=True),
        8: Size(8, 3, 192, spread=True),
    }  # fmt: skip
    prompts = prompts_of(7, 4)
    chosen = sizes[8].prompts(prompts)
    assert len(chosen) == 21
    assert {prompt.number % 100 for prompt in chosen} == {0, 1, 2}
    assert sizes[1].lengths(prompts) is None
    lengths = sizes[8].lengths(chosen)
    assert lengths is not None
    ask = Ask(192, lengths=lengths)
    assert [ask.arguments(p)["max_tokens"] for p in chosen] == [lengths[p.number] for p in chosen]
    assert Ask(96).arguments(chosen[0])["max_tokens"] == 96
    described = sizes[8].described(prompts)
    assert described["prompts"] == 21
    assert described["tokens_shortest"] == min(lengths.values())
    assert described["tokens_longest"] == max(lengths.values())


@pytest.mark.parametrize("at", ["8:3", "8:3:many", "8:0:96", "8:-1:96"])
def test_sizes_that_make_no_sense_are_refused(at: str) -> None:
    with pytest.raises(SystemExit):
        sizes_of([8], per_category=4, tokens=96, at=at, spread=True)


def stream(prompt: int, submitted: float, arrived: list[float], tokens: list[int]) -> Stream:
    return Stream(prompt, "c", submitted, arrived, tokens, [1] * len(tokens), "x" * tokens[-1])


def test_overlapping_prompts_are_one_group() -> None:
    run = [
        stream(1, 0.0, [1.0, 4.0], [1, 10]),
        stream(2, 0.5, [1.5, 5.0], [1, 10]),
        # Within the group, and over before it.
        stream(3, 0.6, [1.2, 2.0], [1, 10]),
        stream(4, 3.0, [3.25, 8.0], [1, 20]),
    ]
    reading = reading_of(run)
    assert reading is not None
    assert reading.groups == (3, 1)
    assert reading.reading_s == pytest.approx(1.75)
    assert reading.wall_s == pytest.approx(8.0)
    assert reading.tokens_per_s == pytest.approx(50 / 8)
    assert reading_of([]) is None


def test_whole_runs_are_compared_on_the_same_requests_only() -> None:
    plain = [stream(1, 0.0, [1.0, 9.0], [1, 10]), stream(2, 0.0, [1.0, 10.0], [1, 14])]
    ours = [stream(1, 0.0, [1.0, 4.0], [1, 10]), stream(2, 0.0, [1.0, 5.0], [1, 14])]
    shorter = [stream(1, 0.0, [1.0, 4.0], [1, 10]), stream(2, 0.0, [1.0, 5.0], [1, 12])]
    rows = reading_rows(
        {("ar", 4): plain, ("hybridspec", 4): ours, ("fixed5", 4): shorter, ("ar", 2): plain},
        {("ar", 4): [1, 1]},
    )
    over = {(row["arm"], row["clients"]): row.get("whole_run_over_ar") for row in rows}
    assert over == {("ar", 2): 1.0, ("ar", 4): 1.0, ("hybridspec", 4): 2.0, ("fixed5", 4): None}
    assert [row["prefill_passes"] for row in rows if "prefill_passes" in row] == [2]
    assert whole_runs(rows) == {
        "whole_run_over_ar_clients4": 2.0,
        "answer_tokens": {"4 clients": [10, 14]},
    }
    assert "2.00x" in reading_table(rows)


def test_texts_of_different_lengths_are_compared_as_far_as_the_shorter_goes() -> None:
    looping = Looping(TOKENIZER)

    def answer(text: str, tokens: int) -> Stream:
        return Stream(1, "c", 0.0, [1.0], [tokens], [len(text)], text)

    plain = [answer("def main() -> None:", 5)]

    def equal(other: Stream) -> bool:
        found: dict[str, Any] = compare([other], plain, [], looping)
        assert found["compared"] == 1
        return found["equal"] == 1

    assert equal(answer("def main() -> None:", 5))
    assert equal(answer("def main() -> None:\n    pass", 8))
    assert equal(answer("def main", 2))
    assert equal(answer("def main\ufffd", 3)), "a character that the end cut"
    assert not equal(answer("def mane", 2))
    assert not equal(answer("def main() -> None", 5)), "as many tokens, so no shorter answer"
    assert not equal(answer("def main() -> int:\n    pass", 8))


def test_prefill_graphs_take_the_place_of_the_flag_that_forbids_them() -> None:
    boot = boots_of(["dflash16"])[0]
    paths = {"target": Path("t"), "drafter": Path("d"), "port": 1, "most_running": 8}
    without = boot.arguments(**paths)
    assert NO_PREFILL_GRAPHS in without
    flags = boot.arguments(**paths, prefill_graphs=(128, 256))
    assert NO_PREFILL_GRAPHS not in flags
    at = flags.index("--cuda-graph-bs-prefill")
    assert flags[at - 2 : at + 3] == [
        "--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", "128", "256",
    ]  # fmt: skip


def test_prefill_passes_by_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "[t] Prefill batch, #new-seq: 1, #new-token: 128, cuda graph: False\n"
        "[t] Decode batch, #running-req: 1\n"
        "[t] Prefill batch, #new-seq: 3, #new-token: 384, cuda graph: False\n"
    )
    process: Any = None
    assert Server(process, "", log).prefill_passes() == [1, 3]


def test_the_runner_up_of_an_equal_pair_is_the_other_token() -> None:
    """SGLang lists the chosen token second where another one has the same logit."""
    told = {
        "output_token_logprobs": [[-0.1, 5, None], [-0.7, 8, None]],
        "output_top_logprobs": [
            [[-0.1, 5, None], [-2.4, 6, None]],
            [[-0.7, 9, None], [-0.7, 8, None]],
        ],
    }
    found = scored({"meta_info": told, "text": "ab"})
    assert found["ids"] == [5, 8]
    assert found["runner_up"] == [6, 9]
    assert found["margins_nats"] == pytest.approx([2.3, 0.0])


PLAIN = "def main() -> None:"
OTHER = "def main() -> int:"


def recording(plain: str = PLAIN, *, scored: bool = False, ar: bool = True) -> dict[str, Any]:
    """A small one: plain decoding and our arm, which parts from it at the return type."""

    def run(text: str, step_s: float) -> dict[str, Any]:
        ids = Looping(TOKENIZER).ids(text)
        lengths = [len(Looping(TOKENIZER).decode(ids[: n + 1])) for n in range(len(ids))]
        arrived = [1.0 + step_s * n for n in range(len(ids))]
        tokens = list(range(1, len(ids) + 1))
        return dataclasses.asdict(Stream(7, "code", 0.5, arrived, tokens, lengths, text))

    arms = {
        "ar": {"boot": "ar", "runs": {"1": [run(plain, 0.2)]}},
        "hybridspec": {"boot": "hybridspec", "runs": {"1": [run(OTHER, 0.1)]}},
    }
    if not ar:
        del arms["ar"]
    found: dict[str, Any] = {
        "about": {
            "commit": "c0ffee",
            "machine": {"gpu": "a card"},
            "arms": "ar,hybridspec,dflash8",
        },
        "arms": arms,
        "boots": {name: {"boot_s": 1.0} for name in arms},
    }
    if scored:
        ids, others = Looping(TOKENIZER).ids(plain), Looping(TOKENIZER).ids(OTHER)
        found["scored"] = [
            {
                "prompt": 7, "ids": ids, "margins_nats": [0.125] * len(ids),
                "runner_up": [(others + ids)[n] for n in range(len(ids))], "text": plain,
            }
        ]  # fmt: skip
    return found


def written(folder: Path, name: str, what: dict[str, Any]) -> Path:
    path = folder / f"{name}.json.xz"
    path.write_bytes(lzma.compress(json.dumps(what).encode()))
    return path


def test_margins_are_those_of_the_recording_that_scored_names(tmp_path: Path) -> None:
    own = recording(scored=True)
    # As recordings were before: of two equal logits the chosen token was its own runner-up.
    own["scored"][0]["runner_up"] = own["scored"][0]["ids"]
    first = written(tmp_path, "first", own)
    good = written(tmp_path, "good", recording(scored=True))
    before = json.loads(report([first], TOKENIZER, tmp_path).read_text())
    after = json.loads(
        report([first], TOKENIZER, tmp_path, scored_in=good, name="again").read_text()
    )
    assert (tmp_path / "again.json").is_file()
    everything = {
        "answers": 1, "differences": 1, "places": 1, "exact_ties": 0,
        "largest_margin_nats": 0.125, "margins_unknown": 0,
    }  # fmt: skip
    assert before["summary"]["all_differences"] == {**everything, "by_runner_up": 0}
    assert after["summary"]["all_differences"] == {**everything, "by_runner_up": 1}
    assert "scored" not in before["summary"]
    assert after["summary"]["scored"] == "plain decoding of a run of c0ffee"
    assert [row.get("taken") for row in after["rows"] if row["kind"] == "recording"] == [
        None, "scored plain decoding",
    ]  # fmt: skip
    decode = [[row for row in kept["rows"] if row["kind"] == "decode"] for kept in (before, after)]
    assert decode[0] == decode[1]


def test_a_margin_of_another_way_is_none(tmp_path: Path) -> None:
    scored_other = recording(scored=True)
    scored_other["scored"][0]["ids"] = [0] * len(scored_other["scored"][0]["ids"])
    path = written(tmp_path, "other", scored_other)
    kept = json.loads(report([path], TOKENIZER, tmp_path, scored_in=path).read_text())
    found = kept["summary"]["all_differences"]
    assert (found["differences"], found["by_runner_up"], found["margins_unknown"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (recording(), "no plain decoding is scored there"),
        (recording("def main() -> str:", scored=True), r"texts of prompts \[7\] are others"),
        (recording(scored=True, ar=False), "no prompt in common"),
    ],
)
def test_scored_decoding_that_is_not_of_these_texts_is_refused(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    first = written(tmp_path, "first", recording(scored=True))
    with pytest.raises(SystemExit, match=said):
        report([first], TOKENIZER, tmp_path, scored_in=written(tmp_path, "other", other))
    assert not (tmp_path / "sglang_decode.json").exists()


def test_rates_beside_are_those_of_the_same_prompts(tmp_path: Path) -> None:
    more = recording()
    (stream,) = more["arms"]["ar"]["runs"]["1"]
    slow = {**stream, "prompt": 8, "submitted_s": 100.0}
    slow["arrived_s"] = [101.0 + 5.0 * n for n in range(len(stream["arrived_s"]))]
    more["arms"]["ar"]["runs"]["1"].append(slow)
    del more["arms"]["hybridspec"]
    paths = written(tmp_path, "two", recording(scored=True)), written(tmp_path, "one", more)
    kept = json.loads(report([paths[0]], TOKENIZER, tmp_path, beside=paths[1]).read_text())
    assert kept["summary"]["beside"] == {"ar, 1 clients": 5.0}
    (row,) = (row for row in kept["rows"] if row["kind"] == "beside")
    assert (row["prompts"], row["ms_a_round"]) == (1, 200.0)
    taken = [row for row in kept["rows"] if row["kind"] == "recording" and "taken" in row]
    assert [row["taken"] for row in taken] == ["the rows `beside`"]


def test_servers_that_failed_or_are_missing_are_named(tmp_path: Path) -> None:
    log = (
        "4 requests failed and 0 were not sent\nTraceback (most recent call last):\n"
        '  File "/tmp/site/sglang/worker.py", line 1, in verify\n    scatter(states)\n'
        '  File "/tmp/site/sglang/scatter.py", line 2, in scatter\n    states.device\n'
        "AttributeError: 'NoneType' object has no attribute 'device'\n\n[t] SIGQUIT received."
    )
    what = recording(scored=True)
    what["boots"]["replayssm"] = {"boot_s": 3.0, "failed": log}
    kept = json.loads(report([written(tmp_path, "r", what)], TOKENIZER, tmp_path).read_text())
    assert kept["summary"]["not_measured"] == {
        "replayssm": "4 requests failed and 0 were not sent; AttributeError: 'NoneType' object has "
        "no attribute 'device' in worker.verify > scatter.scatter",
        "dflash8": "asked for; no server of it is in the recording",
    }
    assert kept["summary"]["boot_s"] == {"ar": 1.0, "hybridspec": 1.0}
    row = next(row for row in kept["rows"] if row.get("name") == "replayssm")
    assert row["reason"] == kept["summary"]["not_measured"]["replayssm"]
    assert "/tmp" not in row["failed"]


@pytest.mark.skipif(not LAB_TOKENIZER.is_file(), reason="no tokenizer of the lab pair here")
@pytest.mark.parametrize("name", ["sglang_decode", "sglang_decode_paper", "sglang_decode_tp2"])
def test_the_result_file_is_what_its_recordings_say(name: str) -> None:
    kept = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    words = kept["command"].split()
    options, names = dict(itertools.pairwise(words)), [w for w in words if ".json.xz" in w]
    for flag in {"--scored", "--beside"} & options.keys():
        names.remove(options[flag])
    recordings = [read_recording(RESULTS / "sglang_decode" / Path(word).name) for word in names]
    arms = Arms(recordings, Looping(LAB_TOKENIZER))
    assert recordings
    if "--beside" in options:
        other = read_recording(RESULTS / "sglang_decode" / Path(options["--beside"]).name)
        told = beside_rows(arms, Arms([other], arms.looping))
        assert told == [row for row in kept["rows"] if row["kind"] == "beside"]
    assert rows_of(arms) == [row for row in kept["rows"] if row["kind"] == "decode"]
    scoring = recordings[0]
    if "--scored" in options:
        scoring = read_recording(RESULTS / "sglang_decode" / Path(options["--scored"]).name)
    texts = [row for row in kept["rows"] if row["kind"] == "texts"]
    assert text_rows(arms, scoring["scored"]) == texts
    assert differences_of(texts) == kept["summary"]["all_differences"]
