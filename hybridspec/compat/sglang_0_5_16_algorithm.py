"""The algorithm HYBRIDSPEC as SGLang 0.5.16 registers one.

`CustomSpecAlgo` lacks three methods that the scheduler calls on every algorithm
(`create_future_map`, `carries_draft_hidden_states`, `need_topk`); registration does not ask for
them, so they are here.
"""

# SGLang lives in an environment of its own.
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

NAME = "HYBRIDSPEC"


class HybridSpecAlgorithm(CustomSpecAlgo):
    """As DFLASH wherever SGLang asks: the same drafter, blocks and buffers."""

    def is_dflash(self) -> bool:
        """Draft keys and values have the drafter's own dtype rules."""
        return True

    def is_dflash_family(self) -> bool:
        """Blocks of one anchor and drafts; hidden states of target layers feed the drafter."""
        return True

    def supports_target_verify_for_draft(self) -> bool:
        """The drafter runs whole blocks, as a verification does."""
        return True

    def need_topk(self) -> bool:
        """No tree of candidates is relayed between rounds."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """No hidden states go from a prefill server to a decode server."""
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        """What the overlap scheduler relays from one round to the next."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def handle_server_args(self, server_args: Any) -> None:
        """Settle the flags of a drafter as for DFLASH."""
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash

        _handle_dflash(server_args)


def register() -> None:
    """Register the algorithm in this process; a second call changes nothing."""
    if get_spec(NAME) is not None:
        return

    @SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=_validate,
        spec_class=HybridSpecAlgorithm,
    )
    def worker(server_args: Any) -> type:
        """Class of the worker, imported only in a process that runs the model."""
        from hybridspec.compat.sglang_0_5_16_worker import HybridSpecWorker

        return HybridSpecWorker


def _validate(server_args: Any) -> None:
    from hybridspec.sglang_plugin.config import read_config
    from hybridspec.sglang_plugin.refusals import check_server_args

    # A configuration that cannot be right is refused before weights are loaded.
    check_server_args(server_args, read_config().target)
