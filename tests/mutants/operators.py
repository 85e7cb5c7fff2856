"""Generates mutants: one small fault each, made from the syntax tree of a module."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLED = {
    **{"min": "max", "max": "min", "all": "any", "any": "all", "ceil": "floor", "floor": "ceil"},
    **{"minimum": "maximum", "maximum": "minimum", "sf": "cdf", "cdf": "sf", "log1p": "expm1", "expm1": "log1p"},
    **{"append": "count", "add": "discard", "fsync": "fstat"},
}
_TEXT = {"__repr__", "__str__", "_repr_html_", "describe", "__format__"}
"""Functions that only make text: no mutants there."""
_EFFORT = {"maxiter", "rtol", "xtol", "tol", "stacklevel", "maxsize", "indent", "timeout", "isolation_level", "strict"}
"""Arguments that say how long or how finely something is done, or that lengths are equal: no mutants in them."""
_TINY = 1e-6
"""Positive constants below are slack of floating point: twice as much is as right."""
_ROUNDINGS = {"_UNIT", "_SPECIAL", "_NDTRI_RELATIVE", "_NDTRI_ABSOLUTE"}
_NEARLY_ONE = {"_UP", "_SAFE", "_ROUNDING", "ROUNDING"}
"""Names that modules give to such a slack, and to 1 and so little."""
_REPEATS = 20
"""A loop that repeats so often without counting is a search: once more finds the same."""


@dataclass(frozen=True)
class Mutant:
    """One fault in one place.

    Attributes:
        file: Below src/cpsgd.
        function: Qualified name of the outermost function that holds the place, or of the module's constant.
        change: The operator, the right text and the wrong one.
        number: Counts equal changes in one function, from 0.
        lines: First and last line of its statement, or of the head of a compound one, now. They are not in the name.
        constant: Whether it is in a module's constant, not in a function.
        source: The whole module with the fault in it.
    """

    file: str
    function: str
    change: str
    number: int
    lines: tuple[int, int]
    constant: bool
    source: str

    @property
    def name(self) -> str:
        """What names the mutant, as long as its function keeps its text."""
        return f"{self.file}::{self.function}::{self.change}" + (f"#{self.number}" if self.number else "")

    def drawn(self, share: float, seed: int) -> bool:
        """Whether the mutant is in a sample: this depends on its own name alone, not on other code."""
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        return int.from_bytes(digest[:8]) < share * 2.0**64


def _replaced(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return changed


def _is_tiny(node: ast.AST) -> bool:
    """Whether a number is what floating point rounds away: more or less of it changes no digit that a test compares."""
    match node:
        case ast.Constant(value=float(value)):
            return 0 < value < _TINY
        case ast.Name(id=name):
            return name in _ROUNDINGS
        case ast.BinOp(
            ast.Constant(value=float(base)), ast.Pow(), ast.UnaryOp(ast.USub(), ast.Constant(value=int(power)))
        ):
            return bool(base**-power < _TINY)
        case ast.BinOp(left, ast.Mult(), right):
            return _is_tiny(left) or _is_tiny(right)
        case ast.BinOp(left, ast.Div(), _):
            return _is_tiny(left)
        case ast.BinOp(left, ast.Add(), right):
            return _is_tiny(left) and _is_tiny(right)
    return False


def _is_slack(node: ast.AST) -> bool:
    """Whether a number is tiny, or 1 and so little: its sign and place change no digit."""
    match node:
        case ast.Name(id=name) if name in _NEARLY_ONE:
            return True
        case ast.BinOp(ast.Constant(value=1.0), ast.Add() | ast.Sub(), right):
            return _is_tiny(right)
    return _is_tiny(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields what may stand in the place of a node, with the operator's name."""
    match node:
        case ast.Compare(ops=[first, *rest]) if type(first) in _COMPARED:
            yield "compare", _replaced(node, ops=[_COMPARED[type(first)](), *rest])
        case ast.BinOp(left=left, right=right) if _is_slack(left) or _is_slack(right) or _is_text(left):
            return
        case ast.BinOp(op=op) if type(op) in _COMPUTED:
            yield "compute", _replaced(node, op=_COMPUTED[type(op)]())
        case ast.AugAssign(op=op) if type(op) in _COMPUTED:
            yield "compute", _replaced(node, op=_COMPUTED[type(op)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not()) if not isinstance(node.operand, ast.Constant):
            yield "sign", node.operand
        case ast.BoolOp(op=op):
            yield "logic", _replaced(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.Constant(value=bool(value)):
            yield "constant", _replaced(node, value=not value)
        case ast.Constant(value=int(value)):
            yield "constant", _replaced(node, value=value + 1)
        case ast.Constant(value=float(value)):
            if not 0 < value < _TINY:
                yield "constant", _replaced(node, value=value * 2 if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLED:
            yield "call", _replaced(node, func=_replaced(node.func, id=_CALLED[name]))
        case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLED:
            yield "call", _replaced(node, func=_replaced(node.func, attr=_CALLED[name]))
        case ast.Call(func=ast.Attribute(attr="nextafter"), args=[value, _]):
            yield "direction", value
        case ast.If(body=[ast.Raise()]):
            yield "guard", _replaced(node, test=ast.Constant(False))
        case ast.Expr(value=ast.Call()):
            yield "statement", ast.Pass()
        case ast.IfExp(body=body, orelse=other) if _is_text(body) or _is_text(other):
            return
        case ast.IfExp(test=test):
            yield "choice", _replaced(node, test=ast.UnaryOp(ast.Not(), test))


def _is_search(node: ast.AST) -> bool:
    match node:
        case ast.For(
            target=ast.Name(id="_"), iter=ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(n))])
        ):
            return n >= _REPEATS
    return False


