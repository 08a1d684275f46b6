"""The `domino` command: parses and calls, nothing else."""

import sys
import time
from contextlib import contextmanager
from typing import Annotated

import typer


app = typer.Typer(no_args_is_help=True, add_completion=False, help="Domino speculative decoding for transformers.")


@app.callback()
def commands() -> None:
    """Keeps subcommands named while there is only one."""


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
) -> None:
    """Streams the target's answers, and prints acceptance length and tokens per second."""
    import torch
    from transformers import TextStreamer
    from transformers.utils import logging

    from .data import chat_ids
    from .loading import load_target
    from .modeling_domino import DominoForSpeculativeDraft

    logging.disable_progress_bar()
    with _plain_errors():
        model, tokenizer = load_target(target, dtype=dtype, device=device)
        drafter = DominoForSpeculativeDraft.from_pretrained(draft, dtype=model.dtype).to(model.device)
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


@contextmanager
def _plain_errors():
    """One sentence and exit code 2 for what a user can mend; a traceback only for what is our fault."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"domino: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
