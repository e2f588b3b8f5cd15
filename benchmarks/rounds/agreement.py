"""Whether the mechanisms of a round compute the same, and as well as one another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from rounds.bench import Bench
from rounds.reference import compare, reference_logits
from rounds.subject import MAX_ROWS, Subject

from hybridspec.errors import QualityGate
from hybridspec.reference.gpu.control import GraphControl, body_of_length


def check_mechanisms(
    bench: Bench, subject: Subject, controls: dict[str, GraphControl],
    bodies: Mapping[str, Sequence[int]], lengths: Sequence[int],
) -> dict[tuple[str, int], torch.Tensor]:  # fmt: skip
    """A mechanism gives the bits of the launches it stands for: who decides changes no sum.

    Returns:
        logits by mechanism and length.
    """
    found, off = {}, []
    for name, control in controls.items():
        body_of = body_of_length(bodies[name], max_rows=MAX_ROWS)
        for length in lengths:
            rows = bodies[name][body_of[length]]
            found[name, length] = subject.outcome(control.replay, length)
            wanted = subject.outcome(subject.launches(rows), length)
            if not torch.equal(found[name, length], wanted):
                off.append(f"{name} at {length}")
        bench.deadline.say(f"  {name}: bits of its launches but at {off}")
    bench.summary["mechanisms_bitwise"] = not off
    if off:
        raise QualityGate(f"logits are not those of the same launches: {', '.join(off)}")
    return found


def check_geometries(
    bench: Bench, subject: Subject, found: dict[tuple[str, int], torch.Tensor],
    masked: GraphControl, full: torch.Tensor, *, context: int,
) -> None:  # fmt: skip
    """Bodies of fewer rows are as near to fp32 as those of 16, which run other kernels."""
    # The drafts of the round, and the state in front of it.
    subject.outcome(masked.replay, MAX_ROWS)
    subject.placed.restore()
    exact = reference_logits(subject.engine, context, subject.placed.forced_XRK)
    worse, errors = [], []
    for (name, length), logits in found.items():
        result = compare(logits, full[:length], exact[:length])
        bench.rows.append(
            {"kind": "geometry", "control": name, "length": length, **dataclasses.asdict(result)}
        )
        errors.append(result.error)
        if not result.alike:
            worse.append(f"{name} at {length}: {result}")
    whole = compare(full, full, exact)
    bench.summary["error_to_fp32_masked"] = round(whole.masked_error, 5)
    bench.summary["error_to_fp32_bodies_max"] = round(max(errors), 5)
    bench.summary["decisive_rows"] = sum(r.get("decisive", 0) for r in bench.rows)
    bench.deadline.say(f"  off from fp32: masked {whole.masked_error:.2e}, bodies {errors}")
    if worse:
        raise QualityGate(f"not as near to fp32 as the masked graph: {'; '.join(worse)}")
