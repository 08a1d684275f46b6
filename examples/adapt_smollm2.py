"""What adapting a draft to a fine-tuned target brings: a grid of targets and ways, each cell with the same training time.

    python examples/adapt_smollm2.py TARGET --draft examples/smollm2-135m-domino --output outputs/adaptation
    python examples/adapt_smollm2.py ... --other GEMMA.gguf      # and a target of another width and vocabulary
    python examples/adapt_smollm2.py ... --smoke                 # every step with tiny numbers

TARGET (SmolLM2-135M-Instruct) is first tuned on manual pages, German ones ("far") and English ones ("close"), by LoRA that
is merged into its weights. For each tuned target the draft then decodes held-out prompts as it is, with its head adapted,
with head and backbone adapted, trained on in full, and against a fresh draft. Run anew after a stop, it goes on with the
cell that was not finished. OUTPUT gets a folder for each target, results.json and table.md.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import datasets
import torch
from manual_pages import chats
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from modeling_domino import DominoConfig, DominoForSpeculativeDraft
from modeling_domino.adaptation_run import Adaptation, train_adapter
from modeling_domino.conversion import convert
from modeling_domino.data import assistant_mask
from modeling_domino.evaluation_methods import decode_conversation
from modeling_domino.features import RowsWithFeatures
from modeling_domino.loading import load_target
from modeling_domino.measures import Decoded, acceptance_gain, acceptance_length
from modeling_domino.packed_linear import pack_linears
from modeling_domino.preparation import Preparation, prepare
from modeling_domino.warm_start import start_from_target


# Ways and their peak learning rates, which were not tuned.
WAYS = {"as it is": None, "head": 2e-3, "head+backbone": 1e-3, "full": 5e-4, "from scratch": 2.5e-3}
FIRST_LAYERS = (1, 29)  # of SmolLM2's that a fresh draft's layers start from, as those of the shipped draft did
PROBE = 4  # steps that are timed before a cell, to know how many fill its minutes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="SmolLM2-135M-Instruct: Hub id, folder or .gguf file")
    parser.add_argument("--draft", required=True, help="folder of the draft made for it")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--other", help="a target of another shape, which the draft is re-fitted to")
    parser.add_argument("--targets", default="far,close", help="tuned targets to make")
    parser.add_argument("--minutes", type=float, default=10, help="of training, each cell")
    parser.add_argument("--tuning-steps", type=int, default=40, help="of 16 chats, for each tuned target")
    parser.add_argument("--prompts", type=int, default=400, help="that the target answers for training")
    parser.add_argument("--eval-prompts", type=int, default=32, help="held out")
    parser.add_argument("--new-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny numbers")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.minutes, arguments.tuning_steps, arguments.new_tokens = 0.05, 1, 8
        arguments.prompts, arguments.eval_prompts = 4, 2
    return arguments


def once(path: Path, make) -> dict:
    """What `make` gives, kept in a file so that it is made once."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, ensure_ascii=False) + "\n", encoding="utf-8")
    return made


def tune(name: str, rows: list[dict], folder: Path, arguments: argparse.Namespace) -> None:
    """A new target: LoRA on every linear layer, the loss on answers alone, merged into the weights."""
    target, tokenizer = load_target(name, dtype=torch.float32)
    set_seed(arguments.seed)
    model = get_peft_model(target, LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"))

    def features(row: dict) -> dict:
        ids, mask = assistant_mask(tokenizer, row["messages"])
        return {"input_ids": ids, "labels": [i if m else -100 for i, m in zip(ids, mask, strict=True)]}

    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder / "checkpoints"),
            max_steps=arguments.tuning_steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            lr_scheduler_type="linear",
            warmup_steps=0.1,
            save_steps=max(1, arguments.tuning_steps // 6),
            save_total_limit=1,
            logging_steps=max(1, arguments.tuning_steps // 6),
            report_to=[],
            seed=arguments.seed,
            train_sampling_strategy="group_by_length",
        ),
        train_dataset=[features(row) for row in rows],
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(trainer.args.output_dir))
    model.merge_and_unload().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")


def write_prompts(rows: list[dict], path: Path) -> None:
    prompts = ({"id": row["id"], "messages": row["messages"][:1]} for row in rows)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts), encoding="utf-8")


def answers(folder: Path, rows: list[dict], target, tokenizer, config: DominoConfig, arguments) -> RowsWithFeatures:
    """What the target answers, with the hidden states that the draft taps."""
    folder.mkdir(parents=True, exist_ok=True)
    write_prompts(rows, folder / "prompts.jsonl")
    done = prepare(
        Preparation(
            prompts=str(folder / "prompts.jsonl"),
            output=str(folder / "data"),
            max_new_tokens=arguments.new_tokens,
            mask_token_id=config.mask_token_id,
            feature_layers=list(config.target_layer_ids),
            seed=arguments.seed,
        ),
        target,
        tokenizer,
    )
    return RowsWithFeatures(
        datasets.load_from_disk(str(done / "dataset")), done / "features", target, config.target_layer_ids
    )


def fresh(config: DominoConfig, target, layers: tuple[int, ...] | None, seed: int) -> DominoForSpeculativeDraft:
    set_seed(seed)
    draft = DominoForSpeculativeDraft(config)
    if layers:
        start_from_target(draft, target, list(layers))
    return draft


