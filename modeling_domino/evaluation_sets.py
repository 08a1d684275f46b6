"""The evaluation sets of the paper, from the Hub or from local files of the same shape.

Prompts are worded as in the evaluation code of DFlash and DeepSpec (deepseek-ai/DeepSpec), so that acceptance lengths can
be compared. Rows are taken from the start of each set, in its own order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from .data import read_conversations


BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {format}\n```python\n{code}\n```\n\n### Answer: (use the "
    "provided format with backticks)"
)


def _livecodebench(row: dict) -> list[str]:
    given = row["starter_code"]
    text = "Use the following code structure:" if given else "Write your code in the following format:"
    question = row["question_content"]
    return [LIVECODEBENCH.format(question=question, format=text, code=given or "# YOUR CODE HERE")]


def _alpaca(row: dict) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


@dataclass(frozen=True)
class EvaluationSet:
    """
    Args:
        hub_id: Of the dataset.
        turns: A row of it to its user turns.
        split: Of the dataset.
        options: Further ones of `datasets.load_dataset`.
    """

    hub_id: str
    turns: Callable[[dict], list[str]]
    split: str = "test"
    options: dict = field(default_factory=dict)


SETS = {
    "gsm8k": EvaluationSet("openai/gsm8k", lambda row: [row["question"] + BOXED], options={"name": "main"}),
    "math500": EvaluationSet("HuggingFaceH4/MATH-500", lambda row: [row["problem"] + BOXED]),
    "aime25": EvaluationSet("MathArena/aime_2025", lambda row: [row["problem"] + BOXED], split="train"),
    "humaneval": EvaluationSet(
        "openai/openai_humaneval",
        lambda row: [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ],
    ),
    "mbpp": EvaluationSet("google-research-datasets/mbpp", lambda row: [row["prompt"]], options={"name": "sanitized"}),
    "livecodebench": EvaluationSet(
        "json",  # the dataset's own loader is a script, which `datasets` no longer runs
        _livecodebench,
        split="train",
        options={"data_files": "hf://datasets/livecodebench/code_generation_lite/test*.jsonl"},
    ),
    "mt-bench": EvaluationSet("HuggingFaceH4/mt_bench_prompts", lambda row: row["prompt"], split="train"),
    "alpaca": EvaluationSet("tatsu-lab/alpaca", _alpaca, split="train"),
}


def read_set(name: str, folder: str | Path | None = None, limit: int | None = None) -> list[dict]:
    """
    The first conversations of a set.

    Args:
        name: One of `SETS`; with `folder`, the stem of any file in it.
        folder: Of `NAME.jsonl` or `NAME.parquet` files with rows of `turns` (user turns, in order) and `id`, or of what
            `read_conversations` reads; None takes the set from the Hub, which streams it.
        limit: Most conversations.

    Returns:
        Conversations of `id` and `messages`.

    Raises:
        ValueError: An unknown set, a missing file, or a file without a usable row; known names are listed.
    """
    if folder is None:
        if name not in SETS:
            raise ValueError(f"`{name}` is no evaluation set, expected one of {', '.join(SETS)}.")
        return _from_hub(name, limit)
    files = {path.stem: path for path in sorted(Path(folder).glob("*")) if path.suffix in (".jsonl", ".parquet")}
    if name not in files:
        found = f"expected one of {', '.join(files)}" if files else "it holds no .jsonl or .parquet file"
        raise ValueError(f"`{name}` is no evaluation set of {folder}: {found}.")
    return read_conversations(str(files[name]), limit=limit)[0]


def _from_hub(name: str, limit: int | None) -> list[dict]:
    import datasets

    chosen = SETS[name]
    rows = datasets.load_dataset(chosen.hub_id, split=chosen.split, streaming=True, **chosen.options)
    return [
        {
            "id": f"{name}-{number:04d}",
            "messages": [{"role": "user", "content": turn} for turn in chosen.turns(row)],
        }
        for number, row in enumerate(islice(rows, limit))
    ]


__all__ = ["SETS", "EvaluationSet", "read_set"]
