"""What `draft.last_generation` counts, when it is reset, and what `head_disabled` changes."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from conftest import make_draft, make_rigged, make_target

from modeling_domino.statistics_domino import LastGeneration, RoundRecorder, of_rows


NEW = 12
pytestmark = pytest.mark.usefixtures("path")
ROUNDS = LastGeneration(
    drafted_per_round=(4, 4, 4, 4, 1),
    accepted_per_round=(4, 1, 0, 2, 1),
    tokens_per_round=(5, 2, 1, 2, 2),  # the fourth ended inside its accepted run
    path="assisted",
    reason="written by hand",
)


@pytest.fixture
def drafted_ids(monkeypatch):
    """Ids proposed in each round, as the recorder was told."""
    rounds, add = [], RoundRecorder.add

    def keep(self, drafted_ids, gained_ids, *seconds):
        rounds.append(drafted_ids)
        add(self, drafted_ids, gained_ids, *seconds)

    monkeypatch.setattr(RoundRecorder, "add", keep)
    return rounds


def generate(target, prompt, draft=None, **kwargs):
    return target.generate(prompt, assistant_model=draft, **{"max_new_tokens": NEW, "do_sample": False, **kwargs})


def test_totals_of_hand_written_rounds():
    assert (ROUNDS.rounds, ROUNDS.drafted, ROUNDS.accepted, ROUNDS.new_tokens) == (5, 17, 8, 13)
    assert ROUNDS.acceptance_length == 12 / 5


def test_acceptance_by_position_counts_only_rounds_that_judged_the_position():
    """Position 1: rounds 1, 2 and 4 judged it, two kept it; position 2 was never judged by the round that ended."""
    assert ROUNDS.acceptance_by_position == (4 / 5, 2 / 3, 1.0, 1.0)


@pytest.mark.parametrize(
    "drafted, accepted, tokens, rates",
    [
        ((5,), (2,), (2,), (1.0, 1.0)),  # ended by its second token: nothing is known of the third
        ((5,), (2,), (3,), (1.0, 1.0, 0.0)),
        ((5, 5), (0, 0), (1, 1), (0.0,)),
        ((2, 3), (2, 3), (3, 4), (1.0, 1.0, 1.0)),
        ((3, 0), (1, 0), (2, 1), (1.0, 0.0)),
        ((0,), (0,), (1,), ()),
    ],
)
def test_acceptance_by_position(drafted, accepted, tokens, rates):
    assert LastGeneration(drafted, accepted, tokens, "assisted", "").acceptance_by_position == rates


def test_a_call_that_the_prefill_ended():
    empty = RoundRecorder().summary("assisted", "why")
    assert empty == LastGeneration((), (), (), "assisted", "why")
    assert (empty.rounds, empty.drafted, empty.accepted, empty.new_tokens) == (0, 0, 0, 1)
    assert empty.acceptance_length == 0.0 and empty.acceptance_by_position == ()


@pytest.mark.parametrize(
    "drafted, gained, accepted",
    [
        ([5, 6, 7], [5, 6, 7, 8], 3),
        ([5, 6, 7], [5, 9], 1),
        ([5, 6, 7], [9], 0),
        ([5, 6, 7], [5, 6], 2),  # ended inside the accepted run
        ([5, 6, 7], [5, 6, 7], 3),  # ended with its last token
        ([], [9], 0),
    ],
)
def test_the_recorder_reads_acceptance_off_the_tokens(drafted, gained, accepted):
    recorder = RoundRecorder()
    recorder.add(drafted, gained, 0.25, 0.5)
    summary = recorder.summary("assisted", "")
    assert summary == LastGeneration((len(drafted),), (accepted,), (len(gained),), "assisted", "")
    assert (summary.draft_seconds, summary.verify_seconds) == ((0.25,), (0.5,))


def test_a_batch_is_its_rows_one_after_the_other():
    short = LastGeneration((4, 2), (1, 0), (2, 1), "assisted", "written by hand", (1.0, 2.0), (3.0, 4.0))
    empty = LastGeneration((), (), (), "assisted", "written by hand")
    whole = of_rows([short, ROUNDS, empty])
    assert whole.rows == (short, ROUNDS, empty) and of_rows([short]) is short
    assert (whole.rounds, whole.drafted, whole.accepted, whole.new_tokens) == (7, 23, 9, 3 + 15)
    assert whole.acceptance_length == 15 / 7
    assert whole.acceptance_by_position[0] == 5 / 7
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_it_is_a_value():
    assert pickle.loads(pickle.dumps(ROUNDS)) == ROUNDS
    assert len({ROUNDS, pickle.loads(pickle.dumps(ROUNDS))}) == 1
    with pytest.raises(FrozenInstanceError):
        ROUNDS.path = "other"


def test_numbers_of_rigged_calls(prompt, path):
    target = make_target(seed=2)  # ten distinct tokens
    text = generate(target, prompt)[0]
    draft = make_rigged(target, text, right=2)
    generate(target, prompt, draft)
    first = draft.last_generation
    assert first.drafted_per_round == (5, 5, 4, 1)
    assert first.accepted_per_round == (2, 2, 2, 1)
    assert first.tokens_per_round == (3, 3, 3, 2)
    assert first.acceptance_length == 11 / 4
    assert first.acceptance_by_position == (1.0, 1.0, 0.0)
    assert (first.path, first.new_tokens) == (path, NEW)
    assert len(first.draft_seconds) == len(first.verify_seconds) == 4
    assert min(first.draft_seconds + first.verify_seconds) > 0
    assert pickle.loads(pickle.dumps(first)) == first
    generate(target, prompt, draft, eos_token_id=int(text[6 + 5]))  # second token of the second round
    second = draft.last_generation
    assert (second.drafted_per_round, second.accepted_per_round) == ((5, 5), (2, 2))
    assert (second.tokens_per_round, second.new_tokens) == ((3, 2), 6)
    assert second.acceptance_by_position == (1.0, 1.0, 0.0)
    generate(target, prompt, draft, eos_token_id=int(text[6]))
    assert draft.last_generation == LastGeneration((), (), (), path, first.reason)
    assert first.rounds == 4  # later calls leave it alone


class Interrupt(Exception):
    pass


def interrupt(input_ids, scores):
    if input_ids.shape[1] == 6 + 8:
        raise Interrupt
    return scores


@pytest.mark.parametrize(
    "error, kwargs",
    [
        (ValueError, {"num_assistant_tokens": 9}),
        (ValueError, {"num_beams": 2}),
        (Interrupt, {"logits_processor": [interrupt]}),
        (ValueError, {"assistant_tokenizer": object()}),
        (ValueError, {"no_such_argument": 1}),
    ],
)
def test_a_failing_call_leaves_no_statistics(error, kwargs, target, prompt, draft):
    assert draft.last_generation is None
    generate(target, prompt, draft)
    assert draft.last_generation.new_tokens == NEW
    with pytest.raises(error):
        generate(target, prompt, draft, **kwargs)
    assert draft.last_generation is None
    generate(target, prompt, draft, max_new_tokens=4)
    assert draft.last_generation.new_tokens == 4


def test_plain_calls_leave_the_statistics_alone(target, prompt, draft):
    generate(target, prompt, draft)
    before = draft.last_generation
    generate(target, prompt)
    assert draft.last_generation is before


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix_len", [0, 1])
def test_head_disabled_drafts_from_base_logits_alone(shift_label, prefix_len, target, prompt, drafted_ids):
    """Same text, other drafts: those of the same draft with a zeroed correction."""
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    text = generate(target, prompt)
    runs = []

    def run():
        drafted_ids.clear()
        assert generate(target, prompt, draft).tolist() == text.tolist()
        runs.append(list(drafted_ids))

    run()
    with draft.head_disabled() as inside:
        assert inside is draft
        run()
    run()
    weight = draft.embed_proj[2].weight.detach().clone()
    torch.nn.init.zeros_(draft.embed_proj[2].weight)
    run()
    with_head, without_head, again, neutral = runs
    assert with_head != without_head
    assert again == with_head and neutral == without_head
    assert weight.abs().sum() > 0
    # The first draft tokens, whose logits the head leaves alone, differ nowhere.
    same = [with_head[0][:prefix_len], without_head[0][:prefix_len]]
    assert same[0] == same[1]


def test_head_disabled_is_restored_after_an_exception(target, prompt, draft, drafted_ids):
    generate(target, prompt, draft)
    before = list(drafted_ids)
    with pytest.raises(Interrupt), draft.head_disabled():
        assert not draft.head_enabled
        generate(target, prompt, draft, logits_processor=[interrupt])
    assert draft.head_enabled
    drafted_ids.clear()
    generate(target, prompt, draft)
    assert drafted_ids == before


def test_head_disabled_can_be_nested(draft):
    with draft.head_disabled():
        with draft.head_disabled():
            pass
        assert not draft.head_enabled
    assert draft.head_enabled
