"""Weights that are made while an engine loads: the tensors of the files, and refusals."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from padded_kit import SMALL, sizes_of, write_source

from hybridspec.artifacts.digest import model_digest
from hybridspec.demo import inflate
from hybridspec.demo.sglang_weights import is_weightless, make_weights
from hybridspec.errors import ModelError
from hybridspec.reference.checkpoint import Checkpoint

FLAGS = ["--dtype", "float32", *sizes_of(SMALL)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("weights")
    source = write_source(root / "source")
    assert inflate.run([str(source), "--out", str(root / "bare"), "--no-weights", *FLAGS]) == 0
    assert inflate.run([str(source), "--out", str(root / "files"), *FLAGS]) == 0
    return source, root / "bare", root / "files"


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_made_tensors_are_those_of_the_files(folders: tuple[Path, Path, Path], part: str) -> None:
    source, bare, files = folders
    written = Checkpoint(files / part, torch.device("cpu"))
    made = dict(make_weights(bare / part, source, torch.device("cpu")))
    assert set(made) == set(written.names())
    for name, tensor in made.items():
        assert torch.equal(tensor, written.tensor(name, tuple(tensor.shape), tensor.dtype)), name


def test_making_does_not_depend_on_the_default_type(folders: tuple[Path, Path, Path]) -> None:
    source, bare, _ = folders
    expected = dict(make_weights(bare / "target", source, torch.device("cpu")))
    torch.set_default_dtype(torch.bfloat16)  # as engines set it while they load
    try:
        made = dict(make_weights(bare / "target", source, torch.device("cpu")))
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in expected.items():
        assert made[name].dtype == tensor.dtype, name
        assert torch.equal(made[name], tensor), name


def test_only_padded_folders_without_files_are_weightless(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    source, bare, files = folders
    assert is_weightless(bare / "target")
    assert is_weightless(bare / "drafter")
    assert not is_weightless(files / "target")
    assert not is_weightless(source / "target")
    assert not is_weightless(tmp_path)


def test_another_source_is_refused(folders: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, bare, _ = folders
    other = write_source(tmp_path / "other", seed=4)
    with pytest.raises(ModelError, match="HYBRIDSPEC_PADDED_SOURCE"):
        next(iter(make_weights(bare / "target", other, torch.device("cpu"))))


def test_digest_of_a_weightless_folder_tells_its_source_and_shape(
    folders: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    _, bare, files = folders
    other = write_source(tmp_path / "other", seed=4)
    assert inflate.run([str(other), "--out", str(tmp_path / "b"), "--no-weights", *FLAGS]) == 0
    digest = model_digest(bare / "target")
    assert digest != model_digest(tmp_path / "b" / "target")
    assert digest != model_digest(files / "target")
    config = json.loads((bare / "target" / "config.json").read_text())
    del config["hybridspec_padding"]
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="holds no"):
        model_digest(tmp_path / "plain")


def test_vision_stub_can_be_shared_out_to_eight_devices(
    folders: tuple[Path, Path, Path],
) -> None:
    config = json.loads((folders[1] / "target" / "config.json").read_text())
    vision = config.get("vision_config")
    if vision is None:
        pytest.skip("the random pair has no vision stub")
    assert vision["num_heads"] % 8 == 0
    assert vision["hidden_size"] % vision["num_heads"] == 0
