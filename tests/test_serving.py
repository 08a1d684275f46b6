"""`domino evaluate serve`: loads of known servers, what they state of their drafts, and a real server on loopback."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_preparation import serving, speaker
from typer.testing import CliRunner

from modeling_domino.cli import app
from modeling_domino.serving import Load, Server, measure, serve, serving_table, stated_acceptance


class SlowServer(BaseHTTPRequestHandler):
    """Takes `pause` seconds for an answer of 10 tokens and counts its drafts as vLLM or SGLang does."""

    pause, kind = 0.05, "vllm"
    busy = most_busy = answered = 0
    lock = threading.Lock()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.lock:
            type(self).busy += 1
            type(self).most_busy = max(self.most_busy, self.busy)
        time.sleep(self.pause)
        with self.lock:
            type(self).busy -= 1
            type(self).answered += 1
        if self.kind == "broken":
            self.send_error(500)
        else:
            self.reply(json.dumps({"usage": {"completion_tokens": 10}, "choices": []}))

    def do_GET(self):
        if self.path == "/v1/models":
            self.reply(json.dumps({"data": [{"id": "served"}]}))
        elif self.path == "/metrics" and self.kind == "vllm":
            counts = (
                f'num_drafts_total{{engine="0"}} {4.0 * self.answered}',
                f"num_accepted_tokens_total {6.0 * self.answered}",
            )
            self.reply("# HELP x\n" + "".join(f"vllm:spec_decode_{line}\n" for line in counts))
        elif self.path == "/get_server_info" and self.kind == "sglang":
            self.reply(json.dumps({"internal_states": [{"avg_spec_accept_length": 3.25}]}))
        else:
            self.send_error(404)

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def start():
    servers = []

    def begin(kind: str = "vllm", pause: float = 0.05) -> tuple[str, type[SlowServer]]:
        handler = type("Handler", (SlowServer,), {"kind": kind, "pause": pause, "lock": threading.Lock()})
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/v1", handler

    yield begin
    for server in servers:
        server.shutdown()


PROMPTS = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
SETS = {"letters": [{"id": "x", "messages": prompt} for prompt in PROMPTS]}


def test_a_load_is_a_fixed_number_of_requests_so_many_in_flight(start):
    url, handler = start()
    load = measure(Server(url), "letters", PROMPTS, concurrency=3, count=9)
    assert handler.answered == 9 and handler.most_busy == 3
    assert (load.tokens, load.requests, len(load.latencies)) == (90, 9, 9)
    assert load.seconds >= 0.15 and load.latency(50) >= 0.05
    assert load.acceptance_length == 2.5 and "this load alone" in load.acceptance_source


@pytest.mark.parametrize("kind, stated", [("vllm", 2.5), ("sglang", 3.25), ("plain", None)])
def test_acceptance_is_what_the_server_states(start, kind, stated):
    url, _ = start(kind)
    assert measure(Server(url), "letters", PROMPTS, 1, 2).acceptance_length == stated


def test_counters_of_earlier_loads_do_not_count():
    names = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
    before, after = dict(zip(names, (100.0, 10.0), strict=True)), dict(zip(names, (110.0, 40.0), strict=True))
    assert stated_acceptance(before, after)[0] == 4.0
    assert stated_acceptance(before, before) == (None, None)


def test_percentiles():
    load = Load("u", "s", 1, 10, 100, 2.0, [float(i) for i in range(1, 11)], None, None)
    assert [load.latency(percent) for percent in (50, 90, 99)] == [5.0, 9.0, 10.0]
    assert load.tokens_per_second == 50


def test_servers_take_turns_under_the_same_loads(start):
    one, other = (Server(start("plain", 0.01)[0]) for _ in range(2))
    loads = serve([one, other], SETS, [1, 2], count=4, warm_up=1)
    assert [(load.concurrency, load.endpoint) for load in loads] == [
        (1, one.url),
        (1, other.url),
        (2, other.url),
        (2, one.url),
    ]
    lines = serving_table(loads).splitlines()
    assert len(lines) == 6 and lines[2].split("|")[6].strip() == "1.00"
    ratio = loads[1].tokens_per_second / loads[0].tokens_per_second
    assert lines[3].split("|")[6].strip() == f"{ratio:.2f}"


def test_a_server_that_fails_is_not_measured(start):
    url, _ = start("broken", 0.0)
    with pytest.raises(ConnectionError, match="answers 500 while it is measured"):
        measure(Server(url), "letters", PROMPTS, 2, 4)
    with pytest.raises(ConnectionError, match="cannot be reached"):
        Server("http://127.0.0.1:1/v1")


def test_the_command_loads_a_real_server(tmp_path):
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps({"turns": [t]}) + "\n" for t in ("abc", "de", "fgh")))
    with serving(speaker(), tmp_path / "model") as url:
        command = [
            "evaluate",
            "serve",
            "--endpoint",
            url,
            "--endpoint",
            url,
            "--concurrency",
            "1,2",
            "--sets",
            "letters",
        ]
        command += ["--data", str(tmp_path), "--requests", "3", "--warm-up", "1", "--max-new-tokens", "6"]
        command += ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "loads.json")]
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "| letters | 2 | 3 |" in done.output
    loads = json.loads((tmp_path / "loads.json").read_text())
    assert len(loads) == 4 and all(0 < load["tokens"] <= 18 for load in loads)


@pytest.mark.parametrize(
    "options, words",
    [(["--concurrency", "1,x"], "expected numbers such as 1,8,32"), (["--sets", "gsm9k"], "is no evaluation set")],
)
def test_mistakes_are_named(options, words):
    done = CliRunner().invoke(app, ["evaluate", "serve", "--endpoint", "http://127.0.0.1:1/v1", *options])
    assert done.exit_code == 2 and words in done.stderr
