"""The tools by one name: ``zero-ext TOOL …`` is ``python -m zero_ext.TOOL …``."""

import runpy
import sys

TOOLS = ("checkpoint", "diff", "doctor", "info", "plan", "profile")


def main() -> None:
    """Run the tool that the first argument names. Exits with 2 where it names none."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in TOOLS:
        print(f"usage: zero-ext {{{','.join(TOOLS)}}} …; each has --help", file=sys.stderr)
        sys.exit(0 if name in ("-h", "--help") else 2)
    sys.argv.pop(1)
    runpy.run_module(f"zero_ext.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
