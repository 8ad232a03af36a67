"""Imports point down only. Walks every file of the package; `docs/architecture.md` explains the layers."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "dynamicemb"

# Highest first. A folder may import itself and what stands after it.
LAYERS = ["inspection", "sharding", "checkpoint", "inference", "embedding", "table"]
# The floor: imported by everyone, import only each other.
LOW_MODULES = {
    "aliases",
    "types",
    "errors",
    "capacity",
    "compatibility",
    "admission",
    "host_memory",
    "score_strategy",
    "score_function",
}
LOW_MODULES |= {"config_initializer", "dynamicemb_config"}
LOW_MODULES |= {"optimizer"}
LOW_MODULES |= {"environment", "version", "versions", "warn"}
FLOOR = len(LAYERS)
# Every other module at the root only hands on names, and so does every module of a folder there that is no layer. They
# stand above all layers.
TOP = -1

FILE_MODULES = {"io", "os", "pathlib", "shutil", "tempfile"}
IMPORT_CALLS = {"__import__", "import_module", "importlib.import_module"}
FILE_CALLS = {"open", "torch.load", "torch.save"}


def level_of(module: str) -> int:
    """Return the level of a dotted module name of ours: TOP, an index into LAYERS, or FLOOR."""
    parts = module.split(".")[1:]
    if parts and parts[0] in LAYERS:
        return LAYERS.index(parts[0])
    return FLOOR if parts and parts[0] in LOW_MODULES else TOP


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a chain of attributes that starts at a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def imported_modules(tree: ast.AST, module: str, is_package: bool) -> list[tuple[str, int]]:
    """List (dotted module, line) of all imports in `tree`, wherever they stand, relative ones resolved."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, node.module] if node.module else package)
            # `from package import name` may name a module, which then decides the level.
            names = [f"{base}.{alias.name}" if base in (PACKAGE, "torch") else base for alias in node.names]
            found += [(name, node.lineno) for name in names]
        elif isinstance(node, ast.Call) and dotted(node.func) in IMPORT_CALLS:
            if node.args and isinstance(node.args[0], ast.Constant):
                found.append((str(node.args[0].value), node.lineno))
    return found


def is_inside(module: str, package: str) -> bool:
    """Say whether `module` is `package` or a part of it."""
    return module == package or module.startswith(package + ".")


def runs_main(node: ast.AST) -> bool:
    """Say whether a statement is `if __name__ == "__main__":` with a single call in it."""
    if not isinstance(node, ast.If) or ast.unparse(node.test) != "__name__ == '__main__'" or node.orelse:
        return False
    return len(node.body) == 1 and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Call)


def only_hands_on_names(tree: ast.Module) -> list[int]:
    """List the lines at module level that do more than hand on names, or run a `main` that was imported."""
    bad = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__"):
            continue
        if runs_main(node):
            continue
        if isinstance(node, ast.If) and dotted(node.test).split(".")[-1] == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else []
        if targets and all(dotted(target) in ("__all__", "__version__") for target in targets):
            continue
        bad.append(node.lineno)
    return bad


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """List what breaks the layer rules in the source of one module of ours."""
    tree = ast.parse(source)
    level = level_of(module)
    in_table = level == LAYERS.index("table")
    found = []
    for target, line in imported_modules(tree, module, is_package):
        if is_inside(target, PACKAGE) and level_of(target) < level:
            found.append(f"{module}:{line} imports {target}, which stands above it")
        if is_inside(target, "torchrec") and level not in (TOP, LAYERS.index("sharding")):
            found.append(f"{module}:{line} imports {target}: only sharding/ may know torchrec")
        if in_table and (target.split(".")[0] in FILE_MODULES or is_inside(target, "torch.autograd")):
            found.append(f"{module}:{line} imports {target}: table/ knows neither files nor autograd")
    if in_table:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and dotted(node.func) in FILE_CALLS:
                found.append(f"{module}:{node.lineno} calls {dotted(node.func)}: table/ knows no files")
            elif isinstance(node, ast.Attribute) and is_inside(dotted(node), "torch.autograd"):
                found.append(f"{module}:{node.lineno} uses {dotted(node)}: table/ knows no autograd")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "warnings.warn":
            found.append(f"{module}:{node.lineno} calls warnings.warn: warn.warn finds the line of the user")
    if level == TOP:
        lines = only_hands_on_names(tree)
        found += [f"{module}:{line} defines something: a root module only hands on names" for line in lines]
    return found


def package_files() -> list[Path]:
    """List the Python files of the package."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def module_of(path: Path) -> tuple[str, bool]:
    """Return the dotted module name of a file, and whether it is a package's `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return ".".join(parts[:-1] if is_package else parts), is_package