def train(way: str, make, folder: Path, rows, target, arguments: argparse.Namespace) -> tuple:
    """A draft from `make`, trained in one way for the minutes of a cell; how long it took and how many steps."""
    asked = partial(
        Adaptation,
        target="",
        draft="",
        prompts="",
        preset=way if way in ("head", "head+backbone") else "full",
        batch_size=12,
        num_anchors=12,
        sampled_softmax=2048,
        learning_rate=WAYS[way],
        lambda_base_start=1.0 if way == "from scratch" else None,
        seed=arguments.seed,
    )

    def seconds_per_step() -> dict:
        started = time.perf_counter()
        train_adapter(asked(output=str(folder / "probe"), steps=PROBE), make(), target, rows)
        return {"seconds": (time.perf_counter() - started) / PROBE}

    seconds = once(folder / "probe.json", seconds_per_step)["seconds"]
    steps = max(1, round(60 * arguments.minutes / seconds))
    started = time.perf_counter()
    model = train_adapter(asked(output=str(folder / "trained"), steps=steps), make(), target, rows)
    return model, {"steps": steps, "minutes": (time.perf_counter() - started) / 60}


def decode(target, tokenizer, draft, rows: list[dict], arguments: argparse.Namespace) -> list[Decoded]:
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    conversations = [{"id": row["id"], "messages": row["messages"][:1]} for row in rows]
    return [decode_conversation(target, tokenizer, row, draft, **options) for row in conversations]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def cells(name: str, folder: Path, drafts: dict, held_out: list[dict], taught: list[dict], arguments) -> dict:
    """
    One row of the grid.

    Args:
        name: Of the target: Hub id, folder or .gguf file.
        folder: To write.
        drafts: For each way, what makes the draft that it starts from, given the target.
        held_out, taught: Chats that are measured and trained on.
    """
    target, tokenizer = load_target(name, dtype=torch.float32)
    quick, _ = load_target(name, dtype=torch.float32)  # packed weights are for decoding alone
    pack_linears(quick)
    results = {}
    for way, make in drafts.items():
        place = folder / way.replace(" ", "-")

        def cell(way=way, make=make, place=place) -> dict:
            make_draft = partial(make, target)
            if WAYS[way] is None:
                draft, spent = make_draft(), {"steps": 0, "minutes": 0.0}
            else:
                config = make_draft().config
                rows = answers(folder, taught, target, tokenizer, config, arguments)
                draft, spent = train(way, make_draft, place, rows, target, arguments)
            draft.eval()
            decoded = decode(quick, tokenizer, draft, held_out, arguments)
            return {**spent, "bytes": size(place / "trained"), "gained": {row.id: row.gained for row in decoded}}

        results[way] = once(place / "cell.json", cell)
        decoded = decoded_of(results[way])
        print(f"{folder.name}, {way}: τ {acceptance_length(decoded)} after {results[way]['steps']} steps", flush=True)
    return results


def decoded_of(cell: dict) -> list[Decoded]:
    return [Decoded(name, [], 0.0, gained) for name, gained in cell["gained"].items()]


def table(results: dict) -> str:
    lines = ["| target | draft | τ | times as it is | steps | MB |", "|---|---|---|---|---|---|"]
    for target, row in results.items():
        first = decoded_of(next(iter(row.values())))
        for way, cell in row.items():
            decoded = decoded_of(cell)
            gain = acceptance_gain(decoded, first)
            megabytes = f"{cell['bytes'] / 1e6:.1f}" if cell["steps"] else ""
            lines.append(
                f"| {target} | {way} | {acceptance_length(decoded)} | {gain} | {cell['steps'] or ''} | {megabytes} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    arguments = parse_arguments()
    output = Path(arguments.output)
    load = partial(DominoForSpeculativeDraft.from_pretrained, arguments.draft, dtype=torch.float32)
    config = load().config
    held, taught = arguments.eval_prompts, arguments.prompts
    results = {}
    for kind in filter(None, arguments.targets.split(",")):
        folder = output / kind
        rows = once(folder / "chats.json", partial(chats, kind, seed=arguments.seed))
        tuned = rows[held + taught :][: 16 * arguments.tuning_steps]
        if not (folder / "target" / "tokenizer_config.json").exists():
            tune(arguments.target, tuned, folder, arguments)
        drafts = dict.fromkeys(WAYS, lambda target: load())
        drafts["from scratch"] = lambda target: fresh(config, target, FIRST_LAYERS, arguments.seed)
        results[kind] = cells(
            str(folder / "target"), folder, drafts, rows[:held], rows[held : held + taught], arguments
        )
    if arguments.other:
        folder, place = output / "other", output / "other" / "refitted"
        rows = once(folder / "chats.json", partial(chats, "close", seed=arguments.seed))
        if not place.exists():
            notes = convert(
                arguments.draft,
                place,
                to="domino",
                target=arguments.other,
                old_target=arguments.target,
                dtype="float32",
            )
            print("\n".join(notes))
        refitted = partial(DominoForSpeculativeDraft.from_pretrained, place, dtype=torch.float32)
        drafts = {
            "as it is": lambda target: refitted(),
            "full": lambda target: refitted(),
            "from scratch": lambda target: fresh(refitted().config, target, None, arguments.seed),
        }
        results["other"] = cells(arguments.other, folder, drafts, rows[:held], rows[held : held + taught], arguments)
    (output / "results.json").write_text(json.dumps(results, ensure_ascii=False) + "\n", encoding="utf-8")
    (output / "table.md").write_text(table(results), encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
