"""What the plugin refuses at start: each flag with its reason and remedy.

The rules are data, so that `docs/sglang.md` and the tests against the real `ServerArgs` hold
exactly what is enforced. Nothing here imports SGLang or torch at start.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.errors import EngineRefusal
from hybridspec.sglang_plugin.radix_refusals import (
    RADIX_RULES,
    STOCK_WITH_RADIX_CACHE,
    caches_states,
)
from hybridspec.sglang_plugin.refusal_rule import Rule, other_than, over_one, switched_on

SUPPORTED_VERSION = "0.5.16"

# What was read in the source of other releases; the reason that is shown for them.
VERSION_DIFFERENCES: Mapping[str, str] = {
    "0.5.23": "its DFLASH worker is made without its parallel state and its "
    "forward_batch_generation takes a grammar_barrier, recurrent states are committed by "
    "req_pool_indices, and routers may be asked to defer_finalize"
}

# Runner backends whose router gives no expert ids to observe or to mask.
BACKENDS_WITHOUT_IDS = (
    "flashinfer_trtllm",
    "flashinfer_mxfp4",
    "triton_kernel",
    "experimental_sgl_trtllm",
)


def _moe_runner(args: Any) -> str | None:
    value = args.moe_runner_backend
    return f"--moe-runner-backend {value}" if value in BACKENDS_WITHOUT_IDS else None


def _decode_graph(args: Any) -> str | None:
    config = args.cuda_graph_config
    if config is None or isinstance(config, dict | str):  # not resolved yet
        return "--disable-cuda-graph" if args.disable_cuda_graph else None
    backend = config.decode.backend
    return None if backend == "full" else f"--cuda-graph-backend-decode {backend}"


def _linear_attention(args: Any) -> str | None:
    decode = args.linear_attn_decode_backend or args.linear_attn_backend
    prefill = args.linear_attn_prefill_backend or args.linear_attn_backend
    if decode != "triton":
        return f"--linear-attn-decode-backend {decode}"
    return None if prefill == "triton" else f"--linear-attn-prefill-backend {prefill}"


def _block_size(args: Any) -> str | None:
    for name in ("speculative_num_draft_tokens", "speculative_dflash_block_size"):
        value = getattr(args, name)
        if value is not None:
            wrong = int(value) != BLOCK_SIZE
            return f"--{name.replace('_', '-')} {value}" if wrong else None
    drafter = str(args.speculative_draft_model_path or "")
    value = _drafter_block_size(Path(drafter))
    return None if value in (None, BLOCK_SIZE) else f"a drafter with block_size {value} ({drafter})"


def _drafter_block_size(folder: Path) -> int | None:
    """Rows of a drafter's blocks by its configuration, None where no file tells."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        value = (config.get("dflash_config") or {}).get("block_size", config.get("block_size"))
        return None if value is None else int(value)
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # a hub's name, or a file that SGLang refuses in its own words


def _thresholds(args: Any) -> str | None:
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (value := getattr(args, name)) != 1.0:
            return f"--{name.replace('_', '-')} {value}"
    return None


def _no_drafter(args: Any) -> str | None:
    missing = args.speculative_draft_model_path is None
    return "no --speculative-draft-model-path" if missing else None


