"""Figures, tables and comparisons, all computed from `results.json` alone."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from .evaluation import FORMAT, decoded_of
from .evaluation_methods import LABELS
from .measures import (
    Decoded,
    Estimate,
    acceptance_by_position,
    acceptance_gain,
    acceptance_length,
    mean_acceptance_length,
    seconds_per_round,
    speedup,
    speedup_ratio,
    tokens_per_second,
)


# Fewer conversations than this give no interval that deserves its name.
FEWEST = 8
BASELINES = {"plain": "× plain", "compiled": "× compiled"}
COLUMNS = ["run", "set", "method", "n", "τ pooled", "τ mean of prompts", "draft ms", "verify ms", "tokens/s"]
COLUMNS += [*BASELINES.values(), "same text as plain"]


@dataclass(frozen=True)
class Figures:
    """
    What one method did on one set.

    Args:
        conversations: How many.
        tau: τ pooled over rounds; None for a way without rounds.
        tau_mean: Mean of the conversations' own τ.
        by_position: Conditional acceptance of each drafted position; empty where the way does not say.
        draft_ms, verify_ms: Of a round; None where the way does not say.
        tokens_per_second: Passes over prompts included.
        speedups: Over each baseline that ran, on the same conversations.
        equal: Conversations whose greedy text equals plain generate's; None when sampling.
        largest_gap: Of the others, the largest difference of logits where they part; None if none parted.
    """

    conversations: int
    tau: Estimate | None
    tau_mean: Estimate | None
    by_position: list[float]
    draft_ms: float | None
    verify_ms: float | None
    tokens_per_second: float
    speedups: dict[str, Estimate]
    equal: int | None
    largest_gap: float | None


def read_results(path: str | Path) -> dict:
    """
    Raises:
        ValueError: No results of `domino evaluate run`.
    """
    path = Path(path)
    path = path / "results.json" if path.is_dir() else path
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as results of `domino evaluate run`: {error}") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path} holds no results of `domino evaluate run` (format {FORMAT}).")
    return results


def summarise(results: dict) -> dict[str, dict[str, Figures]]:
    """Figures of every set and method."""
    summary: dict[str, dict[str, Figures]] = {}
    for name in results["asked"]["sets"]:
        decoded = {method: decoded_of(results, name, method) for method in results["asked"]["methods"]}
        decoded = {method: rows for method, rows in decoded.items() if rows}
        if decoded:
            summary[name] = {method: _figures(results, name, method, decoded) for method in decoded}
    return summary


def _figures(results: dict, name: str, method: str, decoded: dict[str, list[Decoded]]) -> Figures:
    rows = decoded[method]
    rounds = sum(d.rounds for d in rows)
    seconds = seconds_per_round(rows)
    compared = method != "plain" and "plain" in decoded and not results["asked"]["temperature"]
    parted = [
        r["differences"][method] for r in results["conversations"] if r["set"] == name and method in r["differences"]
    ]
    gaps = [place["logit_gap"] for place in parted if place["logit_gap"] is not None]
    return Figures(
        conversations=len(rows),
        tau=acceptance_length(rows) if rounds else None,
        tau_mean=mean_acceptance_length(rows) if rounds else None,
        by_position=acceptance_by_position(rows),
        draft_ms=1000 * seconds[0] if seconds else None,
        verify_ms=1000 * seconds[1] if seconds else None,
        tokens_per_second=tokens_per_second(rows),
        speedups={base: speedup(rows, decoded[base]) for base in BASELINES if base in decoded and base != method},
        equal=len(rows) - len(parted) if compared else None,
        largest_gap=max(gaps, default=None),
    )


def interval(estimate: Estimate | None, conversations: int) -> str:
    """An estimate as tables show it; with too few conversations for an interval, what is missing instead of it."""
    if estimate is None:
        return ""
    if conversations < FEWEST:
        return f"{estimate.value:.2f} (interval: {FEWEST - conversations} more prompts)"
    return str(estimate)


def read_runs(folder: str | Path) -> dict[str, dict]:
    """
    Results of a run, under the empty name; or of all runs in the folders within, under their names without a leading
    number (`2 teacher forcing`), which orders them.

    Raises:
        ValueError: No results there.
    """
    path = Path(folder)
    if not path.is_dir() or (path / "results.json").exists():
        return {"": read_results(path)}
    found = sorted(inner.parent for inner in path.glob("*/results.json"))
    if not found:
        raise ValueError(f"{folder} holds no results of `domino evaluate run`, nor does any folder in it.")
    return {re.sub(r"^\d+[ _-]", "", inner.name): read_results(inner) for inner in found}


def markdown_table(runs: dict[str, dict]) -> str:
    """
    The table that the README and model cards show, with what it was measured on above it.

    Args:
        runs: Results by the name of their run, as from `read_runs`. Columns that nothing fills are left out.
    """
    lines = list(dict.fromkeys(_conditions(results) for results in runs.values()))
    rows = [row for run, results in runs.items() for row in _rows(run, results)]
    columns = [column for column in COLUMNS if any(row[column] for row in rows)]
    lines += ["", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row[column] for column in columns)} |" for row in rows]
    for results in runs.values():
        for method, reason in results["unavailable"].items():
            lines += ["", f"{LABELS[method]}: not measured here ({reason})."]
    return "\n".join(lines) + "\n"


def _conditions(results: dict) -> str:
    asked, machine = results["asked"], results["machine"]
    decoding = f"Sampled at T={asked['temperature']}" if asked["temperature"] else "Greedy"
    packed = ", packed weights" if asked["pack"] else ""
    return (
        f"{decoding}, at most {asked['max_new_tokens']} new tokens a turn, K={results['k']}, {machine['dtype']}{packed}, "
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, commit {machine['commit']}, {machine['date']}; 95 % intervals, paired bootstrap over "
        "conversations; τ counts the bonus token."
    )


def _rows(run: str, results: dict) -> list[dict[str, str]]:
    return [
        {
            "run": run,
            "set": name,
            "method": LABELS[method],
            "n": str(figures.conversations),
            "τ pooled": interval(figures.tau, figures.conversations),
            "τ mean of prompts": interval(figures.tau_mean, figures.conversations),
            "draft ms": _ms(figures.draft_ms),
            "verify ms": _ms(figures.verify_ms),
            "tokens/s": f"{figures.tokens_per_second:.1f}",
            **{
                column: interval(figures.speedups.get(base), figures.conversations)
                for base, column in BASELINES.items()
            },
            "same text as plain": _equality(figures),
        }
        for name, methods in summarise(results).items()
        for method, figures in methods.items()
    ]


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _equality(figures: Figures) -> str:
    if figures.equal is None:
        return ""
    text = f"{figures.equal} of {figures.conversations}"
    return text if figures.largest_gap is None else f"{text} (logits apart by at most {figures.largest_gap:.2g})"


def write_block(document: str | Path, name: str, text: str) -> None:
    """
    Replaces what stands between `<!-- evaluation: NAME -->` and `<!-- /evaluation: NAME -->` in a Markdown file.

    Raises:
        ValueError: The marks are not there, once each and in this order.
    """
    path = Path(document)
    content = path.read_text(encoding="utf-8")
    begin, end = (f"<!-- {slash}evaluation: {name} -->" for slash in ("", "/"))
    found = re.findall(f"{re.escape(begin)}\n.*?{re.escape(end)}", content, flags=re.DOTALL)
    if len(found) != 1 or content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"{document} needs the lines `{begin}` and `{end}`, once each: the table goes between them.")
    path.write_text(content.replace(found[0], f"{begin}\n\n{text}\n{end}"), encoding="utf-8")


def compare(one: dict, other: dict, method: str = "domino", other_method: str | None = None) -> list[str]:
    """
    Which of two evaluations is better, in τ and in speed over plain decoding, on the conversations that both decoded.

    Args:
        one, other: Results.
        method, other_method: Of each; the same one in both by default.

    Returns:
        Sentences, one for each set and measure, that say whether the interval of the ratio excludes 1.

    Raises:
        ValueError: Nothing in common.
    """
    other_method = other_method or method
    lines = []
    for name in one["asked"]["sets"]:
        rows = {d.id: d for d in decoded_of(one, name, method)}
        rest = {d.id: d for d in decoded_of(other, name, other_method)}
        shared = [key for key in rows if key in rest]
        if not shared:
            continue
        first, second = [rows[key] for key in shared], [rest[key] for key in shared]
        lines.append(f"{name}, {len(shared)} conversations in both:")
        if sum(d.rounds for d in first) and sum(d.rounds for d in second):
            lines.append("  " + _verdict("τ", acceptance_gain(first, second), len(shared)))
        plain = [{d.id: d for d in decoded_of(results, name, "plain")} for results in (one, other)]
        if all(key in rows for rows in plain for key in shared):
            ratio = speedup_ratio(first, [plain[0][k] for k in shared], second, [plain[1][k] for k in shared])
            lines.append("  " + _verdict("speedup over plain", ratio, len(shared)))
    if not lines:
        raise ValueError(
            f"The two evaluations have no conversation in common that `{method}` and `{other_method}` decoded: compare "
            "runs on the same sets."
        )
    if one["machine"]["device"] != other["machine"]["device"] or one["machine"]["dtype"] != other["machine"]["dtype"]:
        lines.append("The two ran on different devices or in different types: τ can be compared, speedups hardly.")
    return lines


def _verdict(what: str, ratio: Estimate, conversations: int) -> str:
    text = f"{what}, first over second: {interval(ratio, conversations)}"
    if conversations < FEWEST:
        return f"{text}; too few conversations to say which is better"
    if ratio.low > 1:
        return f"{text}; the first is better, the interval excludes 1"
    if ratio.high < 1:
        return f"{text}; the second is better, the interval excludes 1"
    return f"{text}; no difference shown, the interval includes 1"


__all__ = ["Figures", "compare", "interval", "markdown_table", "read_results", "read_runs", "summarise", "write_block"]
