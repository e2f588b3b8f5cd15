"""Conv in front of GDN for 30 layers: SGLang's launches against ours, checked first, timed second.

SGLang's are called as its GDN backend calls them for a verify: `causal_conv1d_update` with the
intermediate windows, the split into query, key and value, and after acceptance the scatter of all
layers' windows. Ours are `prepare` (the same and the gates and norms too, which SGLang computes in
the kernel behind) and `commit`, and `verify`, the conv alone. CUDA graphs of several rounds, each
on other inputs, weights and windows, so that they come from memory; replays take turns.

    python benchmarks/conv_window.py [--quick] [--sweep]
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conv.launches import Ours, Stock, sglang_files
from conv.workload import SEED, Workload
from results_file import gpu, machine, write_results


def check(w: Workload, files: types.SimpleNamespace | None) -> dict[str, Any]:
    """Errors against float64, and values that differ from SGLang's in any bit."""
    from hybridspec.kernels.conv_window import naive

    ours = Ours(w)
    found = ours.prepare(0, 0)
    inputs = (w.rows_NXBTC[0, 0], w.pool_NXSCW[0, 0], w.weight_NXCW[0, 0])
    gates = (w.a_XBTH[0], w.b_XBTH[0], w.a_log_XH[0], w.dt_bias_XH[0])
    rows_BTC, pool_SCW, weight_CW, a_BTH, b_BTH, a_log_H, dt_bias_H = (
        x.double() for x in (*inputs, *gates)
    )
    exact = naive.prepare(
        rows_BTC,
        pool_SCW,
        weight_CW,
        w.slots_B,
        w.full_B,
        a_BTH,
        b_BTH,
        a_log_H,
        dt_bias_H,
        num_key_heads=w.key_heads,
        head_dim=w.head_dim,
    )
    errors = {
        name: ((value.double() - reference).abs() / (1 + reference.abs())).max().item()
        for (name, value), reference in zip(found._asdict().items(), exact, strict=True)
    }
    row: dict[str, Any] = {
        "output_error": max(errors[name] for name in ("q_BTHD", "k_BTHD", "v_BTHD")),
        "gate_error": max(errors["g_BHT"], errors["beta_BHT"]),
    }
    accepted_B = (torch.arange(w.batch, device=w.device) % w.tokens + 1).int()
    before_XSCW = w.pool_NXSCW[0].clone()
    for x in range(w.layers):
        ours.prepare(0, x)
    ours.commit(0, accepted_B)
    committed_XSCW = w.pool_NXSCW[0].clone()
    expected_XSCW = naive.commit(before_XSCW, w.rows_NXBTC[0], w.slots_B, accepted_B)
    row["wrong_window_values"] = int((committed_XSCW != expected_XSCW).sum())
    w.pool_NXSCW[0].copy_(before_XSCW)
    if files is not None:
        stock = Stock(w, files)
        parts = [part.flatten(2) for part in ours.prepare(0, 0)[:3]]
        mixed = torch.cat(parts, dim=-1).flatten(0, 1)
        theirs = torch.cat([x.reshape(len(mixed), -1) for x in stock.conv_and_split(0, 0)], dim=-1)
        w.pool_NXSCW[0].copy_(before_XSCW)
        conv = ours.conv(0, 0).flatten(0, 1)
        row["values_unlike_sglang"] = int((mixed != theirs).sum() + (conv != theirs).sum())
        for x in range(w.layers):
            stock.conv(0, x)
        # SGLang's steps count from zero.
        stock.commit(0, accepted_B - 1)
        row["window_values_unlike_sglang"] = int((w.pool_NXSCW[0] != committed_XSCW).sum())
        w.pool_NXSCW[0].copy_(before_XSCW)
    limits = (5e-2, 1e-5) if w.dtype == torch.bfloat16 else (1e-5, 1e-5)
    row["failed"] = not (
        row["output_error"] <= limits[0]
        and row["gate_error"] <= limits[1]
        and row["wrong_window_values"] == 0
        and not row.get("values_unlike_sglang")
        and not row.get("window_values_unlike_sglang")
    )
    return row


