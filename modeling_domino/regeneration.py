"""Answers written by the target, on disk: batched or through a server, and resumed after a kill.

Finished conversations are appended to `responses.jsonl`, one line each, so that a run that dies loses at most the batch
it was in, and repeats nothing. `training_rows` turns them into token ids with a mask on the answers.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import requests
import torch
from requests.adapters import HTTPAdapter, Retry
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .data import answer_batch, assistant_mask, chat_ids, unusable


# A batch of conversations without their last answer, to (answer ids or text, whether it ended by itself) of each.
Answer = tuple[list[int] | str, bool]


class TargetAnswers:
    """
    Answers by a target in this process.

    Args:
        target, tokenizer: The model to draft for.
        max_new_tokens: Longest answer.
        temperature: 0 answers greedily.
        batch_size: Conversations per generate call.
        seed: Of sampled answers.
        template: Variables of the chat template.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        batch_size: int = 16,
        seed: int = 0,
        template: dict | None = None,
    ):
        self.target, self.tokenizer = target, tokenizer
        self.max_new_tokens, self.temperature, self.seed = max_new_tokens, temperature, seed
        self.batch_size, self.template = batch_size, template or {}

    def __call__(self, conversations: list[list[dict]]) -> Iterator[tuple[int, Answer]]:
        """Index of each conversation and its answer, as they come."""
        prompts = [chat_ids(self.tokenizer, messages, **self.template) for messages in conversations]
        if self.temperature:
            # From what is asked, so that batches differ, and a batch that is asked again after a kill does not.
            digest = hashlib.blake2b(repr((self.seed, prompts)).encode(), digest_size=4).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))
        answers = answer_batch(self.target, self.tokenizer, prompts, self.max_new_tokens, self.temperature)
        yield from enumerate(answers)

    def text(self, answer: list[int]) -> str:
        """An answer as the history of a chat has it."""
        return self.tokenizer.decode(answer, skip_special_tokens=True)


class ServerAnswers:
    """
    Answers by any OpenAI-compatible server (SGLang, vLLM, `transformers serve`).

    Args:
        url: With the version, such as `http://localhost:30000/v1`.
        model: Name under which it serves the target.
        max_new_tokens: Longest answer.
        temperature: 0 answers greedily.
        concurrency: Requests in flight.
        retries: Further tries of a request that failed, with doubling pauses.
        pause: Seconds before the first of them.
        template: Variables of the chat template, sent as `chat_template_kwargs`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        concurrency: int = 16,
        retries: int = 4,
        pause: float = 1.0,
        template: dict | None = None,
    ):
        again = Retry(retries, backoff_factor=pause, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=None)
        self.session = requests.Session()
        for scheme in ("http://", "https://"):
            self.session.mount(scheme, HTTPAdapter(pool_maxsize=concurrency, max_retries=again))
        self.session.headers["Authorization"] = f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"
        self.url, self.model, self.max_new_tokens, self.temperature = url, model, max_new_tokens, temperature
        self.template = template or {}
        self.batch_size = concurrency

    def __call__(self, conversations: list[list[dict]]) -> Iterator[tuple[int, Answer]]:
        """
        Index of each conversation and its answer, as they come.

        Raises:
            ConnectionError: A request failed again after all tries.
            ValueError: The server refuses it.
        """
        with ThreadPoolExecutor(self.batch_size) as pool:
            futures = {pool.submit(self._ask, messages): index for index, messages in enumerate(conversations)}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def text(self, answer: str) -> str:
        """An answer as the history of a chat has it."""
        return answer

    def _ask(self, messages: list[dict]) -> Answer:
        request = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        if self.template:
            request["chat_template_kwargs"] = self.template
        try:
            reply = self.session.post(f"{self.url.rstrip('/')}/chat/completions", json=request, timeout=600)
        except requests.RequestException as error:
            raise ConnectionError(
                f"{self.url} failed again and again ({error}). What is answered so far is kept: start the server again "
                "and run the same command."
            ) from error
        if not reply.ok:
            raise ValueError(f"{self.url} refuses the request ({reply.status_code}): {reply.text[:300]}")
        choice = reply.json()["choices"][0]
        return choice["message"]["content"] or "", choice["finish_reason"] == "stop"


def write_responses(
    conversations: list[dict], answers: Callable, folder: str | Path, settings: dict, *, count_tokens: Callable
) -> Path:
    """
    Answers every user turn of every conversation anew and appends the conversation to `responses.jsonl`.

    Args:
        conversations: Of `id` and `messages`; assistant turns among them are replaced.
        answers: `TargetAnswers` or `ServerAnswers`.
        folder: Where the file lies. What it already holds is not asked again.
        settings: What answers depend on; kept in `settings.json`, so that a resumed run cannot mix two kinds.
        count_tokens: Of an answer, for the progress bar.

    Returns:
        The file. Its lines hold `id`, `messages`, and of the last turn `response` (ids, or the text of a server) and
        `ended` (by itself).

    Raises:
        ValueError: The folder holds responses made with other settings.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder / "settings.json", settings)
    path = folder / "responses.jsonl"
    done = {row["id"] for row in read_responses(path, repair=True)}
    todo = [conversation for conversation in conversations if conversation["id"] not in done]
    # Of similar length together: little padding, and rows of a batch end at about the same time.
    todo.sort(key=lambda conversation: sum(len(message["content"]) for message in conversation["messages"]))
    started, tokens = time.perf_counter(), 0
    with (
        path.open("a", encoding="utf-8") as file,
        tqdm(total=len(conversations), initial=len(done & {c["id"] for c in conversations}), unit="row") as progress,
    ):
        for start in range(0, len(todo), answers.batch_size):
            batch = todo[start : start + answers.batch_size]
            for conversation, messages, (response, ended) in _answer_turns(batch, answers):
                row = {"id": conversation["id"], "messages": messages, "response": response, "ended": ended}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                tokens += count_tokens(response)
                progress.update()
            file.flush()
            os.fsync(file.fileno())
            progress.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tokens/s")
    return path


