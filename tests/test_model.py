"""The draft model: which slot and which prefix each prediction reads, caches, masks, precision, adapters."""

import copy

import pytest
import torch
from conftest import MASK, SIZES, TARGETS, make_config, make_draft, make_rigged, make_target
from torch.nn import functional as F
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
)

from modeling_domino import DominoConfig, DominoForSpeculativeDraft, correction_domino
from modeling_domino.anchors import block_attention_mask
from modeling_domino.correction_domino import PrefixGRU, draft_block, gru_step
from modeling_domino.statistics_domino import RoundRecorder
from modeling_domino.target_domino import BorrowedTarget


NEW = 24
HEAD = ["prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"]

# B=4. For each prediction x_{a+1}, x_{a+2}, ...: the slot whose H it reads, and the offsets from a of the tokens that
# the GRU has consumed when a correction is added, None where the base logits are kept.
TABLES = {
    (True, 0): [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])],
    (True, 1): [(0, None), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 3])],
    (True, 2): [(0, None), (1, None), (2, [0, 1, 2]), (3, [0, 1, 2, 3])],
    (False, 0): [(1, [0]), (2, [0, 1]), (3, [0, 1, 2])],
    (False, 1): [(1, None), (2, [0, 1]), (3, [0, 1, 2])],
    (False, 2): [(1, None), (2, None), (3, [0, 1, 2])],
}
ALIGNMENTS = [(shift_label, prefix_len) for shift_label, prefix_len in TABLES]
per_alignment = pytest.mark.parametrize(("shift_label", "prefix_len"), ALIGNMENTS)


def plain(target, prompt):
    return target.generate(prompt, max_new_tokens=NEW, do_sample=False)


def drafted(target, prompt, draft, **kwargs):
    return target.generate(prompt, max_new_tokens=NEW, do_sample=False, assistant_model=draft, **kwargs)


def context_of(target, draft, ids, attention_mask=None):
    """Context hidden states of every row of `ids`, read from transformers' own output."""
    with torch.no_grad():
        states = target(ids, attention_mask=attention_mask, output_hidden_states=True).hidden_states
    return torch.cat([states[layer_id + 1] for layer_id in draft.config.target_layer_ids], dim=-1)


def embed(target, ids):
    return target.get_input_embeddings()(ids).detach()


def noise_of(target, draft, anchor_ids):
    """Embeddings of [x_a, MASK, ...], [..., B, H]."""
    block = F.pad(anchor_ids[..., None], (0, draft.config.block_size - 1), value=draft.config.mask_token_id)
    return embed(target, block)


@pytest.fixture
def rigged_head(monkeypatch):
    """A draft of toy numbers whose logits tell what they were made of, and the true tokens [4, 5, 6, 7, 3] of a block.

    Slot k's hidden state is one-hot k, the GRU counts the tokens it has read: logits are 100 at k, plus, when a
    correction is added, 20 at k and at 8 + t for each token t read.
    """

    def make(shift_label: bool, prefix_len: int):
        sizes = {"hidden_size": 8, "gru_hidden_dim": 8, "emb_dim": 16, "vocab_size": 16, "mask_token_id": 15}
        heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8}
        alignment = {"shift_label": shift_label, "pure_draft_prefix_len": prefix_len}
        draft = DominoForSpeculativeDraft(
            DominoConfig(**sizes, **heads, **alignment, block_size=4, num_hidden_layers=1, target_layer_ids=[1])
        )
        with torch.no_grad():
            draft.embed_proj[0].weight.copy_(20 * torch.eye(16))
            draft.embed_proj[2].weight.copy_(torch.eye(16))
            draft.prefix_gru.weight_ih_l0.copy_(torch.eye(24, 8))
        monkeypatch.setattr(correction_domino, "gru_step", lambda gates, state, weight: state + gates[..., :8])
        return draft

    return make


def one_hot(token_ids):
    return F.one_hot(token_ids, 8).float()


def read(logits):
    """(slot, tokens read by the GRU or None) of one prediction's logits [16]."""
    slot = int(logits[:8].argmax())
    tokens = [token for token in range(8) if logits[8 + token] > 0]
    assert float(logits[slot]) == (120.0 if tokens else 100.0)
    return slot, sorted(tokens, key=[4, 5, 6, 7, 3].index) or None


def expected(shift_label, prefix_len):
    tokens = [4, 5, 6, 7, 3]
    return [(slot, read and [tokens[k] for k in read]) for slot, read in TABLES[shift_label, prefix_len]]


