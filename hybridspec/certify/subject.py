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


def served_match_note(
    certificates: Sequence[Certificate],
    folders: PairFolders,
    *,
    engine: str,
    version: str,
    bundle: str,
) -> tuple[str | None, str]:
    """Verdict of a certificate over HTTP, where lengths are the server's own, and a line on it.

    Model folders are digested only where a certificate is for this engine, release and bundle.

    Args:
        engine: as its `/v1/models` says it.
        bundle: content id of the bundle that will be served.

    Returns:
        None and why, where no certificate is for this engine, release, bundle and pair.

    Raises:
        ModelError: a folder that is no model folder.
    """
    over_http = f"{engine} over HTTP ("
    served = [c for c in certificates if c.subject.engine.startswith(over_http)]
    if not served:
        return None, f"none over HTTP; `hybridspec certify --url` makes one of a running {engine}"
    newest = served[0]
    told = f"{newest.content_id[:12]} was made"
    if not (same := [c for c in served if c.subject.engine_version == version]):
        return None, f"none of {engine} {version}; {told} with {newest.subject.engine_version}"
    if not (same := [c for c in same if c.subject.bundle == bundle]):
        return None, f"none for this bundle; {told} with another or without one"
    named = [c for c in same if c.subject.target_digest and c.subject.drafter_digest]
    if not named:
        return None, f"none that names this pair; {told} without TARGET and --drafter"
    pair = model_digest(folders.target), folders.drafter and model_digest(folders.drafter)
    for c in named:
        if (c.subject.target_digest, c.subject.drafter_digest) == pair:
            return c.verdict, f"{c.content_id[:12]} {c.summary()}"
    return None, f"none for this pair; {told} for other weights"


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
