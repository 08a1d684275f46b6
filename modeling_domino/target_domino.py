"""What a draft borrows from its target: token embeddings, language-model head, hidden states of tapped layers.

Everything is borrowed for one call and called as a module, so weights may be tied, wrapped, quantised or offloaded.
Nothing is stored on the target: taps are forward hooks that live as long as their `with` block.
"""

import threading
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel


class BorrowedTarget:
    """The parts of a target that drafting needs.

    Args:
        target: A decoder-only model with a language-model head.

    Raises:
        ValueError: The target has no language-model head, or its decoder layers cannot be found.
    """

    def __init__(self, target: PreTrainedModel):
        self.embedding = target.get_input_embeddings()
        self.lm_head = target.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(
                f"{type(target).__name__} has no language-model head to borrow: pass a causal language model "
                "(AutoModelForCausalLM) as the target."
            )
        self.layers = find_decoder_layers(target)
        text_config = target.config.get_text_config(decoder=True)
        self._multiplier = getattr(text_config, "logit_scale", None) or 1.0  # Cohere
        self._multiplier /= getattr(text_config, "logits_scaling", None) or 1.0  # Granite
        self._softcap = getattr(text_config, "final_logit_softcapping", None)  # Gemma 2 and 3
        self.has_position_table = _has_position_table(target, text_config)
        self._embedding_device, _ = _placement(self.embedding, target)
        self._head_device, self._head_dtype = _placement(self.lm_head, target)

    @property
    def scales_logits(self) -> bool:
        """Whether logits are more than the product with the head: multiplied, or soft-capped."""
        return self._multiplier != 1.0 or self._softcap is not None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids, as the target's embedding module gives them."""
        return self.embedding(token_ids.to(self._embedding_device))

    def logits(self, hidden_states: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """
        Base logits of draft hidden states, with the target's own scaling and soft-capping.

        Args:
            hidden_states: [..., H].
            vocabulary: Ids of the M tokens to score; all V of them when None.

        Returns:
            [..., V] or [..., M].
        """
        hidden_states = hidden_states.to(self._head_device, self._head_dtype)
        logits = self.lm_head(hidden_states) if vocabulary is None else self._rows(hidden_states, vocabulary)
        if self._multiplier != 1.0:
            logits = logits * self._multiplier
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    def _rows(self, hidden_states: Tensor, vocabulary: Tensor) -> Tensor:
        if type(self.lm_head) is not nn.Linear:
            raise ValueError(
                f"The target's lm_head is a {type(self.lm_head).__name__}, whose rows cannot be picked: train with the "
                "full softmax (`sampled_softmax=None`)."
            )
        bias = None if self.lm_head.bias is None else self.lm_head.bias[vocabulary]
        return F.linear(hidden_states, self.lm_head.weight[vocabulary], bias)

    def tap(self, layer_ids: list[int]) -> "Taps":
        """Taps on zero-based decoder layers, to be entered around the target's forward passes."""
        return Taps([self.layers[layer_id] for layer_id in layer_ids])


class Taps:
    """Forward hooks that keep the outputs of some layers, in order, until they are taken.

    Per call and per thread: threads that decode on one target see only their own forward passes. Of several passes
    between two takes the first one counts, so a logits processor that runs the target itself does no harm.
    """

    def __init__(self, layers: list[nn.Module]):
        self._layers = layers
        self._outputs: dict[int, Tensor] = {}
        self._thread = None
        self._hooks = ExitStack()

    def __enter__(self) -> "Taps":
        self._thread = threading.get_ident()
        for index, layer in enumerate(self._layers):
            handle = layer.register_forward_hook(self._make_hook(index))
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *exc_info) -> None:
        self._hooks.close()

    def _make_hook(self, index: int):
        def keep(module, args, output):
            if threading.get_ident() == self._thread:
                self._outputs.setdefault(index, output[0] if isinstance(output, tuple) else output)

        return keep

    def take(self) -> Tensor:
        """Context hidden states [b, tokens, taps · H] of the pass since the last take."""
        outputs = [self._outputs[index] for index in range(len(self._layers))]
        self._outputs = {}
        return torch.cat([output.to(outputs[0].device) for output in outputs], dim=-1)


def _placement(module: nn.Module, target: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Where a module wants its input and in what float type; an offloaded one (on meta) moves its input itself."""
    parameter = next(module.parameters(), None)
    device = target.device if parameter is None else parameter.device
    is_float = parameter is not None and parameter.dtype.is_floating_point  # quantised weights are not
    dtype = parameter.dtype if is_float else target.dtype
    return torch.device("cpu") if device.type == "meta" else device, dtype


def _has_position_table(target: PreTrainedModel, text_config) -> bool:
    """Whether positions are looked up in a learned table, which has an end (OPT's has two rows in front)."""
    rows = getattr(text_config, "max_position_embeddings", None)
    tables = (m for m in target.get_decoder().modules() if isinstance(m, nn.Embedding))
    return rows is not None and any(
        table.num_embeddings - rows in (0, 2) and table is not target.get_input_embeddings() for table in tables
    )


def find_decoder_layers(target: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of layers, recognised by its length."""
    count = target.config.get_text_config(decoder=True).num_hidden_layers
    for module in target.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(
        f"No list of {count} decoder layers was found in {type(target).__name__}: this architecture cannot be tapped."
    )


__all__ = ["BorrowedTarget", "Taps", "find_decoder_layers"]
