"""The result file of recordings: rates of all arms, ratios, texts against plain decoding."""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from results_file import write_results
from serving.boots import boot_rows, not_measured, without_folders
from serving.decoding import Looping, Rounds, paired_ratio, rates, rounds_of
from serving.load import Stream
from serving.reading import reading_rows, reading_table
from serving.texts import compare, differences_of, scored_elsewhere

OURS = "hybridspec"
PAPER = "hybridspec-paper"
STOCK_BLOCKS = ("dflash16", "dflash8", "dflash5")
PACKAGES = ("sglang", "torch", "triton", "openai")
NAME = "sglang_decode"


class Arms:
    """Recorded arms with their rounds and rates.

    Args:
        raws: recordings; of arms in several, the first counts, as plain decoding is measured
            beside the arms that are compared with it.
    """

    def __init__(self, raws: Sequence[Mapping[str, Any]], looping: Looping) -> None:
        self.looping = looping
        self.streams: dict[tuple[str, int], list[Stream]] = {}
        self.boot: dict[str, str] = {}
        self.passes: dict[tuple[str, int], list[int]] = {}
        for raw in raws:
            for name, arm in raw["arms"].items():
                for clients, streams in arm["runs"].items():
                    found = [Stream(**stream) for stream in streams]
                    if (name, int(clients)) not in self.streams:
                        self.streams[name, int(clients)] = found
                        if clients in arm.get("prefill_passes", {}):
                            self.passes[name, int(clients)] = arm["prefill_passes"][clients]
                self.boot.setdefault(name, arm["boot"])
        self.rounds: dict[tuple[str, int], Rounds] = {
            (name, clients): rounds_of(streams, looping, clients=clients)
            for (name, clients), streams in self.streams.items()
        }
        self.rates = {
            key: rates(self.rounds[key], self.streams[key], clients=key[1]) for key in self.rounds
        }

    def speed(self, name: str, clients: int, category: str = "all") -> float | None:
        """Tokens a second, None where there is no such run."""
        found = self.rates.get((name, clients), {}).get(category)
        return None if found is None else float(found["tokens_per_s"])

    def best(self, names: Sequence[str], clients: int) -> tuple[str, float] | None:
        """The fastest of `names` at a client count."""
        known = [(name, s) for name in names if (s := self.speed(name, clients)) is not None]
        return max(known, key=lambda entry: entry[1], default=None)

    @property
    def fixed(self) -> list[str]:
        """Fixed lengths of our own engine."""
        return sorted({name for name, _ in self.streams if name.startswith("fixed")})


def rows_of(arms: Arms) -> list[dict[str, Any]]:
    """One row an arm, client count and category."""
    found = []
    for (name, clients), by in sorted(arms.rates.items()):
        for category, values in by.items():
            rounded = {
                key: round(value, 4) if isinstance(value, float) else value
                for key, value in values.items()
            }
            row: dict[str, Any] = {
                "kind": "decode", "arm": name, "clients": clients, "category": category, **rounded,
            }  # fmt: skip
            plain = arms.speed("ar", clients, category)
            if plain:
                row["over_ar"] = round(values["tokens_per_s"] / plain, 4)
            found.append(row)
    return found


def beside_rows(arms: Arms, other: Arms) -> list[dict[str, Any]]:
    """Rates of `other` on the prompts of `arms`, an arm and client count that both have a row."""
    found = []
    for name, clients in sorted(arms.rounds.keys() & other.rounds.keys()):
        rounds, prompts = other.rounds[name, clients], arms.rounds[name, clients].prompt
        counted = rounds.counted & np.isin(rounds.prompt, prompts)
        if counted.any():
            seconds, tokens = rounds.seconds[counted].sum(), rounds.tokens[counted].sum()
            found.append(
                {
                    "kind": "beside",
                    "arm": name,
                    "clients": clients,
                    "prompts": len(np.unique(rounds.prompt[counted])),
                    "rounds": int(counted.sum()),
                    "tokens_per_s": round(clients * float(tokens / seconds), 4),
                    "ms_a_round": round(1e3 * float(seconds) / int(counted.sum()), 4),
                }
            )
    return found


