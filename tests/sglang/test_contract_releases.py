"""Where another release of SGLang differs from the one that the plugin is written for.

`HYBRIDSPEC_SGLANG_NEXT` names a folder with the files of that release. They are read, not imported:
what they import is of other versions again.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hybridspec.errors import EngineRefusal
from hybridspec.sglang_plugin.refusals import VERSION_DIFFERENCES, check_version

NEXT = "0.5.23"
# Parameters there, for what has others than in 0.5.16.
DIFFERENCES = {
    "DFlashWorkerV2.__init__": "self server_args gpu_id nccl_port target_worker",
    "DFlashWorkerV2.forward_batch_generation": (
        "self batch on_publish= grammar_barrier= pp_proxy_tensors="
    ),
    "DFlashWorkerV2._update_target_mamba_state_after_verify": (
        "self * batch seq_lens_pre_verify seq_lens_post_verify commit_lens"
    ),
    "TpModelWorker.forward_batch_generation": (
        "self batch forward_batch= pp_proxy_tensors= is_verify= skip_attn_backend_init= "
        "* capture_hidden_mode= return_kv_loc_plan="
    ),
    "MambaPool.__init__": (
        "self * size spec_state_size cache_params mamba_layer_ids device enable_memory_saver= "
        "speculative_num_draft_tokens= speculative_eagle_topk= enable_linear_replayssm= "
        "linear_replayssm_cache_len= envelope_layout= enable_linear_replayssm_spec="
    ),
    "set_mamba_track_indices_from_reqs": "batch track_positions=",
    "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify": (
        "self last_correct_step_indices mamba_track_indices mamba_steps_to_track model "
        "req_pool_indices="
    ),
    "Qwen2MoeSparseMoeBlock._forward_router_experts": "self hidden_states * defer_finalize=",
}


@pytest.fixture(scope="module")
def packages() -> Path:
    path = os.environ.get("HYBRIDSPEC_SGLANG_NEXT")
    if not path:
        pytest.skip(f"HYBRIDSPEC_SGLANG_NEXT names no folder with SGLang {NEXT}")
    return Path(path)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """As `contract_facts.parameters` writes them."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    names = [arg.arg + ("=" if n >= required else "") for n, arg in enumerate(plain)]
    if given.vararg is not None:
        names.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        names.append("*")
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        names.append(arg.arg + ("=" if default is not None else ""))
    return [*names, f"**{given.kwarg.arg}"] if given.kwarg is not None else names


def read_parameters(packages: Path, name: str) -> list[str] | None:
    """Parameters of `module:qualified.name` by its file, None where it is not there."""
    module, _, path = name.partition(":")
    stem = packages / Path(*module.split("."))
    files = [file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()]
    if not files:
        return None
    node: Any = ast.parse(files[0].read_text(encoding="utf-8"))
    for line in node.body:
        if isinstance(line, ast.ImportFrom) and path in [alias.name for alias in line.names]:
            return read_parameters(packages, f"{line.module}:{path}")
    for part in path.split("."):
        node = next((n for n in node.body if getattr(n, "name", None) == part), None)
        if node is None:
            return None
    return parameters(node)


def test_files_say_what_the_imported_release_says(facts: dict[str, Any]) -> None:
    packages = Path(facts["packages"])
    for name, found in facts["signatures"].items():
        path = name.partition(":")[2]
        bound = path == "SpeculativeAlgorithm.register"  # a class method, without its class
        read = read_parameters(packages, name)
        assert read is not None, name
        assert read[bound:] == found, name


def test_differences_are_the_known_ones(facts: dict[str, Any], packages: Path) -> None:
    assert (packages / f"sglang-{NEXT}.dist-info").is_dir()
    found = {}
    for name, here in facts["signatures"].items():
        path = name.partition(":")[2]
        there = read_parameters(packages, name)
        if there is not None and path == "SpeculativeAlgorithm.register":
            there = there[1:]
        if there != here:
            found[path] = there
    expected = {name: text.split() for name, text in DIFFERENCES.items()}
    assert found == expected


def test_refusal_of_a_release_says_what_differs() -> None:
    with pytest.raises(EngineRefusal) as refused:
        check_version(NEXT)
    message = str(refused.value)
    assert VERSION_DIFFERENCES[NEXT] in message
    for name in re.findall(r"[a-z_]+_[a-z_]+", VERSION_DIFFERENCES[NEXT]):
        assert any(name in f"{path} {text}" for path, text in DIFFERENCES.items()), name
    with pytest.raises(EngineRefusal, match="may differ"):
        check_version("9.9.9")
    check_version("0.5.16")
