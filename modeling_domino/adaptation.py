"""LoRA on a draft, through peft: for a target that was fine-tuned since, or one of the same shape.

Everything of peft works on a draft as on any model: `get_peft_model`, several adapters, `merge_and_unload`, and
`assistant_model=` takes the wrapped model. This file has the parts that peft cannot know: which matrices make up the
head (the GRU's are plain parameters, so they go by `target_parameters`), and what an adapter file must hold.
"""

import json
from pathlib import Path

from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .features import weights_fingerprint


logger = logging.get_logger(__name__)

GRU = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0")
HEAD = ("embed_proj.0", "embed_proj.2")
BACKBONE = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRESETS = {
    "head": {"target_modules": [*HEAD], "target_parameters": [*GRU]},
    "head+backbone": {"target_modules": [*HEAD, *BACKBONE], "target_parameters": [*GRU]},
    "all-linear": {"target_modules": "all-linear"},
}
ADAPTER_FILE = "adapter_model.safetensors"
RECIPE_FILE = "training_recipe.json"


def lora_config(preset: str = "head", **options) -> LoraConfig:
    """
    A plain `LoraConfig` for a draft.

    Args:
        preset: "head" (W1, W2 and both matrices of the GRU), "head+backbone" (and every matrix of fusion and layers), or
            "all-linear", which is peft's own and leaves the GRU as it is.
        options: Of `LoraConfig`, such as `r`, `lora_alpha`, `use_rslora`; r=16 and lora_alpha=32 by default. With
            `modules_to_save=["prefix_gru"]` the GRU is trained in full instead of by LoRA.

    Raises:
        ValueError: An unknown preset, or dropout or DoRA on the GRU's matrices, which peft cannot.
    """
    if preset not in PRESETS:
        raise ValueError(f"`{preset}` is no preset, expected one of {', '.join(PRESETS)}.")
    fields = {"r": 16, "lora_alpha": 32, **PRESETS[preset], **options}
    if "prefix_gru" in (fields.get("modules_to_save") or ()):
        fields.pop("target_parameters", None)
    for name in ("lora_dropout", "use_dora"):
        if fields.get(name) and fields.get("target_parameters"):
            raise ValueError(
                f"`{name}={fields[name]}` is not possible on the GRU's matrices, which peft adapts as plain parameters: "
                'train the GRU in full with `modules_to_save=["prefix_gru"]`, or leave the option out.'
            )
    if preset == "all-linear" and "modules_to_save" not in fields:
        logger.warning('"all-linear" adapts no GRU: take the preset "head+backbone" to have it adapted too.')
    return LoraConfig(**fields)


def load_adapter(
    draft: nn.Module, folder: str, *, name: str = "default", target: PreTrainedModel | None = None, **options
) -> PeftModel:
    """
    A draft under an adapter, every tensor of the file accounted for.

    Args:
        draft: A draft, or a `PeftModel` of one, which gets one more adapter.
        folder: Folder or Hub id of the adapter.
        name: Of the adapter.
        target: The model to draft for; a warning names both if the adapter was trained for other weights.
        options: Of `PeftModel.from_pretrained`, such as `is_trainable`.

    Raises:
        ValueError: Tensors are missing or unknown, or their shapes are those of another draft.
    """
    path = _local(folder)
    if target is not None:
        _compare_targets(path, target)
    try:
        if isinstance(draft, PeftModel):
            draft.load_adapter(str(path), name, **options)
            draft.set_adapter(name)
            model = draft
        else:
            model = PeftModel.from_pretrained(draft, str(path), name, **options)
    except RuntimeError as error:  # torch's list of shapes
        raise ValueError(f"{folder} is an adapter of another draft: {_first_mismatch(error)}.") from None
    except KeyError as error:
        raise ValueError(f"{folder} is not an adapter of this draft: {error} is no tensor of it.") from None
    with safe_open(path / ADAPTER_FILE, framework="pt") as file:
        held = set(file.keys())
    wanted = set(get_peft_model_state_dict(model, adapter_name=name))
    if held != wanted:
        raise ValueError(
            f"{folder} is not an adapter of this draft: missing tensors {sorted(wanted - held)}, unknown tensors "
            f"{sorted(held - wanted)}."
        )
    return model


def _local(folder: str) -> Path:
    path = Path(folder)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(folder))


def _compare_targets(path: Path, target: PreTrainedModel) -> None:
    recipe = path / RECIPE_FILE
    trained = json.loads(recipe.read_text(encoding="utf-8")) if recipe.exists() else {}
    known, found = trained.get("target_fingerprint"), weights_fingerprint(target)
    if known not in (None, found):
        logger.warning(
            f"The adapter in {path} was trained for {trained['target']} (revision {trained.get('target_revision')}, "
            f"weights {known}), not for {target.config.name_or_path} (revision "
            f"{getattr(target.config, '_commit_hash', None)}, weights {found}): texts stay right, acceptance may be low."
        )


def _first_mismatch(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
    return lines[0].rstrip(".") if lines else str(error).splitlines()[0]


__all__ = ["PRESETS", "load_adapter", "lora_config"]