def text_rows(arms: Arms, scored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Greedy texts of every arm with one client against plain decoding with one."""
    plain = arms.streams.get(("ar", 1))
    if plain is None:
        return []
    return [
        {
            "kind": "texts",
            "arm": name,
            "clients": clients,
            **compare(streams, plain, scored, arms.looping),
        }
        for (name, clients), streams in sorted(arms.streams.items())
        if (name, clients) != ("ar", 1)
    ]


def counter_rows(raws: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lengths and emitted tokens that the plugin counted on the device in each run."""
    found = []
    for raw in raws:
        before: dict[str, Mapping[str, Any]] = {}
        for name, arm in raw["arms"].items():
            for clients, counted in arm.get("counters", {}).items():
                if counted is None:
                    continue
                last = before.get(arm["boot"], {})
                before[arm["boot"]] = counted

                def since(key: str, counted: Any = counted, last: Any = last) -> Any:
                    new, old = counted[key], last.get(key)
                    if isinstance(new, list):
                        return [n - o for n, o in zip(new, old or [0] * len(new), strict=True)]
                    return new - (old or 0)

                rounds = since("request_rounds")
                found.append(
                    {
                        "kind": "counters",
                        "arm": name,
                        "clients": int(clients),
                        "request_rounds": rounds,
                        "mean_verify_length": round(since("verified_rows") / max(rounds, 1), 4),
                        "tokens_a_round": round(since("emitted_tokens") / max(rounds, 1), 4),
                        "length_histogram": since("length_histogram"),
                        "emitted_histogram": since("emitted_histogram"),
                        "lengths": without_folders(counted.get("lengths") or "") or None,
                        "warnings": counted.get("warnings"),
                    }
                )
    return found


def summary_of(arms: Arms) -> dict[str, Any]:
    """The keys that people look for; what was not measured is not there."""
    found: dict[str, Any] = {}

    def ratio(key: str, clients: int, other: tuple[str, float] | None) -> None:
        ours = arms.speed(OURS, clients)
        if ours is None or other is None:
            return
        found[key] = round(ours / other[1], 4)
        if clients == 1:
            middle, low, high = paired_ratio(arms.rounds[OURS, 1], arms.rounds[other[0], 1])
            found[f"{key}_paired"] = [round(middle, 4), round(low, 4), round(high, 4)]

    if (speed := arms.speed(OURS, 1)) is not None:
        found["tokens_per_s"] = round(speed, 1)
    ratio("over_ar", 1, arms.best(["ar"], 1))
    ratio("over_dflash16", 1, arms.best(["dflash16"], 1))
    if best := arms.best(STOCK_BLOCKS, 1):
        ratio("over_best_fixed", 1, best)
        found["best_fixed_block"] = best[0]
    if best := arms.best(arms.fixed, 1):
        ratio("over_best_fixed_length_ours", 1, best)
        found["best_fixed_length_ours"] = best[0]
    ratio("over_paper_rule", 1, arms.best([PAPER], 1))
    categories = [name for name in arms.rates.get(("ar", 1), {}) if name != "all"]
    by = {
        name: round(ours / plain, 4)
        for name in categories
        if (ours := arms.speed(OURS, 1, name)) and (plain := arms.speed("ar", 1, name))
    }
    if by:
        found["min_category_over_ar"] = min(by.values())
        found["category_over_ar"] = by
    for clients in sorted({clients for _, clients in arms.streams} - {1}):
        ratio(f"clients{clients}_over_ar", clients, arms.best(["ar"], clients))
        ratio(f"clients{clients}_over_dflash16", clients, arms.best(["dflash16"], clients))
        ratio(f"clients{clients}_over_best", clients, arms.best(["ar", *STOCK_BLOCKS], clients))
        ratio(f"clients{clients}_over_best_fixed_ours", clients, arms.best(arms.fixed, clients))
        ratio(f"clients{clients}_over_paper_rule", clients, arms.best([PAPER], clients))
    found["speeds"] = {
        f"{name}, {clients} clients": round(by["all"]["tokens_per_s"], 1)
        for (name, clients), by in sorted(arms.rates.items())
        if "all" in by
    }
    return found


def whole_runs(reading: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whole runs of our arm over plain decoding's on the same requests, prefills included."""
    found: dict[str, Any] = {}
    for row in reading:
        if row["arm"] == OURS and "whole_run_over_ar" in row:
            found[f"whole_run_over_ar_clients{row['clients']}"] = row["whole_run_over_ar"]
            lengths = found.setdefault("answer_tokens", {})
            lengths[f"{row['clients']} clients"] = [row["tokens_shortest"], row["tokens_longest"]]
    return found


def table(arms: Arms) -> str:
    """Arms by client count, for people."""
    names = sorted({name for name, _ in arms.streams})
    counts = sorted({clients for _, clients in arms.streams})
    lines = [f"{'arm':18s}" + "".join(f"{f'{c} clients':>30s}" for c in counts)]
    for name in names:
        cells = []
        for clients in counts:
            values = arms.rates.get((name, clients), {}).get("all")
            plain = arms.speed("ar", clients)
            if values is None:
                cells.append(f"{'-':>30s}")
                continue
            over = f"{values['tokens_per_s'] / plain:.2f}x" if plain else ""
            cells.append(
                f"{values['tokens_per_s']:9.1f} t/s {values['tokens_a_round']:4.2f} "
                f"{values['ms_a_round']:6.2f}ms {over:>5s}"
            )
        lines.append(f"{name:18s}" + "".join(cells))
    lines.append("")
    found = sorted({c for by in arms.rates.values() for c in by if c != "all"})
    lines.append(f"{'1 client, t/s':18s}" + "".join(f"{c[:10]:>11s}" for c in found))
    for name in names:
        if (name, 1) in arms.rates:
            values = [arms.speed(name, 1, c) for c in found]
            lines.append(
                f"{name:18s}" + "".join(f"{v:11.1f}" if v else f"{'-':>11s}" for v in values)
            )
    return "\n".join(lines)


def read_recording(named: Path) -> dict[str, Any]:
    """A recording, packed (`.json.xz`) or not; `FILE:ARM,ARM` has these arms of it alone."""
    name, _, wanted = named.name.partition(":")
    path = named.with_name(name)
    data = path.read_bytes()
    raw = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
    if wanted:
        names = wanted.split(",")
        raw = {
            "about": {**raw["about"], "arms_taken": wanted},
            "arms": {arm: raw["arms"][arm] for arm in names},
            "boots": {boot: raw["boots"][boot] for boot in names if boot in raw["boots"]},
        }
    return raw


def report(
    paths: Sequence[Path],
    tokenizer: Path,
    out: Path | None,
    *,
    scored_in: Path | None = None,
    beside: Path | None = None,
    name: str = NAME,
) -> Path:
    """Write `NAME.json` of recordings and print its tables.

    Args:
        scored_in: recording whose scored plain decoding gives all margins; else the first of
            `paths` that has one.
        beside: recording whose rates on the same prompts are told too.

    Raises:
        SystemExit: the scored plain decoding is not that of these recordings.
    """
    raws = [read_recording(path) for path in paths]
    arms = Arms(raws, Looping(tokenizer))
    scored = next((raw["scored"] for raw in raws if "scored" in raw), [])
    elsewhere = None if scored_in is None else read_recording(scored_in)
    if elsewhere is not None and scored_in is not None:
        scored = scored_elsewhere(arms.streams.get(("ar", 1), []), elsewhere, scored_in.name)
    summary = summary_of(arms)
    texts = text_rows(arms, scored)
    summary["equal_texts"] = {
        f"{row['arm']}, {row['clients']} clients": f"{row['equal']} of {row['compared']}"
        for row in texts
    }
    ours = [row for row in texts if row["arm"] == OURS and row["clients"] == 1]
    if ours:
        summary["largest_margin_nats"] = ours[0]["largest_margin_nats"]
        summary["differences_beyond_tie"] = ours[0]["differences_beyond_tie"]
        summary["differences_by_runner_up"] = ours[0]["differences_by_runner_up"]
    summary["all_differences"] = differences_of(texts)
    if elsewhere is not None:
        summary["scored"] = f"plain decoding of a run of {elsewhere['about']['commit']}"
    if missing := not_measured(raws):
        summary["not_measured"] = missing
    for raw in raws:
        if "costs" in raw:
            # What the policy was to reach on the calibration prompts at this run's costs.
            sizes, lams = raw["costs"]["batch_sizes"], raw["costs"]["tokens_per_us_by_batch"]
            summary["fitted_tokens_per_s"] = {
                f"{size} clients": round(1e6 * lam * size, 1)
                for size, lam in zip(sizes, lams, strict=True)
            }
    if len(raws) > 1:
        summary["recordings"] = (
            f"{len(raws)} runs, of the machines and commits in the rows `recording`; an arm that "
            "is in several counts from the first"
        ) + "".join(
            f"; {raw['about']['arms_taken']} from a run of {raw['about']['commit']}"
            for raw in raws
            if "arms_taken" in raw["about"]
        )
    boots = boot_rows(raws)
    for key in ("boot_s", "state_gib_a_request", "requests_whose_states_fit"):
        # What a server that failed had allocated tells nothing of one that runs.
        summary[key] = {
            row["name"]: row[key] for row in boots if key in row and "failed" not in row
        }
    reading = reading_rows(arms.streams, arms.passes)
    summary |= whole_runs(reading)
    rows = [*rows_of(arms), *texts, *boots, *reading]
    rows += counter_rows(raws)
    rows += [{"kind": "costs", **raw["costs"]} for raw in raws if "costs" in raw]
    rows += [{"kind": "recording", **raw["about"]} for raw in raws]
    if elsewhere is not None:
        rows.append({"kind": "recording", **elsewhere["about"], "taken": "scored plain decoding"})
    if beside is not None:
        more = read_recording(beside)
        told = beside_rows(arms, Arms([more], arms.looping))
        rows += [*told, {"kind": "recording", **more["about"], "taken": "the rows `beside`"}]
        summary["beside"] = {
            f"{row['arm']}, {row['clients']} clients": round(row["tokens_per_s"], 1) for row in told
        }
    path = write_results(
        name,
        rows=rows,
        summary=summary,
        seed=0,
        where=raws[0]["about"]["machine"],
        packages=PACKAGES,
        out=out,
    )
    print(table(arms))
    print("\n" + reading_table(reading))
    shown = {k: v for k, v in summary.items() if k not in ("speeds", "equal_texts")}
    print(json.dumps(shown, indent=1))
    print(json.dumps(summary["equal_texts"]))
    return path


def analyse(options: argparse.Namespace) -> None:
    """The command `analyse`."""
    written = report(
        options.raw,
        options.tokenizer,
        options.out,
        scored_in=options.scored,
        beside=options.beside,
        name=options.name,
    )
    print(written.name)
