"""Runs inside SGLang's environment: what its radix cache does with recurrent states.

    python prefix_states_facts.py BENCHMARKS

BENCHMARKS is the folder of `sglang_target/engine.py` in the repository, whose embedded pair is the
model here. Writes one JSON object as the last line. No kernel is launched: the interpreter needs
another numpy.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])
PAIR = Path(sys.argv[1]).parent / "hybridspec" / "demo" / "pair"
CPU = torch.device("cpu")


@contextlib.contextmanager
def pageable() -> Iterator[None]:
    """Without a GPU there is no pinned memory to put indices into."""
    made = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return made(*args, **kwargs)

    with mock.patch.object(torch, "tensor", tensor):
        yield


def boundaries(interval: int) -> list[list[Any]]:
    """What the scheduler believes of rounds around two boundaries, by its own function."""
    from sglang.srt.managers.scheduler_components import batch_result_processor as processor

    check = processor.SchedulerBatchResultProcessor._mamba_check_track_boundary
    args = SimpleNamespace(mamba_track_interval=interval)
    batch = SimpleNamespace(spec_algorithm=SimpleNamespace(is_none=lambda: False))
    found = []
    with mock.patch.object(processor, "get_server_args", return_value=args):
        for before in range(max(0, interval - 18), 2 * interval + 2):
            for rows in range(1, 17):
                # Of a prompt and an answer of one token more than what lies in the caches.
                req = SimpleNamespace(seqlen=before + rows + 1)
                result = SimpleNamespace(num_correct_drafts_per_req_cpu=[rows - 1])
                at_boundary, length = check(None, req, batch, result, 0)
                found.append([before, rows, at_boundary, length])
    return found


def trimmed() -> dict[str, int]:
    """Tokens that a request has when the scheduler asks for a boundary, behind its last round."""
    from sglang.srt.managers.schedule_batch import Req

    req = object.__new__(Req)
    vars(req).update(
        origin_input_ids=[1] * 100, output_ids=[2] * 25, finished_reason=None, to_finish=None,
        sampling_params=SimpleNamespace(max_new_tokens=20), finished_len=None,
    )  # fmt: skip
    req.update_finish_state(9)
    return {"seqlen": req.seqlen, "finished_len": req.finished_len, "finished": req.finished()}


def request(**fields: Any) -> Any:
    """As much of a request as its pool looks at."""
    plain = {
        "rid": "r", "req_pool_idx": None, "mamba_pool_idx": None, "seqlen": 33,
        "mamba_ping_pong_track_buffer": None, "mamba_next_track_idx": None,
        "inflight_middle_chunks": 0, "kv_committed_len": 0, "kv": None,
    }  # fmt: skip
    return SimpleNamespace(**plain | fields)


def target(*, overlap: bool = True, lazy: bool = False) -> Any:
    """A target whose request pool has slots for the radix cache."""
    from sglang.srt.mem_cache import memory_pool
    from sglang_target import engine

    extra = {
        "enable_mamba_extra_buffer": True,
        "enable_mamba_extra_buffer_lazy": lazy,
        "enable_overlap_schedule": overlap,
        "mamba_size": 20,
    }
    shape = engine.Shape(layers=4, key_heads=1, value_heads=2, dim=64, requests=3)
    kind = memory_pool.HybridReqToTokenPool
    made = kind.__init__

    @functools.wraps(made)
    def with_extra(self: Any, **arguments: Any) -> None:
        made(self, **arguments | extra)

    with mock.patch.object(kind, "__init__", with_extra):
        return engine.Target(shape, CPU, compact=True)


def slots(*, overlap: bool) -> dict[str, Any]:
    """Slots for snapshots as the pool gives them, behind a turn and behind a donation."""
    from hybridspec.compat.sglang_0_5_16_prefix_states import expect

    pool = target(overlap=overlap).pool
    reqs = [request(), request(seqlen=40)]
    pool.alloc(reqs)
    asked: dict[str, Any] = {}
    snapshots: Any = SimpleNamespace(
        expect=lambda contexts, tensors: asked.update(contexts=contexts, tensors=tensors)
    )
    batch = SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([32, 39]),
        req_pool_indices=torch.tensor([req.req_pool_idx for req in reqs]),
        req_to_token_pool=pool,
    )

    def clear() -> bool:
        stale = (batch.mamba_track_indices, batch.mamba_track_mask, batch.mamba_track_seqlens)
        return all(value is None for value in stale)

    def told() -> list[int]:
        # As a prefill leaves them.
        batch.mamba_track_indices = batch.mamba_track_seqlens = torch.zeros(2)
        batch.mamba_track_mask = torch.ones(2, dtype=torch.bool)
        expect(snapshots, batch)
        asked["clear"] = clear()
        with pageable():
            before, slots = asked["tensors"]()
        assert before is batch.seq_lens
        return slots.tolist()

    buffers = [req.mamba_ping_pong_track_buffer.tolist() for req in reqs]
    own = [int(req.mamba_pool_idx) for req in reqs]
    found = {"buffers": buffers, "own": own, "first": told()}
    found["cleared"] = asked["clear"] and clear()
    found["contexts"] = list(asked["contexts"])
    reqs[1].mamba_next_track_idx = pool.get_mamba_ping_pong_other_idx(0)
    found["turned"] = told()
    found["kept"] = [pool.get_mamba_ping_pong_keep_idx(req) for req in reqs]
    donated = pool.donate_mamba_ping_pong_slot(reqs[1], pool.mamba_allocator.alloc(1))
    found["donated"] = donated.tolist()
    found["behind"] = told()
    found["distinct"] = len({*own, *(slot for pair in buffers for slot in pair)})
    return found


def copies() -> dict[str, bool]:
    """What a hit on a prefix does to the compact pool: clears and copies of slots."""
    made = target()
    made.fill(3)
    pool = made.pool.mamba_pool
    states, windows = made.state_XSHVK.clone(), made.windows_XSCW.clone()
    pool.clear_slots(torch.tensor([2]))
    pool.copy_from(torch.tensor([5, 7]), torch.tensor([1, 3]))
    states[:, 2], windows[:, 2] = 0, 0
    for source, place in ((5, 1), (7, 3)):
        states[:, place], windows[:, place] = states[:, source], windows[:, source]
    return {
        "states": torch.equal(made.state_XSHVK, states),
        "windows": torch.equal(made.windows_XSCW, windows),
        "slots": states.shape[1] == 21,
        "rows": pool.hybridspec_buffers.batch_rows == 4,
    }


def installation() -> dict[str, Any]:
    """The target half on a pool with slots for the radix cache."""
    from sglang_target.engine import expert_block

    from hybridspec.sglang_plugin.round_state import RoundState, TargetOptions
    from hybridspec.sglang_plugin.target.install import install_target

    def install(made: Any, interval: int | None) -> Any:
        sizes = {"hidden": 128, "width": 64, "experts": 16, "top_k": 4}
        made.model.blocks = torch.nn.ModuleList([expert_block(CPU, layer_id=0, **sizes)])
        try:
            half = install_target(
                made.runner, RoundState(3, CPU), TargetOptions(), track_interval=interval
            )
        except Exception as error:  # whatever it raises is what is asked for
            return f"{type(error).__name__}: {error}"
        return half.snapshots and half.snapshots.interval

    return {
        "installed": install(target(), 64),
        "no interval": install(target(), None),
        "short interval": install(target(), 16),
        "lazy": install(target(lazy=True), 64),
    }


def budget(**arguments: Any) -> dict[str, float]:
    """GiB for keys and values, and slots, of 100 GiB with a radix cache; ours behind the patch."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang_target.engine import ROWS, Shape, cache_params

    args = SimpleNamespace(
        max_mamba_cache_size=None,
        max_running_requests=8,
        disable_radix_cache=False,
        disable_overlap_schedule=False,
        speculative_num_draft_tokens=ROWS,
        mamba_full_memory_ratio=0.9,
        enable_mamba_extra_buffer=lambda: True,
        enable_mamba_extra_buffer_lazy=lambda: False,
    )
    args.override = lambda source, **fields: vars(args).update(fields)
    vars(args).update(arguments)
    configurator = object.__new__(KVCacheConfigurator)
    params = cache_params(Shape())
    configurator.server_args = args
    configurator.ps = SimpleNamespace(attn_dp_size=1)
    configurator.mambaish_config = SimpleNamespace(mamba2_cache_params=params)
    configurator.hybrid_gdn_config = object()
    configurator.is_draft_worker = False
    configurator.spec_algorithm = SpeculativeAlgorithm.DFLASH
    rest = configurator._handle_max_mamba_cache(100.0)
    return {
        "rest": rest,
        "slots": args.max_mamba_cache_size,
        "state_gib": args.max_mamba_cache_size * params.mamba_cache_per_req / (1 << 30),
    }


