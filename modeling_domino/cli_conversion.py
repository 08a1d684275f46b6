"""`domino convert` and `domino validate`: parse and call, nothing else."""

from typing import Annotated

import typer

from .cli_errors import plain_errors


def convert(
    source: Annotated[str, typer.Argument(help="Draft in any published layout: folder or Hub id.")],
    destination: Annotated[str, typer.Argument(help="New folder.")],
    to: Annotated[str, typer.Option(help="domino, sglang, speculators-dflash or speculators-domino.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model it drafts for: fills in what a layout needs of it; --to domino re-fits to it."),
    ] = None,
    old_target: Annotated[
        str | None, typer.Option(help="Model it was trained for, where --target is another one.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="peft adapter of the draft, to be merged.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the file's by default, sglang: bfloat16.")
    ] = None,
    assume: Annotated[
        str | None, typer.Option(help="public: alignment and P of the public drafts where the file leaves them out.")
    ] = None,
    ignore_key: Annotated[
        list[str] | None, typer.Option(help="Unknown key of config.json to drop; repeatable.")
    ] = None,
    fresh_head: Annotated[bool, typer.Option("--fresh-head", help="A new head for a DFlash draft.")] = False,
    gru_hidden_dim: Annotated[int | None, typer.Option(min=1, help="G of the new head; 1024 by default.")] = None,
    emb_dim: Annotated[int | None, typer.Option(min=1, help="R of the new head; 256 by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is initialised.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replaces the destination if it exists.")] = False,
) -> None:
    """Writes a draft in another layout, after the rules of the engine that reads it have been checked."""
    from .conversion import convert as run

    with plain_errors():
        if assume not in (None, "public"):
            raise ValueError(f"`--assume` is {assume!r}, expected 'public'.")
        notes = run(
            source,
            destination,
            to=to,
            target=target,
            old_target=old_target,
            adapter=adapter,
            dtype=dtype,
            assume_public=assume == "public",
            ignore_keys=ignore_key or (),
            fresh_head=fresh_head,
            gru_hidden_dim=gru_hidden_dim,
            emb_dim=emb_dim,
            seed=seed,
            force=force,
        )
        for note in notes:
            print(note)
        print(f"Draft in {destination}, in the layout {to}.")


def validate(
    path: Annotated[str, typer.Argument(help="Draft as the engine shall load it: folder or Hub id.")],
    engine: Annotated[str, typer.Option("--for", help="transformers, sglang, speculators, vllm or tensorrt-llm.")],
    target: Annotated[
        str | None, typer.Option(help="Model it shall draft for; sizes and tokens are compared.")
    ] = None,
) -> None:
    """Lists everything that keeps an engine from decoding with a draft as it was trained; exit code 1 if anything."""
    from .conversion import validate as run

    with plain_errors():
        found = run(path, engine, target=target)
        for violation in found:
            print(f"- {violation}.")
        if found:
            print(f"{path}: {len(found)} reason(s) against {engine}.")
            raise typer.Exit(1)
        print(f"{path} is fit for {engine}.")


__all__ = ["convert", "validate"]
