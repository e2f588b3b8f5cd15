"""Fused router against SGLang's router and our mask behind it: equal bits first, time second.

Top 8 of 256 bf16 logits, requests of 16 rows with 4 that count. A graph of 40 layers, each with the
gate's product ahead of its router, less a graph of the products alone; weights of the gates come
from memory, as they do in a round. `alone_us` is a graph of routers without products.

    python benchmarks/router.py [--quick] [--out DIR]
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from moe.graphs import capture, medians_us
from results_file import gpu, machine, write_results

from hybridspec.errors import QualityGate
from hybridspec.kernels.route_mask.route_mask import route_mask
from hybridspec.kernels.router.router import router

SEED = 20_261_130
ROWS = (16, 64, 128)
LAYERS, EXPERTS, HIDDEN, TOP_K, LIVE_ROWS = 40, 256, 2048, 8, 4
FLUSH_BYTES = 256 << 20  # several times the L2 of an H200
Routes = tuple[torch.Tensor, torch.Tensor]
Route = Callable[[torch.Tensor, torch.Tensor], Routes]


def sglang_router() -> Route | None:
    """SGLang's router as its `fused_topk` runs it, then our mask; None without SGLang."""
    try:
        from sglang.jit_kernel.moe_fused_gate import moe_fused_gate
    except Exception as error:
        print(f"without SGLang: {type(error).__name__}: {error}", flush=True)
        return None

    def route(logits: torch.Tensor, lengths: torch.Tensor) -> Routes:
        bias = torch.zeros(EXPERTS, dtype=torch.float32, device=logits.device)
        weights, ids = moe_fused_gate(logits, bias, TOP_K, scoring_func="softmax")
        return route_mask(ids, weights, lengths)

    return route


def fused(dependent: bool | None) -> Route:
    def route(logits: torch.Tensor, lengths: torch.Tensor) -> Routes:
        return router(logits, TOP_K, lengths_B=lengths, dependent=dependent)

    return route


class Layers:
    """Hidden states and gates of 40 layers for one number of rows."""

    def __init__(self, rows: int, gates_XEH: torch.Tensor) -> None:
        device = gates_XEH.device
        self.gates_XEH = gates_XEH
        self.x_XRH = torch.empty(LAYERS, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        self.logits_XRE = torch.empty(LAYERS, rows, EXPERTS, dtype=torch.bfloat16, device=device)
        self.lengths_B = torch.full((rows // 16,), LIVE_ROWS, dtype=torch.int32, device=device)
        self.trash = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.refill()

    def refill(self) -> None:
        """Fresh hidden states, and the logits of them."""
        self.x_XRH.normal_()
        torch.matmul(self.x_XRH, self.gates_XEH.transpose(1, 2), out=self.logits_XRE)

    def flush(self) -> None:
        """Writes more than the L2 holds."""
        self.trash.random_()

    def work(self, route: Route | None, *, gates: bool) -> Callable[[], None]:
        """Launches of all layers."""

        def launch() -> None:
            for i in range(LAYERS):
                logits = self.logits_XRE[i]
                if gates:
                    torch.mm(self.x_XRH[i], self.gates_XEH[i].T, out=logits)
                if route is not None:
                    route(logits, self.lengths_B)

        return launch


def check(routes: dict[str, Route], layers: Layers) -> None:
    """All give the same bits."""
    for logits in layers.logits_XRE:
        results = {name: route(logits, layers.lengths_B) for name, route in routes.items()}
        first = next(iter(results))
        for name, (ids, weights) in results.items():
            same = torch.equal(ids, results[first][0]) and torch.equal(weights, results[first][1])
            if not same:
                raise QualityGate(f"{name} differs from {first} at {len(logits)} rows")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="folder of router.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; these are GPU kernels: run this on a GPU", file=sys.stderr)
        return 4
    where = {**machine(), **gpu()}
    torch.manual_seed(SEED)
    repeats = 11 if options.quick else 41
    stock = sglang_router()
    routes: dict[str, Route] = {} if stock is None else {"sglang_and_mask": stock}
    routes |= {"fused": fused(None), "fused_not_dependent": fused(False)}
    gates = torch.empty(LAYERS, EXPERTS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    gates.normal_(std=HIDDEN**-0.5)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for count in ROWS:
            layers = Layers(count, gates)
            check(routes, layers)
            behind = {name: capture(layers.work(r, gates=True)) for name, r in routes.items()}
            behind["gates"] = capture(layers.work(None, gates=True))
            times = medians_us(behind, LAYERS, repeats, layers.refill, layers.flush)
            alone = {name: capture(layers.work(r, gates=False)) for name, r in routes.items()}
            times_alone = medians_us(alone, LAYERS, repeats, layers.refill, lambda: None)
            for name in routes:
                rows.append(
                    {
                        "rows": count,
                        "router": name,
                        "behind_gate_us": times[name] - times["gates"],
                        "alone_us": times_alone[name],
                        "gate_us": times["gates"],
                    }
                )
    found = {(row["rows"], row["router"]): row["behind_gate_us"] for row in rows}
    summary: dict[str, Any] = {"equal_bits": stock is not None}
    for count in ROWS:
        summary[f"fused_us_rows{count}"] = found[count, "fused"]
        if stock is not None:
            saved = found[count, "sglang_and_mask"] - found[count, "fused"]
            summary[f"saved_us_a_layer_rows{count}"] = saved
    path = write_results(
        "router",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "sglang"),
        out=options.out,
    )
    print("rows router               behind the gate, us   alone, us   gate, us")
    for row in rows:
        print(
            f"{row['rows']:4d} {row['router']:20s} {row['behind_gate_us']:19.2f} "
            f"{row['alone_us']:11.2f} {row['gate_us']:10.2f}"
        )
    print(f"summary {summary}\nwrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
