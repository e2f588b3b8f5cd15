"""A real engine behind a real socket."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from hybridspec.policy import Policy
from hybridspec.reference.engine import Engine
from hybridspec.reference.loading import load_pair
from hybridspec.reference.tokenizer import Tokenizer
from hybridspec.server.app import create_app
from hybridspec.server.run import HttpServer, bind
from hybridspec.server.state import ServerState

PAIR = Path(__file__).parents[2].parent / "shared" / "pairs" / "micro"
MODEL = "micro"


@dataclass
class Served:
    """A running server as tests see it."""

    url: str
    state: ServerState
    http: HttpServer

    @property
    def engine(self) -> Engine:
        return self.state.engine

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60.0)

    def metric(self, name: str, **labels: str) -> float:
        """Value of one sample, 0 where it does not exist."""
        text = httpx.get(f"{self.url}/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0


Serving = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def pair() -> Path:
    if not PAIR.is_dir():
        pytest.skip(f"needs the trained micro pair in {PAIR}")
    torch.set_num_threads(1)
    return PAIR


@pytest.fixture(scope="session")
def tokenizer(pair: Path) -> Tokenizer:
    return Tokenizer.load(pair / "target")


@pytest.fixture(scope="session")
def serving(pair: Path, tokenizer: Tokenizer) -> Serving:
    """Start a server of its own: `with serving(max_batch=2, queue_limit=1) as served`."""

    @contextmanager
    def start(
        *,
        max_batch: int = 4,
        drafter: bool = True,
        policy: Policy | None = None,
        **options: Any,
    ) -> Iterator[Served]:
        engine = load_pair(
            pair / "target",
            pair / "drafter" if drafter else None,
            max_batch=max_batch,
            policy=policy,
        )
        listener = bind("127.0.0.1", 0)
        options = {"drain_s": 5.0, **options}
        app = create_app(engine, tokenizer, model_name=MODEL, **options)
        http = HttpServer(app, listener)
        ready = threading.Event()
        http.on_ready = ready.set
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            assert ready.wait(30)
            yield Served(http.url, app.state.server, http)
        finally:
            http.should_exit = True
            thread.join(30)
            if thread.is_alive():
                faulthandler.dump_traceback()
        assert not thread.is_alive()

    return start


@pytest.fixture(scope="session")
def served(serving: Serving) -> Iterator[Served]:
    """The server that most tests share."""
    with serving() as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as opened:
        yield opened
