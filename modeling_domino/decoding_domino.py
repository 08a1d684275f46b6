"""Our own decoding loop: any number of rows, each at its own length; one copy from device to host a round.

    draft    a block for every row, on buffers that hold what each row's draft knows
    verify   one pass of the target over [anchor, d_1, ..., d_n] of every row
    accept   verification_domino.py; the result comes to the host as one tensor

It takes ids, cache, processors, criteria and streamer as generate() prepares them and returns what generate() returns.
The prompt is read exactly as plain generation reads it. transformers' own loop with candidate_generator_domino.py gives
the same texts, one row a call: it is what this one is tested against.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from .cache_domino import RowsCache, can_adopt, whole_chunks
from .candidate_generator_domino import AssistedSession, DominoCandidateGenerator, draft_by, token_ids
from .compat_domino import decoding_mode, keep_last_chunk, split_records
from .length_domino import LengthChooser, RoundCost, law_confidence
from .processors_domino import BlockProcessors, refuse_stateful, sharpen
from .statistics_domino import LastGeneration, RoundRecorder, of_rows
from .verification_domino import accept_greedy, accept_sampled, draw, pack_round


REMEDY_FOR_LENGTH = (
    "lower `max_new_tokens`, shorten the prompt, or make room (`max_cache_len` of the cache, another target)."
)
BUFFERED_LAYERS = {"full_attention", "sliding_attention"}
RECORDS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


def why_not(draft, target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict) -> str | None:
    """The reason why this loop cannot decode a call that `speculate` accepts; None where it can."""
    cache, positions = model_kwargs["cache"], model_kwargs.get("position_ids")
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []
    if draft.candidate_generator is not DominoCandidateGenerator:
        return f"the draft proposes through a {draft.candidate_generator.__name__}"
    if is_flash_attention_requested(draft.config):
        return "the draft's flash attention takes no mask"
    if not can_adopt(cache):
        return f"the cache is {'offloaded' if cache.offloading else f'a {type(cache).__name__} of another kind'}"
    if unknown := sorted(set(layer_types) - BUFFERED_LAYERS):
        return f"the target has layers of {unknown[0]}"
    if positions is not None and positions.dim() != 2:
        return f"the target's positions have {positions.dim()} dimensions"
    return None


def why_no_batch(
    target: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict, streamer
) -> str | None:
    """The reason why several rows cannot be decoded together, though one can."""
    if streamer is not None:
        return "a streamer hears one text"
    for name in RECORDS:
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            return f"`{name}=True` records one text"
    if not takes_explicit_masks(target, model_kwargs) and any(model_kwargs["cache"].is_sliding):
        return "sliding layers of rows with lengths of their own need masks that the target does not take"
    return None


def takes_explicit_masks(target: PreTrainedModel, model_kwargs: dict) -> bool:
    """
    Whether the target can be told which columns each token sees.

    True of transformers' own decoders that build masks from `attention_mask` alone and take positions; ALiBi counts
    columns itself, other code may do anything.
    """
    decoder = target.get_decoder()
    code = vars(sys.modules[type(decoder).__module__])
    if not type(decoder).__module__.startswith("transformers.models.") or model_kwargs.get("position_ids") is None:
        return False
    config = target.config.get_text_config(decoder=True)
    has_alibi = any("alibi" in name for name in code) and getattr(config, "alibi", True)
    builds_masks = "create_causal_mask" in code or "create_sliding_window_causal_mask" in code
    return builds_masks and not has_alibi and config._attn_implementation in ("sdpa", "eager")


@dataclass
class RowsContext:
    """
    What a draft knows of the columns in a target's cache, left on that cache for the next call.

    Args:
        draft_id: Of the draft that wrote it.
        cache: Its keys and values, at the target's columns.
        seen_from: The first column that it knows.
        length: Columns before which it knows all, the same in every row.
    """

    draft_id: str
    cache: RowsCache
    seen_from: int
    length: int = 0


@dataclass
class Pending:
    """Context hidden states that the draft's cache does not hold yet, [b, n, taps · H], with their columns and positions
    [b, n], all columns before `end`; those of rejected tokens among them are overwritten before anything sees them."""

    states: Tensor
    columns: Tensor
    positions: Tensor
    end: int

    def select(self, places: Tensor) -> "Pending":
        return Pending(self.states[places], self.columns[places], self.positions[places], self.end)


class DecodingLoop:
    """
    One call.

    A row stands at its anchor, the last token of its text: column `lengths[r]`, whose keys and values are still to come.
    Places are the rows that are still held, in order; rows that have ended leave them when enough have.

    Args:
        session: Draft, taps, criteria and options.
        target: The model.
        input_ids: Prompt ids, [b, T].
        generation_config, logits_processor, model_kwargs: As generate() prepared them.
        streamer: Receives the tokens of each round, if there is one row.
        returns_cache: Whether anybody will read the cache.
        adapts_length: Whether to verify only as many tokens as pay (length_domino.py).
    """

    def __init__(
        self,
        session: AssistedSession,
        target: PreTrainedModel,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict,
        streamer=None,
        returns_cache: bool = True,
        adapts_length: bool = False,
    ):
        self.session, self.draft, self.target = session, session.draft, target
        self.config, self.model_kwargs, self.streamer = generation_config, model_kwargs, streamer
        self.returns_cache = returns_cache
        self.device = input_ids.device
        batch, given = input_ids.shape
        self.offset = session.placeholders
        self.prompt_end = self.offset + given
        self.text_end = self.offset + generation_config.max_length
        self.pad = next(iter(token_ids(generation_config.pad_token_id)), 0)
        slots = self.draft.config.block_size
        columns = self.text_end + session.num_assistant_tokens + 1
        self.text = input_ids.new_full((batch, columns), self.pad)
        self.text[:, : self.offset] = 0
        self.text[:, self.offset : self.prompt_end] = input_ids
        # Whether a column is text; beyond the prompt all are. As wide as buffers may become.
        self.real = torch.ones(batch, whole_chunks(columns + 2 * slots) + 256, dtype=torch.bool, device=self.device)
        if (mask := model_kwargs.get("attention_mask")) is not None:
            self.real[:, : mask.shape[1]] = mask.bool()
        self.processors = BlockProcessors(logits_processor, batch)
        self.criteria, self.deadlines, self.eos = _split_criteria(session.stopping_criteria, self.device)
        self.eos_known = set(self.eos.tolist())
        self.rows, self.lengths_known = list(range(batch)), [self.prompt_end - 1] * batch
        self.open, self.row_index = [True] * batch, torch.arange(batch, device=self.device)
        self.lengths = torch.full((batch,), self.prompt_end - 1, device=self.device)
        self.is_open = torch.ones(batch, dtype=torch.long, device=self.device)
        self.anchors = input_ids.new_zeros(batch)
        positions = model_kwargs.get("position_ids")
        # Of a column from the anchor on: the column and this.
        self.position_shift = torch.zeros(batch, dtype=torch.long, device=self.device)
        if positions is not None:
            self.position_shift += positions[:, -1].to(self.device) + 1 - self.prompt_end
        self.ends_known, self.limit = self._ends()
        self.ends = torch.tensor(self.ends_known, device=self.device)
        self.text_lengths = [self.prompt_end] * batch
        self.recorders = [RoundRecorder() for _ in range(batch)]
        self.records: dict[str, tuple] = {name: () for name in RECORDS if self._records(name)}
        self.explicit = takes_explicit_masks(target, model_kwargs) and "output_attentions" not in self.records
        self.cache: RowsCache | None = None
        self.pending: list[Pending] = []
        self.context = self._known_context(batch)
        self.head = self.draft.head_weights()
        self.watched = False
        self.adapts_length, self.confidences = adapts_length, []

    def _ends(self) -> tuple[list[int], str]:
        """The length that each row's text can have, and what limits it if it is not the call.

        Raises:
            ValueError: The prompt itself is longer.
        """
        ends, limit = [self.text_end] * len(self.text), ""
        cache, config = self.session.target_cache, self.target.config.get_text_config(decoder=True)
        hard = ends
        if isinstance(cache, StaticCache):  # the last token of a text need not be in it
            most = min(layer.max_cache_len for layer in cache.layers)
            hard, limit = [most + 1] * len(ends), f"the {most} tokens that the static cache holds"
        elif self.session.target.has_position_table:
            most = config.max_position_embeddings
            hard = [most + 1 - shift for shift in self.position_shift.tolist()]
            limit = f"the {most} positions that the target has"
        for row, end in enumerate(hard):
            if self.prompt_end >= end:
                raise ValueError(f"The prompt of row {row} is longer than {limit}: {REMEDY_FOR_LENGTH}")
        return [min(pair) for pair in zip(ends, hard, strict=True)], limit

    def _records(self, name: str) -> bool:
        return bool(getattr(self.config, name)) and self.config.return_dict_in_generate

    def _known_context(self, batch: int) -> RowsContext:
        cached = self.session.cached_rows
        known = getattr(self.session.target_cache, "draft_context", None)
        if isinstance(known, RowsContext):
            held = (known.draft_id, known.length, known.cache.batch_size)
            if held == (self.draft.draft_id, cached, batch):
                return known
        # Of what the cache holds the draft has seen nothing: its context starts after it.
        layers = self.draft.config.num_hidden_layers
        return RowsContext(self.draft.draft_id, RowsCache([None] * layers), seen_from=cached)

    # The call

    def run(self):
        """
        Decodes; returns ids [b, T'] or a `GenerateDecoderOnlyOutput`.

        Raises:
            torch.OutOfMemoryError: With the largest buffers, and what makes them smaller.
            ValueError: A text is longer than a static cache or the target's table of positions.
        """
        try:
            return self._run()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{self._account_of_memory()} ({error})") from error

    def _account_of_memory(self) -> str:
        rows, tokens = len(self.rows), self.session.num_assistant_tokens + 1
        held = {
            "keys and values of the target": self.cache.bytes if self.cache is not None else 0,
            "keys and values of the draft": self.context.cache.bytes,
            f"float32 logits of {rows} x {tokens} tokens": 4 * rows * tokens * self._vocabulary(),
            "hidden states for the draft": sum(p.states.numel() * p.states.element_size() for p in self.pending),
        }
        largest = ", ".join(f"{name}: {size / 1e6:,.1f} MB" for name, size in sorted(held.items(), key=_largest_first))
        return (
            f"Out of memory with {rows} rows in the batch ({largest}). Pass fewer rows, fewer `num_assistant_tokens` "
            "or fewer `max_new_tokens`."
        )

    def _vocabulary(self) -> int:
        return self.target.config.get_text_config(decoder=True).vocab_size

    def _run(self):
        self._read_prompt()
        if any(self.open):
            self.cache = RowsCache.adopt(self.session.target_cache)
        try:
            with decoding_mode(self.target):
                while any(self.open):
                    self._round()
                    self._drop_ended()
                if self.returns_cache:
                    self._complete_cache()
        finally:
            if self.cache is not None and len(self.rows) == len(self.text):
                self.cache.give_back(self.session.target_cache, min(self.lengths_known))
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    def statistics(self) -> LastGeneration:
        """Of the call, with those of every row if there are several."""
        return of_rows([recorder.summary("loop", "our own loop") for recorder in self.recorders])

    def _read_prompt(self) -> None:
        cached, target = self.session.cached_rows, self.target
        inputs = target.prepare_inputs_for_generation(
            self.text[:, : self.prompt_end].clone(),
            next_sequence_length=self.prompt_end - cached if cached else None,
            is_first_iteration=True,
            **self.model_kwargs,
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 1
        outputs = target(**inputs)
        logits = outputs.logits[:, -1:].to(self.device)
        columns = torch.arange(cached, self.prompt_end, device=self.device).expand(len(self.text), -1)
        positions = self.model_kwargs.get("position_ids")
        positions = columns if positions is None else positions[:, -columns.shape[1] :].to(self.device)
        states = self.session.taps.take().to(self.device)
        self.pending.append(Pending(states, columns, positions, self.prompt_end))
        scores = self._scores(logits)
        tokens = self._choose(scores[:, 0])[:, None]
        none = tokens[:, :0]
        packed = self._pack(tokens.new_zeros(len(tokens)), tokens, none, none.sum(dim=1))
        self._advance(packed, tokens, outputs, logits, scores, None)

    def _round(self) -> None:
        started = time.perf_counter()
        drafted, counts, q_logits = self._propose()
        between = time.perf_counter()
        outputs = self._verify(torch.cat([self.anchors[:, None], drafted], dim=1))
        logits = outputs.logits[:, -drafted.shape[1] - 1 :].to(self.device)
        scores = self._scores(logits)
        if self.config.do_sample:
            uniforms = torch.rand(drafted.shape, device=self.device)
            noise = torch.empty_like(scores[:, 0]).exponential_()
            q_logits = scores[:, :0] if q_logits is None else q_logits
            accepted, tokens = accept_sampled(drafted, counts, scores, q_logits, uniforms, noise)
        else:
            accepted, tokens = accept_greedy(drafted, counts, scores)
        packed = self._pack(accepted, tokens, drafted, counts)
        self._advance(packed, tokens, outputs, logits, scores, (started, between))

    # Drafting

    def _propose(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Proposed ids [b, n], how many of each row count [b], and the logits of their laws [b, n, V] when sampling."""
        # The target adds a token of its own to every round, so the last one needs no draft.
        n = max(min(self.session.num_assistant_tokens, room - 1) for room in self._rooms_known())
        if n < 1:
            none = self.anchors[:, None][:, :0]
            return none, none.sum(dim=1), None
        drafted, q_logits, counts = self._draft(self._hidden_states()[:, :n])
        counts = torch.minimum(counts, (self._rooms() - 1).clamp(min=0))
        # In both cases the host has to look before the target runs.
        if self.session.confidence_threshold > 0:
            n = int(counts.max())
        elif self.adapts_length:
            n = self._chooser().choose(self._chances(counts))
            counts = counts.clamp(max=n)
        drafted, q_logits = drafted[:, :n], None if q_logits is None else q_logits[:, :n]
        return drafted, counts, q_logits

    def _chances(self, counts: Tensor) -> list[float]:
        """Of each slot, that it is accepted with all before it, summed over the rows in which it is a proposal."""
        chances = torch.stack(self.confidences, dim=1).cumprod(dim=1)
        slots = torch.arange(chances.shape[1], device=self.device)
        return (chances * (slots < counts[:, None])).sum(dim=0).tolist()

    def _chooser(self) -> LengthChooser:
        target, threads = self.target, torch.get_num_threads()
        name = target.config.name_or_path or type(target).__name__
        key = (name, str(target.dtype), str(self.device), threads, len(self.rows))
        return LengthChooser(self.draft.round_costs.setdefault(key, RoundCost()))

    def _rooms_known(self) -> list[int]:
        """Tokens that each row may still gain."""
        places = zip(self.ends_known, self.lengths_known, self.open, strict=True)
        return [(end - length - 1) * is_open for end, length, is_open in places]

    def _rooms(self) -> Tensor:
        return (self.ends - self.lengths - 1) * self.is_open

    def _hidden_states(self) -> Tensor:
        """Backbone on [anchor, MASK, ...] of every row after its context took in what is pending, [b, K, H]."""
        draft, slots = self.draft, self.draft.config.block_size
        states, columns, positions, end = self._take_pending()
        steps = torch.arange(slots, device=self.device)
        # The block's rows lie behind those of the context, where the next ones overwrite them.
        behind, end = columns[:, -1:] + 1, end + slots
        cache = self.context.cache
        cache.write_at(torch.cat([columns, behind + steps], dim=1), 0, end, 0)
        keys = torch.arange(cache.capacity or whole_chunks(end), device=self.device)
        sees = (keys < self.lengths[:, None]) & (keys >= self.context.seen_from) & self._real()[:, : len(keys)]
        block = (keys >= behind) & (keys < behind + slots)
        masks = {"full_attention": (sees | block)[:, None, None].expand(-1, 1, slots, -1)}
        window = draft.config.sliding_window
        if window is not None:
            near = (self.lengths[:, None] + steps)[:, :, None] - keys < window
            masks["sliding_attention"] = ((sees[:, None] & near) | block[:, None])[:, None]
        block_ids = self.anchors.new_full((len(self.rows), slots), draft.config.mask_token_id)
        block_ids[:, 0] = self.anchors
        of_block = (self.lengths + self.position_shift)[:, None] + steps
        hidden_states = draft.backbone(
            self._to_draft(self.session.target.embed(block_ids))[:, None],
            self._to_draft(states),
            torch.cat([positions, of_block], dim=1).to(draft.device),
            attention_mask={kind: mask.to(draft.device) for kind, mask in masks.items()},
            cache=cache,
        )
        return draft.predicting_slots(hidden_states)[:, 0].to(self.device)

    def _take_pending(self) -> tuple[Tensor, Tensor, Tensor, int]:
        parts, self.pending = self.pending, []
        names = ("states", "columns", "positions")
        return *(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names), parts[-1].end

    def _draft(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Ids [b, n], the logits of their laws [b, n, V] when sampling, and how many count before the threshold [b]."""
        threshold, do_sample = self.session.confidence_threshold, self.config.do_sample
        hidden_states = self._to_draft(hidden_states)
        base_logits = self._base_logits(hidden_states)
        q_logits, sure = [], []
        self.confidences = []

        def choose(i: int, logits: Tensor) -> tuple[Tensor, bool]:
            # The first drafted token of a call follows a verified prefix, as in plain generation.
            watch = nullcontext() if self.watched else refuse_stateful(self.session.own_processors)
            with watch:
                scores = self._scores(logits[:, None].to(self.device), after=1 + i)[:, 0]
            self.watched = True
            if self.adapts_length:
                self.confidences.append(self._confidence(scores))
            if do_sample:
                scores = sharpen(scores, self.draft.decoding.draft_temperature)
                q_logits.append(scores)
            token = self._choose(scores)
            if self.processors.read_text:
                self.text[self.row_index, self.lengths + 1 + i] = token
            if threshold > 0:
                sure.append(scores.float().softmax(dim=-1).gather(1, token[:, None])[:, 0] >= threshold)
            return token, False

        borrowed = self.session.target
        drafted = draft_by(self.draft, borrowed, self.head, hidden_states, base_logits, self.anchors, choose)
        counts = torch.full_like(self.lengths, drafted.shape[1])
        if sure:  # a row's proposals end with its first unsure token
            counts = (torch.stack(sure[:-1], dim=1).long().cumprod(dim=1).sum(dim=1) + 1) if sure[:-1] else counts
        return drafted, torch.stack(q_logits, dim=1) if do_sample else None, counts

    def _confidence(self, scores: Tensor) -> Tensor:
        """How likely the law [b, V] makes an acceptance, [b]; it must not look at the token that is drawn from it."""
        return law_confidence(scores)

    def _base_logits(self, hidden_states: Tensor) -> Tensor:
        return self.session.target.logits(hidden_states)

    def _to_draft(self, states: Tensor) -> Tensor:
        return states.to(self.draft.device, self.draft.dtype)

    # Verification

    def _verify(self, tokens: Tensor, last: int | None = None):
        """The target's outputs for tokens [b, n] from each row's anchor on; `last`: no column behind it matters."""
        n = tokens.shape[1]
        steps = torch.arange(n, device=self.device)
        columns = self.lengths[:, None] + steps
        columns = columns if last is None else columns.clamp(max=last)
        # What a row is given behind its end, because others go on, must not leave a table of positions.
        positions = torch.minimum(columns, self.ends[:, None] - 2) + self.position_shift[:, None]
        farthest = max(self.lengths_known)
        if self.explicit:
            self.cache.write_at(columns, min(self.lengths_known), farthest + n, min(self.lengths_known))
            mask = self._explicit_masks(columns)
        else:
            self.cache.write_at(None, farthest, farthest + n, farthest)
            mask = self._aligned_mask(farthest + n)
        kwargs = {name: value for name, value in self.model_kwargs.items() if name != "inputs_embeds"}
        for name in ("token_type_ids", "mm_token_type_ids"):  # of the last token
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][self.row_index, -1:].expand(-1, n)
        kwargs |= {"cache": self.cache, "attention_mask": mask}
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = positions
        inputs = self.target.prepare_inputs_for_generation(tokens, is_first_iteration=False, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = n
        outputs = self.target(**inputs)
        self.pending.append(Pending(self.session.taps.take().to(self.device), columns, positions, farthest + n))
        return outputs

    def _explicit_masks(self, columns: Tensor):
        """Which columns of the buffers each token sees, in the form of the target's attention."""
        config, real = self.target.config.get_text_config(decoder=True), self._real()
        masks = {}
        for layer in self.cache.layers:
            kind = "sliding_attention" if getattr(layer, "is_sliding", False) else "full_attention"
            if kind in masks or not layer.is_initialized:
                continue
            window = layer.sliding_window

            def sees(batch, head, query, key, window=window):
                column = columns[batch, query]
                seen = (key <= column) & real[batch, key.clamp(max=real.shape[1] - 1)]
                return seen if window is None else seen & (key > column - window)

            keys, first = layer.get_mask_sizes(columns.shape[1])
            masks[kind] = ALL_MASK_ATTENTION_FUNCTIONS[config._attn_implementation](
                batch_size=len(columns),
                q_length=columns.shape[1],
                kv_length=keys,
                kv_offset=first,
                mask_function=sees,
                allow_is_causal_skip=False,
                dtype=self.target.dtype,
                config=config,
                device=self.device,
            )
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _aligned_mask(self, end: int) -> Tensor | None:
        """Which columns of aligned rows are text, [b, end]; the target adds the order."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None and len(self.rows) == 1:
            return None
        shift = max(self.lengths_known) - self.lengths[:, None]
        own = torch.arange(end, device=self.device) - shift
        mask_type = torch.long if mask is None else mask.dtype
        real = self._real()
        return (real.gather(1, own.clamp(0, real.shape[1] - 1)) & (own >= 0)).to(mask_type)

    def _real(self) -> Tensor:
        return self.real if len(self.rows) == len(self.real) else self.real[self.row_index]

    def _scores(self, logits: Tensor, after: int = 1) -> Tensor:
        """Processed logits, [b, n, V]: the first follow `after` more tokens than lie before a row's anchor."""
        if not len(self.processors):
            return logits.float() if self.config.do_sample else logits
        logits = logits.to(torch.float32, copy="output_logits" in self.records)
        lengths = [length + after - self.offset for length in self.lengths_known]
        return self.processors(logits, self.text[:, self.offset :], self.rows, lengths)

    def _choose(self, scores: Tensor) -> Tensor:
        """Ids [b], drawn from the softmax of scores [b, V] or their largest."""
        if not self.config.do_sample:
            return scores.argmax(dim=-1)
        return draw(scores.softmax(dim=-1), torch.empty_like(scores).exponential_())

    # What follows from a round

    def _pack(self, accepted: Tensor, tokens: Tensor, drafted: Tensor, counts: Tensor) -> Tensor:
        return pack_round(accepted, tokens, drafted, counts, self._rooms(), self.eos)

    def _advance(self, packed: Tensor, tokens: Tensor, outputs, logits: Tensor, scores: Tensor, times) -> None:
        """Takes a round into texts, statistics and records; `times` are when it and its verification began."""
        n = tokens.shape[1]
        gained = packed[:, 0]
        columns = self.lengths[:, None] + 1 + torch.arange(n, device=self.device)
        is_new = torch.arange(n, device=self.device) < gained[:, None]
        self.text[self.row_index[:, None], columns] = torch.where(is_new, tokens, self.pad)
        newest = tokens.gather(1, (gained - 1).clamp(min=0)[:, None])[:, 0]
        self.anchors = torch.where(gained > 0, newest, self.anchors)
        self.lengths = self.lengths + gained
        self.is_open = self.is_open * (1 - packed[:, 1])
        host = packed.tolist()
        seconds = () if times is None else (times[1] - times[0], time.perf_counter() - times[1])
        if seconds and self.adapts_length:
            self._chooser().cost.add(n - 1, sum(row[0] for row in host), seconds[1], sum(seconds))
        starts, self.lengths_known = self.lengths_known, list(self.lengths_known)
        for place, (row, (new, ended, count, *ids)) in enumerate(zip(self.rows, host, strict=True)):
            if not self.open[place]:
                continue
            kept, stops = self._stop(row, starts[place], new, scores)
            if kept < new:
                self.text[row, starts[place] + 1 + kept : starts[place] + 1 + new] = self.pad
                self.lengths[place] = starts[place] + kept
            if stops:
                self.is_open[place] = 0
            self.open[place] = not (ended or stops)
            self.lengths_known[place] = starts[place] + kept
            self.text_lengths[row] = starts[place] + kept + 1
            self._refuse_to_cut(place, bool(stops or ids[kept - 1] in self.eos_known))
            if times is not None:
                self.recorders[row].add(ids[n : n + count], ids[:kept], *seconds)
            if len(self.text) == 1:
                self._tell(ids[:kept], starts[place] + 1, outputs, logits, scores)
        if self.deadlines and bool(self.deadlines(self.text, None).all()):
            self.open = [False] * len(self.open)
        self._align(max(starts), starts)

    def _refuse_to_cut(self, place: int, has_stopped: bool) -> None:
        length, row = self.lengths_known[place] + 1, self.rows[place]
        if not has_stopped and length == self.ends_known[place] < self.text_end:
            raise ValueError(f"Row {row} goes on past {self.limit}: {REMEDY_FOR_LENGTH}")

    def _stop(self, row: int, start: int, new: int, scores: Tensor) -> tuple[int, bool]:
        """How many of a row's new tokens stay, up to the first at which a criterion of the caller ends the text, and
        whether one does. Each token is looked at once, after it was verified, as in plain generation."""
        if self.criteria:
            for kept in range(1, new + 1):
                known = self.records.get("output_scores")
                if known is not None:
                    known += tuple(scores[:, :kept].float().unbind(dim=1))
                text = self.text[row : row + 1, self.offset : start + 1 + kept]
                if bool(self.criteria(text, known).all()):
                    return kept, True
        return new, False

    def _tell(self, ids: list[int], length: int, outputs, logits: Tensor, scores: Tensor) -> None:
        """What the caller of a single row hears of new ids and keeps of their pass; `length` is that of the text before."""
        if self.streamer is not None:
            self.streamer.put(torch.tensor([ids]))
        first = length == self.prompt_end
        for name, kept in self.records.items():
            if name in ("output_scores", "output_logits"):
                numbers = scores if name == "output_scores" else logits
                self.records[name] = kept + tuple(numbers[:, : len(ids)].float().unbind(dim=1))
            else:
                states = getattr(outputs, name.removeprefix("output_"))
                self.records[name] = split_records(
                    kept, states, length, length + 1 if first else len(ids), name == "output_attentions"
                )

    def _align(self, longest: int, before: list[int]) -> None:
        """Aligned rows end at the column of the longest again: `longest` before, when they had the lengths `before`."""
        if self.cache is None or self.explicit:
            return
        farthest = max(self.lengths_known)
        places = zip(self.lengths_known, before, strict=True)
        by = [farthest - length - (longest - old) for length, old in places]
        if any(by):
            self.cache.move(torch.tensor(by, device=self.device))

    def _drop_ended(self) -> None:
        """Rows that have ended leave their places when they are a quarter of them; a cache that is returned needs all."""
        if self.returns_cache or not any(self.open) or 4 * self.open.count(False) < len(self.open):
            return
        kept = [place for place, is_open in enumerate(self.open) if is_open]
        places = torch.tensor(kept, device=self.device)
        self.cache.select(places)
        if self.context.cache.batch_size > 0:
            self.context.cache.select(places)
        self.pending = [pending.select(places) for pending in self.pending]
        for name in ("lengths", "is_open", "anchors", "position_shift", "ends", "row_index"):
            setattr(self, name, getattr(self, name)[places])
        longest = max(self.lengths_known)
        for name in ("rows", "lengths_known", "open", "ends_known"):
            setattr(self, name, [getattr(self, name)[place] for place in kept])
        self._align(longest, self.lengths_known)

    # What the call leaves

    def _complete_cache(self) -> None:
        """Fills the columns that plain generation fills: all but the last of the longest text, padding included; then
        the draft takes in what it has not seen, and its context stays on the cache."""
        last = max(self.text_lengths) - 1
        missing = last - min(self.lengths_known)
        if missing > 0:
            columns = (self.lengths[:, None] + torch.arange(missing, device=self.device)).clamp(max=last)
            self._verify(self.text.gather(1, columns), last)
            before, self.lengths_known = self.lengths_known, [last] * len(self.rows)
            self.lengths = torch.full_like(self.lengths, last)
            self._align(max(before), before)
        for pending in self.pending:
            self.context.cache.write_at(pending.columns, 0, pending.end, 0)
            states = self._to_draft(pending.states)
            self.draft.extend_context(states, pending.positions.to(self.draft.device), self.context.cache)
        self.pending = []
        self.context.length = last
        self.session.target_cache.draft_context = self.context

    def _output(self):
        sequences = self.text[:, self.offset : max(self.text_lengths)].clone()
        if not self.config.return_dict_in_generate:
            return sequences
        output = GenerateDecoderOnlyOutput(
            sequences=sequences,
            cache=self.session.target_cache,
            **{name.removeprefix("output_"): kept for name, kept in self.records.items()},
        )
        if self.config.prefill_chunk_size:
            keep_last_chunk(output, self.config.prefill_chunk_size)
        return output


def _largest_first(item: tuple[str, int]) -> int:
    return -item[1]


def _split_criteria(
    criteria: StoppingCriteriaList, device
) -> tuple[StoppingCriteriaList, StoppingCriteriaList, Tensor]:
    """Criteria that have to see every text, deadlines, and the EOS tokens [E]; the length limit is known already."""
    eos = [
        criterion.eos_token_id.flatten().to(device) for criterion in criteria if type(criterion) is EosTokenCriteria
    ]
    deadlines = [criterion for criterion in criteria if type(criterion) is MaxTimeCriteria]
    others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)]
    eos = torch.cat(eos) if eos else torch.tensor([], dtype=torch.long, device=device)
    return StoppingCriteriaList(others), StoppingCriteriaList(deadlines), eos


__all__ = ["DecodingLoop", "RowsContext", "takes_explicit_masks", "why_no_batch", "why_not"]
