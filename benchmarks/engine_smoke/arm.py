"""One SGLang engine in a process of its own, which does what files tell it to.

    python arm.py NAME FOLDER

FOLDER/NAME.engine.json holds the arguments of `sglang.Engine`. Once it is up, NAME.up appears;
every NAME.N.task.json then becomes NAME.N.result.json, until the process is killed. An engine whose
scheduler dies takes this process with it, so nothing here is worth saving at an exit.
"""

# SGLang is installed where this runs, not where it is checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def write(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def generate(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts of a task in batches; the rows keep what SGLang says of each."""
    rows = []
    began = time.perf_counter()
    size = task["batch"]
    for start in range(0, len(task["prompts"]), size):
        prompts = task["prompts"][start : start + size]
        sampling = task["sampling"][start : start + size]
        at = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - at
        answers = [answers] if isinstance(answers, dict) else answers
        for answer in answers:
            meta = answer["meta_info"]
            rows.append(
                {
                    "ids": list(answer.get("output_ids") or []),
                    "seconds": seconds,
                    "rounds": meta.get("spec_verify_ct"),
                    "lengths": meta.get("spec_cap_lens_histogram"),
                    "finish": meta.get("finish_reason"),
                }
            )
    return {"rows": rows, "seconds": time.perf_counter() - began}


def score(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    """Log probability of every text of a task after its prompt."""
    rows = []
    for prompt, text in zip(task["prompts"], task["texts"], strict=True):
        answer = engine.generate(
            input_ids=prompt + text,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=len(prompt) - 1,
        )
        found = answer["meta_info"]["input_token_logprobs"][-len(text) :]
        rows.append([value[0] for value in found])
    return {"rows": rows}


def margins(engine: Any, task: dict[str, Any]) -> dict[str, Any]:
    """The two best tokens after every prefix of a task, with their log probabilities."""
    rows = []
    for prefix in task["prefixes"]:
        answer = engine.generate(
            input_ids=prefix,
            sampling_params={"temperature": 0.0, "max_new_tokens": 1},
            return_logprob=True,
            top_logprobs_num=4,
        )
        best = answer["meta_info"]["output_top_logprobs"][0]
        rows.append([[value[0], value[1]] for value in best])
    return {"rows": rows}


TASKS = {"generate": generate, "score": score, "margins": margins}


def main() -> None:
    """Serve tasks until killed."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    arguments = json.loads((folder / f"{name}.engine.json").read_text())
    import dataclasses

    import sglang
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    if unknown := sorted(set(arguments) - known):
        print(f"arm: not in ServerArgs, left out: {unknown}", flush=True)
    began = time.perf_counter()
    engine = sglang.Engine(**{key: arguments[key] for key in arguments if key in known})
    write(folder / f"{name}.up", {"boot_s": time.perf_counter() - began})
    number = 0
    while True:
        task_file = folder / f"{name}.{number}.task.json"
        if not task_file.exists():
            time.sleep(0.02)
            continue
        task = json.loads(task_file.read_text())
        try:
            result = TASKS[task["do"]](engine, task)
        except Exception:
            result = {"error": traceback.format_exc()}
        write(folder / f"{name}.{number}.result.json", result)
        number += 1


if __name__ == "__main__":
    main()
