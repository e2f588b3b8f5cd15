"""HYBRIDSPEC in real SGLang engines against plain decoding and stock DFLASH: does it work at all?

    python benchmarks/sglang_smoke.py PAIR --out DIR [--bundle BUNDLE] [--limit SECONDS]

PAIR is a folder with target/, drafter/ and prompts.json (`ids`, `cat`, `split` of each prompt).
Engines start side by side on one card and are asked one after the other, so that starts cost once
and no timing overlaps another. Every stage that fails prints its traceback, the scheduler's
included, and the others go on. Greedy texts are compared with plain decoding's; where they differ
first, the margin between the two best tokens there says whether that is a tie.

Figures of speed are of a small pair and of single runs: for a look, not for a report.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from engine_smoke.engines import Arm, EngineDied
from engine_smoke.judge import Difference, differences, lengths_seen, speed, surprise
from serving.servers import plugin_names, plugin_path

ARMS = ("ar", "dflash", "hybridspec", "stocktarget")
TIE_LOGITS = 0.25
SAMPLES_DIFFER = 4.0  # standard errors

BEGAN = time.monotonic()


def say(*parts: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - BEGAN:6.1f}]", *parts, flush=True)


class Smoke:
    """The run: engines, what they answered, what went wrong."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.arms: dict[str, Arm] = {}
        self.results: dict[str, Any] = {"boot_s": {}, "stages": {}, "failures": []}
        self.until = BEGAN + options.limit
        prompts = json.loads((options.pair / "prompts.json").read_text())
        held_out = [prompt for prompt in prompts if prompt["split"] == "test"]
        step = max(1, len(held_out) // options.prompts)
        self.prompts: list[list[int]] = [p["ids"] for p in held_out[::step]][: options.prompts]
        self.ar_texts: list[list[int]] = []

    def stage(self, name: str, work: Callable[[], Any]) -> None:
        """Run one stage; a failure is printed and kept, the next stage runs."""
        if time.monotonic() > self.until:
            say(f"LEFT OUT {name}: no time left")
            self.results["failures"].append({"stage": name, "error": "no time left"})
            return
        say(f"-- {name}")
        try:
            self.results["stages"][name] = work()
        except Exception:
            text = traceback.format_exc()
            say(f"FAILED {name}\n{text}")
            self.results["failures"].append({"stage": name, "error": text[-8000:]})
        self.save()

    def save(self) -> None:
        """Keep what there is."""
        (self.out / "smoke.json").write_text(json.dumps(self.results, indent=1, default=str))

    def generate(
        self,
        arm: str,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int | Sequence[int] = 64,
        lengths: dict[str, int] | Sequence[dict[str, int] | None] | None = None,
        temperature: float = 0.0,
        batch: int = 1,
    ) -> dict[str, Any]:
        """Decode prompts in one engine; `lengths` is what requests ask of the plugin."""
        count = len(prompts)
        many_tokens = [tokens] * count if isinstance(tokens, int) else list(tokens)
        asked = [lengths] * count if lengths is None or isinstance(lengths, dict) else list(lengths)
        sampling: list[dict[str, Any]] = []
        for number, wanted in zip(many_tokens, asked, strict=True):
            row: dict[str, Any] = {
                "temperature": temperature,
                "max_new_tokens": number,
                "ignore_eos": True,
            }
            if wanted is not None:
                row["custom_params"] = {"hybridspec": wanted}
            sampling.append(row)
        task = {"do": "generate", "prompts": [list(p) for p in prompts], "batch": batch}
        return self.arms[arm].ask(
            {**task, "sampling": sampling}, min(self.until + 20, time.monotonic() + 90)
        )

    def compare(self, name: str, texts: Sequence[list[int]], expected: list[list[int]]) -> str:
        """Say how greedy texts differ from plain decoding's, with the margin at each place."""
        if not expected:
            return f"{name}: nothing to compare with"
        found = differences(expected, texts)
        verdict = f"{name}: {len(texts) - len(found)} of {len(texts)} texts equal"
        margins = self.margins(found, expected) if found else []
        for difference, margin in zip(found, margins, strict=False):
            kind = "tie" if margin is not None and margin <= TIE_LOGITS else "NOT A TIE"
            verdict += (
                f"\n      prompt {difference.prompt} from token {difference.place}: "
                f"{difference.expected} -> {difference.found}, margin {margin} ({kind})"
            )
        return verdict

    def margins(self, found: Sequence[Difference], expected: list[list[int]]) -> list[float | None]:
        """Logits between the expected token and the other at each place; None: far apart."""
        if "ar" not in self.arms:
            return []
        prefixes = [self.prompts[d.prompt] + expected[d.prompt][: d.place] for d in found]
        answer = self.arms["ar"].ask({"do": "margins", "prefixes": prefixes}, time.monotonic() + 60)
        result: list[float | None] = []
        for difference, best in zip(found, answer["rows"], strict=True):
            of = {token: value for value, token in best}
            a, b = of.get(difference.expected), of.get(difference.found)
            result.append(None if a is None or b is None else round(abs(a - b), 4))
        return result

    # Stages.

    def boot(self, names: Sequence[str]) -> None:
        """Start engines side by side and wait for all."""
        for offset, name in enumerate(names):
            arguments, environment = engine(name, self.options, 31000 + 2000 * offset)
            self.arms[name] = Arm(name, self.out, arguments, environment)
            say(f"starting {name}")
        for name in names:
            arm = self.arms[name]
            try:
                seconds = arm.wait_until_up(min(self.until, BEGAN + self.options.boot_timeout))
                self.results["boot_s"][name] = round(seconds, 1)
                say(f"{name} is up after {seconds:.1f} s")
            except Exception as error:
                say(f"FAILED to start {name}\n{error}")
                self.results["failures"].append({"stage": f"boot {name}", "error": str(error)})
                arm.kill()
                del self.arms[name]
                continue
            for line in arm.facts():
                print("    ", line[-220:], flush=True)
        self.save()

    def greedy_ar(self) -> Any:
        self.generate("ar", self.prompts[:1], tokens=16)
        result = self.generate("ar", self.prompts, tokens=self.options.tokens)
        self.ar_texts = [row["ids"] for row in result["rows"]]
        say("ar", speed(result))
        return speed(result)

    def greedy(self, arm: str, lengths: dict[str, int] | None, count: int | None = None) -> Any:
        prompts = self.prompts[:count]
        expected = self.ar_texts[:count]
        self.generate(arm, prompts[:1], tokens=16, lengths=lengths)
        result = self.generate(arm, prompts, tokens=self.options.tokens, lengths=lengths)
        name = f"{arm} {lengths or 'default'}"
        say(name, speed(result), "lengths", sorted(lengths_seen(result["rows"])))
        if expected:
            say(self.compare(name, [row["ids"] for row in result["rows"]], expected))
        return {**speed(result), "lengths": sorted(lengths_seen(result["rows"]))}

    def every_length(self, arm: str) -> Any:
        """Two prompts at each of the 16 lengths: texts as plain decoding's, lengths as asked."""
        expected, rates = self.ar_texts[:2], {}
        for length in range(1, 17):
            result = self.generate(
                arm, self.prompts[:2], tokens=48, lengths={"verify_length": length}
            )
            texts = [row["ids"] for row in result["rows"]]
            seen = lengths_seen(result["rows"])
            most = max(len(row["ids"]) / max(1, row["rounds"] or 1) for row in result["rows"])
            rates[length] = speed(result)
            wrong = "" if seen <= {length} else f" WRONG LENGTHS {sorted(seen)}"
            wrong += "" if most <= length + 1 else f" TOO MANY TOKENS A ROUND {most:.2f}"
            say(
                self.compare(f"{arm} L={length}", texts, [text[:48] for text in expected]),
                rates[length],
                wrong,
            )
        return rates

    def mixed(self, arm: str) -> Any:
        """Eight requests at once, of other lengths and sizes: they leave one after the other."""
        lengths: list[dict[str, int] | None] = [
            {"verify_length": 1}, {"verify_length": 16}, {"verify_length": 5},
            {"max_verify_length": 3}, None, {"verify_length": 2}, None, {"verify_length": 9},
        ]  # fmt: skip
        tokens = [16, 24, 32, 40, 48, 56, 60, 64]
        tokens = [min(count, self.options.tokens) for count in tokens]
        result = self.generate(arm, self.prompts[:8], tokens=tokens, lengths=lengths, batch=8)
        texts = [row["ids"] for row in result["rows"]]
        expected = [t[:n] for t, n in zip(self.ar_texts, tokens, strict=False)]
        say(self.compare(f"{arm} mixed batch", texts, expected))
        for asked, row in zip(lengths, result["rows"], strict=True):
            say(f"   asked {asked}: lengths {row['lengths']}, {row['rounds']} rounds")
        return speed(result)

    def concurrent(self, arm: str, lengths: dict[str, int] | None = None) -> Any:
        """Four requests at once."""
        count = len(self.prompts) // 4 * 4
        result = self.generate(
            arm, self.prompts[:count], tokens=self.options.tokens, lengths=lengths, batch=4
        )
        say(f"{arm} {lengths or ''} 4 at once", speed(result))
        if self.ar_texts:
            texts = [row["ids"] for row in result["rows"]]
            say(self.compare(f"{arm} 4 at once", texts, self.ar_texts[:count]))
        return speed(result)

    def sampled(self) -> Any:
        """Texts at temperature 1, scored by plain decoding's model: all arms must look alike."""
        rows: dict[str, tuple[float, float]] = {}
        cases: list[tuple[str, dict[str, int] | None]] = [("ar", None), ("dflash", None)]
        for arm in ("hybridspec", "stocktarget"):
            cases += [(arm, None), (arm, {"verify_length": 4}), (arm, {"verify_length": 16})]
        prompts = self.prompts * 2
        for arm, lengths in cases:
            if arm not in self.arms:
                continue
            result = self.generate(
                arm, prompts, tokens=32, lengths=lengths, temperature=1.0, batch=8
            )
            texts = [row["ids"] for row in result["rows"]]
            scores = self.arms["ar"].ask(
                {"do": "score", "prompts": prompts, "texts": texts}, time.monotonic() + 90
            )
            name = f"{arm} {lengths or ''}".strip()
            rows[name] = surprise(scores["rows"])
            say(f"{name} at temperature 1: {rows[name][0]:.4f} +- {rows[name][1]:.4f} nats a token")
        for name, (mean, error) in rows.items():
            apart = abs(mean - rows["ar"][0]) / max(1e-9, (error**2 + rows["ar"][1] ** 2) ** 0.5)
            if apart > SAMPLES_DIFFER:
                say(f"SAMPLES DIFFER: {name} is {apart:.1f} standard errors from ar")
        return rows

    def refused(self, arm: str) -> Any:
        """A request for 99 rows must be refused, and the engine must live on."""
        try:
            result = self.generate(arm, self.prompts[:1], tokens=4, lengths={"verify_length": 99})
            told = str(result["rows"][0]["finish"])
        except EngineDied as error:
            told = str(error)
        if "verify_length = 99" not in told:
            raise AssertionError(f"99 rows were not refused for what they are: {told}")
        self.generate(arm, self.prompts[:1], tokens=4)
        say("a request for 99 rows is refused, the engine goes on")
        return "refused"

    def telemetry(self, arm: str) -> Any:
        """The counters that the plugin wrote."""
        path = self.out / f"{arm}.telemetry.json"
        time.sleep(1.5)
        counters = json.loads(path.read_text())
        say(f"{arm} counters", json.dumps(counters))
        return counters


def engine(
    name: str, options: argparse.Namespace, port: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments and environment of an arm's engine."""
    arguments: dict[str, Any] = {
        "model_path": str(options.pair / "target"),
        "load_format": options.load_format, "dtype": "bfloat16", "skip_tokenizer_init": True,
        "attention_backend": "triton", "sampling_backend": "pytorch", "grammar_backend": "none",
        "moe_runner_backend": "triton", "linear_attn_backend": "triton",
        "mm_attention_backend": "triton_attn", "disable_radix_cache": True,
        "disable_custom_all_reduce": True, "disable_flashinfer_autotune": True,
        "max_running_requests": 8, "cuda_graph_max_bs_decode": 8,
        "disable_prefill_cuda_graph": True, "enable_multimodal": False,
        "mem_fraction_static": options.mem_fraction, "max_total_tokens": 65536,
        "chunked_prefill_size": 2048, "context_length": 4096, "random_seed": 0,
        "log_level": "info", "skip_server_warmup": True, "port": port,
    }  # fmt: skip
    if name != "ar":
        arguments |= {
            "speculative_algorithm": "DFLASH" if name == "dflash" else "HYBRIDSPEC",
            "speculative_draft_model_path": str(options.pair / "drafter"),
            "speculative_num_draft_tokens": 16,
            "speculative_draft_attention_backend": "triton",
        }
    # An installed distribution is what SGLang looks for; the algorithm only where it is used.
    environment = {"PYTHONPATH": plugin_path(options.out / "installed"), "SGLANG_PLUGINS": "none"}
    if name in ("hybridspec", "stocktarget"):
        config: dict[str, Any] = {
            "target": "stock" if name == "stocktarget" else "hybridspec",
            "telemetry": str(options.out / f"{name}.telemetry.json"),
            "telemetry_interval_s": 0.5,
            "self_check": False,
            "correction": options.correction,
        }
        if options.bundle is not None:
            from hybridspec.artifacts.identity import CalibrationIdentity, CostIdentity

            config["bundle"] = str(options.bundle)
            kinds = (CalibrationIdentity, CostIdentity) if options.any_bundle else ()
            config["allow"] = [field.name for kind in kinds for field in fields(kind)]
        path = options.out / f"{name}.config.json"
        path.write_text(json.dumps(config, indent=1))
        environment |= {"SGLANG_PLUGINS": plugin_names()[0], "HYBRIDSPEC_CONFIG": str(path)}
    return arguments, environment


def main() -> int:
    """Run all stages; 0 where nothing failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS), help="of " + ", ".join(ARMS))
    parser.add_argument("--bundle", type=Path, help="for the policy; else fixed lengths")
    parser.add_argument("--any-bundle", action="store_true", help="take one of another identity")
    parser.add_argument("--correction", default="off", choices=("select", "paper", "off"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--mem-fraction", type=float, default=0.85)
    parser.add_argument("--boot-timeout", type=float, default=170.0, metavar="S")
    parser.add_argument("--limit", type=float, default=280.0, metavar="S")
    options = parser.parse_args()
    options.pair, options.out = options.pair.resolve(), options.out.resolve()
    options.bundle = options.bundle.resolve() if options.bundle else None
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    smoke = Smoke(options)
    try:
        run(smoke, options.arms.split(","))
    finally:
        for arm in smoke.arms.values():
            arm.kill()
        smoke.save()
    failures = smoke.results["failures"]
    say(f"{len(failures)} failures:", [failure["stage"] for failure in failures])
    return 1 if failures else 0


def run(smoke: Smoke, names: Sequence[str]) -> None:
    """All stages, the most telling first."""
    smoke.boot(names)
    ours = [name for name in ("hybridspec", "stocktarget") if name in smoke.arms]
    if "ar" in smoke.arms:
        smoke.stage("greedy ar", smoke.greedy_ar)
    if "dflash" in smoke.arms:
        smoke.stage("greedy dflash", lambda: smoke.greedy("dflash", None))
    for arm in ours:
        few = None if arm == "hybridspec" else 8
        for lengths in ({"verify_length": 16}, {"verify_length": 4}, None):
            smoke.stage(
                f"greedy {arm} {lengths}",
                lambda arm=arm, lengths=lengths, few=few: smoke.greedy(arm, lengths, few),
            )
        smoke.stage(f"mixed {arm}", lambda arm=arm: smoke.mixed(arm))
    for arm in ours:
        smoke.stage(f"every length {arm}", lambda arm=arm: smoke.every_length(arm))
    if "ar" in smoke.arms:
        smoke.stage("temperature 1", smoke.sampled)
    for arm in ("ar", "dflash", *ours):
        if arm in smoke.arms:
            smoke.stage(f"4 at once {arm}", lambda arm=arm: smoke.concurrent(arm))
    for arm in ours:
        smoke.stage(f"refusal {arm}", lambda arm=arm: smoke.refused(arm))
        smoke.stage(f"telemetry {arm}", lambda arm=arm: smoke.telemetry(arm))


if __name__ == "__main__":
    sys.exit(main())
