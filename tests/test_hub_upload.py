"""hub_upload: what is assembled, what is refused, and uploads over HTTP to a Hub on the loopback interface."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from conftest import make_draft, make_target, make_tokenizer
from hub_server import HubServer
from huggingface_hub import HfApi, ModelCard, constants
from safetensors.torch import load_file, save_file
from test_data import chat_tokenizer
from test_eagle import make_eagle
from test_training import arguments, rows
from transformers.utils import logging
from typer.testing import CliRunner

from hub_upload.__main__ import app
from hub_upload.assemble import assemble_draft, files_of, load_draft, refuse_others, shipped_code
from hub_upload.check import check, check_card, packages_of, visit
from hub_upload.facts import read_facts
from hub_upload.results import read_evaluation
from hub_upload.scan import scan
from hub_upload.upload import upload
from modeling_domino import DominoTrainer
from modeling_domino.conversion import convert, validate
from modeling_domino.eagle_training import EagleTrainer
from modeling_domino.evaluation import Evaluation, evaluate
from modeling_domino.evaluation_report import summarise


ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "examples" / "smollm2-135m-domino"
TOKEN, READER = "hf_" + "w" * 20, "hf_" + "r" * 20
REPO = "someone/domino-tiny.v1"
FACTS = {"target": "someone/target", "license": "apache-2.0"}
CODE = set(shipped_code())
FILES = CODE | {"config.json", "model.safetensors", "README.md", "LICENSE"}


@pytest.fixture(autouse=True)
def progress_bars():
    yield
    logging.enable_progress_bar()  # which the command turns off


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A draft as training leaves it, among what is nobody else's affair."""
    folder = tmp_path_factory.mktemp("training") / "checkpoint-8"
    make_draft(make_target(seed=6)).to(torch.bfloat16).save_pretrained(folder)
    torch.save({}, folder / "optimizer.pt")
    torch.save({}, folder / "training_args.bin")
    (folder / "runs").mkdir()
    (folder / "runs" / "events.log").write_text("/home/me/secret")
    recipe = {"target": "someone/target", "target_revision": "0" * 40, "num_anchors": 8, "output_dir": "/home/me/out"}
    (folder / "training_recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="module")
def assembled(checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("assembled") / "draft"
    assemble_draft(load_draft(checkpoint), folder, read_facts(checkpoint, REPO, license="apache-2.0"))
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, which this process reaches as `HF_ENDPOINT` would have it."""
    with HubServer(tmp_path / "hub", {TOKEN: "someone", READER: "reader"}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "".join(template[1:]))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr("transformers.trainer.hf_api", HfApi)  # which keeps the first endpoint that it sees
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # of retries
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def run(*arguments: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def send(folder: Path, token: str = TOKEN, repo_id: str = REPO, **options):
    return upload(HfApi(token=token), folder, repo_id, message="A draft", **options)


def heads(hub: HubServer, repo_id: str = REPO) -> int:
    return len(hub.repos[repo_id].commits)


# What is assembled


def test_the_folder_holds_what_belongs_there_and_nothing_else(assembled, checkpoint):
    assert set(files_of(assembled)) == FILES
    assert all((assembled / name).read_bytes() == code for name, code in shipped_code().items())
    assert (assembled / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    there, here = load_file(assembled / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
    assert {tensor.dtype for tensor in there.values()} == {torch.bfloat16}
    scan(assembled, REPO)


def test_large_weights_are_sharded(checkpoint, tmp_path, monkeypatch):
    draft = load_draft(checkpoint)
    whole = draft.save_pretrained
    monkeypatch.setattr(draft, "save_pretrained", lambda folder: whole(folder, max_shard_size="20KB"))
    assemble_draft(draft, tmp_path / "draft", read_facts(checkpoint, REPO, license="mit"))
    assert len(list((tmp_path / "draft").glob("model-*.safetensors"))) > 1
    assert (tmp_path / "draft" / "model.safetensors.index.json").exists()


def test_the_card_says_what_is_known(assembled):
    card = ModelCard.load(assembled / "README.md")
    data = card.data.to_dict()
    assert data["base_model"] == "someone/target" and data["library_name"] == "transformers"
    assert data["license"] == "apache-2.0" and data["pipeline_tag"] == "text-generation"
    assert {"speculative-decoding", "domino", "custom_generate"} <= set(data["tags"])
    assert "model-index" not in data and "datasets" not in data  # nothing was measured, nothing was said
    assert f'AutoModel.from_pretrained("{REPO}", trust_remote_code=True)' in card.text
    assert "revision `" + "0" * 40 in card.text and "| `num_anchors` | `8` |" in card.text
    assert "None was made of these weights" in card.text and "/home" not in card.text
    assert re.search(r"modeling_domino 0\.1\.0, (commit [0-9a-f]{12}|as installed)", card.text)


def test_facts_come_from_the_options_then_the_card_then_the_training(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "draft")
    (folder / "README.md").write_text(
        "---\nbase_model: someone/other\nlicense: mit\nlanguage: en\ndatasets: [a/b]\n---\ntext\n"
    )
    facts = read_facts(folder, REPO)
    assert (facts.target, facts.license, facts.language, facts.datasets) == ("someone/other", "mit", ["en"], ["a/b"])
    assert read_facts(folder, REPO, target="someone/third", license="gpl-3.0").license == "gpl-3.0"
    (folder / "recipe.yaml").write_text("learning_rate: 1e-3\noutput_dir: outputs/x\ndataset: /data/me/texts\n")
    assert read_facts(folder, REPO, recipe=folder / "recipe.yaml").recipe == {
        "learning_rate": "1e-3",
        "dataset": "texts",
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": None}, "name the target, and it is recorded nowhere: add `--target"),
        ({"target": "outputs/target.gguf"}, "`outputs/target.gguf` is no id on the Hub"),
        ({"license": None}, "name the licence of the weights: add `--license`"),
        ({"repo_id": "tiny"}, "`tiny` is no repository on the Hub: write NAMESPACE/NAME"),
    ],
)
def test_missing_facts_are_asked_for(options, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_facts(tmp_path, **{"repo_id": REPO, **FACTS, **options})


def test_a_draft_without_its_head_is_refused(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(("prefix_gru", "embed_proj"))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds no correction head: train it"):
        load_draft(folder)
    with pytest.raises(ValueError, match="is no folder with a draft"):
        load_draft(tmp_path)


def test_files_that_no_repository_should_hold_are_refused(assembled, tmp_path):
    folder = shutil.copytree(assembled, tmp_path / "draft")
    torch.save({}, folder / "optimizer.pt")
    with pytest.raises(ValueError, match=r"optimizer\.pt is no file of a draft's repository"):
        refuse_others(folder)


# What must not leave


@pytest.mark.parametrize(
    ("file", "line", "what"),
    [
        ("config.json", '"hub_token": "{hf}"', "a Hugging Face token"),
        ("config.json", '"api_key": "correcthorsebattery"', "a secret"),
        ("config.json", '"_name_or_path": "/mnt/disk/me/draft"', "a path of this machine"),
        ("README.md", "see file:///home/me/notes", "a path of this machine"),
        ("README.md", r"in C:\Users\me\draft", "a path of this machine"),
        ("README.md", "git clone https://me:{hf}@example.org", "a password in a URL"),
        ("modeling_domino.py", 'KEY = "sk-{hf}{hf}"', "an API key"),
        ("custom_generate/generate.py", "-----BEGIN RSA PRIVATE KEY-----", "a private key"),
        ("config.json", '"author": "evelyn"', "your user name"),
    ],
)
def test_what_should_stay_is_named_by_file_and_line_and_not_shown(file, line, what, assembled, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "evelyn")
    folder = shutil.copytree(assembled, tmp_path / "draft")
    lines = (folder / file).read_text().splitlines()
    lines.insert(1, line.replace("{hf}", TOKEN))
    (folder / file).write_text("\n".join(lines))
    with pytest.raises(ValueError) as refusal:
        scan(folder, REPO)
    assert f"{file}, line 2: {what}" in str(refusal.value)
    for secret in (TOKEN, "correcthorse", "/mnt/disk", "evelyn"):
        assert secret not in str(refusal.value)


def test_names_in_weights_are_read_and_a_repository_may_hold_its_owners_name(assembled, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGNAME", "someone")
    scan(assembled, REPO)
    folder = shutil.copytree(assembled, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "made_in": "/home/me/out"})
    with pytest.raises(ValueError, match=r"model\.safetensors, line 1: a path of this machine"):
        scan(folder, REPO)


def test_the_command_refuses_a_secret_in_a_config_before_any_request(checkpoint, tmp_path, hub):
    folder = shutil.copytree(checkpoint, tmp_path / "draft")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hub_token": TOKEN}))
    result = run(folder, REPO, "--license", "mit")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert re.search(r"hub_upload: Nothing was uploaded.* config\.json, line \d+: a Hugging Face token", result.output)
    assert TOKEN not in result.output and hub.requests == []


# An evaluation


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory) -> Path:
    """An evaluation of the draft in another type than it is stored in."""
    root = tmp_path_factory.mktemp("evaluation")
    target = make_target(seed=6)
    target.save_pretrained(root / "target")
    chat_tokenizer().save_pretrained(root / "target")
    rows = [
        {"id": str(i), "turns": [text]} for i, text in enumerate(["abc", "bcd", "cde", "gh", "ab", "fg", "e", "bb"])
    ]
    (root / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = {"target": str(root / "target"), "draft": str(checkpoint), "dtype": "float32"}
    evaluate(Evaluation(**models, sets=["gsm8k"], data=str(root), max_new_tokens=12), root / "run")
    return root / "run"


def test_the_cards_figures_are_those_of_the_evaluation(measured, checkpoint, tmp_path):
    facts = read_facts(checkpoint, REPO, license="mit")
    results = read_evaluation(measured, checkpoint, facts)
    assemble_draft(load_draft(checkpoint), tmp_path / "draft", facts, results)
    pictures = {f"evaluation/{name}.png" for name in ("acceptance_by_position", "speedup", "tau_by_draft_length")}
    assert set(files_of(tmp_path / "draft")) == FILES | pictures | {"evaluation/results.json"}
    scan(tmp_path / "draft", REPO)
    check_card(tmp_path / "draft" / "README.md")
    shown = json.loads((tmp_path / "draft" / "evaluation" / "results.json").read_text())
    assert shown["asked"]["draft"] == REPO and shown["asked"]["target"] == "target" and shown["asked"]["data"] is None
    figures = summarise(results)["gsm8k"]["domino"]
    card = ModelCard.load(tmp_path / "draft" / "README.md")
    values = {r.metric_type: (r.dataset_type, r.metric_value) for r in card.data.eval_results}
    assert values == {
        "acceptance_length": ("openai/gsm8k", round(figures.tau.value, 3)),
        "speedup": ("openai/gsm8k", round(figures.speedups["plain"].value, 3)),
    }
    assert str(figures.tau) in card.text and "None was made" not in card.text


def test_an_evaluation_of_another_draft_or_target_is_refused(measured, checkpoint, tmp_path):
    facts = read_facts(checkpoint, REPO, license="mit")
    make_draft(make_target(seed=6), seed=2).to(torch.bfloat16).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="holds an evaluation of another draft than"):
        read_evaluation(measured, tmp_path / "other", facts)
    results = json.loads((measured / "results.json").read_text())
    results["asked"]["target"] = "someone/else"
    (tmp_path / "results.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="measured with the target someone/else, but the card names someone/target"):
        read_evaluation(tmp_path, checkpoint, facts)


# The stranger


def test_only_what_transformers_brings_can_be_imported():
    packages = packages_of("torch", "transformers")
    assert {"torch", "transformers", "huggingface_hub", "safetensors", "numpy"} <= packages
    assert not {"modeling_domino", "hub_upload", "peft", "datasets", "accelerate", "pytest"} & packages
    assert "peft" in packages_of("torch", "transformers", "peft")


def test_a_repository_that_needs_more_is_found_out(assembled, tmp_path):
    folder = shutil.copytree(assembled, tmp_path / "draft")
    code = (folder / "statistics_domino.py").read_text()
    (folder / "statistics_domino.py").write_text(code + "\n\nimport peft\n")
    with pytest.raises(ValueError, match="does not work for somebody who has only torch and transformers.*peft"):
        visit(folder)


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """The README's command, the folder it leaves, and what the stranger saw in it."""
    folder = tmp_path_factory.mktemp("dry") / "out"
    visits = []

    def noted(*args, **kwargs):
        visits.append(visit(*args, **kwargs))
        return visits[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hub_upload.publish.visit", noted)
        result = run(SHIPPED, "someone/smollm2-135m-domino", "--dry-run", "--output", folder)
    return result, folder, visits


def test_the_readmes_dry_run_works_without_a_network(dry_run):
    result, folder, _ = dry_run
    assert result.exit_code == 0, result.output
    assert set(files_of(folder)) == FILES
    for name, size in files_of(folder).items():
        assert f"{size:,}  {name}" in result.output
    assert "the same weights bit for bit" in result.output and "Dry run: nothing was uploaded." in result.output
    assert ModelCard.load(folder / "README.md").data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_what_a_stranger_saw_is_compared(dry_run):
    draft, [seen] = load_draft(SHIPPED), dry_run[2]
    decoded = check(seen, "the folder", draft)
    assert decoded["tokens"] == seen["custom_generate"]["tokens"] and len(decoded["tokens"]) == 24
    wrong = seen["decoded"] | {"gap": 0.5}
    for changes, words in (
        ({"module": "modeling_domino.modeling_domino"}, "not by its own code"),
        ({"draft": "0"}, "other weights"),
        ({"config": seen["config"] | {"shift_label": False}}, "another configuration than its draft's: shift_label"),
        ({"decoded": wrong}, "a text that is not the target's"),
        ({"custom_generate": seen["decoded"] | {"tokens": []}}, "another text through its custom_generate"),
    ):
        with pytest.raises(ValueError, match=words):
            check(seen | changes, "the folder", draft)
    with torch.no_grad():
        draft.norm.weight[0] += 1
    with pytest.raises(ValueError, match="other weights"):
        check(seen, "the folder", draft)


# Uploads


def module(*arguments: str, hub: HubServer, home: Path, token: str | None = TOKEN):
    """`python -m hub_upload` as a user runs it: a process of its own, with fresh caches."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    fresh = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, **({"HF_TOKEN": token} if token else {})}
    command = [sys.executable, "-m", "hub_upload", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=keep | fresh, capture_output=True, text=True, check=False)


def test_upload_and_load_by_id(checkpoint, hub, tmp_path):
    result = module(checkpoint, REPO, "--license", "mit", "--private", "--tag", "v1", hub=hub, home=tmp_path / "home")
    assert result.returncode == 0, result.stderr
    assert "Loaded from there at that commit: the same weights." in result.stdout
    repo = hub.repos[REPO]
    assert repo.private and len(repo.commits) == 2  # the Hub's own first one, and ours
    assert hub.files(REPO, "v1").keys() == FILES | {".gitattributes"}
    commit = repo.branches["main"]
    assert repo.commits[commit].message == "Domino draft for someone/target" and commit in result.stdout
    for name in ("config.json", "model.safetensors", *(code for code in CODE if code.endswith("_domino.py"))):
        assert hub.asked(f"GET /{REPO}/resolve/{commit}/{name}")  # by AutoModel.from_pretrained(repo, revision=commit)
    assert not hub.asked("GET .*(optimizer|training_args|requirements)")


def test_a_second_upload_sends_nothing(assembled, hub):
    first = send(assembled)
    assert first.changed and heads(hub) == 2
    second = send(assembled)
    assert (second.commit, second.changed) == (first.commit, False) and heads(hub) == 2
    assert len(hub.asked("POST .*/commit/")) == 1


def test_what_an_earlier_draft_left_goes_and_what_others_added_stays(assembled, hub, tmp_path):
    send(assembled)
    api = HfApi(token=TOKEN)
    for name in ("old_domino.py", "evaluation/results.json", "model-00001-of-00002.safetensors", "notes.md"):
        api.upload_file(path_or_fileobj=b"1", path_in_repo=name, repo_id=REPO)
    send(assembled)
    assert hub.files(REPO).keys() == FILES | {".gitattributes", "notes.md"}


def test_branches_tags_and_pull_requests(assembled, hub, tmp_path):
    branched = send(assembled, revision="next", tag="v1")
    repo = hub.repos[REPO]
    assert repo.branches["next"] == repo.tags["v1"] == branched.commit
    assert hub.files(REPO, "main").keys() == {".gitattributes"}
    assert send(assembled, revision="next", tag="v1").commit == branched.commit  # the same tag again
    pulled = send(assembled, pull_request=True)
    assert pulled.pull_request.endswith("/discussions/1") and repo.pulls["refs/pr/1"] == pulled.commit
    assert hub.files(REPO, "main").keys() == {".gitattributes"}
    folder = shutil.copytree(assembled, tmp_path / "other")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "more\n")
    with pytest.raises(ValueError, match="refuses a conflict .*: Tag reference exists already"):
        send(folder, tag="v1")


# huggingface_hub's own upload of one file.
lfs_put = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@lfs_put
def test_weights_in_lfs_without_xet(assembled, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.lfs = True
    sent = send(assembled)
    assert hub.repos[REPO].commits[sent.commit].files["model.safetensors"].lfs
    assert hub.files(REPO)["model.safetensors"] == (assembled / "model.safetensors").read_bytes()
    assert len(hub.asked("PUT /lfs/")) == 1
    assert not send(assembled).changed and len(hub.asked("PUT /lfs/")) == 1


def refusal(folder: Path, **options) -> str:
    with pytest.raises(ValueError) as error:
        send(folder, **options)
    return str(error.value)


def test_tokens_and_rights(assembled, hub, monkeypatch):
    assert refusal(assembled, token="hf_unknown").startswith("The Hub does not know your token")
    assert "may not write to someone/domino-tiny.v1: use one with write access to `someone`" in refusal(
        assembled, token=READER
    )
    assert hub.repos == {}
    send(assembled)
    assert "may not write to someone/domino-tiny.v1" in refusal(assembled, token=READER)
    assert heads(hub) == 2
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
    assert "No token was found: run `hf auth login`, or set HF_TOKEN" in refusal(assembled, token=None)


def test_a_name_that_is_taken(assembled, hub):
    api = HfApi(token=TOKEN)
    api.create_repo(REPO)
    api.upload_file(path_or_fileobj=b"1", path_in_repo="pytorch_model.bin", repo_id=REPO)
    assert "The name someone/domino-tiny.v1 is taken: it holds another model (pytorch_model.bin)" in refusal(assembled)
    assert hub.files(REPO).keys() == {".gitattributes", "pytorch_model.bin"}


def test_a_public_repository_does_not_become_private_by_itself(assembled, hub):
    send(assembled)
    assert "exists and is public: make it private in its settings" in refusal(assembled, private=True)


def test_a_card_that_the_hub_refuses_leaves_nothing_there(assembled, hub, tmp_path):
    folder = shutil.copytree(assembled, tmp_path / "draft")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(card.replace("base_model: someone/target", "base_model: a b c"))
    message = refusal(folder)
    assert "The Hub refuses the card's metadata, and nothing was uploaded" in message and "base_model" in message
    assert hub.repos == {}
    (folder / "README.md").write_text("no metadata\n")
    with pytest.raises(ValueError, match="The card lacks `license`, `library_name`, `base_model`"):
        check_card(folder / "README.md")


@pytest.mark.parametrize("xet", [True, False])
def test_one_server_error_is_survived(xet, assembled, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", not xet)
    hub.fail("POST .*/commit/", times=1)
    assert send(assembled).changed and len(hub.asked("POST .*/commit/")) == 2
    assert heads(hub) == 2


@lfs_put
def test_a_server_that_stays_down_is_told_with_what_is_there(assembled, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    hub.lfs = True
    send(assembled)
    folder = shutil.copytree(assembled, tmp_path / "draft")
    (folder / "README.md").write_text((folder / "README.md").read_text() + "more\n")
    hub.fail("POST .*/commit/", times=3)
    message = refusal(folder)
    assert message.startswith(f"The Hub answered 500 for {REPO}")
    assert f"Of the {len(FILES)} files, `main` of {REPO} holds {len(FILES) - 1} as they are here." in message
    assert heads(hub) == 2
    assert send(folder).changed  # the same again
    assert len(hub.asked("PUT /lfs/")) == 1
    hub.fail("GET .*/tree/|POST .*/preupload/", times=99)
    assert "does not say what `main` holds now" in refusal(folder)


def test_somebody_else_commits_meanwhile(assembled, hub, monkeypatch):
    send(assembled)
    hub.fail("POST .*/commit/", times=1, status=412)
    hub.repos[REPO].commits[hub.repos[REPO].branches["main"]].files.pop("README.md")
    assert "Somebody else committed to someone/domino-tiny.v1 meanwhile" in refusal(assembled)


# What else the command does


# peft 0.21 reads an attribute that transformers 5.24 renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_has_a_repository_of_its_own(checkpoint, assembled, hub, tmp_path, monkeypatch):
    send(assembled)
    adapted = peft.get_peft_model(load_draft(checkpoint), peft.LoraConfig(target_modules=["o_proj", "embed_proj.0"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    command = [tmp_path / "adapter", "someone/domino-tiny-adapter", "--adapter", "--license", "mit"]
    refused = run(*command, "--draft", checkpoint)
    assert (
        refused.exit_code == 2 and "upload that first and name it with `--draft-id NAMESPACE/NAME`" in refused.output
    )
    output = tmp_path / "out"
    result = run(*command, "--draft", checkpoint, "--draft-id", REPO, "--output", output)
    assert result.exit_code == 0, result.output
    assert set(files_of(output)) == {"adapter_config.json", "adapter_model.safetensors", "LICENSE", "README.md"}
    there = hub.files("someone/domino-tiny-adapter")
    config = json.loads(there["adapter_config.json"])
    assert config["base_model_name_or_path"] == REPO
    assert config["auto_mapping"] == {"base_model_class": "AutoModel", "parent_library": "transformers"}
    card = ModelCard(there["README.md"].decode())
    assert card.data.base_model == REPO and card.data.library_name == "peft"
    assert card.data["base_model_relation"] == "adapter"
    # Read back by PeftModel.from_pretrained(draft, repo), each from the Hub, with the same bits.
    assert hub.asked("GET /someone/domino-tiny-adapter/resolve/[0-9a-f]{40}/adapter_model.safetensors")
    assert hub.asked(f"GET /{REPO}/resolve/.*/model.safetensors")
    assert "Loaded from there at that commit: the same weights." in result.output
    assert "holds another model" in refusal(assembled, repo_id="someone/domino-tiny-adapter")


PASTED = """
import torch
torch.set_num_threads(1)
{code}
plain = target.generate(**inputs, max_new_tokens=64)
assert output.tolist() == plain.tolist()
assert type(draft).__module__.startswith("transformers_modules."), type(draft)
"""


def test_the_cards_lines_run_as_they_are_pasted(assembled, hub, tmp_path):
    target = make_target(seed=6)
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer().save_pretrained(tmp_path / "target")
    api = HfApi(token=TOKEN)
    api.create_repo("someone/target")
    revision = api.upload_folder(repo_id="someone/target", folder_path=tmp_path / "target").oid
    send(assembled)
    card = ModelCard.load(assembled / "README.md").text.replace("0" * 40, revision)
    first, second = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)[:2]
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    process = subprocess.run(
        [sys.executable, "-I", "-c", PASTED.format(code=first + second)],
        env={**keep, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert hub.asked(f"GET /{REPO}/resolve/.*/custom_generate/generate.py")


def test_update_code_replaces_the_code_and_says_what_changed(assembled, hub, tmp_path, monkeypatch):
    folder = shutil.copytree(assembled, tmp_path / "old")
    code = (folder / "statistics_domino.py").read_text()
    (folder / "statistics_domino.py").write_text(code + "\n\nOLD = True\n")
    (folder / "older_domino.py").write_text("OLDER = True\n")
    (folder / "custom_generate" / "older.py").write_text("OLDER = True\n")
    card = (folder / "README.md").read_text()
    (folder / "README.md").write_text(re.sub("modeling_domino 0.1.0, .*", "modeling_domino 0.0.9, commit abc", card))
    send(folder)
    weights, visits = hub.asked("GET .*/model.safetensors"), []

    def noted(*args, **kwargs):
        visits.append(visit(*args, **kwargs))
        return visits[-1]

    with monkeypatch.context() as patch:
        patch.setattr("hub_upload.update.visit", noted)
        result = run("--update-code", REPO)
    assert result.exit_code == 0, result.output
    assert "changed  statistics_domino.py (+0 -3 lines)" in result.output
    assert "removed  older_domino.py (+0 -1 lines)" in result.output
    assert "removed  custom_generate/older.py" in result.output
    assert "the new code decodes the same text" in result.output and "the same weights" in result.output
    assert hub.files(REPO) == {name: (assembled / name).read_bytes() for name in FILES} | {
        ".gitattributes": hub.files(REPO)[".gitattributes"]
    }
    assert heads(hub) == 3 and len(hub.asked("GET .*/model.safetensors")) == len(weights) + 2
    again = run("--update-code", REPO)
    assert again.exit_code == 0 and "holds this version's code already" in again.output and heads(hub) == 3
    send(folder)
    monkeypatch.setattr("hub_upload.update.visit", lambda *args, **kwargs: visits.pop(0))  # as before
    dry = run("--update-code", REPO, "--dry-run")
    assert dry.exit_code == 0 and "changed  statistics_domino.py" in dry.output, dry.output
    assert "Dry run: nothing was uploaded." in dry.output and heads(hub) == 4


def test_update_code_refuses_what_is_no_draft(hub):
    api = HfApi(token=TOKEN)
    api.create_repo(REPO)
    api.upload_file(path_or_fileobj=b"{}", path_in_repo="config.json", repo_id=REPO)
    result = run("--update-code", REPO)
    assert result.exit_code == 2 and "is no draft's repository" in result.output
    result = run("--update-code", "someone/nothing")
    assert result.exit_code == 2 and "someone/nothing does not exist" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "Both are needed: python -m hub_upload CHECKPOINT NAMESPACE/NAME."),
        (["folder", REPO, "--pull-request", "--revision", "next"], "leave out `--revision` and `--tag`"),
        (["folder", REPO, "--adapter", "--evaluation", "run"], "merge the adapter, evaluate and upload that"),
        (["folder", "--update-code", REPO], "leave out CHECKPOINT"),
        (["folder", REPO, "--formats", "vllm"], "`--formats` names 'vllm', expected some of sglang,"),
        (["folder", REPO, "--formats", "sglang", "--revision", "next"], "makes branches beside the main one"),
        (["folder", REPO, "--license", "mit", "--target", "a/b"], "folder is no folder with a draft"),
        (["folder", REPO, "--adapter"], "folder is no folder with an adapter"),
    ],
)
def test_mistakes_give_one_sentence_and_exit_code_two(options, words):
    result = run(*options)
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


# Copies for serving engines


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "target"
    make_target(seed=6).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def test_copies_for_engines_go_to_branches_of_their_own(checkpoint, target_folder, hub, tmp_path):
    options = [
        "--license",
        "mit",
        "--formats",
        "sglang,speculators-domino",
        "--check-with",
        target_folder,
        "--tag",
        "v1",
    ]
    dry = run(checkpoint, REPO, *options, "--dry-run", "--output", tmp_path / "out")
    assert dry.exit_code == 0, dry.output
    assert "4 files of the branch sglang" in dry.output and not hub.repos
    for attempt in range(2):
        result = run(checkpoint, REPO, *options)
        assert result.exit_code == 0, result.output
        assert ("nothing had changed" in result.output) == (attempt == 1)
    assert heads(hub) == 4  # the Hub's own, and one for each branch
    copy = {"config.json", "model.safetensors", "README.md", "LICENSE", ".gitattributes"}
    assert set(hub.files(REPO, "v1")) == FILES | {".gitattributes"}
    for layout, engine in (("sglang", "sglang"), ("speculators-domino", "speculators")):
        assert set(hub.files(REPO, layout)) == copy
        place = tmp_path / layout
        HfApi(token=TOKEN).snapshot_download(REPO, revision=layout, local_dir=place)
        assert validate(str(place), engine, target=str(target_folder)) == []
        for name in copy - {".gitattributes"}:
            assert (place / name).read_bytes() == (tmp_path / f"out-{layout}" / name).read_bytes()
        convert(str(place), tmp_path / f"{layout}-back", to="domino", old_target=str(target_folder))
        there = load_file(tmp_path / f"{layout}-back" / "model.safetensors")
        here = load_file(checkpoint / "model.safetensors")
        assert there.keys() == here.keys() and all(torch.equal(there[name], here[name]) for name in here)
        assert f"https://huggingface.co/{REPO}/tree/{layout}" in hub.files(REPO)["README.md"].decode()
    config = json.loads(hub.files(REPO, "speculators-domino")["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"


def test_copies_that_an_engine_would_not_decode_are_refused_before_any_request(target_folder, hub, tmp_path):
    make_draft(make_target(seed=6), pure_draft_prefix_len=0).to(torch.bfloat16).save_pretrained(tmp_path / "draft")
    options = [tmp_path / "draft", REPO, "--license", "mit", "--target", "someone/target", "--formats", "sglang"]
    result = run(*options, "--check-with", target_folder)
    assert result.exit_code == 2 and "pure_draft_prefix_len" in result.output, result.output
    result = run(*options, "--check-with", tmp_path / "nowhere")
    assert result.exit_code == 2 and "name a folder that holds it with `--check-with`" in result.output, result.output
    assert not hub.repos


# The Trainer


def trainer(tmp_path, **overrides) -> DominoTrainer:
    target = make_target()
    target.config._name_or_path = "someone/target"
    options = {"push_to_hub": True, "hub_model_id": REPO, "hub_token": TOKEN, "hub_license": "mit", "max_steps": 2}
    args = arguments(tmp_path / "out", **{**options, "hub_strategy": "end", **overrides})
    return DominoTrainer(make_draft(target), target, args, train_dataset=rows())


def test_the_trainer_pushes_what_the_command_uploads(hub, tmp_path, monkeypatch):
    visits = []

    def once(*args, **kwargs):
        """The second visit, to the Hub, is tested above; it would see the same."""
        visits.append((args, kwargs))
        once.seen = visit(*args, **kwargs) if len(visits) == 1 else once.seen
        return once.seen

    monkeypatch.setattr("hub_upload.publish.visit", once)
    training = trainer(tmp_path, hub_private_repo=True, save_strategy="steps", save_steps=1)
    training.train()
    assert heads(hub) == 1
    training.save_model()
    assert hub.files(REPO).keys() == FILES | {".gitattributes"} and hub.repos[REPO].private
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.base_model == "someone/target" and "| `steps` | `2` |" in card.text
    pushed = hub.repos[REPO].commits[hub.repos[REPO].branches["main"]]
    assert pushed.message == "Model save"
    assert len(visits) == 2 and visits[1][1]["repository"] == REPO and visits[1][1]["endpoint"] == hub.url
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model.safetensors").write_bytes(hub.files(REPO)["model.safetensors"])
    state = training.model.state_dict()
    assert all(torch.equal(t, state[n]) for n, t in load_file(tmp_path / "there" / "model.safetensors").items())


def test_a_checkpoint_that_may_not_leave_does_not_stop_the_training(hub, tmp_path, caplog):
    training = trainer(tmp_path, hub_strategy="every_save", save_strategy="steps", save_steps=1)
    training.model.config.notes = "/home/me/notes"
    training.train()
    assert training.state.global_step == 2
    assert "Step 1 was not uploaded, and training goes on: Nothing was uploaded" in caplog.text
    with pytest.raises(ValueError, match=r"config\.json, line \d+: a path of this machine"):
        training.push_to_hub()
    assert heads(hub) == 1


def test_pushes_that_cannot_end_well_are_refused_before_training(hub, tmp_path):
    with pytest.raises(ValueError, match="which would upload optimizer states: use 'end' or 'every_save'"):
        trainer(tmp_path, hub_strategy="checkpoint")
    with pytest.raises(ValueError, match="name the licence of the weights.* `hub_target` and `hub_license`"):
        trainer(tmp_path, hub_license=None)
    with pytest.raises(ValueError, match="`outputs/target` is no id on the Hub|no id on the Hub"):
        trainer(tmp_path, hub_target="outputs/target/of/mine")
    target = make_target()
    with pytest.raises(ValueError, match="`push_to_hub` is for Domino drafts"):
        EagleTrainer(make_eagle(target), target, arguments(tmp_path, push_to_hub=True), train_dataset=rows())
    with pytest.raises(ValueError, match="`blocking=False` is not offered"):
        trainer(tmp_path).push_to_hub(blocking=False)
