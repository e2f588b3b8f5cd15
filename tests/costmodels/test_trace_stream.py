"""Traces read piece by piece: the same rounds as at once, and refusals of what is no trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trace_kit import as_recording, make_identity, make_trace, write_trace

from hybridspec.artifacts.schemas import TRACE_SCHEMA
from hybridspec.calibrate.recording import UNRECORDED
from hybridspec.calibrate.rounds import sealed
from hybridspec.calibrate.trace import RUN_NAME
from hybridspec.costmodels.recorded import expert_counts, fit_rounds, round_sets
from hybridspec.costmodels.trace_stream import open_trace
from hybridspec.errors import BundleError, NotEnoughData

COLUMNS = [name for name in TRACE_SCHEMA.names if name != "context_tokens"]


def whole(path: Path, *, rows: int) -> pa.Table:
    pieces = list(open_trace(path).pieces(rows=rows))
    assert len(pieces) > 1
    for piece in pieces:
        assert piece.schema.equals(pieces[0].schema)
    return pa.concat_tables(pieces)


def test_pieces_are_whole_prompts_and_add_up(tmp_path: Path) -> None:
    trace = make_trace()
    path = write_trace(tmp_path / "t.parquet", trace)
    stream = open_trace(path)
    assert stream.num_rounds == len(trace)
    assert stream.identity == make_identity()
    seen: set[str] = set()
    for piece in stream.pieces(rows=100):
        names = set(piece["prompt_id"].to_pylist())
        assert not names & seen
        seen |= names
    assert whole(path, rows=100).select(COLUMNS).equals(trace.select(COLUMNS))


def test_interleaved_rounds_come_out_by_prompt(tmp_path: Path) -> None:
    trace = make_trace(prompts=30)
    mixed = trace.sort_by([("round", "ascending"), ("prompt_id", "ascending")])
    path = write_trace(tmp_path / "t.parquet", mixed.replace_schema_metadata(trace.schema.metadata))
    pieces = list(open_trace(path).pieces(rows=1000))
    assert pa.concat_tables(pieces).select(COLUMNS).equals(trace.select(COLUMNS))
    with pytest.raises(BundleError, match="sort the trace by prompt and round"):
        list(open_trace(path).pieces(rows=7))


def test_older_recordings_hold_the_same_rounds(tmp_path: Path) -> None:
    trace = make_trace(prompts=20)
    path = tmp_path / "old.parquet"
    pq.write_table(as_recording(trace), path)
    stream = open_trace(path)
    assert stream.is_recording
    assert stream.identity.target_digest == UNRECORDED
    read = pa.concat_tables(stream.pieces())
    same = [name for name in COLUMNS if name not in ("prompt_id", "loop_period")]
    assert read.select(same).equals(trace.select(same))
    assert (read["context_tokens"].to_numpy() + 1 == trace["generated_tokens"].to_numpy()).all()
    # What the recording marked as a loop is not taken over: this random text has none.
    assert trace["loop_period"].to_numpy().any()
    assert not read["loop_period"].to_numpy().any()


def test_folders_are_read_part_by_part(tmp_path: Path) -> None:
    for part in range(4):
        table = sealed(make_trace(prompts=8, first_prompt=8 * part, seed=part))
        pq.write_table(table, tmp_path / f"part-{part:05d}.parquet")
    run = tmp_path / RUN_NAME
    for text, words in (("{}", "is damaged"), ('{"num_groups": 5}', "has 4 of 5 groups")):
        run.write_text(text)
        with pytest.raises(BundleError, match=words):
            open_trace(tmp_path)
    run.write_text('{"num_groups": 4}')
    stream = open_trace(tmp_path)
    assert stream.num_rounds == 4 * 8 * 12
    assert sum(piece.num_rows for piece in stream.pieces(rows=100)) == stream.num_rounds
    other = make_trace(prompts=8, first_prompt=99, identity=make_identity(target_digest="f" * 64))
    pq.write_table(other, tmp_path / "part-00009.parquet")
    with pytest.raises(BundleError, match="different pairs or settings"):
        list(open_trace(tmp_path).pieces())


def test_counts_of_experts_by_a_set(tmp_path: Path) -> None:
    trace = make_trace(prompts=3)
    first, total = expert_counts(trace)
    assert first is not None
    assert total is not None
    routes = np.frombuffer(trace["routes"][7].as_py(), dtype=np.uint8).reshape(2, 16, 2)
    for length in (1, 5, 16):
        by_layer = [len(set(layer[:length].ravel().tolist())) for layer in routes]
        assert first[7, length - 1] == by_layer[0]
        assert total[7, length - 1] == sum(by_layer)
    assert expert_counts(make_trace(prompts=3, routes=False)) == (None, None)


def test_splits_scaling_and_prompt_numbers(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.parquet")
    stream = open_trace(path)
    fitted = fit_rounds(stream)
    assert set(fitted.table["split"].to_pylist()) == {"calibration"}
    assert not fitted.truncated
    assert fit_rounds(stream, max_rounds=1).table.num_rows < len(make_trace())
    sets = list(round_sets(stream, lambda a: a.p1_RD, split="test", layer_scale=20.0))
    (rounds,) = sets
    assert np.unique(rounds.prompt_index).size == 16
    assert rounds.distinct_total_NL is not None
    assert rounds.distinct_total_NL[:, 0].max() == 20.0 * 2 * 2


def damaged(path: Path, how: str) -> Path:
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        middle = len(data) // 2
        path.write_bytes(
            data[:middle] + bytes(255 - b for b in data[middle : middle + 64]) + data[middle + 64 :]
        )
    elif how == "empty file":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("seq,cat\n0,code\n")
    return path


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty file", "text"])
def test_damaged_files_are_refused(tmp_path: Path, how: str) -> None:
    path = damaged(write_trace(tmp_path / "t.parquet"), how)
    # Without checksums of its pages, turned bits may come through as values that cannot be.
    with pytest.raises(BundleError, match=r"is not a readable Parquet file|record it again"):
        list(open_trace(path).pieces())


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), foreign)
    with pytest.raises(BundleError, match="is Parquet, but no trace: it lacks 'accepted'"):
        open_trace(foreign)
    with pytest.raises(BundleError, match="check the path"):
        open_trace(tmp_path / "nowhere.parquet")
    with pytest.raises(BundleError, match=r"holds no part-\*\.parquet"):
        open_trace(tmp_path / ".")
    empty = make_trace().slice(0, 0)
    with pytest.raises(BundleError, match="holds no round"):
        open_trace(write_trace(tmp_path / "empty.parquet", empty))


def test_impossible_values_are_refused(tmp_path: Path) -> None:
    trace = make_trace(prompts=6)
    twice = pa.concat_tables([trace, trace.slice(5, 1)])
    with pytest.raises(BundleError, match="round 5 of prompt 'p000000' occurs twice"):
        list(open_trace(write_trace(tmp_path / "twice.parquet", twice)).pieces())
    old = as_recording(trace)
    lists = pa.array([[0.5] * 14] * len(old), pa.list_(pa.float32()))
    column = old.schema.get_field_index("p1")
    path = tmp_path / "short.parquet"
    pq.write_table(old.set_column(column, "p1", lists), path)
    with pytest.raises(
        BundleError, match="column 'p1' has 1008 values in 72 rounds; each needs 15"
    ):
        list(open_trace(path).pieces())
    nan = pa.array([[float("nan")] * 15] * len(old), pa.list_(pa.float32()))
    pq.write_table(old.set_column(column, "p1", nan), path)
    with pytest.raises(BundleError, match="NaN"):
        list(open_trace(path).pieces())
    split = old.schema.get_field_index("split")
    pq.write_table(old.set_column(split, "split", pa.array(["dev"] * len(old))), path)
    with pytest.raises(BundleError, match="column 'split' has 'dev'"):
        list(open_trace(path).pieces())
    pq.write_table(old.replace_schema_metadata({"layers": "two"}), path)
    with pytest.raises(BundleError, match="do not say layers, topk and experts"):
        open_trace(path)
    held_out = trace.filter(pa.array([s == "test" for s in trace["split"].to_pylist()]))
    stream = open_trace(write_trace(tmp_path / "test.parquet", held_out))
    with pytest.raises(NotEnoughData, match="no round in the calibration split"):
        fit_rounds(stream)
