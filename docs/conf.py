"""Settings of Sphinx; `make docs` builds the site into build/site.

The source folder is the project's, so that a page leads to README.md and CONTRIBUTING.md by the
same links as on a code host.
"""

import sys
from pathlib import Path

import zero_ext

sys.path.insert(0, str(Path(__file__).parent))

from messages import as_markdown

ROOT = Path(__file__).resolve().parents[1]

project = "zero_ext"
author = "zero_ext developers"
version = release = zero_ext.__version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "csrc/**.md", "benchmarks/README.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# Anchors as code hosts make them of headings.
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"zero_ext {version}"
html_additional_pages = {"index": "to_index.html"}
templates_path = [str(ROOT / "docs/templates")]
html_static_path = [str(ROOT / "docs/static")]
html_css_files = ["site.css"]
# A diff shows lines that go beside those that come.
copybutton_selector = "div:not(.highlight-diff) > div.highlight > pre"
html_copy_source = False
html_show_sphinx = False


def setup(app):
    def add_messages(app, page: str, text: list[str]) -> None:
        if page == "docs/errors":
            text[0] += as_markdown()

    app.connect("source-read", add_messages)
