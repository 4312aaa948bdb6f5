"""Does the block of README.md's section Install work as written, in a fresh environment?

    python scripts/check_install.py SOURCE PYTHON

SOURCE is a folder with the sources and nothing built. PYTHON belongs to an environment with torch;
the fresh one, `environment` beside SOURCE, has that torch. Run by `make dist-check` and
`make cuda-dist-check`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import environments


def install_block(readme: str) -> str:
    section = readme.split("\n## Install\n")[1].split("\n## ")[0]
    return section.split("```\n")[1]


def main() -> None:
    source, with_torch = Path(sys.argv[1]), sys.argv[2]
    programs = environments.beside(with_torch, source.parent / "environment")
    block = install_block((source / "README.md").read_text(encoding="utf-8"))
    run = subprocess.run(
        ["bash", "-euxc", block],
        cwd=source,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PIP_QUIET": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(run.stdout, end="")
    if run.returncode != 0:
        raise SystemExit(f"README.md's install block failed with exit code {run.returncode}.")
    extension = re.search(r"^extension +(.*)$", run.stdout, re.M)
    if extension is None or not Path(extension[1]).is_relative_to(programs.parent):
        raise SystemExit(f"The last line reports another zero_ext than that in '{programs}'.")


if __name__ == "__main__":
    main()
