"""The files: who may import whom, and what transformers' remote-code loader needs of the shipped ones."""

import ast
import configparser
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from transformers import GenerationMixin, PreTrainedModel
from transformers.dynamic_module_utils import get_imports, get_relative_import_files, get_relative_imports
from transformers.generation import utils

import modeling_domino
from modeling_domino import DominoForSpeculativeDraft


PACKAGE = Path(modeling_domino.__file__).parent
MODULES = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
SHIPPED = {name: path for name, path in MODULES.items() if name.endswith("_domino")}

# From the bottom up: a file imports only from levels below its own.
LEVELS = [
    {
        "configuration_domino",
        "compat_domino",
        "statistics_domino",
        "cache_domino",
        "length_domino",
        "processors_domino",
        "verification_domino",
        "anchors",
        "losses",
        "packed_linear",
        "training_arguments",
        "uploading",
        "cli_errors",
        "stored_tensors",
    },
    {"correction_domino", "target_domino", "collator", "metrics", "measures"},
    {"candidate_generator_domino"},
    {"decoding_domino"},
    {"speculation_domino"},
    {"modeling_domino"},
    {"data", "eagle", "features", "loading", "warm_start"},
    {"adaptation", "evaluation_methods", "evaluation_sets", "regeneration", "target_files", "training"},
    {"eagle_training", "evaluation_profile", "layouts", "preparation", "serving"},
    {"adaptation_run", "draft_files", "recipes"},
    {"evaluation", "refit", "validators"},
    {"conversion"},
    {"cli_conversion"},
    {"evaluation_report"},
    {"evaluation_plots"},
    {"cli_evaluation"},
    {"cli"},
]
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def imports_of(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Import statements anywhere in the file, those inside functions included."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def siblings_of(path: Path) -> set[str]:
    """Modules of our package that a file imports, however it spells it."""
    names = set()
    for node in imports_of(path):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif node.level:
            dotted = [f"modeling_domino.{node.module or alias.name}" for alias in node.names]
        else:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in dotted:
            package, _, rest = name.partition(".")
            if package == "modeling_domino":
                names.add(rest.partition(".")[0])
    return names & set(MODULES)


def test_every_module_has_its_level():
    assert set(MODULES) <= set(LEVEL_OF)


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down_only(name):
    upward = {sibling for sibling in siblings_of(MODULES[name]) if LEVEL_OF[sibling] >= LEVEL_OF[name]}
    assert upward == set()


def test_hub_upload_is_above_and_imported_only_where_a_push_asks_for_it():
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "hub_upload" not in ast.unparse(node), name


def test_the_wheel_holds_all_of_hub_upload():
    root = PACKAGE.parent
    settings = configparser.ConfigParser()
    settings.read(root / "setup.cfg")
    patterns = settings["options.package_data"]["hub_upload"].split()
    folder = root / "hub_upload"
    others = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = [path.relative_to(folder).as_posix() for path in others if path.parent != folder or path.suffix != ".py"]
    assert names and all(any(fnmatch(name, pattern) for pattern in patterns) for name in names)
    assert "hub_upload" in settings["options.packages.find"]["include"].split()


def test_the_import_reader_sees_every_spelling(tmp_path):
    spellings = {
        "from .losses import a": {"losses"},
        "from . import anchors, data": {"anchors", "data"},
        "import modeling_domino.training as t": {"training"},
        "from modeling_domino import losses": {"losses"},
        "def f():\n    from modeling_domino.data import b": {"data"},
        "import torch\nfrom torch import nn": set(),
    }
    for text, expected in spellings.items():
        (tmp_path / "module.py").write_text(text)
        assert siblings_of(tmp_path / "module.py") == expected


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_import_only_each_other_and_what_transformers_brings(name):
    allowed = {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names
    for node in imports_of(SHIPPED[name]):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module in SHIPPED, ast.unparse(node)
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed, ast.unparse(node)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_loader_reads_the_same_imports_as_python(name):
    """transformers finds relative imports by regular expressions, which a docstring line can fool."""
    path = SHIPPED[name]
    assert set(get_relative_imports(path)) == siblings_of(path)
    in_strings = [
        line
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for line in node.value.splitlines()
        if re.match(r"\s*(from|import)\s+\.", line)
    ]
    assert in_strings == []
    assert set(get_imports(path)) <= {"torch", "transformers", "huggingface_hub"} | sys.stdlib_module_names


def test_shipped_files_are_what_the_model_file_reaches_and_what_is_saved(draft, tmp_path):
    root = SHIPPED["modeling_domino"]
    reached = {Path(file).name for file in get_relative_import_files(root)}
    shipped = {path.name for path in SHIPPED.values()}
    assert reached | {root.name} == shipped
    draft.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.py")} == shipped
    assert not [path for path in PACKAGE.iterdir() if path.is_dir() and list(path.glob("*.py"))]  # no sub-package


def test_the_draft_is_no_generative_model(draft):
    """A `generate` or `prepare_inputs_for_generation` would have the auto class mix GenerationMixin in."""
    assert not hasattr(draft, "generate")
    assert not hasattr(draft, "prepare_inputs_for_generation")
    assert not DominoForSpeculativeDraft.can_generate()
    assert not issubclass(DominoForSpeculativeDraft, GenerationMixin)
    for path in SHIPPED.values():
        names = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        assert not [name for name in names if "GenerationMixin" in name or "Tokenizer" in name]


PRIVATE = {
    "_assisted_decoding": GenerationMixin,
    "_get_candidate_generator": GenerationMixin,
    "_is_stateful": PreTrainedModel,
    "_optimize_model_for_decode": GenerationMixin,
    "_split_model_outputs": utils,
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_names_of_transformers_exist_and_stand_in_compat_only(name):
    assert name in vars(PRIVATE[name])
    assert {stem for stem, path in MODULES.items() if re.search(rf"\b{name}\b", path.read_text())} == {"compat_domino"}
