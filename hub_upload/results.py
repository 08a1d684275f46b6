"""Results of `domino evaluate run` on the way to the Hub: of this very draft, without paths, as the card's figures."""

import json
from pathlib import Path

from huggingface_hub import EvalResult

from modeling_domino import DominoForSpeculativeDraft
from modeling_domino.evaluation_report import read_results, summarise
from modeling_domino.evaluation_sets import SETS
from modeling_domino.features import weights_fingerprint

from .facts import Facts, is_hub_id
from .scan import without_paths


METHOD = "domino"
MODELS = ("assistant", "dflash", "eagle")


def read_evaluation(path: str | Path, checkpoint: str | Path, facts: Facts) -> dict:
    """
    The results of an evaluation, fit to be shown.

    Args:
        path: Folder or file of the results.
        checkpoint: The draft that they must be of.
        facts: Of the card.

    Raises:
        ValueError: They are of another draft or another target, or not of Domino decoding.
    """
    results = read_results(path)
    asked, machine = results["asked"], results["machine"]
    # The fingerprint is of the weights as they were loaded, rounded to the type of the evaluation.
    draft = DominoForSpeculativeDraft.from_pretrained(checkpoint, dtype=machine["dtype"])
    if machine["fingerprints"].get("draft") != weights_fingerprint(draft):
        raise ValueError(
            f"{path} holds an evaluation of another draft than {checkpoint} (`{asked['draft']}`, fingerprint "
            f"{machine['fingerprints'].get('draft')}): evaluate this one with `domino evaluate run`."
        )
    if is_hub_id(asked["target"]) and asked["target"] != facts.target:
        raise ValueError(f"{path} was measured with the target {asked['target']}, but the card names {facts.target}.")
    if not any(METHOD in methods for methods in summarise(results).values()):
        raise ValueError(
            f"{path} holds no results of the method `{METHOD}`: evaluate with `--methods plain,{METHOD}`."
        )
    public = dict(asked, draft=facts.repo_id, data=None, device=None)
    for name in ("target", *MODELS):
        public[name] = without_paths(asked[name]) if asked[name] else asked[name]
    unavailable = {method: without_paths(reason) for method, reason in results["unavailable"].items()}
    return dict(results, asked=public, unavailable=unavailable)


def write_evaluation(results: dict, folder: str | Path) -> list[str]:
    """
    Writes `evaluation/results.json` and the figures beside it.

    Returns:
        The figures' paths in `folder`.
    """
    from modeling_domino.evaluation_plots import draw  # needs matplotlib, which only this wants

    place = Path(folder) / "evaluation"
    place.mkdir()
    (place / "results.json").write_text(json.dumps(results, ensure_ascii=False) + "\n", encoding="utf-8")
    return [path.relative_to(folder).as_posix() for path in draw(results, place)]


def eval_results(results: dict) -> list[EvalResult]:
    """τ and speedup of every set, as the Hub's `model-index` has them."""
    asked = results["asked"]
    found = []
    for name, methods in summarise(results).items():
        if METHOD not in methods:
            continue
        figures = methods[METHOD]
        known = SETS.get(name)
        common = {
            "task_type": "text-generation",
            "dataset_type": known.hub_id if known else name,
            "dataset_name": name,
            "dataset_config": known.options.get("name") if known else None,
            "dataset_split": known.split if known else None,
            "dataset_args": {
                "conversations": figures.conversations,
                "max_new_tokens": asked["max_new_tokens"],
                "temperature": asked["temperature"],
                "num_assistant_tokens": results["k"],
            },
        }
        values = {("acceptance_length", "τ, tokens per round pooled over rounds, bonus token included"): figures.tau}
        if "plain" in figures.speedups:
            device = results["machine"]["device"]
            values["speedup", f"tokens per second over plain generate() on {device}"] = figures.speedups["plain"]
        found += [
            EvalResult(metric_type=kind, metric_name=words, metric_value=round(estimate.value, 3), **common)
            for (kind, words), estimate in values.items()
            if estimate is not None
        ]
    return found


__all__ = ["eval_results", "read_evaluation", "write_evaluation"]
