from __future__ import annotations

import random
from pathlib import Path

import pytest

from hybridspec.demo import synthetic
from hybridspec.demo.corpus import main
from hybridspec.demo.documents import CATEGORIES, read_documents
from hybridspec.demo.sources import ALLOWED, canonical, declares, mentions_copyleft
from hybridspec.errors import BundleError

CODE = '''"""Module {i}."""


def function_{i}(value: int) -> int:
    """Returns the value plus {i}, after checking that it is a number that can be added to it.

    The second paragraph of this docstring explains at length why number {i} was chosen, because
    a docstring becomes prose only if it is longer than a short remark.
    """
    return value + {i}


class Holder_{i}:
    """Holds one value and gives it back when it is asked for it, {i} times at most, never more."""
'''


def distribution(site: Path, name: str, licence: str, files: dict[str, str]) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{licence}\n\n# {name}\n"
    )
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    root = tmp_path / "site"
    modules = {f"click/m{i}.py": CODE.format(i=i) for i in range(40)}
    extra = {
        "click/copyleft.py": "# This file is under the GNU General Public License.\n" + CODE,
        "click/_vendor/other.py": CODE.format(i=991),
        "click/copy_of_m1.py": CODE.format(i=1),
        "click/guide.rst": "Guide\n=====\n\n" + "Some words about the library.\n" * 20,
    }
    distribution(root, "click", "License-Expression: BSD-3-Clause", modules | extra)
    distribution(root, "flask", "License: GPL-3.0", {"flask/a.py": CODE.format(i=992)})
    distribution(root, "rich", "Summary: no licence", {"rich/a.py": CODE.format(i=993)})
    distribution(root, "unlisted", "License: MIT", {"unlisted/a.py": CODE.format(i=994)})
    return root


def test_build_is_repeatable_and_keeps_only_allowed_text(site: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.jsonl.xz", "b.jsonl.xz")]
    for file in files:
        main(["--site", str(site), "--megabytes", "1", "--out", str(file)])
    assert files[0].read_bytes() == files[1].read_bytes()
    documents = read_documents(files[0])
    assert {d.source for d in documents} == {"click 1.0", "synthetic"}
    assert {d.licence for d in documents} == {"BSD", "Apache-2.0"}
    assert len({d.document_id for d in documents}) == len(documents)
    text = "\n".join(d.text for d in documents)
    assert "General Public" not in text
    assert not any(f"function_{i}(" in text for i in (991, 992, 993, 994))
    code = [d.text for d in documents if d.category == "code"]
    assert len(code) == len(set(code)) >= 30
    chats = [d for d in documents if d.category == "chat"]
    assert chats
    assert all(d.text.startswith("<|im_start|>user\n") for d in chats)
    assert all(d.text.endswith("<|im_end|>\n") for d in chats)
    by_file: dict[str, set[str]] = {}
    for d in documents:
        if d.source != "synthetic":
            by_file.setdefault(d.document_id.split("#")[0], set()).add(d.split)
    assert all(len(splits) == 1 for splits in by_file.values())
    assert {d.split for d in documents} == {"train", "calibration", "test"}


@pytest.mark.parametrize(
    ("field", "licence", "allowed"),
    [
        ("License-Expression: MIT", "MIT", True),
        ("License-Expression: MIT OR Apache-2.0", "MIT", True),
        ("License: BSD", "BSD", True),
        ("License: BSD", "MIT", False),
        ("Classifier: License :: OSI Approved :: Apache Software License", "Apache-2.0", True),
        ("License-Expression: MPL-2.0 AND MIT", "MIT", False),
        ("License: LGPLv3", "BSD", False),
        ("Classifier: License :: OSI Approved :: GNU General Public License (GPL)", "BSD", False),
        ("Summary: nothing declared", "MIT", False),
    ],
)
def test_declared_licences(field: str, licence: str, allowed: bool) -> None:
    assert declares(f"Name: x\n{field}\n\nLicense: GPL in the description", licence) is allowed


def test_allowlist_names_are_canonical_and_licences_permissive() -> None:
    assert set(ALLOWED.values()) == {"PSF-2.0", "BSD", "MIT", "Apache-2.0"}
    assert all(name == canonical(name) and not name.endswith("-") for name in ALLOWED)
    assert not {"hypothesis", "certifi", "pathspec", "tqdm"} & ALLOWED.keys()


@pytest.mark.parametrize(
    "text", ["under the MPL 2.0", "licensed CC BY-SA 4.0", "the LGPL", "GPLv3"]
)
def test_copyleft_texts_are_recognised(text: str) -> None:
    assert mentions_copyleft(text)
    assert not mentions_copyleft("Licensed under the MIT licence; gplot and simple words")


@pytest.mark.parametrize("maker", [synthetic.table, synthetic.settings, synthetic.contract])
def test_synthetic_text_follows_its_seed(maker) -> None:
    texts = [maker(random.Random(seed)) for seed in range(20)]
    assert texts == [maker(random.Random(seed)) for seed in range(20)]
    assert len(set(texts)) == 20
    assert all(100 < len(text) < 20_000 for text in texts)


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl.xz"
    file.write_bytes(b"not xz")
    with pytest.raises(BundleError):
        read_documents(file)
    assert len(CATEGORIES) == 7
