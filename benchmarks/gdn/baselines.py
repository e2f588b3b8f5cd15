"""SGLang's own kernels, called as its GDN backend calls them.

Query, key and value are views of the mixed output of the convolution, for every method: SGLang's
kernels take a token stride, and the kernel that splits them in front is counted for no method.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from gdn.method import Method, Round
from gdn.workload import Case, Workload

RECURRENT = "kernels/ops/attention/fla/fused_sigmoid_gating_recurrent.py"
SCATTER = "kernels/ops/mamba/mamba_state_scatter_triton.py"
REPLAY = "kernels/ops/attention/fla/gdn_replayssm_spec_decode.py"
PADDING_SLOT = -1


def sglang_folder() -> Path | None:
    """Folder of the installed package, found without importing it (seconds, in every process)."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)))


@cache
def sglang_module(relative: str) -> ModuleType:
    """One kernel file of the installed SGLang, by itself; it needs only torch and triton."""
    folder = sglang_folder()
    if folder is None:
        raise ModuleNotFoundError("sglang is not installed")
    name = "sglang_file_" + Path(relative).stem
    spec = importlib.util.spec_from_file_location(name, folder / relative)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{relative} is not in {folder}")
    module = importlib.util.module_from_spec(spec)
    # Triton looks functions up through their module.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _missing(*files: str) -> str | None:
    folder = sglang_folder()
    if folder is None:
        return "sglang is not installed"
    absent = [file for file in files if not (folder / file).exists()]
    return f"the installed sglang has no {', '.join(absent)}" if absent else None


def _query_start(workload: Workload) -> torch.Tensor:
    """Start of each request in the packed rows, `[B+1]` int32."""
    case = workload.case
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=workload.device)
    return starts * case.tokens


