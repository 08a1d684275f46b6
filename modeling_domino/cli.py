"""The `domino` command: parses and calls, nothing else."""

import sys
import time
from typing import Annotated

import typer

from .cli_conversion import convert, validate
from .cli_errors import plain_errors
from .cli_evaluation import app as evaluation_app


app = typer.Typer(no_args_is_help=True, add_completion=False, help="Domino speculative decoding for transformers.")
app.add_typer(evaluation_app, name="evaluate")
app.command()(convert)
app.command()(validate)


@app.command()
def generate(
    target: Annotated[str, typer.Argument(help="Target: Hub id, folder or .gguf file.")],
    draft: Annotated[str, typer.Option(help="Draft: Hub id or folder, our layout or the public one.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="User turn; repeatable. Lines of stdin when absent.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for target and draft.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Torch device; the first accelerator, else the CPU.")] = None,
    num_assistant_tokens: Annotated[int | None, typer.Option(help="Tokens drafted per round; all by default.")] = None,
    pack: Annotated[
        bool, typer.Option(help="Lays the weights out for products of few rows: float32 on a CPU.")
    ] = False,
) -> None:
    """Streams the target's answers, and prints acceptance length and tokens per second."""
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    from .data import chat_ids
    from .loading import load_target
    from .modeling_domino import DominoForSpeculativeDraft
    from .packed_linear import pack_linears

    logging.disable_progress_bar()
    with plain_errors():
        model, tokenizer = load_target(target, dtype=dtype, device=device)
        drafter = DominoForSpeculativeDraft.from_pretrained(draft, dtype=model.dtype).to(model.device)
        if pack:
            pack_linears(model)
            pack_linears(drafter.layers)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        for text in prompt or (line.strip() for line in sys.stdin if line.strip()):
            input_ids = torch.tensor([chat_ids(tokenizer, text)], device=model.device)
            started = time.perf_counter()
            model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                assistant_model=drafter,
                streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                max_new_tokens=max_new_tokens,
                num_assistant_tokens=num_assistant_tokens,
                **sampling,
            )
            seconds = time.perf_counter() - started
            stats = drafter.last_generation
            print(
                f"[τ = {stats.acceptance_length:.2f} tokens per round over {stats.rounds} rounds, bonus token included; "
                f"{stats.new_tokens} tokens, {stats.new_tokens / seconds:.1f} tokens/s with the prompt's pass]\n"
            )


@app.command()
def prepare(
    target: Annotated[str, typer.Argument(help="Target: Hub id, folder or .gguf file.")],
    prompts: Annotated[
        str,
        typer.Option(
            help="A .jsonl, .json or .parquet file, or a Hub dataset: messages, conversations, turns or text."
        ),
    ],
    output: Annotated[str, typer.Option(help="Folder to write; the same command goes on after a kill.")],
    split: Annotated[str, typer.Option(help="Of a Hub dataset.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Most conversations.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 1024,
    max_length: Annotated[
        int | None, typer.Option(min=3, help="Longest row; the target's context by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 answers greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Conversations per generate call.")] = 16,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server that answers, such as http://localhost:30000/v1.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="Name of the target there; its id by default.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 16,
    thinking: Annotated[
        bool | None, typer.Option(help="Sets the chat template's `enable_thinking`; its own default if absent.")
    ] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="The draft's; rows with it are left out.")] = None,
    features: Annotated[
        bool, typer.Option(help="Also cache the hidden states of the layers that the draft taps.")
    ] = False,
    layers: Annotated[
        str | None, typer.Option(help="Tapped layers, such as 1,9,17,25,33; the public formula by default.")
    ] = None,
    draft_layers: Annotated[int, typer.Option(min=1, help="Layers of the draft, for that formula.")] = 5,
    yes: Annotated[bool, typer.Option(help="Writes features without asking.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Torch device; the first accelerator, else the CPU.")] = None,
) -> None:
    """Lets the target answer prompts, and writes the training data of a draft."""
    from .loading import load_outline, load_target
    from .preparation import Preparation
    from .preparation import prepare as run

    with plain_errors():
        if endpoint and not features:
            model, tokenizer = load_outline(target)
        else:
            model, tokenizer = load_target(target, dtype=dtype, device=device)
        asked = Preparation(
            prompts=prompts,
            output=output,
            split=split,
            limit=limit,
            max_new_tokens=max_new_tokens,
            max_length=max_length,
            temperature=temperature,
            seed=seed,
            batch_size=batch_size,
            endpoint=endpoint,
            endpoint_model=endpoint_model,
            concurrency=concurrency,
            template={} if thinking is None else {"enable_thinking": thinking},
            mask_token_id=mask_token_id,
            feature_layers=_layer_ids(layers) if features else [],
            draft_layers=draft_layers,
        )
        folder = run(asked, model, tokenizer, confirm=lambda question: yes or typer.confirm(question))
        print(f"Training data in {folder}; next: domino train CONFIG.yaml --dataset {folder}")


def _layer_ids(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"`--layers` is {text!r}, expected numbers such as 1,9,17,25,33.") from None


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="YAML file: Recipe and DominoTrainingArguments names.")],
    resume: Annotated[bool, typer.Option(help="Goes on from the newest checkpoint in output_dir.")] = False,
) -> None:
    """Trains a draft; `--name value` overrides a line of CONFIG, `--draft.block_size 8` one of its draft."""
    from transformers.trainer_utils import get_last_checkpoint

    from .loading import load_target
    from .recipes import build_trainer, read_recipe

    with plain_errors():
        recipe, arguments = read_recipe(config, context.args)
        target, tokenizer = load_target(recipe.target, dtype=recipe.dtype, device=arguments.device)
        trainer = build_trainer(recipe, arguments, target, tokenizer)
        checkpoint = get_last_checkpoint(arguments.output_dir) if resume else None
        if resume and checkpoint is None:
            raise ValueError(
                f"`--resume`: {arguments.output_dir} has no checkpoint; leave the flag out to start anew."
            )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(arguments.output_dir)
        trainer.save_state()
        # Threads of a process group left alone abort a process that exits at the wrong moment.
        trainer.accelerator.wait_for_everyone()
        trainer.accelerator.end_training()
        use = (
            "generate {} --draft {}"
            if recipe.architecture == "domino"
            else "evaluate run {} --methods eagle --eagle {}"
        )
        print(f"Draft in {arguments.output_dir}; next: domino {use.format(recipe.target, arguments.output_dir)}")


