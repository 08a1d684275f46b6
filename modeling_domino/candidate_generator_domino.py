"""`DominoCandidateGenerator`: a Domino draft riding on transformers' own assisted-decoding loop.

The loop owns the target's forward pass, the acceptance rule and the stop at EOS and at the length limit; this file
owns everything before it: which context rows are new, one block of drafted tokens, and the law each was drawn from.
It is also the oracle that faster loops are compared with.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .correction_domino import HeadWeights, draft_block
from .processors_domino import refuse_stateful, sharpen
from .statistics_domino import RoundRecorder
from .target_domino import BorrowedTarget, Taps


@dataclass
class AssistedSession:
    """
    One generate call.

    Args:
        draft, target, taps: Who drafts, what it borrows, and where hidden states come from.
        stopping_criteria: Of the call.
        num_assistant_tokens: K.
        confidence_threshold: A block ends with a token of a smaller draft probability.
        target_cache: Of the call.
        cached_rows: Positions it held before the call.
        placeholders: Prompt positions without ids, which stand in front of the ids that the generator gets.
        own_processors: The caller's own, which may keep a state.
        recorder: What happened.
    """

    draft: torch.nn.Module
    target: BorrowedTarget
    taps: Taps
    stopping_criteria: StoppingCriteriaList
    num_assistant_tokens: int
    confidence_threshold: float
    target_cache: Cache
    cached_rows: int = 0
    placeholders: int = 0
    own_processors: list[LogitsProcessor] = field(default_factory=list)
    recorder: RoundRecorder = field(default_factory=RoundRecorder)
    generator: "DominoCandidateGenerator | None" = None

    def make_candidate_generator(
        self, generation_config: GenerationConfig, logits_processor: LogitsProcessorList
    ) -> "DominoCandidateGenerator":
        """What compat_domino.py asks for when the loop starts."""
        self.generator = self.draft.candidate_generator(self, generation_config, logits_processor)
        return self.generator


@dataclass
class DraftContext:
    """
    What a draft knows of the positions in a target's cache, kept on that cache: a caller who passes it to another call
    (a second turn, copies of a common prefix) passes this on too.

    Args:
        draft_id: Of the draft that wrote it.
        cache: Its keys and values.
        rows: Positions they cover, padding included.
        pending: Context hidden states of the positions after these, [1, n, taps · H].
    """

    draft_id: str
    cache: Cache
    rows: int
    pending: Tensor | None

    @property
    def total_rows(self) -> int:
        return self.rows + (0 if self.pending is None else self.pending.shape[1])


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
        known = getattr(session.target_cache, "draft_context", None)
        held = (known.draft_id, known.total_rows) if isinstance(known, DraftContext) else None
        if held == (self.draft.draft_id, session.cached_rows):
            self.context = known
        else:  # of what the cache holds the draft has seen nothing: its context starts after it
            self.context = DraftContext(self.draft.draft_id, DynamicCache(), session.cached_rows, None)
        self.length = 0
        self.drafted: list[int] | None = None
        self.started = self.finished = 0.0  # of the last draft

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
        self.started = time.perf_counter()
        candidates = self._candidates(input_ids, model_kwargs)
        self.finished = time.perf_counter()  # the drafted ids have been read, so an accelerator has ended too
        return candidates

    def _candidates(self, input_ids: Tensor, model_kwargs: dict) -> tuple[Tensor, Tensor | None]:
        self.length = input_ids.shape[1]
        self._see_verified_rows(self.length - 1)
        self.generation_config.max_length = self.max_length
        # The target adds a token of its own to every round, so the last one needs no draft.
        room = min(self.session.num_assistant_tokens, self.max_length - self.length - 1)
        if room < 1:
            self.drafted = []
            return input_ids, None
        drafted, q_logits = self._draft(input_ids, self._hidden_states(input_ids, model_kwargs), room)
        self.drafted = drafted[0].tolist()
        return torch.cat([input_ids, drafted], dim=-1), q_logits

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Called by the loop after each verification; the prefill is no round."""
        if self.drafted is not None:
            gained = input_ids[0, self.length :].tolist()
            verifying = time.perf_counter() - self.finished
            self.session.recorder.add(self.drafted, gained, self.finished - self.started, verifying)

    def remember(self) -> None:
        """Leaves what the draft knows on the target's cache; called when the loop has ended."""
        self._see_verified_rows(int(self.session.target_cache.get_seq_length()))
        self.session.target_cache.draft_context = self.context

    def _see_verified_rows(self, verified: int) -> None:
        """Takes the hidden states of the last pass, without those of rejected tokens."""
        context = self.context
        rows = self.session.taps.take()[:, : verified - context.total_rows]
        context.pending = rows if context.pending is None else torch.cat([context.pending, rows], dim=1)

    def _new_context(self, input_ids: Tensor, model_kwargs: dict) -> tuple[Tensor, Tensor, Tensor]:
        """What the draft has not seen of the verified prefix: hidden states of its rows [1, n, taps · H], the token after
        each row [1, n], and positions of the rows and of the anchor [1, n + 1]."""
        first, verified, context = self.context.rows, self.length - 1, self.context.pending
        positions = model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(self.length, device=input_ids.device)[None]
        positions, next_ids = positions[:, first:], input_ids[:, first + 1 :]
        mask = model_kwargs.get("attention_mask")
        if self.drafted is None and mask is not None:  # the prompt's rows: left padding is no context
            real = mask[0, first:verified].bool()
            context, next_ids = context[:, real.to(context.device)], next_ids[:, real]
            positions = torch.cat([positions[:, :-1][:, real], positions[:, -1:]], dim=1)
        return context, next_ids, positions

    def _hidden_states(self, input_ids: Tensor, model_kwargs: dict) -> Tensor:
        """Backbone on [anchor, MASK, ...] after appending the newly verified rows to the draft's cache, [1, K, H]."""
        draft, slots = self.draft, self.draft.config.block_size
        context, _, positions = self._new_context(input_ids, model_kwargs)
        block_ids = torch.full((1, slots), draft.config.mask_token_id, device=input_ids.device)
        block_ids[:, 0] = input_ids[:, -1]
        behind_anchor = positions[:, -1:] + torch.arange(1, slots, device=positions.device)
        hidden_states = draft.backbone(
            self._to_draft(self.session.target.embed(block_ids))[:, None],
            self._to_draft(context),
            torch.cat([positions, behind_anchor], dim=-1).to(draft.device),
            cache=self.context.cache,
        )
        self.context.rows, self.context.pending = self.length - 1, None
        return draft.predicting_slots(hidden_states)[:, 0]

    def _draft(self, input_ids: Tensor, hidden_states: Tensor, room: int) -> tuple[Tensor, Tensor | None]:
        """At most `room` tokens, [1, n], and when sampling the logits of the laws they were drawn from, [1, n, V]."""
        threshold = self.session.confidence_threshold
        do_sample = self.generation_config.do_sample
        ids, q_logits = input_ids, []

        def choose(i: int, logits: Tensor) -> tuple[Tensor, bool]:
            nonlocal ids
            scores = logits.to(input_ids.device, torch.float32)
            if self.logits_processor:
                # The first drafted token of a call follows a verified prefix, as in plain generation.
                with refuse_stateful(self.session.own_processors) if self.drafted is None else nullcontext():
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

        drafted = self._propose(input_ids[:, -1], hidden_states, room, choose)
        return drafted, torch.stack(q_logits, dim=1) if do_sample else None

    def _propose(self, anchor_ids: Tensor, hidden_states: Tensor, room: int, choose: Callable) -> Tensor:
        hidden_states = hidden_states[:, :room]
        base_logits = self._base_logits(hidden_states)
        return draft_by(self.draft, self.session.target, self.head, hidden_states, base_logits, anchor_ids, choose)

    def _base_logits(self, hidden_states: Tensor) -> Tensor:
        return self.session.target.logits(hidden_states)

    def _stops_at(self, ids: Tensor) -> bool:
        """Whether a criterion fires on the last drafted token: the draft ends with it, and so does the text if the
        target agrees. The bonus token that the loop adds is cut by the length limit of this round. The draft must not
        end before that token: whether it stops would then depend on a token that was drawn and dropped, a bias."""
        scores = _UnverifiedScores() if self.generation_config.output_scores else None
        visible = ids[:, self.session.placeholders :]
        if not self.stopping_criteria or not bool(self.stopping_criteria(visible, scores).all()):
            return False
        self.generation_config.max_length = ids.shape[1]
        return True

    def _to_draft(self, states: Tensor) -> Tensor:
        return states.to(self.draft.device, self.draft.dtype)


def draft_by(
    draft,
    target: BorrowedTarget,
    head: HeadWeights,
    hidden_states: Tensor,
    base_logits: Tensor,
    anchor_ids: Tensor,
    choose: Callable[[int, Tensor], tuple[Tensor, bool]],
) -> Tensor:
    """`draft_block` with the head, the options and the target's embeddings of a draft; `head` may lack padding rows."""
    return draft_block(
        head.for_vocabulary(base_logits.shape[-1]),
        hidden_states,
        base_logits.to(hidden_states.device),
        anchor_ids,
        prefix_len=draft.config.pure_draft_prefix_len if draft.head_enabled else base_logits.shape[1],
        embed=lambda token_ids: target.embed(token_ids).to(draft.device, draft.dtype),
        choose=choose,
        candidate_pool=draft.decoding.candidate_pool,
    )


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


__all__ = ["AssistedSession", "DominoCandidateGenerator", "draft_by", "token_ids"]