def works(w: Workload, files: types.SimpleNamespace | None) -> dict[str, Callable[[int], None]]:
    """What is timed: one round each, of one set."""
    plain, dependent = Ours(w), Ours(w, dependent=True)
    last_step_B = w.full_B - 1

    def layers(work: Callable[[int, int], Any], *after: Callable[[int], None]) -> Any:
        def run(n: int) -> None:
            for x in range(w.layers):
                work(n, x)
            for more in after:
                more(n)

        return run

    found: dict[str, Callable[[int], None]] = {}
    if files is not None:
        stock = Stock(w, files)
        found |= {
            "sglang conv": layers(stock.conv),
            "sglang conv+split": layers(stock.conv_and_split),
            "sglang commit": lambda n: stock.commit(n, last_step_B),
            "sglang round": layers(stock.conv_and_split, lambda n: stock.commit(n, last_step_B)),
        }
    for suffix, ours in (("", plain), (" pdl", dependent)):
        found |= {
            f"conv{suffix}": layers(ours.conv),
            f"conv without raw{suffix}": layers(ours.conv_without_raw),
            f"prepare{suffix}": layers(ours.prepare),
            f"commit{suffix}": lambda n, ours=ours: ours.commit(n, w.full_B),
            f"round{suffix}": layers(ours.prepare, lambda n, ours=ours: ours.commit(n, w.full_B)),
        }
    return found


def time_all(w: Workload, timed: dict[str, Callable[[int], None]], repeats: int) -> dict[str, Any]:
    """Median microseconds a round of each, by name."""
    from gdn.timing import Graph, measure, summarise

    graphs = {}
    for name, work in timed.items():
        work(0)

        def all_sets(work: Callable[[int], None] = work) -> None:
            for n in range(w.sets):
                work(n)

        graphs[name] = Graph(all_sets, rounds=w.sets)
    return {name: summarise(samples) for name, samples in measure(graphs, repeats).items()}


def sweep(w: Workload, repeats: int) -> list[dict[str, Any]]:
    """Other block sizes of our kernels, each behind the same wrapper, launched dependent."""
    from gdn.timing import Graph, measure, summarise

    ours = Ours(w, dependent=True)
    verify, prepare, commit = ours.modules
    tries: list[tuple[Any, dict[str, int], Callable[[int, int], Any] | None]] = []
    for rows in (4, 8, 16):
        tries.append((prepare, {"ROWS_PER_PROGRAM": rows}, ours.prepare))
        for block in (32, 64, 128):
            sizes = {"ROWS_PER_PROGRAM": rows, "BLOCK_CHANNELS": block}
            tries.append((verify, sizes, ours.conv))
    for block, warps in ((64, 1), (128, 1), (256, 1), (512, 1), (256, 2), (512, 4), (1024, 4)):
        tries.append((commit, {"BLOCK_CHANNELS": block, "NUM_WARPS": warps}, None))
    graphs, labels = {}, {}
    for module, sizes, work in tries:

        def run(work: Any = work) -> None:
            for n in range(w.sets):
                if work is None:
                    ours.commit(n, w.full_B)
                else:
                    for x in range(w.layers):
                        work(n, x)

        with mock.patch.dict(vars(module), sizes):
            run()
            name = f"{module.__name__.rpartition('.')[2]} {sizes}"
            graphs[name] = Graph(run, rounds=w.sets)
            labels[name] = {"kernel": module.__name__.rpartition(".")[2], **sizes}
    found = {name: summarise(samples) for name, samples in measure(graphs, repeats).items()}
    for name, latency in sorted(found.items(), key=lambda item: (item[0][:6], item[1].median_us)):
        print(f"  {latency.median_us:8.1f} us  {name}")
    return [
        {"kind": "sweep", "batch": w.batch, "tokens": w.tokens, "us": x.median_us, **labels[name]}
        for name, x in found.items()
    ]


def floor_us(w: Workload, bytes_per_s: float) -> float:
    """Rows in and out and kept, weights and windows, commit's windows: read or written once."""
    rows = 3 * w.batch * w.tokens + 4 + 3 * w.batch
    commit = w.batch * (3 + 3)
    return 1e6 * w.dtype.itemsize * w.layers * w.channels * (rows + commit) / bytes_per_s