RULES: tuple[Rule, ...] = (
    Rule(
        "--device other than cuda",
        "the DFLASH path of SGLang and the kernels of the plugin run on NVIDIA GPUs alone",
        "serve on a GPU, or use `hybridspec serve --engine reference`",
        lambda args: None if str(args.device).startswith("cuda") else f"--device {args.device}",
        {"device": "cpu"},
    ),
    Rule(
        "no --speculative-draft-model-path",
        "there is nothing to draft with",
        "name the folder of the DFlash drafter of this target",
        _no_drafter,
        {"speculative_draft_model_path": None},
    ),
    Rule(
        f"--speculative-num-draft-tokens other than {BLOCK_SIZE}, also by "
        "--speculative-dflash-block-size or by the drafter's config",
        f"calibration, costs and kernels are of blocks of {BLOCK_SIZE} rows",
        f"take a drafter with block_size {BLOCK_SIZE} and leave both flags out; shorter rounds "
        "are what the plugin chooses by itself",
        _block_size,
        {"speculative_num_draft_tokens": 8},
    ),
    Rule(
        "--speculative-accept-threshold-single or --speculative-accept-threshold-acc below 1",
        "drafts that the target would not have sampled would be accepted, so the output would no "
        "longer be that of the target",
        "leave both at 1.0",
        _thresholds,
        {"speculative_accept_threshold_single": 0.5},
    ),
    Rule(
        "--speculative-adaptive",
        "it swaps block sizes and graphs from the host, while the plugin chooses lengths on the "
        "device",
        "leave it out",
        switched_on(speculative_adaptive="--speculative-adaptive"),
        {"speculative_adaptive": True},
    ),
    Rule(
        "--moe-runner-backend " + ", ".join(BACKENDS_WITHOUT_IDS),
        "this runner routes inside its own kernel: rows past the length would still load experts, "
        "because there are no expert ids to mask",
        "use --moe-runner-backend triton",
        _moe_runner,
        {"moe_runner_backend": "triton_kernel"},
    ),
    Rule(
        "--ep-size above 1",
        "masked rows keep the experts of their request's first row, which other ranks may hold",
        "use --tp-size with --ep-size 1",
        over_one("--ep-size", "ep_size"),
        {"ep_size": 2, "tp_size": 2},
    ),
    Rule(
        "--moe-a2a-backend other than none",
        "its dispatch sends masked rows to other ranks",
        "leave it out; tensor parallelism needs no all-to-all",
        other_than("--moe-a2a-backend", "moe_a2a_backend", "none", None),
        {"moe_a2a_backend": "deepep", "tp_size": 2},
    ),
    Rule(
        "--enable-dp-attention",
        "ranks would hold different requests and so choose different lengths in one graph",
        "use --tp-size alone, or several servers behind a router",
        switched_on(enable_dp_attention="--enable-dp-attention"),
        {"enable_dp_attention": True, "dp_size": 2, "tp_size": 2},
    ),
    Rule(
        "--pp-size above 1",
        "the first router's correction and the acceptance of a round must see all layers",
        "use --tp-size",
        over_one("--pp-size", "pp_size"),
        {"pp_size": 2},
    ),
    Rule(
        "--attn-cp-size above 1",
        "the key-value rows of a block would lie on several ranks",
        "use --tp-size",
        over_one("--attn-cp-size", "attn_cp_size"),
        {"attn_cp_size": 2, "tp_size": 2},
    ),
    Rule(
        "--disaggregation-mode prefill or decode",
        "the first draft input of a request that another server has read is not built",
        "serve prefill and decode in one process group",
        other_than("--disaggregation-mode", "disaggregation_mode", "null", None),
        {"disaggregation_mode": "decode"},
    ),
    Rule(
        "--enable-two-batch-overlap or --enable-single-batch-overlap",
        "two halves of a batch in flight would share the buffer of lengths",
        "leave it out; the overlap scheduler stays on",
        switched_on(
            enable_two_batch_overlap="--enable-two-batch-overlap",
            enable_single_batch_overlap="--enable-single-batch-overlap",
        ),
        {"enable_two_batch_overlap": True},
    ),
    Rule(
        "--enable-pdmux",
        "prefill and verification in two streams would share the buffer of lengths",
        "leave it out",
        switched_on(enable_pdmux="--enable-pdmux"),
        {"enable_pdmux": True},
    ),
    Rule(
        "--enable-torch-compile",
        "the compiler would inline the layers at which the plugin masks rows",
        "leave it out",
        switched_on(enable_torch_compile="--enable-torch-compile"),
        {"enable_torch_compile": True},
    ),
    Rule(
        "--disable-cuda-graph, --disable-decode-cuda-graph, or --cuda-graph-backend-decode other "
        "than full",
        "the length of a round lives on the device, inside one captured graph for each batch size",
        "leave decode graphs on with --cuda-graph-backend-decode full",
        _decode_graph,
        {"cuda_graph_backend_decode": "disabled"},
    ),
    Rule(
        "--linear-attn-backend, -decode-backend or -prefill-backend other than triton",
        "the plugin takes the place of the Triton verification of Gated DeltaNet layers and shares "
        "its layout of states",
        "use triton for all three",
        _linear_attention,
        {"linear_attn_backend": "cutedsl"},
    ),
    Rule(
        "--dtype other than auto or bfloat16",
        "the kernels take bfloat16 conv windows, keys and weights",
        "use --dtype bfloat16",
        other_than("--dtype", "dtype", "auto", "bfloat16"),
        {"dtype": "float16"},
    ),
    Rule(
        "--mamba-ssm-dtype float16",
        "the kernels take recurrent states in float32 or bfloat16",
        "use --mamba-ssm-dtype float32",
        lambda args: "--mamba-ssm-dtype float16" if args.mamba_ssm_dtype == "float16" else None,
        {"mamba_ssm_dtype": "float16"},
    ),
    Rule(
        "--enable-page-major-kv-layout",
        "it lays recurrent states out in another order than the kernels read",
        "leave it out",
        switched_on(enable_page_major_kv_layout="--enable-page-major-kv-layout"),
        {"enable_page_major_kv_layout": True},
    ),
    Rule(
        "--enable-linear-replayssm or --enable-gdn-replayssm-spec",
        "both keep a ring of rows that DFLASH rounds never advance, beside the factors of the "
        "plugin",
        "leave it out; the plugin keeps no state for each row either",
        switched_on(
            enable_linear_replayssm="--enable-linear-replayssm",
            enable_gdn_replayssm_spec="--enable-gdn-replayssm-spec",
        ),
        {"enable_linear_replayssm": True},
    ),
    *RADIX_RULES,
    Rule(
        "--enable-streaming-session",
        "a session's next turn takes the recurrent state of the last round as it is, also where "
        "that round went on past the end of the answer",
        "leave it out",
        switched_on(enable_streaming_session="--enable-streaming-session"),
        {"enable_streaming_session": True},
    ),
    Rule(
        "--enable-hierarchical-cache or --enable-lmcache",
        "both keep prefixes in host memory, without the recurrent states at their end",
        "leave it out",
        switched_on(
            enable_hierarchical_cache="--enable-hierarchical-cache",
            enable_lmcache="--enable-lmcache",
        ),
        {"enable_lmcache": True},
    ),
    Rule(
        "--enable-lora or --lora-paths",
        "hazards were calibrated and the drafter was trained for the target without adapters",
        "merge the adapter into the target's weights and calibrate again",
        lambda args: "--enable-lora" if args.enable_lora or args.lora_paths else None,
        {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["q_proj"]},
    ),
)


