"""Training data: conversations read, token ids with a mask on what the target wrote, and short answers in memory.

A draft learns to predict its target, not the world, so answers are written by the target (regeneration.py).
"""

import json
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.utils import logging

from .anchors import eligible_anchors
from .target_domino import BorrowedTarget, Taps


logger = logging.get_logger(__name__)

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict], **template) -> list[int]:
    """
    Ids of a conversation under the tokenizer's chat template, ready for the answer.

    Args:
        tokenizer: Without a chat template, a single user turn is taken as plain text.
        prompt: A user turn, or messages of `role` and `content`.
        template: Variables of the chat template, such as `enable_thinking=False`.

    Raises:
        ValueError: Several messages, and no chat template to put them together.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            if len(prompt) > 1:
                raise ValueError(
                    f"{tokenizer.name_or_path} has no chat template, and the conversation has {len(prompt)} messages: "
                    "set `tokenizer.chat_template`, or give single user turns, which are taken as plain text."
                )
            prompt = prompt[0]["content"]
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **template)[
        "input_ids"
    ]


def assistant_mask(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict], **template
) -> tuple[list[int], list[int]]:
    """
    Ids of a whole conversation, and a mask on what its assistant wrote, end-of-turn tokens included.

    Templates with `{% generation %}` markers say it themselves. In others each answer is searched for in the rendered
    text, one message after the other; thoughts that a template drops from earlier turns are not expected there.

    Args:
        tokenizer: A fast one, with a chat template.
        messages: Of `role` and `content`.
        template: Variables of the chat template.

    Returns:
        `input_ids` and `loss_mask`, [S] each.

    Raises:
        ValueError: No chat template, or an answer cannot be found in what the template renders.
    """
    if tokenizer.chat_template is None:
        raise ValueError(f"{tokenizer.name_or_path} has no chat template: set `tokenizer.chat_template` first.")
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **template
        )
        return encoded["input_ids"], encoded["assistant_masks"]
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    spans, position = [], 0
    for number, message in enumerate(messages):
        content = message["content"].strip()
        start = text.find(content, position)
        if start < 0 and message["role"] == "assistant":
            content = content.rpartition("</think>")[2].strip()
            start = text.find(content, position)
        if start < 0:
            if message["role"] == "assistant":
                raise ValueError(
                    f"Message {number} ({content[:40]!r}...) is not in what the chat template of "
                    f"{tokenizer.name_or_path} renders: mark answers in the template with generation tags."
                )
            continue  # a template may render a system message its own way
        position = start + len(content)
        if message["role"] == "assistant":
            spans.append((start, position))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    mask = [int(any(start < last and end > first for start, end in spans)) for first, last in offsets]
    special = set(tokenizer.all_special_ids)
    for index in range(1, len(ids)):
        if mask[index - 1] and not mask[index] and ids[index] in special:
            mask[index] = 1  # the token that ends the turn is the target's too
    return ids, mask


def read_conversations(source: str, *, split: str = "train", limit: int | None = None) -> tuple[list[dict], list[str]]:
    """
    Prompts from a file or from the Hub.

    Args:
        source: A `.jsonl`, `.json` or `.parquet` file, or the id of a Hub dataset. Rows hold `messages` (role, content),
            ShareGPT `conversations` (from, value), `turns` (user turns), or plain text in `prompt`, `instruction`,
            `question` or `text`; optionally an `id`.
        split: Of a Hub dataset.
        limit: Most conversations to read.

    Returns:
        Conversations of `id` and `messages`, ending with a user turn (answers are kept where they are: see
        `regeneration`), and what was wrong with the rows that were left out, with their line numbers.

    Raises:
        ValueError: No row could be used.
    """
    path = Path(source)
    rows: list[tuple[int, dict | str]] = []
    if path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if line.strip():
                rows.append((number, line))
    else:
        import datasets

        if path.suffix == ".parquet":
            loaded = datasets.Dataset.from_parquet(str(path))
        else:
            loaded = datasets.load_dataset(source, split=split)
        rows.extend(enumerate(loaded, 1))
    conversations, problems, seen = [], [], set()
    for number, row in rows:
        if limit is not None and len(conversations) == limit:
            break
        try:
            row = json.loads(row) if isinstance(row, str) else row
            messages = _messages(row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{path.name}, line {number}: {type(error).__name__}: {error}")
            continue
        row_id = str(row.get("id", f"{path.stem}-{number}"))
        if row_id in seen:
            row_id = f"{row_id}-line{number}"
        seen.add(row_id)
        conversations.append({"id": row_id, "messages": messages})
    if not conversations:
        raise ValueError(
            f"{source} holds no usable prompt ({len(rows)} rows"
            + (f"; first problem: {problems[0]}" if problems else "")
            + "): rows need `messages`, `conversations`, `turns`, `prompt`, `instruction`, `question` or `text`."
        )
    return conversations, problems


def _messages(row: dict) -> list[dict]:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if row.get("messages"):
        messages = [{"role": ROLES[m["role"]], "content": m["content"]} for m in row["messages"]]
    elif row.get("conversations"):
        messages = [{"role": ROLES[m["from"]], "content": m["value"]} for m in row["conversations"]]
    elif row.get("turns"):
        messages = [{"role": "user", "content": turn} for turn in row["turns"]]
    else:
        text = next((row[key] for key in ("prompt", "instruction", "question", "text") if row.get(key)), None)
        if text is None:
            raise ValueError(f"no prompt among the fields {sorted(row)}")
        messages = [{"role": "user", "content": text}]
    if any(not isinstance(m["content"], str) or not m["content"].strip() for m in messages):
        raise ValueError("a message is empty or not text")
    if not any(m["role"] == "user" for m in messages):
        raise ValueError("no user turn")
    return messages


class PackedRows(Dataset):
    """
    Several rows side by side in each row, so that less is padded; blocks never look across (anchors.py).

    Args:
        rows: With `input_ids`, `loss_mask`, and optionally `id` and `context_hidden_states`.
        length: Most tokens of a packed row; longer rows stay alone.
    """

    def __init__(self, rows: Dataset | list[dict], length: int):
        self.rows = rows
        self.groups: list[list[int]] = []
        room = 0
        lengths = row_lengths(rows)
        for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if lengths[index] > room:
                self.groups.append([])
                room = length
            self.groups[-1].append(index)
            room -= lengths[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, index: int) -> dict:
        parts = [self.rows[i] for i in self.groups[index]]
        packed = {
            "id": " ".join(str(part.get("id", i)) for i, part in zip(self.groups[index], parts, strict=True)),
            "input_ids": [token for part in parts for token in part["input_ids"]],
            "loss_mask": [bit for part in parts for bit in part["loss_mask"]],
            "document_ids": [n for n, part in enumerate(parts) for _ in part["input_ids"]],
        }
        if "context_hidden_states" in parts[0]:
            # Features end one row before their text: no block sees its last token.
            padded = [
                torch.nn.functional.pad(states, (0, 0, 0, len(part["input_ids"]) - len(states)))
                for part in parts
                for states in [torch.as_tensor(part["context_hidden_states"])]
            ]
            packed["context_hidden_states"] = torch.cat(padded)
        return packed


def row_lengths(rows: Dataset | list[dict]) -> list[int]:
    """Tokens of each row, without reading features."""
    if isinstance(rows, Subset):
        lengths = row_lengths(rows.dataset)
        return [lengths[i] for i in rows.indices]
    return [len(row["input_ids"]) for row in getattr(rows, "rows", rows)]


def unusable(row: dict, *, mask_token_id: int, max_length: int) -> str | None:
    """Why a training row is left out; None when it is good."""
    if mask_token_id in row["input_ids"]:
        return f"contains the mask token {mask_token_id}"
    if len(row["input_ids"]) > max_length:
        return f"longer than {max_length} tokens"
    if len(eligible_anchors(torch.tensor(row["loss_mask"]))) == 0:
        return "without two consecutive supervised tokens"
    return None


@torch.no_grad()
def regenerate(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    *,
    max_new_tokens: int,
    mask_token_id: int,
    target_layer_ids: list[int] | None = None,
    batch_size: int = 32,
) -> list[dict]:
    """
    Lets the target answer prompts greedily, in memory (`domino prepare` writes to disk and can be resumed).

    Args:
        target: The model to draft for.
        tokenizer: Its tokenizer.
        prompts: User turns.
        max_new_tokens: Longest answer.
        mask_token_id: The draft's; rows that contain it are dropped and counted in a warning.
        target_layer_ids: Layers to tap; rows then bring the hidden states that the target computed while it answered,
            and training need not run it again. They take taps · H numbers a token in memory.
        batch_size: Prompts per generate call, of similar length.

    Returns:
        Rows of `input_ids` and `loss_mask` (1 on the answer's tokens, its end token included), [S] each, and with
        taps `context_hidden_states`, [S - 1, taps · H]: nothing is drafted after the last token.
    """
    encoded = sorted((chat_ids(tokenizer, prompt) for prompt in prompts), key=len)
    borrowed = BorrowedTarget(target)
    rows, dropped = [], 0
    with tqdm(total=len(prompts), desc="target answers", unit="prompt") as progress:
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            with borrowed.tap(target_layer_ids or []) as taps:
                recorder = _TapRecorder(taps) if target_layer_ids else None
                answers = answer_batch(
                    target, tokenizer, batch, max_new_tokens, stopping_criteria=[recorder] if recorder else None
                )
            if recorder:
                hidden_states, width = torch.cat(recorder.steps, dim=1), max(len(ids) for ids in batch)
            for i, (ids, (answer, _)) in enumerate(zip(batch, answers, strict=True)):
                row = {"input_ids": ids + answer, "loss_mask": [0] * len(ids) + [1] * len(answer)}
                if len(answer) < 2 or mask_token_id in row["input_ids"]:
                    dropped += 1
                    continue
                if recorder:
                    last = width + len(answer) - 1
                    row["context_hidden_states"] = hidden_states[i, width - len(ids) : last].clone()
                rows.append(row)
            progress.update(len(batch))
    if dropped:
        logger.warning(
            f"{dropped} of {len(prompts)} rows were dropped: they contain the mask token {mask_token_id} or an answer "
            "of fewer than two tokens."
        )
    return rows


@torch.no_grad()
def answer_batch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    **options,
) -> list[tuple[list[int], bool]]:
    """
    What the target answers to each prompt of ids: the answer's ids, end token included, and whether it ended by itself.

    Args:
        temperature: 0 answers greedily.
        options: Of generate().
    """
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = target.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    width = max(len(ids) for ids in prompts)
    padded = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts], device=target.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=target.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    outputs = target.generate(
        padded, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=pad_id, **sampling, **options
    )
    answers = []
    for row in outputs[:, width:].tolist():
        length = next((n + 1 for n, token in enumerate(row) if token in ends), None)
        answers.append((row[:length], length is not None))
    return answers


class _TapRecorder(StoppingCriteria):
    """Runs after each forward pass of generate() and stops nothing: it takes what the taps hold."""

    def __init__(self, taps: Taps):
        self.taps = taps
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.steps.append(self.taps.take())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


__all__ = [
    "PackedRows",
    "answer_batch",
    "assistant_mask",
    "chat_ids",
    "read_conversations",
    "regenerate",
    "row_lengths",
    "unusable",
]
