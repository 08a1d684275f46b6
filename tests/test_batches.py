"""Several rows in one call: each row's text, statistics and law are those of the row alone."""

import pytest
import torch
from architectures import make_architecture
from conftest import MASK, PAD, RiggedDraft, make_config, make_draft, make_target
from support import StopAt
from test_sampling import SMALL_DRAFT, assert_law, warpers
from transformers import DynamicCache, StaticCache


NEW = 20
EXPLICIT = ["llama", "mistral (sliding window)", "qwen2 (sliding and full layers)", "gemma3", "gpt2", "opt", "granite"]
ALIGNED = ["bloom", "falcon (alibi)"]


class RiggedRows(RiggedDraft):
    """A rigged draft for several texts: row r's blocks are right for (2 r + 1) % 6 tokens, if it knows whose they are.

    Rows leave a batch, so a block is taken for that of the first text with its anchor at its position.
    """

    def rig_rows(self, target, texts: list[torch.Tensor]) -> "RiggedRows":
        self.rig(target, texts[0], 0)
        self.texts, self.embeddings = texts, target.get_input_embeddings().weight.detach()
        return self

    def backbone(self, noise_embeds, context_hidden_states, position_ids, **kwargs):
        scale = noise_embeds[0, 0, 1].norm() / self.embeddings[MASK].norm()  # Gemma's embeddings are scaled
        anchors = torch.cdist(noise_embeds[:, 0, 0], self.embeddings * scale).argmin(dim=-1)
        super(RiggedDraft, self).backbone(noise_embeds, context_hidden_states, position_ids, **kwargs)
        blocks = []
        for position, anchor in zip(position_ids[:, -self.config.block_size].tolist(), anchors.tolist(), strict=True):
            row = next((i for i, t in enumerate(self.texts) if position < len(t) and t[position] == anchor), 0)
            self.text, self.right = self.texts[row], (2 * row + 1) % 6
            blocks.append(self.wanted_logits(position))
        return (torch.stack(blocks) @ self.inverse_head.T)[:, None]


def make_rigged_rows(target, texts: list[torch.Tensor]) -> RiggedRows:
    torch.manual_seed(1)
    return RiggedRows(make_config(target)).eval().rig_rows(target, texts)


def pad_left(prompts: list[torch.Tensor]) -> dict:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.cat([torch.full((longest - len(p),), PAD), p]) for p in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(p)).long() for p in prompts])
    return {"inputs": ids, "attention_mask": mask}


def random_prompts(rows: int, seed: int, longest: int = 14) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randint(3, MASK, (int(torch.randint(1, longest, ())),)) for _ in range(rows)]


def greedy(target, draft=None, **options):
    return target.generate(assistant_model=draft, **{"max_new_tokens": NEW, "do_sample": False, **options})


def alone(target, prompts, draft=None, **options) -> tuple[list[list[int]], list]:
    """New ids of each row in a call of its own, and statistics if there is a draft."""
    texts, stats = [], []
    for prompt in prompts:
        texts.append(greedy(target, draft, inputs=prompt[None], **options)[0, len(prompt) :].tolist())
        stats.append(draft.last_generation if draft is not None else None)
    return texts, stats


def no_mask(token_ids: list[int]) -> int:
    """The first that may end a text: a draft's mask token may not."""
    return next(token for token in token_ids if token != MASK)


def new_ids(output: torch.Tensor, texts: list[list[int]], prompt_length: int) -> list[list[int]]:
    """Of each row, as long as its own text; behind it there is padding only."""
    rows = output[:, prompt_length:].tolist()
    assert len(rows[0]) == max(len(text) for text in texts)
    for row, text in zip(rows, texts, strict=True):
        assert set(row[len(text) :]) <= {PAD}
    return [row[: len(text)] for row, text in zip(rows, texts, strict=True)]


