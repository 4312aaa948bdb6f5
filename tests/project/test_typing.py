"""What type checkers see of the extension is what there is: without ``_C.pyi`` mypy ends with an
internal error on whatever imports the package."""

import ast
import typing
from pathlib import Path

import zero_ext
from zero_ext import _C


def names_in_stub() -> dict[str, set[str]]:
    """Of each class its members, "": what the module has."""
    tree = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
    return {"": _names(tree), **{c.name: _names(c) for c in tree.body if _is_class(c)}}


def _is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def _names(parent: ast.Module | ast.ClassDef) -> set[str]:
    names = set()
    for node in parent.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("__")}


def _public(owner) -> set[str]:
    return {name for name in vars(owner) if not name.startswith("_")}


def test_the_stub_names_what_the_extension_has():
    stub = names_in_stub()
    there = {"": _public(_C)}
    there |= {name: _public(c) for name, c in vars(_C).items() if isinstance(c, type)}
    assert stub == there


def test_what_shard_returns_has_the_class_of_what_it_is_given():
    """Or ``model = shard(model)`` would be a wrong assignment."""
    hints = typing.get_type_hints(zero_ext.shard)
    assert isinstance(hints["return"], typing.TypeVar) and hints["return"] is hints["module"]
