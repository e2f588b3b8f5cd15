"""Fastest verify by rows, batch and state dtype on sm_90, from `gdn_kernels_lazy.json`.

`benchmarks/gdn_dispatch.py --write-table` makes this module from a sweep of all forms.
"""

from __future__ import annotations

from hybridspec.kernels.gdn.table import Form

SOURCE = "NVIDIA H200, block form with dependent launch, benchmarks/results/gdn_kernels_lazy.json"

# rows, batch, state dtype, form, value block, warps, lanes along K, microseconds of 30 layers
# (None: expected, not measured).
POINTS: tuple[tuple[int, int, str, Form, int, int, int, float | None], ...] = (
    (1, 1, "float32", "sequential", 8, 1, 8, None),
    (2, 1, "float32", "sequential", 8, 1, 8, None),
    (4, 1, "float32", "block", 32, 2, 8, 114.0),
    (8, 1, "float32", "block", 32, 2, 8, 132.0),
    (16, 1, "float32", "block", 32, 2, 8, 149.0),
    (2, 4, "float32", "sequential", 16, 1, 8, None),
    (4, 4, "float32", "block", 32, 2, 8, 186.0),
    (8, 4, "float32", "block", 32, 2, 8, 207.0),
    (16, 4, "float32", "block", 32, 2, 8, 231.0),
    (2, 1, "bfloat16", "sequential", 8, 1, 8, None),
    (16, 1, "bfloat16", "block", 32, 2, 8, None),
    (2, 4, "bfloat16", "sequential", 16, 1, 8, None),
    (16, 4, "bfloat16", "block", 32, 2, 8, None),
)
