"""The embedded pair as the certificate meets it: arms, servers, a bundle without measuring."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hybridspec.artifacts.bundle import write_calibration, write_cost, write_throughput
from hybridspec.artifacts.schemas import (
    EXPERTS_SCHEMA,
    METRICS_SCHEMA,
    RELIABILITY_SCHEMA,
    SAMPLES_SCHEMA,
    table_from,
)
from hybridspec.artifacts.tables import HazardTable, StepCostTable, ThroughputTable
from hybridspec.calibrate.prompts import load_prompts
from hybridspec.certify.engine_arms import EngineArms
from hybridspec.certify.texts import Task
from hybridspec.demo import assets
from hybridspec.pair import calibration_identity, cost_identity, pair_folders, place
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.request import LengthRule
from hybridspec.server.app import create_app
from hybridspec.server.run import HttpServer, bind

MAX_BATCH = 4


def made_up_bundle(folder: Path) -> Path:
    """Raw top-1 probabilities as hazards; a round costs 1 ms and 0.1 ms a row."""
    torch.set_num_threads(1)
    folders = pair_folders(None, None)
    placement = place(device="cpu", dtype="auto", threads=1)
    knots = np.linspace(0.0, 1.0, 17)
    write_calibration(
        folder,
        identity=calibration_identity(
            folders, dtype=placement.dtype, temperature=0.0, top_p=1.0, prompts_digest=None
        ),
        hazard=HazardTable("raw", np.array([1.0, 1.0, 0.0, 0.0, 0.0]), np.zeros(15), knots, knots),
        routing=None,
        reliability=table_from({n: [] for n in RELIABILITY_SCHEMA.names}, RELIABILITY_SCHEMA),
        metrics=table_from({n: [] for n in METRICS_SCHEMA.names}, METRICS_SCHEMA),
        provenance={},
    )
    grid = np.arange(1, MAX_BATCH + 1)
    times = (np.full((MAX_BATCH, 1, 17), 1000.0) + 100.0 * np.arange(17)).astype(np.float64)
    write_cost(
        folder,
        identity=cost_identity(folders, placement, max_batch=MAX_BATCH),
        step=StepCostTable(
            grid, np.array([512]), times, times, times, np.full((MAX_BATCH, 1), 300.0), 0.0, 1.0
        ),
        samples=table_from({n: [] for n in SAMPLES_SCHEMA.names}, SAMPLES_SCHEMA),
        experts=table_from({n: [] for n in EXPERTS_SCHEMA.names}, EXPERTS_SCHEMA),
        throughput=None,
        provenance={},
    )
    write_throughput(folder, ThroughputTable(grid, np.full(MAX_BATCH, 2e-3), np.full(MAX_BATCH, 4)))
    return folder


def embedded_arms(length: int = 16) -> EngineArms:
    """The embedded pair that verifies a fixed number of rows."""
    torch.set_num_threads(1)
    folders = pair_folders(None, None)
    engine = load_pair(folders.target, folders.drafter, max_batch=MAX_BATCH, max_context=512)
    return EngineArms(engine, Tokenizer.load(folders.target), rule=LengthRule("fixed", length))


def embedded_tasks(count: int) -> list[Task]:
    """Held-out prompts of the embedded pair, over its categories."""
    prompts = [p for p in load_prompts(assets.PROMPTS) if p.split == "test"]
    step = len(prompts) // count
    return [Task(p.prompt_id, p.category, p.text) for p in prompts[::step][:count]]


@contextmanager
def serving(*, drafts: bool) -> Iterator[str]:
    """A real server of the embedded pair; its URL."""
    folders = pair_folders(None, None)
    engine = load_pair(
        folders.target, folders.drafter if drafts else None, max_batch=MAX_BATCH, max_context=512
    )
    listener = bind("127.0.0.1", 0)
    app = create_app(engine, Tokenizer.load(folders.target), model_name="embedded", drain_s=5.0)
    http = HttpServer(app, listener)
    ready = threading.Event()
    http.on_ready = ready.set
    thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert ready.wait(30)
        yield http.url
    finally:
        http.should_exit = True
        thread.join(30)
