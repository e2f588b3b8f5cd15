"""What `hybridspec calibrate` will record, settled before any weight is loaded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridspec.artifacts.identity import CalibrationIdentity
from hybridspec.calibrate.model import MIN_PROMPTS
from hybridspec.calibrate.prompts import Prompt, prompts_digest, read_prompts, take_prompts
from hybridspec.calibrate.rounds import TraceIdentity
from hybridspec.cli._options import DtypeName
from hybridspec.collect import TokenPrompt, context_tokens, encode_prompts
from hybridspec.errors import NotEnoughData, UsageError
from hybridspec.pair import PairFolders, Placement, calibration_identity, pair_folders, place

if TYPE_CHECKING:
    from hybridspec.reference.config import TargetConfig
    from hybridspec.reference.tokenizer import Tokenizer

# Bytes of a round in memory without its routes: ids, probabilities and words of one row.
_ROUND_BYTES = 512
MIN_TEST_FRACTION = 0.05  # what --test-fraction takes


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec calibrate`, in its words.

    Attributes:
        url, recorded: of a SGLang server that runs already and the folder it records into.
        given: names of the options that were written out, and not left at their defaults.
        flags: of SGLang, behind `--`.
    """

    target: Path | None
    drafter: Path | None
    prompts: str | None
    chat: bool
    out: Path
    trace: Path | None
    resume: bool
    from_trace: Path | None
    model: str
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    batch_size: int
    max_prompts: int | None
    test_fraction: float
    record_routes: bool
    dtype: DtypeName
    device: str
    threads: int | None
    dry_run: bool
    engine: str = "reference"
    url: str | None = None
    recorded: Path | None = None
    given: frozenset[str] = frozenset()
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What will be recorded, settled before any weight is loaded.

    Attributes:
        max_context: tokens that the longest request needs.
        engine: that decodes, `reference` or `sglang`.
    """

    folders: PairFolders
    placement: Placement
    prompts: list[TokenPrompt]
    identity: TraceIdentity
    calibration: CalibrationIdentity
    max_context: int
    record_routes: bool
    engine: str = "reference"

    @property
    def most_tokens(self) -> int:
        """Tokens to emit if no prompt ends early."""
        return len(self.prompts) * self.identity.max_new_tokens

    @property
    def most_bytes(self) -> int:
        """Size of the trace before compression if every round emits one token."""
        routes = self.identity.route_bytes() if self.record_routes else 0
        return self.most_tokens * (_ROUND_BYTES + routes)


def make_plan(request: Request) -> Plan:
    """Read prompts and configurations; everything that can be refused without weights is."""
    from hybridspec.reference.config import check_pair, load_drafter_config, load_target_config
    from hybridspec.reference.tokenizer import Tokenizer

    folders = pair_folders(request.target, request.drafter)
    source = request.prompts or folders.prompts
    if source is None:
        raise UsageError(
            f"target {folders.target} is given without prompts; the bundled ones suit the embedded "
            "pair only: add --prompts FILE"
        )
    every = read_prompts(source)
    prompts = take_prompts(every, test_fraction=request.test_fraction, limit=request.max_prompts)
    fitted = _fitted(prompts)
    if fitted < MIN_PROMPTS:
        raise NotEnoughData(
            f"{fitted} of {len(prompts)} prompts are in the calibration split; at least "
            f"{MIN_PROMPTS} are needed to fit on: {_remedy_of_too_few(every, request)}"
        )
    if request.engine == "sglang":
        placement = Placement(device="cuda", dtype="bfloat16", threads=1)
    else:
        placement = place(device=request.device, dtype=request.dtype, threads=request.threads)
    config = load_target_config(folders.target)
    assert folders.drafter is not None
    check_pair(config, load_drafter_config(folders.drafter), folders.drafter)
    tokenizer = Tokenizer.load(folders.target)
    if request.chat:
        prompts = [as_chat_turn(prompt, tokenizer) for prompt in prompts]
    encoded = encode_prompts(
        prompts,
        tokenizer,
        max_new_tokens=request.max_new_tokens,
        context_limit=config.max_position_embeddings,
    )
    calibration = calibration_identity(
        folders,
        dtype=placement.dtype,
        temperature=request.temperature,
        top_p=request.top_p,
        prompts_digest=prompts_digest(prompts),
    )
    return Plan(
        folders=folders,
        placement=placement,
        prompts=encoded,
        identity=_trace_identity(request, config, calibration),
        calibration=calibration,
        max_context=max(context_tokens(len(p.token_ids), request.max_new_tokens) for p in encoded),
        record_routes=request.record_routes,
        engine=request.engine,
    )


def _fitted(prompts: Sequence[Prompt]) -> int:
    return sum(prompt.split == "calibration" for prompt in prompts)


def _remedy_of_too_few(every: Sequence[Prompt], request: Request) -> str:
    """What makes the calibration split large enough; only what has an effect is named.

    Args:
        every: prompts of the source, `split` empty where it names none.
    """

    def fitted(limit: int | None, test_fraction: float = request.test_fraction) -> int:
        return _fitted(take_prompts(every, test_fraction=test_fraction, limit=limit))

    if fitted(None) >= MIN_PROMPTS:
        # A larger limit takes no prompt out of the split again, so bisection holds.
        enough = 1 + bisect_left(range(1, len(every)), MIN_PROMPTS, key=fitted)
        remedy = f"give --max-prompts {enough} or more"
    elif any(not prompt.split for prompt in every):
        remedy = "give more prompts"
    else:
        remedy = "give more prompts of that split, which the prompts name themselves"
    if fitted(request.max_prompts, MIN_TEST_FRACTION) >= MIN_PROMPTS:
        remedy += ", or lower --test-fraction"
    return remedy


def as_chat_turn(prompt: Prompt, tokenizer: Tokenizer) -> Prompt:
    """The prompt as a user's turn that the model is about to answer."""
    turn = [{"role": "user", "content": prompt.text}]
    return replace(prompt, text=tokenizer.apply_chat_template(turn))


def _trace_identity(
    request: Request, config: TargetConfig, calibration: CalibrationIdentity
) -> TraceIdentity:
    assert calibration.prompts_digest is not None
    return TraceIdentity(
        target_digest=calibration.target_digest,
        drafter_digest=calibration.drafter_digest,
        layers=config.num_layers,
        topk=config.experts_per_token,
        experts=config.num_experts,
        vocab_size=config.vocab_size,
        temperature=request.temperature,
        max_new_tokens=request.max_new_tokens,
        prompts_digest=calibration.prompts_digest,
        dtype=calibration.dtype,
        top_p=request.top_p,
        seed=request.seed,
        group_size=request.batch_size,
    )
