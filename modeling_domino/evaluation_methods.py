"""Ways of decoding that an evaluation compares, and one conversation decoded in one of them.

All run through `target.generate()` as a user would call it: plainly, compiled, with a Domino draft (head on and off), an
EAGLE-3-style draft, or with what transformers itself offers: prompt lookup, a small assistant model, a DFlash draft.
"""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import CompileConfig, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.cache_utils import DFlashCache

from .compat_domino import find_speculator
from .data import chat_ids
from .measures import Decoded


LABELS = {
    "plain": "plain generate",
    "compiled": "compiled plain generate",
    "domino": "Domino",
    "head-off": "Domino, head off",
    "prompt-lookup": "prompt lookup",
    "assistant": "small assistant model",
    "dflash": "DFlash (transformers)",
    "eagle": "EAGLE-3-style draft",
}


@dataclass
class Method:
    """
    Args:
        target: The model that decodes.
        assistant: Its `assistant_model`, if any.
        head: False switches a Domino draft's correction head off.
        options: Of generate(), beside those that all methods share.
    """

    target: PreTrainedModel
    assistant: nn.Module | None = None
    head: bool = True
    options: dict = field(default_factory=dict)


def decode_conversation(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: dict,
    assistant: nn.Module | None = None,
    *,
    head: bool = True,
    template: dict | None = None,
    seed: int | None = None,
    **options,
) -> Decoded:
    """
    Answers every user turn, each after the answers to those before it.

    Args:
        target, tokenizer: The model and its tokenizer.
        conversation: `id` and `messages`, as from `read_conversations`; answers in it are replaced.
        assistant: `assistant_model` of generate(), a draft for instance; None decodes without one.
        head: False switches a Domino draft's correction head off.
        template: Variables of the chat template.
        seed: Of torch's random numbers, set anew for this conversation.
        options: Of generate().

    Raises:
        RuntimeError: Decoding is plain, and a hook on the target would slow it down.
    """
    draft = find_speculator(assistant)
    assisted = assistant is not None or options.get("prompt_lookup_num_tokens")
    if not assisted:
        refuse_hooks(target)
    answers, seconds = [], 0.0
    rounds: dict[str, list] = {"gained": [], "drafted": [], "accepted": []}
    times = {"draft_seconds": 0.0, "verify_seconds": 0.0} if draft is not None else {}
    if seed is not None:
        torch.manual_seed(seed)
    with draft.head_disabled() if draft is not None and not head else nullcontext():
        for messages in histories(conversation):
            ids = torch.tensor([chat_ids(tokenizer, messages, **(template or {}))], device=target.device)
            lengths = _Lengths()
            extra = {"stopping_criteria": [lengths]} if assisted and draft is None else {}
            _wait(target)
            started = time.perf_counter()
            output = target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, **extra, **options
            )
            _wait(target)
            seconds += time.perf_counter() - started
            answers.append(output[0, ids.shape[1] :].tolist())
            messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1], skip_special_tokens=True)})
            if draft is not None:
                stats = draft.last_generation
                rounds["gained"] += stats.tokens_per_round
                rounds["drafted"] += stats.drafted_per_round
                rounds["accepted"] += stats.accepted_per_round
                for name in times:
                    times[name] += sum(getattr(stats, name))
            else:
                rounds["gained"] += lengths.gained
    return Decoded(conversation["id"], answers, seconds, **rounds, **times)


def histories(conversation: dict) -> Iterator[list[dict]]:
    """The messages before each answer, old answers left out; whoever takes them appends the new answer to the list."""
    messages = []
    for message in conversation["messages"]:
        if message["role"] != "assistant":
            messages.append(message)
        if message["role"] == "user":
            yield messages


class _Lengths(StoppingCriteria):
    """Stops nothing: transformers' own assisted loop asks it once after each pass of the target."""

    def __init__(self):
        self.lengths: list[int] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def gained(self) -> list[int]:
        """Tokens of each round; the first pass, over the prompt, is none."""
        return [after - before for before, after in zip(self.lengths, self.lengths[1:], strict=False)]


