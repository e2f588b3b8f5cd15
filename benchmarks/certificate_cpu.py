"""The certificate of the embedded pair on CPU, and which of its gates known faults fail.

Runs `hybridspec certify` with questions whose answers are known: the two cells that the next row of
a table begins with. The bundle's hazards and costs are made up (`tests/certify/certify_kit.py`), so
that nothing depends on how busy the machine is; lengths then vary as with a measured one, and speed
is not told. Then plants the faults of `tests/fuzz/fault_kit.py`, and one of sampling, one by one
and runs the gates that need no questions.

    OMP_NUM_THREADS=1 python benchmarks/certificate_cpu.py
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from results_file import machine, write_results

from hybridspec.artifacts.certificate import Gate
from hybridspec.artifacts.digest import model_digest
from hybridspec.certify import gates
from hybridspec.certify.engine_arms import EngineArms
from hybridspec.certify.law import LEVEL, law_fit
from hybridspec.certify.texts import Task, Text
from hybridspec.demo.assets import require
from hybridspec.demo.synthetic import table
from hybridspec.fuzz.history_file import Setting
from hybridspec.fuzz.reference_adapter import ReferenceAdapter
from hybridspec.fuzz.run import Report, fuzz
from hybridspec.reference import engine as engine_module
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule

QUESTIONS = 400
PLANTED = {"prompts": 6, "tokens": 32, "samples": 200, "rounds": 300, "batch": 4}


def main() -> None:
    """Certify, plant, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = machine()
    with tempfile.TemporaryDirectory() as name:
        told, seconds = certified(Path(name), arguments.seed)
    rows: list[dict[str, Any]] = [
        {
            "what": "gate",
            "gate": gate["name"],
            "verdict": gate["verdict"],
            # The costs are made up, so the speed says nothing.
            **{k: v for k, v in gate["figures"].items() if not k.startswith("speedup")},
        }
        for gate in told["gates"]
    ]
    faults = planted(arguments.seed)
    rows += faults
    by_gate = {gate["name"]: gate["figures"] for gate in told["gates"]}
    summary = {
        "verdict": told["verdict"],
        "seconds": round(seconds, 1),
        "texts": by_gate["greedy"]["texts"],
        "different_texts": by_gate["greedy"]["different_texts"],
        "greedy_faults": by_gate["greedy"]["faults"],
        "law_smallest_p_value": by_gate["law"]["smallest_p_value"],
        "state_largest_difference": by_gate["state"]["largest_difference"],
        "loops": by_gate["degenerate"]["loops_hybridspec"],
        "questions": by_gate["quality"]["questions"],
        "right_plain": by_gate["quality"]["right_plain"],
        "right_hybridspec": by_gate["quality"]["right_hybridspec"],
        "interval_low": by_gate["quality"]["interval_low"],
        "planted_faults": len(faults),
        "planted_faults_certified": sum(not row["failed"] for row in faults),
    }
    path = write_results(
        "certificate_cpu",
        rows=rows,
        summary=summary,
        seed=arguments.seed,
        where=where,
        packages=("torch", "numpy", "scipy"),
        out=arguments.out,
    )
    print(f"{path.name}: {summary}")


def command(*words: object) -> subprocess.CompletedProcess[str]:
    """A command of ours in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "hybridspec.cli.main", *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )


def certified(folder: Path, seed: int) -> tuple[dict[str, Any], float]:
    """What `hybridspec certify --json` says of the embedded pair, and its seconds."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "certify"))
    bundle = importlib.import_module("certify_kit").made_up_bundle(folder / "bundle")
    began = time.monotonic()
    done = command("certify", "--bundle", bundle, "--questions", questions(folder, seed),
                   "--max-answer-tokens", 10, "--max-prompts", 48, "--samples", 1000,
                   "--rounds", 300, "--seed", seed, "--json")  # fmt: skip
    return json.loads(done.stdout), time.monotonic() - began