@app.command()
def adapt(
    target: Annotated[str, typer.Argument(help="The new target: Hub id, folder or .gguf file.")],
    draft: Annotated[str, typer.Option(help="Draft made for a target of the same shape.")],
    prompts: Annotated[str, typer.Option(help="File or Hub dataset, as for `domino prepare`.")],
    output: Annotated[str, typer.Option(help="Folder to write; the same command goes on after a kill.")],
    preset: Annotated[str, typer.Option(help="head, head+backbone, all-linear, or full (no LoRA).")] = "head",
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 16,
    alpha: Annotated[int, typer.Option(min=1, help="Its scale is alpha / rank.")] = 32,
    reference: Annotated[
        str | None, typer.Option(help="The draft's own target, to see first whether adapting pays.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Trains even where it hardly pays.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Most prompts.")] = 2000,
    eval_prompts: Annotated[int, typer.Option(min=1, help="Held out to measure on.")] = 32,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    num_anchors: Annotated[int, typer.Option(min=1, help="Most blocks of a row.")] = 64,
    sampled_softmax: Annotated[int | None, typer.Option(help="As in `domino train`: for a CPU.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak.")] = 1e-3,
    lambda_base_start: Annotated[float | None, typer.Option(help="λ at the first step; by preset if absent.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Torch device; the first accelerator, else the CPU.")] = None,
) -> None:
    """Adapts a draft to a fine-tuned target by LoRA; acceptance length before and after."""
    from transformers.utils import logging

    from .adaptation_run import Adaptation
    from .adaptation_run import adapt as run

    logging.disable_progress_bar()
    with plain_errors():
        asked = Adaptation(
            target=target,
            draft=draft,
            prompts=prompts,
            output=output,
            preset=preset,
            rank=rank,
            alpha=alpha,
            reference=reference,
            force=force,
            limit=limit,
            eval_prompts=eval_prompts,
            max_new_tokens=max_new_tokens,
            steps=steps,
            batch_size=batch_size,
            num_anchors=num_anchors,
            sampled_softmax=sampled_softmax,
            learning_rate=learning_rate,
            lambda_base_start=lambda_base_start,
            seed=seed,
            dtype=dtype,
            device=device,
        )
        run(asked, say=print)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
