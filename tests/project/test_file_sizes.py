"""Files and functions stay short enough to read in one go; the package never prints."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ["dynamicemb", "tests", "examples", "benchmarks", "tools"]

MAX_FILE_LINES = 600
MAX_MEDIAN_LINES = 200
MAX_README_LINES = 200
# Lines of the body without its docstring. A kernel cannot be cut where it would spill registers or lose fusion.
MAX_FUNCTION_LINES = 50
MAX_KERNEL_LINES = 60
MAX_PARAMETERS = 8

# Decorators of functions that a compiler turns into machine code: those take one argument per array and no dataclass.
KERNEL_DECORATORS = {"jit", "njit", "autotune", "heuristics", "intrinsic"}

# Constructors and functions whose parameter list users already call, in the API we mirror. Nothing else belongs here.
MIRRORED = {
    "BatchedDynamicEmbeddingTablesV2.__init__": "FBGEMM's table-batched embeddings",
    "DynamicEmbeddingShardingPlanner.__init__": "torchrec's EmbeddingShardingPlanner and eb_configs",
    "DynamicEmbDump": "NVIDIA's, whose arguments come first",
    "ConstructTwinModule.__init__": "mirrored",
    "InferenceEmbeddingCollection.__init__": "mirrored",
}


def python_files(*folders: str) -> list[Path]:
    """List the Python files below `folders` of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (qualified name, node) of every function, nested ones included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Say whether a compiler's decorator stands on the function."""
    names = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return any(ast.unparse(name).split(".")[-1] in KERNEL_DECORATORS for name in names)


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of the body, its docstring left out, comments and empty lines included."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return node.end_lineno - body[0].lineno + 1 if body else 0


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters but for `self`, `cls` and autograd's `ctx`."""
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return sum(argument.arg not in ("self", "cls", "ctx") for argument in every)


def complaints(source: str) -> list[str]:
    """List the functions in `source` that are too long or take too much."""
    found = []
    for name, node in functions(ast.parse(source)):
        kernel = is_kernel(node)
        limit = MAX_KERNEL_LINES if kernel else MAX_FUNCTION_LINES
        if body_lines(node) > limit:
            found.append(f"{name} (line {node.lineno}): {body_lines(node)} lines, limit {limit}")
        if not kernel and name not in MIRRORED and num_parameters(node) > MAX_PARAMETERS:
            found.append(f"{name} (line {node.lineno}): {num_parameters(node)} parameters, limit {MAX_PARAMETERS}")
    return found


def prints(source: str) -> list[int]:
    """List the lines that call `print`."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def num_lines(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text().splitlines())


def test_no_file_is_too_long() -> None:
    too_long = {str(path.relative_to(ROOT)): num_lines(path) for path in python_files(*FOLDERS)}
    assert {path: lines for path, lines in too_long.items() if lines > MAX_FILE_LINES} == {}


def test_the_median_file_of_the_package_is_short() -> None:
    assert statistics.median(num_lines(path) for path in python_files("dynamicemb")) < MAX_MEDIAN_LINES


def test_the_readme_is_short() -> None:
    assert num_lines(ROOT / "README.md") <= MAX_README_LINES


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_functions_are_short_and_take_little(path: Path) -> None:
    assert complaints(path.read_text()) == []


def test_the_package_never_prints() -> None:
    printing = {str(path.relative_to(ROOT)): prints(path.read_text()) for path in python_files("dynamicemb")}
    assert {path: lines for path, lines in printing.items() if lines} == {}


def test_the_checks_catch_a_bad_function() -> None:
    long_body = "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES + 1)
    greedy = "def f(" + ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1)) + "):\n    pass\n"
    assert len(complaints(long_body)) == 1
    assert len(complaints(greedy)) == 1
    assert len(complaints("class C:\n    def g(self):\n        " + greedy.replace("    pass", "            pass"))) == 1
    assert prints("def f():\n    print(1)\n") == [2]


def test_the_checks_spare_kernels_docstrings_and_the_mirrored_api() -> None:
    greedy = "def f(" + ", ".join(f"a{i}" for i in range(MAX_PARAMETERS + 1)) + "):\n    pass\n"
    assert complaints("@triton.jit\n" + greedy) == []
    assert complaints("@njit(parallel=True)\n" + greedy) == []
    assert complaints('def f():\n    """Do it.\n' + "\n" * MAX_FUNCTION_LINES + '    """\n    return 1\n') == []
    method = greedy.replace("f(", "__init__(").replace("    pass", "        pass")
    assert complaints("class BatchedDynamicEmbeddingTablesV2:\n    " + method) == []
