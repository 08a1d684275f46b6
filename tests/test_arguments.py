"""Every row of the README's table, with a random draft and with one that is rigged to be right."""

import inspect
from pathlib import Path

import pytest
import torch
from conftest import MASK, make_draft, make_rigged, make_target
from support import ARGUMENTS, OTHERS, README, Call, Listener, readme_with_table, works


NEW = 14
ROW_BY_ROW = "only our own loop decodes together.*once for each row"
pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture(scope="module")
def call():
    target = make_target("qwen2", seed=9, attn_implementation="eager")
    torch.manual_seed(226)
    prompt = torch.randint(3, MASK, (1, 6))
    text = target.generate(prompt, max_new_tokens=NEW, do_sample=False)
    return Call(target, prompt, text[0, 6:].tolist())


def run(call: Call, options: dict, draft=None):
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    if "generation_config" in options:
        options.pop("max_new_tokens")
    prompt = options.pop("prompt", call.prompt)
    if options["max_new_tokens" if "max_new_tokens" in options else "do_sample"] is None:
        options.pop("max_new_tokens")
    if "inputs_embeds" in options:
        prompt = None
    return target_output(call.target.generate(prompt, assistant_model=draft, **options)), options


def target_output(output) -> dict:
    return {"sequences": output} if isinstance(output, torch.Tensor) else dict(output)


def assert_same(ours: dict, plain: dict) -> None:
    """The same fields with the same ids; numbers within the rounding of wider matrix products."""
    assert ours["sequences"].tolist() == plain["sequences"].tolist()
    assert set(ours) == set(plain)
    for name in set(plain) - {"sequences", "cache"}:
        assert_close(ours[name], plain[name])


def assert_close(ours, plain) -> None:
    if isinstance(plain, tuple):
        for one, other in zip(ours, plain, strict=True):
            assert_close(one, other)
    else:  # rounding is relative to the largest numbers that were summed
        scale = plain.nan_to_num(posinf=0.0, neginf=0.0).abs().max().clamp(min=1.0).item()
        torch.testing.assert_close(ours, plain, atol=1e-4 * scale, rtol=1e-4)


@pytest.mark.parametrize("argument", [a for a in ARGUMENTS if not a.refused], ids=lambda argument: argument.name)
def test_works(argument, call, path):
    if argument.batch and path == "assisted":
        with pytest.raises(ValueError, match=ROW_BY_ROW):
            run(call, argument.build(call), make_draft(call.target))
        return
    plain, options = run(call, argument.build(call))
    heard = options.get("streamer")
    prompt = torch.tensor([[]], dtype=torch.long) if "inputs_embeds" not in options else call.prompt
    text = torch.cat([prompt[0], plain["sequences"][0]])
    for draft in (make_rigged(call.target, text, right=4), make_draft(call.target)):
        ours, options = run(call, argument.build(call), draft)
        assert_same(ours, plain)
        assert draft.last_generation.path == ("assisted" if path == "assisted" else argument.path)
        if heard is not None:
            assert isinstance(heard, Listener) and heard.ends == options["streamer"].ends == 1
            assert options["streamer"].tokens == heard.tokens == plain["sequences"][0].tolist()


@pytest.mark.parametrize("argument", [a for a in ARGUMENTS if a.refused], ids=lambda argument: argument.name)
def test_refused(argument, call, path):
    reason = ROW_BY_ROW if argument.batch and path == "assisted" else argument.refused
    passes = []
    hook = call.target.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises((ValueError, NotImplementedError), match=reason):
            run(call, argument.build(call), make_draft(call.target))
    finally:
        hook.remove()
    assert not passes


def test_every_argument_of_generate_is_in_the_table(call):
    """Also those to come: a new transformers that adds one makes this fail."""
    known = " ".join(argument.name for argument in ARGUMENTS)
    signature = set(inspect.signature(type(call.target).generate).parameters)
    covered_elsewhere = {
        "self",
        "inputs",
        "kwargs",
        "assistant_model",
        "custom_generate",  # test_door.py
        "negative_prompt_ids",  # of guidance
        "negative_prompt_attention_mask",
        "use_model_defaults",
    }
    missing = [name for name in signature - covered_elsewhere if name not in known]
    assert not missing


def test_rows_with_tests_of_their_own_have_them():
    for rows in OTHERS.values():
        for row in rows:
            file, _, name = row.test.partition("::")
            source = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert f"def {name}(" in source or not name, row


def test_few_of_the_rows_that_work_leave_our_loop():
    ours, theirs = (sum(len(names) for names in works(path).values()) for path in ("loop", "assisted"))
    assert theirs <= 0.15 * (ours + theirs)
    assert works("assisted")["Arguments"] == []


def test_the_readme_shows_this_table():
    assert README.read_text(encoding="utf-8") == readme_with_table(), "run: python tests/support.py"


def test_processors_see_every_verified_prefix_with_the_logits_of_plain_decoding(call):
    def recorder(seen: dict):
        def record(ids, scores):
            seen.setdefault(tuple(ids[0].tolist()), []).append(scores[0].clone())
            return scores

        return record

    plain, ours = {}, {}
    text, _ = run(call, {"logits_processor": [recorder(plain)]})
    draft = make_rigged(call.target, text["sequences"][0], right=2)
    run(call, {"logits_processor": [recorder(ours)]}, draft)
    assert len(plain) == NEW and set(plain) <= set(ours)
    for prefix, (scores,) in plain.items():
        torch.testing.assert_close(ours[prefix][-1], scores, atol=1e-4, rtol=0)  # the last look is the target's


@pytest.mark.parametrize("size", [1, 4, 6, 100])
def test_a_prompt_in_chunks_records_its_last_chunk(size, call):
    options = {"prefill_chunk_size": size, "return_dict_in_generate": True, "output_hidden_states": True}
    plain, _ = run(call, {**options, "output_attentions": True})
    assert plain["hidden_states"][0][0].shape[1] == {1: 1, 4: 2, 6: 6, 100: 6}[size]
    ours, _ = run(call, {**options, "output_attentions": True}, make_draft(call.target))
    assert_same(ours, plain)


def test_one_seed_gives_one_text(call):
    draft = make_draft(call.target)
    texts = []
    for seed in (1, 1, 2, 3):
        torch.manual_seed(seed)
        texts.append(run(call, {"do_sample": True, "temperature": 2.0}, draft)[0]["sequences"].tolist())
    assert texts[0] == texts[1] and len({str(text) for text in texts}) > 1


def test_a_threshold_holds_for_its_own_call_only(call):
    draft = make_draft(call.target)
    run(call, {}, draft)
    whole = draft.last_generation.drafted_per_round
    run(call, {"assistant_confidence_threshold": 0.9999}, draft)
    assert set(draft.last_generation.drafted_per_round) <= {0, 1}
    run(call, {}, draft)
    assert draft.last_generation.drafted_per_round == whole
