"""Linear layers whose weights oneDNN has laid out once, for decoding in float32 on a CPU.

A product with few rows is bound by reading the weights, so verifying K+1 tokens should cost little more than one
token. `torch.nn.Linear` lays the weights out anew in every product of more than one row, which doubles the cost of such
a pass; the operator used here, the one Inductor calls in frozen graphs, takes them ready.
"""

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """
    A `torch.nn.Linear` for inference whose weight is kept in oneDNN's own layout only.

    Args:
        linear: The layer to replace, float32 on the CPU. Its weight is copied.
        rows: Rows of a typical input; the layout is chosen for them and right for every number.
    """

    def __init__(self, linear: nn.Linear, rows: int):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        if torch.is_grad_enabled() and input.requires_grad:
            raise ValueError("A packed model gives no gradients: load the target anew, and train before packing.")
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")

    def _apply(self, fn, recurse: bool = True):
        moved = fn(torch.empty(0))
        if moved.device.type != "cpu" or moved.dtype != torch.float32:
            raise ValueError(
                f"This layer is packed for float32 on the CPU and cannot become {moved.dtype} on {moved.device.type}: "
                "load the model anew there instead."
            )
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = self._packed.to_dense()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_linears(model: nn.Module, *, rows: int = 9) -> int:
    """
    Replaces every plain `torch.nn.Linear` of a model by a `PackedLinear`, for decoding alone.

    Takes no memory in the end except for tied weights, of which the embedding keeps its own. `save_pretrained` writes
    the weights as they were.

    Args:
        model: A target, or the `layers` of a draft, in float32 on the CPU. Changed in place; gradients are turned off.
        rows: Rows of a typical product: K + 1 while verifying.

    Returns:
        How many layers were replaced.

    Raises:
        ValueError: The model is not in float32 on the CPU, or this build of torch has no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        raise ValueError("This build of torch has no oneDNN, which packs the weights: decode without packing.")
    linears = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    for parent, name in linears:
        weight = getattr(parent, name).weight
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            raise ValueError(
                f"Packing is for float32 on the CPU, but `{name}` is {weight.dtype} on {weight.device.type}: "
                "load the model with dtype=torch.float32 on the CPU, or decode without packing."
            )
    model.requires_grad_(False)
    for parent, name in linears:
        setattr(parent, name, PackedLinear(getattr(parent, name), rows))
    return len(linears)


__all__ = ["PackedLinear", "pack_linears"]
