"""What `hybridspec profile-latency` will measure, settled before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybridspec.artifacts.identity import CostIdentity
from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.cli._options import DtypeName
from hybridspec.costmodels.probe import READING_TOKENS
from hybridspec.costmodels.sweep import expert_grid
from hybridspec.errors import UsageError
from hybridspec.pair import PairFolders, Placement, cost_identity, pair_folders, place

STANDARD_GRID = ((128, 512), (1, 2, 4), 9)
QUICK_GRID = ((128,), (1, 4), 5)
EXPERT_LENGTHS = (2, 4, 8, 16)
WARMUP = 1


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


@dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        max_context: tokens that a request of the largest context needs.
        step_rounds, expert_rounds: rounds to run, warm-up included.
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


def make_plan(request: Request) -> Plan:
    """Settle grids and refuse what the pair cannot hold, before any weight is loaded."""
    from hybridspec.reference.config import check_pair, load_drafter_config, load_target_config

    folders = pair_folders(request.target, request.drafter)
    contexts, batch_sizes, repeats = QUICK_GRID if request.quick else STANDARD_GRID
    contexts = request.contexts or contexts
    batch_sizes = request.batch_sizes or batch_sizes
    repeats = request.repeats or repeats
    placement = place(device=request.device, dtype=request.dtype, threads=request.threads)
    config = load_target_config(folders.target)
    assert folders.drafter is not None
    check_pair(config, load_drafter_config(folders.drafter), folders.drafter)
    max_context = max(contexts) + READING_TOKENS
    if max_context > config.max_position_embeddings:
        raise UsageError(
            f"--contexts {max(contexts)} with room for the rounds behind it needs {max_context} "
            f"tokens; the target holds {config.max_position_embeddings}: lower it"
        )
    pairs = expert_grid(
        verify_lengths=EXPERT_LENGTHS,
        experts_per_token=config.experts_per_token,
        num_experts=config.num_experts,
    )
    sweeps = WARMUP + repeats
    return Plan(
        folders=folders,
        placement=placement,
        identity=cost_identity(folders, placement, max_batch=max(batch_sizes)),
        contexts=contexts,
        batch_sizes=batch_sizes,
        repeats=repeats,
        budget_s=request.budget_s,
        max_context=max_context,
        step_rounds=sweeps * len(contexts) * len(batch_sizes) * (BLOCK_SIZE + 1),
        expert_rounds=sweeps * len(pairs) if config.num_experts else 0,
    )
