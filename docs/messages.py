"""Collects the error messages and warnings of the sources, for the page of messages.

By what was called. `…` stands for what a message computes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHECK = re.compile(r"\b(?:TORCH_CHECK\w*)\(")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
# What was called where a message comes from these folders or files.
CALLS = {
    "shard() and the methods of the module": ["zero_ext/module", "zero_ext/engine", "csrc/units"],
    "Forward and backward": ["csrc/autograd", "csrc/engine", "csrc/gather", "csrc/reduce"],
    "Optimizers and step()": ["zero_ext/optim", "csrc/optim", "csrc/step"],
    "p.grad, states and other ShardTensors": ["zero_ext/tensor"],
    "full_tensor() and other whole values": ["zero_ext/state"],
    "Calls in which ranks wait for each other": ["zero_ext/ranks", "csrc/comm"],
    "Allocations, and work on a device": ["csrc/memory", "csrc/device", "csrc/core"],
    "zero_ext.checkpoint": ["zero_ext/checkpoint"],
    "zero_ext.data, fingerprints and logs": [
        f"zero_ext/{name}.py" for name in ("data", "fingerprints", "replay", "training_log")
    ],
    "zero_ext.elastic": ["zero_ext/elastic"],
    "zero_ext.fsdp": ["zero_ext/fsdp"],
    "initialize() and other calls of DeepSpeed": ["zero_ext/deepspeed"],
    "Accelerate, Transformers, Lightning, and unedited scripts": ["zero_ext/integrations"],
    "zero_ext.testing": ["zero_ext/testing"],
    "Import and commands": ["zero_ext/"],
    "zero_ext.ops": ["zero_ext/ops.py", "csrc/python", "csrc/kernels"],
}
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


def call_of(path: str) -> str:
    """The call whose list has most of the file's path."""
    places = [
        (len(place), call) for call in CALLS for place in CALLS[call] if path.startswith(place)
    ]
    return max(places)[1]


def messages() -> dict[str, list[str]]:
    """By call, in the order of the sources. The beginning that names the rank is left out."""
    found: dict[str, list[str]] = {call: [] for call in CALLS}
    files = [*(ROOT / "zero_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    for path in sorted(files):
        of_file = (of_python if path.suffix == ".py" else of_cpp)(path.read_text())
        texts = found[call_of(path.relative_to(ROOT).as_posix())]
        for text in of_file:
            text = re.sub(r"^…*zero_ext(?: \[rank …\])?: ", "", " ".join(text.split()))
            if len(text.split()) >= LEAST_WORDS and text not in texts:
                texts.append(text)
    return {call: texts for call, texts in found.items() if texts}


def as_markdown() -> str:
    lines = ["\n## All messages\n\nBy what was called, from the sources of this version.\n"]
    for call, texts in messages().items():
        lines.append(f"\n### {call}\n")
        lines += [f"- `` {text} ``" for text in texts]
    return "\n".join(lines) + "\n"
