"""Decode speed in a real SGLang server: plain, stock DFLASH, fixed lengths, the policy.

    python -m hybridspec.demo.inflate PAIR --out PADDED --no-weights
    python benchmarks/sglang_prepare.py --pair PAIR --trace TRACE --out PREPARED   (needs no GPU)
    python benchmarks/sglang_decode.py measure --padded PADDED --source PAIR \
        --prepared PREPARED --out DIR [--arms ar,dflash16,...] [--limit 560]
    python benchmarks/sglang_decode.py analyse DIR/sglang_decode_raw.json [MORE ...] \
        --tokenizer PAIR/target/tokenizer.json

`measure` starts one server after the other and keeps every chunk's arrival; `analyse` makes the
result file of one or more such recordings, of which later ones add arms. Servers, flags, fused-MoE
configuration and the load generator (the `openai` client) are the same for all arms. Prompts are
the held-out ones of the pair, decoding is greedy and ignores the end token. Answers of several
clients differ in length, or plain decoding's would all end in one step (`serving.sizes`).
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from serving.arms import BOOTS, FIXED_LENGTHS


def numbers(text: str) -> tuple[int, ...]:
    """Positive numbers separated by commas."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return found


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="start servers and record streams")
    add = measure.add_argument
    add("--padded", type=Path, required=True, help="folder made by inflate --no-weights")
    add("--source", type=Path, required=True, help="pair that it was made from")
    add("--prepared", type=Path, help="folder of sglang_prepare.py")
    add("--bundle", type=Path, help="bundle for the policy instead of this run's own")
    add("--costs-from", type=Path, help="recording with ar and hybridspec-fixed to take costs from")
    add("--earlier", type=Path, help="recording with the arm ar, for costs, if it is not run again")
    add("--arms", default=",".join(boot.name for boot in BOOTS))
    add("--clients", default="1,2,4,8")
    add("--tokens", type=int, default=96, help="of each answer, in the mean (96)")
    add("--per-category", type=int, default=4, help="prompts of each category (4)")
    add(
        "--at",
        default="8:3:192",
        metavar="CLIENTS:PER_CATEGORY:TOKENS,...",
        help="other sizes at some client counts: with many clients few rounds of short answers "
        "have everyone decoding (8:3:192)",
    )
    add(
        "--spread-lengths",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with more than one client, answers of 2/3 to 4/3 of --tokens by prompt number, the "
        "same for all arms (on)",
    )
    add("--fixed-lengths", type=numbers, default=FIXED_LENGTHS, metavar="L,...")
    add(
        "--prefill-graphs",
        type=numbers,
        default=(),
        metavar="TOKENS,...",
        help="prefill graphs in all arms for passes of up to so many tokens (none)",
    )
    add("--cost-sweeps", type=int, default=2)
    add("--tp-size", type=int, default=1)
    add("--port", type=int, default=30100)
    add("--boot-timeout", type=float, default=200.0, metavar="S")
    add("--limit", type=float, default=560.0, metavar="S", help="of the whole run")
    add("--out", type=Path, required=True)
    analyse = commands.add_parser("analyse", help="make the result file of recordings")
    add = analyse.add_argument
    add("raw", type=Path, nargs="+", metavar="FILE[:ARM,...]", help="recordings, or arms of one")
    add("--tokenizer", type=Path, required=True)
    add(
        "--scored",
        type=Path,
        metavar="FILE",
        help="recording whose scored plain decoding gives the margins of all differences; its "
        "plain texts must be the same (the first recording with one)",
    )
    add(
        "--beside",
        type=Path,
        metavar="FILE",
        help="recording with more prompts, say of fewer GPUs; its rates on these recordings' "
        "prompts are told beside theirs",
    )
    add("--name", default="sglang_decode", help="of the result file (sglang_decode)")
    add("--out", type=Path, help="folder of the result file (benchmarks/results)")
    options = parser.parse_args()
    # A run that is told to end keeps what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "measure":
        from serving.measuring import measure as run_measure

        run_measure(options)
    else:
        from serving.report import analyse as run_analyse

        run_analyse(options)


if __name__ == "__main__":
    main()
