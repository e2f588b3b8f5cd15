from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from formula_machine import FormulaMachine

import hybridspec
from hybridspec.costmodels.expert import fit_expert_slope
from hybridspec.costmodels.plots import plot_expert_slope, plot_step_costs
from hybridspec.costmodels.step import StepFit, fit_step_costs
from hybridspec.costmodels.sweep import measure_experts, measure_steps


@pytest.fixture(scope="module")
def fit() -> StepFit:
    samples = measure_steps(
        FormulaMachine(noise=0.03),
        batch_sizes=[1, 2, 4, 8],
        context_tokens=[512, 8192, 32768],
        repeats=9,
        budget_s=1e9,
    )
    return fit_step_costs(samples)


def texts(svg: Path) -> str:
    return " ".join(ElementTree.parse(svg).getroot().itertext())


def test_step_costs_plot_names_batches_contexts_and_plain_decoding(
    fit: StepFit, tmp_path: Path
) -> None:
    svg, png = plot_step_costs(fit.table, tmp_path / "plots", title="Formula machine")
    shown = texts(svg)
    for wanted in ("batch 1", "batch 8", "32,768 tokens", "plain decoding", "Formula machine"):
        assert wanted in shown
    assert png.read_bytes().startswith(b"\x89PNG")


def test_same_table_gives_the_same_svg(fit: StepFit, tmp_path: Path) -> None:
    first, _ = plot_step_costs(fit.table, tmp_path / "a")
    second, _ = plot_step_costs(fit.table, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_expert_plot_draws_every_length(tmp_path: Path) -> None:
    samples = measure_experts(
        FormulaMachine(noise=0.01), context_tokens=512, repeats=9, budget_s=1e9
    )
    fit = fit_expert_slope(samples, num_layers=40)
    svg, _ = plot_expert_slope(fit, samples, tmp_path)
    shown = texts(svg)
    for length in (2, 4, 8, 16):
        assert f"L = {length}" in shown
    assert f"R² {fit.r2:.3f}" in shown


def test_one_batch_and_one_context_fit_one_panel(tmp_path: Path) -> None:
    samples = measure_steps(
        FormulaMachine(), batch_sizes=[1], context_tokens=[64], repeats=5, budget_s=1e9
    )
    svg, _ = plot_step_costs(fit_step_costs(samples).table, tmp_path)
    assert "batch 1" in texts(svg)
    assert np.isfinite(float(ElementTree.parse(svg).getroot().attrib["width"].rstrip("pt")))


def test_neither_torch_nor_matplotlib_is_imported_before_it_is_needed() -> None:
    folder = Path(hybridspec.__file__).parent / "costmodels"
    modules = sorted(path.stem for path in folder.glob("*.py"))
    assert "plots" in modules
    lines = [f"import hybridspec.costmodels.{name}" for name in modules]
    check = "import sys; print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    program = "\n".join([*lines, check])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
