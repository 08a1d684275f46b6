"""Every kind of stop at every place of a block, for blocks of one to eight tokens."""

import functools

import pytest
import torch
from conftest import MASK, make_rigged, make_target, make_tokenizer
from support import Listener, StopAt


NEW = 14
PROMPT = 6
KINDS = ["eos", "criterion", "stop string", "length"]


@functools.cache
def plain() -> tuple[torch.nn.Module, torch.Tensor, list[int]]:
    """A target, a prompt and its text of 14 tokens, the first 12 of them distinct."""
    target = make_target("qwen2", seed=9)
    torch.manual_seed(226)
    prompt = torch.randint(3, MASK, (1, PROMPT))
    text = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    assert len(set(text[0, PROMPT : PROMPT + 12].tolist())) == 12
    return target, prompt, text[0].tolist()


def stop_after(kind: str, text: list[int], tokens: int) -> dict:
    """Arguments that end the text after so many new tokens."""
    last = text[PROMPT + tokens - 1]
    if kind == "eos":
        return {"eos_token_id": last}
    if kind == "criterion":
        return {"stopping_criteria": [StopAt(last)]}
    if kind == "stop string":
        tokenizer = make_tokenizer()
        return {
            "stop_strings": [tokenizer.decode(text[PROMPT + tokens - 2 : PROMPT + tokens])],
            "tokenizer": tokenizer,
        }
    return {"max_new_tokens": tokens}


def sweep(kind: str, block: int, right: int, shift_label: bool) -> None:
    target, prompt, text = plain()
    draft = make_rigged(
        target,
        torch.tensor(text),
        right,
        block_size=block if shift_label else block + 1,
        shift_label=shift_label,
        pure_draft_prefix_len=0,
    )
    for tokens in range(1, 13):
        heard = Listener()
        call = {"max_new_tokens": NEW, "do_sample": False, "streamer": heard, **stop_after(kind, text, tokens)}
        output = target.generate(prompt, assistant_model=draft, **call)[0].tolist()
        assert output == text[: PROMPT + tokens], (kind, tokens)
        assert heard.tokens == output and heard.ends == 1
        assert draft.last_generation.rounds == -(-(tokens - 1) // (min(right, block) + 1)), (kind, tokens)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block, right", [*((block, block) for block in range(1, 9)), (5, 0), (5, 2), (4, 0), (4, 2)])
def test_stops_inside_blocks(kind, block, right):
    sweep(kind, block, right, shift_label=block % 2 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", range(1, 9))
def test_stops_inside_blocks_with_any_number_of_right_tokens(kind, block, shift_label):
    for right in range(block + 1):
        sweep(kind, block, right, shift_label)
