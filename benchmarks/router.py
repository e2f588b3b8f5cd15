"""Fused router against SGLang's router and our mask behind it: equal bits first, time second.

Top 8 of 256 bf16 logits, requests of 16 rows with 4 that count. A graph of 40 layers: a sum that
writes hidden states, as a norm does, the gate's product and the router. Weights of the gates come
from memory, as they do in a round. `layer_us` is less a graph of the sums alone, `alone_us` a graph
of routers without products. `fused_with_gate` has the product in parts, at 16 rows.

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
from hybridspec.kernels.router.gate import allocate_partials, gate
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
        self.source_XRH = torch.empty(LAYERS, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        self.x_XRH = torch.empty_like(self.source_XRH)
        self.partials = allocate_partials(gates_XEH[0])
        self.logits_XRE = torch.empty(LAYERS, rows, EXPERTS, dtype=torch.bfloat16, device=device)
        self.lengths_B = torch.full((rows // 16,), LIVE_ROWS, dtype=torch.int32, device=device)
        self.trash = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.refill()

    def refill(self) -> None:
        """Fresh hidden states, and the logits of them."""
        self.source_XRH.normal_()
        torch.add(self.source_XRH, 1, out=self.x_XRH)
        torch.matmul(self.x_XRH, self.gates_XEH.transpose(1, 2), out=self.logits_XRE)

    def flush(self) -> None:
        """Writes more than the L2 holds."""
        self.trash.random_()

    def behind_gates(self, route: Route | None) -> Callable[[], None]:
        """Launches of all layers; without routers and products for None."""

        def launch() -> None:
            for i in range(LAYERS):
                torch.add(self.source_XRH[i], 1, out=self.x_XRH[i])
                if route is not None:
                    torch.mm(self.x_XRH[i], self.gates_XEH[i].T, out=self.logits_XRE[i])
                    route(self.logits_XRE[i], self.lengths_B)

        return launch

    def alone(self, route: Route) -> Callable[[], None]:
        """Routers of all layers."""

        def launch() -> None:
            for logits in self.logits_XRE:
                route(logits, self.lengths_B)

        return launch

    def with_gates(self) -> Callable[[], None]:
        """Launches of all layers, the products in parts."""

        def launch() -> None:
            for i in range(LAYERS):
                torch.add(self.source_XRH[i], 1, out=self.x_XRH[i])
                parts = gate(self.x_XRH[i], self.gates_XEH[i], out=self.partials)
                router(parts, TOP_K, lengths_B=self.lengths_B)

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
            behind = {name: capture(layers.behind_gates(r)) for name, r in routes.items()}
            if count <= 16:
                behind["fused_with_gate"] = capture(layers.with_gates())
            behind["nothing"] = capture(layers.behind_gates(None))
            times = medians_us(behind, LAYERS, repeats, layers.refill, layers.flush)
            alone = {name: capture(layers.alone(r)) for name, r in routes.items()}
            times_alone = medians_us(alone, LAYERS, repeats, layers.refill, lambda: None)
            for name in behind:
                if name != "nothing":
                    row: dict[str, Any] = {"rows": count, "router": name}
                    row["layer_us"] = times[name] - times["nothing"]
                    row["alone_us"] = times_alone.get(name)
                    rows.append(row)
    found = {(row["rows"], row["router"]): row["layer_us"] for row in rows}
    summary: dict[str, Any] = {"equal_bits": stock is not None}
    for (count, name), layer_us in found.items():
        if name.startswith("fused"):
            summary[f"{name}_us_rows{count}"] = layer_us
            if stock is not None:
                saved = found[count, "sglang_and_mask"] - layer_us
                summary[f"{name}_saves_us_rows{count}"] = saved
    path = write_results(
        "router",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "sglang"),
        out=options.out,
    )
    print("rows router                gate and router, us   router alone, us")
    for row in rows:
        alone_us = "-" if row["alone_us"] is None else f"{row['alone_us']:.2f}"
        print(f"{row['rows']:4d} {row['router']:20s} {row['layer_us']:21.2f} {alone_us:>18s}")
    print(f"summary {summary}\nwrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
