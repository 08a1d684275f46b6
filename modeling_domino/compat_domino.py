"""The door into generate(), and every private transformers name that we touch. Written for transformers 5.24.

transformers has no extension point for assistants that decode by their own rules. This file adds one, as a backport
of what we would propose upstream:

    In `GenerationMixin.generate`, an assistant that knows how to decode is asked to: if `assistant_model` has a method
    `speculate`, the call is prepared as without an assistant and then handed to it, like a `custom_generate` callable.

The wrap is duck-typed and holds no state, so any number of copies of this file (package, Hub repositories, other
revisions) can live in one process: each draft decodes with its own code, and threads do not meet.
"""

import functools
import inspect

from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import _split_model_outputs


MARK = "_speculation_door"


def install() -> None:
    """Opens the door; does nothing where any copy of this file has already done so."""
    current = GenerationMixin.generate
    if not _has_door(current):
        wrapper = _wrap_generate(current)
        setattr(wrapper, MARK, wrapper)
        GenerationMixin.generate = wrapper


def uninstall() -> None:
    """
    Closes the door.

    Raises:
        RuntimeError: Somebody wrapped the method after us; nothing was changed.
    """
    current = GenerationMixin.generate
    if _is_door(current):
        GenerationMixin.generate = current.__wrapped__
    elif _has_door(current):
        # functools.wraps copies names, so who wrapped is read from its code, which callable objects do not have.
        code = getattr(current, "__code__", None)
        who = f"`{code.co_name}` ({code.co_filename}, line {code.co_firstlineno})" if code else repr(current)
        raise RuntimeError(
            f"`GenerationMixin.generate` was wrapped again by {who} after modeling_domino: undo that wrap first, then "
            "uninstall."
        )


def is_installed() -> bool:
    """Whether the door is open, ours or another copy's."""
    return _has_door(GenerationMixin.generate)


def _is_door(function) -> bool:
    # functools.wraps copies attributes, so a wrapper on top carries the mark too, but it is not the marked function.
    return getattr(function, MARK, None) is function


def _has_door(function) -> bool:
    while function is not None:
        if _is_door(function):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _wrap_generate(original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(self, *args, **kwargs):
        bound = signature.bind_partial(self, *args, **kwargs)
        draft = find_speculator(bound.arguments.get("assistant_model"))
        # Code from a repository decodes the whole call itself; continuous batching refuses assistants in its own words.
        elsewhere = (
            isinstance(bound.arguments.get("custom_generate"), str) or kwargs.get("cache_implementation") == "paged"
        )
        if draft is None or elsewhere:
            return original(self, *args, **kwargs)
        named = dict(list(bound.arguments.items())[1:])  # without self
        named.update(named.pop("kwargs", {}))
        return speculative_generate(original, self, draft, **named)

    return generate


def find_speculator(assistant_model):
    """The model with a `speculate` method inside what wraps it (peft, torch.compile, DDP), or None."""
    while assistant_model is not None:
        if hasattr(assistant_model, "speculate"):
            return getattr(assistant_model.speculate, "__self__", assistant_model)
        assistant_model = getattr(assistant_model, "_orig_mod", None) or getattr(assistant_model, "module", None)
    return None


def speculative_generate(original, target, draft, **arguments):
    """
    The call as transformers prepares it without an assistant, decoded by `draft.speculate`.

    Args:
        original: transformers' `GenerationMixin.generate`.
        target: The model that generate() was called on.
        draft: A model with `speculate`.
        arguments: Those of generate().
    """
    draft.last_generation = None
    for name in ("custom_generate", "assistant_tokenizer"):
        if arguments.pop(name, None) is not None:
            raise ValueError(
                f"`{name}` cannot be combined with a Domino draft as `assistant_model`: the draft brings its own "
                f"decoding and shares the target's tokenizer. Drop `{name}`."
            )
    arguments.pop("assistant_model", None)
    # generate() fills unset options with defaults meant for other assistants, so what the caller set is read first.
    names = ("num_assistant_tokens", "assistant_confidence_threshold")
    options = {name: _asked_for(name, target, arguments) for name in names}
    streamer = arguments.get("streamer")
    _use_tokenizer(target, arguments)
    # A cache that nobody gave and nobody gets need not be complete.
    given = any(arguments.get(name) is not None for name in ("cache", "past_key_values"))
    options["returns_cache"] = given or bool(_asked_for("return_dict_in_generate", target, arguments))
    return original(
        target, custom_generate=functools.partial(draft.speculate, streamer=streamer, **options), **arguments
    )


def _asked_for(name: str, target, arguments: dict):
    """An option as generate() reads it: the argument, else the call's generation config, else the target's."""
    configs = (arguments.get("generation_config"), target.generation_config)
    given = (arguments.get(name), *(getattr(config, name, None) for config in configs))
    return next((value for value in given if value is not None), None)


def _use_tokenizer(target, arguments: dict) -> None:
    """generate() drops `tokenizer` before it uses it for a callable's call, so what needs it is done here."""
    tokenizer = arguments.pop("tokenizer", None)
    if tokenizer is None:
        return  # generate() says what is missing
    if _asked_for("token_healing", target, arguments):
        name = "inputs" if arguments.get("inputs") is not None else "input_ids"
        arguments[name] = target.heal_tokens(arguments[name], tokenizer)
        arguments["token_healing"] = False
    stop_strings = _asked_for("stop_strings", target, arguments)
    if stop_strings is not None:
        arguments["stop_strings"] = None  # an argument wins over both configs
        criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
        # As in generate(), a criterion of the caller replaces the one that the option would make.
        if not any(isinstance(criterion, StopStringCriteria) for criterion in criteria):
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
        arguments["stopping_criteria"] = criteria


class _WithCandidates:
    """The target as the loop sees it for one call: itself, but for where candidates come from."""

    def __init__(self, target, session, device):
        self._target, self._session = target, session
        self.device = device  # of the ids: a target whose first weights are offloaded says "meta"

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def __call__(self, *args, **kwargs):
        return self._target(*args, **kwargs)

    def _get_candidate_generator(self, generation_config, logits_processor, **_):
        return self._session.make_candidate_generator(generation_config, logits_processor)

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, is_first_iteration=False, **kwargs):
        # The loop's first pass takes the whole prompt, also where the caller's cache holds the start of it.
        if is_first_iteration and self._session.cached_rows:
            next_sequence_length = input_ids.shape[1] - self._session.cached_rows
        return self._target.prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, is_first_iteration=is_first_iteration, **kwargs
        )


