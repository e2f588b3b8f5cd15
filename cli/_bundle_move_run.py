"""What `hybridspec bundle export`, `import`, `push` and `pull` do."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hybridspec.artifacts.archive import CARD_NAME, check_suffix, read_archive, write_archive
from hybridspec.artifacts.atomic import make_folder, write_bytes, write_json
from hybridspec.artifacts.bundle import load_bundle
from hybridspec.artifacts.card import card_text
from hybridspec.artifacts.dspark import SPS_NAME, STS_NAME, sps_export, sts_export
from hybridspec.artifacts.hub import HubPlace, parse_place, pull_from_hub, push_to_hub
from hybridspec.artifacts.store import MANIFEST_NAME
from hybridspec.artifacts.transport import Package, check_package, install, read_package
from hybridspec.cli._bundle_folder import check_bundle_folder
from hybridspec.cli._output import Output, format_bytes
from hybridspec.errors import BundleError, UsageError

_LARGE_ERROR = 0.10


def export(
    folder: Path,
    out: Path,
    form: Literal["archive", "sglang"],
    context: int | None,
    output: Output,
) -> None:
    """Write an archive, or SGLang's two files."""
    if form == "sglang":
        _export_sglang(folder, out, context, output)
        return
    if context is not None:
        raise UsageError("--context is for --format sglang; an archive holds all contexts")
    check_suffix(out)
    if out.is_dir():
        raise UsageError(f"--out {out} is a folder: name a file")
    package = read_package(folder)
    make_folder(out.parent)
    write_archive(out, package, card=_card(folder, package))
    size = out.stat().st_size
    output.result(
        f"{out}: {format_bytes(size)}, bundle {package.manifest.content_id[:8]}",
        {"out": str(out), "num_bytes": size, "content_id": package.manifest.content_id},
    )


def _export_sglang(folder: Path, out: Path, context: int | None, output: Output) -> None:
    bundle = load_bundle(folder)
    if bundle.cost is None and bundle.calibration is None:
        raise BundleError(f"{folder} is empty; there is nothing to export")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file; two files are written: name a folder")
    facts: dict[str, object] = {"out": str(out)}
    lines = []
    files: dict[str, dict[str, object]] = {}
    if bundle.cost is None:
        output.warn(f"there is no cost part, so no {SPS_NAME} is written")
    else:
        sps = sps_export(bundle.cost.step, context_tokens=context)
        files[SPS_NAME] = sps.content
        facts |= {
            "sps_context_tokens": sps.context_tokens,
            "sps_largest_error": sps.largest_error,
        }
        lines.append(
            f"{SPS_NAME}: costs at context {sps.context_tokens}, off by at most "
            f"{sps.largest_error:.1%} in this format"
        )
        if sps.largest_error > _LARGE_ERROR:
            output.warn(
                f"the sum of a batch and a token part misses measured steps by up to "
                f"{sps.largest_error:.1%}; SGLang's format cannot say more"
            )
    if bundle.calibration is None:
        output.warn(f"there is no calibration part, so no {STS_NAME} is written")
    elif (temperatures := bundle.calibration.temperatures) is None:
        output.warn(
            f"the calibration part was made before bundles held temperatures, so no {STS_NAME} is "
            f"written: run `hybridspec calibrate --from-trace TRACE --out {folder}`"
        )
    else:
        dataset = f"hybridspec-{bundle.calibration.content_id[:8]}"
        sts = sts_export(temperatures, dataset=dataset)
        files[STS_NAME] = sts
        facts |= {"sts_temperatures": sts["temperatures"], "sts_rounds": sts["num_samples"]}
        lines.append(
            f"{STS_NAME}: {len(sts['temperatures'])} temperatures "
            f"{min(sts['temperatures']):.2f} to {max(sts['temperatures']):.2f} from "
            f"{sts['num_samples']} rounds"
        )
    if not files:
        raise BundleError(f"{folder} holds nothing of what SGLang's two files say")
    make_folder(out)
    for name, content in files.items():
        write_json(out / name, content)
    output.note(
        "these files hold no identity: SGLang cannot tell whether they belong to its machine and "
        "pair, so keep the bundle beside them"
    )
    output.result("\n".join([f"{out}:", *(f"  {line}" for line in lines)]), facts)


def import_archive(archive: Path, out: Path, replace: bool, output: Output) -> None:
    """Unpack an archive into a bundle folder."""
    check_bundle_folder(out)
    _take(read_archive(archive), out, replace, str(archive), output)


def push(folder: Path, where: str, private: bool, replace: bool, output: Output) -> None:
    """Copy a bundle to a folder or the hub."""
    place = parse_place(where)
    package = read_package(folder)
    card = _card(folder, package)
    if isinstance(place, HubPlace):
        output.note(f"uploading {format_bytes(package.num_bytes)} to {place}")
        address = push_to_hub(package, place, card=card, private=private)
    else:
        if private:
            raise UsageError("--private is for hf://; folders have permissions of their own")
        if place.resolve() == folder.resolve():
            raise UsageError(f"{where} is the bundle itself: choose another folder")
        if not (place / MANIFEST_NAME).exists():
            check_bundle_folder(place)
        install(place, package, replace=replace)
        write_bytes(place / CARD_NAME, card.encode())
        address = str(place)
    output.result(
        f"{address}: bundle {package.manifest.content_id[:8]}",
        {"place": where, "address": address, "content_id": package.manifest.content_id},
    )


def pull(where: str, out: Path, replace: bool, output: Output) -> None:
    """Fetch a bundle from a folder or the hub."""
    place = parse_place(where)
    check_bundle_folder(out)
    if isinstance(place, HubPlace):
        output.note(f"fetching {place}")
        package = pull_from_hub(place)
    else:
        if place.resolve() == out.resolve():
            raise UsageError(f"{where} is --out itself: choose another folder")
        package = read_package(place)
    _take(package, out, replace, where, output)


def _take(package: Package, out: Path, replace: bool, source: str, output: Output) -> None:
    check_package(package)
    written = install(out, package, replace=replace)
    content_id = package.manifest.content_id
    words = "holds" if written else "already held"
    output.result(
        f"{out} {words} bundle {content_id[:8]} of {source}",
        {"out": str(out), "source": source, "content_id": content_id, "written": written},
    )


def _card(folder: Path, package: Package) -> str:
    return card_text(load_bundle(folder), plots=tuple(sorted(package.plots)))
