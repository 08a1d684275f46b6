"""Calls drawn at random: any target, draft, prompt and set of arguments gives what plain generate() gives."""

import functools

import pytest
import torch
from architectures import make_architecture
from conftest import MASK, PAD, make_draft, make_rigged
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import ARGUMENTS, Call
from test_arguments import assert_same, target_output


KINDS = ["llama", "mistral (sliding window)", "gemma3", "gpt2", "bloom", "granite", "qwen3-moe"]
FREE = [argument for argument in ARGUMENTS if argument.free and not argument.refused]
LONGEST = 18


@functools.cache
def target_of(kind: str):
    return make_architecture(kind)


@st.composite
def calls(draw) -> dict:
    return {
        "kind": draw(st.sampled_from(KINDS)),
        "prompt": draw(st.lists(st.integers(3, MASK - 1), min_size=1, max_size=12)),
        "style": draw(st.sampled_from(["ids", "ids", "padded", "embedded"])),
        "padding": draw(st.integers(1, 4)),
        "new_tokens": draw(st.integers(1, LONGEST)),
        "arguments": draw(st.lists(st.sampled_from(FREE), max_size=3, unique_by=lambda argument: argument.name)),
        "shift_label": draw(st.booleans()),
        "prefix_len": draw(st.integers(0, 2)),
        "right": draw(st.sampled_from([None, 0, 1, 2, 3, 4])),
        "seed": draw(st.integers(0, 9)),
    }


class Tally:
    """Counts draws, and those that a draft refuses."""

    def __init__(self):
        self.drawn = self.refused = 0

    def check(self, drawn: dict) -> None:
        target = target_of(drawn["kind"])
        prompt = torch.tensor([drawn["prompt"]])
        new = target.generate(prompt, max_new_tokens=LONGEST, do_sample=False)[0, prompt.shape[1] :].tolist()
        new += [4] * (10 - len(new))

        def options() -> dict:
            asked = {"max_new_tokens": drawn["new_tokens"], "do_sample": False, "inputs": prompt}
            for argument in drawn["arguments"]:
                asked |= argument.build(Call(target, prompt, new))
            if drawn["style"] == "embedded":
                asked["inputs_embeds"] = target.get_input_embeddings()(asked.pop("inputs")).detach()
            elif drawn["style"] == "padded":
                padding = torch.full((1, drawn["padding"]), PAD)
                asked["inputs"] = torch.cat([padding, prompt], dim=1)
                asked["attention_mask"] = torch.cat([torch.zeros_like(padding), torch.ones_like(prompt)], dim=1)
            return asked

        try:
            plain = target_output(target.generate(**options()))
        except (ValueError, TypeError, IndexError, RuntimeError):
            return  # no call of transformers either
        self.drawn += 1
        shape = {"shift_label": drawn["shift_label"], "pure_draft_prefix_len": drawn["prefix_len"]}
        if drawn["right"] is None:
            draft = make_draft(target, seed=drawn["seed"], **shape)
        else:
            text = plain["sequences"][0]
            if drawn["style"] == "embedded":
                text = torch.cat([prompt[0], text])
            elif drawn["style"] == "padded" and drawn["kind"] != "bloom":
                text = text[drawn["padding"] :]  # positions count from the first real token; Bloom has none
            draft = make_rigged(target, text, drawn["right"], **shape)
        try:
            ours = target_output(target.generate(assistant_model=draft, **options()))
        except ValueError as refusal:
            assert "assistant_model" in str(refusal) or "Use a draft" in str(refusal)
            self.refused += 1
            return
        assert_same(ours, plain)
        stats = draft.last_generation
        assert stats.path == ("assisted" if draft.decoding.path == "assisted" else "loop")
        produced = plain["sequences"].shape[1] - (0 if drawn["style"] == "embedded" else options()["inputs"].shape[1])
        assert stats.new_tokens == produced
        limits = {argument.name for argument in drawn["arguments"]}
        if drawn["right"] is not None and "`assistant_confidence_threshold`" not in limits:
            most = min(2 if "`num_assistant_tokens`" in limits else 5, draft.config.max_draft_tokens)
            # A processor may turn a wrong proposal into a right one, never the other way round.
            assert stats.rounds <= -(-(produced - 1) // (min(drawn["right"], most) + 1))


def run(examples: int) -> None:
    tally = Tally()
    phases = (Phase.generate, Phase.shrink)
    common = {"deadline": None, "derandomize": True, "database": None, "phases": phases}
    search = settings(max_examples=examples, suppress_health_check=list(HealthCheck), **common)(
        given(calls())(lambda drawn: tally.check(drawn))
    )
    search()
    assert tally.drawn >= examples // 2
    assert tally.refused <= tally.drawn / 10


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_call(path):
    run(60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_call_at_length(path):
    run(1500)
