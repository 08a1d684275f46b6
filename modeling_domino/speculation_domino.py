"""Between generate() and a decoding loop: what a draft refuses, which loop runs, what it reports.

`SpeculationMixin.speculate` receives ids, cache, processors and criteria exactly as transformers prepares them for
plain generation. Everything that would not be lossless is refused here, before the target has run.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode
from transformers.generation.logits_process import (
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import logging

from .candidate_generator_domino import AssistedSession, DominoCandidateGenerator, token_ids
from .compat_domino import assisted_decoding, install, is_stateful, prompt_positions, speculative_generate
from .decoding_domino import DecodingLoop, why_no_batch, why_not
from .length_domino import RoundCost
from .statistics_domino import LastGeneration
from .target_domino import BorrowedTarget


install()

logger = logging.get_logger(__name__)

CROPPABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# Rows that the field pads an embedding to; a larger difference means another vocabulary.
MAX_PADDING_ROWS = 512
# And the options that make them.
STATEFUL_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}
OTHER_ASSISTANTS = (
    "prompt_lookup_num_tokens",
    "use_mtp",
    "assistant_early_exit",
    "assistant_ensemble_weight",
)


@dataclass
class DecodingOptions:
    """
    How a draft decodes; kept on `draft.decoding` and never saved.

    Args:
        path: "loop" is ours, "assisted" transformers' own, which decodes one row a call; "auto" takes ours wherever it
            can decode the call.
        draft_temperature: Factor of the call's temperature at which the draft samples its tokens. Any value is
            lossless, since tokens are accepted against the law they were drawn from; 0 proposes the most likely one.
        candidate_pool: Tokens of each slot that the head corrects, those of the largest base logits; 0: all. Lossless too,
            a small pool may lower acceptance.
        adaptive_length: Whether our loop verifies only as many of the drafted tokens as pay on this machine, unless
            `num_assistant_tokens` or a confidence threshold says how many: None, in greedy calls; True, in all.
    """

    path: str = "auto"
    draft_temperature: float = 1.0
    candidate_pool: int = 0
    adaptive_length: bool | None = None


class SpeculationMixin:
    """What makes a draft model usable as `assistant_model=`."""

    candidate_generator = DominoCandidateGenerator  # who drafts its blocks in transformers' loop
    decoding_loop = DecodingLoop  # ours, for drafts that propose as Domino does

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.decoding = DecodingOptions()
        self.round_costs: dict[tuple, RoundCost] = {}  # by target, device and rows
        self.draft_id = uuid4().hex
        self.head_enabled = True
        self.last_generation: LastGeneration | None = None

    @contextmanager
    def head_disabled(self):
        """Within it the draft proposes from base logits alone: the ablation, and a DFlash-style baseline."""
        before, self.head_enabled = self.head_enabled, False
        try:
            yield self
        finally:
            self.head_enabled = before

    def assist(self, target: PreTrainedModel, **arguments):
        """
        `target.generate(assistant_model=self, ...)` by another way, which needs no change of generate().

        Args:
            target: The model whose output is kept.
            arguments: Of generate(), by name.

        Returns:
            What generate() returns.
        """
        return speculative_generate(type(target).generate, target, self, **arguments)

    def speculate(
        self,
        target: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer=None,
        num_assistant_tokens: int | None = None,
        assistant_confidence_threshold: float | None = None,
        returns_cache: bool = True,
        **model_kwargs,
    ):
        """
        Decodes one prepared call; generate() calls it, users do not.

        Args:
            target: The model whose output is kept.
            input_ids: Prompt ids, [b, T], padded on the left.
            logits_processor, stopping_criteria, generation_config, model_kwargs: As generate() prepared them.
            streamer: Receives the tokens of each round.
            num_assistant_tokens: K, tokens drafted per round; the draft's maximum when None.
            assistant_confidence_threshold: A block ends with a token that the draft gives a smaller probability;
                never when None.
            returns_cache: Whether the caller will read the cache; if not, that of a batch is left as it is.

        Returns:
            What generate() returns.

        Raises:
            ValueError: The draft does not fit the target, or the call asks for what cannot be done without changing
                its output.
        """
        self.last_generation = None
        keeps_no_cache = not generation_config.use_cache and model_kwargs.get("cache") is None
        if keeps_no_cache:  # verification needs one for the length of this call; the caller gets none back
            _refuse_records_of_whole_passes(generation_config)
            generation_config.use_cache = model_kwargs["use_cache"] = True
            model_kwargs["cache"] = DynamicCache(config=target.config.get_text_config(decoder=True))
        _check_call(target, input_ids, logits_processor, generation_config, model_kwargs)
        borrowed = BorrowedTarget(target)
        check_fit(self.config, target, borrowed, generation_config)
        most = self.config.max_draft_tokens
        if num_assistant_tokens is not None and not 1 <= num_assistant_tokens <= most:
            raise ValueError(
                f"`num_assistant_tokens={num_assistant_tokens}`, but this draft proposes 1 to {most} tokens per round "
                f"(`block_size={self.config.block_size}`, `shift_label={self.config.shift_label}`): choose a value "
                "within, or leave it unset for all of them."
            )
        _check_options(self.decoding)
        reason = self._why_not_our_loop(target, input_ids, generation_config, streamer, model_kwargs)
        limits = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
        # A criterion of the caller replaces the one that generate() makes of its own length.
        generation_config.max_length = min(limits, default=generation_config.max_length)
        cache = model_kwargs["cache"]
        with borrowed.tap(self.config.target_layer_ids) as taps:
            session = AssistedSession(
                draft=self,
                target=borrowed,
                taps=taps,
                stopping_criteria=stopping_criteria,
                num_assistant_tokens=num_assistant_tokens or most,
                confidence_threshold=assistant_confidence_threshold or 0.0,
                own_processors=[p for p in logits_processor if not type(p).__module__.startswith("transformers.")],
                target_cache=cache,
                cached_rows=int(cache.get_seq_length()),
                placeholders=prompt_positions(input_ids, generation_config, model_kwargs) - input_ids.shape[1],
            )
            if reason is None:
                loop = self.decoding_loop(
                    session,
                    target,
                    input_ids,
                    generation_config,
                    logits_processor,
                    model_kwargs,
                    streamer,
                    returns_cache,
                    self._adapts_length(generation_config, num_assistant_tokens, assistant_confidence_threshold),
                )
                output = loop.run()
                self.last_generation = loop.statistics()
            else:
                output = assisted_decoding(
                    target,
                    input_ids,
                    session,
                    generation_config,
                    logits_processor=logits_processor,
                    stopping_criteria=stopping_criteria,
                    streamer=streamer,
                    **model_kwargs,
                )
                session.generator.remember()
                self.last_generation = session.recorder.summary("assisted", reason)
        if keeps_no_cache and not isinstance(output, Tensor):
            output = type(output)(**{name: value for name, value in output.items() if name != "cache"})
        return output

    def _adapts_length(self, generation_config, num_assistant_tokens, confidence_threshold) -> bool:
        wanted = self.decoding.adaptive_length
        if num_assistant_tokens is not None or confidence_threshold:
            return False
        return not generation_config.do_sample if wanted is None else wanted

    def _why_not_our_loop(self, target, input_ids, generation_config, streamer, model_kwargs) -> str | None:
        """Why a call takes transformers' loop; None if ours decodes it.

        Raises:
            ValueError: Neither can: ours was asked for, or there are several rows.
        """
        rows, path = input_ids.shape[0], self.decoding.path
        reason = why_not(self, target, generation_config, model_kwargs)
        if rows > 1 and path != "assisted":
            reason = reason or why_no_batch(target, generation_config, model_kwargs, streamer)
        if path == "assisted":
            reason = "`draft.decoding.path` is 'assisted'"
        if reason is None:
            return None
        if rows > 1:
            returned = generation_config.num_return_sequences
            raise ValueError(
                f"The batch has {rows} rows (`num_return_sequences={returned}`), which only our own loop decodes together, "
                f"and it cannot decode this call: {reason}. Call generate() once for each row, or leave that out."
            )
        if path == "loop":
            raise ValueError(
                f"`draft.decoding.path` is 'loop', which cannot decode this call: {reason}. Leave that out or set 'auto'."
            )
        if path == "auto":
            logger.info(f"A draft decodes through transformers' assisted loop: {reason}.")
        return reason


def _check_call(target, input_ids, logits_processor, generation_config, model_kwargs) -> None:
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; a Domino draft needs a decoder-only target.")
    layer_types = getattr(target.config.get_text_config(decoder=True), "layer_types", None) or []
    recurrent = sorted(set(layer_types) - CROPPABLE_LAYERS)
    if is_stateful(target) or recurrent:
        raise ValueError(
            f"{name} keeps a recurrent state ({', '.join(recurrent) or 'stateful model'}) that cannot be rolled back "
            "after a rejected token: use it without a draft."
        )
    if generation_config.num_beams > 1:
        raise ValueError(
            f"`num_beams={generation_config.num_beams}`: a Domino draft decodes greedily or by sampling; set "
            "`num_beams=1` or drop `assistant_model`."
        )
    mode = generation_config.get_generation_mode()
    others = [option for option in OTHER_ASSISTANTS if getattr(generation_config, option, None)]
    if others:
        raise ValueError(
            f"`{others[0]}={getattr(generation_config, others[0])}` belongs to another kind of assisted decoding: drop "
            "it or drop `assistant_model`."
        )
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"Generation mode `{mode.value}` is not supported with a Domino draft, which decodes greedily or "
            "by sampling: drop the option that asks for it or drop `assistant_model`."
        )
    for processor in logits_processor:
        if (option := STATEFUL_PROCESSORS.get(type(processor))) is not None:
            value = getattr(generation_config, option, None)
            given = f"{option}={value}" if isinstance(value, int | float) else option
            raise ValueError(
                f"`{given}` makes a `{type(processor).__name__}`, which keeps a state from token to token that rejected "
                "drafts would spoil: drop it or drop `assistant_model`."
            )
    mask = model_kwargs.get("attention_mask")
    if len(input_ids) > 1 and mask is not None and not bool(mask[:, -1].all()):
        row = mask[:, -1].tolist().index(0)
        raise ValueError(
            f"Row {row} of the batch ends with padding (`attention_mask` is 0 in its last column), where its text would go "
            "on: pad on the left (`tokenizer.padding_side = 'left'`)."
        )
    cache = model_kwargs.get("cache")
    if cache is None or not cache.is_croppable:
        raise ValueError(
            f"The cache is a {type(cache).__name__} (`cache_implementation="
            f"{generation_config.cache_implementation!r}`), which cannot be cropped after a rejected token: use the "
            "default cache (no `cache_implementation`) or drop `assistant_model`."
        )
    cached, positions = int(cache.get_seq_length()), prompt_positions(input_ids, generation_config, model_kwargs)
    if cached >= positions > 0:
        raise ValueError(
            f"The cache already holds {cached} tokens and the prompt has {positions} with those: nothing is left to "
            "read. Pass the whole conversation as `input_ids`, or an `attention_mask` that covers the cached part too."
        )


def _refuse_records_of_whole_passes(generation_config) -> None:
    """Without a cache every pass reads all tokens, and plain generate() returns the states of all of them each time."""
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(generation_config, name) and generation_config.return_dict_in_generate:
            raise ValueError(
                f"`{name}=True` with `use_cache=False` returns states of the whole text at every token, which a draft "
                "does not compute: leave `use_cache` on, or drop `assistant_model`."
            )


def check_fit(config, target, borrowed: BorrowedTarget, generation_config) -> None:
    """
    Refuses a draft that was made for another target.

    Args:
        config: Of the draft.
        target: The model it shall draft for.
        borrowed: Its parts.
        generation_config: Whose BOS, EOS and PAD tokens must not be the mask token.

    Raises:
        ValueError: Hidden sizes, layer counts, vocabularies or mask token do not fit; both values are named.
    """
    text_config = target.config.get_text_config(decoder=True)
    remedy = f"Use a draft that was trained for {target.config.name_or_path or type(target).__name__}."
    if text_config.hidden_size != config.hidden_size:
        raise ValueError(
            f"The draft's hidden size is {config.hidden_size}, the target's {text_config.hidden_size}. {remedy}"
        )
    if text_config.num_hidden_layers != config.num_target_layers:
        raise ValueError(
            f"The draft taps layers {config.target_layer_ids} of {config.num_target_layers}, but the target has "
            f"{text_config.num_hidden_layers} layers. {remedy}"
        )
    rows = text_config.vocab_size
    if abs(rows - config.vocab_size) > MAX_PADDING_ROWS:
        raise ValueError(
            f"The draft's vocabulary has {config.vocab_size} rows, the target's {rows}: more than padding, so the "
            f"tokenizers differ. {remedy}"
        )
    if config.mask_token_id >= rows:
        raise ValueError(
            f"The draft's mask token {config.mask_token_id} is outside the target's {rows} embedding rows. {remedy}"
        )
    for kind in ("bos", "eos", "pad"):
        if config.mask_token_id in token_ids(getattr(generation_config, f"{kind}_token_id")):
            raise ValueError(
                f"The draft's mask token {config.mask_token_id} is the {kind.upper()} token of this call: the draft "
                f"needs a `mask_token_id` that no text contains. {remedy}"
            )


def _check_options(options: DecodingOptions) -> None:
    if options.path not in ("auto", "loop", "assisted"):
        raise ValueError(f"`draft.decoding.path` is {options.path!r}, expected 'auto', 'loop' or 'assisted'.")
    if not isinstance(options.candidate_pool, int) or options.candidate_pool < 0:
        raise ValueError(
            f"`draft.decoding.candidate_pool` is {options.candidate_pool!r}, expected a number of tokens, or 0 for all."
        )
    if options.draft_temperature != 0 and not 0.01 <= options.draft_temperature <= 100:
        raise ValueError(
            f"`draft.decoding.draft_temperature` is {options.draft_temperature}, expected 0 (greedy drafts) or a factor "
            "of the call's temperature between 0.01 and 100."
        )


__all__ = ["DecodingOptions", "SpeculationMixin", "check_fit"]
