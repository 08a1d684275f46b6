"""`domino evaluate`: a run and its files, stops and mistakes, tables and figures computed from the results alone."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import make_draft, make_target
from test_data import chat_tokenizer
from test_eagle import make_eagle
from transformers.utils import logging
from typer.testing import CliRunner

from modeling_domino.cli import app
from modeling_domino.evaluation import Evaluation, EvaluationModels, Journal, decoded_of, evaluate, first_difference
from modeling_domino.evaluation_methods import LABELS
from modeling_domino.evaluation_profile import profile_rounds
from modeling_domino.evaluation_report import (
    compare,
    interval,
    markdown_table,
    read_results,
    read_runs,
    summarise,
    write_block,
)
from modeling_domino.evaluation_sets import SETS, read_set
from modeling_domino.measures import Decoded, Estimate


TEXTS = ["abc", "bcd", "cdefg", "de", "efgh", "fgab", "gh", "hca", "ab", "cab"]


@pytest.fixture(autouse=True)
def verbosity():
    """The command silences transformers; tests after it read its warnings."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, drafts for it, and two sets, one of them with two turns."""
    root = tmp_path_factory.mktemp("evaluation")
    target = make_target(seed=6)
    target.save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    make_draft(target).save_pretrained(root / "draft")
    make_draft(target, shift_label=False).save_pretrained(root / "unshifted")
    make_eagle(target).save_pretrained(root / "eagle")
    (root / "sets").mkdir()
    rows = [{"id": f"one-{i}", "turns": [text]} for i, text in enumerate(TEXTS)]
    (root / "sets" / "one.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [{"id": f"two-{i}", "turns": [text, "dab"]} for i, text in enumerate(TEXTS[:3])]
    (root / "sets" / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def asked(folders, **overrides) -> Evaluation:
    options = {"sets": ["one", "two"], "data": str(folders / "sets"), "max_new_tokens": 12, "dtype": "float32"}
    return Evaluation(target=str(folders / "target"), **{"draft": str(folders / "draft"), **options, **overrides})


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "tiny"
    evaluate(asked(folders), folder, profile=2)
    return folder


def test_a_run_decodes_everything_in_turns_and_keeps_every_round(results):
    found = read_results(results)
    assert [r["id"] for r in found["conversations"]] == [f"one-{i}" for i in range(10)] + [
        f"two-{i}" for i in range(3)
    ]
    assert [r["order"][0] for r in found["conversations"]][:4] == ["plain", "domino", "head-off", "plain"]
    assert found["k"] == 5 and found["machine"]["dtype"] == "float32" and found["unavailable"] == {}
    assert set(found["machine"]["fingerprints"]) == {"target", "draft"}
    assert not (results / "unfinished.jsonl").exists()
    for record in found["conversations"]:
        plain = record["decoded"]["plain"]
        for method in ("domino", "head-off"):
            values = record["decoded"][method]
            assert values["token_ids"] == "plain"  # float32: the same text
            turns = len(plain["token_ids"])
            assert sum(values["gained"]) == sum(map(len, plain["token_ids"])) - turns
            assert len(values["drafted"]) == len(values["accepted"]) == len(values["gained"])


def test_figures_follow_from_the_results(results):
    found = read_results(results)
    summary = summarise(found)
    domino = decoded_of(found, "one", "domino")
    figures = summary["one"]["domino"]
    assert figures.conversations == 10 and figures.equal == 10 and figures.largest_gap is None
    assert figures.tau.value == sum(sum(d.gained) for d in domino) / sum(d.rounds for d in domino)
    assert figures.draft_ms > 0 < figures.verify_ms and set(figures.speedups) == {"plain"}
    assert summary["one"]["plain"].tau is None and summary["one"]["plain"].speedups == {}
    assert 1 <= len(figures.by_position) <= 5
    assert domino[0].token_ids == decoded_of(found, "one", "plain")[0].token_ids


def test_the_profile_accounts_for_the_whole_round(results):
    profile = read_results(results)["profile"]
    parts = profile["milliseconds"]
    assert set(parts) == {"draft backbone", "lm_head", "correction loop", "verify", "glue"}
    assert min(parts.values()) > 0
    expected = profile["tau"] * profile["target_ms"] / sum(parts.values())
    assert profile["implied_speedup"] == pytest.approx(expected) and expected < profile["bound_with_free_draft"]


@pytest.mark.parametrize("which", ["loop", "assisted"])
def test_either_loop_is_profiled(which, target, draft):
    draft.decoding.path = which
    conversations = [{"id": text, "messages": [{"role": "user", "content": text}]} for text in TEXTS[:2]]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    profile = profile_rounds(target, chat_tokenizer(), draft, conversations, **options)
    assert draft.last_generation.path == which and profile["rounds"] >= 4
    assert min(profile["milliseconds"].values()) > 0
    assert not {"candidate_generator", "decoding_loop"} & set(vars(draft))


def test_the_same_seed_gives_the_same_tokens(folders, tmp_path):
    tokens = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        found = evaluate(asked(folders, sets=["two"], temperature=1.0, seed=seed), tmp_path / name)
        tokens.append(
            [[r["decoded"][m]["token_ids"] for m in found["asked"]["methods"]] for r in found["conversations"]]
        )
        assert summarise(found)["two"]["domino"].equal is None
    assert tokens[0] == tokens[1] != tokens[2]


def test_every_method_runs(folders, tmp_path):
    methods = ["plain", "domino", "head-off", "prompt-lookup", "assistant", "dflash", "eagle"]
    options = {"assistant": str(folders / "target"), "eagle": str(folders / "eagle"), "methods": methods}
    unshifted = asked(folders, sets=["one"], max_samples=3, draft=str(folders / "unshifted"), **options)
    found = evaluate(unshifted, tmp_path / "all")
    assert list(summarise(found)["one"]) == methods
    assert all(not record["differences"] for record in found["conversations"])
    assert all(label in markdown_table({"": found}) for method, label in LABELS.items() if method in methods)


def test_what_does_not_compile_is_left_out_with_its_reason(folders, tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", fails)
    found = evaluate(asked(folders, sets=["two"], methods=["plain", "compiled"]), tmp_path / "run")
    assert found["unavailable"] == {"compiled": "RuntimeError: no compiler here"}
    assert "compiled plain generate: not measured here (RuntimeError: no compiler here)." in markdown_table(
        {"": found}
    )


def test_a_run_that_is_stopped_goes_on(folders, tmp_path, monkeypatch, results):
    decode, calls = EvaluationModels.decode, []

    def stops(self, conversation, number):
        calls.append(conversation["id"])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return decode(self, conversation, number)

    monkeypatch.setattr(EvaluationModels, "decode", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(asked(folders), tmp_path / "run")
    with (tmp_path / "run" / "unfinished.jsonl").open("a") as file:
        file.write('{"set": "one", "id": "one-4", "deco')  # and a kill in the middle of a line
    found = evaluate(asked(folders), tmp_path / "run")
    assert calls == [f"one-{i}" for i in (0, 1, 2, 3, 4)] + [f"one-{i}" for i in range(4, 10)] + [
        "two-0",
        "two-1",
        "two-2",
    ]
    whole = read_results(results)["conversations"]
    same = ("id", "set", "number", "order", "differences")
    assert [[r[name] for name in same] for r in found["conversations"]] == [[r[name] for name in same] for r in whole]


def test_a_time_limit_keeps_what_is_decoded(folders, tmp_path):
    found = evaluate(asked(folders), tmp_path / "run", minutes=0.0)
    assert found["conversations"] == [] and summarise(found) == {}


def test_mistakes_are_named_before_a_model_is_loaded(folders, tmp_path, results, monkeypatch):
    monkeypatch.setattr(EvaluationModels, "__init__", lambda *_: pytest.fail("a model was loaded"))
    unfinished = tmp_path / "unfinished"
    Journal(unfinished, asked(folders))
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder, overrides, words in (
        (results, {}, "holds a finished evaluation"),
        (unfinished, {"max_new_tokens": 13}, "with `max_new_tokens` = 12, but 13 is asked for"),
        (blocked, {}, "Results cannot be written"),
        (tmp_path / "new", {"sets": ["three"]}, r"`three` is no evaluation set of .*: expected one of one, two"),
        (tmp_path / "new2", {"data": str(tmp_path)}, "it holds no .jsonl or .parquet file"),
        (tmp_path / "new3", {"data": None, "sets": ["gsm9k"]}, "expected one of gsm8k, math500, aime25"),
    ):
        with pytest.raises(ValueError, match=words):
            evaluate(asked(folders, **overrides), folder)
    (folders / "sets" / "empty.jsonl").write_text('{"turns": []}\n')
    with pytest.raises(ValueError, match="holds no usable prompt"):
        evaluate(asked(folders, sets=["empty"]), tmp_path / "new4")
    (folders / "sets" / "empty.jsonl").unlink()


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"methods": ["plain", "magic"]}, "`magic` is no method, expected some of plain, compiled"),
        ({"methods": ["domino"], "draft": None}, "`domino` needs a model: add `--draft MODEL`"),
        ({"methods": ["eagle"]}, "`eagle` needs a model: add `--eagle MODEL`"),
        ({"methods": ["dflash"], "draft": None}, "add `--dflash MODEL`"),
    ],
)
def test_methods_that_cannot_run_are_named(folders, overrides, words):
    with pytest.raises(ValueError, match=words):
        asked(folders, **overrides)


