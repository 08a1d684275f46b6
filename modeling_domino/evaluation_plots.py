"""The figures of an evaluation: speedups, acceptance by position, and where a round's time goes."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .evaluation_methods import LABELS
from .evaluation_report import summarise


def draw(results: dict, folder: str | Path, suffix: str = ".png") -> list[Path]:
    """
    Writes every figure that the results hold enough for.

    Args:
        results: From `read_results`.
        folder: Of the figures.
        suffix: .png or .svg.

    Returns:
        The files written.
    """
    drawn = []
    for name, figure in (
        ("speedup", _speedups(results)),
        ("acceptance_by_position", _positions(results)),
        ("tau_by_draft_length", _draft_lengths(results)),
        ("round", _round(results)),
    ):
        if figure is not None:
            path = Path(folder) / f"{name}{suffix}"
            figure.savefig(path, dpi=160)
            plt.close(figure)
            drawn.append(path)
    return drawn


def _axes(title: str):
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    return figure, axes


def _speedups(results: dict):
    summary = summarise(results)
    methods = [m for m in results["asked"]["methods"] if m != "plain" and any(m in rows for rows in summary.values())]
    if not methods or not all("plain" in rows for rows in summary.values()):
        return None
    figure, axes = _axes("Tokens per second over plain generate, 95 % intervals")
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        values = [summary[name][method].speedups["plain"] for name in summary]
        below = [max(0.0, e.value - e.low) for e in values]
        above = [max(0.0, e.high - e.value) for e in values]
        places = [n + index * width for n in range(len(values))]
        axes.bar(places, [e.value for e in values], width, yerr=[below, above], capsize=2, label=LABELS[method])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(summary))], list(summary))
    axes.legend(fontsize=8)
    return figure


def _acceptance(results: dict) -> dict[tuple[str, str], list[float]]:
    """Conditional acceptance by position, of every set and method that says what it drafted."""
    return {
        (name, method): figures.by_position
        for name, methods in summarise(results).items()
        for method, figures in methods.items()
        if figures.by_position
    }


def _positions(results: dict):
    curves = _acceptance(results)
    if not curves:
        return None
    figure, axes = _axes("Share of drafted tokens accepted, given that all before them were")
    styles = dict(zip(dict.fromkeys(method for _, method in curves), ("-", "--", ":", "-."), strict=False))
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    for (name, method), rates in curves.items():
        label = f"{name}, {LABELS[method]}"
        places = range(1, len(rates) + 1)
        axes.plot(places, rates, styles[method], color=colours[name], marker="o", markersize=3, label=label)
    axes.set_xlabel("drafted position")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=7)
    return figure


def _draft_lengths(results: dict):
    """
    τ if only the first k tokens of every draft had been proposed: 1 + Σ over positions of the chance to get so far.
    """
    curves = _acceptance(results)
    if not curves:
        return None
    figure, axes = _axes("τ against tokens drafted per round, from the acceptance by position")
    for (name, method), rates in curves.items():
        tau, reached = [1.0], 1.0
        for rate in rates:
            reached *= rate
            tau.append(tau[-1] + reached)
        axes.plot(range(len(tau)), tau, marker="o", markersize=3, label=f"{name}, {LABELS[method]}")
    axes.set_xlabel("tokens drafted per round")
    axes.legend(fontsize=7)
    return figure


def _round(results: dict):
    if not results.get("profile"):
        return None
    parts = results["profile"]["milliseconds"]
    figure, axes = plt.subplots(figsize=(6.4, 1.8), layout="constrained")
    start = 0.0
    for part, milliseconds in parts.items():
        axes.barh([0], [milliseconds], left=start, label=f"{part} {milliseconds:.1f}")
        start += milliseconds
    axes.set_yticks([])
    axes.set_xlabel("milliseconds of a round")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.5))
    return figure


__all__ = ["draw"]
