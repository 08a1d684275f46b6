"""Acceptance length and speed of a draft on a file of prompts: with the head, without it, and without a draft.

    python examples/measure_draft.py TARGET --draft examples/smollm2-135m-domino --prompts gsm8k.jsonl --limit 64

Prompts are rows of `turns`, `messages` or text, as for `domino prepare`. Every conversation is decoded greedily in all
ways before the next one. With `--processes N` (CPU only) N processes of one thread share the conversations: τ comes
sooner, and speeds are left out.
"""

import argparse
import json
import multiprocessing
import platform
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers.utils import logging

from modeling_domino import DominoForSpeculativeDraft
from modeling_domino.data import read_conversations
from modeling_domino.evaluation import (
    acceptance_gain,
    acceptance_length,
    decode_alternately,
    decode_conversation,
    mean_acceptance_length,
    speedup,
)
from modeling_domino.loading import load_target
from modeling_domino.packed_linear import pack_linears


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="Hub id, folder or .gguf file")
    parser.add_argument("--draft", required=True, help="Hub id or folder")
    parser.add_argument("--prompts", required=True, help=".jsonl or .parquet file, or a Hub dataset")
    parser.add_argument("--limit", type=int, help="most conversations")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of each turn")
    parser.add_argument("--num-assistant-tokens", type=int, help="K, drafted per round; all by default")
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft")
    parser.add_argument(
        "--pack", action="store_true", help="lay weights out for products of few rows: float32 on a CPU"
    )
    parser.add_argument("--ways", default="plain,head on,head off", help="which of them to decode")
    parser.add_argument("--processes", type=int, default=1, help="above 1: τ alone")
    parser.add_argument("--output", help="JSON file of everything measured")
    return parser.parse_args()


def decode(arguments: argparse.Namespace, part: int) -> dict:
    if arguments.processes > 1:
        torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target, tokenizer = load_target(arguments.target, dtype=arguments.dtype)
    draft = DominoForSpeculativeDraft.from_pretrained(arguments.draft, dtype=target.dtype).to(target.device)
    if arguments.pack:
        pack_linears(target)
        pack_linears(draft.layers)
    k = arguments.num_assistant_tokens or draft.config.max_draft_tokens
    answer = partial(decode_conversation, target, tokenizer, max_new_tokens=arguments.max_new_tokens, do_sample=False)
    ways = {
        "plain": answer,
        "head on": partial(answer, draft=draft, num_assistant_tokens=k),
        "head off": partial(answer, draft=draft, num_assistant_tokens=k, head=False),
    }
    ways = {name: ways[name] for name in arguments.ways.split(",")}
    conversations, _ = read_conversations(arguments.prompts, limit=arguments.limit)
    for way in ways.values():
        way({**conversations[0], "messages": conversations[0]["messages"][:1]}, max_new_tokens=4)  # warm-up
    mine = conversations[part :: arguments.processes]
    results = decode_alternately(mine, ways, partial(tqdm, disable=part > 0))
    return {"k": k, "threads": torch.get_num_threads(), "device": str(target.device), "results": results}


def report(results: dict, k: int, timed: bool) -> list[str]:
    lines = []
    for name in ("head on", "head off"):
        if name in results:
            tau, mean = acceptance_length(results[name]), mean_acceptance_length(results[name])
            rounds = sum(d.rounds for d in results[name])
            lines.append(f"τ {name}: {tau} pooled over {rounds} rounds, {mean:.2f} mean of conversations (K={k})")
    if {"head on", "head off"} <= set(results):
        lines.append(f"τ head on / head off: {acceptance_gain(results['head on'], results['head off'])}")
    if timed:
        for name, decoded in results.items():
            lines.append(
                f"{name}: {sum(d.new_tokens for d in decoded) / sum(d.seconds for d in decoded):.1f} tokens/s"
            )
    if "plain" in results:
        plain = results["plain"]
        for name in set(results) - {"plain"}:
            equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, results[name], strict=True))
            ratio = f", {speedup(results[name], plain)} times its speed" if timed else ""
            lines.append(f"{name} against plain: {equal} of {len(plain)} conversations equal{ratio}")
    return lines


def main() -> None:
    arguments = parse_arguments()
    if arguments.processes > 1:
        with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
            parts = pool.map(partial(decode, arguments), range(arguments.processes))
    else:
        parts = [decode(arguments, 0)]
    results = {name: [d for part in parts for d in part["results"][name]] for name in parts[0]["results"]}
    lines = report(results, parts[0]["k"], timed=len(parts) == 1)
    count = len(next(iter(results.values())))
    print(
        f"{Path(arguments.prompts).name}: {count} conversations, at most {arguments.max_new_tokens} new tokens a turn, "
        f"greedy, {arguments.dtype}{', packed' if arguments.pack else ''}, {parts[0]['threads']} threads x {len(parts)} on {parts[0]['device']} "
        f"({platform.machine()}), torch {torch.__version__}; intervals: 95 %, bootstrap over conversations"
    )
    print("\n".join(lines))
    if arguments.output:
        everything = {**vars(arguments), "k": parts[0]["k"], "report": lines}
        everything["results"] = {name: [asdict(d) for d in decoded] for name, decoded in results.items()}
        Path(arguments.output).write_text(json.dumps(everything, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