def test_a_draft_for_another_target_is_refused_before_anything_is_decoded(folders, tmp_path):
    make_draft(make_target(hidden_size=64)).save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="hidden size is 64, the target's 32"):
        evaluate(asked(folders, draft=str(tmp_path / "draft")), tmp_path / "run")
    assert len((tmp_path / "run" / "unfinished.jsonl").read_text().splitlines()) == 1


def test_where_two_texts_part_the_gap_is_the_targets(target):
    tokenizer = chat_tokenizer()
    conversation = {"id": "c", "messages": [{"role": "user", "content": "ab"}, {"role": "user", "content": "cd"}]}
    one = Decoded("c", [[5, 6], [7, 8, 9]], 1.0)
    place = first_difference(target, tokenizer, conversation, one, Decoded("c", [[5, 6], [7, 4, 9]], 1.0), {})
    between = [conversation["messages"][0], {"role": "assistant", "content": tokenizer.decode([5, 6])}]
    ids = tokenizer.apply_chat_template([*between, conversation["messages"][1]], add_generation_prompt=True)
    with torch.no_grad():
        logits = target(torch.tensor([list(ids["input_ids"]) + [7]])).logits[0, -1]
    assert (place["turn"], place["position"]) == (1, 1)
    assert place["logit_gap"] == pytest.approx(abs(float(logits[8] - logits[4])), rel=1e-4)
    shorter = first_difference(target, tokenizer, conversation, one, Decoded("c", [[5], [7, 8, 9]], 1.0), {})
    assert shorter == {"turn": 0, "position": 1, "logit_gap": None}


