"""`domino prepare`: prompts in, a folder of training data out.

OUTPUT/settings.json      what the answers depend on
OUTPUT/responses.jsonl    one answered conversation a line
OUTPUT/dataset/           `datasets` folder of id, input_ids, loss_mask
OUTPUT/features/          context hidden states, if asked for (features.py)
OUTPUT/README.md          what all this is
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import datasets
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .configuration_domino import DominoConfig, spread_layer_ids
from .data import chat_ids, read_conversations
from .features import feature_bytes, write_features
from .regeneration import ServerAnswers, TargetAnswers, read_responses, training_rows, write_responses


logger = logging.get_logger(__name__)


@dataclass
class Preparation:
    """
    What `domino prepare` is asked for.

    Args:
        prompts: See `read_conversations`.
        output: Folder to write.
        split: Of a Hub dataset.
        limit: Most conversations.
        max_new_tokens: Longest answer.
        max_length: Longest row; the target's context when None.
        temperature: 0 answers greedily.
        seed: Of sampled answers.
        batch_size: Conversations per generate call.
        endpoint: URL of a server that answers instead; None for the target in this process.
        endpoint_model: Name under which the server has the target; the target's own when None.
        concurrency: Requests in flight there.
        template: Variables of the chat template, such as `enable_thinking: false`.
        mask_token_id: The draft's; picked as `DominoConfig.from_target` does when None.
        feature_layers: Target layers whose hidden states are cached; [] for none, and None for those that a draft of
            `draft_layers` layers taps.
        draft_layers: See `feature_layers`.
    """

    prompts: str
    output: str
    split: str = "train"
    limit: int | None = None
    max_new_tokens: int = 1024
    max_length: int | None = None
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 16
    endpoint: str | None = None
    endpoint_model: str | None = None
    concurrency: int = 16
    template: dict = field(default_factory=dict)
    mask_token_id: int | None = None
    feature_layers: list[int] | None = field(default_factory=list)
    draft_layers: int = 5


def prepare(
    asked: Preparation,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    confirm: Callable[[str], bool] = lambda question: True,
) -> Path:
    """
    Writes everything; run again after a kill, it goes on where it stopped.

    Args:
        asked: What to do.
        target: The model to draft for. Beside a server it only gives its configuration, and features if asked for.
        tokenizer: Its tokenizer.
        confirm: Asked before features are written, with their size; False leaves them out.

    Returns:
        The output folder.

    Raises:
        ValueError: No usable prompts or rows, or the folder holds data made otherwise.
        ConnectionError: The server is gone.
    """
    output = Path(asked.output)
    overrides = {} if asked.mask_token_id is None else {"mask_token_id": asked.mask_token_id}
    draft_config = DominoConfig.from_target(target.config, tokenizer=tokenizer, **overrides)
    context = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    max_length = min(value for value in (asked.max_length, context, 1 << 20) if value)
    conversations, problems = read_conversations(asked.prompts, split=asked.split, limit=asked.limit)
    for problem in problems[:20]:
        logger.warning(f"Left out: {problem}")
    counts = Counter({"unreadable": len(problems)}) if problems else Counter()
    fitting = [
        conversation
        for conversation in conversations
        if _prompt_length(tokenizer, conversation, asked.template) + asked.max_new_tokens <= max_length
    ]
    if len(fitting) < len(conversations):
        counts[f"prompt leaves no room for {asked.max_new_tokens} tokens below {max_length}"] = len(
            conversations
        ) - len(fitting)
    if not fitting:
        raise ValueError(
            f"No prompt of {asked.prompts} leaves room for {asked.max_new_tokens} new tokens within {max_length}: "
            "lower `max_new_tokens`."
        )
    settings = {
        "target": target.config.name_or_path,
        "prompts": asked.prompts,
        "prompts_hash": hashlib.blake2b(repr(fitting).encode(), digest_size=8).hexdigest(),
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "template": asked.template,
    }
    shared = {
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "template": asked.template,
    }
    if asked.endpoint:
        model = asked.endpoint_model or target.config.name_or_path
        answers = ServerAnswers(asked.endpoint, model, concurrency=asked.concurrency, **shared)
    else:
        answers = TargetAnswers(target, tokenizer, batch_size=asked.batch_size, seed=asked.seed, **shared)
    responses = write_responses(
        fitting,
        answers,
        output,
        settings,
        count_tokens=lambda answer: len(tokenizer(answer)["input_ids"]) if isinstance(answer, str) else len(answer),
    )
    rows, dropped = training_rows(
        read_responses(responses),
        tokenizer,
        mask_token_id=draft_config.mask_token_id,
        max_length=max_length,
        template=asked.template,
    )
    counts += dropped
    if not rows:
        raise ValueError(f"No training row is left of {len(fitting)}: {_list(counts)}.")
    if counts:
        logger.warning(f"Left out: {_list(counts)}.")
    rows.sort(key=lambda row: row["id"])
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(output / "dataset")
    layers = asked.feature_layers
    if layers is None:
        layers = spread_layer_ids(target.config.get_text_config(decoder=True).num_hidden_layers, asked.draft_layers)
    size = feature_bytes(rows, target, layers) if layers else 0
    if layers and confirm(f"The features of layers {layers} take {size / 1e9:.2f} GB in {output}. Write them?"):
        write_features(dataset, target, layers, output / "features", batch_size=asked.batch_size)
    else:
        layers = []
    (output / "README.md").write_text(_card(settings, rows, counts, layers, size), encoding="utf-8")
    return output


def _prompt_length(tokenizer, conversation: dict, template: dict) -> int:
    """Of all turns that are given: answers still to be written come on top for earlier turns, and are not known."""
    messages = [message for message in conversation["messages"] if message["role"] != "assistant"]
    if tokenizer.chat_template is None:
        return len(chat_ids(tokenizer, messages))
    text = "\n".join(message["content"] for message in messages)
    bare = chat_ids(tokenizer, [{"role": "user", "content": text}], **template)
    return len(bare)


def _card(settings: dict, rows: list[dict], counts: Counter, layers: list[int], size: int) -> str:
    supervised = sum(sum(row["loss_mask"]) for row in rows)
    lines = [
        "---",
        "tags: [domino, speculative-decoding]",
        "---",
        "# Training data for a Domino draft",
        "",
        f"Answers written by `{settings['target']}` to prompts of `{settings['prompts']}` "
        + ("greedily" if not settings["temperature"] else f"at temperature {settings['temperature']}")
        + f", at most {settings['max_new_tokens']} tokens each"
        + (f", chat template variables {settings['template']}" if settings["template"] else "")
        + ". The licence of the prompts, and that of the target for its output, apply.",
        "",
        f"- {len(rows)} rows, {sum(len(row['input_ids']) for row in rows)} tokens, {supervised} of them supervised",
        f"- left out: {_list(counts) if counts else 'nothing'}",
    ]
    if layers:
        lines.append(f"- `features/`: hidden states of target layers {layers}, {size / 1e9:.2f} GB")
    return "\n".join([*lines, "", "Load with `datasets.load_from_disk('dataset')`; train with `domino train`.", ""])


def _list(counts: Counter) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in counts.items())


__all__ = ["Preparation", "prepare"]
