"""What is replaced between the two graphs of a round is what SGLang 0.5.16 has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def between(found_by: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return found_by("between_graphs_facts.py")


def test_caches_of_the_drafter_are_found(between: dict[str, Any]) -> None:
    assert between["caches"] == [3, 128, 128]


@pytest.mark.parametrize("case", ["fp8", "other dtype", "layout"])
def test_other_caches_stay_with_sglang(case: str, between: dict[str, Any]) -> None:
    assert between["refused"][case].startswith("UsageError: "), between["refused"][case]


def test_keys_and_values_are_computed_into_workspaces_by_layer(between: dict[str, Any]) -> None:
    assert between["workspaces"] == [[3, 20, 2, 64]] * 2
    assert between["workspace_strides"] == [[20 * 128, 128, 64, 1]]
    assert between["weight_dtype"] == "torch.bfloat16"
    assert between["materialize"] == ["self", "ctx_hidden", "positions", "write_layer_kv"]
    # The writer of a layer takes as many arguments as the one in its place.
    assert len(between["writer"]) == 3
    source = between["materialize_source"]
    assert "write_layer_kv(layer_idx, cache_k[layer_idx], cache_v[layer_idx])" in source
    assert "tmp_k = self._k_workspace[:, :total_ctx]" in source


def test_append_goes_through_the_method_that_is_replaced(between: dict[str, Any]) -> None:
    assert between["fused"] == [
        "self", "ctx_hidden", "ctx_positions", "ctx_cache_loc", "ctx_cache_loc_2d", "commit_lens",
    ]  # fmt: skip
    called = [call for call in between["append_calls"] if "_append_target_hidden_fused" in call]
    assert called == [
        "self._append_target_hidden_fused(ctx_hidden=ctx_hidden, ctx_positions=positions, "
        "ctx_cache_loc=cache_loc, ctx_cache_loc_2d=cache_loc_2d, commit_lens=commit_lens)",
        "self._append_target_hidden_fused(ctx_hidden=ctx_hidden, ctx_positions=positions, "
        "ctx_cache_loc=cache_loc)",
    ]


def order(between: dict[str, Any], *beginnings: str) -> list[int]:
    """Where calls that begin so are in a round; each once."""
    places = []
    for beginning in beginnings:
        found = [i for i, call in enumerate(between["round_calls"]) if call.startswith(beginning)]
        assert found, beginning
        places.append(found[-1])
    return places


def test_greedy_acceptance_takes_the_argmax_that_is_answered(between: dict[str, Any]) -> None:
    calls = {call for call in between["round_calls"] if call.startswith("torch.argmax(")}
    plain = "torch.argmax(logits_output.next_token_logits, dim=-1)"
    assert calls == {plain, f"{plain}.view(bs, int(self.block_size))"}


def test_states_are_committed_behind_acceptance_and_used_by_the_target_alone(
    between: dict[str, Any],
) -> None:
    places = order(
        between,
        "self.target_worker.forward_batch_generation(",
        "apply_dflash_verify_logits_adjustments(",
        "torch.argmax(",
        "self._update_target_mamba_state_after_verify(",
        "self._append_target_hidden_to_draft_kv_by_loc(",
    )
    assert places == sorted(places)
    # The drafter's caches are appended to behind them and read by its next pass alone.
    draft, verify, append = order(
        between,
        "self.draft_model_runner.forward(",
        "self.target_worker.forward_batch_generation(",
        "self._append_target_hidden_to_draft_kv_by_loc(",
    )
    assert draft < verify < append
    # Slots are cleared by the runner of the model, so behind the join; copies to the host wait.
    assert between["clear_slots_callers"]
    assert between["cpu_copy_waits"]


def test_slots_are_written_again_when_they_are_forgotten(between: dict[str, Any]) -> None:
    assert between["state_metadata"] == {
        "first": [3, 1],
        "other size": [2],
        "back": [1, 3],
        "held": [1, 3],
        "forgotten": [1, 5],
        "padded": [2, 5, -1],
        "padded again": [4, 5, -1],
    }


def test_blocks_lie_in_the_graph_and_what_an_append_reads_is_not_written_in_the_next_round(
    between: dict[str, Any],
) -> None:
    found = between["block_buffers"]
    # Capacities are SGLang's: at least what is asked for, at least twice what there was.
    capacities = [1, 1, 2, 2, 4, 8, 8]
    assert found["shapes"] == [[[rows, 16]] * 2 for rows in capacities]
    assert found["in_place"] == [rows <= 4 for rows in capacities]
    assert found["alternate"] == [True] * 7
    assert found["tokens"] == [True] * 7
    assert {"input_ids", "mrope_positions"} <= set(between["buffers_of_a_graph"])
    assert between["append_by_loc"] == [
        "self", "target_hidden", "cache_loc", "positions", "cache_loc_2d", "commit_lens",
    ]  # fmt: skip
    # Positions and slots are the only buffers of a round that its append reads.
    calls = [
        call
        for call in between["round_calls"]
        if call.startswith("self._append_target_hidden_to_draft_kv_by_loc(")
    ]
    assert calls[-1] == (
        "self._append_target_hidden_to_draft_kv_by_loc(target_hidden=hidden.reshape(-1, "
        "hidden.shape[-1]), cache_loc=verify_out_cache_loc, cache_loc_2d=verify_out_cache_loc_2d, "
        "positions=positions, commit_lens=commit_lens)"
    )


def test_graph_of_the_drafter_is_launched_through_what_is_replaced(between: dict[str, Any]) -> None:
    asked = [call for call in between["pass_calls"] if "can_run_graph(" in call]
    assert "self.decode_cuda_graph_runner.can_run_graph(forward_batch)" in asked
    assert "mode_check()" in between["pass_calls"]
    calls = between["execute_calls"]
    load, replay = (
        next(i for i, call in enumerate(calls) if call.startswith(name))
        for name in ("self.load_batch(", "self.backend.replay(")
    )
    assert load < replay


def test_lengths_are_copied_for_the_commit_that_is_replaced_alone(between: dict[str, Any]) -> None:
    assert between["need_commit"] == [
        "batch.seq_lens.clone() if self._need_mamba_verify_commit else None",
        "if self._need_mamba_verify_commit:",
    ]


def test_rotary_positions_are_sglangs_and_early_where_they_can_be(between: dict[str, Any]) -> None:
    # Equal, and taken from the buffer of the graph.
    assert between["rotary_positions"] == {
        "parameters": ["self", "model_runner", "batch", "seq_positions"],
        "text": [True, True],
        "not written again": [True, False],
        "image": [True, False],
        "other runner": [True, False],
        "other positions": [True, False],
        "none": True,
    }