@pytest.mark.parametrize("rows", range(1, 8))
@pytest.mark.parametrize("kind", EXPLICIT + ALIGNED)
def test_each_row_is_the_row_alone(kind, rows):
    target = make_architecture(kind)
    prompts = random_prompts(rows, seed=rows)
    free, _ = alone(target, prompts)
    ends = {"eos_token_id": [no_mask(free[0][3:]), no_mask(free[-1][9:])], "pad_token_id": PAD}  # rows end somewhere
    for options in ({}, ends):
        texts, _ = alone(target, prompts, **options)
        wanted = [torch.cat([p, torch.tensor(t)]) for p, t in zip(prompts, texts, strict=True)]
        for draft in (make_draft(target), make_rigged_rows(target, wanted)):
            batch = pad_left(prompts)
            output = greedy(target, draft, **batch, **options)
            assert new_ids(output, texts, batch["inputs"].shape[1]) == texts
            assert draft.last_generation.path == "loop"
            assert draft.last_generation.new_tokens == sum(len(text) for text in texts)


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "bloom"])
def test_each_rows_statistics_are_those_of_the_row_alone(kind, shift_label):
    """So its drafts are the same too: the draft sees its own row, at its own positions, and nothing of padding."""
    target = make_architecture(kind)
    prompts = random_prompts(5, seed=3)
    if kind == "bloom":  # whose prompts have no positions, so that drafts count padding
        prompts = [prompt.repeat(14)[:9] for prompt in prompts]
    free, _ = alone(target, prompts)
    draft = make_draft(target, shift_label=shift_label)
    ends = {"eos_token_id": [no_mask(free[0][3:]), no_mask(free[1][9:])], "pad_token_id": PAD}
    texts, stats = alone(target, prompts, draft, **ends)
    greedy(target, draft, **pad_left(prompts), **ends)
    whole = draft.last_generation
    assert whole.rows == tuple(stats)
    assert len({row.rounds for row in stats}) > 1
    assert whole.tokens_per_round == tuple(n for row in stats for n in row.tokens_per_round)
    assert whole.new_tokens == sum(len(text) for text in texts)
    assert len(whole.verify_seconds) == max(row.rounds for row in stats)


def widths(target, draft, **options) -> list[int]:
    """Rows of each pass of the target."""
    seen = []
    hook = target.get_decoder().register_forward_hook(lambda module, args, output: seen.append(len(output[0])))
    try:
        greedy(target, draft, **options)
    finally:
        hook.remove()
    return seen


def test_rows_that_have_ended_leave_the_batch(target):
    prompts = random_prompts(6, seed=2)
    free, _ = alone(target, prompts)
    ends = {"eos_token_id": [text[2] for text in free[:4]], "pad_token_id": PAD, "max_new_tokens": 60}
    texts, _ = alone(target, prompts, **ends)
    passes = widths(target, make_draft(target), **pad_left(prompts), **ends)
    assert passes[0] == 6 and passes[-1] == sum(len(text) == max(map(len, texts)) for text in texts) < 6


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2, "min_new_tokens": 6, "eos_token_id": 5},
        {"assistant_confidence_threshold": 0.4},
        {"stopping_criteria": [StopAt(9), StopAt(14)]},
        {"num_assistant_tokens": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_steers_a_row_steers_it_in_a_batch(options, target):
    prompts = random_prompts(4, seed=8)
    texts, _ = alone(target, prompts, pad_token_id=PAD, **options)
    wanted = [torch.cat([p, torch.tensor(t)]) for p, t in zip(prompts, texts, strict=True)]
    for draft in (make_draft(target), make_rigged_rows(target, wanted)):
        batch = pad_left(prompts)
        output = greedy(target, draft, **batch, pad_token_id=PAD, **options)
        assert new_ids(output, texts, batch["inputs"].shape[1]) == texts


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.7}, {"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}],
    ids=lambda options: "-".join(options),
)
def test_what_counts_padding_as_text_does_so_as_in_plain_batches(options, target):
    batch = pad_left(random_prompts(4, seed=8))
    plain = greedy(target, **batch, **options)
    assert plain.tolist() != greedy(target, **batch).tolist()
    for draft in (make_draft(target), make_rigged_rows(target, list(plain))):
        assert greedy(target, draft, **batch, **options).tolist() == plain.tolist()


def test_processors_that_know_rows_by_number_see_the_whole_batch(target):
    prompts = random_prompts(4, seed=8)
    allowed = [[*range(3 + row, 21, 2)] for row in range(4)]
    texts = [
        alone(target, [prompt], prefix_allowed_tokens_fn=lambda b, ids, row=row: allowed[row])[0][0]
        for row, prompt in enumerate(prompts)
    ]
    batch = pad_left(prompts)
    ends = {"eos_token_id": texts[2][4], "pad_token_id": PAD}
    texts = [text[: text.index(texts[2][4]) + 1] if texts[2][4] in text else text for text in texts]
    output = greedy(target, make_draft(target), **batch, **ends, prefix_allowed_tokens_fn=lambda b, ids: allowed[b])
    assert new_ids(output, texts, batch["inputs"].shape[1]) == texts


