"""Tiny random targets of every architecture the README promises, past their sliding windows where they have one."""

import torch
import transformers
from conftest import SIZES


# Name: configuration class, model class, and what differs from `SIZES`.
ARCHITECTURES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama (tied, head with bias)": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral (sliding window)": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2 (sliding and full layers)": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "opt": ("OPTConfig", "OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon (alibi)": ("FalconConfig", "FalconForCausalLM", {"alibi": True, "new_decoder_architecture": False}),
    "llava (text half)": ("LlavaConfig", "LlavaForConditionalGeneration", {}),
}


def make_architecture(name: str, seed: int = 6):
    """The random target of that name, in float32."""
    config_class, model_class, overrides = ARCHITECTURES[name]
    config_class, model_class = getattr(transformers, config_class), getattr(transformers, model_class)
    torch.manual_seed(seed)
    if name.startswith("llava"):
        vision = transformers.CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        )
        text = transformers.LlamaConfig(**SIZES)
        config = config_class(text_config=text, vision_config=vision, image_token_index=SIZES["vocab_size"] - 2)
        return model_class(config).eval()
    target = model_class(config_class(**{**SIZES, **overrides})).eval()
    if "bias" in name:
        target.lm_head.bias = torch.nn.Parameter(torch.randn(SIZES["vocab_size"]))
    return target