class _WithoutPlaceholders:
    """A list of processors or criteria that sees the ids which plain generation would show it."""

    def __init__(self, inner, placeholders: int):
        self._inner, self._placeholders = inner, placeholders

    def __call__(self, input_ids, scores, **kwargs):
        return self._inner(input_ids[:, self._placeholders :], scores, **kwargs)

    def __len__(self) -> int:
        return len(self._inner)


def assisted_decoding(
    target,
    input_ids: Tensor,
    session,
    generation_config: GenerationConfig,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    **kwargs,
):
    """transformers' own assisted-decoding loop, with candidates from `session.make_candidate_generator`.

    transformers picks candidate generators by class name inside a private method, so the loop is given a view of the
    target that answers that one method itself. The loop also counts positions by ids, so a prompt that has more
    positions than ids (`inputs_embeds`, or only the new part of a conversation whose start is in the cache) gets
    placeholders in front, which processors, criteria and the result do not show.
    """
    # The loop divides 0 by 0 when the draft's law equals the target's up to rounding and a token is rejected. Its
    # guard is armed by this weight; at exactly 1 the rule is the lossless one (generation/utils.py, 5.24).
    generation_config.assistant_ensemble_weight = 1.0
    if placeholders := session.placeholders:
        input_ids = F.pad(input_ids, (placeholders, 0))
        generation_config.max_length += placeholders
        logits_processor = _WithoutPlaceholders(logits_processor, placeholders)
        stopping_criteria = _WithoutPlaceholders(stopping_criteria, placeholders)
    output = type(target)._assisted_decoding(
        _WithCandidates(target, session, input_ids.device),
        input_ids,
        generation_config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        **kwargs,
    )
    if isinstance(output, Tensor):
        return output[:, placeholders:]
    output.sequences = output.sequences[:, placeholders:]
    if generation_config.prefill_chunk_size:
        keep_last_chunk(output, generation_config.prefill_chunk_size)
    return output


def decoding_mode(target):
    """The context in which plain generation runs all passes but the first (it chooses the kernels of experts)."""
    return target._optimize_model_for_decode()


def split_records(records: tuple, states: tuple[Tensor, ...], length: int, tokens: int, is_attention: bool) -> tuple:
    """
    Records with those of a pass added, one entry a token.

    Args:
        records: So far.
        states: Of the pass, one tensor a layer.
        length: Of the text before it.
        tokens: That the text gained; `length` + 1 for the pass over the prompt.
        is_attention: Whether these are attention weights, whose columns end with the token.
    """
    return _split_model_outputs(records, states, length, tokens, is_decoder_attention=is_attention)


def keep_last_chunk(output, chunk_size: int) -> None:
    """A draft's loops read the prompt in one piece; plain generate() returns the states of the last of its chunks."""
    for name in ("hidden_states", "attentions"):
        if records := getattr(output, name):
            rows = (records[0][0].shape[-2] - 1) % chunk_size + 1
            setattr(output, name, (tuple(layer[..., -rows:, :] for layer in records[0]), *records[1:]))


def prompt_positions(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict) -> int:
    """Positions of the prompt, those in the cache included: `input_ids` may hold only the rest, or be empty."""
    known = [input_ids, model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")]
    lengths = [tensor.shape[1] for tensor in known if tensor is not None]
    # generate() drops a mask without padding, and notes how long it was.
    return max(*lengths, getattr(generation_config, "_mask_length", 0))


def is_stateful(target) -> bool:
    """Whether transformers marks the target as one whose state cannot be rolled back."""
    return target._is_stateful


__all__ = [
    "assisted_decoding",
    "decoding_mode",
    "find_speculator",
    "install",
    "is_installed",
    "is_stateful",
    "keep_last_chunk",
    "prompt_positions",
    "split_records",
    "uninstall",
]
