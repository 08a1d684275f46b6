"""Loading a target the way the command line and the examples need it."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def load_target(
    name: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    A causal language model and its tokenizer.

    Args:
        name: Hub id, folder, or a `.gguf` file, whose weights are dequantised.
        dtype: As in `from_pretrained`.
        device: Where to put it; the first accelerator, else the CPU, when None.
    """
    kwargs: dict = {"dtype": dtype}
    path = Path(name)
    if path.suffix == ".gguf":
        from transformers import GgufConfig  # needs the gguf package, which only this branch wants

        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        kwargs |= {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        name = str(path.parent)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
    target = AutoModelForCausalLM.from_pretrained(name, **kwargs).eval()
    return target.to(device or default_device()), tokenizer


def load_outline(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target without its weights (on the meta device), and its tokenizer: enough where a server does the work."""
    if Path(name).suffix == ".gguf":
        return load_target(name, device="cpu")  # its configuration comes out of the same file
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    return target.eval(), AutoTokenizer.from_pretrained(name)


def default_device() -> torch.device:
    """The first accelerator, else the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else accelerator


__all__ = ["default_device", "load_outline", "load_target"]
