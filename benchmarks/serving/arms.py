"""Arms of the comparison: a server each, and what is asked of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FIXED_LENGTHS = (4, 5, 8, 12, 16)
MODEL = "padded-lab"
NO_PREFILL_GRAPHS = "--disable-prefill-cuda-graph"
# All arms alike. Triton attention, because the machine's install leaves FA3 out for its size.
COMMON = (
    "--dtype", "bfloat16",
    "--attention-backend", "triton",
    "--sampling-backend", "pytorch",
    "--grammar-backend", "none",
    "--moe-runner-backend", "triton",
    "--linear-attn-backend", "triton",
    "--mm-attention-backend", "triton_attn",
    "--disable-radix-cache",
    "--disable-custom-all-reduce",
    "--disable-flashinfer-autotune",
    NO_PREFILL_GRAPHS,
    "--mem-fraction-static", "0.85",
    "--max-total-tokens", "65536",
    "--chunked-prefill-size", "2048",
    "--context-length", "4096",
    "--random-seed", "0",
    "--skip-server-warmup",
)  # fmt: skip


# For servers on several GPUs: where hosts are shared, a program that takes NVLink multicast can put
# all their GPUs out of service. NCCL and the logits' gather then go without it.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def graph_sizes(most_running: int) -> list[str]:
    """Batch sizes with a graph of their own: powers of two and the largest batch."""
    powers = {2**power for power in range(most_running.bit_length())}
    return [str(size) for size in sorted(powers | {most_running}) if size <= most_running]


@dataclass(frozen=True)
class Boot:
    """One server start.

    Attributes:
        algorithm: of SGLang's speculation, empty for plain decoding.
        draft_tokens: rows of a block.
        flags: further arguments.
        config: of our plugin, None without it.
        needs_bundle: whether it runs with the bundle that this run made.
        least_s: start it only with this much time left.
    """

    name: str
    algorithm: str = ""
    draft_tokens: int = 16
    flags: tuple[str, ...] = ()
    config: dict[str, Any] | None = field(default=None)
    needs_bundle: bool = False
    least_s: float = 100.0

    def arguments(
        self,
        *,
        target: Path,
        drafter: Path,
        port: int,
        most_running: int,
        tp_size: int = 1,
        prefill_graphs: Sequence[int] = (),
    ) -> list[str]:
        """Arguments of SGLang's server.

        Args:
            prefill_graphs: prompt tokens of a pass that get a prefill graph; none without.
        """
        found = [
            "--model-path", str(target), "--served-model-name", MODEL,
            "--host", "127.0.0.1", "--port", str(port),
            "--max-running-requests", str(most_running),
            "--cuda-graph-bs-decode", *graph_sizes(most_running),
            *COMMON,
        ]  # fmt: skip
        if prefill_graphs:
            found.remove(NO_PREFILL_GRAPHS)
            # Segments between attention layers: of SGLang's kinds the one that is not compiled.
            found += [
                "--cuda-graph-backend-prefill", "breakable",
                "--cuda-graph-bs-prefill", *(str(tokens) for tokens in prefill_graphs),
            ]  # fmt: skip
        if tp_size > 1:
            # FlashInfer's sum would be on by itself, and its workspace may take NVLink multicast.
            found += ["--tp-size", str(tp_size), "--enforce-disable-flashinfer-allreduce-fusion"]
        if self.algorithm:
            found += [
                "--speculative-algorithm", self.algorithm,
                "--speculative-draft-model-path", str(drafter),
                "--speculative-num-draft-tokens", str(self.draft_tokens),
                "--speculative-draft-attention-backend", "triton",
            ]  # fmt: skip
        return [*found, *self.flags]


# The most important first: what is left when time ends is the least important.
BOOTS: tuple[Boot, ...] = (
    Boot("ar"),
    Boot("dflash16", "DFLASH"),
    Boot("hybridspec-fixed", "HYBRIDSPEC", config={"small_moe": True}, least_s=150.0),
    Boot("hybridspec", "HYBRIDSPEC", config={"small_moe": True}, needs_bundle=True),
    Boot("dflash8", "DFLASH", draft_tokens=8),
    Boot("dflash5", "DFLASH", draft_tokens=5),
    Boot(
        "hybridspec-paper", "HYBRIDSPEC", config={"correction": "paper", "small_moe": True},
        needs_bundle=True,
    ),
    Boot(
        "replayssm", "DFLASH",
        flags=("--enable-gdn-replayssm-spec", "--mamba-ssm-dtype", "float32",
               "--linear-replayssm-cache-len", "32"),
    ),
)  # fmt: skip


def boots_of(names: Sequence[str]) -> list[Boot]:
    """Boots by name, in the order given; `hybridspec+commit_beside=0` sets a switch or a key.

    Raises:
        SystemExit: a name that is none.
    """
    return [_boot_of(name) for name in names]


def _boot_of(name: str) -> Boot:
    known = {boot.name: boot for boot in BOOTS}
    base, *changes = name.split("+")
    boot = known.get(base)
    if boot is None or (changes and boot.config is None):
        raise SystemExit(f"no arm {base!r} with {changes}: choose of {', '.join(known)}")
    if not changes:
        return boot
    from hybridspec.sglang_plugin.config import PluginConfig

    config: dict[str, Any] = dict(boot.config or {})
    switches: dict[str, bool] = {}
    for change in changes:
        key, _, value = change.partition("=")
        (config if key in PluginConfig.model_fields else switches)[key] = bool(int(value or "1"))
    return dataclasses.replace(boot, name=name, config={**config, "switches": switches})
