"""Proof that padding changes nothing but cost: pairs beside the repository, reduced shapes, CPU.

Each case is written by the command, read back, and compared with its source pair on held-out
prompts: in the reference engine (fp32, where it fits also fp64, where only the order of summation
is left out of the picture) and, as an independent oracle, in transformers (fp32).

    python benchmarks/inflate_proof.py [--cases micro,lab_deep,lab_wide]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from results_file import machine, write_results

from hybridspec.artifacts.digest import model_digest
from hybridspec.demo import inflate
from hybridspec.demo.padded_check import (
    Agreement,
    Decoded,
    compare_decoded,
    compare_forward,
    count_differences,
    decode,
    distinct_experts,
    forward,
    routes_differ,
    tie_margin,
)
from hybridspec.demo.padded_pair import PaddedPair
from hybridspec.demo.padded_shape import QWEN36_35B_A3B, PaddedShape, Padding
from hybridspec.demo.shards import plan_shards
from hybridspec.errors import EnvironmentMissing
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair

PAIRS = Path(__file__).resolve().parents[1].parent / "shared" / "pairs"
LENGTHS = (2, 4, 8, 16)
Rows = list[dict[str, Any]]

_MICRO = PaddedShape(
    layers=12, hidden=1024, vocab=6000, heads=8, kv_heads=2, head_dim=64,
    gdn_key_heads=4, gdn_value_heads=8, gdn_key_dim=64, gdn_value_dim=64,
    experts=32, experts_per_token=2, expert_width=64, shared_width=128,
    draft_layers=4, draft_heads=8, draft_kv_heads=2, draft_head_dim=64, draft_width=512,
    max_positions=4096,
)  # fmt: skip
# All 40 layers, narrow: what added layers do to routes needs their number, not their width.
_LAB_DEEP = PaddedShape(
    layers=40, hidden=1024, vocab=16_384, heads=8, kv_heads=2, gdn_key_heads=4, gdn_value_heads=8,
    expert_width=16, shared_width=256, draft_heads=8, draft_kv_heads=2, draft_width=1024,
    max_positions=4096,
)  # fmt: skip
# Full hidden size, heads and drafter heads; fewer layers and narrower experts, to fit in memory.
_LAB_WIDE = PaddedShape(
    layers=12, vocab=32_768, expert_width=24, draft_layers=4, draft_width=1024, max_positions=4096
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One padding to prove: source pair, shape, and the types to run it in."""

    pair: str
    shape: PaddedShape
    dtypes: tuple[torch.dtype, ...]
    prompts_per_category: int


CASES = {
    "micro": Case("micro", _MICRO, (torch.float32, torch.float64), 2),
    "lab_deep": Case("lab", _LAB_DEEP, (torch.float32, torch.float64), 2),
    "lab_wide": Case("lab", _LAB_WIDE, (torch.float32,), 1),
}


def prompts_of(folder: Path, per_category: int) -> list[list[int]]:
    """Token ids of the first held-out prompts of each category."""
    rows = [r for r in json.loads((folder / "prompts.json").read_text()) if r["split"] == "test"]
    chosen: list[list[int]] = []
    for category in sorted({row["cat"] for row in rows}):
        chosen += [row["ids"] for row in rows if row["cat"] == category][:per_category]
    return chosen


def write_case(case: Case, out: Path) -> None:
    """Run the command a user would type."""
    sizes = [f"--set={name}={value}" for name, value in dataclasses.asdict(case.shape).items()]
    if inflate.run([str(PAIRS / case.pair), "--out", str(out), "--shard-gb", "0.5", *sizes]):
        raise SystemExit("the command refused, see above")


def engine_of(folder: Path, dtype: torch.dtype) -> Engine:
    """An engine over a pair's folder."""
    return load_pair(
        folder / "target", folder / "drafter", dtype=dtype, max_batch=2, max_context=1024
    )


