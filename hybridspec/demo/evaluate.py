"""Judges a pair: `python -m hybridspec.demo.evaluate --pair DIR --prompts FILE`.

Decodes every prompt greedily in rounds of 16 rows that are verified in full, recomputing the whole
sequence each round, and prints tokens a round, distinct experts and some of the text.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from hybridspec.artifacts.tables import BLOCK_SIZE
from hybridspec.demo.documents import CATEGORIES, read_documents
from hybridspec.demo.drafter_module import (
    Drafter,
    block_embeddings,
    block_mask,
    block_positions,
)
from hybridspec.demo.export import load_drafter, load_target
from hybridspec.demo.prompts import Prompt, read_prompts
from hybridspec.demo.stage import say
from hybridspec.demo.streams import held_out_windows
from hybridspec.demo.target_module import Target
from hybridspec.demo.tokenization import TokenIds, load_tokenizer
from hybridspec.demo.train_target import held_out_loss

_LENGTHS = (1, 4, 16)
_LOOP_WINDOW = 24
_LONGEST_PERIOD = 12


def loop_period(tokens: Sequence[int]) -> int:
    """Returns the period (1 to 12) with which the last 24 tokens repeat themselves, or 0."""
    last = list(tokens[-_LOOP_WINDOW:])
    if len(last) < _LOOP_WINDOW:
        return 0
    for period in range(1, _LONGEST_PERIOD + 1):
        if last[period:] == last[:-period]:
            return period
    return 0


@dataclass(frozen=True)
class Verified:
    """One round of one request.

    Attributes:
        request: index of the prompt.
        accepted: drafts accepted, 0 to 15.
        loop: period of the repetition that the anchor is in, 0 if none.
        experts: distinct experts a layer (mean) over the first 1, 4 and 16 rows.
    """

    request: int
    accepted: int
    loop: int
    experts: tuple[float, ...]


class Rounds:
    """Greedy DFlash decoding of a batch of prompts of any length."""

    def __init__(
        self, target: Target, drafter: Drafter, *, mask_token: int, ends: Sequence[int]
    ) -> None:
        self.target, self.drafter, self.mask_token = target, drafter, mask_token
        self.device = target.embed_tokens.weight.device
        self.ends = frozenset(ends)

    @torch.no_grad()
    def decode(
        self, prompts: Sequence[Sequence[int]], *, new_tokens: int
    ) -> tuple[list[Verified], list[list[int]]]:
        """Returns all rounds and the emitted tokens of each prompt."""
        device, taps = self.device, self.target.preset.target_layer_ids
        lengths = [len(p) for p in prompts]
        capacity = max(lengths) + new_tokens + BLOCK_SIZE
        tokens = torch.zeros(len(prompts), capacity, dtype=torch.int64, device=device)
        for i, prompt in enumerate(prompts):
            tokens[i, : lengths[i]] = torch.tensor(prompt, device=device)
        anchors = torch.tensor(lengths, device=device)
        seen = self.target(tokens[:, : max(lengths)], features_of=taps)
        assert seen.features is not None
        features = seen.features.new_zeros(len(prompts), capacity, seen.features.shape[-1])
        features[:, : max(lengths)] = seen.features
        last = seen.hidden[torch.arange(len(prompts), device=device), anchors - 1]
        tokens.scatter_(1, anchors.unsqueeze(1), self.target.logits(last).argmax(-1, keepdim=True))
        live = torch.ones(len(prompts), dtype=torch.bool)
        rounds: list[Verified] = []
        while live.any():
            index = live.nonzero()[:, 0].to(device)
            accepted, experts, block = self._round(tokens, features, anchors, index)
            history, at, took = tokens[index].tolist(), anchors[index].tolist(), accepted.tolist()
            for row, request in enumerate(index.tolist()):
                anchor, taken = at[row], took[row]
                period = loop_period(history[row][: anchor + 1])
                rounds.append(Verified(request, taken, period, tuple(experts[row])))
                emitted = block[row][: taken + 2]
                done = anchor + taken + 2 - lengths[request] >= new_tokens
                live[request] = not (done or self.ends & set(emitted))
            anchors[index] += accepted + 1
        texts = [
            tokens[i, lengths[i] : min(int(anchors[i]) + 1, lengths[i] + new_tokens)].tolist()
            for i in range(len(prompts))
        ]
        return rounds, texts

    def _round(
        self, tokens: Tensor, features: Tensor, anchors: Tensor, index: Tensor
    ) -> tuple[Tensor, list[list[float]], list[list[int]]]:
        """Drafts and verifies once; writes tokens and features of the rows in `index`.

        Returns accepted drafts [rows], distinct experts [rows, 3] and each row's anchor, drafts
        and the target's own token in place of the first rejected draft.
        """
        at = anchors[index].unsqueeze(1)
        longest = int(at.max())
        rows = block_embeddings(
            self.target.embed_tokens.weight, tokens[index].gather(1, at), self.mask_token
        )
        positions = block_positions(at)
        hidden = self.drafter(rows, positions, features[index, :longest], block_mask(at, longest))
        drafts = self.target.logits(hidden[:, 1:]).argmax(-1)
        ids = tokens[index].scatter(1, positions[:, 1:], drafts)[:, : longest + BLOCK_SIZE]
        seen = self.target(ids, features_of=self.target.preset.target_layer_ids, routes=True)
        assert seen.features is not None
        assert seen.chosen is not None
        width, taps = seen.hidden.shape[-1], seen.features.shape[-1]
        verified = seen.hidden.gather(1, positions.unsqueeze(-1).expand(-1, -1, width))
        best = self.target.logits(verified).argmax(-1)
        accepted = (drafts == best[:, :-1]).long().cumprod(-1).sum(-1)
        block = torch.cat([tokens[index].gather(1, at), drafts], dim=1)
        block = torch.cat([block, block[:, :1]], dim=1)
        block.scatter_(1, accepted.unsqueeze(1) + 1, best.gather(1, accepted.unsqueeze(1)))
        spread = positions.unsqueeze(-1)
        features[index.unsqueeze(1), positions] = seen.features.gather(
            1, spread.expand(-1, -1, taps)
        )
        tokens[index.unsqueeze(1), at + torch.arange(BLOCK_SIZE + 1, device=at.device)] = block
        layers, _, experts = seen.chosen.shape
        chosen = seen.chosen.view(layers, len(index), -1, experts)
        picked = chosen.gather(
            2, positions.view(1, len(index), BLOCK_SIZE, 1).expand(layers, -1, -1, experts)
        )
        distinct = [picked[:, :, :n].any(2).sum(-1).float().mean(0) for n in _LENGTHS]
        return accepted, torch.stack(distinct, dim=1).tolist(), block.tolist()


def summarise(
    rounds: Sequence[Verified], prompts: Sequence[Prompt], texts: Sequence[Sequence[int]]
) -> dict[str, object]:
    """Returns tokens a round, loops and distinct experts as a JSON-ready report."""
    groups: dict[str, list[Verified]] = defaultdict(list)
    for verified in rounds:
        groups[prompts[verified.request].category].append(verified)
        groups["all"].append(verified)

    def mean(chosen: Sequence[Verified]) -> float | None:
        return round(float(np.mean([v.accepted + 1 for v in chosen])), 3) if chosen else None

    by_category = {
        name: {
            "rounds": len(groups[name]),
            "tokens_a_round": mean(groups[name]),
            "outside_loops": mean([v for v in groups[name] if not v.loop]),
            "rounds_in_loops": round(float(np.mean([v.loop > 0 for v in groups[name]])), 3),
        }
        for name in ("all", *CATEGORIES)
        if groups[name]
    }
    outside = [v for v in rounds if not v.loop]
    survival = [round(float(np.mean([v.accepted > i for v in outside])), 3) for i in range(15)]
    experts = np.mean([v.experts for v in rounds], axis=0)
    return {
        "tokens_a_round": by_category,
        "survival_outside_loops": survival if outside else [],
        "distinct_experts": {
            str(n): round(float(x), 2) for n, x in zip(_LENGTHS, experts, strict=True)
        },
        "requests_ending_in_loops": round(float(np.mean([loop_period(t) > 0 for t in texts])), 3),
        "mean_emitted": round(float(np.mean([len(t) for t in texts])), 1),
    }


def _show_texts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], each: int
) -> None:
    shown: dict[str, int] = defaultdict(int)
    for prompt, text in zip(prompts, texts, strict=True):
        if shown[prompt.category] < each:
            shown[prompt.category] += 1
            continuation = tokenizer.decode(list(text), skip_special_tokens=False)
            print(f"--- {prompt.prompt_id}: ...{prompt.text[-160:]!r}\n>>> {continuation!r}")


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m hybridspec.demo.evaluate", description=__doc__)
    add = parser.add_argument
    add("--pair", type=Path, required=True, help="folder with target/ and drafter/")
    add("--prompts", type=Path, required=True, help="prompts.jsonl")
    add("--split", choices=["calibration", "test"], default="test")
    add("--corpus", type=Path, help="also measure held-out cross entropy on this corpus")
    add("--per-category", type=int, default=40)
    add("--new-tokens", type=int, default=128)
    add("--batch", type=int, default=140)
    add("--texts", type=int, default=1, help="texts to print for each category")
    add("--report", type=Path, help="write the figures as JSON")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision("highest")
    device = torch.device(options.device)
    target = load_target(options.pair / "target", device)
    drafter = load_drafter(options.pair / "drafter", device)
    tokenizer = load_tokenizer(options.pair / "target")
    ids = TokenIds.of(tokenizer)
    prompts = [p for p in read_prompts(options.prompts) if p.split == options.split]
    prompts = [
        p
        for c in CATEGORIES
        for p in [q for q in prompts if q.category == c][: options.per_category]
    ]
    encoded = [tokenizer.encode(p.text).ids for p in prompts]
    # Similar lengths together: every batch is as wide as its longest prompt.
    order = sorted(range(len(prompts)), key=lambda i: len(encoded[i]))
    decoder = Rounds(target, drafter, mask_token=ids.mask, ends=(ids.end_of_text, ids.message_end))
    rounds: list[Verified] = []
    texts: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), options.batch):
        part = order[start : start + options.batch]
        found, emitted = decoder.decode([encoded[i] for i in part], new_tokens=options.new_tokens)
        for i, text in zip(part, emitted, strict=True):
            texts[i] = text
        rounds += [Verified(part[v.request], v.accepted, v.loop, v.experts) for v in found]
        say(f"decoded {start + len(part)} of {len(order)} prompts, {len(rounds)} rounds")
    report = summarise(rounds, prompts, texts)
    if options.corpus:
        windows = held_out_windows(
            read_documents(options.corpus), tokenizer, end=ids.end_of_text,
            window=target.preset.sequence, most=64,
        )  # fmt: skip
        report["held_out_nats"] = held_out_loss(target, windows)
    _show_texts(tokenizer, prompts, texts, options.texts)
    for key, value in report.items():
        lines = value.items() if isinstance(value, dict) else [("", value)]
        for name, figure in lines:
            print(f"{key} {name}: {figure}")
    if options.report:
        options.report.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