def summarise_rows(rows: list[dict[str, Any]], timed: dict[tuple[int, int], dict]) -> dict:
    """Ratios over SGLang of the better of ours, microseconds of ours."""
    summary: dict[str, Any] = {"failed_checks": sum(bool(r.get("failed")) for r in rows)}
    for (batch, tokens), found in timed.items():
        key = f"b{batch}_t{tokens}"
        for part, theirs in (
            ("conv", "sglang conv"),
            ("prepare", "sglang conv+split"),
            ("commit", "sglang commit"),
            ("round", "sglang round"),
        ):
            best = min(found[part].median_us, found[f"{part} pdl"].median_us)
            summary[f"{key}_{part}_us"] = best
            if theirs in found:
                summary[f"{key}_{part}"] = found[theirs].median_us / best
    return summary


def dry_run() -> None:
    """The checks on the host in Triton's interpreter, in small shapes and fp32."""
    files = sglang_files(hopper=False)
    failed = False
    for batch, tokens in ((1, 4), (2, 5)):
        w = Workload(batch, tokens, torch.device("cpu"), 2, 1, 2, 16, torch.float32, sets=2)
        # SGLang's scatter refuses tensors of the host.
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            row = check(w, files)
        # In fp32 a product and a sum may be one instruction: bits are compared on the GPU.
        row.pop("values_unlike_sglang", None)
        failed |= row["failed"]
        print(f"batch {batch} T={tokens}: {row}")
    raise SystemExit(1 if failed else 0)


def main() -> None:
    # Our kernels come from the folder above.
    sys.path.append(str(Path(__file__).resolve().parent.parent))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the result file")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--sweep", action="store_true", help="other block sizes of ours too")
    parser.add_argument("--tokens", default="4,8,16")
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--dry-run", action="store_true", help="check small shapes on the host")
    options = parser.parse_args()
    if options.dry_run:
        dry_run()
    if not torch.cuda.is_available():
        print("conv_window.py needs a CUDA device; --dry-run checks small shapes without one")
        raise SystemExit(4)
    from gdn.timing import copy_bandwidth, empty_launches

    where, device = {**machine(), **gpu()}, torch.device("cuda", 0)
    repeats = 7 if options.quick else 25
    files = sglang_files(hopper=torch.cuda.get_device_capability(device)[0] >= 9)
    if files is None:
        print("sglang is not installed: only ours is timed")
    bandwidth = copy_bandwidth(device)
    empty_us = {count: empty_launches(count, repeats) for count in (30, 31, 61)}
    rows: list[dict[str, Any]] = []
    timed: dict[tuple[int, int], dict] = {}
    for batch in map(int, options.batches.split(",")):
        for tokens in map(int, options.tokens.split(",")):
            w = Workload(batch, tokens, device)
            case = {"batch": batch, "tokens": tokens, "sets": w.sets}
            rows.append({"kind": "check", **case, **check(w, files)})
            print(rows[-1], flush=True)
            found = timed[batch, tokens] = time_all(w, works(w, files), repeats)
            rows += [
                {
                    "kind": "time",
                    **case,
                    "work": name,
                    "us": latency.median_us,
                    "p10_us": latency.p10_us,
                    "p90_us": latency.p90_us,
                    "round_floor_us": floor_us(w, bandwidth),
                }
                for name, latency in found.items()
            ]
            if options.sweep and tokens != 4:
                rows += sweep(w, repeats)
            del w
            torch.cuda.empty_cache()
    summary = summarise_rows(rows, timed)
    summary["copy_gb_per_s"] = bandwidth / 1e9
    summary |= {f"empty_{count}_launches_us": us for count, us in empty_us.items()}
    names = list(next(iter(timed.values())))
    columns = [f"b{batch} T={tokens}" for batch, tokens in timed]
    print("\nus of 30 layers, median\n" + " " * 22 + "".join(f"{c:>10}" for c in columns))
    for name in names:
        cells = "".join(f"{found[name].median_us:10.1f}" for found in timed.values())
        print(f"{name:<22}{cells}")
    for key, value in summary.items():
        print(f"{key}: {value:.3g}" if isinstance(value, float) else f"{key}: {value}")
    path = write_results(
        "conv_window",
        rows=rows,
        summary=summary,
        seed=SEED,
        where=where,
        packages=("torch", "triton", "sglang"),
        out=options.out,
    )
    print(f"wrote {path}")
    if summary["failed_checks"]:
        sys.exit(5)


if __name__ == "__main__":
    main()
