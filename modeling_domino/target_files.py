"""What a conversion needs of a target without running it: sizes, tokens, embeddings and lm_head."""

from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from .loading import load_target
from .stored_tensors import StoredTensor, open_tensors
from .target_domino import BorrowedTarget


EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


class TargetFiles:
    """
    A target by its files; only what is asked for is read.

    Args:
        name: Hub id, folder, or a `.gguf` file (which is dequantised as a whole when its weights are asked for).
    """

    def __init__(self, name: str):
        self.name = name
        if self._is_gguf:
            path = Path(name)
            self.config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        else:
            self.config = AutoConfig.from_pretrained(name)
        self.text_config = self.config.get_text_config(decoder=True)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Whose tokens name the rows of embeddings and head."""
        if self._is_gguf:
            return AutoTokenizer.from_pretrained(Path(self.name).parent, gguf_file=Path(self.name).name)
        return AutoTokenizer.from_pretrained(self.name)

    @property
    def architectures(self) -> list[str]:
        """As its configuration names them."""
        return list(self.config.architectures or [])

    @cached_property
    def oddities(self) -> list[str]:
        """In words, what its embeddings and head do beyond a matrix; a copy of the matrices would leave it out."""
        borrowed = BorrowedTarget(self._outline)
        found = []
        if type(borrowed.embedding) is not torch.nn.Embedding:
            found.append(f"its embeddings are a {type(borrowed.embedding).__name__}, which does more than a lookup")
        if getattr(borrowed.lm_head, "bias", None) is not None:
            found.append("its lm_head has a bias")
        if borrowed.scales_logits:
            found.append("it scales or caps its logits")
        return found

    @property
    def norms_embeddings(self) -> bool:
        """Whether its embedding module norms what it looks up, which transformers' own DFlash decoding leaves out."""
        return hasattr(self._outline.get_input_embeddings(), "embed_norm")

    @cached_property
    def matrices(self) -> dict[str, StoredTensor]:
        """`embed_tokens.weight` and `lm_head.weight`, [V, H] each; the same matrix twice where they are tied."""
        outline = self._outline
        modules = {EMBEDDINGS: outline.get_input_embeddings(), LM_HEAD: outline.get_output_embeddings()}
        if not self._is_gguf:
            stored = open_tensors(self._folder)
            found = {}
            for name, parameter in outline.named_parameters(remove_duplicate=False):  # tied ones are stored once
                for ours, module in modules.items():
                    if parameter is module.weight and name in stored:
                        found[ours] = stored[name]
            if found.keys() == modules.keys():
                return found
        # Files whose names transformers translates while loading.
        target, _ = load_target(self.name, device="cpu")
        modules = {EMBEDDINGS: target.get_input_embeddings(), LM_HEAD: target.get_output_embeddings()}
        return {name: StoredTensor.of(module.weight.detach().clone()) for name, module in modules.items()}

    @property
    def _is_gguf(self) -> bool:
        return Path(self.name).suffix == ".gguf"

    @property
    def _folder(self) -> Path:
        return local_folder(self.name)

    @cached_property
    def _outline(self):
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(self.config)
        outline.tie_weights()
        return outline


def local_folder(name: str) -> Path:
    """The folder itself, or that of a Hub repository, whose configuration and weights are fetched if need be."""
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_absolute() or path.exists() or name.count("/") > 1 or name.startswith("."):
        raise FileNotFoundError(f"{name} is no folder: name one that holds config.json and weights, or a Hub id.")
    patterns = ["*.json", "*.safetensors", "pytorch_model*.bin"]
    return Path(snapshot_download(name, allow_patterns=patterns))


__all__ = ["EMBEDDINGS", "LM_HEAD", "TargetFiles", "local_folder"]
