"""Pads a trained pair to the shape of Qwen3.6-35B-A3B without a change of what it computes.

    python -m hybridspec.demo.inflate PAIR --out DIR

PAIR has target/ and drafter/ of `hybridspec.demo.train` (preset lab: 256 experts, hidden 256). DIR
becomes the same pair in the large shape: same text, same drafts, same routes, but weights, time
and bytes of the large model. Full size writes 70 GB (to a disk, or memory-backed storage such as
/dev/shm) with one tensor in memory at a time, the largest 1.1 GB.

Exit codes: 0 ok, 2 usage, 3 the pair cannot be padded so, 4 no room, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridspec.errors import EnvironmentMissing, HybridSpecError, Interrupted, UsageError

if TYPE_CHECKING:
    from hybridspec.demo.padded_pair import PaddedPair
    from hybridspec.demo.shards import Shard

PARTS = ("target", "drafter")
_SPARE_BYTES = 64 << 20


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridspec.demo.inflate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("pair", type=Path, metavar="PAIR", help="folder with target/ and drafter/")
    add("--out", type=Path, metavar="DIR", help="new folder for target/ and drafter/")
    add(
        "--set", action="append", default=[], metavar="FIELD=N",
        help="another size than the full shape's, e.g. layers=12; a wrong field lists them all",
    )  # fmt: skip
    add(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16",
        help="of the weights (default: bfloat16, exact for trained pairs)",
    )  # fmt: skip
    add("--shard-gb", type=float, default=4.0, metavar="GB", help="file size, 1e9 bytes (4)")
    add(
        "--no-weights", action="store_true",
        help="configs and tokenizer only, for engines that make the weights while they load",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="print shapes, bytes and plan; write nothing")
    add(
        "--json", action="store_true", help="print the plan (and with --dry-run all shapes) as JSON"
    )
    options = parser.parse_args(arguments)
    if options.out is None and not options.dry_run:
        parser.error("--out DIR is needed, or --dry-run")
    if not options.shard_gb > 0:
        parser.error(f"--shard-gb {options.shard_gb} must be > 0")
    return options


class _Progress:
    """A line on standard error every few seconds."""

    def __init__(self, total: int, *, every_s: float = 5.0) -> None:
        self.total, self.every_s, self.done = total, every_s, 0
        self.began = self.last = time.monotonic()
        self._stop = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C inside takes effect at the next `advance` or `check`, a second one at once.

        Raised inside a library's extension, KeyboardInterrupt can come out as another error.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(*_: object) -> None:
            self._stop = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def check(self) -> None:
        """Raise the KeyboardInterrupt that was held back."""
        if self._stop:
            raise KeyboardInterrupt

    def advance(self, count: int) -> None:
        self.check()
        self.done += count
        now = time.monotonic()
        if now - self.last >= self.every_s:
            self.last = now
            rate = self.done / (now - self.began)
            print(
                f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB, {rate / 1e9:.2f} GB/s, "
                f"{(self.total - self.done) / rate:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def describe(pair: PaddedPair, shards: dict[str, tuple[Shard, ...]]) -> dict[str, Any]:
    """The plan as plain values: placement, parameters and bytes of the parts."""
    from hybridspec.demo.padded_config import placement

    parts = {}
    for name, files in shards.items():
        recipes = [recipe for shard in files for recipe in shard.recipes]
        parts[name] = {
            "tensors": len(recipes),
            "parameters": sum(r.num_bytes // r.dtype.itemsize for r in recipes),
            "tensor_bytes": sum(r.num_bytes for r in recipes),
            "file_bytes": sum(shard.num_bytes for shard in files),
            "files": len(files),
            "largest_tensor_bytes": max(r.num_bytes for r in recipes),
        }
    return {"pair": str(pair.folder), **placement(pair.shape, pair.padding), "parts": parts}


def _show(plan: dict[str, Any], pair: PaddedPair) -> None:
    live, shape = plan["live_layers"], plan["shape"]
    print(f"shape: {', '.join(f'{k} {v}' for k, v in shape.items())}")
    print(
        f"residual stream: {len(plan['copy_scales'])} copies of {pair.target.hidden_size} "
        f"dimensions times {', '.join(f'{s:g}' for s in plan['copy_scales'])}; "
        + ("no constant" if plan["constant_dim"] is None else f"constant: {plan['constant_dim']}")
    )
    print(f"source layers at {live}; the other {shape['layers'] - len(live)} pass through")
    print(f"routers of source layers {plan['router_layers']}")
    print(f"drafter reads layers {[layer for layer, _ in plan['taps']]}")
    for name, part in plan["parts"].items():
        print(
            f"{name}: {part['tensors']} tensors, {part['parameters'] / 1e9:.3f} B parameters, "
            f"{part['file_bytes'] / 1e9:.3f} GB in {part['files']} files, largest tensor "
            f"{part['largest_tensor_bytes'] / 1e9:.3f} GB"
        )


def _show_shapes(shards: dict[str, tuple[Shard, ...]]) -> None:
    for name, files in shards.items():
        kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
        for recipe in (r for shard in files for r in shard.recipes):
            general = ".".join("N" if p.isdigit() else p for p in recipe.name.split("."))
            key = (general, recipe.shape, str(recipe.dtype).removeprefix("torch."))
            kinds[key] = kinds.get(key, 0) + recipe.num_bytes
        for (general, shape, dtype), count in kinds.items():
            print(f"{count / 1e9:8.3f} GB  {name} {general} {list(shape)} {dtype}")


def _free_bytes(folder: Path) -> int:
    """Free bytes where `folder` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def inflate(options: argparse.Namespace) -> dict[str, Any]:
    """Run the command and return its plan.

    Raises:
        HybridSpecError: why nothing was written.
    """
    import torch

    from hybridspec.demo.padded_pair import PaddedPair
    from hybridspec.demo.padded_shape import QWEN36_35B_A3B
    from hybridspec.demo.shards import plan_shards

    shape = QWEN36_35B_A3B.override(options.set)
    pair = PaddedPair.open(options.pair, shape, dtype=getattr(torch, options.dtype))
    shard_bytes = int(options.shard_gb * 1e9)
    shards = {
        "target": plan_shards(pair.target_weights(), shard_bytes),
        "drafter": plan_shards(pair.drafter_weights(), shard_bytes),
    }
    plan = describe(pair, shards)
    if options.json:
        shown = dict(plan)
        if options.dry_run:
            shown["tensors"] = {
                name: {r.name: list(r.shape) for shard in files for r in shard.recipes}
                for name, files in shards.items()
            }
        print(json.dumps(shown, indent=1))
    else:
        if options.dry_run:
            _show_shapes(shards)
        _show(plan, pair)
    needed = 0 if options.no_weights else sum(p["file_bytes"] for p in plan["parts"].values())
    if options.dry_run:
        if options.out is not None and not options.json:
            free = _free_bytes(options.out.resolve())
            enough = "enough" if free >= needed + _SPARE_BYTES else "too little"
            print(f"needs {needed / 1e9:.3f} GB; {free / 1e9:.3f} GB are free: {enough}")
        return plan
    out = options.out.resolve()
    _check_out(out, needed)
    _write(pair, out, {} if options.no_weights else shards, needed)
    return plan


