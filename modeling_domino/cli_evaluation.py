"""`domino evaluate ...`: parses and calls, nothing else."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_errors import plain_errors


app = typer.Typer(no_args_is_help=True, help="Measures drafts: acceptance length and speed, with intervals.")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@app.command()
def run(
    target: Annotated[str, typer.Argument(help="Target: Hub id, folder or .gguf file.")],
    output: Annotated[str, typer.Option(help="Folder of the results; the same command goes on after a stop.")],
    draft: Annotated[str | None, typer.Option(help="Domino draft: Hub id or folder.")] = None,
    sets: Annotated[str, typer.Option(help="Evaluation sets.")] = "gsm8k,humaneval,mt-bench",
    data: Annotated[str | None, typer.Option(help="Folder of NAME.jsonl files; the Hub when absent.")] = None,
    methods: Annotated[
        str,
        typer.Option(help="Of plain, compiled, domino, head-off, prompt-lookup, assistant, dflash, eagle."),
    ] = "plain,domino,head-off",
    max_samples: Annotated[int, typer.Option(min=1, help="Most conversations of a set, from its start.")] = 128,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.")] = 512,
    num_assistant_tokens: Annotated[
        int | None, typer.Option(min=1, help="K, drafted per round; all by default.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16, for all models.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Torch device; the first accelerator, else the CPU.")] = None,
    pack: Annotated[bool, typer.Option(help="Lays weights out once for decoding: float32 on a CPU.")] = False,
    thinking: Annotated[bool | None, typer.Option(help="Sets the chat template's `enable_thinking`.")] = None,
    assistant: Annotated[str | None, typer.Option(help="Small causal model, for the method assistant.")] = None,
    dflash: Annotated[str | None, typer.Option(help="DFlash draft, for the method dflash.")] = None,
    eagle: Annotated[str | None, typer.Option(help="EAGLE-3-style draft, for the method eagle.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Ends after so many, with what is decoded by then.")] = None,
    profile: Annotated[int, typer.Option(min=0, help="Conversations for an account of a round's time.")] = 0,
    readme: Annotated[str | None, typer.Option(help="Markdown file whose marked block gets the table.")] = None,
) -> None:
    """Decodes evaluation sets in several ways, in turns; writes results, table and figures."""
    from transformers.utils import logging

    from .evaluation import Evaluation, evaluate

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with plain_errors():
        asked = Evaluation(
            target=target,
            draft=draft,
            sets=_names(sets),
            methods=_names(methods),
            data=data,
            max_samples=max_samples,
            max_new_tokens=max_new_tokens,
            num_assistant_tokens=num_assistant_tokens,
            temperature=temperature,
            seed=seed,
            dtype=dtype,
            device=device,
            pack=pack,
            thinking=thinking,
            assistant=assistant,
            dflash=dflash,
            eagle=eagle,
        )
        try:
            evaluate(asked, output, minutes=minutes, profile=profile)
        except KeyboardInterrupt:
            print(f"\nStopped; what is decoded is kept in {output}, and the same command goes on with it.")
            raise typer.Exit(130) from None
    report(output, readme=readme)


@app.command()
def report(
    results: Annotated[
        str, typer.Argument(help="Folder or results.json of `domino evaluate run`, or a folder of such folders.")
    ],
    readme: Annotated[
        str | None, typer.Option(help="Markdown file with `<!-- evaluation: NAME -->` marks, NAME the folder's name.")
    ] = None,
    suffix: Annotated[str, typer.Option(help=".png or .svg.")] = ".png",
) -> None:
    """Writes table and figures of a finished evaluation anew, from its results alone; of several runs one table."""
    from .evaluation_plots import draw
    from .evaluation_profile import account
    from .evaluation_report import markdown_table, read_runs, write_block

    with plain_errors():
        runs = read_runs(results)
        folder = Path(results) if Path(results).is_dir() else Path(results).parent
        table = markdown_table(runs)
        (folder / "table.md").write_text(table, encoding="utf-8")
        print(table)
        if "" in runs:  # a single one
            if runs[""]["profile"]:
                print(account(runs[""]["profile"]))
            for path in draw(runs[""], folder, suffix):
                print(path)
        if readme:
            write_block(readme, folder.resolve().name, table)


@app.command()
def compare(
    one: Annotated[str, typer.Argument(help="Folder or results.json.")],
    other: Annotated[str, typer.Argument(help="Another one.")],
    method: Annotated[str, typer.Option(help="Compared in both.")] = "domino",
    other_method: Annotated[str | None, typer.Option(help="Of the second, if another.")] = None,
) -> None:
    """Says which of two evaluations is better, and whether the interval of their ratio excludes 1."""
    from .evaluation_report import compare as judge
    from .evaluation_report import read_results

    with plain_errors():
        print("\n".join(judge(read_results(one), read_results(other), method, other_method)))


@app.command()
def serve(
    endpoint: Annotated[
        list[str], typer.Option(help="OpenAI-compatible server, such as http://localhost:30000/v1; repeatable.")
    ],
    concurrency: Annotated[str, typer.Option(help="Requests in flight.")] = "1,8,32",
    sets: Annotated[str, typer.Option(help="Evaluation sets.")] = "gsm8k,mbpp",
    data: Annotated[str | None, typer.Option(help="Folder of NAME.jsonl files; the Hub when absent.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each load.")] = 64,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before each, per request in flight.")] = 2,
    model: Annotated[str | None, typer.Option(help="Name of the target there; the first listed if absent.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    thinking: Annotated[bool | None, typer.Option(help="Sets the chat template's `enable_thinking`.")] = None,
    output: Annotated[str | None, typer.Option(help="JSON file of every load.")] = None,
) -> None:
    """Loads servers in turns with the same requests: tokens per second, latencies, acceptance as they state it."""
    import json
    from dataclasses import asdict

    from .evaluation_sets import read_set
    from .serving import Server, serving_table
    from .serving import serve as load_servers

    with plain_errors():
        if output:
            Path(output).touch()  # before an hour is spent
        try:
            concurrencies = [int(number) for number in _names(concurrency)]
        except ValueError:
            raise ValueError(f"`--concurrency` is {concurrency!r}, expected numbers such as 1,8,32.") from None
        options = {"max_tokens": max_new_tokens, "temperature": temperature}
        if thinking is not None:
            options["chat_template_kwargs"] = {"enable_thinking": thinking}
        conversations = {name: read_set(name, data, requests) for name in _names(sets)}
        servers = [Server(url, model, **options) for url in endpoint]
        loads = load_servers(servers, conversations, concurrencies, requests, warm_up)
        print(serving_table(loads))
        if output:
            Path(output).write_text(json.dumps([asdict(load) for load in loads]) + "\n", encoding="utf-8")


__all__ = ["app"]
