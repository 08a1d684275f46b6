"""`DominoCandidateGenerator`: a Domino draft riding on transformers' own assisted-decoding loop.

The loop owns the target's forward pass, the acceptance rule and the stop at EOS and at the length limit; this file
owns everything before it: which context rows are new, one block of drafted tokens, and the law each was drawn from.
It is also the oracle that faster loops are compared with.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .correction_domino import draft_block
from .statistics_domino import RoundRecorder
from .target_domino import BorrowedTarget, Taps


@dataclass
class AssistedSession:
    """One generate call: draft, target, taps, options and what happened."""

    draft: torch.nn.Module
    target: BorrowedTarget
    taps: Taps
    stopping_criteria: StoppingCriteriaList
    num_assistant_tokens: int
    confidence_threshold: float
    recorder: RoundRecorder = field(default_factory=RoundRecorder)

    def make_candidate_generator(
        self, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> "DominoCandidateGenerator":
        """What compat_domino.py asks for when the loop starts."""
        return DominoCandidateGenerator(self, generation_config, logits_processor)


class DominoCandidateGenerator(CandidateGenerator):
    """
    Args:
        session: The call.
        generation_config: The call's own copy; its `max_length` is lowered for rounds that a criterion ends.
        logits_processor: The target's processors and warpers, applied to every draft distribution alike.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {}

    def __init__(
        self,
        session: AssistedSession,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ):
        self.session = session
        self.draft = session.draft
        self.head_enabled = session.draft.head_enabled
        self.head = session.draft.head_weights()
        self.draft_temperature = session.draft.decoding.draft_temperature
        self.generation_config = generation_config
        self.max_length = generation_config.max_length
        self.logits_processor = logits_processor
        self.stopping_criteria = StoppingCriteriaList(
            criterion
            for criterion in session.stopping_criteria
            if not _is_left_to_the_loop(criterion, generation_config)
        )
        self.cache = DynamicCache()
        self.context_rows = 0
        self.length = 0
        self.drafted: list[int] | None = None

    def get_candidates(
        self, input_ids: Tensor, model_kwargs: dict, is_first_iteration: bool, **_
    ) -> tuple[Tensor, Tensor | None]:
        """
        Args:
            input_ids: Verified ids and the anchor, [1, T].
            model_kwargs: The loop's; `position_ids` and `attention_mask` are read.
            is_first_iteration: Whether the target has still to see the prompt: nothing is drafted then.

        Returns:
            `input_ids` followed by the drafted ids, [1, T + n], and when sampling the logits whose softmax each of
            them was drawn from, [1, n, V].
        """
        if is_first_iteration:
            return input_ids, None
        self.length = input_ids.shape[1]
        self.generation_config.max_length = self.max_length
        # The target adds a token of its own to every round, so the last one needs no draft.
        room = min(self.session.num_assistant_tokens, self.max_length - self.length - 1)
        if room < 1:
            self.drafted = []
            return input_ids, None
        hidden_states = self._predicting_hidden_states(input_ids, model_kwargs)[:, :room]
        drafted, q_logits = self._draft(input_ids, hidden_states)
        self.drafted = drafted[0].tolist()
        return torch.cat([input_ids, drafted], dim=-1), q_logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Called by the loop after each verification; the prefill is no round."""
        if self.drafted is not None:
            self.session.recorder.add(self.drafted, input_ids[0, self.length :].tolist())

    def _predicting_hidden_states(self, input_ids: Tensor, model_kwargs: dict) -> Tensor:
        """Backbone on [anchor, MASK, ...] after appending the newly verified rows to the draft's cache, [1, K, H]."""
        draft, target = self.draft, self.session.target
        slots = draft.config.block_size
        verified = self.length - 1
        context = self.session.taps.take()[:, : verified - self.context_rows]
        positions = model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(self.length, device=input_ids.device)[None]
        context_positions = positions[:, self.context_rows : verified]
        mask = model_kwargs.get("attention_mask")
        if self.context_rows == 0 and mask is not None:  # left padding is no context
            real = mask[0, :verified].bool()
            context, context_positions = context[:, real.to(context.device)], context_positions[:, real]
        self.context_rows = verified

        block_ids = torch.full((1, slots), draft.config.mask_token_id, device=input_ids.device)
        block_ids[:, 0] = input_ids[:, -1]
        block_positions = positions[:, -1:] + torch.arange(slots, device=positions.device)
        hidden_states = draft.backbone(
            self._to_draft(target.embed(block_ids))[:, None],
            self._to_draft(context),
            torch.cat([context_positions, block_positions], dim=-1).to(draft.device),
            cache=self.cache,
        )
        return draft.predicting_slots(hidden_states)[:, 0]

    def _draft(self, input_ids: Tensor, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        base_logits = self.session.target.logits(hidden_states).to(input_ids.device)
        threshold = self.session.confidence_threshold
        do_sample = self.generation_config.do_sample
        ids, q_logits = input_ids, []

        def choose(i: int, logits: Tensor) -> tuple[Tensor, bool]:
            nonlocal ids
            scores = logits.to(input_ids.device, torch.float32)
            if self.logits_processor:
                scores = self.logits_processor(ids, scores)
            if do_sample:
                scores = sharpen(scores, self.draft_temperature)
                q_logits.append(scores)
                token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)
            else:
                token = scores.argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, token], dim=-1)
            unsure = threshold > 0 and scores.softmax(dim=-1).gather(1, token).item() < threshold
            return token[:, 0], unsure or self._stops_at(ids)

        drafted = draft_block(
            self.head.for_vocabulary(base_logits.shape[-1]),
            hidden_states,
            base_logits.to(hidden_states.device),
            input_ids[:, -1],
            prefix_len=self.draft.config.pure_draft_prefix_len if self.head_enabled else base_logits.shape[1],
            embed=lambda token_ids: self._to_draft(self.session.target.embed(token_ids)),
            choose=choose,
        )
        return drafted, torch.stack(q_logits, dim=1) if do_sample else None

    def _stops_at(self, ids: Tensor) -> bool:
        """Whether a criterion fires on the last drafted token: the draft ends with it, and so does the text if the
        target agrees. The bonus token that the loop adds is cut by the length limit of this round. The draft must not
        end before that token: whether it stops would then depend on a token that was drawn and dropped, a bias."""
        scores = _UnverifiedScores() if self.generation_config.output_scores else None
        if not self.stopping_criteria or not bool(self.stopping_criteria(ids, scores).all()):
            return False
        self.generation_config.max_length = ids.shape[1]
        return True

    def _to_draft(self, states: Tensor) -> Tensor:
        return states.to(self.draft.device, self.draft.dtype)


