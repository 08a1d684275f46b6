"""`domino evaluate run`: every conversation of some sets, decoded in several ways in turns, into one results file.

Each conversation is written to disk as soon as all ways have decoded it, so a run that ends early goes on where it
stopped. `results.json` holds what was decoded, round by round; `summarise` computes every figure from it anew.
"""

import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from tqdm.auto import tqdm
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import __version__
from .data import chat_ids
from .evaluation_methods import (
    LABELS,
    Method,
    NativeDFlash,
    compiled_options,
    decode_conversation,
    histories,
    time_limit,
    turned,
    twin,
)
from .evaluation_profile import profile_rounds
from .evaluation_sets import read_set
from .features import weights_fingerprint
from .loading import load_target
from .measures import Decoded
from .modeling_domino import DominoForSpeculativeDraft
from .packed_linear import pack_linears


COMPILE_SECONDS = 300
FORMAT = 1


@dataclass
class Evaluation:
    """
    What an evaluation is asked for; a run goes on only where all of it is the same.

    Args:
        target: Hub id, folder or .gguf file.
        draft: Domino draft, Hub id or folder; needed by the methods domino and head-off.
        sets: Names, see `read_set`.
        methods: Of `LABELS`.
        data: Folder of the sets; None takes them from the Hub.
        max_samples: Most conversations of a set.
        max_new_tokens: Of each turn.
        num_assistant_tokens: K, drafted per round; the draft's maximum when None.
        temperature: 0 decodes greedily.
        seed: Of sampling.
        dtype, device: Of all models; see `load_target`.
        pack: Whether weights are laid out once for decoding on a CPU (`pack_linears`).
        thinking: The chat template's `enable_thinking`; None leaves the template's own default.
        assistant: Small causal model for the method assistant.
        dflash: DFlash draft for the method dflash; the Domino draft's backbone where that is a valid one when None.
        eagle: EAGLE-3-style draft for the method eagle.
    """

    target: str
    draft: str | None = None
    sets: list[str] = field(default_factory=lambda: ["gsm8k", "humaneval", "mt-bench"])
    methods: list[str] = field(default_factory=lambda: ["plain", "domino", "head-off"])
    data: str | None = None
    max_samples: int | None = 128
    max_new_tokens: int = 512
    num_assistant_tokens: int | None = None
    temperature: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    device: str | None = None
    pack: bool = False
    thinking: bool | None = None
    assistant: str | None = None
    dflash: str | None = None
    eagle: str | None = None

    def __post_init__(self):
        if unknown := sorted(set(self.methods) - set(LABELS)):
            raise ValueError(f"`{unknown[0]}` is no method, expected some of {', '.join(LABELS)}.")
        needs = {"domino": "draft", "head-off": "draft", "assistant": "assistant", "eagle": "eagle"}
        for method, option in needs.items():
            if method in self.methods and getattr(self, option) is None:
                raise ValueError(f"The method `{method}` needs a model: add `--{option} MODEL`.")
        if "dflash" in self.methods and not (self.dflash or self.draft):
            raise ValueError("The method `dflash` needs a model: add `--dflash MODEL`.")


class Journal:
    """
    The conversations of an evaluation, on disk as soon as they are decoded.

    Args:
        folder: Made if need be; `unfinished.jsonl` in it becomes `results.json` in the end.
        asked: Must equal what an unfinished file in the folder was made for.

    Raises:
        ValueError: The folder cannot be written, holds a finished evaluation, or an unfinished one of something else.
    """

    def __init__(self, folder: str | Path, asked: Evaluation):
        self.folder = Path(folder)
        self.results = self.folder / "results.json"
        self.path = self.folder / "unfinished.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a"):
                pass
        except OSError as error:
            raise ValueError(
                f"Results cannot be written to {folder} ({error.strerror}): name another folder."
            ) from None
        if self.results.exists():
            if not self.path.stat().st_size:
                self.path.unlink()
            raise ValueError(f"{folder} holds a finished evaluation: name another folder, or remove it.")
        lines = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        self.records: list[dict] = lines[1:]
        if not lines:
            self._write([asdict(asked)])
        elif lines[0] != asdict(asked):
            other = [name for name, value in asdict(asked).items() if lines[0].get(name) != value]
            raise ValueError(
                f"{folder} holds an unfinished evaluation with `{other[0]}` = {lines[0].get(other[0])!r}, but "
                f"{getattr(asked, other[0])!r} is asked for: name another folder, or ask for the same to go on."
            )
        else:
            self._write(lines)  # a line that a kill cut short goes

    def _write(self, lines: list[dict]) -> None:
        self.path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")

    @property
    def done(self) -> set[tuple[str, str]]:
        return {(record["set"], record["id"]) for record in self.records}

    def add(self, record: dict) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def finish(self, **facts) -> dict:
        """Writes `results.json`: everything asked, everything decoded, and `facts`."""
        results = {"format": FORMAT, **facts, "conversations": self.records}
        self.results.write_text(json.dumps(results, ensure_ascii=False) + "\n", encoding="utf-8")
        self.path.unlink()
        return results


