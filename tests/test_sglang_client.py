"""The conversation of the `openai` client with a real server, and how its answers are judged."""

# Modules of benchmarks are found by the path that the kit adds.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_client_kit import BENCHMARKS, ROOT, TARGET, stream

# isort: split

from serving.conversation import Conversation
from serving.decoding import Looping
from serving.judged import Judge, Reference, lead_changes, spread
from serving.load import Ask, Prompt, Stream, run_load

from hybridspec.demo import assets
from hybridspec.fuzz.plain import ReferencePlainText
from hybridspec.reference.loading import load_pair

TEXT = "def main() -> int:\n    return 0\n"
TOKENS = 8


def kit() -> Any:
    path = ROOT / "tests" / "robustness" / "robustness_kit.py"
    spec = importlib.util.spec_from_file_location("robustness_kit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def looping() -> Looping:
    return Looping(TARGET / "tokenizer.json")


# A server of SGLang tells log-probabilities; here the target on the host does, in float32.


class Plain:
    """Plain decoding of the embedded pair, one place at a time and in one pass."""

    def __init__(self) -> None:
        target = assets.require()[0]
        self.target = load_pair(
            target, None, dtype=torch.float32, max_batch=1, max_context=256
        ).target

    def behind(self, ids: Sequence[int]) -> torch.Tensor:
        text = ReferencePlainText(self.target, ids, max_context=256)
        return torch.log_softmax(text.logits(len(ids)), -1)

    def scored(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        text = ReferencePlainText(self.target, prompt.ids, max_context=256)
        ids = text.continuation(tokens)
        best = [self.behind([*prompt.ids, *ids[:k]]).topk(8) for k in range(tokens)]
        assert [int(b.indices[0]) for b in best] == ids
        return {
            "prompt": prompt.number,
            "ids": ids,
            "margins_nats": [float(b.values[0] - b.values[1]) for b in best],
            "runner_up": [int(b.indices[1]) for b in best],
            "near": [
                dict(zip(b.indices.tolist(), (b.values[0] - b.values).tolist(), strict=True))
                for b in best
            ],
        }

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == "/generate"
        ids, start = body["input_ids"], body["logprob_start_len"]
        # As SGLang: the first place has no log-probability, what follows has.
        tokens: list[Any] = [(None, ids[start - 1], None)]
        tops: list[Any] = [None]
        for place in range(start, len(ids)):
            values_V = self.behind(ids[:place])
            best = values_V.topk(body["top_logprobs_num"])
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            tokens.append((float(values_V[ids[place]]), ids[place], None))
            tops.append([(value, token, None) for value, token in pairs])
        return {"meta_info": {"input_token_logprobs": tokens, "input_top_logprobs": tops}}


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    ids = [[40 + 3 * n + k for k in range(12)] for n in range(4)]
    return [Prompt(number, "made", entry) for number, entry in enumerate(ids)]


def test_leads_are_compared_at_the_same_places(plain: Plain, prompts: list[Prompt]) -> None:
    entries = [plain.scored(prompt, 3) for prompt in prompts[:2]]
    changes = lead_changes(plain.post, prompts, entries)
    assert len(changes) == 6
    assert max(changes) < 1e-4
    entries[1]["margins_nats"][1] += 0.5
    told = spread(lead_changes(plain.post, prompts, entries[1:]))
    assert told["tokens"] == 3
    assert told["largest_nats"] == pytest.approx(0.5, abs=1e-3)

    def other(path: str, body: Mapping[str, Any]) -> Any:
        return plain.post(path, {**body, "input_ids": [*body["input_ids"][:-1], 3]})

    assert entries[1]["ids"][-1] != 3
    with pytest.raises(ValueError, match="was asked for"):
        lead_changes(other, prompts, entries[1:])


# A real server: the reference engine, in a process of its own.


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with kit().serving("--max-context", 2048) as server:
        yield str(server.url)


@pytest.fixture(scope="module")
def model(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def conversation(
    url: str, model: str, prompts: list[Prompt], judge: Judge | None, until: float = 240.0
) -> Conversation:
    said: list[str] = []
    talk = Conversation(
        url, model, prompts, Ask(TOKENS, dialect="hybridspec"), judge=judge,
        until=time.monotonic() + until, say=lambda *words: said.append(" ".join(map(str, words))),
    )  # fmt: skip
    talk.run()
    assert len(said) == len(talk.stages) == 10
    return talk


def judge_by_one_row(
    url: str, model: str, prompts: list[Prompt], plain: Plain, looping: Looping
) -> Judge:
    ask = Ask(TOKENS, verify_length=1, dialect="hybridspec")
    reference = Reference()
    streams = run_load(url, model, prompts, ask, clients=1)
    assert not any(stream.error for stream in streams)
    reference.add(prompts, streams, [plain.scored(prompt, TOKENS) for prompt in prompts])

    def exact(prefix: Sequence[int]) -> torch.Tensor:
        del prefix
        return torch.zeros(1000, dtype=torch.float64)

    return Judge(reference, looping, exact)


def test_every_greedy_answer_of_a_conversation_is_judged(
    url: str, model: str, prompts: list[Prompt], plain: Plain, looping: Looping
) -> None:
    judge = judge_by_one_row(url, model, prompts, plain, looping)
    talk = conversation(url, model, prompts, judge)
    assert talk.passed, [stage for stage in talk.stages if stage.state != "ok"]
    compared = {stage.name: stage.compared for stage in talk.stages if stage.compared}
    assert compared == {
        "streamed": 8, "whole": 2, "lengths": 12, "crowd": 4, "aborted": 2, "after abort": 4,
        "abort beside others": 3, "healthy": 2,
    }  # fmt: skip

    # The same answers against another text of plain decoding: every stage must say so.
    first = judge.reference.streams[0]
    judge.reference.streams[0] = Stream(**{**vars(first), "text": "@" + first.text[1:]})
    failed = {s.name for s in conversation(url, model, prompts, judge).stages if s.state != "ok"}
    assert failed == {
        "streamed", "whole", "lengths", "crowd", "aborted", "after abort", "abort beside others",
        "healthy",
    }  # fmt: skip


def test_an_answer_that_ends_before_its_length_is_not_compared(
    url: str, model: str, prompts: list[Prompt]
) -> None:
    ask = Ask(5, dialect="sglang")
    talk = Conversation(
        url, model, prompts, ask, judge=None, until=time.monotonic() + 60,
        say=lambda *words: None,
    )  # fmt: skip
    assert talk.complete([stream("abcde", tokens=5)], ask)
    for short in (stream("abcd", tokens=4), stream("", tokens=5), stream("abcde", tokens=6)):
        short.tokens = short.tokens if short.text else []
        with pytest.raises(Exception, match=r"prompts \[7\] are not 5 tokens long"):
            talk.complete([short], ask)


def test_a_law_is_compared_with_the_same_servers_plain_decoding(
    url: str, model: str, prompts: list[Prompt]
) -> None:
    ask = Ask(1, temperature=1.0, verify_length=1, dialect="hybridspec")
    count = 80
    plain = run_load(url, model, prompts[:1] * count, ask, clients=4)
    talk = Conversation(
        url, model, prompts, Ask(2, dialect="hybridspec"), judge=None,
        until=time.monotonic() + 200, say=lambda *words: None,
    )  # fmt: skip
    texts = {0: [stream.text for stream in plain]}
    drafted = Ask(1, temperature=1.0, dialect="hybridspec")
    talk.stage("law", lambda: talk.law(texts, prompts[:1], drafted))
    talk.stage("other law", lambda: talk.law({0: ["@"] * count}, prompts[:1], drafted))
    assert [stage.state for stage in talk.stages] == ["ok", "FAILED"]
    assert talk.stages[0].laws[0]["p_value"] >= 0.001
    assert talk.stages[0].laws[0]["samples"] == (count, count)
    assert talk.stages[0].laws[0]["bins"] > 1
    names = iter(f"text {k}" for k in range(10**6))
    rare = {0: [next(names) for _ in range(9)]}
    talk.stage("nothing compared", lambda: talk.law(rare, prompts[:1], drafted))
    assert talk.stages[-1].state == "FAILED"


class Caching(Conversation):
    """The reference engine caches no prefixes, so what it would tell is put in its place."""

    def __init__(self, *arguments: Any, hits: Sequence[int], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.hits = list(hits)

    async def _one_by_one(self, prompts: Sequence[Prompt], ask: Ask) -> list[Stream]:
        found = await super()._one_by_one(prompts, ask)
        self.cached = dict.fromkeys((p.number for p in prompts), self.hits.pop(0))
        return found


@pytest.mark.parametrize(
    ("hits", "state"), [((20, 3), "ok"), ((20, 11), "FAILED"), ((0, 0), "FAILED")]
)
def test_what_was_evicted_is_not_cached_the_second_time(
    hits: tuple[int, int], state: str, url: str, model: str, prompts: list[Prompt],
    plain: Plain, looping: Looping,
) -> None:  # fmt: skip
    follow = [Prompt(100 + p.number, p.category, [*p.ids, 41, 42]) for p in prompts]
    judge = judge_by_one_row(url, model, [*prompts, *follow], plain, looping)
    ask = Ask(TOKENS, dialect="hybridspec")
    talk = Caching(
        url, model, prompts, ask, judge=judge, until=time.monotonic() + 100,
        say=lambda *words: None, hits=hits,
    )  # fmt: skip
    talk.stage("evictions", lambda: talk.evictions(follow, ask))
    assert talk.stages[0].state == state, talk.stages[0].told
    assert talk.stages[0].compared == 4 + 2 * (4 + 4)
    told = f"of 4 prompts {4 * hits[0]} tokens were cached, with others between {4 * hits[1]}"
    assert told in talk.stages[0].told


def test_no_time_left_skips_stages(url: str, model: str, prompts: list[Prompt]) -> None:
    talk = conversation(url, model, prompts, None, until=-1.0)
    assert {stage.state for stage in talk.stages} == {"skipped"}
    assert not talk.passed


def pair_of(prompts: list[Prompt], folder: Path) -> Path:
    pair = folder / "pair"
    pair.mkdir()
    (pair / "target").symlink_to(TARGET)
    entries = [{"split": "test", "cat": f"c{p.number}", "ids": p.ids} for p in prompts]
    (pair / "prompts.json").write_text(json.dumps(entries))
    return pair


def script(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "sglang_client.py"), *map(str, words)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_the_script_talks_to_a_server_that_runs(
    url: str, model: str, prompts: list[Prompt], tmp_path: Path
) -> None:
    done = script(
        pair_of(prompts, tmp_path), "--url", url, "--model", model, "--dialect", "hybridspec",
        "--tokens", TOKENS, "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "out" / "sglang_client.json").read_text())
    assert kept["summary"]["stages_ok"] == kept["summary"]["stages"] == 10
    # Nothing was asked of plain decoding, so nothing is said of it.
    assert kept["summary"]["greedy_answers"] == 0
    assert "as one client got them" in done.stdout


def test_another_error_is_no_refusal_of_a_length(prompts: list[Prompt]) -> None:
    talk = Conversation(
        "http://127.0.0.1:9", "m", prompts, Ask(TOKENS), judge=None, until=time.monotonic() + 60,
        say=lambda *words: None,
    )  # fmt: skip
    talk.stage("refused", talk.refused)
    assert talk.stages[0].state == "FAILED"
    assert "99 rows were answered by another error: APIConnectionError" in talk.stages[0].told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--servers", "radx"], "--servers radx: choose of default, radix, retract"),
        (["--servers", "policy,radix"], "--servers policy: add --bundle, whose policy chooses"),
        (["--servers", "policy", "--bundle", "b"], "b: there is no such folder"),
        (["--limit", "0"], "--limit 0.0: 1 at least"),
        (["--bundle", "b"], "add policy or select to --servers, none reads it"),
        (["--url", "localhost:1"], "--url localhost:1: begin it with http:// or https://"),
        (
            ["--url", "http://localhost:1", "--servers", "default", "--tp-size", "2"],
            "--servers, --tp-size with --url: that server runs as it was started",
        ),
        (["--tp-size", "0"], "--tp-size 0: 1 at least"),
        (["--samples", "9"], "--samples 9: 100 at least"),
        (["--per-category", "0"], "--per-category 0: 1 at least"),
        ([], "has no prompts.json: name a folder with target/, drafter/ and it, a list of"),
    ],
)
def test_options_that_cannot_be_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    done = script(tmp_path, *words, "--out", tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


def test_a_plain_server_that_does_not_come_up_ends_the_run_with_its_log(
    prompts: list[Prompt], tmp_path: Path
) -> None:
    pair = pair_of(prompts, tmp_path)
    # Here is no SGLang, or one without a GPU: either way nothing serves.
    done = script(pair, "--out", tmp_path / "out", "--boot-timeout", 60)
    assert done.returncode == 1
    assert "error: the server 'plain': ended with" in done.stderr
    assert "plain.log" in done.stderr
    kept = json.loads((tmp_path / "out" / "sglang_client.json").read_text())
    assert [(row["server"], row["state"]) for row in kept["rows"]] == [("plain", "FAILED")]
