"""SGLang's fused MoE, tuned for this card with the configuration files that it reads itself."""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from moe.graphs import capture, compiling_ahead, medians_us
from moe.workload import NUM_EXPERTS, WIDTH, Calls, Layer, work_of

Config = dict[str, Any]


def config(n: int, k: int, stages: int, warps: int = 4, *, tma: bool = False) -> Config:
    """16 rows a block: at most 64 rows share an expert, and mostly one or two do."""
    found: Config = {
        "BLOCK_SIZE_M": 16,
        "BLOCK_SIZE_N": n,
        "BLOCK_SIZE_K": k,
        "GROUP_SIZE_M": 1,
        "num_warps": warps,
        "num_stages": stages,
    }
    return {**found, "USE_TMA": True} if tma else found


UP_CONFIGS = [
    *(config(16, 256, stages) for stages in (3, 5)),
    *(config(32, 64, stages) for stages in (3, 5)),
    *(config(32, 128, stages) for stages in (3, 4, 5)),
    *(config(32, 256, stages) for stages in (3, 4)),
    *(config(64, 64, stages) for stages in (3, 4, 5)),
    *(config(64, 128, stages) for stages in (3, 4, 5)),
    *(config(64, 256, stages) for stages in (3, 4)),
    *(config(128, 64, stages) for stages in (3, 4, 5)),
    *(config(128, 128, stages) for stages in (3, 4)),
    *(config(128, 64, 4, 8), config(128, 128, 3, 8)),
]
DOWN_CONFIGS = [
    config(16, 256, 3),
    *(config(32, 64, stages) for stages in (3, 5)),
    *(config(32, 128, stages) for stages in (3, 4)),
    *(config(32, 256, stages) for stages in (2, 3)),
    *(config(64, 64, stages) for stages in (3, 5)),
    *(config(64, 128, stages) for stages in (3, 4)),
    *(config(64, 256, stages) for stages in (2, 3)),
    *(config(128, 64, 4), config(128, 128, 3)),
    *(config(n, 256, 2, tma=True) for n in (32, 64)),
    *(config(n, 128, 3, tma=True) for n in (32, 64, 128)),
]
TUNING_CALLS = 8


class SglangMoe:
    """The call of SGLang 0.5.16's Triton runner, and the configurations it uses by row count."""

    def __init__(self) -> None:
        from sglang.kernels.ops.moe.fused_moe_triton_kernels import fused_moe_kernel
        from sglang.srt.layers.moe.moe_runner.triton_utils import (
            fused_moe,
            fused_moe_triton_config,
        )
        from sglang.srt.runtime_context import get_context
        from sglang.srt.server_args import ServerArgs

        get_context().set_server_args(ServerArgs(model_path="dummy"))
        self.module = fused_moe_triton_config
        self.implementation = fused_moe.fused_experts_impl
        self.kernel = fused_moe_kernel
        self.folder = Path(tempfile.mkdtemp(prefix="moe-config-"))
        os.environ["SGLANG_MOE_CONFIG_DIR"] = str(self.folder)
        self.use({1: config(64, 128, 4)}, {1: config(64, 128, 3)})

    def use(self, up: dict[int, Config], down: dict[int, Config]) -> None:
        """Make SGLang read these files at the next call."""
        import triton

        version = f"triton_{triton.__version__.replace('.', '_')}"
        folder = self.folder / "configs" / version
        folder.mkdir(parents=True, exist_ok=True)
        for is_down, configs in ((False, up), (True, down)):
            name = self.module.get_config_file_name(
                NUM_EXPERTS, WIDTH, None, None, down_moe=is_down
            )
            content = {str(rows): values for rows, values in configs.items()}
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        self.module.get_moe_configs.cache_clear()

    def in_use(self, num_rows: int) -> tuple[Config, Config]:
        """Configurations that SGLang itself finds for this row count."""
        up, (down, _) = self.module.try_get_optimal_moe_config(
            (NUM_EXPERTS, 2 * WIDTH, 4 * WIDTH),
            (NUM_EXPERTS, 4 * WIDTH, WIDTH),
            8,
            None,
            num_rows,
            return_down_config=True,
        )
        return up, down

    def __call__(
        self,
        layer: Layer,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> None:
        """The output replaces `x`, as in SGLang's models."""
        del out
        self.implementation(
            x, layer.gate_up, layer.down, weights, ids, inplace=True, filter_expert=False
        )

    def compile_ahead(self, layer: Layer, row_counts: Sequence[int]) -> None:
        """Every candidate, in threads; `torch.compile`d parts of SGLang first."""
        for num_rows in row_counts:
            calls = Calls(1, num_rows, "independent")
            self(layer, calls.x[0], calls.ids[0], calls.weights[0])
        torch.cuda.synchronize()
        # Triton compiles once for 8 slots and once for multiples of 16.
        with compiling_ahead([self.kernel]):
            for num_rows in (1, 4):
                calls = Calls(1, num_rows, "independent")
                for up, down in zip(
                    [*UP_CONFIGS, *[UP_CONFIGS[0]] * len(DOWN_CONFIGS)],
                    [*[DOWN_CONFIGS[0]] * len(UP_CONFIGS), *DOWN_CONFIGS],
                    strict=True,
                ):
                    self.use({1: up}, {1: down})
                    self(layer, calls.x[0], calls.ids[0], calls.weights[0])
        torch.cuda.synchronize()

    def tune(self, layers: list[Layer], row_counts: Sequence[int], repeats: int) -> None:
        """The best gate-up configuration for each row count, then the best down one beside it."""
        up: dict[int, Config] = {}
        down: dict[int, Config] = {}
        for num_rows in row_counts:
            calls = Calls(TUNING_CALLS, num_rows, "independent")
            start = config(64, 128, 3)
            up[num_rows] = self._best(layers, calls, [(one, start) for one in UP_CONFIGS], repeats)[
                0
            ]
            down[num_rows] = self._best(
                layers, calls, [(up[num_rows], one) for one in DOWN_CONFIGS], repeats
            )[1]
        self.use(up, down)

    def _best(
        self,
        layers: list[Layer],
        calls: Calls,
        candidates: list[tuple[Config, Config]],
        repeats: int,
    ) -> tuple[Config, Config]:
        found = []
        for index, (up, down) in enumerate(candidates):
            self.use({1: up}, {1: down})
            try:
                graph = capture(work_of(self, calls, layers))
            except Exception as error:  # a tile that needs more shared memory than there is
                print(f"  SGLang {up} {down}: {type(error).__name__}", flush=True)
                continue
            times = medians_us({"it": graph}, TUNING_CALLS, repeats, calls.refill, calls.refill_x)
            found.append((times["it"], index))
        return candidates[min(found)[1]]