def evaluate(asked: Evaluation, folder: str | Path, *, minutes: float | None = None, profile: int = 0) -> dict:
    """
    Decodes every conversation in every way, in turns, and writes `results.json`.

    Args:
        asked: What to measure.
        folder: Of the results; an unfinished evaluation of the same in it is gone on with.
        minutes: Ends after about so many, with what has been decoded by then.
        profile: Conversations to take the account of a round from (`profile_rounds`), after everything else.

    Returns:
        The results as written.

    Raises:
        ValueError: Anything asked for cannot be had; nothing has been decoded then.
    """
    started = time.perf_counter()
    journal = Journal(folder, asked)
    work = [(name, c) for name in asked.sets for c in read_set(name, asked.data, asked.max_samples)]
    models = EvaluationModels(asked, [conversation for _, conversation in work])
    models.warm_up(work[0][1])
    done = journal.done
    left = [(number, name, c) for number, (name, c) in enumerate(work) if (name, c["id"]) not in done]
    for number, name, conversation in tqdm(left, desc="conversations", initial=len(work) - len(left), total=len(work)):
        if minutes is not None and time.perf_counter() - started > 60 * minutes:
            break
        journal.add({"set": name, "number": number, **models.decode(conversation, number)})
    return journal.finish(
        asked=asdict(asked),
        k=models.k,
        unavailable=models.unavailable,
        machine=models.machine(),
        profile=models.profile([c for _, c in work[:profile]]) if profile else None,
    )


class EvaluationModels:
    """
    The models of an evaluation and its ways of decoding.

    Args:
        asked: What to measure.
        conversations: All of them; the longest bounds the cache of compiled decoding.
    """

    def __init__(self, asked: Evaluation, conversations: list[dict]):
        self.asked = asked
        self.target, self.tokenizer = load_target(asked.target, dtype=asked.dtype, device=asked.device)
        self.template = {} if asked.thinking is None else {"enable_thinking": asked.thinking}
        self.unavailable: dict[str, str] = {}
        self.fingerprints = {"target": weights_fingerprint(self.target)}
        self.draft = self._load("draft", DominoForSpeculativeDraft)
        self.k = asked.num_assistant_tokens or (self.draft.config.max_draft_tokens if self.draft is not None else 8)
        # Compiled decoding lays weights out in its own way, which a packed model has no weights for.
        unpacked = twin(self.target) if "compiled" in asked.methods else self.target
        if asked.pack:
            pack_linears(self.target, rows=self.k + 1)
            if self.draft is not None:
                pack_linears(self.draft.layers, rows=self.k + 1)
        build = {
            "plain": lambda: Method(self.target),
            "compiled": lambda: Method(
                unpacked, options=compiled_options(unpacked, max(self._rows(c) for c in conversations))
            ),
            "domino": lambda: Method(self.target, self.draft, options=self._drafting),
            "head-off": lambda: Method(self.target, self.draft, head=False, options=self._drafting),
            "prompt-lookup": lambda: Method(self.target, options={"prompt_lookup_num_tokens": self.k}),
            "assistant": self._assistant,
            "dflash": self._dflash,
            "eagle": self._eagle,
        }
        self.methods: dict[str, Method] = {name: build[name]() for name in asked.methods}

    @property
    def _drafting(self) -> dict:
        return {"num_assistant_tokens": self.k}

    def _load(self, option: str, model_class):
        """The model that an option of the evaluation names, in the target's type and place."""
        name = getattr(self.asked, option)
        if name is None:
            return None
        model = model_class.from_pretrained(name, dtype=self.target.dtype).eval().to(self.target.device)
        self.fingerprints[option] = weights_fingerprint(model)
        return model

    def _assistant(self) -> Method:
        assistant = self._load("assistant", AutoModelForCausalLM)
        tokenizer = AutoTokenizer.from_pretrained(self.asked.assistant)
        if tokenizer.get_vocab() == self.tokenizer.get_vocab():
            return Method(self.target, assistant)
        both = {"tokenizer": self.tokenizer, "assistant_tokenizer": tokenizer}
        return Method(self.target, assistant, options=both)

    def _dflash(self) -> Method:
        draft = self._load("dflash", AutoModel) or self.draft
        if isinstance(draft, DominoForSpeculativeDraft):
            draft = NativeDFlash(draft)
        return Method(twin(self.target), draft, options={"speculation_type": "dflash"})

    def _eagle(self) -> Method:
        from .eagle import EagleForSpeculativeDraft

        draft = self._load("eagle", EagleForSpeculativeDraft)
        if self.asked.pack:
            pack_linears(draft.layers, rows=1)
        return Method(self.target, draft, options=self._drafting)

    def _rows(self, conversation: dict) -> int:
        """Bound on the positions of a conversation, its answers included."""
        users = [m for m in conversation["messages"] if m["role"] != "assistant"]
        asked = sum(len(chat_ids(self.tokenizer, [message], **self.template)) for message in users)
        return asked + len(users) * (self.asked.max_new_tokens + 8)

    @property
    def sampling(self) -> dict:
        if self.asked.temperature:
            return {"do_sample": True, "temperature": self.asked.temperature}
        return {"do_sample": False}

    def warm_up(self, conversation: dict) -> None:
        """
        A few tokens in every way, so that nothing is timed that happens once. A way that compiles gets a time limit, and
        is left out with its reason where it does not compile.
        """
        first = {**conversation, "messages": conversation["messages"][:1]}
        for name in list(self.methods):
            if name != "compiled":
                self._decode(name, first, 0, max_new_tokens=self.k + 2)
                continue
            try:
                with time_limit(COMPILE_SECONDS):
                    self._decode(name, first, 0, max_new_tokens=self.k + 2)
            except Exception as error:  # whatever a compiler may raise
                reason = (str(error).strip().splitlines() or [""])[0]
                self.unavailable[name] = f"{type(error).__name__}: {reason}"[:200]
                del self.methods[name]
                torch.compiler.reset()

    def decode(self, conversation: dict, number: int) -> dict:
        """One conversation in every way: its part of the results."""
        order = turned(list(self.methods), number)
        decoded = {name: self._decode(name, conversation, number) for name in order}
        record: dict = {"id": conversation["id"], "order": order, "decoded": {}, "differences": {}}
        plain = decoded.get("plain")
        for name in self.methods:
            values = asdict(decoded[name])
            del values["id"]
            if plain is not None and name != "plain" and not self.asked.temperature:
                if decoded[name].token_ids == plain.token_ids:
                    values["token_ids"] = "plain"  # as plain generate()'s: a third of the file
                else:
                    record["differences"][name] = first_difference(
                        self.target, self.tokenizer, conversation, plain, decoded[name], self.template
                    )
            record["decoded"][name] = values
        return record

    def _decode(self, name: str, conversation: dict, number: int, **options) -> Decoded:
        method = self.methods[name]
        return decode_conversation(
            method.target,
            self.tokenizer,
            conversation,
            method.assistant,
            head=method.head,
            template=self.template,
            seed=self.asked.seed + number,
            **{"max_new_tokens": self.asked.max_new_tokens, **self.sampling, **method.options, **options},
        )

    def profile(self, conversations: list[dict]) -> dict:
        """Where a round of the Domino draft spends its time."""
        options = {"max_new_tokens": self.asked.max_new_tokens, **self.sampling, **self._drafting}
        return profile_rounds(
            self.target, self.tokenizer, self.draft, conversations, template=self.template, **options
        )

    def machine(self) -> dict:
        """What the figures depend on beside the models."""
        device = self.target.device
        return {
            "modeling_domino": __version__,
            "commit": source_commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "device": _processor() if device.type == "cpu" else torch.cuda.get_device_name(device),
            "threads": torch.get_num_threads(),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "attention": self.target.config._attn_implementation,
            "fingerprints": self.fingerprints,
            "date": time.strftime("%Y-%m-%d"),
        }