@per_alignment
def test_teacher_forced_predictions_read_the_slots_and_tokens_of_the_table(shift_label, prefix_len, rigged_head):
    draft = rigged_head(shift_label, prefix_len)
    predictions = 4 if shift_label else 3
    prefix = torch.tensor([4, 5, 6, 7])[:predictions]
    draft.backbone = lambda *args, **kwargs: torch.eye(4, 8)[None, None]
    output = draft(None, None, one_hot(prefix)[None, None], None, lambda hidden: F.pad(100 * hidden, (0, 8)))
    assert output.logits.shape == (1, 1, predictions, 16)
    assert [read(logits) for logits in output.logits[0, 0].detach()] == expected(shift_label, prefix_len)
    assert output.base_logits[0, 0].argmax(-1).tolist() == [slot for slot, _ in TABLES[shift_label, prefix_len]]


@per_alignment
def test_drafted_predictions_read_the_slots_and_tokens_of_the_table(shift_label, prefix_len, rigged_head):
    draft = rigged_head(shift_label, prefix_len)
    tokens, consumed, consumed_at, seen = [4, 5, 6, 7, 3], [], [], []

    def consume(token_ids):
        consumed.extend(token_ids.tolist())
        return one_hot(token_ids)

    def choose(i, logits):
        consumed_at.append(list(consumed))
        seen.append(read(logits[0].detach()))
        return torch.tensor([tokens[i + 1]]), False

    hidden = draft.predicting_slots(torch.eye(4, 8)[None, None])[:, 0]
    drafted_ids = draft_block(
        draft.head_weights(),
        hidden,
        F.pad(100 * hidden, (0, 8)),
        torch.tensor([4]),
        prefix_len=prefix_len,
        embed=consume,
        choose=choose,
    )
    predictions = 4 if shift_label else 3
    assert drafted_ids.tolist() == [tokens[1 : 1 + predictions]]
    assert seen == expected(shift_label, prefix_len)
    assert consumed_at == [tokens[: i + 1] for i in range(predictions)]


def test_a_block_ends_with_the_token_that_choose_names(rigged_head):
    draft = rigged_head(True, 1)
    hidden = torch.eye(4, 8)[None]
    drafted_ids = draft_block(
        draft.head_weights(),
        hidden,
        F.pad(hidden, (0, 8)),
        torch.tensor([4]),
        prefix_len=1,
        embed=one_hot,
        choose=lambda i, logits: (torch.tensor([5 + i]), i == 1),
    )
    assert drafted_ids.tolist() == [[5, 6]]


