"""The first block that generate() drafts, against a slow draft written out from the formulas."""

import pytest
import torch
from architectures import make_architecture
from conftest import make_draft
from reference import first_block


# Without scaling or soft-capping of logits, which test_model.py checks on their own.
KINDS = ["llama", "qwen3", "mistral (sliding window)", "gpt2", "bloom", "phi3", "olmo2", "llava (text half)"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift_label, prefix_len", [(True, 1), (True, 0), (False, 1), (False, 0), (False, 2)])
def test_first_block(kind, shift_label, prefix_len, prompt):
    target = make_architecture(kind)
    draft = make_draft(target, shift_label=shift_label, pure_draft_prefix_len=prefix_len)
    seen = []

    def record(ids, scores):
        seen.append((ids[0].tolist(), scores[0].clone()))
        return scores

    most = draft.config.max_draft_tokens
    with torch.no_grad():
        target.generate(
            prompt, assistant_model=draft, logits_processor=[record], max_new_tokens=most + 2, do_sample=False
        )
        text = seen[1][0]
        tokens, logits = first_block(draft, target, prompt[0].tolist(), text[-1])
    drafted = seen[1 : 1 + most]  # the prompt's pass comes first, the verification after the block
    assert [len(ids) for ids, _ in drafted] == list(range(7, 7 + most))
    torch.testing.assert_close(torch.stack([scores for _, scores in drafted]), logits, atol=2e-4, rtol=1e-4)
    assert seen[1 + most][0] == text  # verification starts again after the anchor
    assert drafted[-1][0][7:] == tokens[:-1]
