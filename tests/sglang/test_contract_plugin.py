"""The plugin beside the real SGLang: discovery, registration, and every method that it replaces."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridspec.sglang_plugin.installation import GROUP, PLUGIN
from hybridspec.sglang_plugin.refusals import SUPPORTED_VERSION, VERSION_DIFFERENCES

# Parameters of what is subclassed, patched or called; `=` has a default, `*` starts the keywords.
SIGNATURES = {
    "DFlashWorkerV2.__init__": "self server_args gpu_id ps nccl_port target_worker",
    "DFlashWorkerV2.init_attention_backends": "self",
    "DFlashWorkerV2.forward_batch_generation": "self batch on_publish=",
    "DFlashWorkerV2._maybe_build_draft_sampler": "self",
    "DFlashWorkerV2._greedy_sample_from_vocab_parallel_head": (
        "self * hidden_states lm_head chunk_size="
    ),
    "DFlashWorkerV2._update_target_mamba_state_after_verify": (
        "self * batch seq_lens_pre_verify commit_lens"
    ),
    "_DflashDraftSampler.__init__": (
        "self * weight block_size num_org org_vocab_start max_bs tp_group="
    ),
    "_DflashDraftSampler.__call__": "self hidden_states input_ids=",
    "_get_or_create_chain_verify_buffers": "* bs draft_token_num device",
    "validate_dflash_request": "req enable_overlap",
    "FutureMap.__init__": (
        "self device spec_algo req_to_token_pool needs_cpu_seq_lens= needs_confidence_relay="
    ),
    "TpModelWorker.forward_batch_generation": (
        "self batch forward_batch= pp_proxy_tensors= is_verify= skip_attn_backend_init= * "
        "capture_hidden_mode="
    ),
    "_handle_dflash": "server_args",
    "resolved_view": "server_args",
    "MambaPool.__init__": (
        "self * size spec_state_size cache_params mamba_layer_ids device enable_memory_saver= "
        "speculative_num_draft_tokens= speculative_eagle_topk= enable_linear_replayssm= "
        "linear_replayssm_cache_len= envelope_layout= enable_gdn_replayssm_spec="
    ),
    "HybridReqToTokenPool.get_mamba_indices": "self req_indices",
    "HybridReqToTokenPool.translate_mamba_indices": "self mamba_indices",
    "HybridReqToTokenPool.get_mamba_ping_pong_other_idx": "self mamba_next_track_idx",
    "HybridReqToTokenPool.get_mamba_ping_pong_keep_idx": "self req",
    "set_mamba_track_indices_from_reqs": "batch",
    "SchedulerBatchResultProcessor._mamba_check_track_boundary": "self req batch result i",
    "KVCacheConfigurator._handle_max_mamba_cache": "self total_rest_memory",
    "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify": (
        "self last_correct_step_indices mamba_track_indices mamba_steps_to_track model"
    ),
    "GDNAttnBackend.forward_extend": "self layer forward_batch mixed_qkv a b **kwargs",
    "Qwen2MoeSparseMoeBlock._forward_router_experts": "self hidden_states",
    "SpeculativeAlgorithm.register": "name * supports_overlap= validate_server_args= spec_class=",
    "load_plugins": "",
}
# Callers hand these to every algorithm, and 0.5.16's own base class for plugins lacks them.
MISSING_IN_BASE = ["carries_draft_hidden_states", "create_future_map", "need_topk"]


def test_versions_agree(facts: dict[str, Any]) -> None:
    assert facts["version"] == SUPPORTED_VERSION
    assert SUPPORTED_VERSION not in VERSION_DIFFERENCES


def test_installed_package_is_discovered(facts: dict[str, Any], site: Path) -> None:
    assert facts["entry_points"].keys() >= {PLUGIN}
    assert GROUP == "sglang.srt.plugins"
    assert facts["distribution"] == "hybridspec"
    assert Path(facts["plugin"]).is_relative_to(site), "the wheel must be tested, not the checkout"


def test_algorithm_answers_as_dflash_does(facts: dict[str, Any]) -> None:
    algorithm = facts["algorithm"]
    assert algorithm["custom"]
    assert algorithm["overlap"], "the overlap scheduler stays on"
    assert len(algorithm["answers"]) > 10
    assert algorithm["answers"] == algorithm["answers_of_dflash"]


def test_algorithm_has_every_method_that_sglang_calls(facts: dict[str, Any]) -> None:
    algorithm = facts["algorithm"]
    assert algorithm["missing"] == []
    assert sorted(algorithm["missing_in_base"]) == MISSING_IN_BASE
    assert algorithm["differing_signatures"] == []


def test_worker_is_a_dflash_worker_with_the_same_methods(facts: dict[str, Any]) -> None:
    worker = facts["worker"]
    assert worker["bases"][1] == "DFlashWorkerV2"
    overrides = worker["overrides"]
    assert {"__init__", "forward_batch_generation", "init_attention_backends"} <= overrides.keys()
    for name, (ours, stock) in overrides.items():
        assert ours == stock, name


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_what_the_plugin_was_written_for(name: str, facts: dict[str, Any]) -> None:
    found = {key.split(":")[1]: value for key, value in facts["signatures"].items()}
    assert found.keys() == SIGNATURES.keys()
    assert found[name] == SIGNATURES[name].split()


def test_doctor_has_sglang_register_the_algorithm(
    sglang_python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    # SGLang's own process starts without our script, so the interpreter makes it importable.
    (tmp_path / "sitecustomize.py").write_text("import cpu_torchvision\n")
    paths = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    program = "from hybridspec.sglang_plugin.installation import examine; print(examine())"
    done = subprocess.run(
        [sglang_python, "-c", program],
        env={**environment, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"version='{SUPPORTED_VERSION}', version_problem=''" in done.stdout
    assert "load_problem='', registration_problem=''" in done.stdout


def test_serve_stops_where_there_is_no_gpu(
    sglang_python: str, environment: dict[str, str], tmp_path: Path
) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a GPU")
    program = "from hybridspec.sglang_plugin.installation import check_installation as check\n"
    program += "try: check()\nexcept Exception as error: print(type(error).__name__, error)"
    done = subprocess.run(
        [sglang_python, "-c", program],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("EnvironmentMissing --engine sglang needs an NVIDIA GPU")
