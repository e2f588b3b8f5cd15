"""Static buffers of a round besides weights and caches, and the report that the host reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridspec.kernels.accept.outcome import Cursors, Outcome
from hybridspec.kernels.accept.sampled import SamplingWorkspace
from hybridspec.kernels.draft_features.features import draft_features
from hybridspec.kernels.draft_features.naive import draft_features as plain_features
from hybridspec.kernels.draft_features.rows import DraftFeatures
from hybridspec.kernels.draft_features.split import Workspace
from hybridspec.kernels.gdn.factors import BLOCK_ROWS
from hybridspec.kernels.select.selection import Selection
from hybridspec.reference.gpu.target import TargetPass

NUM_DRAFTS = BLOCK_ROWS - 1


class Report:
    """What one round says, in one int32 vector, so that one copy brings it to the host.

    Attributes:
        flat: int32, all of it.
        emitted_BT, accepted_B, bonus_B, commit_rows_B, valid_B, lengths_B: int32 views.
        fallback_B: int32 view, why a policy did not choose the length, as of `Selection`; else 0.
        p1_R, p2_R: fp32 views, the target's two best probabilities of each row that ran.
    """

    def __init__(self, batch: int, device: torch.device, *, pinned: bool = False) -> None:
        rows = batch * BLOCK_ROWS
        sizes = (rows, batch, batch, batch, batch, batch, batch, rows, rows)
        self.flat = torch.zeros(sum(sizes), dtype=torch.int32, device=device, pin_memory=pinned)
        emitted, accepted, bonus, commit, valid, lengths, fallback, p1, p2 = self.flat.split(sizes)
        self.emitted_BT = emitted.view(batch, BLOCK_ROWS)
        self.accepted_B, self.bonus_B, self.commit_rows_B = accepted, bonus, commit
        self.valid_B, self.lengths_B, self.fallback_B = valid, lengths, fallback
        self.p1_R, self.p2_R = p1.view(torch.float32), p2.view(torch.float32)

    @property
    def outcome(self) -> Outcome:
        """The part that acceptance writes."""
        return Outcome(
            self.accepted_B, self.bonus_B, self.emitted_BT, self.commit_rows_B, self.valid_B
        )


@dataclass(frozen=True)
class Sampling:
    """Buffers of sampled acceptance.

    Attributes:
        inverse_temperature_B11: fp32. scaled_BTV, probabilities_BTV: fp32 [B, 16, V].
        coins_BC: fp64 [B, 16], fresh ones before every round.
    """

    inverse_temperature_B11: torch.Tensor
    scaled_BTV: torch.Tensor
    probabilities_BTV: torch.Tensor
    coins_BC: torch.Tensor
    workspace: SamplingWorkspace

    @classmethod
    def allocate(cls, batch: int, vocab: int, device: torch.device) -> Sampling:
        """For temperatures of one until they are set."""
        tiles = torch.zeros(2, batch, BLOCK_ROWS, vocab, device=device)
        return cls(
            torch.ones(batch, 1, 1, device=device),
            tiles[0],
            tiles[1],
            torch.zeros(batch, BLOCK_ROWS, dtype=torch.float64, device=device),
            SamplingWorkspace.create(batch, vocab, device),
        )


class RoundBuffers:
    """Buffers that the rounds of one engine share, whatever their mode.

    Attributes:
        limits_B: int32, longest block of each request; 0 takes it out of the rounds.
        fixed_B: int32 lengths of fixed mode. ones_B: int32 ones.
        caps_B, selected_B: int32, as of the running round; final lengths are `report.lengths_B`.
        signals: of the drafts. selection: scores of the running round.
        tokens_BT: int32 [B, 16], the target's choices; rows behind those that ran are stale.
    """

    def __init__(self, target: TargetPass) -> None:
        batch, device = target.batch, target.device
        vocab, rows = target.config.vocab_size, batch * BLOCK_ROWS

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.batch = batch
        self.limits_B, self.fixed_B, self.caps_B = ints(batch), ints(batch), ints(batch)
        self.selected_B = ints(batch)
        self.ones_B = ints(batch) + 1
        self.batch_size = ints(1) + batch
        self.report = Report(batch, device)
        self.cursors = Cursors(target.starts_B, target.anchors_B)
        drafts = DraftFeatures.empty(batch * NUM_DRAFTS, device)
        self.signals = DraftFeatures(
            target.drafts_BD.view(-1), drafts.p1_R, drafts.p2_R, drafts.entropy_R
        )
        self.selection = Selection.allocate(batch, device)
        self.distinct_BL = ints(batch, BLOCK_ROWS)
        # Time of each length without the draft pass, for EVICT's rule.
        self.verify_us_L = torch.ones(BLOCK_ROWS, dtype=torch.float64, device=device)
        # Padded, so that a request's 16 tokens can be addressed whatever number of rows ran.
        self._tokens = ints(rows + BLOCK_ROWS)
        self._entropy_R = torch.zeros(rows, device=device)
        self._workspace = Workspace.create(rows, vocab, target.logits_RV.dtype, device)

    def drafts(self, values: torch.Tensor) -> torch.Tensor:
        """A column of signals as [B, 15]."""
        return values.view(self.batch, NUM_DRAFTS)

    def choices(self, rows: int) -> DraftFeatures:
        """Where the target's choices of `rows` rows a request go."""
        count = self.batch * rows
        return DraftFeatures(
            self._tokens[:count],
            self.report.p1_R[:count],
            self.report.p2_R[:count],
            self._entropy_R[:count],
        )

    def read_logits(self, logits_RV: torch.Tensor, out: DraftFeatures) -> None:
        """Top token, its probability, the runner-up's and the entropy of each row."""
        if logits_RV.dtype == torch.bfloat16:
            draft_features(logits_RV, out=out, workspace=self._workspace)
            return
        # The plain form, as of GDN and experts: other dtypes are for tests.
        found = plain_features(logits_RV)
        for name, values in vars(out).items():
            values.copy_(getattr(found, name))

    def tokens_BT(self, rows: int) -> torch.Tensor:
        """The choices as [B, 16]; rows from `rows` on belong to others and are not looked at."""
        return self._tokens.as_strided((self.batch, BLOCK_ROWS), (rows, 1))

    def known_tokens_BT(self, rows: int) -> torch.Tensor:
        """The choices as [B, rows]."""
        return self._tokens[: self.batch * rows].view(self.batch, rows)