def check_version(version: str) -> None:
    """Refuse a release of SGLang that the plugin was not written for.

    Raises:
        EngineRefusal: with what is known to differ.
    """
    if version == SUPPORTED_VERSION:
        return
    known = VERSION_DIFFERENCES.get(version)
    because = f": {known}" if known else ", whose workers and backends may differ"
    raise EngineRefusal(
        f"SGLang {version} is installed{because}; the plugin is written for {SUPPORTED_VERSION}: "
        f"install sglang=={SUPPORTED_VERSION}"
    )


def installed_version() -> str | None:
    """Version of the installed SGLang, None if there is none; imports nothing."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def refused(server_args: Any, target: str = "hybridspec") -> list[str]:
    """One sentence (flag and value, reason, remedy) for each rule that `server_args` breaks."""
    args = _resolved(server_args)
    sentences = [
        f"{found} is refused with HYBRIDSPEC: {rule.reason}; {rule.remedy}"
        for rule in RULES
        if (found := rule.finding(args)) is not None
    ]
    if target == "stock" and caches_states(args):
        sentences.append(STOCK_WITH_RADIX_CACHE)
    return sentences


def check_server_args(server_args: Any, target: str = "hybridspec") -> None:
    """Refuse what the plugin cannot serve; all of it at once.

    Args:
        server_args: a `sglang.srt.server_args.ServerArgs` of 0.5.16, while it resolves or after.
            Called before the draft block size is inferred, it accepts an unset one.
        target: the key of the configuration.

    Raises:
        EngineRefusal: with flag, value, reason and remedy of each refusal.
    """
    version = installed_version()
    if version is not None:
        check_version(version)
    if sentences := refused(server_args, target):
        raise EngineRefusal("; also, ".join(sentences))


def _resolved(server_args: Any) -> Any:
    """Values as the engine will use them: defaults of the model wait in a list until the end."""
    if getattr(server_args, "_declarations_materialized", False) or not hasattr(
        server_args, "_resolved_overrides"
    ):
        return server_args
    from sglang.srt.arg_groups.overrides import resolved_view  # pyright: ignore

    return resolved_view(server_args)
