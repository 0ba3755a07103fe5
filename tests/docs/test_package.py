"""The wheel that users install, and what importing the package costs them."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trl_repulse"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PURE = [f"math/{name}.py" for name in ("__init__", "importance", "objective", "ppo", "proposal_losses")]
PURE.append("_numbers.py")
EXTRAS = {*"peft deepspeed vllm flash-attn quantization wandb trackio test quality docs dev".split()}
MAX_BYTES = 1_200_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: no `build/` of an earlier build can leak into it, and none is left in the checkout."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def metadata(wheel, contents):
    (name,) = (name for name in contents if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode("utf-8"))


def test_wheel_holds_the_package_and_nothing_else(contents):
    shipped = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(ROOT).as_posix() for path in shipped}
    assert "trl_repulse/py.typed" in expected and "trl_repulse/embedded/world/policy/model.safetensors" in expected
    assert {name for name in contents if ".dist-info/" not in name} == expected
    assert any(re.fullmatch(r"trl_repulse-[^/]+\.dist-info/licenses/LICENSE", name) for name in contents)


def test_wheel_is_small_and_pure(wheel):
    assert wheel.stat().st_size < MAX_BYTES
    assert wheel.name.endswith("-py3-none-any.whl")


def test_console_command(wheel, contents):
    (name,) = (name for name in contents if name.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert "trl-repulse = trl_repulse.cli.main:main" in archive.read(name).decode("utf-8").splitlines()


def test_metadata(metadata):
    assert metadata["Name"] == "trl-repulse"
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload().startswith("# TRL-RePULSe")


def test_requirements(metadata):
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    base = {requirement.name: requirement for requirement in required if requirement.marker is None}
    assert set(base) == {Requirement(line).name for line in PROJECT["dependencies"]}
    assert base["trl"].specifier == SpecifierSet(">=1.15")


def test_extras(metadata):
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert EXTRAS <= set(PROJECT["optional-dependencies"])
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist")]
    for extra in EXTRAS:
        assert any(r.marker is not None and r.marker.evaluate({"extra": extra}) for r in required), extra


def imported_by(statement):
    """Modules in `sys.modules` after a statement, in an interpreter of its own."""
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.thorough
def test_importing_the_package_is_light():
    heavy = {"torch", "transformers", "trl", "accelerate", "datasets"}
    imported = imported_by(
        "import trl_repulse; trl_repulse.__version__; dir(trl_repulse); import trl_repulse.embedded; "
        "import trl_repulse.rewards; dir(trl_repulse.rewards); trl_repulse.rewards.RemoteReward; "
        "trl_repulse.rewards.RewardServer; import trl_repulse.cli.main; trl_repulse.cli.main.build_parser()"
    )
    assert "trl_repulse.embedded" in imported
    assert not heavy & imported
    assert "trl" in imported_by("from trl_repulse import ReinforceConfig")  # the control: the check can fail


@pytest.mark.parametrize("path", PURE)
def test_pure_modules_import_torch_numpy_and_the_standard_library_alone(path):
    pure = {(PACKAGE / other).with_suffix("") for other in PURE}
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = (PACKAGE / path).parents[node.level - 1].joinpath(*(node.module or "").split("."))
            imported = [base] if node.module else [base / alias.name for alias in node.names]
            assert set(imported) <= pure, f"line {node.lineno} imports a module that is not pure"
            continue
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        roots = {name.split(".")[0] for name in names}
        assert roots <= {"numpy", "torch", *sys.stdlib_module_names}, f"line {node.lineno}"


def imports_of(package):
    """The modules that each module of a package takes something from, for types and inside functions too."""
    folder = PACKAGE / package
    names = {path.stem for path in folder.glob("*.py")}
    graph = {}
    for name in names - {"__init__"}:
        nodes = ast.walk(ast.parse((folder / f"{name}.py").read_text("utf-8")))
        nodes = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1]
        taken = {node.module for node in nodes} | {
            each.name for node in nodes if not node.module for each in node.names
        }
        graph[name] = taken & names
    return graph


# Each folder imports from those after it alone
ORDER = "cli evaluation trainers method engine generation rewards configs data models math".split()


@pytest.mark.parametrize("folder", ORDER)
def test_folders_import_one_way(folder):
    later = {folder, *ORDER[ORDER.index(folder) + 1 :]}
    taken = set()
    for path in (PACKAGE / folder).rglob("*.py"):
        place = path.relative_to(PACKAGE).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                parts = [*place[: len(place) - node.level + 1], *(node.module or "").split(".")]
                names = [parts[0]] if parts[0] else [each.name for each in node.names]
                taken |= {(path.name, name) for name in names if name in ORDER}
    assert taken and not [each for each in taken if each[1] not in later]


@pytest.mark.parametrize(
    "package", ["cli", "configs", "data", "engine", "generation", "math", "method", "models", "trainers"]
)
def test_imports_go_one_way(package):
    graph = imports_of(package)
    assert any(graph.values())
    while free := {name for name, taken in graph.items() if not taken & graph.keys()}:
        graph = {name: taken for name, taken in graph.items() if name not in free}
    assert graph == {}, "a circle is among these"
