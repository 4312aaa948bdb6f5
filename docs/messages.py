"""Collects the error messages and warnings of the sources, for the page of messages.

`…` stands for what a message computes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK = re.compile(r"\b(?:TORCH_CHECK\w*)\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
LEAST_WORDS = 5  # shorter ones are parts of a message that another function makes


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "…"


def of_python(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Raise) or ast.unparse(call.func) == "warnings.warn":
            yield text_of(call.args[0])


def of_cpp(source: str) -> Iterator[str]:
    for check in CHECK.finditer(source):
        end = source.find(");", check.end())
        pieces, last = [], None
        for string in STRING.finditer(source, check.end(), end):
            joined = last is not None and not source[last : string.start()].strip()
            pieces += [string[1]] if joined else ["…", string[1]]
            last = string.end()
        yield "".join(pieces).replace('\\"', '"').replace("\\n", " ")


def messages() -> dict[str, list[str]]:
    """By folder, in the order of the sources. The beginning that names the rank is left out."""
    found: dict[str, list[str]] = {}
    files = [*(ROOT / "zero_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    for path in sorted(files):
        of_file = (of_python if path.suffix == ".py" else of_cpp)(path.read_text())
        folder = str(path.relative_to(ROOT).parent)
        for text in of_file:
            text = re.sub(r"^…*zero_ext(?: \[rank …\])?: ", "", " ".join(text.split()))
            if len(text.split()) >= LEAST_WORDS and text not in found.setdefault(folder, []):
                found[folder].append(text)
    return {folder: texts for folder, texts in found.items() if texts}


def as_markdown() -> str:
    lines = ["\n## All messages\n\nCollected from the sources when the site was built.\n"]
    for folder, texts in messages().items():
        lines.append(f"\n### {folder}\n")
        lines += [f"- `` {text} ``" for text in texts]
    return "\n".join(lines) + "\n"
