"""The door into generate(): other calls pass untouched, wraps come and go cleanly, the target is left as it was."""

import functools
import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import MASK, SIZES, make_draft, make_rigged, make_target
from transformers import GenerationConfig, GenerationMixin, LlamaConfig, LlamaForCausalLM

from modeling_domino import compat_domino
from modeling_domino.compat_domino import find_speculator, install, is_installed, uninstall


NEW = 24
pytestmark = pytest.mark.usefixtures("path")


def door():
    return GenerationMixin.generate


@pytest.fixture(autouse=True)
def door_is_left_as_found():
    before = door()
    yield
    GenerationMixin.generate = before


def plain(target, prompt, **kwargs):
    return target.generate(prompt, max_new_tokens=NEW, do_sample=False, **kwargs).tolist()


def assert_decodes(target, prompt, assistant_model, draft):
    """The draft itself decodes the call, and gives the target's text."""
    draft.last_generation = None
    assert plain(target, prompt, assistant_model=assistant_model) == plain(target, prompt)
    assert draft.last_generation.new_tokens == NEW and draft.last_generation.drafted > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": "small"},
        {"assistant_model": "small", "do_sample": True},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_other_calls_are_the_same_with_and_without_the_door(options, target, prompt):
    if "assistant_model" in options:
        options = {**options, "assistant_model": make_target(seed=3, num_hidden_layers=1)}

    def outcome():
        torch.manual_seed(0)
        output = target.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, **options})
        return output if isinstance(output, torch.Tensor) else torch.cat([output.sequences, *output.scores], dim=-1)

    with_door = outcome()
    uninstall()
    assert not is_installed()
    assert torch.equal(outcome(), with_door)


@pytest.mark.parametrize("assisted", [False, True])
def test_custom_generate_callables_pass_through(assisted, target, prompt):
    def custom(model, input_ids, generation_config, marker=None, assistant_model=None, **kwargs):
        return model, input_ids.tolist(), generation_config.max_new_tokens, marker

    options = {"assistant_model": make_target(seed=3)} if assisted else {}
    result = target.generate(prompt, custom_generate=custom, max_new_tokens=3, marker="mine", **options)
    assert result == (target, prompt.tolist(), 3, "mine")


def test_custom_generate_callable_beside_a_draft_is_refused(target, draft, prompt):
    with pytest.raises(ValueError, match="`custom_generate` cannot be combined with a Domino draft"):
        target.generate(prompt, custom_generate=lambda *args, **kwargs: None, assistant_model=draft)


def test_second_install_changes_nothing():
    assert is_installed()
    before = door()
    install()
    assert door() == before


def test_uninstall_restores_transformers_own_and_install_opens_again(target, draft, prompt):
    original = door().__wrapped__
    uninstall()
    assert door() is original and not is_installed()
    assert original.__module__ == "transformers.generation.utils"
    uninstall()  # a second one finds nothing to do
    assert door() is original
    # The way without any patch: decoding leaves the door closed.
    assert plain(target, prompt, custom_generate=draft.speculate) == plain(target, prompt)
    assert draft.last_generation.new_tokens == NEW and door() is original
    install()
    assert is_installed()
    assert door().__wrapped__ is original
    assert_decodes(target, prompt, draft, draft)


def wrap_again(honest: bool):
    """Somebody else's wrapper around a method that has our door."""
    inner = GenerationMixin.generate

    def foreign_wrapper(self, *args, **kwargs):
        foreign_wrapper.calls += 1
        return inner(self, *args, **kwargs)

    foreign_wrapper.calls = 0
    outer = functools.wraps(inner)(foreign_wrapper) if honest else foreign_wrapper
    GenerationMixin.generate = outer
    return outer


def test_wrapper_on_top_is_kept_and_named_when_it_blocks_the_way(target, draft, prompt):
    foreign = wrap_again(honest=True)
    before = door()
    install()
    assert door() == before
    assert_decodes(target, prompt, draft, draft)
    assert foreign.calls > 0
    assert door() == before
    # functools.wraps copies the names of the wrapped function: only code and globals tell whose wrapper it is.
    with pytest.raises(RuntimeError, match="`GenerationMixin.generate` was wrapped again by .*test_door"):
        uninstall()
    assert door() == before


def test_wrapper_that_hides_what_it_wraps_does_no_harm(target, draft, prompt):
    foreign = wrap_again(honest=False)
    assert_decodes(target, prompt, draft, draft)
    install()
    assert_decodes(target, prompt, draft, draft)
    calls = foreign.calls
    plain(target, prompt, prompt_lookup_num_tokens=3)
    assert foreign.calls == calls + 1


def test_another_copy_of_the_door_is_recognised_and_serves_our_drafts(target, draft, prompt):
    spec = importlib.util.spec_from_file_location("another_compat_domino", compat_domino.__file__)
    other = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(other)
    before = door()
    assert other.is_installed()
    other.install()
    assert door() == before
    uninstall()
    originals = door()
    other.install()
    theirs = door()
    assert theirs.__globals__["__name__"] == "another_compat_domino"
    install()
    assert_decodes(target, prompt, draft, draft)
    assert door() == theirs
    uninstall()
    assert door() == originals


