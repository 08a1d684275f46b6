"""What cannot work, or would not be lossless, is refused with both values and a remedy before the target has run."""

import math
from contextlib import contextmanager

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from conftest import MASK, SIZES, make_config, make_draft, make_target
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StaticCache,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from modeling_domino import DominoCandidateGenerator, DominoConfig
from modeling_domino.statistics_domino import RoundRecorder


NEW = 8
pytestmark = pytest.mark.usefixtures("path")


class FrozenCache(DynamicCache):
    is_croppable = False


@contextmanager
def refused(target, *words):
    """A ValueError with all these words, and no forward pass of the target."""
    passes = []
    hook = target.model.register_forward_pre_hook(lambda module, args: passes.append(module))
    try:
        with pytest.raises(ValueError) as refusal:
            yield
    finally:
        hook.remove()
    assert not passes
    for word in words:
        assert word in str(refusal.value)


def generate(target, prompt, draft=None, **kwargs):
    return target.generate(prompt, assistant_model=draft, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def test_the_counter_counts(target, prompt, draft):
    with pytest.raises(AssertionError), refused(target):
        generate(target, prompt, draft)
        raise ValueError


@pytest.mark.parametrize(
    "trained_for, words",
    [
        ({"hidden_size": 64}, ("hidden size is 64", "the target's 32")),
        ({"num_hidden_layers": 7}, ("layers [1, 4] of 7", "has 5 layers")),
        ({"num_hidden_layers": 4}, ("of 4", "has 5 layers")),
        ({"vocab_size": 1000}, ("vocabulary has 1000 rows", "the target's 24", "tokenizers differ")),
        ({"vocab_size": 24 + 513}, ("vocabulary has 537 rows", "the target's 24")),
    ],
)
def test_draft_of_another_target(trained_for, words, target, prompt):
    target.config.name_or_path = "owner/target"
    with refused(target, *words, "Use a draft that was trained for owner/target"):
        generate(target, prompt, make_draft(make_target(**trained_for)))


def test_mask_token_outside_the_rows_of_the_target(target, prompt):
    draft = make_draft(make_target(vocab_size=32), mask_token_id=24)
    with refused(target, "mask token 24", "24 embedding rows", "Use a draft that was trained for LlamaForCausalLM"):
        generate(target, prompt, draft)


@pytest.mark.parametrize("kind, ids", [("bos", MASK), ("eos", MASK), ("eos", [3, MASK]), ("pad", MASK)])
def test_mask_token_that_the_call_uses(kind, ids, target, prompt, draft):
    with refused(target, f"mask token {MASK}", f"{kind.upper()} token of this call", "`mask_token_id`"):
        generate(target, prompt, draft, **{f"{kind}_token_id": ids})


SYNTH_ID = SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)