def questions(folder: Path, seed: int) -> Path:
    """Beginnings of tables whose first column counts; the answer is two cells of the next row."""
    rng = random.Random(seed)
    rows = []
    while len(rows) < QUESTIONS:
        lines = table(rng).splitlines()
        separator = next((c for c in (",", ";", "\t") if lines[0].startswith(f"id{c}")), None)
        if separator is None:
            continue
        kept = rng.randint(3, min(10, len(lines) - 2))
        text = "\n".join(lines[: kept + 1]) + "\n"
        answer = separator.join(lines[kept + 1].split(separator)[:2])
        row = {"id": len(rows), "prompt": text, "answer": answer, "match": "prefix"}
        rows.append(row)
    path = folder / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def planted(seed: int) -> list[dict[str, Any]]:
    """Each known fault, and the gates that fail under it."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "fuzz"))
    rows = []
    known = [(f.name, f.plant) for f in importlib.import_module("fault_kit").FAULTS]
    for name_of_fault, plant in [*known, ("sampled drafts accepted too often", accept_too_often)]:
        began = time.monotonic()
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            verdicts = {
                name: verdict(gate) for name, gate in (
                    ("control", lambda: texts_gates()[0]), ("greedy", lambda: texts_gates()[1]),
                    ("law", lambda: law_gate(seed)), ("state", lambda: state_gate(seed)),
                )
            }  # fmt: skip
        row = {
            "what": "planted",
            "planted": name_of_fault,
            **verdicts,
            "failed": sum(value != "passed" for value in verdicts.values()),
            "seconds": round(time.monotonic() - began, 1),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def accept_too_often(patch: pytest.MonkeyPatch) -> None:
    """Judging coins come out at half their value."""
    real = engine_module.accept_sampled

    def wrong(drafts: Any, logits: Any, sampling: Any, coins: list[float]) -> Any:
        return real(drafts, logits, sampling, [*(0.5 * coin for coin in coins[:-1]), coins[-1]])

    patch.setattr(engine_module, "accept_sampled", wrong)


def verdict(gate: Callable[[], Gate]) -> str:
    """The gate's verdict; what an engine raises is told as such."""
    try:
        return gate().verdict
    except Exception as error:
        return f"refused ({type(error).__name__})"


def arms_and_tasks(count: int) -> tuple[EngineArms, list[Task]]:
    target, drafter, prompts = require()
    engine = load_pair(target, drafter, max_batch=PLANTED["batch"], max_context=512)
    arms = EngineArms(engine, Tokenizer.load(target), rule=LengthRule("fixed", 6))
    lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    held_out = [line for line in lines if line["split"] == "test"]
    step = len(held_out) // count
    tasks = [Task(x["prompt_id"], x["category"], x["text"]) for x in held_out[::step][:count]]
    return arms, arms.encode(tasks, max_new_tokens=PLANTED["tokens"])


def texts_gates() -> tuple[Gate, Gate]:
    """Control and greedy."""
    arms, tasks = arms_and_tasks(PLANTED["prompts"])

    def decode(*, drafts: bool, batch: int) -> list[Text]:
        return arms.decode("arm", tasks, drafts=drafts, batch=batch, backwards=batch > 1,
                           max_new_tokens=PLANTED["tokens"], done=lambda _: None)  # fmt: skip

    plain = decode(drafts=False, batch=1)
    found = []
    for drafts in (False, True):
        other = decode(drafts=drafts, batch=PLANTED["batch"])
        triples = zip(tasks, plain, other, strict=True)
        found.append([d for d in (arms.compare(*triple) for triple in triples) if d is not None])
    control = gates.control(len(tasks), found[0])
    gap = min(control.figures["largest_gap_logits"], 1e-3)
    return control, gates.greedy(len(tasks), found[1], control_gap=gap)


def law_gate(seed: int) -> Gate:
    """Law behind one prompt."""
    arms, tasks = arms_and_tasks(1)
    samples, batch = PLANTED["samples"], PLANTED["batch"]
    fit = law_fit(arms, tasks[0], samples=samples, batch=batch, level=LEVEL / 2, seed=seed,
                  done=lambda _: None)  # fmt: skip
    return gates.law([fit], samples=samples, level=LEVEL / 2)


def state_gate(seed: int) -> Gate:
    """Rounds in float64."""
    target, drafter, _ = require()
    adapter = ReferenceAdapter(target, drafter)
    facts, report = adapter.facts, Report()
    digests = model_digest(target), model_digest(drafter)
    setting = Setting(facts.name, facts.dtype, *digests, facts.max_requests, facts.max_context)
    with tempfile.TemporaryDirectory() as folder:
        fuzz(adapter, setting, report, seed=seed, rounds=PLANTED["rounds"], seconds=None,
             folder=Path(folder), shrink_seconds=0.0)  # fmt: skip
    return gates.state(report, dtype=facts.dtype)


if __name__ == "__main__":
    main()
