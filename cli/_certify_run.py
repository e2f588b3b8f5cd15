"""What `hybridspec certify` does: set up the arms, run the gates, tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from hybridspec.artifacts.atomic import make_folder
from hybridspec.artifacts.certificate import NAME, REPORT, Certificate, folder_of
from hybridspec.cli._certify_plan import Arranged, Asked, Request, read, settings
from hybridspec.cli._output import Output
from hybridspec.errors import Interrupted, QualityGate


def run(request: Request, output: Output) -> None:
    """Certify; leaves with 5 where a gate fails."""
    asked = read(request)
    make_folder(asked.root)
    if request.url is None:
        from hybridspec.cli._certify_engine import arrange
    else:
        from hybridspec.cli._certify_urls import arrange
    arranged = arrange(request, asked, output)
    certificate = _certify(request, asked, arranged, output)
    _tell(asked.root, certificate, output)
    if certificate.verdict == "failed":
        raise typer.Exit(QualityGate.exit_code)


def _certify(request: Request, asked: Asked, arranged: Arranged, output: Output) -> Certificate:
    from hybridspec.certify.run import Certifier

    certifier = Certifier(
        asked.root,
        subject=arranged.subject,
        settings=settings(request, asked, batch=arranged.plan.batch),
        plan=arranged.plan,
        arms=arranged.arms,
        bar=output.progress,
        fresh=request.fresh,
    )
    if certifier.kept:
        output.note(f"going on: {certifier.kept} gates were finished before")
    try:
        return certifier.run()
    except KeyboardInterrupt:
        raise Interrupted(
            f"{len(certifier.gates)} of {len(asked.gates)} gates are finished and kept in "
            f"{folder_of(asked.root, arranged.subject)}: the same command goes on from there"
        ) from None


def _tell(root: Path, certificate: Certificate, output: Output) -> None:
    from hybridspec.certify.report import verdict_of

    folder = folder_of(root, certificate.subject)
    for gate in certificate.gates:
        if gate.verdict != "not run":
            output.note(f"{gate.verdict:7} {gate.name}: {gate.message}")
    said = verdict_of(certificate.gates, certificate.verdict)
    output.result(f"{said}: {folder / REPORT}", certificate_as_json(certificate, folder))


def certificate_as_json(certificate: Certificate, folder: Path) -> dict[str, Any]:
    """A certificate as a JSON object."""
    return {
        "verdict": certificate.verdict,
        "content_id": certificate.content_id,
        "file": str(folder / NAME),
        "subject": vars(certificate.subject).copy(),
        "settings": certificate.settings,
        "gates": [
            {
                "name": gate.name,
                "verdict": gate.verdict,
                "message": gate.message,
                "figures": gate.figures,
            }
            for gate in certificate.gates
        ],
        "created": certificate.created,
    }
