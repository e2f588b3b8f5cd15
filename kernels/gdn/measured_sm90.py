"""Fastest verify by rows, batch and state dtype on sm_90. Generated; do not edit.

Regenerate from a result file: `python benchmarks/gdn_dispatch.py --write-table`.
"""

from __future__ import annotations

from hybridspec.kernels.gdn.table import Form

SOURCE = "NVIDIA H200, commit dbb038f"

# rows, batch, state dtype, form, value block, warps, lanes along K, microseconds of 30 layers
# (None: expected, not measured).
POINTS: tuple[tuple[int, int, str, Form, int, int, int, float | None], ...] = (
    (1, 1, "float32", "sequential", 16, 1, 8, 58.6),
    (2, 1, "float32", "sequential", 8, 1, 8, 83.2),
    (3, 1, "float32", "sequential", 4, 1, 8, 93.8),
    (4, 1, "float32", "sequential", 4, 1, 8, 101.7),
    (6, 1, "float32", "block", 32, 2, 8, 128.5),
    (8, 1, "float32", "block", 32, 2, 8, 129.5),
    (12, 1, "float32", "block", 16, 1, 8, 149.0),
    (16, 1, "float32", "block", 32, 2, 8, 145.8),
    (1, 2, "float32", "sequential", 8, 1, 8, 71.3),
    (2, 2, "float32", "sequential", 8, 1, 8, 88.4),
    (3, 2, "float32", "sequential", 16, 1, 8, 101.8),
    (4, 2, "float32", "sequential", 16, 1, 8, 121.3),
    (6, 2, "float32", "block", 32, 2, 8, 148.0),
    (8, 2, "float32", "block", 32, 2, 8, 151.9),
    (12, 2, "float32", "block", 16, 1, 8, 162.8),
    (16, 2, "float32", "block", 32, 2, 8, 158.8),
    (1, 4, "float32", "sequential", 16, 2, 8, 90.8),
    (2, 4, "float32", "sequential", 16, 1, 8, 109.0),
    (3, 4, "float32", "sequential", 16, 1, 8, 145.0),
    (4, 4, "float32", "sequential", 16, 1, 8, 167.4),
    (6, 4, "float32", "block", 32, 2, 8, 202.9),
    (8, 4, "float32", "block", 16, 1, 8, 203.6),
    (12, 4, "float32", "block", 32, 2, 8, 231.9),
    (16, 4, "float32", "block", 32, 2, 8, 229.8),
    (1, 8, "float32", "sequential", 16, 1, 8, 173.0),
    (2, 8, "float32", "sequential", 16, 2, 8, 223.5),
    (3, 8, "float32", "sequential", 16, 1, 8, 258.7),
    (4, 8, "float32", "sequential", 16, 1, 8, 300.0),
    (6, 8, "float32", "block", 16, 1, 8, 390.2),
    (8, 8, "float32", "block", 16, 1, 8, 382.7),
    (12, 8, "float32", "block", 32, 2, 8, 453.3),
    (16, 8, "float32", "block", 32, 2, 8, 450.4),
    (1, 1, "bfloat16", "sequential", 4, 1, 8, 65.4),
    (2, 1, "bfloat16", "sequential", 8, 1, 8, 84.3),
    (3, 1, "bfloat16", "sequential", 4, 1, 8, 92.7),
    (4, 1, "bfloat16", "sequential", 4, 1, 8, 99.1),
    (6, 1, "bfloat16", "block", 32, 2, 8, 146.5),
    (8, 1, "bfloat16", "block", 32, 2, 8, 141.5),
    (12, 1, "bfloat16", "block", 16, 1, 8, 146.8),
    (16, 1, "bfloat16", "block", 16, 1, 8, 148.0),
    (1, 2, "bfloat16", "sequential", 16, 2, 8, 69.2),
    (2, 2, "bfloat16", "sequential", 16, 2, 8, 84.6),
    (3, 2, "bfloat16", "sequential", 8, 1, 8, 101.6),
    (4, 2, "bfloat16", "sequential", 16, 1, 8, 121.6),
    (6, 2, "bfloat16", "block", 32, 2, 8, 152.4),
    (8, 2, "bfloat16", "block", 32, 2, 8, 147.8),
    (12, 2, "bfloat16", "block", 16, 1, 8, 158.7),
    (16, 2, "bfloat16", "block", 16, 1, 8, 156.1),
    (1, 4, "bfloat16", "sequential", 16, 1, 8, 75.2),
    (2, 4, "bfloat16", "sequential", 16, 1, 8, 104.3),
    (3, 4, "bfloat16", "sequential", 16, 1, 8, 141.7),
    (4, 4, "bfloat16", "sequential", 16, 1, 8, 142.4),
    (6, 4, "bfloat16", "block", 32, 2, 8, 168.0),
    (8, 4, "bfloat16", "block", 32, 2, 8, 163.4),
    (12, 4, "bfloat16", "block", 16, 1, 8, 198.9),
    (16, 4, "bfloat16", "block", 16, 1, 8, 198.5),
    (1, 8, "bfloat16", "sequential", 16, 1, 8, 124.5),
    (2, 8, "bfloat16", "sequential", 16, 2, 8, 182.8),
    (3, 8, "bfloat16", "block", 32, 2, 8, 191.4),
    (4, 8, "bfloat16", "block", 32, 2, 8, 198.6),
    (6, 8, "bfloat16", "block", 16, 1, 8, 308.3),
    (8, 8, "bfloat16", "block", 16, 1, 8, 303.9),
    (12, 8, "bfloat16", "block", 16, 1, 8, 391.5),
    (16, 8, "bfloat16", "block", 16, 1, 8, 392.4),
)
