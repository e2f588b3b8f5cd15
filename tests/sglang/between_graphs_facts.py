"""Runs inside SGLang's environment: what is replaced between the two graphs of a round.

    python between_graphs_facts.py BENCHMARKS

BENCHMARKS is the folder of `sglang_target/engine.py`, which makes a target without an engine.

Writes one JSON object as the last line. No kernel is launched: the interpreter needs another numpy.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])
LAYERS, HEADS, DIM = 3, 2, 64


def calls_of(function: Any) -> list[str]:
    """What a function calls, as source, in order of the text."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(call) for call in calls]


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def pool(**options: Any) -> Any:
    """A drafter's pool of keys and values on the CPU."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    arguments = {
        "size": 40, "page_size": 1, "dtype": torch.bfloat16, "head_num": HEADS, "head_dim": DIM,
        "layer_num": LAYERS, "device": "cpu", "enable_memory_saver": False,
        "enable_alt_stream": False,
    }  # fmt: skip
    return MHATokenToKVPool(**arguments | options)


def materializer() -> Any:
    """SGLang's helper for three layers of random weights."""
    from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

    rotary = SimpleNamespace(rotary_dim=DIM, is_neox_style=True, cos_sin_cache=torch.zeros(64, DIM))
    width = HEADS * DIM
    attention = SimpleNamespace(
        num_kv_heads=HEADS,
        head_dim=DIM,
        q_size=width,
        kv_size=width,
        rotary_emb=rotary,
        qkv_proj=SimpleNamespace(weight=torch.zeros(3 * width, 32, dtype=torch.bfloat16)),
        k_norm=SimpleNamespace(weight=torch.ones(DIM, dtype=torch.bfloat16), variance_epsilon=1e-6),
    )
    layers = [SimpleNamespace(self_attn=attention)] * LAYERS
    return FusedKVMaterializeHelper(layers, rotary, HEADS, DIM, torch.device("cpu"))


