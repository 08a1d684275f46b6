"""`domino prepare`: answers by the target or a server, killed and resumed, into a folder that trains a draft."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
import torch
from conftest import MASK, free_port, make_target
from test_data import chat_tokenizer
from typer.testing import CliRunner

from modeling_domino.cli import app
from modeling_domino.features import RowsWithFeatures, feature_bytes, write_features
from modeling_domino.preparation import Preparation, prepare
from modeling_domino.regeneration import ServerAnswers, read_responses, write_responses


def speaker(seed: int = 6):
    """A target whose answers end with w, and never hold the mask token or the padding."""
    target = make_target(seed=seed)
    target.generation_config.update(suppress_tokens=[0, MASK], eos_token_id=22)
    return target


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ["abc", "de", "fghi", "bd", "cfh", "bca", "gh", "dd", "efg", "hgfe"]
    rows = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(texts)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"id": "talk", "turns": ["abc", "de"]}])))
    return str(path)


def asked(prompts, folder, **overrides) -> Preparation:
    options = {"max_new_tokens": 8, "batch_size": 4, "mask_token_id": MASK, **overrides}
    return Preparation(prompts=prompts, output=str(folder), **options)


def rows_of(folder) -> dict[str, dict]:
    return {row["id"]: row for row in datasets.load_from_disk(str(Path(folder) / "dataset"))}


def test_rows_hold_what_the_target_answers_to_each_turn(tmp_path, prompts):
    target, tokenizer = speaker(), chat_tokenizer()
    folder = prepare(asked(prompts, tmp_path / "out"), target, tokenizer)
    rows = rows_of(folder)
    assert len(rows) == 11
    for row in rows.values():
        start = max(i for i, bit in enumerate(row["loss_mask"]) if not bit) + 1
        prompt = torch.tensor([row["input_ids"][:start]])
        alone = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
        assert alone[0].tolist() == row["input_ids"]
    talk = "".join(tokenizer.convert_ids_to_tokens(rows["talk"]["input_ids"]))
    mask = "".join("01"[bit] for bit in rows["talk"]["loss_mask"])
    first = talk.index("wudewv")
    assert talk.startswith("uabcwv") and mask[:6] == "000000"
    assert set(mask[6:first]) == {"1"}  # the first turn's answer is supervised too
    assert "11 rows" in (folder / "README.md").read_text()


def test_a_run_that_dies_goes_on_without_losing_or_repeating_a_row(tmp_path, prompts):
    target, tokenizer = speaker(), chat_tokenizer()
    whole = rows_of(prepare(asked(prompts, tmp_path / "whole"), target, tokenizer))
    broken = speaker()
    generate, calls = broken.generate, []

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    broken.generate = dies
    with pytest.raises(KeyboardInterrupt):
        prepare(asked(prompts, tmp_path / "out"), broken, tokenizer)
    path = tmp_path / "out" / "responses.jsonl"
    assert 0 < len(read_responses(path)) < 11
    with path.open("a") as file:
        file.write('{"id": "p9", "mess')  # as a full disk leaves it
    resumed = rows_of(prepare(asked(prompts, tmp_path / "out"), target, tokenizer))
    assert resumed == whole
    ids = [row["id"] for row in read_responses(path)]
    assert len(ids) == len(set(ids)) == 11


def test_sigkill_in_the_middle_loses_nothing_that_was_written(tmp_path, prompts):
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
import time
from test_data import chat_tokenizer
from test_preparation import asked, speaker
from modeling_domino.preparation import prepare
target = speaker()
generate = target.generate
def slowly(*args, **kwargs):
    time.sleep(1)
    return generate(*args, **kwargs)
target.generate = slowly
prepare(asked({prompts!r}, {str(tmp_path / "out")!r}, batch_size=2), target, chat_tokenizer())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    path = tmp_path / "out" / "responses.jsonl"
    deadline = time.monotonic() + 120
    while not read_responses(path) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_responses(path)
    assert 0 < len(before) < 11
    prepare(asked(prompts, tmp_path / "out", batch_size=2), speaker(), chat_tokenizer())
    after = read_responses(path)
    assert after[: len(before)] == before and len({row["id"] for row in after}) == len(after) == 11


def test_a_folder_of_other_answers_is_refused(tmp_path, prompts):
    target, tokenizer = speaker(), chat_tokenizer()
    prepare(asked(prompts, tmp_path / "out"), target, tokenizer)
    with pytest.raises(ValueError, match=r"made otherwise \(temperature: 0.0 there, 0.7 now\)"):
        prepare(asked(prompts, tmp_path / "out", temperature=0.7), target, tokenizer)


def test_rows_left_out_are_counted(tmp_path, prompts):
    target, tokenizer = speaker(), chat_tokenizer()
    folder = prepare(asked(prompts, tmp_path / "out", mask_token_id=7), target, tokenizer)  # the letter h
    assert all(7 not in row["input_ids"] for row in rows_of(folder).values())
    assert "contains the mask token 7" in (folder / "README.md").read_text()
    with pytest.raises(ValueError, match="lower `max_new_tokens`"):
        prepare(asked(prompts, tmp_path / "long", max_new_tokens=999), target, tokenizer)


def test_features_are_those_of_the_target_and_are_tied_to_it(tmp_path, prompts):
    target, tokenizer = speaker(), chat_tokenizer()
    questions = []

    def confirm(question):
        questions.append(question)
        return True

    folder = prepare(asked(prompts, tmp_path / "out", feature_layers=[1, 3]), target, tokenizer, confirm=confirm)
    rows = datasets.load_from_disk(str(folder / "dataset"))
    size = sum((len(row["input_ids"]) - 1) * 2 * 32 * 4 for row in rows)
    assert size == feature_bytes(rows, target, [1, 3]) and f"{size / 1e9:.2f} GB" in questions[0]
    cached = RowsWithFeatures(rows, folder / "features", target, [1, 3])
    assert len(cached) == 11
    for row in (cached[i] for i in range(len(cached))):
        states = target(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[2], states[4]], dim=-1)[0, :-1]
        torch.testing.assert_close(row["context_hidden_states"], expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"layers \[1, 3\], and the draft taps \[1, 2\]"):
        RowsWithFeatures(rows, folder / "features", target, [1, 2])
    with pytest.raises(ValueError, match="features of another target"):
        RowsWithFeatures(rows, folder / "features", make_target(seed=7), [1, 3])
    with pytest.raises(ValueError, match="other rows than the 5"):
        RowsWithFeatures(rows.select(range(5)), folder / "features", target, [1, 3])


def test_features_go_on_at_the_first_missing_shard(tmp_path):
    target = make_target()
    rows = [{"input_ids": [3 + i, 4, 5, 6]} for i in range(6)]
    write_features(rows, target, [1, 3], tmp_path, shard_bytes=1000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3
    contents = [shard.read_bytes() for shard in shards]
    shards[1].unlink()
    with pytest.raises(ValueError, match=r"lacks shards \[1\]"):
        RowsWithFeatures(rows, tmp_path, target, [1, 3])
    write_features(rows, target, [1, 3], tmp_path, shard_bytes=1000)
    assert [shard.read_bytes() for shard in shards] == contents


def test_a_disk_that_fills_up_leaves_whole_shards_to_go_on_from(tmp_path, monkeypatch):
    import modeling_domino.features as features

    target, calls, save_file = make_target(), [], features.save_file
    rows = [{"input_ids": [3 + i, 4, 5, 6]} for i in range(6)]

    def full(tensors, path):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half a shard")
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(features, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_features(rows, target, [1, 3], tmp_path, shard_bytes=1000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    write_features(rows, target, [1, 3], tmp_path, shard_bytes=1000)
    assert len(calls) == 4  # the first shard was not written again
    cached = RowsWithFeatures(rows, tmp_path, target, [1, 3])
    assert [cached[i]["context_hidden_states"].shape for i in range(6)] == [(3, 64)] * 6


def test_a_full_disk_is_said_before_anything_is_written(tmp_path, monkeypatch):
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="its disk has 0.0 GB left"):
        write_features([{"input_ids": [3, 4, 5]}], make_target(), [1, 3], tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


class FlakyServer(BaseHTTPRequestHandler):
    """Answers with the prompt spelled backwards; refuses as `plan` says, request by request."""

    plan: list[bool] = []
    seen: list[dict] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(body)
        if not self.path.startswith("/v1/"):
            self.send_error(404)
            return
        if self.plan and not self.plan.pop(0):
            self.send_error(503)
            return
        answer = body["messages"][-1]["content"][::-1]
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        reply = json.dumps({"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def flaky(monkeypatch):
    monkeypatch.setattr(FlakyServer, "plan", [])
    monkeypatch.setattr(FlakyServer, "seen", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), FlakyServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


CONVERSATIONS = [{"id": str(i), "messages": [{"role": "user", "content": text}]} for i, text in enumerate("abcdefgh")]


def ask(url, folder, **options):
    answers = ServerAnswers(url, "m", max_new_tokens=8, concurrency=2, pause=0.01, **options)
    return read_responses(write_responses(CONVERSATIONS, answers, folder, {}, count_tokens=len))


def test_a_server_that_fails_now_and_then_is_asked_again(tmp_path, flaky):
    FlakyServer.plan.extend([True, False, False, True] * 3)
    rows = ask(flaky, tmp_path, template={"enable_thinking": False})
    assert {row["id"]: row["response"] for row in rows} == {
        c["id"]: c["messages"][0]["content"] for c in CONVERSATIONS
    }
    assert FlakyServer.seen[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert FlakyServer.seen[0]["max_tokens"] == 8 and FlakyServer.seen[0]["model"] == "m"


def test_a_server_that_dies_half_way_loses_and_doubles_nothing(tmp_path, flaky):
    FlakyServer.plan.extend([True] * 4 + [False] * 99)
    with pytest.raises(ConnectionError, match="start the server again and run the same command"):
        ask(flaky, tmp_path, retries=2)
    assert 4 <= len(read_responses(tmp_path / "responses.jsonl")) < 8
    FlakyServer.plan.clear()
    ids = [row["id"] for row in ask(flaky, tmp_path)]
    assert sorted(ids) == sorted(c["id"] for c in CONVERSATIONS)


def test_a_request_that_a_server_refuses_is_not_tried_again(tmp_path, flaky):
    with pytest.raises(ValueError, match=r"refuses the request \(404\)"):
        ask(flaky.replace("/v1", "/v2"), tmp_path)


@contextmanager
def serving(target, folder: Path) -> Iterator[str]:
    """`transformers serve` of a target on loopback: its URL."""
    target.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder)]
    server = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.3)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def test_transformers_serve_answers_as_the_target_does(tmp_path, prompts):
    """A real OpenAI-compatible server on loopback."""
    pytest.importorskip("fastapi", reason="transformers[serving] is not installed")
    target, tokenizer = speaker(), chat_tokenizer()
    model = tmp_path / "model"
    with serving(target, model) as url:
        command = ["prepare", str(model), "--prompts", prompts, "--output", str(tmp_path / "served")]
        options = ["--endpoint", url, "--concurrency", "2", "--max-new-tokens", "8", "--mask-token-id", str(MASK)]
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0, result.output
    local = rows_of(prepare(asked(prompts, tmp_path / "local"), target, tokenizer))
    served = rows_of(tmp_path / "served")
    assert served.keys() == local.keys()
    assert all(served[name]["input_ids"] == local[name]["input_ids"] for name in local)
