"""The pages of the documentation lead to each other, and name what exists."""

import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from code_blocks import PAGES, ROOT

import zero_ext

API = (ROOT / "docs/api.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAME = re.compile(r"(?<!ops\.)\bzero_ext(?:\.[A-Za-z_]\w*)+")
# A hop of a table: number, room, function.
HOP = re.compile(r"^\| \d+ \| `(\w+)` \| `(\w+)`", re.M)
CODE = re.compile(r"`([^`]+)`")
# Read from the environment, by Python's and C++'s functions.
VARIABLE = re.compile(r"""(?:environ|getenv)\S*\(\s*["'](ZERO_EXT_\w+)""")
SETUP = ROOT / "setup.py"
NOTE = re.compile(r"^\| `(\w+)` \| (Note \[.+\]) \|$", re.M)


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall((ROOT / page).read_text()):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_of_the_package_exist(page):
    for name in sorted(set(NAME.findall((ROOT / page).read_text()))):
        try:
            pkgutil.resolve_name(name)
        except ImportError as error:  # of a library that an integration is for
            assert error.name and not error.name.startswith("zero_ext"), name
        except AttributeError:  # also where such a library is missing
            assert importlib.util.find_spec(name), name


def test_every_decision_is_listed_with_its_title_and_date():
    folder = ROOT / "docs/decisions"
    listed = (folder / "README.md").read_text()
    for page in folder.glob("[0-9]*.md"):
        heading, _, date = page.read_text().split("\n")[:3]
        number, title = heading.removeprefix("# ").split(". ", 1)
        assert page.name.startswith(f"{int(number):04}-")
        assert f"| {number} | [{title}]({page.name}) | {date} |" in listed


def test_functions_and_notes_of_the_architecture_are_in_their_rooms():
    named = [(room, rf"\b{name}\)?\(") for room, name in HOP.findall(ARCHITECTURE)]
    named += [(room, "// " + re.escape(note)) for room, note in NOTE.findall(ARCHITECTURE)]
    assert len(named) > 40
    for room, pattern in named:
        files = [p for p in (ROOT / "csrc" / room).rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
        found = any(re.search(pattern, path.read_text()) for path in files)
        assert found, f"csrc/{room}/ has no {pattern}"


def test_every_room_is_in_the_architecture():
    rooms = [path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()]
    rows = re.findall(r"^\| `(\w+)` \| (?!Note)", ARCHITECTURE, re.M)
    assert sorted(rows) == sorted(rooms)
    packages = [path.parent.name for path in (ROOT / "zero_ext").glob("*/__init__.py")]
    assert all(f"`{name}`" in ARCHITECTURE for name in packages)


def test_files_of_the_reading_order_are_in_their_rooms():
    rows = re.findall(
        r"^\| \d+ \| `(\w+)/` \| (.*) \|$", (ROOT / "csrc/README.md").read_text(), re.M
    )
    files = [(room, name) for room, text in rows for name in re.findall(r"`(\w+\.\w+)`", text)]
    assert len(files) >= len(rows) == 13
    assert [f for f in files if not (ROOT / "csrc" / f[0] / f[1]).exists()] == []


def table(page: str, header: str) -> list[list[str]]:
    """The rows under the header that begins so."""
    text = (ROOT / page).read_text()
    rows = re.findall(rf"^\| {re.escape(header)}.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert rows, f"{page} has no table '{header}'"
    return [line.strip("|\n ").split(" | ") for part in rows for line in part.splitlines()]


def test_error_messages_are_in_the_sources():
    """Word for word, with strings joined as the compiler joins them; … stands for values."""
    files = [*(ROOT / "zero_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.[ch]*")]
    texts = [re.sub(r'"\s+[fr]?"', "", path.read_text()) for path in files]
    rows = table("docs/errors.md", "message") + table("docs/stages.md", "message")
    assert len(rows) > 50
    for message, *_ in rows:
        pattern = ".*?".join(re.escape(part) for part in message.strip("`").split("…"))
        assert any(re.search(pattern, text, re.DOTALL) for text in texts), message


def test_every_public_name_has_an_entry_of_the_api():
    entries = re.findall(r"^\.\. auto\w+:: (zero_ext[\w.]*)", API, re.M)
    assert entries[0] == "zero_ext.shard"
    assert sorted(set(zero_ext.__all__) - {name.partition(".")[2] for name in entries}) == []


def test_messages_are_listed_by_what_was_called(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    listed = importlib.import_module("messages").messages()
    assert any("inside a forward" in text for text in listed["Forward and backward"])
    assert any("is not the name of a" in text for text in listed["zero_ext.checkpoint"])
    assert len(listed) > 12 and min(map(len, listed.values())) > 1


def test_the_reference_names_every_key_and_variable(tmp_path):
    model = zero_ext.shard(torch.nn.Linear(3, 2), stage=1)
    optimizer = zero_ext.optim.wrap(torch.optim.Muon, [model.weight])
    with zero_ext.elastic.Run(model, optimizer, run_id="keys", folder=tmp_path) as run:
        of_run = zero_ext.stats(run)
    keys = {
        "key of `stats`": zero_ext.stats(optimizer) | zero_ext.stats(model) | of_run,
        "key of `estimate_memory`": zero_ext.estimate_memory(torch.nn.Linear(3, 2), 2, 2),
    }
    for header, actual in keys.items():
        named = [key for row in table("docs/reference.md", header) for key in CODE.findall(row[0])]
        assert sorted(named) == sorted(actual), header
    read = set()
    for path in [*(ROOT / "zero_ext").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), SETUP]:
        read |= set(VARIABLE.findall(path.read_text()))
    named = {CODE.search(row[0])[1] for row in table("docs/reference.md", "variable")}
    assert {name.partition("=")[0] for name in named} == read