def _answer_turns(batch: list[dict], answers: Callable) -> Iterator[tuple[dict, list[dict], Answer]]:
    """Conversations with their messages before the last answer, and that answer, as soon as each is through."""
    asked = [[m for m in conversation["messages"] if m["role"] != "assistant"] for conversation in batch]
    last_user = [max(i for i, m in enumerate(messages) if m["role"] == "user") for messages in asked]
    histories: list[list[dict]] = [[] for _ in batch]
    position = [0] * len(batch)
    open_rows = list(range(len(batch)))
    while open_rows:
        for row in open_rows:
            while True:
                message = asked[row][position[row]]
                histories[row].append(message)
                position[row] += 1
                if message["role"] == "user":
                    break
        still_open = []
        for index, answer in answers([histories[row] for row in open_rows]):
            row = open_rows[index]
            if position[row] > last_user[row]:
                yield batch[row], histories[row], answer
            else:
                histories[row].append({"role": "assistant", "content": answers.text(answer[0])})
                still_open.append(row)
        open_rows = sorted(still_open)


def read_responses(path: Path, *, repair: bool = False) -> list[dict]:
    """Rows of a responses file. A last line that a kill or a full disk cut off does not count, and is cut off if asked."""
    if not path.exists():
        return []
    rows, good = [], 0
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            rows.append(row)
            good += len(line)
    if repair and good < path.stat().st_size:
        os.truncate(path, good)
    return rows


def training_rows(
    responses: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    mask_token_id: int,
    max_length: int,
    template: dict | None = None,
) -> tuple[list[dict], Counter]:
    """
    Token ids with a mask on all answers of each conversation.

    The last answer keeps the very ids that the target chose; earlier ones are read as the target reads them in the
    history of a chat.

    Returns:
        Rows of `id`, `input_ids` and `loss_mask`, and how many were left out for which reason.
    """
    rows, dropped = [], Counter()
    for response in responses:
        ids = chat_ids(tokenizer, response["messages"], **(template or {}))
        mask = [0] * len(ids)
        if any(message["role"] == "assistant" for message in response["messages"]):
            history, history_mask = assistant_mask(tokenizer, response["messages"], **(template or {}))
            shared = next(
                (n for n, pair in enumerate(zip(ids, history, strict=False)) if pair[0] != pair[1]), len(history)
            )
            mask[:shared] = history_mask[:shared]
        answer = response["response"]
        if isinstance(answer, str):
            answer = tokenizer(answer, add_special_tokens=False)["input_ids"]
            if response["ended"]:
                answer = [*answer, tokenizer.eos_token_id]
        row = {"id": response["id"], "input_ids": ids + answer, "loss_mask": mask + [1] * len(answer)}
        reason = unusable(row, mask_token_id=mask_token_id, max_length=max_length)
        if reason is None:
            rows.append(row)
        else:
            dropped[reason] += 1
    return rows, dropped


def _claim(path: Path, settings: dict) -> None:
    if not path.exists():
        path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    different = {key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key)}
    if different:
        said = ", ".join(f"{key}: {before.get(key)!r} there, {settings.get(key)!r} now" for key in sorted(different))
        raise ValueError(f"{path.parent} holds responses made otherwise ({said}): choose another folder or delete it.")


__all__ = ["ServerAnswers", "TargetAnswers", "read_responses", "training_rows", "write_responses"]
