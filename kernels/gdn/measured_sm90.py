"""Fastest verify by rows, batch and state dtype on sm_90. Generated; do not edit.

Regenerate from a result file: `python benchmarks/gdn_dispatch.py --write-table`.
"""

from __future__ import annotations

from hybridspec.kernels.gdn.table import Form

SOURCE = "NVIDIA H200, commit 2bf88d9"

# rows, batch, state dtype, form, value block, warps, lanes along K, microseconds of 30 layers
# (None: expected, not measured).
POINTS: tuple[tuple[int, int, str, Form, int, int, int, float | None], ...] = (
    (1, 1, "float32", "sequential", 4, 1, 8, 59.5),
    (2, 1, "float32", "sequential", 8, 1, 8, 82.9),
    (3, 1, "float32", "sequential", 4, 1, 8, 93.5),
    (4, 1, "float32", "sequential", 4, 1, 8, 102.0),
    (6, 1, "float32", "block", 32, 2, 8, 127.4),
    (8, 1, "float32", "block", 16, 1, 8, 130.2),
    (12, 1, "float32", "block", 16, 1, 8, 148.6),
    (16, 1, "float32", "block", 32, 2, 8, 144.3),
    (1, 2, "float32", "sequential", 8, 1, 8, 71.0),
    (2, 2, "float32", "sequential", 8, 1, 8, 88.3),
    (3, 2, "float32", "sequential", 16, 1, 8, 102.0),
    (4, 2, "float32", "sequential", 16, 1, 8, 120.8),
    (6, 2, "float32", "block", 32, 2, 8, 149.0),
    (8, 2, "float32", "block", 32, 2, 8, 154.7),
    (12, 2, "float32", "block", 16, 1, 8, 162.2),
    (16, 2, "float32", "block", 32, 2, 8, 158.1),
    (1, 4, "float32", "sequential", 16, 2, 8, 89.8),
    (2, 4, "float32", "sequential", 16, 1, 8, 104.2),
    (3, 4, "float32", "sequential", 16, 1, 8, 145.2),
    (4, 4, "float32", "sequential", 16, 1, 8, 167.3),
    (6, 4, "float32", "block", 32, 2, 8, 202.6),
    (8, 4, "float32", "block", 16, 1, 8, 203.4),
    (12, 4, "float32", "block", 32, 2, 8, 231.6),
    (16, 4, "float32", "block", 32, 2, 8, 229.0),
    (1, 8, "float32", "sequential", 16, 1, 8, 172.2),
    (2, 8, "float32", "sequential", 16, 2, 8, 222.1),
    (3, 8, "float32", "sequential", 16, 1, 8, 257.1),
    (4, 8, "float32", "sequential", 16, 1, 8, 298.1),
    (6, 8, "float32", "block", 16, 1, 8, 387.9),
    (8, 8, "float32", "block", 16, 1, 8, 381.1),
    (12, 8, "float32", "block", 32, 2, 8, 452.5),
    (16, 8, "float32", "block", 32, 2, 8, 449.5),
    (1, 1, "bfloat16", "sequential", 4, 1, 8, 66.1),
    (2, 1, "bfloat16", "sequential", 8, 1, 8, 84.2),
    (3, 1, "bfloat16", "sequential", 4, 1, 8, 92.7),
    (4, 1, "bfloat16", "sequential", 4, 1, 8, 98.5),
    (6, 1, "bfloat16", "block", 32, 2, 8, 146.5),
    (8, 1, "bfloat16", "block", 32, 2, 8, 141.8),
    (12, 1, "bfloat16", "block", 16, 1, 8, 147.2),
    (16, 1, "bfloat16", "block", 16, 1, 8, 147.9),
    (1, 2, "bfloat16", "sequential", 16, 2, 8, 69.6),
    (2, 2, "bfloat16", "sequential", 16, 2, 8, 84.2),
    (3, 2, "bfloat16", "sequential", 8, 1, 8, 101.8),
    (4, 2, "bfloat16", "sequential", 16, 1, 8, 121.6),
    (6, 2, "bfloat16", "block", 32, 2, 8, 152.2),
    (8, 2, "bfloat16", "block", 32, 2, 8, 147.6),
    (12, 2, "bfloat16", "block", 16, 1, 8, 158.2),
    (16, 2, "bfloat16", "block", 16, 1, 8, 156.3),
    (1, 4, "bfloat16", "sequential", 16, 1, 8, 79.2),
    (2, 4, "bfloat16", "sequential", 16, 1, 8, 104.3),
    (3, 4, "bfloat16", "sequential", 16, 1, 8, 140.4),
    (4, 4, "bfloat16", "sequential", 16, 1, 8, 142.2),
    (6, 4, "bfloat16", "block", 16, 1, 8, 169.2),
    (8, 4, "bfloat16", "block", 32, 2, 8, 163.0),
    (12, 4, "bfloat16", "block", 16, 1, 8, 198.9),
    (16, 4, "bfloat16", "block", 16, 1, 8, 198.0),
    (1, 8, "bfloat16", "sequential", 16, 1, 8, 124.2),
    (2, 8, "bfloat16", "sequential", 16, 2, 8, 182.0),
    (3, 8, "bfloat16", "block", 32, 2, 8, 190.8),
    (4, 8, "bfloat16", "block", 32, 2, 8, 197.4),
    (6, 8, "bfloat16", "block", 16, 1, 8, 306.2),
    (8, 8, "bfloat16", "block", 16, 1, 8, 304.4),
    (12, 8, "bfloat16", "block", 16, 1, 8, 390.7),
    (16, 8, "bfloat16", "block", 16, 1, 8, 391.2),
)
