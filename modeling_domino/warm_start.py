"""A new draft whose layers start from layers of its target: with little data they know more than random ones."""

import torch
from torch import nn
from transformers import PreTrainedModel

from .modeling_domino import DominoForSpeculativeDraft
from .target_domino import find_decoder_layers


@torch.no_grad()
def start_from_target(draft: DominoForSpeculativeDraft, target: PreTrainedModel, layer_ids: list[int]) -> None:
    """
    Copies target layers into the draft's layers, in order, and the target's final norm into the draft's.

    The draft norms queries and keys (Qwen3). Where the target does not, these norms start at the size that its
    queries and keys have for an input of unit size. What the draft has no place for (biases, further norms) is left out.

    Args:
        draft: A new draft; its other weights stay.
        target: The model it drafts for, with Llama-like layers of the draft's shapes.
        layer_ids: One zero-based target layer for each layer of the draft.

    Raises:
        ValueError: The number of ids, their range, or names and shapes of the layers' weights do not fit.
    """
    theirs = find_decoder_layers(target)
    if len(layer_ids) != len(draft.layers) or not all(0 <= layer_id < len(theirs) for layer_id in layer_ids):
        raise ValueError(
            f"`layers_from` is {layer_ids}, expected {len(draft.layers)} ids (one for each layer of the draft) from 0 "
            f"to {len(theirs) - 1}."
        )
    for layer, layer_id in zip(draft.layers, layer_ids, strict=True):
        weights = theirs[layer_id].state_dict()
        for name, weight in layer.state_dict().items():
            part = name.removeprefix("self_attn.").removesuffix("_norm.weight")
            if name.startswith("embed_layernorm"):
                continue  # of an EAGLE-3-style layer alone
            if part in ("q", "k") and name not in weights:
                rows = weights[f"self_attn.{part}_proj.weight"] * weights["input_layernorm.weight"]
                weight.fill_(rows.float().square().sum(-1).mean().sqrt())
            else:
                source = weights.get(name)
                if source is not None and weight.ndim == 2 and weight.shape[1] == 2 * source.shape[1]:
                    weight.zero_()  # what it reads of embeddings starts at nothing; hidden states are its second half
                    weight = weight[:, source.shape[1] :]
                _copy(weight, source, f"layer {layer_id} of {type(target).__name__}, weight `{name}`")
    _copy(draft.norm.weight, _final_norm(target), f"the final norm of {type(target).__name__}")


def _final_norm(target: PreTrainedModel) -> torch.Tensor | None:
    norm = getattr(target.get_decoder(), "norm", None)
    return norm.weight if isinstance(norm, nn.Module) else None


def _copy(ours: torch.Tensor, theirs: torch.Tensor | None, what: str) -> None:
    if theirs is None or theirs.shape != ours.shape:
        found = "missing" if theirs is None else f"of shape {list(theirs.shape)}"
        raise ValueError(
            f"`layers_from` wants a target whose layers are like the draft's, but {what} is {found}, expected shape "
            f"{list(ours.shape)}: change `draft` to fit, or leave `layers_from` out."
        )
    ours.copy_(theirs)


__all__ = ["start_from_target"]
