"""SGLang's radix cache believes in the states that we take, in the slots that they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hybridspec.kernels.state_snapshot import naive

GIB = 1 << 30


@pytest.fixture(scope="module")
def facts(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("prefix_states_facts.py")


@pytest.mark.parametrize("interval", [32, 64, 256])
def test_the_scheduler_believes_in_what_we_take(interval: int, facts: dict[str, Any]) -> None:
    cases = facts["boundaries"][str(interval)]
    before, rows, believed, lengths = (list(column) for column in zip(*cases, strict=True))
    here = [1] * len(cases)
    taken, slots = naive.plan(before, rows, here, here, interval)
    assert [slot >= 0 for slot in slots] == believed
    ends = [start + n if n else 0 for start, n in zip(before, taken, strict=True)]
    assert ends == lengths
    assert any(believed)
    assert not all(believed)


def test_tokens_behind_the_end_of_an_answer_count(facts: dict[str, Any]) -> None:
    """So a boundary passed by a round's trimmed rows is believed too, and its state is theirs."""
    assert facts["trimmed"] == {"seqlen": 125, "finished_len": 20, "finished": True}


def test_slots_are_those_that_the_scheduler_fills_next(facts: dict[str, Any]) -> None:
    for found, size in ((facts["slots"]["overlap"], 2), (facts["slots"]["alone"], 1)):
        first, second = found["buffers"]
        assert (len(first), len(second)) == (size, size)
        assert found["distinct"] == 2 + 2 * size
        assert found["first"] == [first[0], second[0]]
        # The second request's turn has come; then its other slot goes to the cache.
        assert found["turned"] == [first[0], second[-1]]
        assert found["cleared"]
        assert found["contexts"] == [32, 39]
        assert found["kept"] == [size - 1, 0]
        assert found["donated"] == [second[0]]
        if size == 2:
            assert found["behind"] == found["turned"]
        else:
            assert found["behind"][1] not in second


def test_pool_clears_and_copies_slots_without_snapshots_of_rows(facts: dict[str, Any]) -> None:
    assert all(facts["copies"].values()), facts["copies"]


@pytest.mark.parametrize(("case", "requests"), [("share", 8), ("slots", 8)])
def test_accounting_counts_factors_with_more_slots_than_requests(
    case: str, requests: int, facts: dict[str, Any]
) -> None:
    stock, ours = facts["stock_budget"][case], facts["budget"][case]
    assert stock["slots"] == ours["slots"]
    assert ours["slots"] >= 5 * requests
    one_state = ours["state_gib"] / ours["slots"]
    snapshots = 16 * one_state * requests
    assert stock["rest"] == pytest.approx(100 - stock["state_gib"] - snapshots)
    kept = 100 - ours["state_gib"] - ours["rest"]
    # 16.9 MiB a request, of which there is one more, for padding.
    assert kept * 1024 / (requests + 1) == pytest.approx(16.93, abs=0.01)


def test_strategies_are_settled_as_they_should(facts: dict[str, Any]) -> None:
    found = facts["arguments"]
    assert found["extra_buffer"] == ["extra_buffer", False, 256]
    assert found["every 64"] == ["extra_buffer", False, 64]
    assert found["auto"] == ["extra_buffer", False, 256]
    assert found["off"][1:] == [False, None]
    assert found["off and named"][1:] == [False, None]
    assert found["lazy"].startswith(
        "EngineRefusal: a radix cache (--mamba-radix-cache-strategy ext"
    )
    assert found["stock target"].startswith("EngineRefusal: a radix cache is refused with target")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no interval", "EngineRefusal track_interval"),
        ("short interval", "UsageError --mamba-track-interval 32"),
        ("lazy", "EngineRefusal --mamba-radix-cache-strategy extra_buffer"),
    ],
)
def test_halves_of_it_are_refused(case: str, words: str, facts: dict[str, Any]) -> None:
    found = facts["installation"]
    assert found["installed"] == 64
    missing = [word for word in words.split() if word not in found[case]]
    assert not missing, found[case]


def first(calls: list[str], beginning: str) -> int:
    return next(i for i, call in enumerate(calls) if call.startswith(beginning))


def test_a_round_is_seen_when_the_next_one_has_been_launched(facts: dict[str, Any]) -> None:
    sources = facts["sources"]
    calls = sources["overlap"]
    launched = first(calls, "self.run_batch(")
    assert launched < first(calls, "self.result_queue.append(")
    # One result is taken for each that is put there: no third round is ever on the way.
    assert calls[launched:].count("pop_and_process()") == 1
    decode = sources["decode"]
    assert (
        first(decode, "req.output_ids.extend(")
        < first(decode, "req.update_finish_state(")
        < first(decode, "self._handle_finish_state_updated_req(")
    )
    finish = sources["behind finish"]
    assert first(finish, "self._mamba_prefix_cache_update(") < first(finish, "release_kv_cache(")
    assert sources["turn"]
    assert sources["turn sets"]


def test_worker_looks_before_the_round_and_installs_what_takes_states(
    facts: dict[str, Any],
) -> None:
    calls = facts["sources"]["worker"]
    rounds = [i for i, call in enumerate(calls) if call.startswith("super().forward_batch_gen")]
    assert first(calls, "rounds.begin(") < first(calls, "expect(rounds.snapshots, ") < rounds[-1]
    installs = facts["sources"]["worker installs"]
    install = installs[first(installs, "install_target(")]
    assert "track_interval=track_interval(self.server_args)" in install


def test_dflash_itself_prepares_no_slots_and_its_graphs_have_none(facts: dict[str, Any]) -> None:
    sources = facts["sources"]
    assert not sources["dflash prepares"]
    assert sources["graph tracks"]


def test_states_are_copied_by_the_target_alone_and_donated_as_numbers(
    facts: dict[str, Any],
) -> None:
    sources = facts["sources"]
    assert any(call.startswith("pool.mamba_pool.copy_from(") for call in sources["copies"])
    assert sources["copies only"]
    assert not any("copy_from" in call for call in sources["donated number"])