def decode_alternately(
    conversations: list[dict], ways: dict[str, Callable[[dict], Decoded]], progress: Callable = iter
) -> dict[str, list[Decoded]]:
    """Every conversation in every way before the next one; the order of the ways turns with each conversation."""
    results: dict[str, list[Decoded]] = {name: [] for name in ways}
    for index, conversation in enumerate(progress(conversations)):
        for name in turned(list(ways), index):
            results[name].append(ways[name](conversation))
    return results


def turned(names: list[str], index: int) -> list[str]:
    """The names in the order of the index-th conversation: each goes first as often as any other."""
    shift = index % len(names)
    return names[shift:] + names[:shift]


def refuse_hooks(target: PreTrainedModel) -> None:
    """
    Raises:
        RuntimeError: A forward hook is registered on the target: it would slow the baseline down.
    """
    for name, module in target.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise RuntimeError(
                f"The target's module `{name}` has a forward hook, which slows plain decoding down: the comparison "
                "would be unfair. Remove the hook, or load the target anew."
            )


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """
    The same model as other module objects over the same weights, for a way of decoding that leaves something behind:
    transformers' recording of hidden states, which its DFlash decoding asks for, keeps its hooks on the target.
    """
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    shared = [*model.parameters(), *model.buffers(), *held]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def compiled_options(target: PreTrainedModel, cache_rows: int) -> dict:
    """
    Options of generate() that compile its decoding passes: a static cache of one size for all calls.

    Args:
        target: Who decodes.
        cache_rows: Positions of the longest conversation, answers included.
    """
    compile_config = CompileConfig()
    if target.device.type == "cpu":
        compile_config._compile_all_devices = True  # transformers compiles by itself on accelerators only
    return {"cache_implementation": "static", "max_cache_len": cache_rows, "compile_config": compile_config}


@contextmanager
def time_limit(seconds: float):
    """
    Ends what runs within it (on the main thread of a POSIX system; elsewhere there is no limit).

    Raises:
        TimeoutError: It took longer.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TimeoutError(f"not done after {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class NativeDFlash(nn.Module):
    """
    The backbone of one of our drafts as transformers' own DFlash decoding calls it (`speculation_type="dflash"`).

    transformers writes block rows to its cache and crops them; our backbone never writes them, so it keeps its own.

    Args:
        draft: A draft whose slots 1..B-1 predict the tokens at their own positions (`shift_label=False`).

    Raises:
        ValueError: Its labels are shifted: DFlash would read every prediction one position late.
    """

    @dataclass
    class Output:
        last_hidden_state: torch.Tensor

    def __init__(self, draft):
        super().__init__()
        if draft.config.shift_label:
            raise ValueError(
                "transformers' DFlash decoding reads slot i as the token at position i, but this draft was trained with "
                "`shift_label=True`, where slot i predicts position i + 1: name a DFlash draft with `--dflash`, or leave "
                "the method `dflash` out."
            )
        self.draft, self.config = draft, draft.config
        self._caches: WeakKeyDictionary[DFlashCache, DynamicCache] = WeakKeyDictionary()

    @property
    def device(self) -> torch.device:
        return self.draft.device

    def forward(self, noise_embeds, context_hidden_states, position_ids, attention_mask, cache: DFlashCache):
        draft = self.draft
        own = self._caches.setdefault(cache, DynamicCache())
        states = draft.backbone(
            noise_embeds[:, None].to(draft.dtype), context_hidden_states.to(draft.dtype), position_ids, cache=own
        )
        return self.Output(states[:, 0])


def _wait(target: PreTrainedModel) -> None:
    if target.device.type != "cpu":
        torch.accelerator.synchronize(target.device)


__all__ = [
    "LABELS",
    "Method",
    "NativeDFlash",
    "compiled_options",
    "decode_alternately",
    "decode_conversation",
    "histories",
    "refuse_hooks",
    "time_limit",
    "turned",
    "twin",
]