def left_to_right(target, draft, ids, anchor, context):
    """Final logits of the block at `anchor` of one row, [K, V]: cached backbone, then the decoding loop, which is fed
    the row's own tokens."""
    cache, rows, logits = DynamicCache(), [], []
    for part in (context[:, : anchor // 2], context[:, anchor // 2 : anchor]):
        first, last = sum(rows), sum(rows) + part.shape[1]
        rows.append(part.shape[1])
        positions = torch.cat([torch.arange(first, last), torch.arange(last, last + draft.config.block_size)])[None]
        noise = noise_of(target, draft, ids[None, None, anchor])
        hidden = draft.backbone(noise, part, positions, cache=cache)
    hidden = draft.predicting_slots(hidden)[:, 0]

    def choose(i, step_logits):
        logits.append(step_logits[0])
        return ids[None, anchor + 1 + i], False

    draft_block(
        draft.head_weights(),
        hidden,
        BorrowedTarget(target).logits(hidden),
        ids[None, anchor],
        prefix_len=draft.config.pure_draft_prefix_len,
        embed=lambda token_ids: embed(target, token_ids),
        choose=choose,
    )
    return torch.stack(logits)


def compare_training_with_decoding(target, draft):
    """Two right-padded rows of 16 and 12 tokens with three and two blocks, overlapping ones among them."""
    torch.manual_seed(3)
    ids = torch.randint(3, MASK, (2, 16))
    attention_mask = torch.ones_like(ids)
    ids[1, 12:] = attention_mask[1, 12:] = 0
    anchors = torch.tensor([[2, 4, 10], [3, 6, 0]])
    context = context_of(target, draft, ids, attention_mask)
    slots, predictions = draft.config.block_size, draft.config.max_draft_tokens
    window = draft.config.sliding_window
    positions = torch.cat([torch.arange(16).expand(2, -1), (anchors[..., None] + torch.arange(slots)).flatten(1)], -1)
    prefix = ids.gather(1, (anchors[..., None] + torch.arange(predictions)).flatten(1)).view(2, 3, predictions)
    with torch.no_grad():
        output = draft(
            noise_of(target, draft, ids.gather(1, anchors)),
            context,
            embed(target, prefix),
            positions,
            BorrowedTarget(target).logits,
            attention_mask={
                "full_attention": block_attention_mask(anchors, attention_mask, slots),
                "sliding_attention": block_attention_mask(anchors, attention_mask, slots, window),
            },
        )
        for row, block in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            loop = left_to_right(target, draft, ids[row], int(anchors[row, block]), context[row : row + 1])
            # Both orders of summation round in float32; logits are of order 10.
            torch.testing.assert_close(output.logits[row, block], loop, atol=1e-5, rtol=1e-5)
    corrected = (output.logits != output.base_logits).any(dim=-1)
    assert corrected[:, :, draft.config.pure_draft_prefix_len :].all()
    assert not corrected[:, :, : draft.config.pure_draft_prefix_len].any()


@per_alignment
def test_teacher_forced_logits_equal_the_left_to_right_loop(shift_label, prefix_len, target):
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    compare_training_with_decoding(target, draft)


def test_teacher_forced_logits_equal_the_left_to_right_loop_past_a_sliding_window(target):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    compare_training_with_decoding(target, make_draft(target, **layers))


@per_alignment
def test_tokens_that_generate_drafts_are_those_of_the_teacher_forced_forward(
    path, shift_label, prefix_len, target, prompt, monkeypatch
):
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    with torch.no_grad():
        draft.embed_proj[2].weight.mul_(20)  # corrections as large as base logits, so that the prefix decides
    rounds, add = [(prompt.shape[1], None)], RoundRecorder.add  # the anchor of the next round stands last

    def record(self, drafted_ids, gained_ids, *seconds):
        anchor, _ = rounds.pop()
        rounds.extend([(anchor, torch.tensor(drafted_ids, dtype=torch.long)), (anchor + len(gained_ids), None)])
        add(self, drafted_ids, gained_ids, *seconds)

    monkeypatch.setattr(RoundRecorder, "add", record)
    text, predictions = drafted(target, prompt, draft), draft.config.max_draft_tokens
    assert draft.last_generation.path == path
    context, compared = context_of(target, draft, text), 0
    for anchor, tokens in rounds[:-1]:
        prefix = F.pad(torch.cat([text[0, anchor : anchor + 1], tokens]), (0, predictions))[:predictions]
        with torch.no_grad():
            logits = draft(
                noise_of(target, draft, text[:, anchor : anchor + 1]),
                context[:, :anchor],
                embed(target, prefix)[None, None],
                torch.arange(anchor + draft.config.block_size)[None],
                BorrowedTarget(target).logits,
            ).logits
        assert logits[0, 0, : len(tokens)].argmax(-1).tolist() == tokens.tolist()
        compared += len(tokens)
    assert compared == draft.last_generation.drafted > 0


def test_prefix_gru_equals_torch_gru_and_stepping_equals_scanning():
    torch.manual_seed(0)
    ours, reference = PrefixGRU(12, 7), torch.nn.GRU(12, 7, bias=False, batch_first=True)
    reference.load_state_dict(ours.state_dict())
    embeds, first = torch.randn(3, 5, 12), torch.randn(3, 7)
    for state in (None, first):
        states, last = ours(embeds, state)
        expected_states, expected_last = reference(embeds, None if state is None else state[None])
        torch.testing.assert_close(states, expected_states, atol=1e-6, rtol=0)  # one rounding per gate
        torch.testing.assert_close(last, expected_last[0], atol=1e-6, rtol=0)
        step = torch.zeros(3, 7) if state is None else state
        for i in range(5):
            step = gru_step(F.linear(embeds[:, i], ours.weight_ih_l0), step, ours.weight_hh_l0)
            torch.testing.assert_close(step, states[:, i], atol=1e-6, rtol=0)
    head, state = ours(embeds[:, :2])
    tail, _ = ours(embeds[:, 2:], state)
    torch.testing.assert_close(torch.cat([head, tail], dim=1), ours(embeds)[0], atol=1e-6, rtol=0)


@torch.no_grad()
def test_context_in_two_portions_through_the_cache_equals_one_pass(target, draft):
    torch.manual_seed(4)
    ids = torch.randint(3, MASK, (2, 12))
    context, noise = context_of(target, draft, ids[:, :9]), noise_of(target, draft, ids[:, 9:10])
    block = torch.arange(5).expand(2, -1)
    whole = draft.backbone(noise, context, torch.cat([torch.arange(9).expand(2, -1), 9 + block], dim=-1))
    cache = DynamicCache()
    earlier = noise_of(target, draft, ids[:, 4:5])
    draft.backbone(earlier, context[:, :4], torch.cat([torch.arange(4).expand(2, -1), 4 + block], -1), cache=cache)
    assert cache.get_seq_length() == 4
    rest = torch.cat([torch.arange(4, 9).expand(2, -1), 9 + block], dim=-1)
    parts = draft.backbone(noise, context[:, 4:], rest, cache=cache)
    assert cache.get_seq_length() == 9
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)  # float32, other shapes of the same products
    moved = draft.backbone(noise, context, torch.cat([torch.arange(9).expand(2, -1), 10 + block], dim=-1))
    assert (moved - whole).abs().max() > 1e-3  # positions matter, so equality above is no accident


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("right", [0, 2, 5])
def test_what_our_loop_leaves_on_a_cache_is_the_context_of_the_whole_text(shift_label, right, target, prompt):
    text = plain(target, prompt)
    draft, cache = make_rigged(target, text[0], right, shift_label=shift_label), DynamicCache(config=target.config)
    assert drafted(target, prompt, draft, cache=cache).tolist() == text.tolist()
    known, columns = cache.draft_context, text.shape[1] - 1
    assert (known.seen_from, known.length) == (0, columns) and columns == cache.get_seq_length()
    with torch.no_grad():
        fresh = DynamicCache()
        draft.extend_context(context_of(target, draft, text[:, :-1]), torch.arange(columns)[None], fresh)
    for layer, reference in zip(known.cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, :columns], reference.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values[:, :, :columns], reference.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("right", [0, 2, 5])
def test_cache_holds_exactly_the_verified_prefix_after_every_round(shift_label, right, target, prompt):
    text = plain(target, prompt)
    draft = make_rigged(target, text[0], right, shift_label=shift_label)
    draft.decoding.path = "assisted"
    calls, backbone = [], draft.backbone

    def record(noise_embeds, context_hidden_states, position_ids, *, cache):
        hidden = backbone(noise_embeds, context_hidden_states, position_ids, cache=cache)
        calls.append((context_hidden_states, position_ids[0].tolist(), cache, cache.get_seq_length()))
        return hidden

    draft.backbone = record
    assert drafted(target, prompt, draft).tolist() == text.tolist()
    anchors = [prompt.shape[1]]
    for tokens in draft.last_generation.tokens_per_round:
        anchors.append(anchors[-1] + tokens)
    first_row = 0
    for (context, positions, _, length), anchor in zip(calls, anchors, strict=False):
        assert positions == list(range(first_row, anchor + 5))  # the anchor is in the block, not in the context
        assert context.shape[1] == anchor - first_row
        assert length == anchor
        first_row = anchor
    assert len(calls) > 1 and first_row > prompt.shape[1]
    # The rows are those that a plain forward pass over the finished text gives.
    with torch.no_grad():
        fresh, positions = DynamicCache(), torch.arange(first_row + 5)[None]
        noise = noise_of(target, draft, text[:, first_row : first_row + 1])
        backbone(noise, context_of(target, draft, text[:, :first_row]), positions, cache=fresh)
    for layer, reference in zip(calls[-1][2].layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.keys, reference.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values, reference.values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TARGETS)
def test_taps_are_the_outputs_of_the_named_layers(kind, prompt):
    target = make_target(kind)
    with torch.no_grad(), BorrowedTarget(target).tap([3, 0, 2]) as taps:
        states = target(prompt, output_hidden_states=True).hidden_states
        taken = taps.take()
    assert torch.equal(taken, torch.cat([states[4], states[1], states[3]], dim=-1))


@torch.no_grad()
@pytest.mark.parametrize("layers", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}])
@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_and_eager_attention_agree(layers, masked, target):
    draft = make_draft(target, **layers)
    assert draft.config._attn_implementation == "sdpa"
    eager = copy.deepcopy(draft)
    eager.set_attn_implementation("eager")
    assert eager.config._attn_implementation == "eager"
    torch.manual_seed(5)
    ids, anchors = torch.randint(3, MASK, (1, 12)), torch.tensor([[4, 9]] if masked else [[12]])
    noise = noise_of(target, draft, torch.randint(3, MASK, anchors.shape))
    positions = torch.cat([torch.arange(12)[None], (anchors[..., None] + torch.arange(5)).flatten(1)], dim=-1)
    mask = None
    if masked:
        window = draft.config.sliding_window
        mask = {
            "full_attention": block_attention_mask(anchors, torch.ones_like(ids), 5),
            "sliding_attention": block_attention_mask(anchors, torch.ones_like(ids), 5, window),
        }
    context = context_of(target, draft, ids)
    outputs = [model.backbone(noise, context, positions, attention_mask=mask) for model in (draft, eager)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)  # fused and unfused softmax round differently
    if masked:
        everything = {"full_attention": None, "sliding_attention": None}
        unmasked = draft.backbone(noise, context, positions, attention_mask=everything)
        assert (unmasked - outputs[0]).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("cached", [False, True])
