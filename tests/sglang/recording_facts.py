"""What the real package's requests look like to the recorder, and to the self-check."""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

from array import array
from dataclasses import asdict
from typing import Any


def recording_facts(server_args: Any) -> dict[str, Any]:
    """Endings, sampling, tags and refusals of real requests; bodies as SGLang takes them."""
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.io_struct import GenerateReqInput, ProfileReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

    from hybridspec.calibrate.prompts import Prompt
    from hybridspec.calibrate.rounds import TraceIdentity
    from hybridspec.collect import TokenPrompt
    from hybridspec.compat.sglang_0_5_16_recording import ending_of, members_of, sampling_of
    from hybridspec.compat.sglang_0_5_16_requests import refuse_wrong_requests
    from hybridspec.sglang_plugin.controls import LengthRequest
    from hybridspec.sglang_plugin.server_api import generate_body
    from hybridspec.sglang_plugin.server_recording import recording_body

    identity = TraceIdentity("t", "d", 1, 1, 1, 9, 0.0, 24, "p")
    prompt = TokenPrompt(Prompt("a", "b", "test", "text"), (1, 2, 3))
    body = GenerateReqInput(**recording_body([prompt], {"a": "a"}, identity))
    body.normalize_batch_and_arguments()
    checked = GenerateReqInput(
        **{**generate_body([[1, 2]], new_tokens=9, verify_length=4), "rid": ["check-1"]}
    )
    checked.normalize_batch_and_arguments()

    req = request(body[0].sampling_params)
    found: dict[str, Any] = {
        "running": ending_of(req),
        "greedy": sampling_of(req),
        "members": [(m.row, m.key, asdict(m.tag)) for m in members_of([request({}), req])],
        "sampled": sampling_of(request({"temperature": 0.7, "top_p": 0.9})),
        "rid": checked[0].rid,
        "fields": [
            name
            for name in ("tp_size", "dp_size", "nnodes", "host", "port", "api_key", "ssl_certfile")
            if name not in vars(server_args)
        ],
        "profile": ProfileReq(
            output_dir="x", num_steps=3, activities=["GPU"], with_stack=False, record_shapes=False
        ).num_steps,
    }
    # A verification may emit past the end; `finished_len` says where that was.
    req.output_ids.extend([5, 6, 7, 8])
    req.finished_reason, req.finished_len = FINISH_LENGTH(length=3), 3
    found["ended"] = asdict(ending_of(req))  # pyright: ignore[reportArgumentType]
    req.finished_reason = FINISH_ABORT("left")
    found["aborted"] = asdict(ending_of(req))["aborted"]  # pyright: ignore[reportArgumentType]
    stock = scheduler.validate_dflash_request
    for records in (False, True):
        refuse_wrong_requests(LengthRequest(), records=records, unreachable=lambda lengths: None)
        fresh = request(body[0].sampling_params)
        found[f"refused_{records}"] = scheduler.validate_dflash_request(fresh, True)
        scheduler.validate_dflash_request = stock
    refuse_wrong_requests(
        LengthRequest(), records=False, unreachable=lambda lengths: f"{lengths.distinct_experts}"
    )
    experts = generate_body([[1, 2]], new_tokens=9, verify_length=4, distinct_experts=20)
    asked = GenerateReqInput(**experts)
    asked.normalize_batch_and_arguments()
    fresh = request(asked[0].sampling_params)
    found["unreachable"] = scheduler.validate_dflash_request(fresh, True)
    scheduler.validate_dflash_request = stock
    return found


def request(sampling: dict[str, Any]) -> Any:
    """A request as the scheduler makes one."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**sampling)
    params.normalize(None)
    return Req("r0", "", array("q", [1, 2, 3]), params)