@pytest.mark.parametrize("path", package_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module, is_package = module_of(path)
    assert violations(path.read_text(), module, is_package) == []


def test_a_folder_that_is_no_layer_only_hands_on_names() -> None:
    inside = [path for path in package_files() if path.parent != ROOT / PACKAGE]
    others = [path for path in inside if path.relative_to(ROOT / PACKAGE).parts[0] not in LAYERS]
    assert {path.relative_to(ROOT / PACKAGE).parts[0] for path in others} == {"planner", "shard"}
    for path in others:
        assert level_of(module_of(path)[0]) == TOP
        assert only_hands_on_names(ast.parse(path.read_text())) == [], path
        # Nobody below may count on an import path of users; `violations` says so for these too.
        assert violations(f"import {module_of(path)[0]}", "dynamicemb.sharding.planning.planner")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dynamicemb.table.rows", "from dynamicemb.embedding.module import BatchedDynamicEmbeddingTablesV2"),
        ("dynamicemb.table.rows", "from ..embedding import module"),
        ("dynamicemb.table.rows", "def f():\n    import dynamicemb.sharding.planning.planner"),
        ("dynamicemb.table.rows", "from dynamicemb import DynamicEmbDump"),
        ("dynamicemb.table.rows", "from dynamicemb.dump_load import DynamicEmbDump"),
        ("dynamicemb.table.rows", "from dynamicemb import sharding"),
        ("dynamicemb.table.rows", "import torch.autograd"),
        ("dynamicemb.table.rows", "from torch import autograd"),
        ("dynamicemb.table.rows", "import torch\nclass F(torch.autograd.Function): pass"),
        ("dynamicemb.table.rows", "import os"),
        ("dynamicemb.table.rows", "import torch\ntorch.save({}, 'x')"),
        ("dynamicemb.table.rows", "data = open('x').read()"),
        ("dynamicemb.table.rows", "import warnings\nwarnings.warn('x', stacklevel=3)"),
        ("dynamicemb.embedding.module", "import torchrec"),
        ("dynamicemb.embedding.module", "from torchrec.distributed import types"),
        ("dynamicemb.embedding.module", "import importlib\nimportlib.import_module('torchrec')"),
        ("dynamicemb.embedding.module", "from dynamicemb.checkpoint import dump"),
        ("dynamicemb.inference.frozen", "from dynamicemb.checkpoint import load"),
        ("dynamicemb.types", "from dynamicemb.table.layout import fmix64"),
        ("dynamicemb.types", "from .table import layout"),
        ("dynamicemb.optimizer", "import torchrec"),
        ("dynamicemb.planner", "from dynamicemb.sharding.planning.planner import X\nY = X()"),
        ("dynamicemb.planner", "def get_planner(): pass"),
        ("dynamicemb.planner.planner", "class Planner: pass"),
        ("dynamicemb.shard.embedding", "from dynamicemb.sharding.collection import X\nX.y = 1"),
        ("dynamicemb.sharding.planning.planner", "from dynamicemb.planner.rw_sharding import X"),
        ("dynamicemb.inspect", "if __name__ == '__main__':\n    x = 1\n    print(x)"),
        ("dynamicemb.inspect", "if __name__ == '__main__':\n    main()\nelse:\n    main()"),
    ],
)
def test_the_rules_catch_a_bad_module(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "dynamicemb.sharding.planning.planner",
            "import torchrec\nfrom ...table import placement\nfrom ... import types",
        ),
        ("dynamicemb.embedding.module", "import torch\nclass F(torch.autograd.Function): pass"),
        ("dynamicemb.table.cpu.find", "from .. import layout\nfrom ...types import X\nfrom dynamicemb import types"),
        ("dynamicemb.optimizer", "from .types import X\nimport fbgemm_gpu"),
        ("dynamicemb.warn", "import warnings\nwarnings.warn_explicit('x', UserWarning, 'f', 1)"),
        ("dynamicemb.planner", '"""Names."""\nfrom .sharding.planner import X\n\n__all__ = ["X"]'),
        ("dynamicemb.planner.planner", '"""Names."""\nfrom ..sharding.planner import X\n\n__all__ = ["X"]'),
        ("dynamicemb", "def __getattr__(name):\n    from .sharding import planner\n    return getattr(planner, name)"),
        ("dynamicemb.table.rows", "import torch\ntensor.open = 1\nindex.open_slots()"),
        (
            "dynamicemb.inspect",
            "from .checkpoint.x import main\nif __name__ == '__main__':\n    exit(main())",
        ),
    ],
)
def test_the_rules_accept_a_good_module(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_relative_imports_of_a_package_file_resolve() -> None:
    assert violations("from .embedding import module\nfrom .types import KEY_TYPE", "dynamicemb", is_package=True) == []
    assert violations("from ..sharding import planner", "dynamicemb.table", is_package=True)
    assert violations("from .find import find", "dynamicemb.table.cpu", is_package=True) == []
