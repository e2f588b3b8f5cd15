"""What commands say about the certificates that lie in a bundle."""

from __future__ import annotations

from typing import Any

from hybridspec.artifacts.bundle import Bundle
from hybridspec.artifacts.certificate import list_certificates
from hybridspec.cli._output import Output
from hybridspec.pair import PairFolders, Placement
from hybridspec.request import LengthRule

_DIGITS = 12


def say_match(
    bundle: Bundle,
    folders: PairFolders,
    placement: Placement,
    rule: LengthRule,
    correction: str,
    output: Output,
) -> None:
    """Tell whether a certificate is for what is about to be served; a failed one is a warning."""
    from hybridspec.certify.subject import lengths_name, match_note, reference_subject

    found, refused = list_certificates(bundle.folder)
    for line in refused:
        output.warn(line)
    if rule.kind == "none":
        output.note("certificate none is needed for plain decoding")
        return
    if not found:
        output.note("certificate none; `hybridspec certify` makes one")
        return
    subject = reference_subject(
        folders,
        dtype=placement.dtype,
        bundle=bundle.content_id,
        lengths=lengths_name(rule, correction),
    )
    passed, line = match_note(found, subject)
    if not passed and any(c.subject == subject and c.verdict == "failed" for c in found):
        output.warn(f"certificate {line}")
    else:
        output.note(f"certificate {line}")


def say_served_match(bundle: Bundle, folders: PairFolders, output: Output) -> None:
    """Tell whether a certificate over HTTP is for the SGLang server that is about to start."""
    from hybridspec.certify.subject import served_match_note
    from hybridspec.sglang_plugin.identity import ENGINE
    from hybridspec.sglang_plugin.refusals import SUPPORTED_VERSION

    found, refused = list_certificates(bundle.folder)
    for line in refused:
        output.warn(line)
    verdict, line = served_match_note(
        found, folders, engine=ENGINE, version=SUPPORTED_VERSION, bundle=bundle.content_id
    )
    (output.warn if verdict == "failed" else output.note)(f"certificate {line}")


def certificates_json(bundle: Bundle) -> list[dict[str, Any]]:
    """Certificates of a bundle, newest first, as JSON."""
    found, _ = list_certificates(bundle.folder)
    return [
        {
            "content_id": c.content_id,
            "verdict": c.verdict,
            "for_this_bundle": c.subject.bundle == bundle.content_id,
            "subject": vars(c.subject).copy(),
            "gates": {gate.name: gate.verdict for gate in c.gates},
            "created": c.created,
        }
        for c in found
    ]


def certificate_lines(bundle: Bundle, output: Output) -> list[str]:
    """A line a certificate; damaged ones are warned of."""
    found, refused = list_certificates(bundle.folder)
    for line in refused:
        output.warn(line)
    lines = []
    for c in found:
        other = "" if c.subject.bundle == bundle.content_id else ", FOR ANOTHER BUNDLE"
        lines.append(
            f"certificate {c.content_id[:_DIGITS]}: {c.summary()}\n"
            f"  {c.subject.engine} {c.subject.engine_version}, {c.subject.dtype}, "
            f"{c.subject.lengths}{other}"
        )
    return lines
