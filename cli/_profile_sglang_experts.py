"""The part of `hybridspec profile-latency --engine sglang` that prices an expert."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from hybridspec.cli._output import Output
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
    logs: Path,
    output: Output,
) -> Experts:
    """Start a server whose routes are forced, and price a distinct expert of one layer.

    Rounds of all lengths are measured by then, and are not given up for this: whatever goes wrong
    is said, and the bundle has no price of an expert, as for models without experts.
    """
    launch = Launch(
        str(folders.target), str(folders.drafter), "127.0.0.1", free_port(), flags=flags
    )
    config = write_config(PluginConfig(switches={"force_routes": True}))
    readings = len(pairs) * (1 + grid.repeats)
    try:
        with server(
            None,
            arguments(launch),
            port=launch.port,
            variables={"HYBRIDSPEC_CONFIG": str(config)},
            log=logs / "experts.log",
            output=output,
        ) as api:
            api.wait_until_idle()
            with output.progress("measuring experts", readings) as bar:
                samples = measure_server_experts(
                    api,
                    grid,
                    pairs,
                    budget_s=budget_s,
                    progress=lambda done, planned: bar.advance(),
                )
        slope = fit_expert_slope(samples, num_layers=num_layers)
    except (Stopped, KeyboardInterrupt):
        return Experts(NO_EXPERTS.samples, None, interrupted=True)
    except HybridSpecError as error:
        output.warn(f"the bundle gets no price of an expert, so `correction` has none: {error}")
        return NO_EXPERTS
    output.note(slope.line())
    return Experts(samples, slope)
