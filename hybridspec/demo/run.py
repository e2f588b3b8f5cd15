"""The whole path on the embedded pair: calibrate, profile, serve, then compare on held-out prompts.

Every stage is the command a user would type, run as a process of its own and shown before it runs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridspec import __version__
from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.digest import model_digest
from hybridspec.artifacts.lock import LOCK_NAME, FolderLock
from hybridspec.artifacts.store import MANIFEST_NAME
from hybridspec.calibrate.prompts import Prompt, load_prompts
from hybridspec.calibrate.trace import RUN_NAME
from hybridspec.demo import assets
from hybridspec.demo.client import Client
from hybridspec.demo.comparison import Comparison, Decoded, compare
from hybridspec.demo.page import result_table, write_page
from hybridspec.errors import HybridSpecError, Interrupted, QualityGate, UsageError
from hybridspec.server.round_times import DRIFTED

AR, STOCK, POLICY = "AR", "DFlash-16", "HybridSpec"
TIE_MARGIN = 1e-3
# One thread: it leaves a core to the server's loop and to the client. Two help long blocks a little
# on a quiet machine and wait for each other on a busy one.
ONE = ("--threads", "1")
# Inside the demo's folder, so that moving it out is a rename; bundle and trace lie to each other as
# they will, since the bundle remembers its trace by that path.
WORK_NAME = "demo.partial"
# On a quiet machine the repeats end it; the budget is for one that is busy.
PROFILE = ("--contexts", "96,224", "--batch-sizes", "1,4", "--repeats", "25", "--budget", "120")
BUSY = (
    "this machine was too busy to measure; close other programs and run the demo again, which goes "
    "on behind its calibration"
)
# What the finished calibration in the work folder was made with.
CALIBRATED_NAME = "calibrated.json"
Say = Callable[[str], None]


class StageFailed(HybridSpecError):
    """A stage ended with an error that it has already explained."""

    def __init__(self, command: str, exit_code: int, remedy: str = "") -> None:
        super().__init__(
            f"`{command}` ended with exit code {exit_code}; its reason stands above"
            + (f": {remedy}" if remedy else "")
        )
        self.exit_code = exit_code


def run_demo(
    *,
    out: Path,
    max_new_tokens: int,
    prompts_per_category: int,
    port: int,
    say: Say | None = None,
) -> dict[str, Any]:
    """Run all stages into `out` and return the summary that `out/results.json` holds.

    Args:
        out: trace, bundle, plots and page; made if missing. An earlier demo there is replaced once
            all stages are done, and not before.
        max_new_tokens: tokens a prompt, in calibration and comparison.
        prompts_per_category: held-out prompts to decode from each category.
        port: of the server, 0 for a free one.
        say: takes the lines for people; standard error by default.

    Raises:
        Interrupted: Ctrl-C; an earlier demo in `out` is whole.
        EnvironmentMissing: another demo runs in `out`, it cannot be written, or the port is taken.
        UsageError: `out/trace` or `out/bundle` is something else.
        StageFailed: a command failed.
        QualityGate: outputs differ from plain decoding by more than a floating-point tie.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    _refuse_others(out)
    # The server comes minutes from now; a port that is taken is told at once.
    from hybridspec.server.run import bind

    bind("127.0.0.1", port).close()
    work = out / WORK_NAME
    with FolderLock(work, wait=False):
        settings = _settings(max_new_tokens)
        if not _is_calibrated(work, settings):
            _empty(work)
        try:
            comparison, margins, summary = _stages(
                work, max_new_tokens, prompts_per_category, port, say
            )
        except KeyboardInterrupt:
            again = (
                "goes on behind its calibration"
                if _is_calibrated(work, settings)
                else "starts afresh"
            )
            raise Interrupted(
                f"the demo did not finish, and what {out} held before is unchanged; unfinished "
                f"parts lie in {work}: run the same command again, which {again}"
            ) from None
        _move_out(work, out)
        shutil.rmtree(work)
    _tell(out, comparison, margins, summary, say)
    return summary


