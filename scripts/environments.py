"""Fresh environments that have a torch already: for scripts that install zero_ext."""

import os
import subprocess
from pathlib import Path

SITE_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
# What the environment with torch may hold for builds, and a fresh one does not.
HIDDEN = ("ninja", "zero_ext", "__editable__")


def site_packages(python: str | Path) -> Path:
    command = [python, "-c", SITE_PACKAGES]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(run.stdout.strip())


def beside(python: str | Path, folder: Path) -> Path:
    """Makes an environment in ``folder``, and returns its programs' folder.

    It sees the packages of ``python``'s environment, so torch, but for those that are HIDDEN.
    """
    python, folder = os.path.abspath(python), folder.resolve()
    subprocess.run([python, "-m", "venv", folder], check=True)
    seen = folder / "seen"
    seen.mkdir()
    for entry in site_packages(python).iterdir():
        if not entry.name.startswith(HIDDEN):
            (seen / entry.name).symlink_to(entry)
    Path(site_packages(folder / "bin" / "python"), "seen.pth").write_text(f"{seen}\n")
    return folder / "bin"