@pytest.mark.parametrize(
    "kwargs, words",
    [
        ({"num_beams": 3}, ("`num_beams=3`", "`num_beams=1` or drop `assistant_model`")),
        ({"num_beams": 2, "do_sample": True}, ("`num_beams=2`", "`num_beams=1`")),
        ({"prompt_lookup_num_tokens": 3}, ("`prompt_lookup_num_tokens=3`", "drop it or drop `assistant_model`")),
        ({"assistant_ensemble_weight": 0.5}, ("`assistant_ensemble_weight=0.5`", "drop it or drop `assistant_model`")),
        ({"assistant_early_exit": 2}, ("`assistant_early_exit=2`", "drop it or drop `assistant_model`")),
        ({"use_mtp": True}, ("`use_mtp=True`", "drop it or drop `assistant_model`")),
        (
            {"guidance_scale": 1.5},
            ("`guidance_scale=1.5`", "keeps a state", "drop it or drop `assistant_model`"),
        ),
        ({"penalty_alpha": 0.6, "top_k": 4}, ("`contrastive_search`", "greedily or by sampling")),
        ({"dola_layers": "low"}, ("`dola_generation`", "greedily or by sampling")),
        ({"force_words_ids": [[3]]}, ("`constrained_beam_search`", "greedily or by sampling")),
        ({"watermarking_config": SYNTH_ID}, ("`watermarking_config`", "SynthIDText", "keeps a state", "drop it or")),
        (
            {"use_cache": False, "output_attentions": True, "return_dict_in_generate": True},
            ("`output_attentions=True`", "`use_cache=False`", "leave `use_cache` on"),
        ),
        ({"custom_generate": lambda model, **kwargs: None}, ("`custom_generate`", "Drop `custom_generate`")),
        ({"assistant_tokenizer": object()}, ("`assistant_tokenizer`", "Drop `assistant_tokenizer`")),
        ({"cache": FrozenCache()}, ("FrozenCache", "cannot be cropped", "use the default cache")),
        (
            {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
            ("QuantizedCache", "`cache_implementation='quantized'`", "use the default cache"),
        ),
    ],
)
def test_calls_that_a_draft_cannot_decode(kwargs, words, target, prompt, draft):
    with refused(target, *words):
        generate(target, prompt, draft, **kwargs)
    assert draft.last_generation is None


def test_options_of_the_generation_config_are_refused_too(target, prompt, draft):
    with refused(target, "`num_beams=3`"):
        target.generate(
            prompt, generation_config=GenerationConfig(num_beams=3, max_new_tokens=NEW), assistant_model=draft
        )
    target.generation_config.prompt_lookup_num_tokens = 3
    with refused(target, "`prompt_lookup_num_tokens=3`"):
        generate(target, prompt, draft)


def test_batch_of_two_in_transformers_loop(target, prompt, draft):
    draft.decoding.path = "assisted"
    with refused(target, "2 rows", "`num_return_sequences=1`", "only our own loop", "'assisted'", "once for each row"):
        generate(target, prompt.repeat(2, 1), draft)


def test_a_batch_that_our_loop_cannot_decode_either(target, prompt, draft):
    draft.candidate_generator = type("OtherGenerator", (DominoCandidateGenerator,), {})
    draft.decoding.path = "auto"
    with refused(target, "2 rows", "the draft proposes through a OtherGenerator", "Call generate() once for each row"):
        generate(target, prompt.repeat(2, 1), draft)
    assert generate(target, prompt, draft).tolist() == generate(target, prompt).tolist()
    assert draft.last_generation.path == "assisted" and "OtherGenerator" in draft.last_generation.reason
    draft.decoding.path = "loop"
    with refused(target, "`draft.decoding.path` is 'loop'", "OtherGenerator", "set 'auto'"):
        generate(target, prompt, draft)


def test_a_batch_with_padding_on_the_right(target, prompt, draft):
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with refused(target, "Row 1 of the batch ends with padding", "`tokenizer.padding_side = 'left'`"):
        generate(target, prompt.repeat(2, 1), draft, attention_mask=mask)


def test_a_static_cache_that_is_too_small(target, prompt, draft):
    draft.decoding.path = "loop"

    def static(length: int):
        return StaticCache(target.config, max_cache_len=length)

    fits = generate(target, prompt, draft, cache=static(6 + NEW - 1))  # the last token need not be in it
    assert fits.tolist() == generate(target, prompt).tolist()
    with pytest.raises(ValueError, match=f"Row 0 goes on past the {6 + NEW - 2} tokens that the static cache holds"):
        generate(target, prompt, draft, cache=static(6 + NEW - 2))
    ended = {"cache": static(9), "eos_token_id": int(fits[0, 8])}
    assert generate(target, prompt, draft, **ended).tolist() == fits[:, :9].tolist()
    with refused(target, "The prompt of row 0 is longer than the 5 tokens that the static cache holds"):
        generate(target, prompt, draft, cache=static(5))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_texts_longer_than_a_table_of_positions(kind, prompt):
    """Rows count from their own first token, so the longest prompt is refused, by its number, and the shorter are not."""
    config_class, model_class, overrides = ARCHITECTURES[kind]
    sizes = {**SIZES, **overrides, "max_position_embeddings": 6 + NEW}
    target = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    draft = make_draft(target)
    draft.decoding.path = "loop"
    batch = torch.cat([prompt, prompt * (torch.arange(6) > 2)])
    mask = torch.tensor([[1] * 6, [0] * 3 + [1] * 3])
    longest = generate(target, batch, draft, attention_mask=mask, max_new_tokens=NEW + 1)
    assert longest.tolist() == generate(target, batch, attention_mask=mask, max_new_tokens=NEW + 1).tolist()
    with pytest.raises(ValueError, match=f"Row 0 goes on past the {6 + NEW} positions that the target has"):
        generate(target, batch, draft, attention_mask=mask, max_new_tokens=NEW + 2)
    assert generate(target, prompt[:, 3:], draft, max_new_tokens=NEW + 4).shape == (1, 3 + NEW + 4)


def test_out_of_memory_names_the_largest_buffers_and_what_to_lower(target, prompt, draft, monkeypatch):
    passes, forward = [], target.model.forward

    def give_up(*args, **kwargs):
        passes.append(1)
        if len(passes) == 3:
            raise torch.OutOfMemoryError("tried to allocate more")
        return forward(*args, **kwargs)

    monkeypatch.setattr(target.model, "forward", give_up)
    draft.decoding.path = "loop"
    words = (
        "with 3 rows.*keys and values of the target: 0.* MB.*Pass fewer rows, fewer `num_assistant_tokens`.*tried to"
    )
    with pytest.raises(torch.OutOfMemoryError, match=words):
        generate(target, prompt.repeat(3, 1), draft)
    assert draft.last_generation is None


class Counting:
    """A processor of a user that depends on how often it was called."""

    def __init__(self, how: str):
        self.how, self.calls, self.seen, self.tensor = how, 0, [], torch.zeros(3)

    def __call__(self, input_ids, scores):
        if self.how == "number":
            self.calls += 1
        elif self.how == "list":
            self.seen.append(input_ids.tolist())
        elif self.how == "tensor":
            self.tensor.add_(1)
        elif self.how == "new attribute" and input_ids.shape[1] > 6:
            self.late = True
        return scores


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    "how, attribute", [("number", "calls"), ("list", "seen"), ("tensor", "tensor"), ("new attribute", "late")]
)
def test_processors_that_keep_a_state_are_refused_before_a_draft_misleads_them(
    how, attribute, do_sample, target, prompt, draft
):
    processor = Counting(how)
    with pytest.raises(ValueError, match=f"`Counting` keeps a state \\(`{attribute}` changed"):
        generate(target, prompt, draft, logits_processor=[processor], do_sample=do_sample)
    assert processor.calls <= 2 and [len(ids[0]) for ids in processor.seen] in ([], [6, 7])


