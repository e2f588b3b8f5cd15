"""Runs inside SGLang's environment: attention of blocks on SGLang's own Triton backend and pools.

    python attention_facts.py BENCHMARKS

BENCHMARKS is the folder of `sglang_target/attention.py`. Writes one JSON object as the last line.
No kernel is launched (the interpreter needs another numpy): ours give way to their oracle.
"""

# SGLang and what it brings lie in an environment of their own.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import json
import sys
from types import SimpleNamespace
from typing import Any

import cpu_torchvision  # noqa: F401  # first: SGLang imports torchvision
import torch

sys.path.append(sys.argv[1])

CPU = torch.device("cpu")


def oracle(q: Any, keys: Any, values: Any, table: Any, requests: Any, starts: Any, *rest: Any,
           **options: Any) -> None:  # fmt: skip
    """`attend` by the oracle."""
    from hybridspec.kernels.block_attention import naive

    _, out = rest
    options.pop("dependent_launch")
    out.copy_(naive.attend(q.float(), keys, values, table, requests, starts, **options))


def dense(target: Any, batch: Any, q: Any, k: Any, v: Any, layer: int, causal: bool) -> Any:
    """The block's attention from its own keys and values and the prefix's slots, nothing else."""
    shape, rows = target.shape, 16
    group = shape.heads // shape.kv_heads
    outs = []
    for i, context in enumerate(batch.seq_lens.tolist()):
        slots = target.requests.req_to_token[batch.req_pool_indices[i], :context].long()
        block = slice(i * rows, (i + 1) * rows)

        def whole(cache: Any, own: Any, block: Any = block, slots: Any = slots) -> Any:
            heads = own[block].reshape(rows, shape.kv_heads, shape.dim)
            both = torch.cat([cache[layer][slots], heads]).float()
            return both.repeat_interleave(group, 1)

        keys, values = whole(target.pool.k_buffer, k), whole(target.pool.v_buffer, v)
        queries = q[block].view(rows, shape.heads, shape.dim).float()
        scores = torch.einsum("thd,nhd->htn", queries, keys) * shape.dim**-0.5
        if causal:
            behind = torch.ones(rows, context + rows).triu(context + 1).bool()
            scores = scores.masked_fill(behind, float("-inf"))
        outs.append(torch.einsum("htn,nhd->thd", scores.softmax(-1), values).reshape(rows, -1))
    return torch.cat(outs)


def install(target: Any, **options: Any) -> Any:
    from hybridspec.sglang_plugin.round_state import RoundState
    from hybridspec.sglang_plugin.target import attention

    state = RoundState(target.shape.requests, CPU)
    if target.shape.both_ways:
        return attention.install_drafter_attention(target.runner, state, enabled=True), state
    found = attention.install_target_attention(
        target.runner,
        state,
        **{
            "last_router_layer": 0,
            "launches": attention.LaunchOptions(),
            "enabled": True,
            **options,
        },
    )
    return found, state


def passes(shape: Any) -> dict[str, Any]:
    """A pass over blocks through the installed backend, and what its replays refill."""
    from sglang_target.attention import AttentionTarget

    target = AttentionTarget(shape, CPU)
    target.fill()
    backend = target.backend
    attention, state = install(target)
    attention.attend = oracle
    if not shape.both_ways:
        # Layer 0 takes the rows of the first router, layer 1 the length.
        state.router_rows_B[:2] = torch.tensor([16, 5])
        state.lengths_B[:2] = torch.tensor([16, 3])
    batch = target.batch([37, 0])
    q, k, v = target.rows(2)
    refilled: list[int] = []
    backend._update_target_verify_buffers = lambda bs, *rest: refilled.append(bs)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    outs = target.forward(q, k, v, batch)
    backend.init_forward_metadata_out_graph(batch)
    after_served = list(refilled)
    # A larger batch has not been captured here.
    larger = target.batch([4, 5, 6])
    backend.init_forward_metadata_out_graph(larger)
    after_other = list(refilled)
    attention.left.add(2)
    backend.init_forward_metadata_out_graph(batch)
    worst = []
    for layer, out in enumerate(outs):
        exact = dense(target, batch, q, k, v, layer, causal=not shape.both_ways)
        rows = 16 if shape.both_ways else (5, 3)[layer]
        worst.append((out[: 16 + rows].float() - exact[: 16 + rows]).abs().max().item())
        worst.append(out[16 + rows :].float().abs().max().item() if rows < 16 else 0.0)
    return {
        "error": max(worst),
        "refilled": [after_served, after_other, list(refilled)],
        "classes_untouched": "forward_extend" in vars(type(backend))
        and "BlockAttention" not in str(type(backend).forward_extend),
        "layers": attention.causal_of_layer,
    }


