"""Model cards, from templates: what is known of a draft, and nothing that is not."""

import re
from collections.abc import Collection
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from modeling_domino import __version__
from modeling_domino.evaluation import source_commit
from modeling_domino.evaluation_report import markdown_table

from .facts import Facts
from .results import eval_results


HERE = Path(__file__).parent
TAGS = ["speculative-decoding", "domino", "draft-model"]
CODE = re.compile(r"(?<=<!-- code -->\n).*?(?=\n<!-- /code -->)", flags=re.DOTALL)


def code_line() -> str:
    """Which code a repository holds."""
    commit = source_commit()
    return f"modeling_domino {__version__}, {f'commit {commit}' if commit else 'as installed, of no recorded commit'}"


def draft_card(
    draft, facts: Facts, results: dict | None, figures: list[str], formats: Collection[str] = ()
) -> ModelCard:
    """
    Args:
        draft: The draft.
        facts: What its weights do not say.
        results: Of its evaluation, or None.
        figures: Paths of the evaluation's figures in the repository.
        formats: Layouts of engines that the repository has branches of.
    """
    data = _metadata(facts, base_model=facts.target, library_name="transformers", tags=[*TAGS, "custom_generate"])
    if results is not None:
        data.model_name, data.eval_results = facts.repo_id.partition("/")[2], eval_results(results)
    return _render(
        "draft_card.md",
        data,
        facts,
        config=draft.config,
        dtype=str(draft.dtype).removeprefix("torch."),
        parameters=draft.num_parameters(),
        table=markdown_table({"": results}) if results is not None else None,
        figures=figures,
        formats=formats,
    )


def adapter_card(adapted, facts: Facts, draft_id: str) -> ModelCard:
    """
    Args:
        adapted: A draft under a peft adapter.
        facts: What the weights do not say.
        draft_id: Hub id of the draft.
    """
    from peft import get_peft_model_state_dict

    data = _metadata(facts, base_model=draft_id, library_name="peft", tags=[*TAGS, "adapter"])
    data["base_model_relation"] = "adapter"
    [config] = adapted.peft_config.values()
    modules = [*(config.target_modules or []), *(getattr(config, "target_parameters", None) or [])]
    return _render(
        "adapter_card.md",
        data,
        facts,
        draft_id=draft_id,
        kind=config.peft_type.value,
        modules=sorted(modules),
        parameters=sum(tensor.numel() for tensor in get_peft_model_state_dict(adapted).values()),
    )


def copy_card(facts: Facts, layout: str) -> ModelCard:
    """
    Args:
        facts: What the weights do not say.
        layout: Of the engine that the copy is for.
    """
    library, _, _ = layout.partition("-")
    data = _metadata(facts, base_model=facts.target, library_name=library, tags=TAGS)
    return _render("copy_card.md", data, facts, layout=layout)


def _metadata(facts: Facts, **fields) -> ModelCardData:
    return ModelCardData(
        license=facts.license,
        language=facts.language or None,
        datasets=facts.datasets or None,
        pipeline_tag="text-generation",
        **fields,
    )


def _render(template: str, data: ModelCardData, facts: Facts, **values) -> ModelCard:
    # The template sees the metadata's own fields too, by the same names as those of the facts.
    return ModelCard.from_template(
        data,
        template_path=str(HERE / template),
        name=facts.repo_id.partition("/")[2],
        repo_id=facts.repo_id,
        target=facts.target,
        target_revision=facts.target_revision,
        datasets=facts.datasets,
        recipe=facts.recipe,
        code=code_line(),
        **values,
    )


__all__ = ["CODE", "adapter_card", "code_line", "copy_card", "draft_card"]