def _stages(
    work: Path, max_new_tokens: int, prompts_per_category: int, port: int, say: Say
) -> tuple[Comparison, list[float], dict[str, Any]]:
    """Run all stages into `work`; the comparison, `_margins` and the summary of it."""
    began = time.monotonic()
    _, _, prompts_file = assets.require()
    bundle, trace = work / "bundle", work / "trace"
    say("HybridSpec demo: one small pair on the CPU, four steps, about ten minutes on two cores.")
    say("\n[1/4] calibrate: decode 560 prompts with every draft verified, fit acceptance")
    settings = _settings(max_new_tokens)
    words = ["calibrate", "--out", bundle, "--trace", trace, "--max-new-tokens", max_new_tokens]
    if _is_calibrated(work, settings):
        say("finished by the run before, which ended later")
    else:
        _command(say, [*words, *ONE])
        (work / CALIBRATED_NAME).write_text(json.dumps(settings) + "\n", encoding="utf-8")
    say("\n[2/4] profile-latency: what a round costs on this machine at each verify length")
    _command(say, ["profile-latency", "--out", bundle, *PROFILE, *ONE], tries=3)
    best = _best_fixed_length(bundle)
    held_out = [p for p in load_prompts(str(prompts_file)) if p.split == "test"]
    prompts = _first_of_each(held_out, prompts_per_category)
    ways: dict[str, dict[str, Any]] = {
        AR: {"off": True},
        STOCK: {"fixed_length": 16},
        f"best fixed ({best})": {"fixed_length": best},
        POLICY: {},
    }
    say("\n[3/4] serve: an OpenAI-compatible server with the bundle")
    with _server(say, bundle, port) as url:
        say(f"\n[4/4] {len(prompts)} held-out prompts through the server, {len(ways)} ways each")
        runs = _decode_all(say, url, prompts, ways, max_new_tokens)
    comparison = compare(runs, reference=AR)
    margins = _margins(comparison, runs)
    summary = _summary(comparison, margins, best, time.monotonic() - began)
    summary["drift_fallback_share"] = _static_share(runs)
    (work / "results.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_page(work / "index.html", comparison, summary, plots=bundle / "plots")
    return comparison, margins, summary


def _tell(
    out: Path, comparison: Comparison, margins: list[float], summary: dict[str, Any], say: Say
) -> None:
    say("")
    print(result_table(comparison, base=AR))
    verdict = (
        "greedy outputs: all equal plain decoding's"
        if not comparison.different
        else f"greedy outputs: {len(comparison.different)} differ from plain decoding's, each "
        f"first at a tie of logits (largest margin {max(margins):.1e})"
    )
    print(
        f"\nHybridSpec: {summary['over_ar']:.2f}x AR, {summary['over_dflash16']:.2f}x stock "
        f"DFlash-16, {summary['over_best_fixed']:.2f}x the best fixed length\n{verdict}\n"
        f"bundle, plots and page: {out}/ (open {out}/index.html), {summary['seconds']:.0f} s"
    )
    if summary["drift_fallback_share"] > 0.0:
        print(
            f"{summary['drift_fallback_share']:.0%} of HybridSpec's rounds took a fixed length: "
            "round times had left the measured costs, so this is not what it does on a quiet "
            "machine; run again on one"
        )
    if margins and max(margins) > TIE_MARGIN:
        raise QualityGate(
            f"an output differs from plain decoding's at a logit margin of {max(margins):.3g}; "
            f"only ties below {TIE_MARGIN:g} may: please report this with {out}/results.json"
        )


def _refuse_others(out: Path) -> None:
    """Say at once, and not after all stages, that a folder to replace is not a demo's."""
    for folder, mark in ((out / "trace", RUN_NAME), (out / "bundle", MANIFEST_NAME)):
        if folder.is_dir():
            names = {path.name for path in folder.iterdir()}
            good = not names or names & {mark, LOCK_NAME}
        else:
            good = not folder.exists()
        if not good:
            raise UsageError(
                f"{folder} has no {mark}, so no earlier demo wrote it; a demo replaces only what "
                "one wrote: give another folder with --out"
            )


def _settings(max_new_tokens: int) -> dict[str, Any]:
    """What a calibration in the work folder must have been made with to be taken again."""
    target, drafter, _ = assets.require()
    return {
        "version": __version__,
        "max_new_tokens": max_new_tokens,
        "target_sha256": model_digest(target),
        "drafter_sha256": model_digest(drafter),
    }


def _is_calibrated(work: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a run that ended later has finished the same calibration there."""
    try:
        found = json.loads((work / CALIBRATED_NAME).read_text(encoding="utf-8"))
        return found == settings and load_bundle(work / "bundle").calibration is not None
    except (OSError, ValueError, HybridSpecError):
        return False


def _empty(work: Path) -> None:
    """Remove what an unfinished demo left; the lock in `work` is held and stays."""
    for path in work.iterdir():
        if path.name != LOCK_NAME:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move_out(work: Path, out: Path) -> None:
    """Replace an earlier demo by the one in `work`; nothing else that may lie there."""
    for old in (out / "trace").glob("part-*.parquet"):
        old.unlink()
    for folder in (Path("trace"), Path("bundle"), Path()):
        (out / folder).mkdir(exist_ok=True)
        for made in sorted((work / folder).iterdir()):
            if made.name not in (LOCK_NAME, CALIBRATED_NAME, "trace", "bundle"):
                _remove(out / folder / made.name)
                made.rename(out / folder / made.name)


def _command(say: Say, words: Sequence[object], *, tries: int = 1) -> None:
    """Run one of our commands; a measurement that was too noisy (exit 5) is tried again."""
    shown = "hybridspec " + " ".join(str(w) for w in words)
    for left in reversed(range(tries)):
        say(f"$ {shown}")
        done = subprocess.run(
            [sys.executable, "-m", "hybridspec.cli.main", *map(str, words)], stdout=sys.stderr
        )
        if done.returncode == 0:
            return
        if done.returncode != QualityGate.exit_code or tries == 1:
            raise StageFailed(shown, done.returncode)
        if left == 0:
            raise StageFailed(shown, done.returncode, BUSY)
        say("the machine was too busy to measure; trying again")


def _best_fixed_length(bundle: Path) -> int:
    cost = load_bundle(bundle).cost
    if cost is None or cost.throughput is None:
        raise QualityGate(f"{bundle} has no throughput table after profiling: delete it, run again")
    return max(1, int(cost.throughput.best_fixed_length[0]))


def _first_of_each(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first `count` prompts of each category, categories taking turns."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt.category, []).append(prompt)
    return [
        group[i]
        for i in range(count)
        for group in by_category.values()
        if i < len(group)
    ]  # fmt: skip


@contextmanager
def _server(say: Say, bundle: Path, port: int):
    """Start `hybridspec serve`, yield its URL, stop it."""
    words = ["serve", "--bundle", str(bundle), "--port", str(port), *ONE]
    say("$ hybridspec " + " ".join(words))
    process = subprocess.Popen(
        [sys.executable, "-m", "hybridspec.cli.main", *words], stderr=subprocess.PIPE, text=True
    )
    try:
        url = _wait_until_ready(say, process)
        # What the server says later counts too, and a full pipe would stop it.
        threading.Thread(target=_pass_on, args=(say, process), daemon=True).start()
        yield url
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(say: Say, process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        say("  " + line.rstrip())
        if line.startswith("listening "):
            return line.split()[1].removesuffix("/v1")
    code = process.wait()
    raise StageFailed("hybridspec serve", code or 1)


def _pass_on(say: Say, process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        say("  serve: " + line.rstrip())


def _static_share(runs: dict[str, list[list[Decoded]]]) -> float:
    """Share of HybridSpec's rounds that took a fixed length because round times had drifted."""
    decoded = [one for repeats in runs[POLICY] for one in repeats]
    rounds = sum(len(one.round_tokens) for one in decoded)
    static = sum(reason == DRIFTED for one in decoded for reason in one.fallbacks)
    return static / max(rounds, 1)


def _decode_all(
    say: Say,
    url: str,
    prompts: Sequence[Prompt],
    ways: dict[str, dict[str, Any]],
    max_new_tokens: int,
) -> dict[str, list[list[Decoded]]]:
    """Every prompt every way, ways of one prompt behind one another in turning order."""
    client = Client(url)
    runs: dict[str, list[list[Decoded]]] = {way: [] for way in ways}
    try:
        model = client.model()
        for options in ways.values():
            client.decode(model, prompts[0], max_new_tokens=max_new_tokens, options=options)
        names, started, told = list(ways), time.monotonic(), time.monotonic()
        for i, prompt in enumerate(prompts):
            for way in names[i % len(names) :] + names[: i % len(names)]:
                decoded = client.decode(
                    model, prompt, max_new_tokens=max_new_tokens, options=ways[way]
                )
                runs[way].append([decoded])
            if time.monotonic() - told > 10:
                told = time.monotonic()
                left = (told - started) / (i + 1) * (len(prompts) - i - 1)
                say(f"  {i + 1}/{len(prompts)} prompts, {left:.0f} s left")
    finally:
        client.close()
    return runs


def _margins(comparison: Comparison, runs: dict[str, list[list[Decoded]]]) -> list[float]:
    """Top-1 to top-2 logit margin of plain decoding at each first difference."""
    if not comparison.different:
        return []
    from hybridspec.demo.margin import logit_margins

    truth = {repeats[0].prompt_id: repeats[0].token_ids for repeats in runs[AR]}
    return logit_margins(
        [(prompt, truth[prompt][:index]) for _, prompt, index in comparison.different]
    )


def _summary(
    comparison: Comparison, margins: list[float], best: int, seconds: float
) -> dict[str, Any]:
    best_way = f"best fixed ({best})"
    by_category = comparison.category_over(POLICY, AR)
    return {
        "over_ar": comparison.over(POLICY, AR),
        "over_dflash16": comparison.over(POLICY, STOCK),
        "over_best_fixed": comparison.over(POLICY, best_way),
        "min_category_over_ar": min(by_category.values()),
        "tokens_per_round_dflash16": comparison.total(STOCK).tokens_per_round,
        "best_fixed_length": best,
        "tokens_per_s": {w: comparison.total(w).tokens_per_s for w in comparison.by_category},
        "category_over_ar": by_category,
        "loop_prompts": comparison.loop_prompts,
        "different_outputs": len(comparison.different),
        "logit_margins_at_difference": margins,
        "seconds": seconds,
    }
