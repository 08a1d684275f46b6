"""The figures of an evaluation: speedups, acceptance by position, and where a round's time goes."""

from itertools import accumulate
from operator import mul
from pathlib import Path

import matplotlib


matplotlib.use("Agg")

from matplotlib import pyplot as plt

from .evaluation import decoded_of
from .evaluation_methods import LABELS
from .evaluation_report import summarise
from .measures import acceptance_by_position, rounds_by_position


FEWEST = 20  # rounds that must have judged a position for its share to be drawn
STYLES = {"head-off": "--", "dflash": "-.", "eagle": ":"}


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
    figure.legend(fontsize=8, ncols=3, loc="outside lower center")
    return figure


def _acceptance(results: dict) -> list[tuple[list[float], dict]]:
    """Conditional acceptance by position of every set and method that says what it drafted, as far as enough rounds
    judged it, and how its curve is drawn."""
    asked = results["asked"]
    curves = []
    for colour, name in enumerate(asked["sets"]):
        for method in asked["methods"]:
            decoded = decoded_of(results, name, method)
            judged = rounds_by_position(decoded)
            rates = [
                rate for rate, rounds in zip(acceptance_by_position(decoded), judged, strict=True) if rounds >= FEWEST
            ]
            if rates:
                label = f"{name}, {LABELS[method]}"
                curves.append((rates, {"color": f"C{colour}", "label": label, "linestyle": STYLES.get(method, "-")}))
    return curves


def _curves(title: str, curves: list[tuple[list[float], dict]], first: int):
    figure, axes = _axes(title)
    for values, style in curves:
        axes.plot(range(first, first + len(values)), values, marker="o", markersize=3, **style)
    figure.legend(fontsize=7, ncols=3, loc="outside lower center", handlelength=4)
    return figure, axes


def _positions(results: dict):
    curves = _acceptance(results)
    if not curves:
        return None
    title = f"Share of drafted tokens accepted, given that all before them were ({FEWEST} rounds or more)"
    figure, axes = _curves(title, curves, first=1)
    axes.set_xlabel("drafted position")
    axes.set_ylim(0, 1)
    return figure


def _draft_lengths(results: dict):
    """
    τ if only the first k tokens of every draft had been proposed: 1 + Σ over positions of the chance to get so far.
    """
    curves = _acceptance(results)
    if not curves:
        return None
    lengths = [
        ([1 + sum(accumulate(rates[:k], mul)) for k in range(len(rates) + 1)], style) for rates, style in curves
    ]
    figure, axes = _curves("τ against tokens drafted per round, from the acceptance by position", lengths, first=0)
    axes.set_xlabel("tokens drafted per round")
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
    figure.legend(fontsize=7, ncols=3, loc="outside upper center")
    return figure


__all__ = ["draw"]