def _check_out(out: Path, needed: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: use another --out or remove it")
    free = _free_bytes(out)
    if free < needed + _SPARE_BYTES:
        raise EnvironmentMissing(
            f"the padded pair needs {needed / 1e9:.3f} GB, {free / 1e9:.3f} GB are free at {out}: "
            "use another --out (memory-backed storage will do), a smaller --set, or --no-weights"
        )


def _write(pair: PaddedPair, out: Path, shards: dict[str, tuple[Shard, ...]], total: int) -> None:
    """Write beside `out` and rename at the end, so that `out` is whole or not there."""
    from hybridspec.demo.shards import write_shards

    partial = out.with_name(f".{out.name}.partial")
    progress = _Progress(total)
    try:
        # Left by a run that was killed; whatever is there never was a pair.
        shutil.rmtree(partial, ignore_errors=True)
        configs = dict(zip(PARTS, pair.configs(), strict=True))
        for part in PARTS:
            folder = partial / part
            folder.mkdir(parents=True)
            if shards:
                with progress.interruptible():
                    write_shards(folder, shards[part], progress.advance)
                progress.check()
            _copy_small(pair.folder / part, folder)
            text = json.dumps(configs[part], indent=1) + "\n"
            (folder / "config.json").write_text(text, encoding="utf-8")
        for prompts in sorted(pair.folder.glob("prompts.json*")):
            shutil.copyfile(prompts, partial / prompts.name)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(
                f"{progress.done / 1e9:.1f} of {total / 1e9:.1f} GB were written and are removed; "
                "run the same command again"
            ) from error
        if isinstance(error, OSError):
            raise EnvironmentMissing(
                f"{out} cannot be written ({error}): free space there or use another --out"
            ) from error
        raise
    took = time.monotonic() - progress.began
    print(f"{out}: {total / 1e9:.3f} GB in {took:.1f} s", file=sys.stderr, flush=True)


def _copy_small(source: Path, folder: Path) -> None:
    """Copy tokenizer, generation config and the like: all files but weights and config."""
    for file in sorted(source.iterdir()):
        is_weights = ".safetensors" in file.name or file.suffix in (".bin", ".pt")
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        inflate(parse(arguments))
    except HybridSpecError as refusal:
        label = "interrupted" if isinstance(refusal, Interrupted) else "error"
        print(f"{label}: {refusal}", file=sys.stderr)
        return refusal.exit_code
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return Interrupted.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(run())
