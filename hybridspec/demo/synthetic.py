"""Seeded generators of tables, settings files and contract clauses; the text is our own.

Real distributions hold few tables and few distinct legal texts, so a part of these categories is
written by code. Values come from simple rules (counters, walks, sums, cycles) that a small model
can partly predict, which is what makes a table a useful prompt for speculative decoding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable


def _split(words: str) -> tuple[str, ...]:
    return tuple(w for w in (words.split(";") if ";" in words else words.split()) if w)


_COLUMNS = _split(
    "time temp load mass height score count price rate x y z loss error step width depth speed "
    "volume energy region status owner level batch total "
)
_WORDS = _split(
    "alpha beta gamma delta north south east west red green blue amber core edge main spare "
    "small large old new fast slow left right upper lower first last "
)
_KEYS = _split(
    "name host port path level timeout retries enabled format prefix suffix limit workers "
    "threads cache size mode version target output input debug verbose color theme region "
    "bucket token_file interval backoff encoding pool "
)
_SECTIONS = _split("server client logging database cache build test deploy metrics auth queue ui ")


def _cell_rule(rng: random.Random) -> Callable[[int], str]:
    start, step, cycle = rng.randint(0, 90), rng.choice([1, 2, 5, 10, -1, 25]), rng.randint(3, 9)
    level = [float(start)]

    def walk(row: int) -> str:
        level[0] += rng.randint(-2, 2)
        return f"{level[0] + rng.randint(0, 9) / 10:.1f}"

    words = rng.sample(_WORDS, rng.randint(2, 4))
    rules: list[Callable[[int], str]] = [
        lambda row: str(start + step * row),
        walk,
        lambda row: str((start + row) % cycle),
        lambda row: str(start + row * (row + 1) // 2),
        lambda row: str(row * row),
        lambda row: words[row % len(words)],
        lambda row: rng.choice(words),
        lambda row: "yes" if (row + start) % cycle == 0 else "no",
        lambda row: f"2024-{1 + (row // 28 + start) % 12:02d}-{1 + row % 28:02d}",
    ]
    return rng.choice(rules)


def table(rng: random.Random) -> str:
    """Returns one table of 8-40 rows in a CSV, TSV, pipe or aligned layout."""
    names = rng.sample(_COLUMNS, rng.randint(2, 5))
    rules = [_cell_rule(rng) for _ in names]
    rows = [[str(r), *(rule(r) for rule in rules)] for r in range(1, rng.randint(8, 40) + 1)]
    header = ["id", *names]
    layout = rng.choice(["csv", "tsv", "pipe", "aligned", "semicolon"])
    if layout == "pipe":
        lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    elif layout == "aligned":
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in [header, *rows]
        ]
    else:
        separator = {"csv": ",", "tsv": "\t", "semicolon": ";"}[layout]
        lines = [separator.join(row) for row in [header, *rows]]
    return "\n".join(lines) + "\n"


def _value(rng: random.Random, key: str) -> str | int | bool | float:
    if key in {"port", "limit", "size", "workers", "threads", "retries", "pool"}:
        return rng.choice([1, 2, 4, 8, 16, 64, 100, 256, 1024, 5432, 8000, 8080, 9090])
    if key in {"enabled", "debug", "verbose", "cache"}:
        return rng.random() < 0.5
    if key in {"timeout", "interval", "backoff"}:
        return rng.choice([0.5, 1.5, 2.0, 5.0, 10.0, 30.0, 60.0])
    if key in {"path", "output", "input", "token_file"}:
        return "/" + "/".join(rng.sample(_WORDS, rng.randint(2, 3)))
    if key == "host":
        return rng.choice(["localhost", "127.0.0.1", "0.0.0.0", f"{rng.choice(_WORDS)}.internal"])
    return rng.choice(_WORDS)


def settings(rng: random.Random) -> str:
    """Returns one settings file in INI, TOML, YAML or JSON form."""
    tree = {
        section: {key: _value(rng, key) for key in rng.sample(_KEYS, rng.randint(3, 8))}
        for section in rng.sample(_SECTIONS, rng.randint(2, 6))
    }
    layout = rng.choice(["ini", "toml", "yaml", "json"])
    if layout == "json":
        return json.dumps(tree, indent=rng.choice([2, 4])) + "\n"
    lines: list[str] = []
    for section, values in tree.items():
        lines.append(f"{section}:" if layout == "yaml" else f"[{section}]")
        for key, value in values.items():
            word = str(value).lower() if isinstance(value, bool) else str(value)
            if layout == "toml":
                lines.append(f'{key} = "{word}"' if isinstance(value, str) else f"{key} = {word}")
            else:
                lines.append(f"  {key}: {word}" if layout == "yaml" else f"{key} = {word}")
        if layout != "yaml":
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


_PARTIES = (
    ("Licensor", "Licensee"),
    ("Provider", "Customer"),
    ("Company", "Contractor"),
    ("Landlord", "Tenant"),
    ("Seller", "Buyer"),
    ("Disclosing Party", "Receiving Party"),
)
_OBJECTS = _split(
    "the Software;"
    "the Services;"
    "the Confidential Information;"
    "the Deliverables;"
    "the Premises;"
    "the Goods;"
    "the Documentation;"
    "the Work Product;"
    "the Personal Data;"
    "the Equipment;"
)
_CLAUSES = (
    ("Grant", "{a} grants {b} a non-exclusive, {scope} right to use {o} {purpose}."),
    ("Restrictions", "{b} shall not copy, modify or distribute {o}, except {purpose}."),
    ("Term", "This Agreement begins on the Effective Date and continues for {n} {unit}, unless "
     "it is terminated earlier under Section {s}."),
    ("Payment", "{b} shall pay {a} all undisputed amounts within {n} {unit} after receipt of an "
     "invoice. Late amounts bear interest at the rate of {p} percent per month."),
    ("Termination", "Either party may terminate this Agreement by giving {n} {unit} written "
     "notice to the other party. On termination {b} shall return {o} to {a}."),
    ("Warranty", "{a} warrants that {o} will conform to the specification for a period of {n} "
     "{unit}. {a} makes no other warranty, whether express, implied or statutory."),
    ("Liability", "In no event shall {a} be liable to {b} for any indirect or consequential "
     "damages arising out of the use of {o}, even if advised of the possibility of them."),
    ("Confidentiality", "{b} shall hold {o} in confidence for {n} {unit} and shall use it only "
     "{purpose}."),
    ("Assignment", "{b} may not assign this Agreement without the prior written consent of {a}, "
     "which shall not be unreasonably withheld."),
    ("Notices", "All notices under this Agreement shall be in writing and take effect {n} {unit} "
     "after they are sent to the address given in Schedule {s}."),
    ("Governing Law", "This Agreement is governed by the laws of the place where {a} has its "
     "registered office, without regard to its conflict of laws rules."),
    ("Severability", "If any provision of this Agreement is held to be unenforceable, the other "
     "provisions remain in full force and effect."),
    ("Indemnity", "{b} shall indemnify {a} against all claims of third parties that result from "
     "the use of {o} in breach of Section {s}."),
    ("Records", "{b} shall keep complete records of its use of {o} for {n} {unit} and shall make "
     "them available to {a} {purpose}."),
    ("Force Majeure", "Neither party is responsible for a failure to perform caused by events "
     "beyond its reasonable control, if it gives notice within {n} {unit}."),
    ("Entire Agreement", "This Agreement, with its Schedules, is the entire agreement between "
     "{a} and {b} about {o} and replaces all earlier agreements."),
)  # fmt: skip
_PURPOSES = _split(
    "for its internal business purposes;"
    "in accordance with the Documentation;"
    "as permitted in writing by the other party;"
    "to the extent required by law;"
    "during the Term of this Agreement;"
    "upon reasonable notice and during business hours;"
)


def contract(rng: random.Random) -> str:
    """Returns one made-up agreement of 5-12 numbered clauses."""
    first, second = rng.choice(_PARTIES)
    style = rng.choice(["{i}. {t}. {c}", "{i}. {T}\n\n{c}", "Section {i}. {t}\n{c}", "({i}) {c}"])
    objects = rng.sample(_OBJECTS, 2)
    parts = [f"{rng.choice(['AGREEMENT', 'TERMS AND CONDITIONS', 'Terms of Use', 'Contract'])}"]
    for i, (title, clause) in enumerate(rng.sample(_CLAUSES, rng.randint(5, 12)), start=1):
        body = clause.format(
            a=f"the {first}", b=f"the {second}", o=rng.choice(objects),
            scope=rng.choice(["non-transferable", "revocable", "worldwide", "limited"]),
            purpose=rng.choice(_PURPOSES), s=rng.randint(1, 14), p=rng.choice([1, 1.5, 2]),
            n=rng.choice([5, 7, 10, 14, 30, 60, 90]), unit=rng.choice(["days", "months"]),
        )  # fmt: skip
        body = body[0].upper() + body[1:]
        parts.append(style.format(i=i, t=title, T=title.upper(), c=body))
    return "\n\n".join(parts) + "\n"
