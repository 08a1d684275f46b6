"""`domino evaluate serve`: throughput and latency of OpenAI-compatible servers (the paper's table 2).

Several servers (plain, DFlash, Domino) are loaded in turns with the same requests, a fixed number at each concurrency.
Acceptance is what a server states itself: SGLang an average since it started, vLLM counters, others nothing.
"""

import math
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice

import requests
from tqdm.auto import tqdm

from .evaluation_methods import turned


VLLM_COUNTERS = ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total")


@dataclass(frozen=True)
class Load:
    """
    What one server did under one load.

    Args:
        endpoint, set, concurrency, requests: The load.
        tokens: Completion tokens of all requests, as the server counts them.
        seconds: From the first request to the last answer.
        latencies: Of each request, in seconds, sorted.
        acceptance_length: τ as the server states it; None where it states none.
        acceptance_source: Where that stands, and since when it counts.
    """

    endpoint: str
    set: str
    concurrency: int
    requests: int
    tokens: int
    seconds: float
    latencies: list[float]
    acceptance_length: float | None
    acceptance_source: str | None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def latency(self, percent: float) -> float:
        """The latency that so many percent of the requests do not exceed."""
        return self.latencies[max(0, math.ceil(len(self.latencies) * percent / 100) - 1)]


class Server:
    """
    An OpenAI-compatible server.

    Args:
        url: With the version, such as `http://localhost:30000/v1`.
        model: Name under which it serves the target; the first it lists when None.
        options: Of every request.

    Raises:
        ConnectionError: It cannot be reached.
        ValueError: It lists no model.
    """

    def __init__(self, url: str, model: str | None = None, **options):
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
        self.options = options
        if model is None:
            listed = self._get(f"{self.url}/models", needed=True).json().get("data") or []
            if not listed:
                raise ValueError(f"{url} lists no model: name the one it serves with `--model`.")
            model = listed[0]["id"]
        self.model = model

    def _get(self, url: str, needed: bool = False) -> requests.Response | None:
        try:
            reply = requests.get(url, headers=self.headers, timeout=30)
        except requests.RequestException as error:
            if not needed:
                return None
            raise ConnectionError(
                f"{url} cannot be reached ({error}): start the server, or mend `--endpoint`."
            ) from None
        if not reply.ok and needed:
            raise ValueError(f"{url} answers {reply.status_code}: name the model it serves with `--model`.")
        return reply if reply.ok else None

    def ask(self, messages: list[dict]) -> tuple[int, float]:
        """
        Completion tokens and seconds of one request.

        Raises:
            ConnectionError: It failed: a measurement tries nothing twice.
        """
        started = time.perf_counter()
        request = {"model": self.model, "messages": messages, **self.options}
        try:
            reply = requests.post(f"{self.url}/chat/completions", json=request, headers=self.headers, timeout=3600)
        except requests.RequestException as error:
            raise ConnectionError(f"{self.url} failed while it was measured: {error}") from None
        seconds = time.perf_counter() - started
        if not reply.ok:
            raise ConnectionError(f"{self.url} answers {reply.status_code} while it is measured: {reply.text[:200]}")
        return reply.json()["usage"]["completion_tokens"], seconds

    def counters(self) -> dict[str, float]:
        """What the server counts of its drafts: vLLM's totals, or SGLang's average under the name `average`."""
        root = self.url.removesuffix("/v1")
        metrics = self._get(f"{root}/metrics")
        found = {}
        for name in VLLM_COUNTERS:
            values = re.findall(
                rf"^{re.escape(name)}(?:{{[^}}]*}})?\s+([\d.eE+-]+)", metrics.text if metrics else "", re.M
            )
            if values:
                found[name] = sum(map(float, values))
        for path in ("server_info", "get_server_info"):
            info = self._get(f"{root}/{path}")
            try:
                state = info.json()["internal_states"][0] if info else {}
            except (ValueError, KeyError, IndexError, TypeError):
                continue
            if state.get("avg_spec_accept_length"):
                found["average"] = float(state["avg_spec_accept_length"])
                break
        return found


def stated_acceptance(before: dict[str, float], after: dict[str, float]) -> tuple[float | None, str | None]:
    """τ that a server states of the time between two readings, and where it stands."""
    drafts, accepted = (after.get(name, 0.0) - before.get(name, 0.0) for name in VLLM_COUNTERS)
    if drafts:
        return 1 + accepted / drafts, "vLLM's counters, this load alone"
    if "average" in after:
        return after["average"], "SGLang's average since it started"
    return None, None


def measure(server: Server, name: str, prompts: list[list[dict]], concurrency: int, count: int) -> Load:
    """`count` requests, `concurrency` of them in flight, with the prompts of a set over and over."""
    before = server.counters()
    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            answers = list(pool.map(server.ask, islice(cycle(prompts), count)))
        finally:
            pool.shutdown(cancel_futures=True)
    seconds = time.perf_counter() - started
    tau, source = stated_acceptance(before, server.counters())
    return Load(
        endpoint=server.url,
        set=name,
        concurrency=concurrency,
        requests=count,
        tokens=sum(tokens for tokens, _ in answers),
        seconds=seconds,
        latencies=sorted(latency for _, latency in answers),
        acceptance_length=tau,
        acceptance_source=source,
    )


def serve(
    servers: list[Server], sets: dict[str, list[dict]], concurrencies: list[int], count: int, warm_up: int = 2
) -> list[Load]:
    """
    Every server under every load, the servers in turns.

    Args:
        servers: To compare.
        sets: Conversations by set; their first user turns are asked.
        concurrencies: Requests in flight.
        count: Requests of each load, or the concurrency where that is more.
        warm_up: Requests, per request in flight, before a load is measured.
    """
    loads = []
    work = [(name, concurrency) for name in sets for concurrency in concurrencies]
    with tqdm(total=len(work) * len(servers), desc="loads") as progress:
        for number, (name, concurrency) in enumerate(work):
            prompts = [conversation["messages"][:1] for conversation in sets[name]]
            for index in turned(list(range(len(servers))), number):
                if warm_up:
                    measure(servers[index], name, prompts, concurrency, warm_up * concurrency)
                loads.append(measure(servers[index], name, prompts, concurrency, max(count, concurrency)))
                progress.update()
                progress.set_postfix_str(f"{loads[-1].tokens_per_second:.0f} tokens/s")
    return loads


def serving_table(loads: list[Load]) -> str:
    """Markdown: one line a load; ratios are to the server that was named first, under the same load."""
    lines = [
        "| set | concurrency | requests | server | tokens/s | × first | latency p50 s | p90 s | p99 s | stated τ |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = loads[0].endpoint  # no load turns before the first
    base = {(load.set, load.concurrency): load.tokens_per_second for load in loads if load.endpoint == first}
    for load in sorted(loads, key=lambda load: (load.set, load.concurrency)):
        ratio = load.tokens_per_second / base[load.set, load.concurrency]
        tau = "" if load.acceptance_length is None else f"{load.acceptance_length:.2f} ({load.acceptance_source})"
        percentiles = " | ".join(f"{load.latency(percent):.2f}" for percent in (50, 90, 99))
        lines.append(
            f"| {load.set} | {load.concurrency} | {load.requests} | {load.endpoint} | {load.tokens_per_second:.1f} "
            f"| {ratio:.2f} | {percentiles} | {tau} |"
        )
    return "\n".join(lines) + "\n"


__all__ = ["Load", "Server", "measure", "serve", "serving_table", "stated_acceptance"]
