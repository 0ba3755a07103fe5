"""Documentation against code: links, names, code blocks, configuration docstrings, and what the README promises CI."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
from trl import GRPOConfig

import trl_repulse
from trl_repulse import PPOConfig, ReinforceConfig, RePULSeConfig, RePULSeGRPOConfig, RePULSePPOConfig
from trl_repulse.configs import NegativeTermConfig, SharedConfig
from trl_repulse.evaluation.gcg import GCGConfig, GCGEvaluationConfig, GCGRunArguments


ROOT = Path(__file__).parents[2]
OTHERS = ("inspect_ai", "lm_eval")  # packages of extras that the default tests do without
PACKAGE = ROOT / "trl_repulse"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("docs/**/*.md"))
CONFIGS = [SharedConfig, ReinforceConfig, RePULSeConfig, PPOConfig, RePULSePPOConfig, RePULSeGRPOConfig]
DOCUMENTED = [*CONFIGS, NegativeTermConfig, GCGConfig, GCGEvaluationConfig, GCGRunArguments]
COMMANDS = {
    "test": 'pip install -e ".[test]" && pytest -n auto',
    "train": "pip install -e . && accelerate launch examples/repulse.py",
}

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def name_of(path):
    return str(path.relative_to(ROOT))


def directives():
    """What the API pages render: the targets of `::: target` lines."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/api/*.md")))
    return re.findall(r"^::: ([\w.]+)", text, re.MULTILINE)


def modules():
    """Importable names of the package's modules, private ones and empty `__init__` files left out."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        inner = len(parts) > 1 and parts[1] in ("engine", "method", "cli")  # what trainers and the command are made of
        private = any(part.startswith("_") for part in parts) or inner
        if not private and path.read_text(encoding="utf-8").strip():
            names.append(".".join(parts))
    return names


def code_blocks():
    """The code of each Python block."""
    blocks = []
    for page in PAGES:
        for number, (indent, language, code) in enumerate(_FENCE.findall(page.read_text(encoding="utf-8")), 1):
            if language not in ("python", "py"):
                continue
            lines = [line.removeprefix(indent) for line in code.splitlines()]
            blocks.append(pytest.param("\n".join(lines), id=f"{name_of(page)}-{number}"))
    return blocks


def entries(config):
    """Fields in a configuration's docstring: name -> what stands between the parentheses."""
    found = re.findall(r"^ {4}(\w+) \((.*)\):$", inspect.getdoc(config), re.MULTILINE)
    assert len(found) == len(dict(found)), "a field is documented twice"
    return dict(found)


def own_fields(config):
    """Fields that a configuration adds to TRL's and to those of its own bases."""
    inherited = {
        field.name
        for base in config.__mro__[1:]
        if dataclasses.is_dataclass(base)
        for field in dataclasses.fields(base)
    }
    return {field.name: field for field in dataclasses.fields(config) if field.name not in inherited}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page):
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target.split("#")[0] for target in _LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    assert not [target for target in targets if target and not (page.parent / target).exists()]


@pytest.mark.parametrize("name", [name for name in trl_repulse.__all__ if not name.startswith("__")])
def test_public_names_have_an_api_entry(name):
    assert [target for target in directives() if target.startswith("trl_repulse.") and target.endswith(f".{name}")]


@pytest.mark.parametrize("name", [name for name in modules() if name != "trl_repulse"])
def test_public_modules_have_an_api_entry(name):
    targets = directives()
    if name in targets or any(target.startswith(f"{name}.") for target in targets):
        return
    homes = []  # modules of what is rendered under the name its package exports it by
    for target in targets:
        module, _, attribute = target.rpartition(".")
        if module in (f"trl_repulse.{package}" for package in ("configs", "trainers")):
            exported = getattr(importlib.import_module(module), attribute)
            homes.append(getattr(exported, "__module__", None))
    assert name in homes, f"add `::: {name}` to a page in docs/api"


def test_api_entries_exist():
    for target in directives():
        try:
            importlib.import_module(target)
        except ModuleNotFoundError as error:
            if error.name in OTHERS:
                continue
            module, _, attribute = target.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), target


