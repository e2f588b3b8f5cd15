"""What `hybridspec serve` does: check the bundle, load the pair, serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridspec.artifacts.bundle import Bundle, load_bundle
from hybridspec.artifacts.identity import check_field_names, check_identity
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.cli._certificates import say_match
from hybridspec.cli._options import DtypeName
from hybridspec.cli._output import Output
from hybridspec.errors import BundleError, Interrupted, UsageError
from hybridspec.pair import (
    PairFolders,
    Placement,
    calibration_identity,
    cost_identity,
    pair_folders,
    place,
)
from hybridspec.request import LengthRule

if TYPE_CHECKING:
    from hybridspec.policy import Policy

DEFAULT_MAX_BATCH = 4
DEFAULT_MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec serve`, in its words."""

    target: Path | None
    drafter: Path | None
    bundle: Path | None
    host: str
    port: int
    served_model_name: str | None
    max_batch: int | None
    max_context: int | None
    policy: Literal["auto", "fixed", "none"]
    fixed_length: int
    router_correction: Literal["select", "paper", "off"]
    allow: tuple[str, ...]
    queue_limit: int
    dtype: DtypeName
    device: str
    threads: int | None
    engine: Literal["reference"]


@dataclass(frozen=True)
class Choice:
    """How requests choose their lengths unless they say otherwise.

    Attributes:
        note: why, for the summary at the start.
    """

    rule: LengthRule
    note: str


def run(request: Request, output: Output) -> None:
    """Serve until told to stop; leaves with the server's exit code."""
    from hybridspec.reference.config import load_target_config
    from hybridspec.server.run import bind, serve

    check_field_names(request.allow)
    folders = pair_folders(request.target, request.drafter, drafter_needed=request.policy != "none")
    config = load_target_config(folders.target)
    # Before anything slow: a taken port or a bundle that does not fit should be known at once.
    listener = bind(request.host, request.port)
    try:
        bundle = None if request.bundle is None else load_bundle(request.bundle)
        threads = request.threads
        if threads is None and bundle is not None and bundle.cost is not None:
            # Costs hold for the thread count they were measured with.
            threads = bundle.cost.identity.threads
        placement = place(device=request.device, dtype=request.dtype, threads=threads)
        policy = None
        max_batch = request.max_batch or DEFAULT_MAX_BATCH
        if bundle is not None:
            if request.max_batch is None and bundle.cost is not None:
                max_batch = min(max_batch, bundle.cost.identity.max_batch)
            check_fits(
                bundle,
                folders,
                placement,
                max_batch=max_batch,
                allow=request.allow,
                output=output,
            )
            policy = make_policy(bundle, placement, request.router_correction, output)
        choice = choose(request, policy)
        if request.policy == "auto" and policy is None:
            output.warn(f"no bundle is given, so there is no policy: {choice.note}")
        if bundle is not None:
            correction = request.router_correction
            say_match(bundle, folders, placement, choice.rule, correction, output)

        from hybridspec.reference.loading import load_pair
        from hybridspec.reference.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(folders.target)
        engine = load_pair(
            folders.target,
            folders.drafter,
            dtype=placement.dtype,
            device=placement.device,
            max_batch=max_batch,
            max_context=request.max_context
            or min(DEFAULT_MAX_CONTEXT, config.max_position_embeddings),
            policy=policy,
        )
    except BaseException:
        listener.close()
        raise
    code = serve(
        engine,
        tokenizer,
        model_name=request.served_model_name or folders.name,
        listener=listener,
        default_rule=choice.rule,
        queue_limit=request.queue_limit,
        policy_note=choice.note,
        engine_note=f"{request.engine}, {placement.dtype} on {placement.device}, threads: "
        f"{placement.threads}",
        say=output.note,
    )
    if code:
        raise Interrupted("the requests that still ran were given up")


def check_fits(
    bundle: Bundle,
    folders: PairFolders,
    placement: Placement,
    *,
    max_batch: int,
    allow: tuple[str, ...] = (),
    output: Output,
) -> None:
    """Refuse a bundle of another pair or machine, or one that cannot carry a policy.

    Args:
        max_batch: requests decoded together.
        allow: fields of the identities whose refusal becomes a warning.

    Raises:
        BundleError: naming the part or field that is wrong, and the remedy.
    """
    for warning in bundle.warnings:
        output.warn(warning)
    calibration, cost = bundle.calibration, bundle.cost
    if calibration is None:
        raise BundleError(
            f"{bundle.folder} has no calibration part; a policy needs hazards: run "
            f"`hybridspec calibrate --out {bundle.folder}` for this pair"
        )
    if cost is None:
        raise BundleError(
            f"{bundle.folder} has no cost part; a policy needs this machine's costs: run "
            f"`hybridspec profile-latency --out {bundle.folder}`"
        )
    if folders.drafter is None:
        raise UsageError("--bundle is given without --drafter; a policy drafts: add --drafter DIR")
    # What requests sample with and what they say is theirs: those fields cannot differ here.
    current = calibration_identity(
        folders,
        dtype=placement.dtype,
        temperature=calibration.identity.temperature,
        top_p=calibration.identity.top_p,
        prompts_digest=None,
    )
    warnings = check_identity(calibration.identity, current, allow=allow)
    warnings += check_identity(
        cost.identity, cost_identity(folders, placement, max_batch=max_batch), allow=allow
    )
    for warning in warnings:
        output.warn(warning)
    if cost.throughput is None:
        raise BundleError(
            f"{bundle.folder} has no throughput fitted for its two parts; the policy is priced "
            "with it: run `hybridspec calibrate --from-trace DIR --out "
            f"{bundle.folder}` with the pair's trace"
        )


def choose(request: Request, policy: Policy | None) -> Choice:
    """The rule of requests that choose nothing themselves."""
    if request.policy == "none":
        return Choice(LengthRule("none"), "--policy none: plain decoding, nothing is drafted")
    if request.policy == "fixed":
        length = request.fixed_length
        return Choice(
            LengthRule("fixed", length), f"--policy fixed: every round verifies {length} rows"
        )
    if policy is None:
        return Choice(LengthRule("fixed", BLOCK_SIZE), f"every round verifies {BLOCK_SIZE} rows")
    return Choice(
        LengthRule("policy"),
        f"bundle {request.bundle}: 1 to {BLOCK_SIZE} rows a round, "
        f"{policy.hazard_model.describe()}, router correction {policy.correction}",
    )


def make_policy(
    bundle: Bundle,
    placement: Placement,
    correction: Literal["select", "paper", "off"],
    output: Output,
) -> Policy:
    """The policy of a bundle that `check_fits` let pass."""
    from hybridspec.hazards import served_hazards
    from hybridspec.policy import Policy

    calibration, cost = bundle.calibration, bundle.cost
    assert calibration is not None
    assert cost is not None
    assert cost.throughput is not None
    model, reason = served_hazards(calibration, cost.throughput, device=placement.device)
    if reason is not None:
        output.warn(f"{bundle.folder}: {reason}")
    return Policy(
        calibration.hazard,
        cost.step,
        cost.throughput,
        calibration.routing,
        correction=correction,
        device=placement.device,
        hazard_model=model,
    )
