"""`python -m hub_upload`: parses and calls, nothing else."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from modeling_domino.cli_errors import plain_errors


app = typer.Typer(add_completion=False)


@app.command()
def main(
    checkpoint: Annotated[
        str | None, typer.Argument(help="Folder of a draft, or with --adapter of an adapter.")
    ] = None,
    repo_id: Annotated[str | None, typer.Argument(help="NAMESPACE/NAME on the Hub.")] = None,
    target: Annotated[str | None, typer.Option(help="Hub id of the target, for the card.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="Its revision that the draft was trained for.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the weights, such as apache-2.0.")] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Hub id of a dataset trained on; repeatable.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="Code, such as en; repeatable.")] = None,
    recipe: Annotated[str | None, typer.Option(help="YAML file that the draft was trained with.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="Folder of `domino evaluate run`, of this draft.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="CHECKPOINT is a peft adapter on a draft.")] = False,
    draft: Annotated[
        str | None, typer.Option(help="The adapter's draft: folder or Hub id; what the adapter names by default.")
    ] = None,
    draft_id: Annotated[str | None, typer.Option(help="The draft's Hub id, where that is a folder.")] = None,
    check_with: Annotated[
        str | None, typer.Option(help="Target to decode with in the check; a tiny random one by default.")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            help="Layouts of serving engines to upload as well, each to the branch of its name: sglang, "
            "speculators-dflash, speculators-domino; separated by commas."
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Makes a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to, made if need be.")] = None,
    tag: Annotated[str | None, typer.Option(help="Name for the commit.")] = None,
    pull_request: Annotated[
        bool, typer.Option("--pull-request", help="Opens a pull request instead of committing.")
    ] = False,
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    output: Annotated[str | None, typer.Option(help="Keeps the assembled folder here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Assembles and checks, and uploads nothing.")] = False,
    update_code: Annotated[
        str | None,
        typer.Option(
            metavar="REPO_ID", help="Replaces the code of a repository by this version's; no CHECKPOINT then."
        ),
    ] = None,
) -> None:
    """Uploads a draft, or an adapter on one, as a repository that works for those who have only transformers."""
    from transformers.utils import logging

    from .assemble import files_of
    from .formats import read_formats
    from .publish import assemble, assemble_adapted, publish
    from .update import update

    logging.disable_progress_bar()
    with plain_errors("hub_upload"), tempfile.TemporaryDirectory() as place:
        folder = Path(output) if output else Path(place, "draft")
        destination = {"revision": revision, "tag": tag, "pull_request": pull_request}
        if pull_request and (revision or tag):
            raise ValueError("`--pull-request` goes against the main branch: leave out `--revision` and `--tag`.")
        if update_code is not None:
            if checkpoint is not None:
                raise ValueError("`--update-code REPO_ID` takes the weights from the Hub: leave out CHECKPOINT.")
            for line in update(
                update_code, folder, message=message, dry_run=dry_run, check_with=check_with, **destination
            ):
                print(line)
            return
        if checkpoint is None or repo_id is None:
            raise ValueError("Both are needed: python -m hub_upload CHECKPOINT NAMESPACE/NAME.")
        layouts = read_formats(formats)
        if layouts and (adapter or revision or pull_request):
            raise ValueError(
                "`--formats` makes branches beside the main one, of a draft: leave out `--revision` and `--pull-request`, "
                "and merge an adapter first (`domino convert --to domino --adapter`)."
            )
        facts = {
            "target": target,
            "target_revision": target_revision,
            "license": license,
            "datasets": dataset or [],
            "language": language or [],
            "recipe": recipe,
            "check_with": check_with,
        }
        if adapter:
            if evaluation:
                raise ValueError("`--evaluation` is of a draft: merge the adapter, evaluate and upload that.")
            assembled = assemble_adapted(checkpoint, repo_id, folder, draft=draft, draft_id=draft_id, **facts)
        else:
            assembled = assemble(checkpoint, repo_id, folder, evaluation=evaluation, formats=layouts, **facts)
        for branch, part in {"": folder, **assembled.copies}.items():
            sizes = files_of(part)
            for name, size in sizes.items():
                print(f"{size:>14,}  {name}")
            what = (
                f"{len(sizes)} files{f' of the branch {branch}' if branch else ''}{f', in {part}' if output else ''}"
            )
            print(f"{sum(sizes.values()):>14,}  bytes in {what}")
        alone = "torch, transformers and peft" if adapter else "torch and transformers"
        print(
            f"Loaded offline by its own code, with nothing but {alone}: the same weights bit for bit, and the text of "
            f"{check_with or 'a random target'} in {assembled.decoded['rounds']} rounds."
        )
        if layouts:
            print(f"Fit for their engines by the rules that these publish: {', '.join(layouts)}.")
        if dry_run:
            print("Dry run: nothing was uploaded.")
            return
        uploaded = publish(
            assembled,
            message=message or f"Domino {'adapter' if adapter else 'draft'} for {assembled.facts.target}",
            private=private,
            **destination,
        )
        print(f"{uploaded.pull_request or uploaded.url}{'' if uploaded.changed else ' (nothing had changed)'}")
        print("Loaded from there at that commit: the same weights.")


if __name__ == "__main__":
    app(prog_name="python -m hub_upload")
