"""Where a round's time goes: draft backbone, lm_head, correction loop, verification, and what lies between."""

import time
from collections import defaultdict
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .evaluation_methods import decode_conversation


PARTS = ("draft backbone", "lm_head", "correction loop", "verify", "glue")


class Stopwatch:
    """Seconds by part; waits for the accelerator at both ends of every part, so a profiled run is slower than others."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = defaultdict(float)
        self.first_draft: float | None = None

    def now(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def part(self, name: str):
        started = self.now()
        yield
        self.seconds[name] += self.now() - started


def _timed(decoder: type, watch: Stopwatch) -> type:
    """A candidate generator, or a decoding loop, that notes how long its parts take; both call them alike."""

    class Timed(decoder):
        def _hidden_states(self, *args):
            watch.first_draft = watch.first_draft or watch.now()
            with watch.part("draft backbone"):
                return super()._hidden_states(*args)

        def _base_logits(self, *args):
            with watch.part("lm_head"):
                return super()._base_logits(*args)

        def _draft(self, *args):
            before = watch.seconds["lm_head"]
            with watch.part("correction loop"):
                drafted = super()._draft(*args)
            watch.seconds["correction loop"] -= watch.seconds["lm_head"] - before
            return drafted

    return Timed


class _Arrivals(BaseStreamer):
    """When each token of a plain call came; the first `put` is the prompt."""

    def __init__(self, watch: Stopwatch):
        self.watch, self.times = watch, []

    def put(self, value):
        self.times.append(self.watch.now())

    def end(self):
        pass


def profile_rounds(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft,
    conversations: list[dict],
    *,
    template: dict | None = None,
    **options,
) -> dict:
    """
    An account of the rounds of some conversations (of their first turns), prompts' own passes left out, in the loop that
    `draft.decoding.path` names ("auto": ours).

    Args:
        target, tokenizer, draft: The models.
        conversations: `id` and `messages`.
        template: Variables of the chat template.
        options: Of generate().

    Returns:
        `milliseconds` by part of a round, `rounds`, `tau`, `target_ms` (one token of plain generate), and the speedup
        that these imply: `implied_speedup` = τ · T_target / (T_draft + T_verify), and `bound_with_free_draft`, which no
        draft of this τ can exceed, = τ · T_target / T_verify.
    """
    watch, plain = Stopwatch(target.device), Stopwatch(target.device)
    part = "candidate_generator" if draft.decoding.path == "assisted" else "decoding_loop"
    rounds = tokens = plain_tokens = 0
    whole = plain_seconds = 0.0
    started: list[float] = []

    def before(*_):
        started.append(watch.now())

    def after(*_):
        if watch.first_draft is not None:  # the prompt's own pass is no round
            watch.seconds["verify"] += watch.now() - started[-1]

    for conversation in conversations:
        first = {**conversation, "messages": conversation["messages"][:1]}
        arrivals = _Arrivals(plain)
        decode_conversation(target, tokenizer, first, template=template, streamer=arrivals, **options)
        plain_tokens += len(arrivals.times) - 2
        plain_seconds += arrivals.times[-1] - arrivals.times[1]
        watch.first_draft = None
        setattr(draft, part, _timed(getattr(draft, part), watch))
        hooks = [target.register_forward_pre_hook(before), target.register_forward_hook(after)]
        try:
            decoded = decode_conversation(target, tokenizer, first, draft, template=template, **options)
        finally:
            delattr(draft, part)
            for hook in hooks:
                hook.remove()
        if watch.first_draft is not None:
            whole += watch.now() - watch.first_draft
        rounds += decoded.rounds
        tokens += sum(decoded.gained)
    if not rounds or plain_tokens < 1:
        raise ValueError("No round was decoded: allow more new tokens.")
    watch.seconds["glue"] = whole - sum(watch.seconds.values())
    target_ms, tau = 1000 * plain_seconds / plain_tokens, tokens / rounds
    milliseconds = {part: 1000 * watch.seconds[part] / rounds for part in PARTS}
    return {
        "conversations": len(conversations),
        "rounds": rounds,
        "tau": tau,
        "target_ms": target_ms,
        "milliseconds": milliseconds,
        "implied_speedup": tau * target_ms / sum(milliseconds.values()),
        "bound_with_free_draft": tau * target_ms / milliseconds["verify"],
    }


def account(profile: dict) -> str:
    """The account as text: one line a part."""
    parts = profile["milliseconds"]
    whole = sum(parts.values())
    lines = [f"A round takes {whole:.1f} ms, one token of plain generate {profile['target_ms']:.1f} ms:"]
    for part, milliseconds in parts.items():
        bar = "█" * round(40 * milliseconds / whole)
        lines.append(f"  {part:16} {milliseconds:7.1f} ms {100 * milliseconds / whole:5.1f} % {bar}")
    lines.append(
        f"τ = {profile['tau']:.2f} over {profile['rounds']} rounds implies {profile['implied_speedup']:.2f} times plain "
        f"(prompts left out), and with a draft that costs nothing {profile['bound_with_free_draft']:.2f}."
    )
    return "\n".join(lines)


__all__ = ["account", "profile_rounds"]