def test_each_row_of_three_has_the_law_of_its_prompt():
    calls, vocabulary = 1_000, 12
    target = make_target(vocab_size=vocabulary, num_hidden_layers=2, initializer_range=0.15)
    draft = make_draft(target, **SMALL_DRAFT)
    draft.decoding.draft_temperature = 0.5
    prompts = [torch.tensor(ids) for ids in ([3, 7, 10, 5], [6], [9, 4, 8])]
    call = {"do_sample": True, "temperature": 0.9, "top_k": 8, "max_new_tokens": 4}
    torch.manual_seed(0)
    copies = pad_left(prompts * 50)  # many at once: 50 of each
    texts = torch.cat([target.generate(**copies, assistant_model=draft, **call)[:, 4:] for _ in range(calls // 50)])
    assert 0.1 < draft.last_generation.accepted / draft.last_generation.drafted < 0.9
    for row, prompt in enumerate(prompts):
        own = texts[row::3]
        assert own.shape == (calls, 4)
        assert_law(own, target, prompt[None], warpers(0.9, 8, None))


def test_several_texts_of_one_prompt(target, prompt):
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 5, "max_new_tokens": NEW}
    draft = make_draft(target)
    output = target.generate(prompt, assistant_model=draft, **options)
    assert output.shape == (5, 6 + NEW) and len({str(row) for row in output.tolist()}) > 1
    assert len(draft.last_generation.rows) == 5


@pytest.mark.parametrize(
    "kind, static",  # a static cache that slides is refused: test_targets.py
    [(kind, False) for kind in ("llama", "mistral (sliding window)", "gemma3", "gpt2", "bloom")]
    + [(kind, True) for kind in ("llama", "gpt2", "bloom")],
)
def test_three_turns_with_one_cache(kind, static):
    """The cache that comes back is the one that plain generation leaves, padding of ended rows included."""
    target = make_architecture(kind)
    prompts = random_prompts(3, seed=5, longest=6)
    free, _ = alone(target, prompts)
    questions = [torch.tensor([[5, 9, 4], [7, 7, 3], [8, 3, 12]]), torch.tensor([[11], [4], [6]])]
    ends = {"eos_token_id": free[1][4], "pad_token_id": PAD}

    def conversation(draft):
        cache = StaticCache(target.config, max_cache_len=100) if static else DynamicCache(config=target.config)
        ids, mask = pad_left(prompts).values()
        turns, keys = [], []
        for question in [None, *questions]:
            if question is not None:
                ids = torch.cat([ids, question], dim=1)
                mask = torch.cat([mask, torch.ones_like(question)], dim=1)
            longer = greedy(target, draft, inputs=ids, attention_mask=mask, cache=cache, **ends)
            mask = torch.cat([mask, (longer[:, ids.shape[1] :] != PAD).long()], dim=1)
            ids = longer
            turns.append(ids.tolist())
            length = int(cache.get_seq_length())
            assert length == ids.shape[1] - 1
            keys.append([layer.keys[:, :, :length].clone() for layer in cache.layers])
        return turns, keys, mask

    turns, keys, mask = conversation(None)
    draft = make_draft(target)
    ours, our_keys, _ = conversation(draft)
    assert ours == turns
    for theirs, own in zip(keys, our_keys, strict=True):
        for one, other in zip(theirs, own, strict=True):
            real = mask[:, : one.shape[2]] if static or one.shape[2] == theirs[0].shape[2] else None
            assert one.shape == other.shape
            if real is not None and kind in ("llama", "gpt2", "bloom"):
                torch.testing.assert_close(
                    other[real.bool()[:, None].expand(one.shape[:3])],
                    one[real.bool()[:, None].expand(one.shape[:3])],
                    atol=1e-4,
                    rtol=1e-4,
                )


def test_the_draft_knows_each_rows_earlier_turns(target):
    """Drafts of a second turn are those of one call on the whole conversation."""
    prompts = random_prompts(3, seed=5)
    batch = pad_left(prompts)
    draft = make_draft(target)
    cache = DynamicCache(config=target.config)
    first = greedy(target, draft, **batch, cache=cache)
    both = torch.cat([first, torch.tensor([[5, 9], [7, 7], [8, 3]])], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, NEW + 2, dtype=torch.long)], dim=1)
    second = greedy(target, draft, inputs=both, attention_mask=mask, cache=cache)
    with_cache = draft.last_generation
    assert greedy(target, draft, inputs=both, attention_mask=mask).tolist() == second.tolist()
    assert draft.last_generation == with_cache
