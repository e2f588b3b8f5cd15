"""Who a certificate speaks of, and whether one matches what is about to be served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import hybridspec
from hybridspec.artifacts.certificate import Certificate, Subject
from hybridspec.artifacts.digest import model_digest
from hybridspec.pair import REFERENCE_ENGINE, PairFolders
from hybridspec.request import LengthRule


def lengths_name(rule: LengthRule, correction: str) -> str:
    """How lengths are chosen, in words: `policy, router correction off`, `fixed 16`, `none`."""
    if rule.kind == "policy":
        return f"policy, router correction {correction}"
    return f"fixed {rule.length}" if rule.kind == "fixed" else "none"


def reference_subject(
    folders: PairFolders, *, dtype: str, bundle: str | None, lengths: str
) -> Subject:
    """The reference engine of this release with a pair and a bundle's content id.

    Raises:
        ModelError: a folder that is no model folder.
    """
    return Subject(
        engine=REFERENCE_ENGINE,
        engine_version=hybridspec.__version__,
        dtype=dtype,
        target_digest=model_digest(folders.target),
        drafter_digest=None if folders.drafter is None else model_digest(folders.drafter),
        bundle=bundle,
        lengths=lengths,
    )


def match_note(certificates: Sequence[Certificate], subject: Subject) -> tuple[bool, str]:
    """Whether a certificate of this very subject passed, and a line that says so or why not."""
    same = [c for c in certificates if c.subject == subject]
    if same:
        best = same[0]
        return best.verdict == "passed", f"{best.content_id[:12]} {best.summary()}"
    if not certificates:
        return False, "none; `hybridspec certify` makes one"
    other = certificates[0]
    have, want = asdict(other.subject), asdict(subject)
    different = [name for name in want if have[name] != want[name]]
    return False, (
        f"none for this set-up; {other.content_id[:12]} was made for another "
        f"{', '.join(name.replace('_', ' ') for name in different)}"
    )
