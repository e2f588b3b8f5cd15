"""What `hybridspec profile-latency` will measure, settled before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.cli._options import DtypeName, GraphControlName
from hybridspec.costmodels.probe import READING_TOKENS
from hybridspec.costmodels.sweep import expert_grid
from hybridspec.errors import UsageError
from hybridspec.pair import PairFolders, Placement, cost_identity, pair_folders, place

if TYPE_CHECKING:
    from hybridspec.reference.config import TargetConfig

STANDARD_GRID = ((128, 512), (1, 2, 4), 9)
QUICK_GRID = ((128,), (1, 4), 5)
# Of captured rounds on a GPU.
CAPTURED_GRID = ((1024, 4096, 16384, 32768), (1, 2, 4, 8), 5)
CAPTURED_QUICK_GRID = ((1024,), (1, 4), 5)
ANCHOR_GRIDS = {False: ((128, 512), (1, 4), 5), True: ((1024, 16384), (1, 8), 5)}
# Plain decoding, both ends and what a transfer needs between them.
ANCHOR_LENGTHS = (0, 1, 2, 4, 8, 16)
EXPERT_LENGTHS = (2, 4, 8, 16)
WARMUP = 1
MAX_CAPTURED_BATCH = 8


@dataclass(frozen=True)
class Request:
    """The command line of `hybridspec profile-latency`; None leaves a grid to `quick`."""

    target: Path | None
    drafter: Path | None
    out: Path
    contexts: tuple[int, ...] | None
    batch_sizes: tuple[int, ...] | None
    repeats: int | None
    budget_s: float
    quick: bool
    dtype: DtypeName
    device: str
    threads: int | None
    seed: int
    dry_run: bool
    anchors: Path | None = None
    graph_control: GraphControlName = "auto"


@dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        lengths: verify lengths, 0 for a round without a draft pass.
        max_context: tokens that a request of the largest context needs.
        step_rounds, expert_rounds: rounds to run, warm-up included.
        control: what captures rounds as CUDA graphs; `eager` launches them one by one.
    """

    folders: PairFolders
    placement: Placement
    identity: CostIdentity
    contexts: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    repeats: int
    budget_s: float
    max_context: int
    step_rounds: int
    expert_rounds: int
    lengths: tuple[int, ...]
    control: GraphControlName

    @property
    def captured(self) -> bool:
        """Whether rounds are CUDA graphs."""
        return self.control != "eager"


def make_plan(request: Request) -> Plan:
    """Settle grids and refuse what the pair cannot hold, before any weight is loaded."""
    from hybridspec.reference.config import check_pair, load_drafter_config, load_target_config

    folders = pair_folders(request.target, request.drafter)
    placement = place(device=request.device, dtype=request.dtype, threads=request.threads)
    config = load_target_config(folders.target)
    assert folders.drafter is not None
    check_pair(config, load_drafter_config(folders.drafter), folders.drafter)
    control = _control(request, config, placement)
    captured = control != "eager"
    if request.anchors is not None:
        contexts, batch_sizes, repeats = ANCHOR_GRIDS[captured]
    elif request.quick:
        contexts, batch_sizes, repeats = CAPTURED_QUICK_GRID if captured else QUICK_GRID
    else:
        contexts, batch_sizes, repeats = CAPTURED_GRID if captured else STANDARD_GRID
    longest = config.max_position_embeddings - READING_TOKENS
    contexts = request.contexts or tuple(c for c in contexts if c <= longest) or (longest,)
    batch_sizes = request.batch_sizes or batch_sizes
    repeats = request.repeats or repeats
    max_context = max(contexts) + READING_TOKENS
    if max_context > config.max_position_embeddings:
        raise UsageError(
            f"--contexts {max(contexts)} with room for the rounds behind it needs {max_context} "
            f"tokens; the target holds {config.max_position_embeddings}: lower it"
        )
    if captured and max(batch_sizes) > MAX_CAPTURED_BATCH:
        raise UsageError(
            f"--batch-sizes {max(batch_sizes)}; captured rounds take up to {MAX_CAPTURED_BATCH} "
            "requests: lower it, or use --graph-control eager"
        )
    if control in ("switch", "host") and max(batch_sizes) > 1:
        raise UsageError(
            f"--graph-control {control} has bodies of fewer rows for a single request only: use "
            "--batch-sizes 1, or masked"
        )
    pairs = expert_grid(
        verify_lengths=EXPERT_LENGTHS,
        experts_per_token=config.experts_per_token,
        num_experts=config.num_experts,
    )
    sweeps = WARMUP + repeats
    lengths = tuple(range(BLOCK_SIZE + 1)) if request.anchors is None else ANCHOR_LENGTHS
    identity = cost_identity(folders, placement, max_batch=max(batch_sizes))
    if captured:
        tiers = f"{control}:{','.join(map(str, batch_sizes))}"
        identity = replace(identity, graph_tiers=tiers)
    experts = config.num_experts > 0 and request.anchors is None
    return Plan(
        folders=folders,
        placement=placement,
        identity=identity,
        contexts=contexts,
        batch_sizes=batch_sizes,
        repeats=repeats,
        budget_s=request.budget_s,
        max_context=max_context,
        step_rounds=sweeps * len(contexts) * len(batch_sizes) * len(lengths),
        expert_rounds=sweeps * len(pairs) if experts else 0,
        lengths=lengths,
        control=control,
    )


def _control(request: Request, config: TargetConfig, placement: Placement) -> GraphControlName:
    """What captures rounds: `auto` takes masked graphs where the kernels fit, else none."""
    if request.graph_control == "eager":
        return "eager"
    if placement.device == "cpu":
        reason: str | None = "the device is cpu; captured rounds need a GPU"
    else:
        from hybridspec.reference.gpu.pair_probe import captured_refusal

        reason = captured_refusal(config, dtype=placement.dtype, device=placement.device)
    if request.graph_control == "auto":
        return "masked" if reason is None else "eager"
    if reason is not None:
        raise UsageError(
            f"--graph-control {request.graph_control}: {reason}: use --graph-control eager"
        )
    return request.graph_control
