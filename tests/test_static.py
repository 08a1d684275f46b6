"""The calls of a round have the same shapes from round to round, and each is one graph."""

import pytest
import torch
from conftest import MASK, make_draft, make_target

from modeling_domino import candidate_generator_domino, decoding_domino
from modeling_domino.correction_domino import draft_block
from modeling_domino.decoding_domino import DecodingLoop
from modeling_domino.verification_domino import accept_greedy, accept_sampled, draw, pack_round


def shape_of(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {name: shape_of(item) for name, item in value.items()}
    return tuple(shape_of(item) for item in value) if isinstance(value, tuple | list) else None


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_every_call_of_a_round_has_the_shapes_of_the_round_before(rows, do_sample, target, prompt, monkeypatch):
    draft, calls = make_draft(target), {}

    def watch(owner, name):
        inner = getattr(owner, name)

        def watched(*args, **kwargs):
            calls.setdefault(name, []).append(str((shape_of(args), shape_of(kwargs))))
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    watch(draft, "backbone")
    watch(target.model, "forward")
    watch(candidate_generator_domino, "draft_block")
    for name in ("accept_greedy", "accept_sampled", "pack_round"):
        watch(decoding_domino, name)
    torch.manual_seed(0)
    target.generate(prompt.repeat(rows, 1), assistant_model=draft, max_new_tokens=40, do_sample=do_sample)
    accept = calls.pop("accept_sampled" if do_sample else "accept_greedy")
    assert set(calls) == {"backbone", "forward", "draft_block", "pack_round"}
    for name, shapes in [*calls.items(), ("accept", accept)]:
        first = 0 if name in ("draft_block", "accept") else 1  # of the prompt
        rounds = shapes[first : first + 5]  # in which no row comes near its end
        assert len(rounds) == 5 and len(set(rounds)) == 1, name


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def whole():
    """Compiles a function into one graph, for each shape anew."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        yield lambda function: torch.compile(function, fullgraph=True, backend="eager")
    torch._dynamo.reset()


def test_the_drafts_pass_is_one_graph_from_round_to_round(target, prompt, whole):
    text = target.generate(prompt, max_new_tokens=60, do_sample=False)
    draft = make_draft(target)
    seen, compiled = [], whole(draft.backbone)

    def backbone(*args, **kwargs):
        hidden_states = compiled(*args, **kwargs)
        seen.append(graphs())
        return hidden_states

    draft.backbone = backbone
    output = target.generate(prompt, assistant_model=draft, max_new_tokens=60, do_sample=False)
    assert output.tolist() == text.tolist()
    assert seen[1] == 2 and len(seen) > 10  # of the prompt's rows, and of a round's
    assert set(seen[1:-5]) == {2}


def test_correction_and_acceptance_are_one_graph_each(target, whole):
    draft = make_draft(target)
    head, vocabulary, rows, drafts = draft.head_weights(), target.config.vocab_size, 3, 5
    embedding = target.get_input_embeddings()

    def propose(hidden_states, base_logits, anchors, noise):
        laws = []

        def choose(i, logits):
            laws.append(logits)
            return draw(logits.softmax(dim=-1), noise[:, i]), False

        drafted = draft_block(head, hidden_states, base_logits, anchors, prefix_len=1, embed=embedding, choose=choose)
        return drafted, torch.stack(laws, dim=1)

    def accept(drafted, counts, p_logits, q_logits, uniforms, noise, rooms, eos):
        accepted, tokens = accept_sampled(drafted, counts, p_logits, q_logits, uniforms, noise)
        return pack_round(accepted, tokens, drafted, counts, rooms, eos)

    def accept_best(drafted, counts, logits, rooms, eos):
        return pack_round(*accept_greedy(drafted, counts, logits), drafted, counts, rooms, eos)

    compiled = {function: whole(function) for function in (propose, accept, accept_best)}
    for seed in range(4):
        torch.manual_seed(seed)
        hidden_states = torch.randn(rows, drafts, target.config.hidden_size)
        noise = torch.empty(rows, drafts, vocabulary).exponential_()
        proposal = hidden_states, torch.randn(rows, drafts, vocabulary), torch.randint(3, MASK, (rows,)), noise
        drafted, laws = propose(*proposal)
        ours = compiled[propose](*proposal)
        assert torch.equal(ours[0], drafted) and torch.equal(ours[1], laws)
        logits, counts = torch.randn(rows, drafts + 1, vocabulary), torch.randint(0, drafts + 1, (rows,))
        rooms, eos = torch.randint(1, 9, (rows,)), torch.tensor([4, 9])
        sampled = drafted, counts, logits, laws, torch.rand(rows, drafts), noise[:, 0], rooms, eos
        assert torch.equal(compiled[accept](*sampled), accept(*sampled))
        greedy = drafted, counts, logits, rooms, eos
        assert torch.equal(compiled[accept_best](*greedy), accept_best(*greedy))
        assert graphs() == 3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_round_brings_one_tensor_to_the_host(rows, target, prompt, monkeypatch):
    draft, copies, rounds = make_draft(target), [], []
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "nonzero", "cpu"):
        inner = getattr(torch.Tensor, name)

        def counted(tensor, *args, name=name, inner=inner, **kwargs):
            if inside and inside[-1]:
                copies.append(name)
            return inner(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    inside, whole_round = [], DecodingLoop._round

    def one_round(self):
        inside.append(True)
        whole_round(self)
        inside.pop()
        rounds.append(list(copies))
        copies.clear()

    monkeypatch.setattr(DecodingLoop, "_round", one_round)
    target.generate(prompt.repeat(rows, 1), assistant_model=draft, max_new_tokens=30, do_sample=False)
    assert len(rounds) > 5 and all(names == ["tolist"] for names in rounds)


def test_a_longer_context_changes_shapes_by_chunks_only(prompt):
    target = make_target(max_position_embeddings=1024, num_hidden_layers=3)
    draft, seen = make_draft(target, num_hidden_layers=1), []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    try:
        target.generate(prompt, assistant_model=draft, max_new_tokens=300, do_sample=False, num_assistant_tokens=5)
    finally:
        hook.remove()
    widths = [mask.shape[-1] for mask in seen[1:]]
    assert set(widths) == {128, 256, 384} and widths == sorted(widths)