def test_too_few_conversations_give_no_interval():
    estimate = Estimate(2.0, 1.9, 2.1)
    assert interval(estimate, 7) == "2.00 (interval: 1 more prompts)"
    assert interval(estimate, 8) == "2.00 [1.90, 2.10]"
    assert interval(None, 8) == ""


def test_the_table_goes_between_its_marks(tmp_path, results):
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- evaluation: tiny -->\nold\n<!-- /evaluation: tiny -->\nafter\n")
    table = markdown_table(read_runs(results))
    for _ in range(2):
        write_block(document, "tiny", table)
    assert document.read_text() == f"before\n<!-- evaluation: tiny -->\n\n{table}\n<!-- /evaluation: tiny -->\nafter\n"
    with pytest.raises(ValueError, match="needs the lines `<!-- evaluation: other -->`"):
        write_block(document, "other", table)


def test_several_runs_share_a_table(tmp_path, results):
    for name in ("2 teacher forcing", "1 head off"):
        shutil.copytree(results, tmp_path / "both" / name)
    runs = read_runs(tmp_path / "both")
    assert list(runs) == ["head off", "teacher forcing"]
    table = markdown_table(runs)
    alone = markdown_table(read_runs(results))
    assert table.splitlines()[0] == alone.splitlines()[0] and len(table.splitlines()) == 4 + 2 * 6
    assert "| run | set |" in table and "| run |" not in alone and "× compiled" not in alone
    with pytest.raises(ValueError, match="nor does any folder in it"):
        read_runs(tmp_path)


def test_two_evaluations_are_compared_on_what_both_decoded(results):
    found = read_results(results)
    lines = compare(found, found)
    assert lines[0] == "one, 10 conversations in both:"
    assert "τ, first over second: 1.00 [1.00, 1.00]; no difference shown" in lines[1]
    assert "too few conversations to say which is better" in lines[4]
    slower = json.loads(json.dumps(found))
    for record in slower["conversations"]:
        record["decoded"]["domino"]["seconds"] *= 2
    assert "speedup over plain, first over second: 2.00 [2.00, 2.00]; the first is better" in compare(found, slower)[2]
    assert "the second is better" in compare(slower, found)[2]
    with pytest.raises(ValueError, match="no conversation in common"):
        compare(found, found, "domino", "eagle")


