"""The part of `hybridspec profile-latency --engine sglang` that prices an expert."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hybridspec.cli._output import Output
from hybridspec.cli._profile_budget import share_of_budget
from hybridspec.cli._sglang_server import server
from hybridspec.costmodels.expert import ExpertSlope, fit_expert_slope
from hybridspec.costmodels.measure import Interrupted as Stopped
from hybridspec.costmodels.sweep import EXPERT_SAMPLES_SCHEMA
from hybridspec.errors import HybridSpecError
from hybridspec.pair import PairFolders
from hybridspec.sglang_plugin.config import PluginConfig
from hybridspec.sglang_plugin.launch import Launch, arguments, write_config
from hybridspec.sglang_plugin.server_experts import measure_server_experts
from hybridspec.sglang_plugin.server_process import free_port
from hybridspec.sglang_plugin.server_rounds import Grid


@dataclass(frozen=True)
class Experts:
    """Readings with forced routes and the line through them.

    Attributes:
        samples: of `EXPERT_SAMPLES_SCHEMA`, empty where nothing was measured.
        slope: None likewise.
        interrupted: by Ctrl-C.
    """

    samples: pa.Table
    slope: ExpertSlope | None
    interrupted: bool = False


NO_EXPERTS = Experts(EXPERT_SAMPLES_SCHEMA.empty_table(), None)


def measure_experts(
    folders: PairFolders,
    flags: tuple[str, ...],
    grid: Grid,
    pairs: tuple[tuple[int, int], ...],
    *,
    num_layers: int,
    budget_s: float,
    share: float,
    logs: Path,
    output: Output,
) -> Experts:
    """Start a server whose routes are forced, and price a distinct expert of one layer.

    The bundle has the costs of all lengths by then. Whatever goes wrong is said, and it stays
    without a price of an expert, as for models without experts.

    Args:
        budget_s: of the whole command.
        share: of it that this has.
    """
    readings = len(pairs) * (1 + grid.repeats)
    try:
        launch = Launch(
            str(folders.target), str(folders.drafter), "127.0.0.1", free_port(), flags=flags
        )
        config = write_config(PluginConfig(switches={"force_routes": True}))
        with server(
            None,
            arguments(launch),
            port=launch.port,
            variables={"HYBRIDSPEC_CONFIG": str(config)},
            log=logs / "experts.log",
            output=output,
        ) as api:
            api.wait_until_idle()
            with (
                share_of_budget(budget_s, share, "forced experts") as share_s,
                output.progress("measuring experts", readings) as bar,
            ):
                samples = measure_server_experts(
                    api,
                    grid,
                    pairs,
                    budget_s=share_s,
                    progress=lambda done, planned: bar.advance(),
                )
        slope = fit_expert_slope(samples, num_layers=num_layers)
    except (Stopped, KeyboardInterrupt):
        return Experts(NO_EXPERTS.samples, None, interrupted=True)
    except Exception as error:
        # Also what no one has thought of: what was measured before is worth more than this.
        what = str(error) if isinstance(error, HybridSpecError) else repr(error)
        output.warn(f"the bundle gets no price of an expert, so `correction` has none: {what}")
        return NO_EXPERTS
    output.note(slope.line())
    return Experts(samples, slope)
