"""Training data written by the target itself: a draft learns to predict this model, not the world."""

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.utils import logging

from .target_domino import BorrowedTarget, Taps


logger = logging.get_logger(__name__)


def chat_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Ids of a user turn under the tokenizer's chat template, ready for the answer; plain ids without a template."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


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
    Lets the target answer prompts greedily.

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
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    ends = target.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    borrowed = BorrowedTarget(target)
    rows, dropped = [], 0
    with tqdm(total=len(prompts), desc="target answers", unit="prompt") as progress:
        for start in range(0, len(encoded), batch_size):
            batch = encoded[start : start + batch_size]
            padded = tokenizer.pad({"input_ids": batch}, padding_side="left", return_tensors="pt").to(target.device)
            width = padded["input_ids"].shape[1]
            with borrowed.tap(target_layer_ids or []) as taps:
                recorder = _TapRecorder(taps)
                outputs = target.generate(
                    **padded,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=pad_id,
                    stopping_criteria=[recorder] if target_layer_ids else None,
                )
            hidden_states = torch.cat(recorder.steps, dim=1) if target_layer_ids else None
            for i, ids in enumerate(batch):
                answer = outputs[i, width:].tolist()
                length = next((n + 1 for n, token in enumerate(answer) if token in ends), len(answer))
                row = {"input_ids": ids + answer[:length], "loss_mask": [0] * len(ids) + [1] * length}
                if length < 2 or mask_token_id in row["input_ids"]:
                    dropped += 1
                    continue
                if target_layer_ids:
                    row["context_hidden_states"] = hidden_states[i, width - len(ids) : width + length - 1].clone()
                rows.append(row)
            progress.update(len(batch))
    if dropped:
        logger.warning(
            f"{dropped} of {len(prompts)} rows were dropped: they contain the mask token {mask_token_id} or an answer "
            "of fewer than two tokens."
        )
    return rows


class _TapRecorder(StoppingCriteria):
    """Runs after each forward pass of generate() and stops nothing: it takes what the taps hold."""

    def __init__(self, taps: Taps):
        self.taps = taps
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.steps.append(self.taps.take())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


__all__ = ["chat_ids", "regenerate"]