@torch.no_grad()
def first_difference(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversation: dict,
    plain: Decoded,
    other: Decoded,
    template: dict,
) -> dict:
    """
    Where two greedy texts part, and by how much the target prefers one token to the other there: a tie that rounding
    flipped has a gap near 0.

    Returns:
        `turn`, `position` in its answer, and `logit_gap` (None where one text ends before the other).
    """
    turns = zip(histories(conversation), plain.token_ids, other.token_ids, strict=True)
    for turn, (messages, one, two) in enumerate(turns):
        if one != two:
            position = next(
                (i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
            )
            place = {"turn": turn, "position": position, "logit_gap": None}
            if position < min(len(one), len(two)):
                ids = torch.tensor([chat_ids(tokenizer, messages, **template) + one[:position]], device=target.device)
                logits = target(ids, logits_to_keep=1).logits[0, -1].float()
                place["logit_gap"] = abs(float(logits[one[position]] - logits[two[position]]))
            return place
        messages.append({"role": "assistant", "content": tokenizer.decode(one, skip_special_tokens=True)})
    raise ValueError(f"Both texts of {conversation['id']} are equal.")


def decoded_of(results: dict, set_name: str, method: str) -> list[Decoded]:
    """What a method decoded of a set, from a results file."""
    decoded = []
    for record in results["conversations"]:
        if record["set"] == set_name and method in record["decoded"]:
            values = dict(record["decoded"][method])
            if values["token_ids"] == "plain":
                values["token_ids"] = record["decoded"]["plain"]["token_ids"]
            decoded.append(Decoded(id=record["id"], **values))
    return decoded


def source_commit() -> str | None:
    """Of the repository that this package is a part of, if any; with a mark where files differ from it."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    try:
        # An installed package may lie inside a repository of something else.
        if git(["git", "ls-files", "--error-unmatch", Path(__file__).name]).returncode:
            return None
        found = git(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
    except OSError:
        return None
    return found.stdout.strip() or None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


__all__ = ["Evaluation", "EvaluationModels", "Journal", "decoded_of", "evaluate", "first_difference", "source_commit"]