def test_sliding_layers_see_the_window_and_no_more(cached, target):
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    draft = make_draft(target, **layers)
    torch.manual_seed(6)
    context, noise = torch.randn(1, 14, 64), torch.randn(1, 1, 5, 32)
    positions = torch.arange(19)[None]
    # Query rows are positions 14..18, keys 0..18: the first of them sees 9..18, the last 13..18.
    by_hand = torch.tensor([[[[abs(q - k) < 6 for k in range(19)] for q in range(14, 19)]]])
    assert by_hand[0, 0].sum(-1).tolist() == [10, 9, 8, 7, 6]
    reference = draft.backbone(
        noise, context, positions, attention_mask={"full_attention": None, "sliding_attention": by_hand}
    )
    if cached:
        cache = DynamicCache()
        draft.backbone(noise, context[:, :8], torch.arange(13)[None], cache=cache)
        output = draft.backbone(noise, context[:, 8:], positions[:, 8:], cache=cache)
    else:
        output = draft.backbone(noise, context, positions)
    torch.testing.assert_close(output, reference, atol=1e-5, rtol=1e-5)
    everything = {"full_attention": None, "sliding_attention": None}
    assert (draft.backbone(noise, context, positions, attention_mask=everything) - output).abs().max() > 1e-3


def test_sliding_draft_gives_the_same_text_past_its_window(target, prompt):
    draft = make_draft(target, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    assert drafted(target, prompt, draft).tolist() == plain(target, prompt).tolist()


def test_fresh_head_is_neutral_and_learns_from_the_second_step_on(target):
    torch.manual_seed(1)
    draft = DominoForSpeculativeDraft(make_config(target))
    ids = torch.randint(3, MASK, (1, 12))
    context, noise = context_of(target, draft, ids[:, :6]), noise_of(target, draft, ids[:, 6:7])
    optimizer = torch.optim.SGD(draft.parameters(), lr=1.0)

    def gradients():
        optimizer.zero_grad()
        output = draft(noise, context, embed(target, ids[:, 6:11])[:, None], torch.arange(11)[None], target.lm_head)
        F.cross_entropy(output.logits.flatten(0, 2), ids[0, 7:]).backward()
        parameters = dict(draft.named_parameters())
        return output, [float(parameters[name].grad.abs().sum()) for name in HEAD]

    output, first = gradients()
    assert torch.equal(output.logits, output.base_logits)
    assert first[3] > 0 and first[:3] == [0.0, 0.0, 0.0]
    optimizer.step()
    output, second = gradients()
    assert all(gradient > 0 for gradient in second)
    assert not torch.equal(output.logits, output.base_logits)


CASTS = {
    "bfloat16": lambda draft, path: draft.bfloat16(),
    "half": lambda draft, path: draft.half(),
    "to": lambda draft, path: draft.to(torch.bfloat16),
    "from_pretrained": lambda draft, path: DominoForSpeculativeDraft.from_pretrained(path, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("cast", CASTS)
def test_rotary_frequencies_stay_float32(cast, draft, tmp_path):
    draft.save_pretrained(tmp_path)
    frequencies = draft.rotary_emb.inv_freq.clone()
    assert not torch.equal(frequencies, frequencies.bfloat16().float())
    draft = CASTS[cast](draft, tmp_path)
    assert {p.dtype for p in draft.parameters()} == {torch.float16 if cast == "half" else torch.bfloat16}
    assert draft.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(draft.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("shift_label", [True, False])
def test_bfloat16_draft_keeps_the_text_of_a_float32_target(shift_label, target, prompt):
    text = plain(target, prompt)
    draft = make_draft(target, shift_label=shift_label).bfloat16()
    assert drafted(target, prompt, draft).tolist() == text.tolist()
    assert draft.last_generation.drafted > 0


@per_alignment
@pytest.mark.parametrize("tokens", [None, 1, 3])
def test_every_alignment_and_draft_length_gives_the_same_text(shift_label, prefix_len, tokens, target, prompt):
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    assert drafted(target, prompt, draft, num_assistant_tokens=tokens).tolist() == plain(target, prompt).tolist()
    assert max(draft.last_generation.drafted_per_round) == (tokens or (5 if shift_label else 4))


SCALED = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 3.0, "head_dim": 8}),
    "granite": (GraniteConfig, GraniteForCausalLM, {"logits_scaling": 4.0}),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", SCALED)
def test_base_logits_are_scaled_and_capped_as_the_targets_own(kind, prompt):
    config_class, model_class, scaling = SCALED[kind]
    torch.manual_seed(0)
    target = model_class(config_class(**SIZES, **scaling)).eval()
    output = target(prompt, output_hidden_states=True)
    hidden = output.hidden_states[-1]
    # The same operations on the same tensors, up to their order.
    torch.testing.assert_close(BorrowedTarget(target).logits(hidden), output.logits, atol=1e-5, rtol=1e-5)
    assert (target.lm_head(hidden) - output.logits).abs().max() > 1e-2
    draft = make_draft(target)
    assert drafted(target, prompt, draft).tolist() == plain(target, prompt).tolist()


def test_state_dict_has_no_tensor_of_the_target_before_and_after_generate(target, draft, prompt):
    def names():
        return [name for name in draft.state_dict() if not name.startswith("layers.")]

    own = ["fc.weight", "hidden_norm.weight", "norm.weight", *HEAD]
    assert names() == own
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    drafted(target, prompt, draft)
    assert names() == own
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    assert len(draft.state_dict()) == len(before)


@pytest.fixture
def adapted(target):
    """A draft under a LoRA on all four head tensors, with random weights, and the same draft without it."""
    peft = pytest.importorskip("peft")
    plain_draft = make_draft(target)
    route = {"target_modules": ["embed_proj.0", "embed_proj.2"], "target_parameters": HEAD[:2]}
    model = peft.get_peft_model(copy.deepcopy(plain_draft), peft.LoraConfig(r=4, **route)).eval()
    torch.manual_seed(9)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, plain_draft


def test_loop_under_an_adapter_equals_the_teacher_forced_forward(target, adapted):
    compare_training_with_decoding(target, adapted[0].get_base_model())


def test_head_weights_fold_in_every_active_adapter_and_only_those(adapted):
    model, plain_draft = adapted
    original, folded = plain_draft.head_weights(), model.get_base_model().head_weights()
    assert [bool((a - b).abs().max() > 1e-3) for a, b in zip(original, folded, strict=True)] == [True] * 5
    with model.disable_adapter():
        for a, b in zip(original, model.get_base_model().head_weights(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)
    merged = model.merge_and_unload().head_weights()
    for a, b in zip(merged, folded, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)  # W + BA, once as a sum and once as two products


def test_adapter_moves_the_draft_and_not_the_text(target, adapted, prompt):
    text, drafts = plain(target, prompt), []
    for draft in adapted:
        base = draft if isinstance(draft, DominoForSpeculativeDraft) else draft.get_base_model()
        with torch.no_grad():
            context, noise = context_of(target, base, text[:, :10]), noise_of(target, base, text[:, 10:11])
            hidden = base.predicting_slots(base.backbone(noise, context, torch.arange(15)[None]))[:, 0]
            drafts.append(
                draft_block(
                    base.head_weights(),
                    hidden,
                    target.lm_head(hidden),
                    text[:, 10],
                    prefix_len=1,
                    embed=lambda token_ids: embed(target, token_ids),
                    choose=lambda i, logits: (logits.argmax(-1), False),
                )[0].tolist()
            )
        assert drafted(target, prompt, draft).tolist() == text.tolist()
    assert drafts[0][0] == drafts[1][0]  # P=1: the first token has base logits, which no head adapter moves
    assert drafts[0] != drafts[1]
