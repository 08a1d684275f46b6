"""What somebody who has only torch and transformers gets out of a repository. `check.py` runs this file as a process of
its own, which reads a request from standard input and prints what it saw; it imports nothing of ours.
"""

import hashlib
import json
import sys


MARK = "SEEN "
PROMPT, NEW = 8, 24  # tokens
TAU_DIGITS = 2


class Only:
    """An import finder that knows the standard library and some other packages, whatever is installed."""

    def __init__(self, finder, packages: frozenset[str]):
        self.finder, self.packages = finder, packages

    def find_spec(self, name: str, path=None, target=None):
        package = name.partition(".")[0]
        # The standard library imports its build's settings under a name of the platform.
        known = package in sys.stdlib_module_names | self.packages or package.startswith("_sysconfigdata_")
        return self.finder.find_spec(name, path, target) if known else None

    def __getattr__(self, name: str):
        return getattr(self.finder, name)


def digest(model) -> str:
    """SHA-256 of every tensor of a model's state: names, types, shapes and bits."""
    import torch

    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return state.hexdigest()


def tiny_target(config):
    """A random target of the shapes that a draft asks for, and narrow in everything else."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_target_layers,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    # Tied, since large vocabularies are most of it; far from uniform, so that texts do not loop at once.
    options = {"tie_word_embeddings": True, "initializer_range": 0.3, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options)).eval()


def decode(target, draft, **options) -> dict:
    """
    A greedy text with the draft, from a random prompt.

    Returns:
        `tokens`, `rounds`, `tau`, and `gap`: by how much any token's logit lies below the target's best one, in standard
        deviations of the logits; rounding aside it is 0.
    """
    import torch

    torch.manual_seed(1)
    prompt = torch.randint(draft.config.vocab_size, (1, PROMPT))
    mask = torch.ones_like(prompt)
    most = draft.config.max_draft_tokens  # or how many count would depend on the clock
    arguments = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": draft, "num_assistant_tokens": most}
    arguments |= options
    tokens = target.generate(prompt, attention_mask=mask, **arguments)
    with torch.no_grad():
        logits = target(tokens).logits[:, PROMPT - 1 : -1].float()
    chosen = logits.gather(-1, tokens[:, PROMPT:, None])[..., 0]
    gap = ((logits.amax(dim=-1) - chosen) / logits.std(dim=-1)).max()
    stats = draft.last_generation
    tau = round(stats.acceptance_length, TAU_DIGITS)
    return {"tokens": tokens[0, PROMPT:].tolist(), "rounds": stats.rounds, "tau": tau, "gap": float(gap)}


def look(request: dict) -> dict:
    """
    Loads a repository as its card says, and decodes with it.

    Args:
        request: `repository` and `revision`; `adapter` and `adapter_revision` to put on it, if any; `target` to decode
            with (a tiny random one when None); `custom_generate`, whether to decode through the repository's own too.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    draft = AutoModel.from_pretrained(request["repository"], revision=request["revision"], trust_remote_code=True)
    config = draft.config
    seen = {"module": type(draft).__module__, "draft": digest(draft), "config": config.to_dict()}
    if request["adapter"] is not None:
        from peft import PeftModel

        draft = PeftModel.from_pretrained(draft, request["adapter"], revision=request["adapter_revision"])
        seen["adapted"] = digest(draft)
    draft = draft.float().eval()
    if request["target"] is None:
        target = tiny_target(config)
    else:
        target = AutoModelForCausalLM.from_pretrained(request["target"], dtype="float32")
    seen["decoded"] = decode(target, draft)
    if request["custom_generate"]:
        own = {"custom_generate": request["repository"], "trust_remote_code": True}
        seen["custom_generate"] = decode(target, draft, **own)
    return seen


def main() -> None:
    request = json.load(sys.stdin)
    sys.meta_path[:] = [Only(finder, frozenset(request["packages"])) for finder in sys.meta_path]
    seen = look(request)
    print(MARK + json.dumps(seen, default=str))


if __name__ == "__main__":
    main()
