"""What generate() gains from a draft on this machine: plain, transformers' assisted loop and ours, batches, the parts.

    python examples/benchmark_generate.py TARGET                                   # the shipped draft, bfloat16
    python examples/benchmark_generate.py TARGET --draft DRAFT --dtype float32 --batches 1 4 8 --long 4096
    python examples/benchmark_generate.py --smoke                                  # every step on tiny random models

All ways decode the same prompts in turns in one process; ratios are of tokens per second, with 95 % intervals of a
bootstrap over the batches of prompts. The bound is what no loop can exceed at batch 1: τ · T1 / (T_draft + T_verify), all
of the same run; glue is what lies between those parts. With `--long` the cost of a round is shown against the text's length.
"""

import argparse
import json
import statistics
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from modeling_domino import DominoConfig, DominoForSpeculativeDraft
from modeling_domino.data import chat_ids
from modeling_domino.evaluation_profile import account, profile_rounds
from modeling_domino.loading import load_target
from modeling_domino.measures import estimate


PROMPTS = Path(__file__).with_name("quickstart_prompts.json")
SHIPPED = Path(__file__).with_name("smollm2-135m-domino")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?", help="Hub id, folder or .gguf file")
    parser.add_argument("--draft", default=str(SHIPPED))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", help="the first accelerator, else the CPU, when absent")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8], help="rows of a call")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128, help="of every row, past any end token")
    parser.add_argument("--pool", type=int, default=256, help="`candidate_pool` of the ways with one")
    parser.add_argument("--long", type=int, default=0, help="new tokens of one long call; none when 0")
    parser.add_argument("--smoke", action="store_true", help="tiny random models and tiny numbers")
    options = parser.parse_args()
    if options.smoke:
        options.prompts, options.new_tokens, options.batches, options.pool, options.long = 4, 12, [1, 2], 8, 64
    elif options.target is None:
        parser.error("name a target, or pass --smoke")
    return options


def load(options: argparse.Namespace):
    if not options.smoke:
        target, tokenizer = load_target(options.target, dtype=options.dtype, device=options.device)
        draft = DominoForSpeculativeDraft.from_pretrained(options.draft, dtype=options.dtype).eval()
        return target, tokenizer, draft.to(target.device)
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "vocab_size": len(tokenizer) + 2}
    target = LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_hidden_layers=3, max_position_embeddings=4096)).eval()
    config = DominoConfig.from_target(
        target.config,
        mask_token_id=len(tokenizer) + 1,
        block_size=4,
        num_hidden_layers=1,
        gru_hidden_dim=16,
        emb_dim=8,
    )
    return target, tokenizer, DominoForSpeculativeDraft(config).eval()


