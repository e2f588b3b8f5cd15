"""Runs inside SGLang's environment: what the real package says about everything we build on.

    python contract_facts.py TARGET DRAFTER SHORT_DRAFTER

SHORT_DRAFTER is a drafter of blocks of 8 rows.

Writes one JSON object as the last line. The tests read it; nothing here judges.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from importlib import metadata
from typing import Any
from unittest import mock

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
from recording_facts import recording_facts

# Where SGLang's methods are subclassed, patched or called by names that are not public.
SIGNATURES = (
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.__init__",
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.init_attention_backends",
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2.forward_batch_generation",
    "sglang.srt.speculative.dflash_worker_v2:DFlashWorkerV2._maybe_build_draft_sampler",
    "sglang.srt.speculative.dflash_worker_v2:"
    "DFlashWorkerV2._greedy_sample_from_vocab_parallel_head",
    "sglang.srt.speculative.dflash_worker_v2:"
    "DFlashWorkerV2._update_target_mamba_state_after_verify",
    "sglang.srt.speculative.dflash_worker_v2:_DflashDraftSampler.__init__",
    "sglang.srt.speculative.dflash_worker_v2:_DflashDraftSampler.__call__",
    "sglang.srt.speculative.dflash_utils:_get_or_create_chain_verify_buffers",
    "sglang.srt.managers.scheduler:validate_dflash_request",
    "sglang.srt.managers.overlap_utils:FutureMap.__init__",
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    "sglang.srt.arg_groups.speculative_hook:_handle_dflash",
    "sglang.srt.arg_groups.overrides:resolved_view",
    "sglang.srt.mem_cache.memory_pool:MambaPool.__init__",
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_indices",
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.translate_mamba_indices",
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_ping_pong_other_idx",
    "sglang.srt.mem_cache.memory_pool:HybridReqToTokenPool.get_mamba_ping_pong_keep_idx",
    "sglang.srt.managers.schedule_batch:set_mamba_track_indices_from_reqs",
    "sglang.srt.managers.scheduler_components.batch_result_processor:"
    "SchedulerBatchResultProcessor._mamba_check_track_boundary",
    "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
    "sglang.srt.layers.attention.hybrid_linear_attn_backend:"
    "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
    "sglang.srt.layers.attention.linear.gdn_backend:GDNAttnBackend.forward_extend",
    "sglang.srt.models.qwen2_moe:Qwen2MoeSparseMoeBlock._forward_router_experts",
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm.register",
    "sglang.srt.plugins:load_plugins",
)


def find(name: str) -> Any:
    """The object that `module:qualified.name` names."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def parameters(function: Any) -> list[str]:
    """Names of parameters in order; keyword-only ones behind a `*`, defaults as `=`."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        default = "=" if parameter.default is not parameter.empty else ""
        names.append(mark.get(parameter.kind, "") + parameter.name + default)
    return names


def signatures() -> dict[str, list[str] | str]:
    """Parameters by name, or the error that came instead."""
    found: dict[str, list[str] | str] = {}
    for name in SIGNATURES:
        try:
            found[name] = parameters(find(name))
        except (ImportError, AttributeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def algorithm_facts() -> dict[str, Any]:
    """The registered algorithm beside SGLang's own enumeration and base class."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    algorithm = SpeculativeAlgorithm.from_string("HYBRIDSPEC")
    dflash = SpeculativeAlgorithm.DFLASH
    methods = [
        name
        for name, value in vars(SpeculativeAlgorithm).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    predicates = [name for name in methods if name.startswith(("is_", "supports_", "need_"))]
    return {
        "class": type(algorithm).__name__,
        "custom": isinstance(algorithm, CustomSpecAlgo),
        "overlap": algorithm.supports_overlap,
        "missing": [name for name in methods if not hasattr(algorithm, name)],
        "missing_in_base": [name for name in methods if not hasattr(CustomSpecAlgo, name)],
        "answers": {name: getattr(algorithm, name)() for name in predicates},
        "answers_of_dflash": {name: getattr(dflash, name)() for name in predicates},
        "differing_signatures": [
            name
            for name in methods
            if hasattr(algorithm, name)
            and parameters(getattr(algorithm, name)) != parameters(getattr(dflash, name))
        ],
    }


def worker_facts(server_args: Any) -> dict[str, Any]:
    """The worker's overrides beside what they replace."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    worker = SpeculativeAlgorithm.from_string("HYBRIDSPEC").create_worker(server_args)
    overrides = {}
    for cls in worker.__mro__[:-1]:
        if not cls.__module__.startswith("hybridspec"):
            continue
        for name, value in vars(cls).items():
            stock = getattr(worker.__mro__[1], name, None)
            if inspect.isfunction(value) and inspect.isfunction(stock):
                overrides[name] = [parameters(value), parameters(stock)]
    return {"bases": [cls.__name__ for cls in worker.__mro__], "overrides": overrides}


def outcome(fields: dict[str, Any]) -> dict[str, Any]:
    """What the real `ServerArgs` says to `fields`."""
    from sglang.srt import server_args

    # Extra slots for states are asked for on a GPU alone, and are refused here before us.
    extra = fields.get("mamba_radix_cache_strategy") == "extra_buffer"
    cuda = mock.patch.object(server_args, "is_cuda", return_value=True)
    try:
        with cuda if extra else contextlib.nullcontext():
            args = server_args.ServerArgs(**fields)
    except Exception as error:  # whatever it raises is what is asked for
        return {"error": type(error).__name__, "message": str(error)}
    names = (
        "speculative_algorithm", "speculative_num_draft_tokens", "speculative_num_steps",
        "speculative_eagle_topk", "max_running_requests", "page_size", "disable_radix_cache",
        "disable_overlap_schedule", "tp_size", "served_model_name", "port",
    )  # fmt: skip
    return {"fields": {name: getattr(args, name) for name in names}}


def command_line(target: str, drafter: str) -> dict[str, Any]:
    """The fields that SGLang's own parser makes of the command line of `hybridspec serve`."""
    from sglang.srt.server_args import prepare_server_args

    from hybridspec.sglang_plugin.launch import Launch, arguments, with_defaults

    flags = with_defaults(("--tp-size", "1", "--device", "cuda"), max_batch=8)
    launch = Launch(target, drafter, "127.0.0.1", 8123, served_model_name="mine", flags=flags)
    args = prepare_server_args(arguments(launch)[2:])
    return {
        "model_path": args.model_path,
        "algorithm": args.speculative_algorithm,
        "drafter": args.speculative_draft_model_path,
        "port": args.port,
        "served_model_name": args.served_model_name,
        "max_running_requests": args.max_running_requests,
        "disable_radix_cache": args.disable_radix_cache,
    }


def plain_command_line(target: str) -> dict[str, Any]:
    """The same for the server without a drafter that `profile-latency` starts."""
    from sglang.srt.server_args import prepare_server_args

    from hybridspec.sglang_plugin.launch import plain_arguments, with_defaults

    said = ("--device", "cuda", "--speculative-draft-attention-backend", "triton")
    flags = with_defaults(said, max_batch=8)
    args = prepare_server_args(plain_arguments(target, "127.0.0.1", 8124, flags)[2:])
    return {
        "algorithm": args.speculative_algorithm,
        "drafter": args.speculative_draft_model_path,
        "port": args.port,
    }


def request_facts() -> dict[str, Any]:
    """What SGLang makes of the body that lengths are forced with, and the counts it answers."""
    from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.sampling.sampling_params import SamplingParams

    from hybridspec.sglang_plugin.server_api import generate_body

    body = GenerateReqInput(**generate_body([[1, 2], [3, 4]], new_tokens=9, verify_length=5))
    body.normalize_batch_and_arguments()
    sampling = SamplingParams(**body[1].sampling_params)
    source = inspect.getsource(TokenizerManager._calculate_spec_decoding_metrics)
    keys = ("spec_verify_ct", "spec_cap_lens_histogram", "spec_cap_length", "spec_accept_length")
    return {
        "batch_size": body.batch_size,
        "stream": body.stream,
        "custom_params": sampling.custom_params,
        "max_new_tokens": sampling.max_new_tokens,
        "ignore_eos": sampling.ignore_eos,
        "counts": [key for key in keys if f'meta_info["{key}"]' in source],
        "counts_only_where": _conditions_of_counts(TokenizerManager._handle_batch_output),
        "abort_all": AbortReq(rid="", abort_all=True).abort_all,
    }


def _conditions_of_counts(handle: Any) -> list[str]:
    """Conditions around the call that adds the counts of rounds to an answer's chunk."""
    import ast
    import textwrap

    found: list[str] = []

    def visit(node: ast.AST, conditions: list[str]) -> None:
        if isinstance(node, ast.Call) and "_calculate_spec_decoding_metrics" in ast.unparse(
            node.func
        ):
            found.extend(conditions)
        for child in ast.iter_child_nodes(node):
            more = []
            if isinstance(node, ast.If) and child in node.body:
                more = [ast.unparse(node.test)]
            visit(child, conditions + more)

    visit(ast.parse(textwrap.dedent(inspect.getsource(handle))), [])
    return found


def identities(target: str, drafter: str, base: dict[str, Any]) -> dict[str, Any]:
    """Backends and graph tiers of the resolved fields, as an object and as `/server_info` says."""
    import dataclasses

    from sglang.srt.server_args import ServerArgs

    from hybridspec.sglang_plugin.identity import backends, graph_tiers

    args = ServerArgs(**base)
    told = json.loads(json.dumps(dataclasses.asdict(args), default=str))
    fields = vars(args)
    return {
        "backends": [backends(fields), backends(told)],
        "tiers": [graph_tiers(fields), graph_tiers(told)],
    }


def main() -> None:
    """Collect and write."""
    target, drafter, short_drafter = sys.argv[1:4]
    with contextlib.redirect_stdout(sys.stderr):
        from sglang.srt.plugins import load_plugins

        points = metadata.entry_points(group="sglang.srt.plugins")
        load_plugins()
        from sglang.srt.server_args import ServerArgs

        from hybridspec.sglang_plugin.refusals import RULES

        base: dict[str, Any] = {
            "model_path": target,
            "speculative_draft_model_path": drafter,
            "speculative_algorithm": "hybridspec",
            "disable_radix_cache": True,
            "device": "cuda",
        }
        facts = {
            "version": metadata.version("sglang"),
            "packages": str(metadata.distribution("sglang").locate_file("")),
            "entry_points": {point.name: point.value for point in points},
            "distribution": metadata.distribution("hybridspec").metadata["Name"],
            "plugin": importlib.import_module("hybridspec.sglang_plugin").__file__,
            "algorithm": algorithm_facts(),
            "worker": worker_facts(ServerArgs(**base)),
            "signatures": signatures(),
            "accepted": outcome(base),
            "refusals": {rule.flag: outcome({**base, **rule.example}) for rule in RULES},
            "short_drafter": outcome({**base, "speculative_draft_model_path": short_drafter}),
            "command_line": command_line(target, drafter),
            "plain_command_line": plain_command_line(target),
            "request": request_facts(),
            "identities": identities(target, drafter, base),
            "recording": recording_facts(ServerArgs(**base)),
        }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
