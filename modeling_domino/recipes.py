"""`domino train CONFIG.yaml`: a flat file of names, read into dataclasses, and the training it asks for."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch.utils.data import Subset
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from .configuration_domino import DominoConfig
from .data import PackedRows
from .eagle import EagleConfig, EagleForSpeculativeDraft
from .eagle_training import EagleTrainer
from .features import RowsWithFeatures
from .modeling_domino import DominoForSpeculativeDraft
from .training import DominoTrainer, DominoTrainingArguments
from .warm_start import start_from_target


ARCHITECTURES = {
    "domino": (DominoConfig, DominoForSpeculativeDraft, DominoTrainer),
    "eagle": (EagleConfig, EagleForSpeculativeDraft, EagleTrainer),
}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")


@dataclass
class Recipe:
    """
    What a training starts from; everything else is `DominoTrainingArguments`.

    Args:
        target: Hub id, folder or .gguf file.
        dataset: Folder written by `domino prepare`.
        eval_dataset: Another one; or a share of `dataset` with `eval_share`.
        eval_share: Share of the rows held out for evaluation, the same ones in every run.
        architecture: domino, or eagle: the EAGLE-3-style autoregressive baseline.
        draft: Fields of `DominoConfig`, such as `block_size` and `num_hidden_layers`.
        layers_from: Target layers that the layers of a new draft start as copies of, instead of at random.
        init_from: Draft to go on from (Hub id or folder) instead of a new one; of `draft` only `block_size` may then
            be given, the one field that no weight depends on and that may grow during training.
        features: Whether to use the cached features of `dataset`: auto (when they are there), always, never.
        pack_length: Puts rows side by side into rows of at most so many training tokens; None leaves them apart.
        dtype: Of the target.
        attn_implementation: Of the draft.
    """

    target: str
    dataset: str
    eval_dataset: str | None = None
    eval_share: float = 0.0
    architecture: str = "domino"
    draft: dict = field(default_factory=dict)
    layers_from: list[int] | None = None
    init_from: str | None = None
    features: str = "auto"
    pack_length: int | None = None
    dtype: str = "auto"
    attn_implementation: str = "sdpa"

    def __post_init__(self):
        if self.features not in ("auto", "always", "never"):
            raise ValueError(f"`features` is {self.features!r}, expected 'auto', 'always' or 'never'.")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` is {self.architecture!r}, expected one of {', '.join(ARCHITECTURES)}.")
        other = sorted(set(self.draft) - {"block_size"}) + ["layers_from"] * bool(self.layers_from)
        if self.init_from and other:
            raise ValueError(
                f"`init_from` brings its own configuration and weights: leave out {', '.join(f'`{n}`' for n in other)} "
                "(only `draft.block_size` may change)."
            )
        if not 0 <= self.eval_share < 1:
            raise ValueError(f"`eval_share` is {self.eval_share}, expected a share in [0, 1).")


def read_recipe(path: str | Path, overrides: list[str] = ()) -> tuple[Recipe, DominoTrainingArguments]:
    """
    Args:
        path: YAML file of fields of `Recipe` and `DominoTrainingArguments`.
        overrides: `--name value` or `--name=value`; `--draft.block_size 8` reaches into `draft`.

    Raises:
        ValueError: The file is no mapping, a name is unknown, or a value does not fit.
    """
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} is a {type(values).__name__}, expected `name: value` lines.")
    for name, value in _pairs(overrides):
        place = values
        *outer, last = name.replace("-", "_").split(".")
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = yaml.safe_load(value)
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if values.get(name) is False:
            values[name] = "no"  # YAML 1.1 reads a bare `no` as false
    parser = HfArgumentParser((Recipe, DominoTrainingArguments))
    try:
        return parser.parse_dict(_numbers(values))
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def _pairs(arguments: list[str]) -> list[tuple[str, str]]:
    pairs, rest = [], list(arguments)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise ValueError(f"`{flag}` stands alone: write `--name value` to override a line of the recipe.")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise ValueError(f"`{flag}` has no value: write `{flag} value`.")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads `6e-4` as text."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def build_trainer(
    recipe: Recipe,
    arguments: DominoTrainingArguments,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **options,
) -> DominoTrainer:
    """
    The trainer of a recipe.

    Args:
        recipe, arguments: From `read_recipe`.
        target, tokenizer: What `recipe.target` names.
        options: Of `DominoTrainer`.

    Raises:
        ValueError: Features that do not belong to this target, these layers or these rows; no rows.
        FileNotFoundError: No prepared data in the folder.
    """
    config_class, draft_class, trainer_class = ARCHITECTURES[recipe.architecture]
    if recipe.init_from:
        draft = draft_class.from_pretrained(recipe.init_from, dtype="float32", **recipe.draft)
    else:
        set_seed(arguments.seed)  # the same new draft on every process and in every run
        draft = draft_class(config_class.from_target(target.config, tokenizer=tokenizer, **recipe.draft))
        if recipe.layers_from:
            start_from_target(draft, target, recipe.layers_from)
    draft.set_attn_implementation(recipe.attn_implementation)
    training = _rows(recipe.dataset, recipe, target, draft.config)
    evaluation = None
    if recipe.eval_dataset:
        evaluation = _rows(recipe.eval_dataset, recipe, target, draft.config)
    elif recipe.eval_share:
        step = max(2, round(1 / recipe.eval_share))
        held_out = range(0, len(training), step)
        evaluation = Subset(training, list(held_out))
        training = Subset(training, [i for i in range(len(training)) if i % step])
    if recipe.pack_length:
        training = PackedRows(training, recipe.pack_length)
    return trainer_class(draft, target, arguments, train_dataset=training, eval_dataset=evaluation, **options)


def _rows(folder: str, recipe: Recipe, target: PreTrainedModel, config: DominoConfig):
    import datasets

    place = Path(folder)
    if not (place / "dataset").is_dir():
        raise FileNotFoundError(
            f"{folder} holds no prepared data: write it with `domino prepare ... --output {folder}`."
        )
    rows = datasets.load_from_disk(str(place / "dataset"))
    features = place / "features"
    if recipe.features == "never" or (recipe.features == "auto" and not features.exists()):
        return rows
    if not features.exists():
        raise FileNotFoundError(f"{features} does not exist: run `domino prepare` with `--features`.")
    return RowsWithFeatures(rows, features, target, config.target_layer_ids)


__all__ = ["Recipe", "build_trainer", "read_recipe"]