def test_processors_without_a_state_are_kept(target, prompt, draft):
    text = generate(target, prompt)
    assert generate(target, prompt, draft, logits_processor=[Counting("never")]).tolist() == text.tolist()
    assert generate(target, prompt, draft, logits_processor=[lambda ids, scores: scores]).tolist() == text.tolist()


def test_empty_cache_of_the_caller_is_used(target, prompt, draft):
    cache = DynamicCache(config=target.config)
    text = generate(target, prompt)
    assert generate(target, prompt, draft, cache=cache).tolist() == text.tolist()
    assert cache.get_seq_length() == text.shape[1] - 1


@pytest.mark.parametrize("shift_label, most", [(True, 5), (False, 4)])
@pytest.mark.parametrize("beyond", [True, False])
def test_number_of_assistant_tokens(shift_label, most, beyond, target, prompt):
    draft, tokens = make_draft(target, shift_label=shift_label), most + 1 if beyond else 0
    words = f"`num_assistant_tokens={tokens}`", f"1 to {most} tokens", f"`shift_label={shift_label}`", "leave it unset"
    with refused(target, *words):
        generate(target, prompt, draft, num_assistant_tokens=tokens)
    with refused(target, *words):
        config = GenerationConfig(num_assistant_tokens=tokens, max_new_tokens=NEW)
        target.generate(prompt, generation_config=config, assistant_model=draft)


@pytest.mark.parametrize("path", ["fast", "", None])
def test_unknown_path(path, target, prompt, draft):
    draft.decoding.path = path
    with refused(target, "`draft.decoding.path`", repr(path), "'auto', 'loop' or 'assisted'"):
        generate(target, prompt, draft)


@pytest.mark.parametrize("draft_temperature", [-1, -0.1, math.nan])
def test_negative_draft_temperature(draft_temperature, target, prompt, draft):
    draft.decoding.draft_temperature = draft_temperature
    with refused(target, "`draft.decoding.draft_temperature`", str(draft_temperature), "0 (greedy drafts)"):
        generate(target, prompt, draft)


@pytest.mark.parametrize("draft_temperature", [math.inf, 1e-40])
def test_draft_temperature_without_a_law(draft_temperature, target, prompt, draft):
    draft.decoding.draft_temperature = draft_temperature
    with refused(target, "`draft.decoding.draft_temperature`", str(draft_temperature)):
        generate(target, prompt, draft, do_sample=True, top_k=3)


def make_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=24, hidden_size=32, num_hidden_layers=2, state_size=4))


