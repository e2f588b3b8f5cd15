"""Trains a pair: `python -m hybridspec.demo.train --preset demo --corpus FILE --out DIR`.

Stages: tokenizer, target, drafter (which first lets the target write text), each exported when it
ends, so that `--stage drafter` can be repeated on a finished target. Same seed, steps and machine
give the same weights; time limits give that up for a bounded run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hybridspec.demo.documents import read_documents
from hybridspec.demo.export import (
    load_target,
    save_drafter,
    save_target,
    weight_bytes,
)
from hybridspec.demo.presets import PRESETS, get_preset
from hybridspec.demo.stage import environment, prepare_torch, say, update_log
from hybridspec.demo.streams import TokenStreams, held_out_windows
from hybridspec.demo.tokenization import (
    TokenIds,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)
from hybridspec.demo.train_drafter import DrafterTrainer, build_pool
from hybridspec.demo.train_target import TargetTrainer, held_out_loss
from hybridspec.errors import ModelError

_HELD_OUT_WINDOWS = 64


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m hybridspec.demo.train", description=__doc__)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default="demo")
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help="override the preset")
    add("--corpus", type=Path, required=True, help="file of hybridspec.demo.corpus")
    add("--out", type=Path, required=True, help="folder for target/, drafter/, train_log.json")
    add("--stage", choices=["all", "tokenizer", "target", "drafter"], default="all")
    add("--tokenizer", type=Path, help="folder of a trained tokenizer to use instead")
    add("--target-steps", type=int, help="default: the preset's")
    add("--drafter-steps", type=int, help="default: the preset's")
    add("--generated-sequences", type=int, help="default: the preset's")
    add("--target-limit-s", type=float, help="end the target stage after this many seconds")
    add("--generation-limit-s", type=float, help="end generation after this many seconds")
    add("--drafter-limit-s", type=float, help="end the drafter stage after this many seconds")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--no-compile", action="store_true", help="run eagerly on a GPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    options = parse(arguments)
    preset = get_preset(options.preset, options.set)
    device = torch.device(options.device)
    prepare_torch(device)
    compiled = device.type == "cuda" and not options.no_compile
    target_folder, log = options.out / "target", options.out / "train_log.json"
    sizes = weight_bytes(preset)
    say(
        f"{preset.name}: target {sizes[0] / 1e6:.3f} MB, drafter {sizes[1] / 1e6:.3f} MB, "
        f"together {sum(sizes) / 1e6:.3f} MB in bf16"
    )
    documents = read_documents(options.corpus)
    if options.tokenizer:
        save_tokenizer(load_tokenizer(options.tokenizer), target_folder)
    elif options.stage in {"all", "tokenizer"}:
        tokenizer = train_tokenizer(documents, vocab=preset.vocab, seed=options.seed)
        save_tokenizer(tokenizer, target_folder)
    tokenizer = load_tokenizer(target_folder)
    ids = TokenIds.of(tokenizer)
    if tokenizer.get_vocab_size() > preset.vocab:
        raise ModelError(
            f"tokenizer in {target_folder} has {tokenizer.get_vocab_size()} tokens, the preset "
            f"has room for {preset.vocab}: train one of the right size (--stage tokenizer)"
        )
    say(f"tokenizer has {tokenizer.get_vocab_size()} tokens, corpus {len(documents)} documents")
    run = {"preset": preset.name, "overrides": options.set, "seed": options.seed}
    update_log(log, "run", run | environment(device))
    if options.stage == "tokenizer":
        return
    length = max(preset.sequence, preset.prompt_tokens + preset.generate_tokens)
    streams = TokenStreams(
        documents, tokenizer, end=ids.end_of_text, window=length + 1, device=device,
        mix_exponent=preset.mix_exponent,
    )  # fmt: skip
    say(f"training tokens {streams.tokens_of}")
    if options.stage in {"all", "target"}:
        trainer = TargetTrainer(
            preset, streams, seed=options.seed, device=device, compile_layers=compiled
        )
        values = trainer.train(
            options.target_steps or preset.target_steps, limit_s=options.target_limit_s
        )
        windows = held_out_windows(
            documents, tokenizer, end=ids.end_of_text, window=preset.sequence,
            most=_HELD_OUT_WINDOWS,
        )  # fmt: skip
        values["held_out_nats"] = held_out_loss(trainer.target.eval(), windows)
        say(f"held-out cross entropy {values['held_out_nats']}")
        save_target(trainer.target, target_folder, ids)
        update_log(log, "target", values)
        del trainer
    if options.stage == "target":
        return
    # Read back, so that the drafter learns from the rounded weights that are shipped.
    target = load_target(target_folder, device)
    target.preset = preset
    pool, values = build_pool(
        target, streams,
        sequences=options.generated_sequences or preset.generated_sequences,
        seed=options.seed, limit_s=options.generation_limit_s,
    )  # fmt: skip
    update_log(log, "generation", values)
    drafter_trainer = DrafterTrainer(
        target, pool, mask_token=ids.mask, seed=options.seed, compile_loss=compiled
    )
    values = drafter_trainer.train(
        options.drafter_steps or preset.drafter_steps, limit_s=options.drafter_limit_s
    )
    save_drafter(drafter_trainer.drafter, options.out / "drafter", ids)
    update_log(log, "drafter", values)
    say(f"pair is in {options.out}")


if __name__ == "__main__":
    main()
