"""What works with a draft, as data: the tests run every row, and the README's table is written from the same rows.

python tests/support.py            # writes the table into README.md
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from architectures import ARCHITECTURES
from conftest import PAD, make_tokenizer
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer


README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- what-works -->\n", "<!-- /what-works -->"


@dataclass
class Call:
    """What an argument is built from: the target, its prompt [1, 6] and the text that plain greedy decoding adds."""

    target: torch.nn.Module
    prompt: torch.Tensor
    new: list[int]


@dataclass(frozen=True)
class Argument:
    """
    Args:
        name: As the README shows it.
        build: Keyword arguments of one call; `prompt` among them replaces the prompt.
        refused: Words of the refusal; none where it works.
        free: Whether the property test may add it to any other.
        path: The loop that decodes it: "loop" is ours, "assisted" transformers'.
        batch: Whether it has several rows, which only our loop decodes.
    """

    name: str
    build: Callable[[Call], dict]
    refused: str = ""
    free: bool = True
    path: str = "loop"
    batch: bool = False


@dataclass(frozen=True)
class Elsewhere:
    """A row that has tests of its own, which see to its path too."""

    name: str
    test: str
    refused: bool = False
    path: str = "loop"


class ForceAt(LogitsProcessor):
    """Only `token` is possible at position `length`."""

    def __init__(self, length: int, token: int):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] != self.length:
            return scores
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)


class StopAt(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@dataclass
class Listener(BaseStreamer):
    """Keeps what it hears: every token once, and one end."""

    tokens: list[int] = field(default_factory=list)
    ends: int = 0

    def put(self, value):
        assert self.ends == 0
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ends += 1


def padded(call: Call) -> dict:
    prompt = torch.cat([torch.full((1, 3), PAD), call.prompt], dim=1)
    return {"prompt": prompt, "attention_mask": (torch.arange(9) >= 3).long()[None]}


def batch(call: Call) -> dict:
    """Three prompts of their own lengths."""
    torch.manual_seed(3)
    lengths = torch.tensor([9, 4, 6])
    mask = (torch.arange(9) >= 9 - lengths[:, None]).long()
    return {"prompt": torch.randint(3, 23, (3, 9)) * mask, "attention_mask": mask}


def turn_on_cache(call: Call) -> dict:
    cache = DynamicCache(config=call.target.config)
    call.target(call.prompt[:, :4], cache=cache)
    return {"cache": cache}


def text(call: Call, first: int, last: int) -> str:
    return make_tokenizer().decode(call.new[first:last])


RECORDS = {"return_dict_in_generate": True}
ARGUMENTS = [
    Argument("greedy decoding", lambda c: {}),
    Argument("sampling (`do_sample`; here `top_k=1`)", lambda c: {"do_sample": True, "top_k": 1}),
    Argument("`generation_config=`", lambda c: {"generation_config": GenerationConfig(max_new_tokens=9)}, free=False),
    Argument("`max_length`", lambda c: {"max_length": 6 + 9, "max_new_tokens": None}, free=False),
    Argument("`min_new_tokens`, `min_length`", lambda c: {"eos_token_id": c.new[2], "min_new_tokens": 6}),
    Argument("`max_time`", lambda c: {"max_time": 1000.0}),
    Argument("several `eos_token_id`", lambda c: {"eos_token_id": [c.new[9], c.new[5]]}),
    Argument("`stop_strings`", lambda c: {"stop_strings": [text(c, 6, 8), "zz"], "tokenizer": make_tokenizer()}),
    Argument("`stopping_criteria`", lambda c: {"stopping_criteria": [StopAt(c.new[7])]}),
    Argument("`streamer`", lambda c: {"streamer": Listener()}),
    Argument("`repetition_penalty`", lambda c: {"repetition_penalty": 1.8}),
    Argument("`encoder_repetition_penalty`", lambda c: {"encoder_repetition_penalty": 1.4}),
    Argument("`no_repeat_ngram_size`", lambda c: {"no_repeat_ngram_size": 2}),
    Argument("`encoder_no_repeat_ngram_size`", lambda c: {"encoder_no_repeat_ngram_size": 1}),
    Argument("`bad_words_ids`", lambda c: {"bad_words_ids": [[c.new[4], c.new[5]], [c.new[7]]]}),
    Argument("`sequence_bias`", lambda c: {"sequence_bias": [[[c.new[3]], -9.0], [[c.new[1], c.new[6]], 9.0]]}),
    Argument("`suppress_tokens`", lambda c: {"suppress_tokens": [c.new[3], c.new[8]]}),
    Argument("`begin_suppress_tokens`", lambda c: {"begin_suppress_tokens": [c.new[0]]}),
    Argument("`forced_bos_token_id`", lambda c: {"forced_bos_token_id": 7}),
    Argument("`forced_eos_token_id`", lambda c: {"forced_eos_token_id": 7}),
    Argument(
        "`exponential_decay_length_penalty`",
        lambda c: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": c.new[5]},
    ),
    Argument("`renormalize_logits`", lambda c: {"renormalize_logits": True, "repetition_penalty": 1.2}, free=False),
    Argument("`remove_invalid_values`", lambda c: {"remove_invalid_values": True}),
    Argument("`prefix_allowed_tokens_fn`", lambda c: {"prefix_allowed_tokens_fn": lambda b, ids: [*range(4, 20, 2)]}),
    Argument("`logits_processor` that depends on `input_ids`", lambda c: {"logits_processor": [ForceAt(6 + 3, 11)]}),
    Argument("`watermarking_config` (Kirchenbauer et al.)", lambda c: {"watermarking_config": WatermarkingConfig()}),
    Argument("`output_scores`, `output_logits`", lambda c: {**RECORDS, "output_scores": True, "output_logits": True}),
    Argument("`output_hidden_states`", lambda c: {**RECORDS, "output_hidden_states": True}),
    Argument("`output_attentions` (eager attention)", lambda c: {**RECORDS, "output_attentions": True}, free=False),
    Argument("left padding", padded, free=False),
    Argument(
        "`inputs_embeds`", lambda c: {"inputs_embeds": c.target.get_input_embeddings()(c.prompt).detach()}, free=False
    ),
    Argument("a `cache` from an earlier turn", turn_on_cache, free=False),
    Argument("`cache_implementation='dynamic'`", lambda c: {"cache_implementation": "dynamic"}, free=False),
    Argument("`cache_implementation='static'`", lambda c: {"cache_implementation": "static"}, free=False),
    Argument(
        "its deprecated names (`'hybrid_chunked'`)",
        lambda c: {"cache_implementation": "hybrid_chunked"},
        free=False,
    ),
    Argument(
        "`use_cache=False` (the call keeps a cache for itself)",
        lambda c: {**RECORDS, "use_cache": False, "output_scores": True},
        free=False,
    ),
    Argument("`prefill_chunk_size` (the prompt is read in one piece)", lambda c: {"prefill_chunk_size": 2}),
    Argument("`compile_config`", lambda c: {"compile_config": CompileConfig(), "disable_compile": True}),
    Argument("`num_assistant_tokens`", lambda c: {"num_assistant_tokens": 2}),
    Argument("`assistant_confidence_threshold`", lambda c: {"assistant_confidence_threshold": 0.3}),
    Argument("`synced_gpus=False`", lambda c: {"synced_gpus": False}),
    Argument(
        "`token_healing`",
        lambda c: {"token_healing": True, "tokenizer": make_tokenizer(pad_token="a", bos_token="b")},
        free=False,
    ),
    Argument("beams", lambda c: {"num_beams": 3}, "`num_beams=3`", free=False),
    Argument("batches", batch, free=False, batch=True),
    Argument(
        "`num_return_sequences` above 1",
        lambda c: {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
        free=False,
        batch=True,
    ),
    Argument(
        "a `streamer` for several rows",
        lambda c: {**batch(c), "streamer": Listener()},
        "hears one",
        free=False,
        batch=True,
    ),
    Argument(
        "scores, states or attentions of several rows",
        lambda c: {**batch(c), **RECORDS, "output_scores": True},
        "`output_scores=True` records one text",
        free=False,
        batch=True,
    ),
    Argument("`guidance_scale`", lambda c: {"guidance_scale": 1.5}, "keeps a state", free=False),
    Argument(
        "SynthID watermarks",
        lambda c: {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)},
        "keeps a state",
        free=False,
    ),
    Argument(
        "`cache_implementation='quantized'`",
        lambda c: {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        "cannot be cropped",
        free=False,
    ),
    Argument(
        "`cache_implementation='paged'`",
        lambda c: {"cache_implementation": "paged"},
        "assistant_model is not supported for continuous batching",
        free=False,
    ),
    Argument(
        "`use_cache=False` with states recorded",
        lambda c: {**RECORDS, "use_cache": False, "output_hidden_states": True},
        "leave `use_cache` on",
        free=False,
    ),
    Argument("contrastive search", lambda c: {"penalty_alpha": 0.6, "top_k": 4}, "`contrastive_search`", free=False),
    Argument("DoLa", lambda c: {"dola_layers": "low"}, "`dola_generation`", free=False),
    Argument("`prompt_lookup_num_tokens`", lambda c: {"prompt_lookup_num_tokens": 3}, "drop it or drop", free=False),
    Argument(
        "`assistant_tokenizer`", lambda c: {"assistant_tokenizer": object()}, "Drop `assistant_tokenizer`", free=False
    ),
]

OTHERS = {
    "Targets, wrapped": [
        Elsewhere("peft LoRA, also on the head", "test_targets.py::test_a_target_with_lora_also_on_its_head"),
        Elsewhere("int8 weights (quanto)", "test_targets.py::test_weights_that_stay_in_int8"),
        Elsewhere("`torch.compile`", "test_targets.py::test_a_compiled_target"),
        Elsewhere("`device_map` with modules on disk", "test_targets.py::test_a_target_offloaded_to_disk"),
        Elsewhere("a head without `.weight`", "test_targets.py::test_a_head_without_a_weight"),
        Elsewhere("float32, bfloat16, float16 in any mix", "test_targets.py::test_any_mix_of_dtypes"),
        Elsewhere(
            "a static cache longer than a sliding window",
            "test_targets.py::test_a_static_cache_that_slides_is_refused",
            refused=True,
        ),
        Elsewhere(
            "encoder-decoders", "test_bad_input.py::test_architectures_that_cannot_be_rolled_back", refused=True
        ),
        Elsewhere(
            "recurrent and hybrid targets (Mamba, Qwen3-Next)",
            "test_bad_input.py::test_architectures_that_cannot_be_rolled_back",
            refused=True,
        ),
    ],
    "Drafts": [
        Elsewhere("Domino and DFlash", "test_greedy.py"),
        Elsewhere("the EAGLE-3-style baseline", "test_eagle.py::test_greedy_text_is_the_targets", path="assisted"),
    ],
    "Caches": [Elsewhere("offloaded", "test_targets.py::test_offloaded_caches", path="assisted")],
    "Arguments, continued": [
        Elsewhere(
            "processors that keep a state",
            "test_bad_input.py::test_processors_that_keep_a_state_are_refused_before_a_draft_misleads_them",
            refused=True,
        ),
        Elsewhere("sampling at any temperature, top-k, top-p: the same law", "test_sampling.py"),
    ],
}


def works(path: str) -> dict[str, list[str]]:
    """Names of what works, by group, that one of the loops decodes."""
    groups = {
        "Targets": list(ARCHITECTURES) if path == "loop" else [],
        "Arguments": [a.name for a in ARGUMENTS if not a.refused and a.path == path],
    }
    for group, rows in OTHERS.items():
        groups[group] = [row.name for row in rows if not row.refused and row.path == path]
    return groups


def table() -> str:
    """The README's table: names by outcome."""
    loop, assisted = works("loop"), works("assisted")
    refused = {"Targets": [], "Arguments": [a.name for a in ARGUMENTS if a.refused]}
    for group, rows in OTHERS.items():
        refused[group] = [row.name for row in rows if row.refused]
    lines = ["| | our loop | transformers' loop, one row a call | refused, in one sentence |", "|---|---|---|---|"]
    for group in loop:
        cells = (", ".join(outcome[group]) for outcome in (loop, assisted, refused))
        lines.append(f"| {group} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def readme_with_table() -> str:
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table() + "\n" + END + after


if __name__ == "__main__":
    sys.stdout.write(table())
    README.write_text(readme_with_table(), encoding="utf-8")