def _head(statement: ast.stmt) -> tuple[int, int]:
    """Returns the first and last line of a simple statement, or of what a compound one begins with."""
    body = getattr(statement, "body", None)
    last = statement.end_lineno if body is None else max(statement.lineno, body[0].lineno - 1)
    return statement.lineno, last or statement.lineno


class _Places(ast.NodeVisitor):
    """Finds every place where a mutant can be made: function, node, lines, whether in a constant, how to put it."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.AST, tuple[int, int], bool, Callable[[ast.AST], None]]] = []
        self._scope: list[str] = []
        self._function: str | None = None
        self._lines = (0, 0)

    def generic_visit(self, node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params", "format_spec"):
                continue
            if isinstance(node, ast.Raise | ast.arguments):
                continue  # texts of errors; defaults of parameters, which are bound when a function is made
            if field == "iter" and _is_search(node):
                continue
            if isinstance(value, list):
                for index, child in enumerate(value):
                    if isinstance(child, ast.AST):
                        self._place(child, partial(value.__setitem__, index))
            elif isinstance(value, ast.AST):
                self._place(value, partial(setattr, node, field))

    def _place(self, child: ast.AST, put: Callable[[ast.AST], None]) -> None:
        if isinstance(child, ast.JoinedStr | ast.Assert) or (isinstance(child, ast.keyword) and child.arg in _EFFORT):
            return
        if _is_tiny(child):
            return
        outer = self._lines
        if isinstance(child, ast.stmt):
            self._lines = _head(child)
        self._enter(child, put)
        self._lines = outer

    def _enter(self, child: ast.AST, put: Callable[[ast.AST], None]) -> None:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            outermost = self._function is None and not isinstance(child, ast.ClassDef)
            if outermost and child.name in _TEXT:
                return
            self._scope.append(child.name)
            if outermost:
                self._function = ".".join(self._scope)
            self.visit(child)
            if outermost:
                self._function = None
            self._scope.pop()
            return
        if self._function is not None:
            self.found.append((self._function, child, self._lines, not self._scope, put))
        elif (
            not self._scope
            and isinstance(child, ast.Assign)
            and isinstance(child.targets[0], ast.Name)
            and isinstance(child.value, ast.Constant | ast.BinOp | ast.UnaryOp)
        ):
            self._function = child.targets[0].id
            self.visit(child)
            self._function = None
            return
        self.visit(child)


def mutants(path: Path, file: str, wanted: Callable[[Mutant], bool] = lambda _: True) -> list[Mutant]:
    """Returns the wanted mutants of a module. `file` is its name below src/cpsgd; `wanted` sees no source yet."""
    tree = ast.parse(path.read_text())
    places = _Places()
    places.visit(tree)
    made, counted = [], Counter[tuple[str, str]]()
    for function, node, lines, constant, put in places.found:
        for operator, variant in _variants(node):
            old = ast.unparse(node).splitlines()[0]
            ast.copy_location(variant, node)
            ast.fix_missing_locations(variant)
            change = f"{operator}: {old} -> {ast.unparse(variant).splitlines()[0]}"
            mutant = Mutant(file, function, change, counted[function, change], lines, constant, "")
            counted[function, change] += 1
            if wanted(mutant):
                put(variant)
                made.append(replace(mutant, source=ast.unparse(tree)))
                put(node)
    return made