def reasons(shape: Any) -> dict[str, Any]:
    """What each backend or layer that does not fit is left out for."""
    from sglang_target.attention import AttentionTarget

    from hybridspec.compat import sglang_0_5_16_attention as compat

    def of_layer(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
        target = AttentionTarget(shape, CPU, dtype=dtype, **options)
        return compat.form_of(target.model[0], target.backend)

    found = {
        "window": of_layer(sliding_window_size=128),
        "cap": of_layer(logit_cap=30.0),
        "cross": of_layer(is_cross_attention=True),
        "fp8": of_layer(torch.float8_e5m2),
    }
    target = AttentionTarget(shape, CPU)
    layer, backend = target.model[0], target.backend
    layer.k_scale = torch.nn.Parameter(torch.ones(()))
    found["scale"] = compat.form_of(layer, backend)
    layer.k_scale = None
    found["plain"] = compat.form_of(layer, backend)
    found["backend"] = compat.backend_does_not_fit(backend, 16)
    for name, value in (
        ("use_mla", True),
        ("dcp_size", 2),
        ("enable_deterministic", True),
        ("num_draft_tokens", 8),
        ("topk", 4),
        ("_translate_kv_loc", len),
        ("use_sliding_window_kv_pool", True),
    ):
        before = vars(backend)[name]
        setattr(backend, name, value)
        found[name] = compat.backend_does_not_fit(backend, 16)
        setattr(backend, name, before)
    found["other"] = compat.backend_does_not_fit(object(), 16)
    found["disabled"] = install(target, enabled=False)[0] is None
    found["untouched"] = "forward_extend" not in vars(backend)
    return found


def names() -> dict[str, bool]:
    """Names and signatures that are built on."""
    from sglang.srt.layers.attention.triton_backend import ForwardMetadata, TritonAttnBackend
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

    from hybridspec.compat import sglang_0_5_16_attention as compat

    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    extend = parameters(TritonAttnBackend.forward_extend)
    static = SimpleNamespace(
        input_ids=torch.zeros(4), positions=torch.zeros(4), encoder_lens=None,
        req_pool_indices=torch.zeros(4), seq_lens=torch.zeros(4), seq_lens_cpu=torch.zeros(4),
    )  # fmt: skip
    live = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, seq_lens_sum=None, seq_lens_cpu=None, spec_info=None
    )
    view = build_replay_fb_view(live, static, 3, 2, 3, 1, ForwardMode.TARGET_VERIFY, False)
    return {
        "forward_extend": tuple(extend[:6]) == compat.FORWARD_EXTEND
        and set(compat.SERVED_BY_STOCK) == set(extend[6:]),
        "out_graph": tuple(parameters(TritonAttnBackend.init_forward_metadata_out_graph))
        == compat.OUT_GRAPH,
        "refilled": callable(getattr(TritonAttnBackend, compat.REFILLED)),
        "metadata": {"swa_out_cache_loc", "out_cache_loc_full_physical", "custom_mask"}
        <= set(inspect.signature(ForwardMetadata).parameters),
        "write": {"loc", "swa_loc", "full_loc"} <= set(inspect.signature(KVWriteLoc).parameters),
        # A replay is prepared for the padded batch, on the buffers that the graph holds.
        "static_buffers": view.batch_size == 3
        and view.seq_lens.data_ptr() == static.seq_lens.data_ptr()
        and view.req_pool_indices.data_ptr() == static.req_pool_indices.data_ptr()
        and view.forward_mode.is_target_verify(),
    }


def facts() -> dict[str, Any]:
    from sglang_target.attention import AttentionShape

    small = {"layers": 2, "heads": 4, "kv_heads": 2, "dim": 64, "requests": 3, "contexts": 64}
    return {
        "target": passes(AttentionShape(**small)),
        "drafter": passes(AttentionShape(**small, both_ways=True)),
        "reasons": reasons(AttentionShape(**small)),
        "names": names(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
