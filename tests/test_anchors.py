"""Training geometry in integers: anchors, blocks, packing, masks for every kind of attention."""

import pytest
import torch
from conftest import make_draft, make_target
from torch.nn.attention.flex_attention import create_mask

from modeling_domino import DominoTrainer
from modeling_domino.anchors import (
    PADDING,
    block_attention_mask,
    block_mask_mod,
    build_blocks,
    eligible_anchors,
    positions_in_documents,
    sample_anchors,
    seeded_generator,
)


def test_anchors_have_a_supervised_token_and_a_supervised_next_one():
    loss_mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1])
    generator = torch.Generator().manual_seed(0)
    assert sample_anchors(loss_mask, 99, generator).tolist() == [3, 4]  # 0 has no context before it
    drawn = {tuple(sample_anchors(loss_mask, 1, generator).tolist()) for _ in range(20)}
    assert drawn == {(3,), (4,)}


def test_anchors_stay_inside_their_document():
    document_ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    # 2 has its next token, and 3 its context, in the other document.
    assert eligible_anchors(torch.ones(7), document_ids).tolist() == [1, 4, 5]
    assert eligible_anchors(torch.ones(7)).tolist() == [1, 2, 3, 4, 5]


def test_one_eligible_anchor_is_drawn_and_not_lost():
    assert sample_anchors(torch.tensor([0, 1, 1]), 4, torch.Generator()).tolist() == [1]
    assert sample_anchors(torch.tensor([0, 1, 0, 1]), 4, torch.Generator()).tolist() == []
    assert eligible_anchors(torch.tensor([1])).tolist() == []


def test_anchors_follow_from_seed_epoch_and_row_alone():
    row, loss_mask = list(range(5, 70)), torch.ones(65)

    def draw(*key):
        return sample_anchors(loss_mask, 8, seeded_generator(*key)).tolist()

    assert draw(0, 0, row) == draw(0, 0, torch.tensor(row, dtype=torch.int32))
    assert draw(0, 0, row) != draw(0, 1, row)
    assert draw(0, 0, row) != draw(1, 0, row)
    assert draw(0, 0, row) != draw(0, 0, [1, *row[1:]])


def test_blocks_in_integers():
    input_ids = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]])
    anchors = [torch.tensor([2, 4]), torch.tensor([1])]
    blocks = build_blocks(input_ids, loss_mask, anchors, 3, torch.tensor([4.0, 2.0, 1.0]))
    assert blocks.anchors.tolist() == [[2, 4], [1, 0]]
    assert blocks.prefix_ids[0].tolist() == [[12, 13, 14], [14, 15, 15]]
    assert blocks.labels[0, 0].tolist() == [13, 14, 15] and blocks.labels[0, 1, 0] == 15
    # The last block of row 0 runs out of the row, that of row 1 into padding; the second of row 1 does not exist.
    assert blocks.weights.tolist() == [[[4, 2, 1], [4, 0, 0]], [[4, 2, 0], [0, 0, 0]]]


def test_a_block_predicts_nothing_of_the_next_document():
    blocks = build_blocks(
        torch.tensor([[10, 11, 12, 20, 21]]),
        torch.ones(1, 5, dtype=torch.long),
        [torch.tensor([1])],
        3,
        torch.ones(3),
        torch.tensor([[0, 0, 0, 1, 1]]),
    )
    assert blocks.labels[0, 0].tolist() == [12, 20, 21]
    assert blocks.weights[0, 0].tolist() == [1, 0, 0]


def test_without_any_anchor_there_are_blocks_of_no_weight():
    nothing = torch.tensor([], dtype=torch.long)
    blocks = build_blocks(torch.ones(2, 4).long(), torch.ones(2, 4).long(), [nothing, nothing], 3, torch.ones(3))
    assert blocks.anchors.tolist() == [[0], [0]] and blocks.weights.sum() == 0


def test_positions_start_again_in_each_document():
    documents = torch.tensor([[0, 0, 1, 1, 1, PADDING], [4, 5, 5, 5, 5, 5]])
    assert positions_in_documents(documents).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]]


def test_blocks_see_context_strictly_before_their_anchor_and_only_themselves():
    mask = block_attention_mask(torch.tensor([[2, 3]]), torch.tensor([[PADDING, 0, 0, 0]]), 2)
    expected = [[0, 1, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 1, 1, 0, 0, 0, 1, 1]] * 2
    assert mask[0, 0].int().tolist() == expected


def test_blocks_see_no_context_of_other_documents():
    mask = block_attention_mask(torch.tensor([[1, 4]]), torch.tensor([[0, 0, 1, 1, 1]]), 2)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0, 1, 1, 0, 0]] * 2 + [[0, 0, 1, 1, 0, 0, 0, 1, 1]] * 2


def test_sliding_layers_see_less_than_a_window_back():
    mask = block_attention_mask(torch.tensor([[4]]), torch.zeros(1, 5), 2, 3)[0, 0].int().tolist()
    assert mask == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1]]


@pytest.mark.parametrize("window", [None, 3])
def test_masks_have_one_definition(window):
    anchors = torch.tensor([[2, 5, 9], [4, 6, 0]])
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 8 + [PADDING] * 3])
    mod = block_mask_mod(anchors, documents, 3, window)
    assert torch.equal(
        create_mask(mod, 2, 1, 9, 20, device="cpu"), block_attention_mask(anchors, documents, 3, window)
    )


def test_every_kind_of_attention_gives_the_same_hidden_states():
    anchors = torch.tensor([[2, 5, 9], [4, 6, 0]])
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 8 + [PADDING] * 3])
    outputs = {}
    for attention in ("sdpa", "eager", "flex_attention"):
        draft = make_draft(make_target(), layer_types=["full_attention", "sliding_attention"], sliding_window=5)
        draft.set_attn_implementation(attention)
        torch.manual_seed(1)
        context, noise = torch.randn(2, 11, 64), torch.randn(2, 3, 5, 32)
        with torch.no_grad():
            outputs[attention] = draft.backbone(
                noise,
                context,
                torch.arange(11 + 15).expand(2, -1),
                attention_mask=DominoTrainer._masks(anchors, documents, draft.config),
            )
    torch.testing.assert_close(outputs["eager"], outputs["sdpa"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs["flex_attention"], outputs["sdpa"], atol=1e-5, rtol=1e-5)


def test_future_tokens_do_not_reach_a_block():
    """Changing everything after the anchor changes no logits but through the head's own teacher-forced prefix."""
    draft = make_draft(make_target(), pure_draft_prefix_len=4)
    context, noise = torch.randn(1, 9, 64), torch.randn(1, 1, 5, 32)
    changed = context.clone()
    changed[:, 4:] += 1.0
    mask = {"full_attention": block_attention_mask(torch.tensor([[4]]), torch.zeros(1, 9), 5)}
    positions = torch.cat([torch.arange(9), 4 + torch.arange(5)])[None]
    with torch.no_grad():
        first, second = (draft.backbone(noise, c, positions, attention_mask=mask) for c in (context, changed))
    assert torch.equal(first, second)