def make_t5():
    sizes = {"vocab_size": 24, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


def make_hybrid():
    config = Qwen3NextConfig(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    assert "linear_attention" in config.layer_types
    return Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(
    "make, words",
    [
        (make_t5, ("T5ForConditionalGeneration is an encoder-decoder", "needs a decoder-only target")),
        (make_mamba, ("MambaForCausalLM keeps a recurrent state", "use it without a draft")),
        (make_hybrid, ("Qwen3NextForCausalLM keeps a recurrent state (linear_attention)", "use it without a draft")),
    ],
)
def test_architectures_that_cannot_be_rolled_back(make, words, prompt, draft):
    with pytest.raises(ValueError) as refusal:
        generate(make(), prompt, draft)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("draft_rows, target_rows", [(24, 32), (32, 24), (24 + 512, 24)])
def test_other_padding_of_the_same_vocabulary_is_accepted(draft_rows, target_rows, prompt, monkeypatch):
    """The text is the target's; the drafts are those of a draft with as many rows and the same head."""
    target = make_target(vocab_size=target_rows)
    text = generate(target, prompt)
    draft, same = make_draft(target, vocab_size=draft_rows), make_draft(target)
    weights = draft.state_dict()
    rows, head = min(draft_rows, target_rows), "embed_proj.2.weight"
    fitting = torch.zeros_like(same.embed_proj[2].weight)
    fitting[:rows] = weights[head][:rows]
    same.load_state_dict({**weights, head: fitting})
    runs, add = {draft: [], same: []}, RoundRecorder.add
    for each, drafted in runs.items():
        monkeypatch.setattr(RoundRecorder, "add", lambda *args, to=drafted: (to.append(args[1]), add(*args)))
        assert generate(target, prompt, each).tolist() == text.tolist()
    assert runs[draft] == runs[same] and len(runs[draft]) > 1


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"target_layer_ids": [1, 9]}, ("taps layer 9", "layers 0 to 4", "choose ids within")),
        ({"target_layer_ids": [-1]}, ("taps layer -1", "layers 0 to 4", "choose ids within")),
        ({"target_layer_ids": [1, 4]}, ("taps layer 4, the target's last", "choose ids up to 3")),
        ({"target_layer_ids": []}, ("`target_layer_ids` is empty", "name at least one")),
        ({"num_target_layers": 1}, ("has 1 layer(s)", "before the last one")),
        ({"pure_draft_prefix_len": 5}, ("`pure_draft_prefix_len` is 5", "[0, 4]", "`block_size=5`")),
        ({"pure_draft_prefix_len": -1}, ("`pure_draft_prefix_len` is -1", "[0, 4]")),
        ({"block_size": 0}, ("`block_size` is 0", "at least 1", "raise it")),
        ({"block_size": 1, "shift_label": False}, ("`block_size` is 1", "at least 2", "raise it")),
        ({"mask_token_id": 24}, ("`mask_token_id` is 24", "24 embedding rows", "[0, 23]")),
        ({"mask_token_id": -1}, ("`mask_token_id` is -1", "[0, 23]")),
        ({"mask_token_id": 1}, ("`mask_token_id` is 1", "BOS", "choose a row")),
        ({"mask_token_id": 0}, ("`mask_token_id` is 0", "PAD", "choose a row")),
        ({"eos_token_id": MASK}, (f"`mask_token_id` is {MASK}", "EOS", "choose a row")),
        ({"eos_token_id": [2, MASK]}, (f"`mask_token_id` is {MASK}", "EOS", "choose a row")),
        ({"block_sise": 5}, ("no field `block_sise`",)),
        ({"attention_bias": True}, ("`attention_bias=True`", "set it to False")),
        ({"tie_word_embeddings": True}, ("`tie_word_embeddings=True`", "set it to False")),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
            ("`sliding_window` is 4", "at least `block_size=5`"),
        ),
    ],
)
def test_configurations_of_no_draft(overrides, words, target):
    with pytest.raises((ValueError, StrictDataclassError)) as refusal:
        make_config(target, **overrides)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    "misspelt, meant",
    [("block_sise", "block_size"), ("target_layer_id", "target_layer_ids"), ("shift_labels", "shift_label")],
)
def test_misspelt_field(misspelt, meant):
    with pytest.raises(ValueError, match=f"no field `{misspelt}`: did you mean `{meant}`"):
        DominoConfig(**{misspelt: 5})


@pytest.mark.parametrize(
    "overrides",
    [
        {"target_layer_ids": [0, 3]},
        {"pure_draft_prefix_len": 0},
        {"pure_draft_prefix_len": 4},
        {"block_size": 1, "pure_draft_prefix_len": 0},
        {"block_size": 2, "shift_label": False},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    ],
)
def test_the_last_values_that_fit(overrides, target, prompt):
    draft = make_draft(target, **overrides)
    assert generate(target, prompt, draft).tolist() == generate(target, prompt).tolist()


@pytest.mark.parametrize(
    "layers, taps",
    [
        *[(2, 1), (2, 2), (2, 5), (3, 1), (3, 2), (3, 5), (4, 1), (4, 5), (36, 1), (36, 5)],
    ],
)
def test_default_taps_never_include_the_last_layer(layers, taps):
    config = DominoConfig(num_target_layers=layers, num_hidden_layers=taps)
    assert config.target_layer_ids == sorted(set(config.target_layer_ids))
    assert 1 <= len(config.target_layer_ids) <= taps and config.target_layer_ids[-1] <= layers - 2


def test_from_target_needs_a_mask_token(target):
    with pytest.raises(ValueError, match="needs a mask token: pass `mask_token_id=`.* or `tokenizer=`"):
        DominoConfig.from_target(target.config)


def test_from_target_needs_a_decoder():
    with pytest.raises(ValueError, match="`t5` encoder-decoder; Domino drafts for decoder-only targets"):
        DominoConfig.from_target(make_t5().config, mask_token_id=MASK)
