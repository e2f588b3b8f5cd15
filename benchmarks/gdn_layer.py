"""Conv, split, gates, norms and GDN of 30 layers with their commits: SGLang's launches and ours.

What the single benchmarks leave out: rows come from the conv just before, so they lie in the L2,
and launches follow each other as in a layer. SGLang: conv, split, recurrent verify in each layer,
then a scatter of states and one of windows. Ours: conv, block verify in each layer, then one commit
of states and windows; or the lazy commit, with one launch for the windows. Outputs, states and
windows are compared first, timed second; graphs rotate through sets past the L2.

    python benchmarks/gdn_layer.py [--quick] [--out DIR]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

from conv.launches import Ours, Stock, sglang_files
from conv.workload import Workload as ConvWorkload
from gdn.baselines import RECURRENT, SCATTER, sglang_module
from gdn.timing import Graph, measure, summarise
from gdn.workload import Case, Shape, Workload, make_workload
from results_file import gpu, machine, write_results

SEED = 0
SETS = 4
STATE_GATE = 3e-5
# Both sides round outputs to bf16 once.
OUTPUT_GATE = 1e-2


class Chain:
    """Both sides' launches of all layers over the same rows, states and windows."""

    def __init__(self, batch: int, tokens: int, device: torch.device) -> None:
        from hybridspec.kernels.gdn.factors import Factors
        from hybridspec.kernels.gdn.pending import Pending

        self.conv = ConvWorkload(batch, tokens, device, sets=SETS)
        self.gdn: Workload = make_workload(Case(Shape(), batch, tokens, SETS), device, SEED)
        self.layers, self.batch, self.tokens = self.conv.layers, batch, tokens
        # States and windows of a request lie in the same slot, as in an engine.
        pool_XSCW = torch.randn(
            self.layers, self.gdn.case.slots, self.conv.channels, 3, device=device
        ).to(self.conv.dtype)
        self.conv.pool_NXSCW = pool_XSCW.expand(SETS, *pool_XSCW.shape)
        shape = self.gdn.case.shape
        self.stock = Stock(
            self.conv, sglang_files(hopper=torch.cuda.get_device_capability()[0] >= 9) or _absent()
        )
        self.ours = Ours(self.conv, dependent=True)
        heads = (shape.value_heads, shape.value_dim)
        self.out_XBTHV = torch.empty(
            self.layers, batch, tokens, *heads, dtype=torch.bfloat16, device=device
        )
        self.intermediate_XBTHVK = torch.empty(
            self.layers, batch, tokens, *heads, shape.key_dim, device=device
        )
        sizes = (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim)

        def factors(rows: int) -> Factors:
            return Factors.allocate(self.layers, rows, *sizes, device=device)

        self.factors = factors(batch)
        self.lazy_factors_N = [factors(2 * batch) for _ in range(SETS)]
        self.pending_N = [Pending.allocate(batch, device=device) for _ in range(SETS)]
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens
        self.stock_out: dict[int, torch.Tensor] = {}

    def _gates(self, n: int, x: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gdn.a_NXBTH[n, x], self.gdn.b_NXBTH[n, x]

    def stock_round(self, n: int) -> None:
        """SGLang: three launches a layer and two at the end."""
        recurrent, w = sglang_module(RECURRENT), self.gdn
        self.conv.slots_B = w.slots_NB[n]
        for x in range(self.layers):
            q, k, v = self.stock.conv_and_split(n, x)
            a, b = (gate.flatten(0, 1) for gate in self._gates(n, x))
            self.stock_out[x] = recurrent.fused_sigmoid_gating_delta_rule_update(
                A_log=w.A_log_XH[x],
                dt_bias=w.dt_bias_XH[x],
                q=q,
                k=k,
                v=v,
                a=a,
                b=b,
                initial_state_source=w.state_XSHVK[x],
                initial_state_indices=w.slots_NB[n],
                cu_seqlens=self.starts,
                use_qk_l2norm_in_kernel=True,
                softplus_beta=1.0,
                softplus_threshold=20.0,
                is_kda=False,
                disable_state_update=True,
                intermediate_states_buffer=self.intermediate_XBTHVK[x],
                intermediate_state_indices=self.conv.rows_B,
                cache_steps=self.tokens,
                retrieve_parent_token=None,
            )
        sglang_module(SCATTER).fused_mamba_state_scatter_with_mask(
            w.state_XSHVK, self.intermediate_XBTHVK, w.slots_NB[n], w.last_step_B
        )
        self.stock.commit(n, w.last_step_B)

    def _verify(self, n: int, x: int, factors: Any, **options: Any) -> None:
        from hybridspec.kernels.gdn.dispatch import verify

        w = self.gdn
        verify(
            self.ours.conv(n, x),
            *self._gates(n, x),
            w.A_log_XH[x],
            w.dt_bias_XH[x],
            w.state_XSHVK[x],
            w.slots_NB[n],
            w.lengths_B,
            factors,
            x,
            self.out_XBTHV[x],
            key_heads=w.case.shape.key_heads,
            dependent_launch=True,
            **options,
        )

    def our_round(self, n: int) -> None:
        """Two launches a layer and one at the end."""
        from hybridspec.kernels.gdn.commit import ConvWindows, commit

        w, c = self.gdn, self.conv
        c.slots_B = w.slots_NB[n]
        for x in range(self.layers):
            self._verify(n, x, self.factors)
        windows = ConvWindows(c.pool_NXSCW[n], c.raw_XBTC)
        commit(w.state_XSHVK, w.slots_NB[n], w.accepted_B, self.factors, windows=windows)

    def lazy_round(self, n: int) -> None:
        """Two launches a layer and two small ones at the end."""
        from hybridspec.kernels.conv_window.commit import commit as commit_windows
        from hybridspec.kernels.gdn.pending import advance

        w, c = self.gdn, self.conv
        c.slots_B = w.slots_NB[n]
        for x in range(self.layers):
            self._verify(n, x, self.lazy_factors_N[n], pending=self.pending_N[n])
        advance(self.pending_N[n], w.slots_NB[n], w.accepted_B)
        commit_windows(c.pool_NXSCW[n], c.raw_XBTC, c.slots_B, w.accepted_B)

    def flush(self, n: int) -> None:
        """States of a set after a lazy round."""
        from hybridspec.kernels.gdn.pending import flush

        w = self.gdn
        flush(w.state_XSHVK, w.slots_NB[n], self.lazy_factors_N[n], self.pending_N[n])

    def check(self) -> dict[str, Any]:
        """Ours and lazy against SGLang after one round: outputs, states, windows."""
        windows_XSCW = self.conv.pool_NXSCW[0].clone()
        self.intermediate_XBTHVK.fill_(float("nan"))
        self.stock_round(0)
        expected = torch.stack([self.stock_out[x].flatten() for x in range(self.layers)])
        expected_state = self.gdn.state_XSHVK.clone()
        expected_windows = self.conv.pool_NXSCW[0].clone()
        row: dict[str, Any] = {"failed": False}
        for name, run in (("ours", self.our_round), ("lazy", self.lazy_round)):
            self.gdn.restore()
            self.conv.pool_NXSCW[0].copy_(windows_XSCW)
            self.out_XBTHV.fill_(float("nan"))
            run(0)
            if name == "lazy":
                self.flush(0)
            row[f"{name}_output_error"] = _relative(self.out_XBTHV.flatten(1), expected)
            row[f"{name}_state_error"] = _relative(self.gdn.state_XSHVK, expected_state)
            row[f"{name}_window_values_unlike"] = int(
                (self.conv.pool_NXSCW[0] != expected_windows).sum()
            )
            row["failed"] |= not (
                row[f"{name}_output_error"] < OUTPUT_GATE
                and row[f"{name}_state_error"] < STATE_GATE
                and row[f"{name}_window_values_unlike"] == 0
            )
        self.gdn.restore()
        return row


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def _absent() -> Any:
    raise SystemExit("error: sglang is not installed; this benchmark compares with its kernels")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--out", type=Path, help="folder of gdn_layer.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no CUDA device; run this on a GPU", file=sys.stderr)
        return 4
    where = {**machine(), **gpu()}
    device = torch.device("cuda", 0)
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"failed_checks": 0}
    for batch in (1, 4):
        for tokens in (4, 8, 16):
            chain = Chain(batch, tokens, device)
            check = chain.check()
            rows.append({"kind": "check", "batch": batch, "tokens": tokens, **check})
            summary["failed_checks"] += int(check["failed"])
            graphs: dict[str, Graph] = {}
            runs: dict[str, Callable[[int], None]] = {
                "sglang": chain.stock_round,
                "ours": chain.our_round,
                "lazy": chain.lazy_round,
            }
            for name, run in runs.items():

                def all_sets(run: Callable[[int], None] = run) -> None:
                    for n in range(SETS):
                        run(n)

                all_sets()
                graphs[name] = Graph(all_sets, rounds=SETS)
            found = {
                name: summarise(samples)
                for name, samples in measure(graphs, 7 if options.quick else 20).items()
            }
            for name, latency in found.items():
                rows.append(
                    {
                        "kind": "time",
                        "batch": batch,
                        "tokens": tokens,
                        "method": name,
                        "round_us": latency.median_us,
                        "p10_us": latency.p10_us,
                        "p90_us": latency.p90_us,
                        "launches": (graphs[name].nodes or 0) // SETS or None,
                    }
                )
            key = f"b{batch}_t{tokens}"
            for name in ("ours", "lazy"):
                summary[f"{key}_{name}"] = found["sglang"].median_us / found[name].median_us
            times = "  ".join(f"{name} {x.median_us:.0f} us" for name, x in found.items())
            print(f"batch {batch} T={tokens}: {times}  {check}", flush=True)
            del chain, graphs, runs
            torch.cuda.empty_cache()
    path = write_results(
        "gdn_layer",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "sglang"),
        out=options.out,
    )
    for name, value in summary.items():
        print(f"{name}: {value:.3g}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