def test_files_that_are_no_results_are_refused(tmp_path):
    for text in ("nonsense", "[]", '{"format": 99}'):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ValueError, match="results of `domino evaluate run`"):
            read_results(tmp_path)


def test_the_command_writes_table_and_figures(folders, tmp_path):
    document = tmp_path / "README.md"
    document.write_text("<!-- evaluation: run -->\n<!-- /evaluation: run -->\n")
    command = ["evaluate", "run", str(folders / "target"), "--draft", str(folders / "draft"), "--sets", "one"]
    command += ["--data", str(folders / "sets"), "--max-new-tokens", "12", "--dtype", "float32", "--profile", "2"]
    command += ["--output", str(tmp_path / "run"), "--readme", str(document)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    table = (tmp_path / "run" / "table.md").read_text()
    assert table in document.read_text() and table in done.output
    assert "| one | Domino | 10 |" in table and "implies" in done.output
    names = {"speedup.png", "acceptance_by_position.png", "tau_by_draft_length.png", "round.png"}
    assert {path.name for path in (tmp_path / "run").glob("*.png")} == names
    again = CliRunner().invoke(app, ["evaluate", "report", str(tmp_path / "run"), "--suffix", ".svg"])
    assert again.exit_code == 0 and len(list((tmp_path / "run").glob("*.svg"))) == 4
    same = CliRunner().invoke(app, ["evaluate", "compare", str(tmp_path / "run"), str(tmp_path / "run")])
    assert same.exit_code == 0 and "no difference shown" in same.output
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2 and "holds a finished evaluation" in refused.stderr


def test_sets_of_the_hub_are_worded_as_published(monkeypatch):
    rows = {
        "openai/gsm8k": {"question": "How many?"},
        "openai/openai_humaneval": {"prompt": "def f():\n"},
        "json": {"question_content": "Sum.", "starter_code": ""},
        "HuggingFaceH4/mt_bench_prompts": {"prompt": ["One.", "Two."]},
        "tatsu-lab/alpaca": {"instruction": "Say it.", "input": "it"},
    }
    seen = {}

    def load_dataset(hub_id, **options):
        seen[hub_id] = options
        return iter([rows[hub_id]] * 3)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    turns = {
        name: [m["content"] for m in read_set(name, limit=2)[1]["messages"]]
        for name in ("gsm8k", "humaneval", "livecodebench", "mt-bench", "alpaca")
    }
    assert turns["gsm8k"] == ["How many?\nPlease reason step by step, and put your final answer within \\boxed{}."]
    assert turns["humaneval"][0].endswith("passes the tests:\n```python\ndef f():\n\n```")
    assert turns["livecodebench"][0].endswith(
        "```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with backticks)"
    )
    assert turns["mt-bench"] == ["One.", "Two."] and turns["alpaca"] == ["Say it.\n\nInput:\nit"]
    assert seen["openai/gsm8k"] == {"split": "test", "streaming": True, "name": "main"}
    assert len(read_set("gsm8k", limit=2)) == 2 and read_set("gsm8k", limit=1)[0]["id"] == "gsm8k-0000"
    assert len(SETS) == 8


ROOT = Path(__file__).parents[1]


def tables_that_differ(document: Path, evaluations: Path, place: Path) -> list[str]:
    """Marked blocks of a document that are not what the results in the folder of their name give."""
    before = document.read_text(encoding="utf-8")
    differing = []
    for name in re.findall(r"<!-- evaluation: (\S+) -->", before):
        runs = read_runs(evaluations / name)
        for found in runs.values():
            assert asdict(Evaluation(**found["asked"])) == found["asked"]
        copy = place / "copy.md"
        copy.write_text(before, encoding="utf-8")
        write_block(copy, name, markdown_table(runs))
        if copy.read_text(encoding="utf-8") != before:
            differing.append(name)
    return differing


def test_tables_of_the_readme_are_what_their_results_give(results, tmp_path):
    """A README edited by hand, or results measured anew without their table, are found."""
    document = tmp_path / "README.md"
    document.write_text("<!-- evaluation: tiny -->\n<!-- /evaluation: tiny -->\n")
    write_block(document, "tiny", markdown_table(read_runs(results)))
    assert tables_that_differ(document, results.parent, tmp_path) == []
    document.write_text(document.read_text().replace("| one | Domino | 10 |", "| one | Domino | 11 |"))
    assert tables_that_differ(document, results.parent, tmp_path) == ["tiny"]
    assert tables_that_differ(ROOT / "README.md", ROOT / "examples" / "evaluations", tmp_path) == []
