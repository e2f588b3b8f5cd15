"""What recording reads of SGLang 0.5.16: how its requests end, and how they sample."""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from hybridspec.errors import EngineRefusal, UsageError
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.controls import record_tag
from hybridspec.sglang_plugin.recorded_requests import Ending, RecordedRequests
from hybridspec.sglang_plugin.round_recorder import Member, RoundRecorder
from hybridspec.sglang_plugin.rounds import Rounds

# What a server cannot know of a trace: prompts and limits are the client's.
UNKNOWN = "unrecorded"


def ending_of(req: Any) -> Ending | None:
    """How a `Req` ended, None while it runs."""
    reason = req.finished_reason
    if reason is None:
        return None
    return Ending(
        prompt_tokens=len(req.origin_input_ids),
        # Rounds may emit past the end; SGLang answers with these.
        tokens=list(req.output_ids_through_stop),
        aborted=reason.to_json()["type"] == "abort",
    )


def sampling_of(req: Any) -> tuple[float, float]:
    """Temperature and top-p of a `Req`; SGLang keeps greedy decoding as the likeliest of one."""
    sampling = req.sampling_params
    temperature = 0.0 if sampling.top_k == 1 else float(sampling.temperature)
    return temperature, float(sampling.top_p)


def members_of(reqs: Sequence[Any]) -> list[Member]:
    """Requests of a batch that ask to be recorded."""
    found = []
    for row, req in enumerate(reqs):
        params = req.sampling_params.custom_params
        if not isinstance(params, dict) or not params:
            continue
        try:
            tag = record_tag(params)
        except UsageError:
            continue  # refused when it arrived
        if tag is not None:
            found.append(Member(row, str(req.rid), req, tag))
    return found


def make_recorder(
    config: PluginConfig, rounds: Rounds, server: dict[str, Any], *, dtype: str
) -> RoundRecorder:
    """The recorder of one worker.

    Args:
        server: fields of `ServerArgs`.
        dtype: of the target.

    Raises:
        ModelError: models that are no local folders, so that no digest names them.
        EngineRefusal: a folder that cannot be written, or routes of another model.
    """
    from hybridspec.calibrate.rounds import TraceIdentity
    from hybridspec.pair import calibration_identity
    from hybridspec.reference.config import load_target_config
    from hybridspec.sglang_plugin.identity import pair_of

    assert config.record is not None
    assert rounds.drafts is not None
    try:
        config.record.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineRefusal(
            f"record {config.record} cannot be made ({error.strerror}): name another folder"
        ) from error
    folders = pair_of(server)
    target = load_target_config(folders.target)
    kept_XRK = None
    if config.record_routes:
        experts = getattr(rounds.target, "experts", None)
        kept_XRK = None if experts is None else experts.kept_XRK
        found = None if kept_XRK is None else (kept_XRK.shape[0], kept_XRK.shape[2])
        if found != (target.num_layers, target.experts_per_token):
            raise EngineRefusal(
                f"experts of {found} layers and top-k are at hand, the target has "
                f"{target.num_layers} and {target.experts_per_token}: leave record_routes out"
            )

    @cache
    def identity(temperature: float, top_p: float) -> TraceIdentity:
        pair = calibration_identity(
            folders, dtype=dtype, temperature=temperature, top_p=top_p, prompts_digest=UNKNOWN
        )
        return TraceIdentity(
            target_digest=pair.target_digest,
            drafter_digest=pair.drafter_digest,
            layers=target.num_layers,
            topk=target.experts_per_token,
            experts=target.num_experts,
            vocab_size=target.vocab_size,
            temperature=temperature,
            max_new_tokens=0,
            prompts_digest=UNKNOWN,
            dtype=dtype,
            top_p=top_p,
            group_size=1,
        )

    requests = RecordedRequests(
        config.record, ending=ending_of, sampling=sampling_of, identity=identity
    )
    return RoundRecorder(
        rounds.state,
        rounds.drafts.features,
        requests,
        kept_XRK=kept_XRK,
        num_experts=target.num_experts,
    )
