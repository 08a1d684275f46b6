"""`domino adapt`: a draft for a fine-tuned target, by LoRA, measured before and after.

OUTPUT/data/          what the new target answers (`domino prepare`)
OUTPUT/checkpoint-*/  of the training, which the same command goes on with
OUTPUT/               the adapter, results.json and a card
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import datasets
from peft import get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import get_last_checkpoint

from .adaptation import PRESETS, lora_config
from .data import read_conversations
from .evaluation_methods import decode_conversation
from .loading import load_target
from .measures import Decoded, Estimate, acceptance_gain, acceptance_length
from .modeling_domino import DominoForSpeculativeDraft
from .preparation import Preparation, prepare
from .speculation_domino import check_fit
from .target_domino import BorrowedTarget
from .training import DominoTrainer
from .training_arguments import DominoTrainingArguments


# Below this share of τ lost on the new target there is nothing that pays for an adapter.
WORTH_IT = 0.03


@dataclass
class Adaptation:
    """
    What `domino adapt` is asked for.

    Args:
        target: The new target: Hub id, folder or .gguf file.
        draft: Made for a target of the same shape.
        prompts: See `read_conversations`; the first `eval_prompts` are measured on, the rest trained on.
        output: Folder to write.
        preset: See `lora_config`; "full" trains every weight of the draft instead.
        rank, alpha: Of the adapter.
        reference: The draft's own target: τ on it says what the new target has lost.
        force: Trains even where that is too little to pay.
        limit: Most prompts.
        eval_prompts: Held out.
        max_new_tokens: Longest answer, in training and in measuring.
        steps: Optimizer steps.
        batch_size: Rows of a step.
        num_anchors, sampled_softmax, loss_decay_gamma: See `DominoTrainingArguments`.
        learning_rate: Peak, after a tenth of the steps; then linear to 0.
        lambda_base_start: λ at the first step. A trained draft has its base logits already, so little or nothing is
            held back for them; None takes 0 for the preset "head", which cannot move them, and 0.2 for others.
        seed: Of everything.
        dtype, device: Of the target; the draft trains in float32.
    """

    target: str
    draft: str
    prompts: str
    output: str
    preset: str = "head"
    rank: int = 16
    alpha: int = 32
    reference: str | None = None
    force: bool = False
    limit: int | None = 2000
    eval_prompts: int = 32
    max_new_tokens: int = 128
    steps: int = 200
    batch_size: int = 8
    num_anchors: int = 64
    sampled_softmax: int | None = None
    loss_decay_gamma: float = 4.0
    learning_rate: float = 1e-3
    lambda_base_start: float | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None

    def __post_init__(self):
        if self.preset not in (*PRESETS, "full"):
            raise ValueError(f"`{self.preset}` is no preset, expected one of {', '.join(PRESETS)}, full.")
        if self.lambda_base_start is None:
            self.lambda_base_start = 0.0 if self.preset == "head" else 0.2


def adapt(asked: Adaptation, say: Callable[[str], None] = lambda text: None) -> dict:
    """
    Measures, trains, measures again; run anew after a kill, it goes on where it stopped.

    Args:
        asked: What to do.
        say: Gets a line at each step.

    Returns:
        `results.json`: what was asked, and τ of each stage with its interval.

    Raises:
        ValueError: Too few prompts, or a draft for a target of another shape.
    """
    output = Path(asked.output)
    conversations, _ = read_conversations(asked.prompts, limit=asked.limit)
    if len(conversations) <= asked.eval_prompts:
        raise ValueError(
            f"{asked.prompts} has {len(conversations)} prompts, of which {asked.eval_prompts} would be held out to "
            "measure on: give more prompts, or lower `eval_prompts`."
        )
    held_out, taught = conversations[: asked.eval_prompts], conversations[asked.eval_prompts :]
    output.mkdir(parents=True, exist_ok=True)
    target, tokenizer = load_target(asked.target, dtype=asked.dtype, device=asked.device)
    draft = DominoForSpeculativeDraft.from_pretrained(asked.draft, dtype="float32").to(target.device)
    check_fit(draft.config, target, BorrowedTarget(target), target.generation_config)
    results: dict = {"asked": asdict(asked), "prompts": len(taught), "tau": {}}
    measure = partial(_measured, draft=draft, conversations=held_out, asked=asked)

    before = measure(target, tokenizer)
    results["tau"]["unadapted"] = acceptance_length(before)
    say(f"τ of the draft as it is: {results['tau']['unadapted']} ({asked.eval_prompts} prompts held out)")
    if asked.reference:
        own, own_tokenizer = load_target(asked.reference, dtype=asked.dtype, device=asked.device)
        at_home = measure(own, own_tokenizer)
        del own
        kept = acceptance_gain(before, at_home)
        results["tau"]["on its own target"], results["kept"] = acceptance_length(at_home), kept
        say(f"On its own target it reaches {results['tau']['on its own target']}: {kept} of that is kept.")
        if kept.value > 1 - WORTH_IT and not asked.force:
            say(
                "That is too little to gain for an adapter to pay: nothing was trained (`--force` trains all the same)."
            )
            return _written(output, results)

    prompts = output / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in taught), encoding="utf-8")
    say(f"{Path(asked.target).name} answers {len(taught)} prompts.")
    folder = prepare(
        Preparation(
            prompts=str(prompts),
            output=str(output / "data"),
            max_new_tokens=asked.max_new_tokens,
            mask_token_id=draft.config.mask_token_id,
            seed=asked.seed,
        ),
        target,
        tokenizer,
    )
    rows = datasets.load_from_disk(str(folder / "dataset"))
    say(f"Training ({asked.preset}) on {len(rows)} answers.")
    train_adapter(asked, draft, target, rows)
    after = measure(target, tokenizer)
    results["tau"]["adapted"] = acceptance_length(after)
    results["gain"] = acceptance_gain(after, before)
    say(f"τ adapted: {results['tau']['adapted']}, {results['gain']} times that of before; in {output}")
    _written(output, results)
    (output / "README.md").write_text(_card(results), encoding="utf-8")
    return results


def train_adapter(asked: Adaptation, draft, target: PreTrainedModel, rows, **options):
    """
    Trains an adapter on a draft (or all of it, for the preset "full"), and goes on from a checkpoint in `asked.output`.

    Args:
        asked: Preset and numbers.
        draft: Gets the adapter in place.
        target: Whose answers `rows` are.
        rows: See `BlockCollator`.
        options: Of `DominoTrainer`.

    Returns:
        The `PeftModel`, or the draft.
    """
    model = draft
    if asked.preset != "full":
        model = get_peft_model(draft, lora_config(asked.preset, r=asked.rank, lora_alpha=asked.alpha))
    arguments = DominoTrainingArguments(
        output_dir=asked.output,
        max_steps=asked.steps,
        per_device_train_batch_size=asked.batch_size,
        num_anchors=asked.num_anchors,
        sampled_softmax=asked.sampled_softmax,
        loss_decay_gamma=asked.loss_decay_gamma,
        learning_rate=asked.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=0.1,
        lambda_base_start=asked.lambda_base_start,
        seed=asked.seed,
        save_steps=max(1, asked.steps // 4),
        save_total_limit=1,
        logging_steps=max(1, asked.steps // 20),
        report_to=[],
        use_cpu=target.device.type == "cpu",
        dataloader_pin_memory=target.device.type != "cpu",
    )
    trainer = DominoTrainer(model, target, arguments, train_dataset=rows, **options)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(asked.output))
    trainer.save_model()
    draft.eval()
    return model


def _measured(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft,
    conversations: list[dict],
    asked: Adaptation,
) -> list[Decoded]:
    draft.eval()
    options = {"max_new_tokens": asked.max_new_tokens, "do_sample": False}
    return [decode_conversation(target, tokenizer, conversation, draft, **options) for conversation in conversations]


def _written(output: Path, results: dict) -> dict:
    (output / "results.json").write_text(json.dumps(results, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return results


def _card(results: dict) -> str:
    asked = results["asked"]
    adapter = asked["preset"] != "full"
    head = ["---", f"base_model: {asked['draft']}", *(["library_name: peft"] if adapter else [])]
    lines = [
        *head,
        "tags: [domino, speculative-decoding]",
        "---",
        f"# Domino draft for {Path(asked['target']).name}",
        "",
        f"`{asked['draft']}` adapted to `{asked['target']}` "
        + (f"by LoRA (`{asked['preset']}`, rank {asked['rank']})" if adapter else "in full")
        + f" on its answers to {results['prompts']} prompts, {asked['steps']} steps of {asked['batch_size']} rows, "
        f"λ from {asked['lambda_base_start']} to 0.",
        "",
        f"Acceptance length τ, pooled over rounds, bonus token included, greedy, {asked['eval_prompts']} prompts held out, "
        f"at most {asked['max_new_tokens']} new tokens; 95 % intervals:",
        "",
        "| | τ |",
        "|---|---|",
        *(f"| {name} | {Estimate(*value)} |" for name, value in results["tau"].items()),
        "",
    ]
    if adapter:
        lines += [
            "```python",
            "from modeling_domino import DominoForSpeculativeDraft",
            "from modeling_domino.adaptation import load_adapter",
            "",
            f'draft = load_adapter(DominoForSpeculativeDraft.from_pretrained("{asked["draft"]}"), "this folder")',
            "target.generate(**inputs, assistant_model=draft)",
            "```",
            "",
        ]
    return "\n".join(lines)


__all__ = ["Adaptation", "adapt", "train_adapter"]