def arguments() -> dict[str, Any]:
    """What the real `ServerArgs` makes of strategies, as on a machine with a GPU."""
    from sglang.srt import server_args

    from hybridspec.compat.sglang_0_5_16_prefix_states import track_interval

    def made(**fields: Any) -> Any:
        base = {
            "model_path": str(PAIR / "target"),
            "speculative_draft_model_path": str(PAIR / "drafter"),
            "speculative_algorithm": "hybridspec",
            "device": "cuda",
        }
        try:
            with mock.patch.object(server_args, "is_cuda", return_value=True):
                args = server_args.ServerArgs(**base | fields)
        except Exception as error:  # whatever it raises is what is asked for
            return f"{type(error).__name__}: {error}"
        return [
            args.mamba_radix_cache_strategy,
            args.disable_overlap_schedule,
            track_interval(args),
        ]

    def stock() -> Any:
        with mock.patch.dict(os.environ, HYBRIDSPEC_CONFIG=str(Path("stock.json").absolute())):
            Path("stock.json").write_text('{"target": "stock"}', encoding="utf-8")
            return made(**extra)

    extra = {"mamba_radix_cache_strategy": "extra_buffer"}
    return {
        "extra_buffer": made(**extra),
        "every 64": made(**extra, mamba_track_interval=64),
        "auto": made(),
        "off": made(disable_radix_cache=True),
        "off and named": made(disable_radix_cache=True, **extra),
        "stock target": stock(),
        "lazy": made(mamba_radix_cache_strategy="extra_buffer_lazy"),
    }