class RecurrentRound(Round):
    """Sequential kernel that keeps the state after every token, then one scatter for all layers.

    The intermediate states are indexed by batch row, as in SGLang, so all slot sets share them.
    """

    def __init__(self, workload: Workload, block_v: int | None) -> None:
        super().__init__(workload)
        case, shape = workload.case, workload.case.shape
        self.block_v = block_v
        self.recurrent = sglang_module(RECURRENT)
        self.scatter = sglang_module(SCATTER)
        self.query_start = _query_start(workload)
        self.rows_B = torch.arange(case.batch, dtype=torch.int32, device=workload.device)
        self.intermediate_XBTHVK = torch.empty(
            (
                shape.layers,
                case.batch,
                case.tokens,
                shape.value_heads,
                shape.value_dim,
                shape.key_dim,
            ),
            dtype=case.state_dtype,
            device=workload.device,
        )
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}

    def poison(self) -> None:
        self.intermediate_XBTHVK.fill_(float("nan"))
        self.outputs.clear()

    def verify_layer(self, index: int, layer: int) -> None:
        launch = self._default if self.block_v is None else self._with_block_v
        self.outputs[index, layer] = launch(index, layer)

    def _default(self, index: int, layer: int) -> torch.Tensor:
        w = self.workload
        q, k, v, a, b = w.split(index, layer)
        return self.recurrent.fused_sigmoid_gating_delta_rule_update(
            A_log=w.A_log_XH[layer],
            dt_bias=w.dt_bias_XH[layer],
            q=q[None],
            k=k[None],
            v=v[None],
            a=a,
            b=b,
            initial_state_source=w.state_XSHVK[layer],
            initial_state_indices=w.slots_NB[index],
            cu_seqlens=self.query_start,
            use_qk_l2norm_in_kernel=True,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            is_kda=False,
            disable_state_update=True,
            intermediate_states_buffer=self.intermediate_XBTHVK[layer],
            intermediate_state_indices=self.rows_B,
            cache_steps=w.case.tokens,
            retrieve_parent_token=None,
        )

    def _with_block_v(self, index: int, layer: int) -> torch.Tensor:
        """The launch of `fused_sigmoid_gating_delta_rule_update` but for the block of V."""
        w = self.workload
        shape, tokens, batch = w.case.shape, w.case.tokens, w.case.batch
        q, k, v, a, b = w.split(index, layer)
        out = q.new_empty(1, batch * tokens, shape.value_heads, shape.value_dim)
        block_v = self.block_v
        assert block_v is not None
        grid = (1, shape.value_dim // block_v, batch * shape.value_heads)
        self.recurrent.fused_sigmoid_gating_delta_rule_update_kernel[grid](
            A_log=w.A_log_XH[layer],
            a=a,
            dt_bias=w.dt_bias_XH[layer],
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=k,
            v=v,
            b=b,
            o=out,
            h0_source=w.state_XSHVK[layer],
            h0_indices=w.slots_NB[index],
            cu_seqlens=self.query_start,
            intermediate_states_buffer=self.intermediate_XBTHVK[layer],
            intermediate_state_indices=self.rows_B,
            cache_steps=tokens,
            retrieve_parent_token_ptr=None,
            stride_retrieve_parent_token_seq=0,
            stride_retrieve_parent_token_token=0,
            scale=shape.key_dim**-0.5,
            T=batch * tokens,
            stride_a=a.stride(0),
            stride_q=q.stride(0),
            stride_k=k.stride(0),
            stride_v=v.stride(0),
            stride_b=b.stride(0),
            NP2_T=1 << (batch * tokens - 1).bit_length(),
            B=1,
            H=shape.key_heads,
            HV=shape.value_heads,
            K=shape.key_dim,
            V=shape.value_dim,
            BK=1 << (shape.key_dim - 1).bit_length(),
            BV=block_v,
            USE_INITIAL_STATE=True,
            USE_QK_L2NORM_IN_KERNEL=True,
            IS_VARLEN=True,
            IS_KDA=False,
            DISABLE_STATE_UPDATE=True,
            CACHE_INTERMEDIATE_STATES=True,
            HAS_EAGLE_TREE_CUSTOM_ATTN_MASK=False,
            num_warps=1,
            num_stages=3,
        )
        return out

    def output_BTHV(self, index: int, layer: int) -> torch.Tensor:
        case = self.workload.case
        return self.outputs[index, layer].reshape(
            case.batch, case.tokens, case.shape.value_heads, case.shape.value_dim
        )

    def commit(self, index: int) -> None:
        w = self.workload
        self.scatter.fused_mamba_state_scatter_with_mask(
            w.state_XSHVK, self.intermediate_XBTHVK, w.slots_NB[index], w.last_step_B
        )


class ReplayRound(Round):
    """ReplaySSM: rings of the last rows, and a state that is folded when the ring runs full.

    Three launches a layer (fold, verify, verify of folded rows), each for the rows that need it,
    and one a round that moves the cursors. The ring is the shortest that SGLang allows, and no
    shorter than its default of 16.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        case, shape = workload.case, workload.case.shape
        self.module = sglang_module(REPLAY)
        self.ring = ring = max(16, 1 << (2 * case.tokens - 1).bit_length())
        self.query_start = _query_start(workload)

        def buffer(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(
                (shape.layers, case.slots, *size), dtype=dtype, device=workload.device
            )

        self.rings = {
            "d_cache": buffer(shape.value_heads, ring, shape.value_dim),
            "k_cache": buffer(shape.key_heads, ring, shape.key_dim),
            "g_cache": buffer(shape.value_heads, ring, dtype=torch.float32),
            "rawv_cache": buffer(shape.value_heads, ring, shape.value_dim),
            "rawk_cache": buffer(shape.key_heads, ring, shape.key_dim),
            "beta_cache": buffer(shape.value_heads, ring, dtype=torch.float32),
        }
        self.cursors = {
            name: torch.zeros(case.slots, dtype=dtype, device=workload.device)
            for name, dtype in (
                ("write_pos", torch.int32),
                ("cache_base", torch.int32),
                ("is_flush", torch.int8),
            )
        }
        self.out_XBTHV = torch.empty(
            (
                shape.layers,
                case.batch * case.tokens,
                shape.value_heads,
                shape.value_dim,
            ),
            dtype=torch.bfloat16,
            device=workload.device,
        )

    def poison(self) -> None:
        for tensor in (*self.rings.values(), self.out_XBTHV):
            tensor.fill_(float("nan"))
        for cursor in self.cursors.values():
            cursor.zero_()

    def begin_timing(self) -> None:
        """Start each slot set in another phase of the ring, so that folds spread over a replay."""
        for tensor in (*self.rings.values(), *self.cursors.values()):
            tensor.zero_()
        for index in range(self.workload.case.sets):
            for _ in range(index):
                self.verify(index)
                self.commit(index)

    def verify_layer(self, index: int, layer: int) -> None:
        w = self.workload
        q, k, v, a, b = w.split(index, layer)
        self.module.gdn_replayssm_spec_decode(
            q=q,
            k=k,
            v=v,
            a=a,
            b=b,
            A_log=w.A_log_XH[layer],
            dt_bias=w.dt_bias_XH[layer],
            checkpoint_state=w.state_XSHVK[layer],
            **{name: ring[layer] for name, ring in self.rings.items()},
            out=self.out_XBTHV[layer],
            query_start_loc=self.query_start,
            ssm_state_indices=w.slots_NB[index],
            **self.cursors,
            max_cache_len=self.ring,
            max_spec_len=w.case.tokens,
            scale=w.case.shape.key_dim**-0.5,
            use_qk_l2norm_in_kernel=True,
            null_block_id=PADDING_SLOT,
        )

    def output_BTHV(self, index: int, layer: int) -> torch.Tensor:
        del index
        case = self.workload.case
        return self.out_XBTHV[layer].unflatten(0, (case.batch, case.tokens))

    def commit(self, index: int) -> None:
        w = self.workload
        self.module.commit_gdn_replayssm_spec(
            **self.cursors,
            num_accepted=w.accepted_B,
            state_batch_indices=w.slots_NB[index],
            max_cache_len=self.ring,
            max_spec_len=w.case.tokens,
            null_block_id=PADDING_SLOT,
        )

    def settle(self, index: int) -> None:
        w = self.workload
        self.cursors["is_flush"].fill_(1)
        for layer in range(w.case.shape.layers):
            rings = {name: ring[layer] for name, ring in self.rings.items()}
            self.module._launch_gdn_exact_fold(
                w.state_XSHVK[layer],
                rings["rawv_cache"],
                rings["rawk_cache"],
                rings["g_cache"],
                rings["beta_cache"],
                self.query_start,
                w.slots_NB[index],
                *self.cursors.values(),
                self.ring,
                True,
                PADDING_SLOT,
                w.case.shape.key_heads,
            )


@dataclass(frozen=True)
class Recurrent(Method):
    """SGLang's default verify; `block_v` None takes the installed wrapper as it is."""

    block_v: int | None = None

    def missing(self) -> str | None:
        return _missing(RECURRENT, SCATTER)

    def prepare(self, workload: Workload) -> Round:
        return RecurrentRound(workload, self.block_v)


@dataclass(frozen=True)
class Replay(Method):
    """SGLang's ReplaySSM verify; at few rows its unrolled kernels only cost compile time."""

    tokens: tuple[int, ...] = (4, 8, 16)

    def missing(self) -> str | None:
        return _missing(REPLAY)

    def supports(self, case: Case) -> bool:
        return case.state_dtype == torch.float32 and case.tokens in self.tokens

    def prepare(self, workload: Workload) -> Round:
        return ReplayRound(workload)


def baselines() -> list[Method]:
    return [
        Recurrent("D16", "SGLang 0.5.16 default: BV=32, one warp; scatter of all layers"),
        Recurrent("D23", "the same kernel with BV=4, as 0.5.23 launches it on sm_90", block_v=4),
        Replay("RPL", "SGLang 0.5.16 --enable-gdn-replayssm-spec: three launches a layer"),
    ]