class _UnverifiedScores:
    """Stands for the scores of drafted tokens, which the target has not given yet."""

    def __getitem__(self, index):
        raise ValueError(
            "A stopping criterion reads `scores`, which a draft's tokens do not have before they are verified: let it "
            "read `input_ids` alone, or drop `assistant_model`."
        )

    __len__ = __iter__ = lambda self: self[0]


def _is_left_to_the_loop(criterion: StoppingCriteria, generation_config: GenerationConfig) -> bool:
    """The loop itself cuts at the call's EOS tokens and length; a deadline is no property of a token."""
    if isinstance(criterion, EosTokenCriteria):
        return set(criterion.eos_token_id.tolist()) == set(token_ids(generation_config.eos_token_id))
    return isinstance(criterion, (MaxLengthCriteria, MaxTimeCriteria))


def token_ids(value: int | list[int] | Tensor | None) -> list[int]:
    """A special token of a generation config, which may be one id, several or none, as a list."""
    return [] if value is None else torch.as_tensor(value).flatten().tolist()


def sharpen(scores: Tensor, draft_temperature: float) -> Tensor:
    """Draft logits at a fraction of the target's temperature; 0 gives the one-hot law of the most likely token."""
    if draft_temperature == 0:
        best = scores.argmax(dim=-1, keepdim=True)
        return torch.full_like(scores, -torch.inf).scatter(-1, best, 0.0)
    return scores / draft_temperature


__all__ = ["AssistedSession", "DominoCandidateGenerator", "sharpen", "token_ids"]