def state_metadata() -> dict[str, Any]:
    """Slots in the buffers of a graph after replays of changing and of unchanged batches."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang_target.engine import Shape, Target

    from hybridspec.compat.sglang_0_5_16_state_metadata import StateMetadata
    from hybridspec.sglang_plugin.target.memory import install_memory_patch

    install_memory_patch()
    shape = Shape(layers=4, key_heads=1, value_heads=2, dim=64, requests=3)
    target = Target(shape, torch.device("cpu"), compact=True)
    gdn, pool = target.gdn, target.pool
    gdn.init_cuda_graph_state(3, 48)
    metadata = StateMetadata(gdn)
    metadata.install()
    slots_of_requests = pool.req_index_to_mamba_index_mapping

    def replay(requests: list[int], padding: int = 0) -> list[int]:
        view = SimpleNamespace(
            batch_size=len(requests),
            req_pool_indices=torch.tensor(requests),
            forward_mode=ForwardMode.TARGET_VERIFY,
            spec_info=SimpleNamespace(draft_token_num=16),
            seq_lens_cpu=None,
            num_padding=padding,
            mamba_track_indices=None,
        )
        gdn.forward_metadata = None
        target.hybrid.init_forward_metadata_out_graph(view)
        held: Any = gdn.forward_metadata
        rows = len(requests) - padding
        assert held.query_start_loc.tolist()[: rows + 1] == [16 * i for i in range(rows + 1)]
        return held.mamba_cache_indices.tolist()

    # The full attention's part of the wrapper is another matter.
    target.hybrid.attn_backend_list = [gdn]
    slots_of_requests[:4] = torch.tensor([0, 3, 1, 2], dtype=slots_of_requests.dtype)
    found = {"first": replay([1, 2]), "other size": replay([3]), "back": replay([2, 1])}
    slots_of_requests[1] = 5
    found["held"] = replay([2, 1])
    metadata.forget()
    found["forgotten"] = replay([2, 1])
    found["padded"] = replay([3, 1, 0], padding=1)
    slots_of_requests[3] = 4
    found["padded again"] = replay([3, 1, 0], padding=1)
    return found


def block_buffers() -> dict[str, Any]:
    """Buffers of five rounds of other batches, with room for four requests in the graph."""
    from hybridspec.compat.sglang_0_5_16_between_graphs import BetweenGraphs
    from hybridspec.compat.sglang_0_5_16_worker import HybridSpecWorker
    from hybridspec.sglang_plugin.side_stream import SideStream

    between = object.__new__(BetweenGraphs)
    between._appends = SideStream("cpu")
    between._other = None
    between._tokens_T = torch.full((64,), -9, dtype=torch.int64)
    worker: Any = object.__new__(HybridSpecWorker)
    vars(worker).update(
        between=between, block_size=16, device="cpu", _draft_block_ids_buf=None,
        _draft_block_positions_buf=None, _draft_verify_out_cache_loc_buf=None,
    )  # fmt: skip
    found: dict[str, Any] = {"in_place": [], "shapes": [], "alternate": [], "tokens": []}
    before: set[int] = set()
    for requests in (1, 1, 2, 1, 4, 6, 6):
        worker._ensure_draft_block_buffers(requests)
        tokens = worker._draft_block_tokens_buf
        mine = {
            worker._draft_block_positions_buf.data_ptr(),
            worker._draft_verify_out_cache_loc_buf.data_ptr(),
        }
        found["alternate"].append(len(mine) == 2 and not mine & before)
        before = mine
        found["shapes"].append([list(worker._draft_block_positions_buf.shape), list(tokens.shape)])
        found["in_place"].append(tokens.data_ptr() == between._tokens_T.data_ptr())
        # What a round does with them.
        ids = worker._draft_block_ids_buf[:requests]
        ids.fill_(7)
        ids[:, 0] = 1
        block = tokens[:requests]
        block[:, 0].copy_(ids[:, 0])
        block[:, 1:].copy_(torch.arange(15))
        found["tokens"].append(block.tolist() == [[1, *range(15)]] * requests)
    return found


def rotary_positions() -> dict[str, Any]:
    """Positions in three axes by SGLang's method and by the one in its place."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from hybridspec.compat.sglang_0_5_16_rotary_positions import RotaryPositions

    def runner(**options: Any) -> Any:
        graphs = SimpleNamespace(
            buffers=SimpleNamespace(mrope_positions=torch.full((3, 64), -1, dtype=torch.int64))
        )
        return SimpleNamespace(
            device="cpu",
            decode_cuda_graph_runner=graphs,
            model_config=SimpleNamespace(model_is_mrope=True),
        )

    target, other = runner(), runner()
    stock = ForwardBatch.compute_spec_mrope_positions
    positions = RotaryPositions.of(target)
    assert positions is not None
    buffer = target.decode_cuda_graph_runner.buffers.mrope_positions
    block = torch.arange(32).view(2, 16).add(torch.tensor([[70], [9]])).view(-1)
    image = SimpleNamespace(mrope_position_delta=torch.tensor([[5]]))

    def computed(method: Any, by: Any = target, inputs: Any = (None, None), at: Any = block) -> Any:
        forward_batch = SimpleNamespace(seq_lens=torch.zeros(2))
        spec = SimpleNamespace(positions=at)
        method(forward_batch, by, SimpleNamespace(multimodal_inputs=inputs, spec_info=spec))
        return forward_batch.mrope_positions

    expected, with_image = computed(stock), computed(stock, inputs=(None, image))
    positions.install()
    ours = ForwardBatch.compute_spec_mrope_positions
    found: dict[str, Any] = {"parameters": parameters(stock)}

    def case(name: str, wanted: Any, write: bool = True, **arguments: Any) -> None:
        if write:
            positions.write(block)
        got = computed(ours, **arguments)
        found[name] = [torch.equal(got, wanted), got.data_ptr() == buffer.data_ptr()]

    case("text", expected)
    case("not written again", expected, write=False)
    case("image", with_image, inputs=(None, image))
    case("other runner", expected, by=other)
    case("other positions", expected, at=block.clone())
    ForwardBatch.compute_spec_mrope_positions = stock
    no_axes, no_graphs = runner(), runner()
    no_axes.model_config.model_is_mrope = False
    no_graphs.decode_cuda_graph_runner = None
    found["none"] = RotaryPositions.of(no_axes) is None and RotaryPositions.of(no_graphs) is None
    return found


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def facts() -> dict[str, Any]:
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    from hybridspec.compat.sglang_0_5_16_drafter_cache import caches_of, no_writer

    helper = materializer()
    helper._ensure_workspace(20, torch.bfloat16)
    materialize = type(helper).materialize
    caches = caches_of(pool(), range(LAYERS), torch.bfloat16)
    round_calls = calls_of(DFlashWorkerV2.forward_batch_generation)
    return {
        "caches": [caches.layers, caches.width, caches.stride],
        "refused": {
            "fp8": outcome(
                lambda: caches_of(pool(dtype=torch.float8_e4m3fn), range(3), torch.bfloat16)
            ),
            "other dtype": outcome(lambda: caches_of(pool(), range(3), torch.float16)),
            "layout": outcome(
                lambda: caches_of(pool(kv_cache_layout="other"), range(3), torch.bfloat16)
            ),
        },
        "workspaces": [list(helper._k_workspace.shape), list(helper._v_workspace.shape)],
        "workspace_strides": [list(helper._k_workspace[:, :16].stride())],
        "weight_dtype": str(helper.flat_kv_weight_t.dtype),
        "materialize": parameters(materialize),
        "writer": parameters(no_writer),
        "materialize_source": inspect.getsource(materialize),
        "append_calls": calls_of(DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc),
        "fused": parameters(DFlashWorkerV2._append_target_hidden_fused),
        "round_calls": round_calls,
        "state_metadata": state_metadata(),
        "block_buffers": block_buffers(),
        "rotary_positions": rotary_positions(),
        "buffers_of_a_graph": list(DecodeInputBuffers.__dataclass_fields__),
        "append_by_loc": parameters(DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc),
        "need_commit": [
            line.strip()
            for line in inspect.getsource(DFlashWorkerV2.forward_batch_generation).splitlines()
            if "_need_mamba_verify_commit" in line
        ],
        "pass_calls": calls_of(ModelRunner._forward_raw),
        "execute_calls": calls_of(DecodeCudaGraphRunner.execute),
        "clear_slots_callers": "pool.mamba_pool.clear_slots(" in inspect.getsource(ModelRunner),
        "cpu_copy_waits": "synchronize()" in inspect.getsource(MambaPool.get_cpu_copy),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
