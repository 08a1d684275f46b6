"""Greedy decoding with a draft equals plain generate() token for token in float32, in the expected number of rounds."""

import pytest
from conftest import TARGETS, make_draft, make_rigged, make_target


NEW = 24
pytestmark = pytest.mark.usefixtures("path")


def plain(target, prompt, **kwargs):
    return target.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def expected_rounds(new_tokens: int, right: int) -> int:
    """Prefill gives one token, then each round the right ones and the target's own."""
    return -(-(new_tokens - 1) // (right + 1))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_rigged_draft_gives_the_same_text_in_the_known_number_of_rounds(kind, shift_label, right, prompt, path):
    target = make_target(kind)
    text = plain(target, prompt)
    most = 5 if shift_label else 4
    draft = make_rigged(target, text[0], right, shift_label=shift_label)
    output = target.generate(prompt, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert output.tolist() == text.tolist()
    assert draft.last_generation.path == path
    assert draft.last_generation.rounds == expected_rounds(NEW, min(right, most))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("seed", range(3))
def test_random_draft_gives_the_same_text(kind, seed, prompt, path):
    target = make_target(kind)
    draft = make_draft(target, seed=seed)
    text = plain(target, prompt)
    output = target.generate(prompt, max_new_tokens=NEW, do_sample=False, assistant_model=draft)
    assert output.tolist() == text.tolist()
    stats = draft.last_generation
    assert stats.path == path
    assert stats.new_tokens == NEW
    assert sum(stats.tokens_per_round) == stats.accepted + stats.rounds == NEW - 1
    assert 0 < stats.drafted <= 5 * stats.rounds