def test_threads_with_two_drafts_on_one_target_do_not_meet(target):
    torch.manual_seed(11)
    prompts = [torch.randint(3, MASK, (1, length)) for length in (3, 5, 7, 9)]
    texts = [plain(target, prompt) for prompt in prompts]
    drafts = [make_draft(target, seed=1), make_draft(target, seed=2, shift_label=False)]

    def decode(call: int):
        return call % 4, plain(target, prompts[call % 4], assistant_model=drafts[call // 4 % 2])

    with ThreadPoolExecutor(max_workers=4) as pool:
        for which, text in pool.map(decode, range(16)):
            assert text == texts[which]
    assert hooks_of(target) == 0


def hooks_of(target) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def state(target, draft) -> tuple:
    """Names on all modules of the target, and all configurations."""
    return (
        {name: set(vars(module)) for name, module in target.named_modules()},
        [config.to_dict() for config in (target.config, target.generation_config, draft.config)],
    )


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["prefill", "round", "nowhere"])
def test_nothing_is_left_on_the_target_however_the_call_ends(where, error, target, draft, prompt):
    plain(target, prompt)
    before, during = state(target, draft), []

    def processor(input_ids, scores):
        during.append(hooks_of(target))
        if (where == "prefill" and len(during) == 1) or (where == "round" and input_ids.shape[1] > 10):
            raise error
        return scores

    call = functools.partial(plain, target, prompt, assistant_model=draft, logits_processor=[processor])
    if where == "nowhere":
        call(num_assistant_tokens=3, assistant_confidence_threshold=0.1)
    else:
        with pytest.raises(error):
            call()
        assert draft.last_generation is None
    assert set(during) == {len(draft.config.target_layer_ids)}
    assert hooks_of(target) == 0
    assert state(target, draft) == before
    assert_decodes(target, prompt, draft, draft)


class Parallel(torch.nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


WRAPPERS = {
    "compile": torch.compile,
    "parallel": Parallel,
    "parallel_compile": lambda draft: Parallel(torch.compile(draft)),
    "compile_parallel": lambda draft: torch.compile(Parallel(draft)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrapped_draft_is_found_and_decodes(wrap, target, draft, prompt):
    wrapped = WRAPPERS[wrap](draft)
    assert wrapped is not draft
    assert find_speculator(wrapped).speculate.__self__ is draft
    assert_decodes(target, prompt, wrapped, draft)


@pytest.mark.parametrize("outer", [lambda model: model, Parallel], ids=["peft", "parallel_peft"])
def test_draft_under_peft_is_found_and_decodes(outer, target, draft, prompt):
    peft = pytest.importorskip("peft")
    wrapped = outer(peft.get_peft_model(draft, peft.LoraConfig(target_modules=["embed_proj.0", "embed_proj.2"])))
    assert find_speculator(wrapped).speculate.__self__ is draft
    assert_decodes(target, prompt, wrapped, draft)


def test_nothing_else_is_taken_for_a_draft(target):
    assert find_speculator(None) is None
    assert find_speculator(target) is None
    assert find_speculator(Parallel(target)) is None
    assert find_speculator("small") is None


def test_positional_assistant_model_is_seen(target, draft, prompt):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    output = target.generate(prompt, config, None, None, None, None, draft)
    assert output.tolist() == plain(target, prompt)
    assert draft.last_generation.new_tokens == NEW


@pytest.mark.parametrize("right", [0, 5])
def test_subclass_that_overrides_generate_is_served(right, prompt):
    class Override(LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)[:, 1:]

    torch.manual_seed(0)
    target = Override(LlamaConfig(**SIZES)).eval()
    text = GenerationMixin.generate(target, prompt, max_new_tokens=NEW, do_sample=False)
    draft = make_rigged(target, text[0], right)
    assert plain(target, prompt, assistant_model=draft) == text[:, 1:].tolist() == plain(target, prompt)
    assert draft.last_generation.rounds == (NEW - 1 if right == 0 else 4)


@pytest.mark.parametrize("source", ["keyword", "generation_config", "target"])
def test_draft_length_holds_for_its_own_call_only(source, target, draft, prompt):
    config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
    short = GenerationConfig(max_new_tokens=NEW, do_sample=False, num_assistant_tokens=2)
    text = plain(target, prompt)
    if source == "target":
        target.generation_config.num_assistant_tokens = 2
        options = {"generation_config": config}
    else:
        options = {"generation_config": config, "num_assistant_tokens": 2} if source == "keyword" else {}
        options = options or {"generation_config": short}
    assert target.generate(prompt, assistant_model=draft, **options).tolist() == text
    assert max(draft.last_generation.drafted_per_round) == 2
    target.generation_config.num_assistant_tokens = None
    assert target.generate(prompt, assistant_model=draft, generation_config=config).tolist() == text
    assert max(draft.last_generation.drafted_per_round) == 5
