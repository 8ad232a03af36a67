"""User score functions: from a plain Python function to arithmetic that every backend can compile.

The function is read, not run: its source becomes one straight line of float64 operations, in which numbers of the
enclosing scopes are constants. The result is a string, so it travels with a module to another process, and each backend
compiles the same one (``table/cpu/score_function.py``, ``table/triton/score_function.py``).
"""

import ast
import builtins
import inspect
import math
import operator
import types
from collections.abc import Callable
from typing import Any, NoReturn

from dynamicemb.score_strategy import DynamicEmbScoreStrategy, ScoreStrategy

# Functions that a translated source calls; it also has ``number``, ``where``, ``maximum`` and ``minimum``.
MATH_FUNCTIONS = {
    math.exp: "exp",
    math.log: "log",
    math.log2: "log2",
    math.sqrt: "sqrt",
    math.sin: "sin",
    math.cos: "cos",
    math.erf: "erf",
    math.floor: "floor",
    math.ceil: "ceil",
    math.fabs: "abs",
    abs: "abs",
}
_OPERATORS: dict[type, tuple[str, Callable[[float, float], float]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
_COMPARISONS: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_MAX_EXPONENT = 4
_SUPPORTED = (
    "use assignments to one name, + - * / **, comparisons, conditional expressions, min, max, abs and "
    f"{', '.join('math.' + f.__name__ for f in MATH_FUNCTIONS if f is not abs)}"
)

# A number known now, or the source of one.
_Number = float | str
_Condition = bool | str


def translate(function: Callable[..., Any], strategy: ScoreStrategy) -> str:
    """Return the source of ``score(timestamp, frequency, now)``, all float64, which ranks as the function does.

    Args:
        function: a ``def`` in a source file, ``(scores, cur_timestamp) -> float``.
        strategy: the compound strategy, whose order is that of ``scores``.

    Raises:
        TypeError: not a function.
        ValueError: a construct that not every backend can compile; the message names the line.

    Example: for (TIMESTAMP, LFU), ``return scores[1] * 0.5 + (cur_timestamp - scores[0])`` becomes
    ``return (((frequency) * number(0.5)) + ((now) - (timestamp)))``.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"score_function must be a plain Python function, got {function!r}; write a def")
    columns = strategy if isinstance(strategy, tuple) else (strategy,)
    names = ["timestamp" if column is DynamicEmbScoreStrategy.TIMESTAMP else "frequency" for column in columns]
    return _Translator(function, names).source()


class _Translator:
    """Walks the syntax tree of one function."""

    def __init__(self, function: types.FunctionType, columns: list[str]):
        self._function = function
        self._columns = columns
        self._locals: dict[str, _Number] = {}
        self._lines: list[str] = []
        try:
            # Of the code: asked for a wrapper, inspect would return the source of what it wraps.
            lines, self._first_line = inspect.getsourcelines(function.__code__)
        except OSError:
            self._source, self._first_line = [], function.__code__.co_firstlineno
            self._refuse(None, "its source is not in a file; define it in one")
        self._source = lines
        scopes = inspect.getclosurevars(function)
        self._outer = {**vars(builtins), **scopes.globals, **scopes.nonlocals}

    def _refuse(self, node: ast.AST | None, reason: str) -> NoReturn:
        """Raise the error that names file and line."""
        offset = getattr(node, "lineno", 1) - 1
        line = self._source[offset].strip() if offset < len(self._source) else ""
        where = f"{self._function.__code__.co_filename}:{self._first_line + offset}"
        raise ValueError(f"score_function {self._function.__name__} ({where}): {reason}: {line!r}")

    def source(self) -> str:
        """Return the translation."""
        if self._function.__name__ == "<lambda>":
            self._refuse(None, "a lambda cannot be compiled; write a def")
        tree = self._parsed()
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
            self._refuse(tree, "it must be a plain def, without decorators")
        arguments = tree.args
        parameters = inspect.signature(self._function, follow_wrapped=False).parameters
        if len(arguments.args) != 2 or parameters.keys() != {a.arg for a in arguments.args}:
            self._refuse(tree, "it must take (scores, cur_timestamp)")
        if arguments.defaults:
            self._refuse(tree, "its parameters must have no defaults")
        self._scores, now = (argument.arg for argument in arguments.args)
        self._locals[now] = "now"
        *body, last = tree.body
        for statement in body:
            self._statement(statement)
        if not isinstance(last, ast.Return) or last.value is None:
            self._refuse(last, "it must end with the one return of a number")
        self._lines.append(f"return {_text(self._number(last.value))}")
        return "def score(timestamp, frequency, now):\n" + "".join(f"    {line}\n" for line in self._lines)

    def _parsed(self) -> ast.stmt:
        source = "".join(self._source)
        if not source[:1].isspace():
            return ast.parse(source).body[0]
        # Not dedented: comments and the lines of a docstring may stand at the margin.
        (block,) = ast.parse("if True:\n" + source).body
        assert isinstance(block, ast.If)
        return ast.increment_lineno(block, -1).body[0]

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
            self._assign(node.target.id, self._number(ast.copy_location(ast.BinOp(read, node.op, node.value), node)))
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                self._assign(target.id, self._number(node.value))
                return
            if isinstance(target, ast.Tuple) and self._is_scores(node.value):
                names = [element.id for element in target.elts if isinstance(element, ast.Name)]
                if len(names) == len(target.elts) == len(self._columns):
                    self._locals.update(zip(names, self._columns, strict=True))
                    return
        if isinstance(node, ast.If | ast.For | ast.While):
            self._refuse(node, f"{type(node).__name__.lower()} statements cannot be compiled; {_SUPPORTED}")
        self._refuse(node, f"this statement cannot be compiled; {_SUPPORTED}")

    def _assign(self, name: str, value: _Number) -> None:
        if isinstance(value, str):
            # A new name each time: every line is a value of its own.
            text, value = value, f"value_{len(self._lines)}"
            self._lines.append(f"{value} = {text}")
        self._locals[name] = value

    def _number(self, node: ast.expr) -> _Number:
        """Translate an expression whose value is a number."""
        if isinstance(node, ast.Constant) and _is_number(node.value):
            return self._fold(node, lambda: node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._named(node)
        if isinstance(node, ast.Subscript):
            return self._score(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            value = self._number(node.operand)
            if isinstance(node.op, ast.UAdd):
                return value
            return -value if isinstance(value, float) else f"(-{value})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            return self._power(node, self._number(node.left), self._number(node.right))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._operation(node)
        if isinstance(node, ast.IfExp):
            condition = self._condition(node.test)
            if isinstance(condition, bool):
                return self._number(node.body if condition else node.orelse)
            return f"where({condition}, {_text(self._number(node.body))}, {_text(self._number(node.orelse))})"
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            self._refuse(node, "a condition is no number here; write 1.0 if ... else 0.0")
        self._refuse(node, f"this expression cannot be compiled; {_SUPPORTED}")

    def _named(self, node: ast.Name | ast.Attribute) -> _Number:
        if isinstance(node, ast.Name) and node.id in self._locals:
            return self._locals[node.id]
        if self._is_scores(node):
            self._refuse(node, f"{self._scores} must be indexed: {self._scores}[0] or {self._scores}[1]")
        value = self._object(node)
        if not _is_number(value):
            self._refuse(node, f"{ast.unparse(node)} is not a number that is known now")
        return self._fold(node, lambda: value)

    def _object(self, node: ast.expr) -> Any:
        """Return what a name of an enclosing scope, or an attribute of ``math``, is; None if it is neither."""
        if isinstance(node, ast.Name):
            return self._outer.get(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return getattr(math, node.attr, None) if self._outer.get(node.value.id) is math else None
        return None

    def _is_scores(self, node: ast.expr) -> bool:
        """Return whether an expression is the first parameter, and not something that has taken its name."""
        return isinstance(node, ast.Name) and node.id == self._scores and node.id not in self._locals

    def _score(self, node: ast.Subscript) -> _Number:
        index = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if not self._is_scores(node.value):
            self._refuse(node, f"only {self._scores} can be indexed")
        if type(index) is not int or index not in (0, 1):
            self._refuse(node, f"the index of {self._scores} must be 0 or 1")
        return self._columns[index]

    def _operation(self, node: ast.BinOp) -> _Number:
        symbol, compute = _OPERATORS[type(node.op)]
        left, right = self._number(node.left), self._number(node.right)
        if isinstance(left, float) and isinstance(right, float):
            return self._fold(node, lambda: compute(left, right))
        return f"({_text(left)} {symbol} {_text(right)})"

    def _fold(self, node: ast.AST, compute: Callable[[], Any]) -> float:
        """Compute a constant now."""
        try:
            value = float(compute())
        except (ArithmeticError, ValueError, TypeError) as error:
            self._refuse(node, f"it has no value ({error})")
        if math.isnan(value):
            self._refuse(node, "it is not a number")
        return value

    def _power(self, node: ast.AST, base: _Number, exponent: _Number) -> _Number:
        if isinstance(base, float) and isinstance(exponent, float):
            return self._fold(node, lambda: math.pow(base, exponent))
        if isinstance(base, float) and 0 < base < math.inf:
            return f"exp({_text(exponent)} * number({math.log(base)!r}))"
        if isinstance(exponent, float) and exponent in range(1, _MAX_EXPONENT + 1):
            return f"({' * '.join([_text(base)] * int(exponent))})"
        self._refuse(
            node,
            f"a power needs a positive constant base, or a whole constant exponent up to {_MAX_EXPONENT}; "
            "use math.exp(y * math.log(x))",
        )

    def _call(self, node: ast.Call) -> _Number:
        called = self._object(node.func)
        if isinstance(node.func, ast.Name) and node.func.id in self._locals:
            called = None
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            self._refuse(node, f"{ast.unparse(node.func)} takes plain arguments only")
        values = None
        if called in (min, max, math.log, math.pow, float) or (called.__hash__ and called in MATH_FUNCTIONS):
            values = [self._number(argument) for argument in node.args]
        if values is None:
            self._refuse(node, f"{ast.unparse(node.func)}() cannot be inlined; {_SUPPORTED}")
        if all(isinstance(value, float) for value in values):
            return self._fold(node, lambda: called(*values))
        if called in (min, max) and len(values) > 1:
            text = _text(values[0])
            for value in values[1:]:
                text = f"{'maximum' if called is max else 'minimum'}({text}, {_text(value)})"
            return text
        if called is math.pow and len(values) == 2:
            return self._power(node, *values)
        if called is math.log and len(values) == 2:
            return f"(log({_text(values[0])}) / log({_text(values[1])}))"
        if len(values) != 1 or called in (min, max, math.pow):
            self._refuse(node, f"{ast.unparse(node.func)} has the wrong number of arguments")
        return values[0] if called is float else f"{MATH_FUNCTIONS[called]}({_text(values[0])})"

    def _condition(self, node: ast.expr) -> _Condition:
        """Translate an expression that is true or false."""
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value
        if isinstance(node, ast.Compare) and all(type(op) in _COMPARISONS for op in node.ops):
            values = [self._number(value) for value in (node.left, *node.comparators)]
            parts = []
            for left, op, right in zip(values, node.ops, values[1:], strict=False):
                parts.append(f"({_text(left)} {_COMPARISONS[type(op)]} {_text(right)})")
            return f"({' & '.join(parts)})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            condition = self._condition(node.operand)
            return not condition if isinstance(condition, bool) else f"({condition} == 0)"
        if isinstance(node, ast.BoolOp):
            conditions = [self._condition(value) for value in node.values]
            is_and = isinstance(node.op, ast.And)
            if any(condition is not is_and for condition in conditions if isinstance(condition, bool)):
                return not is_and
            texts = [condition for condition in conditions if isinstance(condition, str)]
            return f"({(' & ' if is_and else ' | ').join(texts)})" if texts else is_and
        self._refuse(node, "a condition must be made of comparisons, and, or, not")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: _Number) -> str:
    """Return the source of a number."""
    if isinstance(value, str):
        return value
    # The literals of infinities are too large for any float.
    return f"number({value!r})" if math.isfinite(value) else f"number({'-' if value < 0 else ''}1e999)"
