"""Places that bundles are pushed to and pulled from: folders, `file://` and the Hugging Face hub.

On the hub a bundle is a dataset repository, or a folder of one: `hf://owner/name[/folder][@rev]`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from hybridspec import environ
from hybridspec.artifacts.archive import CARD_NAME
from hybridspec.artifacts.digest import canonical_json
from hybridspec.artifacts.manifest import parse_manifest
from hybridspec.artifacts.store import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    MAX_TABLE_BYTES,
    read_file,
)
from hybridspec.artifacts.transport import (
    MAX_PLOT_BYTES,
    MAX_PLOTS,
    PLOT_NAME,
    Package,
    checked_payload,
    checked_plot,
)
from hybridspec.errors import BundleError, EnvironmentMissing, HybridSpecError, UsageError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(
    rf"hf://(?:datasets/)?({_WORD}/{_WORD})((?:/{_WORD})*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,99}}))?"
)
_KIND = "dataset"


@dataclass(frozen=True)
class HubPlace:
    """A bundle on the hub.

    Attributes:
        repo: `owner/name` of the dataset repository.
        folder: inside it, empty for the top.
        revision: branch, tag or commit; None is the main branch.
    """

    repo: str
    folder: str = ""
    revision: str | None = None

    def __str__(self) -> str:
        folder = f"/{self.folder}" if self.folder else ""
        return f"hf://{self.repo}{folder}" + (f"@{self.revision}" if self.revision else "")

    def path(self, name: str) -> str:
        """Path of a file of the bundle inside the repository."""
        return f"{self.folder}/{name}" if self.folder else name


def parse_place(text: str) -> Path | HubPlace:
    """Reads `hf://owner/name[/folder][@revision]`, `file:///folder` or a path.

    Raises:
        UsageError: another scheme, or a hub address that cannot be.
    """
    if text.startswith("hf://"):
        match = _HUB.fullmatch(text)
        if match is None or ".." in text:
            raise UsageError(f"{text} is no hub address: write hf://owner/name[/folder][@revision]")
        return HubPlace(match[1], match[2].strip("/"), match[3])
    if text.startswith("file:"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise UsageError(f"{text} is no address of a local folder: write file:///folder")
        return Path(unquote(parts.path))
    if "://" in text:
        raise UsageError(
            f"{text}: known are hf://owner/name, file:///folder and paths: use one of them"
        )
    if not text:
        raise UsageError("the place is empty: give hf://owner/name, file:///folder or a path")
    return Path(text)


def push_to_hub(package: Package, place: HubPlace, *, card: str, private: bool = False) -> str:
    """Uploads a package in one commit, after making the repository if it is missing.

    Files of an older bundle in the same folder are deleted in that commit.

    Returns:
        the address of the commit.

    Raises:
        BundleError: the repository or revision is not there, or access is refused.
        EnvironmentMissing: huggingface_hub is missing, the hub cannot be reached, or work is
            offline.
    """
    hub = _hub()
    api = hub.HfApi()
    new = {
        MANIFEST_NAME: canonical_json(package.manifest.to_json()) + b"\n",
        CARD_NAME: card.encode(),
        **{payload.entry.path: payload.data for payload in package.payloads},
        **package.plots,
    }
    with _refusals(place):
        api.create_repo(place.repo, repo_type=_KIND, private=private, exist_ok=True)
        present = _files(api, place)
        stale = [
            path
            for name, path in present.items()
            if name not in new and (name.startswith(("calibration/", "cost/", "plots/")))
        ]
        operations: list[Any] = [
            hub.CommitOperationAdd(path_in_repo=place.path(name), path_or_fileobj=data)
            for name, data in new.items()
        ]
        operations += [hub.CommitOperationDelete(path_in_repo=path) for path in stale]
        done = api.create_commit(
            place.repo,
            operations,
            commit_message=f"HybridSpec bundle {package.manifest.content_id[:8]}",
            repo_type=_KIND,
            revision=place.revision,
        )
    return str(done.commit_url)


def pull_from_hub(place: HubPlace) -> Package:
    """Downloads a package of one commit; sizes are checked before files are fetched.

    Raises:
        BundleError: nothing there, a damaged manifest, files of other sizes or digests.
        EnvironmentMissing: huggingface_hub is missing, the hub cannot be reached, or work is
            offline.
    """
    hub = _hub()
    api = hub.HfApi()
    with _refusals(place), tempfile.TemporaryDirectory(prefix="hybridspec-") as folder:
        # One commit for all files: a push in between must not mix two bundles.
        commit = api.dataset_info(place.repo, revision=place.revision).sha
        present = _files(api, place, revision=commit)

        def fetch(name: str, limit: int) -> bytes:
            path = place.path(name)
            url = hub.hf_hub_url(place.repo, path, repo_type=_KIND, revision=commit)
            size = hub.get_hf_file_metadata(url).size
            if size is None or size > limit:
                raise BundleError(
                    f"{place}: {name} has {size} bytes; at most {limit} are allowed: it is damaged"
                )
            got = hub.hf_hub_download(
                place.repo, path, repo_type=_KIND, revision=commit, local_dir=folder
            )
            return read_file(Path(got), max_bytes=limit)

        manifest = parse_manifest(
            fetch(MANIFEST_NAME, MAX_MANIFEST_BYTES), path=f"{place}/{MANIFEST_NAME}"
        )
        payloads = tuple(
            checked_payload(
                entry, fetch(entry.path, min(entry.num_bytes, MAX_TABLE_BYTES)), where=place
            )
            for entry in manifest.entries()
        )
        names = sorted(name for name in present if PLOT_NAME.fullmatch(name))[:MAX_PLOTS]
        plots = {n: checked_plot(n, fetch(n, MAX_PLOT_BYTES), where=place) for n in names}
    return Package(manifest, payloads, plots)


def _files(api: Any, place: HubPlace, *, revision: str | None = None) -> dict[str, str]:
    """Name inside the bundle to path inside the repository."""
    paths = api.list_repo_files(
        place.repo, repo_type=_KIND, revision=revision if revision else place.revision
    )
    prefix = f"{place.folder}/" if place.folder else ""
    return {path.removeprefix(prefix): path for path in paths if path.startswith(prefix)}


def _hub() -> Any:
    if environ.offline():
        raise EnvironmentMissing(
            "HYBRIDSPEC_OFFLINE or HF_HUB_OFFLINE is set, and hf:// needs the network: unset it, "
            "or use a folder"
        )
    try:
        import huggingface_hub
    except ImportError as error:
        raise EnvironmentMissing(
            "hf:// needs the package huggingface_hub: run `pip install huggingface_hub` (the "
            "extra `hub` has it), or use a folder"
        ) from error
    return huggingface_hub


@contextmanager
def _refusals(place: HubPlace) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except HybridSpecError:
        raise
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise BundleError(
            f"{place} is not there, or not yours to see: check the name, or log in with `hf auth "
            "login`"
        ) from error
    except (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError) as error:
        raise BundleError(
            f"{place} holds no bundle at that revision and folder: check both"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise BundleError(
                f"{place}: access is refused ({status}): log in with `hf auth login` as someone "
                "who may"
            ) from error
        raise EnvironmentMissing(f"{place}: the hub answered {status}: try again later") from error
    # What the HTTP client raises, whichever it is: huggingface_hub moved from one to another.
    except Exception as error:
        if not isinstance(error, (OSError, errors.LocalEntryNotFoundError)) and not type(
            error
        ).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise
        detail = " ".join(str(error).split())[:200]
        raise EnvironmentMissing(
            f"{place}: the hub cannot be reached ({type(error).__name__}: {detail}): check the "
            "network, or use a folder"
        ) from error