def byte_tokenizer():
    """A token for each byte, and a chat template that shows the messages alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<pad>", *alphabet])}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", chat_template=template)


def batches(tokenizer, prompts: list[str], rows: int, device) -> list[dict]:
    """Prompts padded on the left, `rows` at a time."""
    ids = [chat_ids(tokenizer, prompt) for prompt in prompts]
    made = []
    for first in range(0, len(ids) - rows + 1, rows):
        group = ids[first : first + rows]
        longest = max(map(len, group))
        padded = torch.tensor([[0] * (longest - len(row)) + row for row in group], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in group], device=device)
        made.append({"inputs": padded, "attention_mask": mask})
    return made


@contextmanager
def decoding(draft, **chosen):
    """`draft.decoding` with these options."""
    before = vars(draft.decoding).copy()
    vars(draft.decoding).update(chosen)
    try:
        yield
    finally:
        vars(draft.decoding).update(before)


def ways(rows: int, pool: int) -> dict[str, dict | None]:
    """Options of `draft.decoding` by name; None decodes without a draft."""
    whole = {"path": "loop", "adaptive_length": False, "candidate_pool": 0}
    named: dict[str, dict | None] = {"plain generate": None}
    if rows == 1:
        named["transformers' assisted loop"] = {**whole, "path": "assisted"}
    named["our loop, whole blocks"] = whole
    named["our loop, adaptive length"] = {**whole, "adaptive_length": True}
    named[f"our loop, adaptive length, pool of {pool}"] = {**whole, "adaptive_length": True, "candidate_pool": pool}
    return named


def decode(target, draft, chosen: dict | None, options: dict) -> float:
    """Seconds of one call."""
    assistant = {} if chosen is None else {"assistant_model": draft}
    with decoding(draft, **(chosen or {})):
        started = time.perf_counter()
        target.generate(**assistant, **options)
        if target.device.type != "cpu":
            torch.accelerator.synchronize(target.device)
        return time.perf_counter() - started


def compare(target, draft, prompts: list[dict], rows: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Prints the ratios at one batch size; returns the seconds of every call by way."""
    named = ways(rows, options.pool)
    call = {"max_new_tokens": options.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    seconds: dict[str, list[float]] = {name: [] for name in named}
    taus: dict[str, list[float]] = {name: [] for name in named}
    lengths: dict[str, list[float]] = {name: [] for name in named}
    for turn, prompt in enumerate([prompts[0], *prompts]):  # the first is a warm-up
        order = list(named)[turn % len(named) :] + list(named)[: turn % len(named)]
        for name in order:
            elapsed = decode(target, draft, named[name], {**prompt, **call})
            if turn:
                seconds[name].append(elapsed)
                if named[name] is not None:
                    taus[name].append(draft.last_generation.acceptance_length)
                    lengths[name].append(draft.last_generation.drafted / draft.last_generation.rounds)
    print(f"\n{rows} rows, {len(prompts)} calls of {options.new_tokens} new tokens a row:")
    tokens = [float(rows * options.new_tokens)] * len(prompts)
    for name, own in seconds.items():
        ratio = estimate(tokens, own, tokens, seconds["plain generate"])
        rate = sum(tokens) / sum(own)
        more = f"  τ {statistics.mean(taus[name]):.2f}, K {statistics.mean(lengths[name]):.1f}" if taus[name] else ""
        print(f"  {name:44} {rate:8.1f} tokens/s  {ratio} times plain{more}")
    return seconds


def parts(target, tokenizer, draft, prompts: list[str], options: argparse.Namespace) -> None:
    """Prints where a round's time goes in both loops, and the bound."""
    conversations = [
        {"id": str(i), "messages": [{"role": "user", "content": prompt}]} for i, prompt in enumerate(prompts)
    ]
    call = {"max_new_tokens": options.new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for path in ("assisted", "loop"):
        with decoding(draft, path=path, adaptive_length=False, candidate_pool=0):
            profile = profile_rounds(target, tokenizer, draft, conversations, **call)
        milliseconds = profile["milliseconds"]
        work = sum(time for name, time in milliseconds.items() if name != "glue")
        bound = profile["tau"] * profile["target_ms"] / work
        print(
            f"\n{path}: {account(profile)}\nBound (no glue): {bound:.2f} times plain; glue {milliseconds['glue']:.2f} ms"
        )


def show_long(target, draft, prompt: dict, tokens: int) -> None:
    """Prints the cost of a round against the length of the text."""
    call = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for path in ("assisted", "loop"):
        decode(target, draft, {"path": path, "adaptive_length": False}, {**prompt, **call})
        stats = draft.last_generation
        rounds = [a + b for a, b in zip(stats.draft_seconds, stats.verify_seconds, strict=True)]
        eighth = max(len(rounds) // 8, 1)
        medians = [statistics.median(rounds[i : i + eighth]) for i in range(0, len(rounds) - eighth + 1, eighth)]
        print(f"{path}: ms of a round in eighths of {tokens} tokens: " + " ".join(f"{1000 * m:.1f}" for m in medians))


def main() -> None:
    options = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, tokenizer, draft = load(options)
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))["evaluation"]
    prompts = [prompt for row in zip(*texts.values(), strict=False) for prompt in row][: options.prompts]
    print(
        f"{options.dtype}, {torch.get_num_threads()} threads on {target.device}, torch {torch.__version__}, K at most "
        f"{draft.config.max_draft_tokens}"
    )
    for rows in options.batches:
        compare(target, draft, batches(tokenizer, prompts, rows, target.device), rows, options)
    parts(target, tokenizer, draft, prompts[: max(options.prompts // 2, 1)], options)
    if options.long:
        show_long(target, draft, batches(tokenizer, prompts, 1, target.device)[0], options.long)


if __name__ == "__main__":
    main()