@pytest.mark.parametrize("code", code_blocks())
def test_python_blocks_parse_and_name_what_exists(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trl_repulse"):
            try:
                module = importlib.import_module(node.module)
            except ModuleNotFoundError as error:
                assert error.name in OTHERS
                continue
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Config"):
            config = getattr(trl_repulse, node.func.id, None)
            if config is not None:
                known = {field.name for field in dataclasses.fields(config)}
                assert {keyword.arg for keyword in node.keywords} <= known


@pytest.mark.parametrize("config", DOCUMENTED)
def test_configuration_docstrings_name_exactly_the_own_fields(config):
    assert set(entries(config)) == set(own_fields(config))


@pytest.mark.parametrize(
    ("config", "name"), [pytest.param(config, name, id=name) for config in DOCUMENTED for name in own_fields(config)]
)
def test_configuration_docstrings_state_the_defaults(config, name):
    field, entry = own_fields(config)[name], entries(config)[name]
    assert field.metadata["help"].strip()
    stated = re.search(r", \*optional\*(?:, defaults to `(.+)`)?$", entry)
    assert stated, f"{name}: write `(`type`, *optional*, defaults to `value`)`"
    default = None if stated[1] is None else ast.literal_eval(stated[1])
    assert (type(default), default) == (type(field.default), field.default)


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_changed_defaults_are_announced(config):
    trl_config, ours = {
        PPOConfig: (GRPOConfig, PPOConfig),
        RePULSeConfig: (ReinforceConfig, RePULSeConfig),
        RePULSePPOConfig: (PPOConfig, RePULSePPOConfig),
        RePULSeGRPOConfig: (GRPOConfig, RePULSeGRPOConfig),
    }.get(config, (GRPOConfig, ReinforceConfig))
    base = {field.name: field.default for field in dataclasses.fields(trl_config)}
    announced = inspect.getdoc(ours)
    for field in dataclasses.fields(config):
        if field.name in base and field.default != base[field.name]:
            assert f"`{field.name}`: Defaults to `{field.default}` instead of `{base[field.name]}`" in announced


@pytest.mark.parametrize("name", COMMANDS)
def test_readme_commands(name):
    """`.ci/run` takes the test command from the block behind this marker."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(rf"^<!-- ci: {name} -->\n```bash\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert blocks == [COMMANDS[name]]


def test_metrics_are_documented():
    """Every metric name written down in the trainers is explained on the page of the trainer that logs it."""
    page = "\n".join((ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("metrics", "ppo_trainer"))
    paths = [path for folder in ("trainers", "engine", "method") for path in sorted((PACKAGE / folder).glob("*.py"))]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    statistics = "mean|std|lowest|highest"
    written = re.findall(
        rf"""(?:\[f?"([^"]+)"\]\.append\(|(?:_log_\w+|(?:logs|self)\.(?:mean|value|token_mean))\(f?"([^"]+)"|f?"([^"]+)": (?:{statistics})\b)""",
        source,
    )
    names = {
        "".join(pair)
        .replace("{PROPOSAL_FOLDER}", "proposal")
        .replace("{name}", "NAME")
        .replace("{prefix}", prefix)
        .replace("{folder}", folder)
        for pair in written
        for folder in ("proposal", "value")
        for prefix in ("proposal", "negative")
    }
    names = {name.replace("{VALUE_FOLDER}", "value") for name in names}
    # Ends of names, and GRPO's
    names -= {*"min mean max NAME/mean NAME/max {self.prefix}NAME tools/failure_frequency".split()}
    assert {"reward", "kl", "proposal/ess", "negative/ess", "rewards/NAME/mean", "value/loss"} <= names
    assert not {name for name in names if f"`{name}`" not in page}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 900


@pytest.mark.parametrize(("folder", "most"), [("trl_repulse", 24_940), ("tests", 31_930)])
def test_the_code_does_not_grow(folder, most):
    """In lines, as `wc -l` counts them. What is added is paid for elsewhere: lower the limit when there are fewer."""
    assert sum(len(path.read_bytes().splitlines()) for path in (ROOT / folder).rglob("*.py")) <= most


def test_pages_stay_short():
    """In words, as `wc -w` counts them."""
    words = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in sorted(ROOT.glob("docs/*.md"))}
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800
    assert sum(words.values()) <= 30_000
    assert not {name: count for name, count in words.items() if count > 1_400}
