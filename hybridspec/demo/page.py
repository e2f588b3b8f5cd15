"""What the demo shows: a table for the terminal and one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from hybridspec.demo.comparison import Comparison

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>HybridSpec demo</title>
<style>
 body{font:16px/1.5 system-ui,sans-serif;color:#1a1a1a}
 body{max-width:60rem;margin:2rem auto;padding:0 1rem}
 table{border-collapse:collapse;margin:1rem 0}
 td,th{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
 td:first-child,th:first-child{text-align:left}
 figure{margin:2rem 0} figure svg{max-width:100%;height:auto}
 .big{font-size:1.3rem}
</style>
<h1>HybridSpec demo</h1>
<p class="big">{{ "%.2f"|format(s.over_ar) }}x plain decoding,
{{ "%.2f"|format(s.over_dflash16) }}x stock DFlash-16,
{{ "%.2f"|format(s.over_best_fixed) }}x the best fixed length.</p>
{% if s.drift_fallback_share %}<p class="big"><b>{{ "%.0f"|format(100 * s.drift_fallback_share) }} %
of HybridSpec's rounds took a fixed length</b>: round times had left the measured costs, so these
figures are not what it does on a quiet machine.</p>
{% endif %}<p>Embedded pair, CPU, one request at a time, greedy, held-out prompts, decoding only,
outside repetition loops ({{ s.loop_prompts }} prompts enter one and are cut there).
Outputs that differ from plain decoding's: {{ s.different_outputs }}{% if margins %}, each first
at a tie of logits (largest margin {{ "%.1e"|format(margins|max) }}){% endif %}.</p>
<table><tr>{% for c in columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</table>
<h2>By category, tokens a second</h2>
<table><tr><th>category</th>{% for w in ways %}<th>{{ w }}</th>{% endfor %}<th>over AR</th></tr>
{% for c in categories %}<tr><td>{{ c.name }}</td>
{% for v in c.speeds %}<td>{{ v }}</td>{% endfor %}<td>{{ c.over }}</td></tr>{% endfor %}
</table>
{% for name, svg in plots %}<figure><figcaption>{{ name }}</figcaption>{{ svg }}</figure>
{% endfor %}
<p>The bundle beside this page is what <code>hybridspec serve --bundle</code> loads.</p>
</html>
"""
COLUMNS = ("way", "tokens/s", "over AR", "tokens/round", "mean L", "ms/round")


def rows(comparison: Comparison, base: str) -> list[list[str]]:
    """One row a way: speed, ratio, tokens a round, mean verify length, round time."""
    table = []
    for way in comparison.by_category:
        total = comparison.total(way)
        table.append(
            [
                way,
                f"{total.tokens_per_s:.0f}",
                f"{comparison.over(way, base):.2f}x",
                f"{total.tokens_per_round:.2f}",
                f"{total.mean_verify_length:.2f}",
                f"{total.round_ms:.2f}",
            ]
        )
    return table


def result_table(comparison: Comparison, *, base: str) -> str:
    """Aligned plain-text table of all ways."""
    lines = [list(COLUMNS), *rows(comparison, base)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    text = []
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join(cells))
    return "\n".join(text)


def write_page(
    path: Path, comparison: Comparison, summary: Mapping[str, Any], *, plots: Path
) -> None:
    """Write the page with the bundle's plots inlined."""
    ways = list(comparison.by_category)
    base, best = ways[0], ways[-1]
    ratios = comparison.category_over(best, base)
    categories = [
        {
            "name": name,
            "speeds": [
                f"{part.tokens_per_s:.0f}"
                if (part := comparison.by_category[w][name]).rounds
                else ""
                for w in ways
            ],
            "over": f"{ratios[name]:.2f}x" if name in ratios else "",
        }
        for name in comparison.by_category[base]
    ]
    # The SVGs are our own plots; their XML head is not allowed inside HTML.
    figures = []
    for file in sorted(plots.glob("*.svg")):
        svg = file.read_text(encoding="utf-8")
        figures.append((file.stem, Markup(svg[svg.index("<svg") :])))
    page = Environment(autoescape=True).from_string(_PAGE)
    path.write_text(
        page.render(
            s=summary,
            margins=summary["logit_margins_at_difference"],
            columns=COLUMNS,
            rows=rows(comparison, base),
            ways=ways,
            categories=categories,
            plots=figures,
        ),
        encoding="utf-8",
    )