def sources() -> dict[str, Any]:
    """Order of what happens to a round, by the text of SGLang."""
    from between_graphs_facts import calls_of
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import batch_result_processor as processor
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative import dflash_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    kind = processor.SchedulerBatchResultProcessor
    update = inspect.getsource(kind._mamba_prefix_cache_update)
    deferred = ModelRunner._maybe_execute_deferred_mamba_cow_and_clear
    worker = SpeculativeAlgorithm.from_string("HYBRIDSPEC").create_worker(
        SimpleNamespace(disable_overlap_schedule=False)
    )
    return {
        "worker": calls_of(worker.forward_batch_generation),
        "worker installs": calls_of(worker.init_attention_backends),
        "overlap": calls_of(Scheduler.event_loop_overlap),
        "decode": calls_of(kind.process_batch_result_decode),
        "behind finish": calls_of(kind._handle_finish_state_updated_req),
        "turn": "get_mamba_ping_pong_other_idx" in update,
        "turn sets": "req.mamba_last_track_seqlen = track_seqlen" in update,
        "dflash prepares": "prepare_mamba_track_for_verify" in inspect.getsource(dflash_worker_v2),
        "copies": calls_of(deferred),
        "copies only": "not forward_batch.forward_mode.is_extend()" in inspect.getsource(deferred),
        "graph tracks": "self.model_runner.server_args.enable_mamba_extra_buffer()\n            "
        "and self.model_runner.spec_algorithm.is_none()"
        in inspect.getsource(DecodeCudaGraphRunner.__init__),
        "donated number": calls_of(HybridReqToTokenPool.donate_mamba_ping_pong_slot),
    }


def main() -> None:
    """Collect and write."""
    with contextlib.redirect_stdout(sys.stderr):
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from hybridspec.sglang_plugin.target.memory import install_memory_patch

        cases: dict[str, dict[str, Any]] = {"share": {}, "slots": {"max_mamba_cache_size": 40}}
        found: dict[str, Any] = {
            "boundaries": {interval: boundaries(interval) for interval in (32, 64, 256)},
            "trimmed": trimmed(),
            "arguments": arguments(),
            "stock_budget": {name: budget(**case) for name, case in cases.items()},
        }
        install_memory_patch()
        found |= {
            "budget": {name: budget(**case) for name, case in cases.items()},
            "slots": {name: slots(overlap=name == "overlap") for name in ("overlap", "alone")},
            "copies": copies(),
            "installation": installation(),
            "sources": sources(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