def prove_reference(
    name: str, padded: Path, dtype: torch.dtype, prompts: list[list[int]], new_tokens: int
) -> tuple[dict[str, Any], Rows]:
    """Compare in the reference engine; returns the case's row and rows of distinct experts."""
    case = CASES[name]
    pair = PaddedPair.open(PAIRS / case.pair, case.shape)
    small, large = engine_of(PAIRS / case.pair, dtype), engine_of(padded, dtype)
    exact = engine_of(PAIRS / case.pair, torch.float64)
    agreement, records = Agreement(), []
    began = time.perf_counter()
    for prompt in prompts:
        compare_forward(
            forward(small, prompt),
            forward(large, prompt),
            pair.padding,
            agreement,
            exact=forward(exact, prompt),
        )
        decoded: list[Decoded] = []
        for drafts in (False, True):
            ours = decode(large, prompt, new_tokens, drafts=drafts)
            theirs = decode(small, prompt, new_tokens, drafts=drafts)
            compare_decoded(theirs, ours, pair.target.vocab_size, agreement)
            decoded.append(ours)
        records += decoded[1].records
    row = {
        "case": name,
        "engine": "reference",
        "dtype": str(dtype).removeprefix("torch."),
        "prompts": len(prompts),
        **dataclasses.asdict(agreement),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    config = pair.shape
    counts_RYL = distinct_experts(
        records, layers=config.layers, top_k=config.experts_per_token, experts=config.experts
    )
    return row, routing_rows(name, counts_RYL, pair.padding, config)


def routing_rows(name: str, counts_RYL: np.ndarray, padding: Padding, shape: PaddedShape) -> Rows:
    """Distinct experts of live and added layers, and how they go with those of layer 0."""
    live = list(padding.live_layers)
    added = [i for i in range(shape.layers) if i not in live]
    rows: Rows = []
    for length in LENGTHS:
        counts_RY = counts_RYL[:, :, length - 1]
        means_Y = counts_RY.mean(0)
        follow_Y = np.corrcoef(counts_RY.T)[0]
        independent = shape.experts * (
            1.0 - (1.0 - shape.experts_per_token / shape.experts) ** length
        )
        rows.append(
            {
                "case": name,
                "verify_length": length,
                "rounds": len(counts_RY),
                "live_mean_distinct_experts": float(means_Y[live].mean()),
                "added_mean_distinct_experts": float(means_Y[added].mean()),
                "added_over_live": float(means_Y[added].mean() / means_Y[live].mean()),
                "live_min_layer_mean": float(means_Y[live].min()),
                "live_max_layer_mean": float(means_Y[live].max()),
                "added_min_layer_mean": float(means_Y[added].min()),
                "added_max_layer_mean": float(means_Y[added].max()),
                "live_correlation_with_layer_0": float(follow_Y[live[1:]].mean()),
                "added_correlation_with_layer_0": float(follow_Y[added].mean()),
                "live_of_independent": float(means_Y[live].mean() / independent),
                "added_of_independent": float(means_Y[added].mean() / independent),
            }
        )
    return rows


@torch.inference_mode()
def oracle(
    folder: Path, prompts: list[list[int]], new_tokens: int
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[list[int]], dict[str, int]]:
    """Logits, routes of each layer and greedy text of transformers' own model."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    model, report = loaded
    keys = {k: len(report[k]) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    top_k = model.config.get_text_config().num_experts_per_tok
    logits, routes, texts = [], [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
        logits.append(out.logits[0])
        routes.append([r.view(len(prompt), -1).topk(top_k).indices for r in out.router_logits])
        text = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        texts.append(text[0, len(prompt) :].tolist())
    return logits, routes, texts, keys


def prove_oracle(
    name: str, padded: Path, prompts: list[list[int]], new_tokens: int
) -> dict[str, Any]:
    """Source and padded target, both in transformers."""
    case = CASES[name]
    padding = PaddedPair.open(PAIRS / case.pair, case.shape).padding
    began = time.perf_counter()
    small = oracle(PAIRS / case.pair / "target", prompts, new_tokens)
    large = oracle(padded / "target", prompts, new_tokens)
    vocab = small[0][0].shape[1]
    row: dict[str, Any] = {
        "case": name,
        "engine": "transformers",
        "dtype": "float32",
        "prompts": len(prompts),
        "logit_difference": 0.0,
        "tied_prompts": 0,
        "tied_logit_difference": 0.0,
        "padded_mass": 0.0,
        "routes": 0,
        "route_differences": 0,
        "route_tie_margin": 0.0,
        "tokens": sum(map(len, small[2])),
        "token_differences": sum(map(count_differences, small[2], large[2])),
        **large[3],
    }
    exact = engine_of(PAIRS / case.pair, torch.float64)
    for n, prompt in enumerate(prompts):
        a, b, judge, differences = small[0][n], large[0][n], forward(exact, prompt), 0
        mass = float(b.double().softmax(-1)[:, vocab:].sum(-1).max())
        row["padded_mass"] = max(row["padded_mass"], mass)
        for j, layer in enumerate(padding.live_layers):
            differ = routes_differ(small[1][n][j], large[1][n][layer])
            row["routes"] += len(differ)
            differences += int(differ.sum())
            if bool(differ.any()):
                margin = tie_margin(judge.router_logits[j][differ], small[1][n][j].shape[1])
                row["route_tie_margin"] = max(row["route_tie_margin"], margin)
        row["route_differences"] += differences
        row["tied_prompts"] += differences > 0
        key = "tied_logit_difference" if differences else "logit_difference"
        row[key] = max(row[key], float((a - b[:, :vocab]).abs().max()))
    return row | {"wall_s": round(time.perf_counter() - began, 1)}


def full_shape_row() -> dict[str, Any]:
    """What the command would write at the full shape."""
    pair = PaddedPair.open(PAIRS / "lab", QWEN36_35B_A3B)
    shards = {
        "target": plan_shards(pair.target_weights(), 4_000_000_000),
        "drafter": plan_shards(pair.drafter_weights(), 4_000_000_000),
    }
    return {"case": "full_shape_plan"} | inflate.describe(pair, shards)["parts"]


def summarise(rows: Sequence[dict[str, Any]], routing: Rows) -> dict[str, Any]:
    """The worst of each kind over all cases."""

    def worst(key: str, **where: str) -> Any:
        rows_at = [r for r in rows if all(r.get(k) == v for k, v in where.items())]
        return max((r[key] for r in rows_at if key in r), default=None)

    deep = {r["verify_length"]: r for r in routing if r["case"] == "lab_deep"}
    summary: dict[str, Any] = {
        "fp32_logit_difference_max": worst("logit_difference", engine="reference", dtype="float32"),
        "fp64_logit_difference_max": worst("logit_difference", engine="reference", dtype="float64"),
        "oracle_logit_difference_max": worst("logit_difference", engine="transformers"),
        "logit_scale_max": worst("logit_scale"),
        "route_differences": sum(r.get("route_differences", 0) for r in rows),
        "route_tie_margin_max": worst("route_tie_margin"),
        "tied_prompts": sum(r.get("tied_prompts", 0) for r in rows),
        "tied_logit_difference_max": worst("tied_logit_difference"),
        "token_differences": sum(r.get("token_differences", 0) for r in rows),
        "draft_differences": sum(r.get("draft_differences", 0) for r in rows),
        "pass_through_changes": sum(r.get("pass_through_changes", 0) for r in rows),
        "padded_mass_max": worst("padded_mass"),
        "draft_padded_mass_max": worst("draft_padded_mass"),
        "padded_margin_max": worst("padded_margin"),
        "routes": sum(r.get("routes", 0) for r in rows),
        "tokens": sum(r.get("tokens", 0) for r in rows),
        "drafts": sum(r.get("drafts", 0) for r in rows),
    }
    for length, row in deep.items():
        summary[f"lab_deep_live_experts_{length}"] = row["live_mean_distinct_experts"]
        summary[f"lab_deep_added_experts_{length}"] = row["added_mean_distinct_experts"]
        summary[f"lab_deep_added_over_live_{length}"] = row["added_over_live"]
    return summary


def main() -> None:
    """Write each case, compare, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not (PAIRS / "lab").is_dir():
        raise EnvironmentMissing("the trained pairs are not beside the repository: ../shared/pairs")
    where, rows, routing = machine(), [], []
    for name in arguments.cases.split(","):
        case = CASES[name]
        prompts = prompts_of(PAIRS / case.pair, case.prompts_per_category)
        few = prompts[:: case.prompts_per_category]
        with tempfile.TemporaryDirectory() as scratch:
            padded = Path(scratch) / name
            write_case(case, padded)
            source = {
                "source_target_sha256": model_digest(PAIRS / case.pair / "target"),
                "source_drafter_sha256": model_digest(PAIRS / case.pair / "drafter"),
            }
            for dtype in case.dtypes:
                chosen = prompts if dtype == torch.float32 else few[::2]
                row, found = prove_reference(name, padded, dtype, chosen, arguments.new_tokens)
                rows.append(row | source)
                routing += found if dtype == torch.float32 else []
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                gc.collect()
            rows.append(prove_oracle(name, padded, few, arguments.new_tokens))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            gc.collect()
    rows.append(full_shape_row())
    path = write_results(
        "inflate_proof",
        rows=[*rows, *routing],
        summary=summarise(rows, routing),
        seed=0,
        where=where,
        packages=("torch", "transformers", "numpy", "safetensors"),
        out=arguments.out,
    )
    print(path, json.dumps(summarise(rows, routing), indent=1))


if __name__ == "__main__":
    main()
