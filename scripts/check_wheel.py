"""Builds sdist and wheel, checks them, and runs the wheel's `kvrecall demo` in an environment without the clone.

python scripts/check_wheel.py        # or: make wheel

1. `python -m build` makes the wheel out of the sdist, so both are complete.
2. `twine check --strict` and `check-wheel-contents` read them.
3. The wheel is installed into an empty environment. Its dependencies are those of this environment, found by a path: this
   proves what the wheel holds, not which versions it works with.
4. There, in an empty folder, the command answers `--version` and runs the demo on a tiny model, which needs the package's data.
   The method is one without numba's functions, which would be compiled anew for a new folder, a minute or two.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
METHOD = "streaming"
WHERE = "import kvrecall, pathlib; print(pathlib.Path(kvrecall.__file__).parent)"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Standard output of a command, which must succeed; PYTHONPATH is not handed on."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"check_wheel: {' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def build() -> Path:
    """The wheel, beside the sdist that it was made of, both checked."""
    shutil.rmtree(DIST, ignore_errors=True)
    # hatchling is in this environment, so nothing is fetched for the build.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    (wheel,), (sdist,) = list(DIST.glob("*.whl")), list(DIST.glob("*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    run(sys.executable, "-m", "check_wheel_contents", wheel)
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel and, by a path, the packages of this one."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    target = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A path of a .pth file is searched last, and .pth files in it, such as that of an editable install, are not read.
    (target / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    found = Path(run(python, "-c", WHERE, cwd=folder).strip())
    if found.parent != target or not (found / "py.typed").is_file():
        sys.exit(f"check_wheel: expected kvrecall with py.typed in {target}, found {found}")
    return python


def main() -> None:
    """Raises SystemExit, which says what failed."""
    sys.path.insert(0, str(ROOT))
    from tests.tiny import save_tiny_model

    wheel = build()
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; sdist, wheel and metadata are sound")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = install(wheel, folder / "env")
        model = save_tiny_model(folder / "model")
        elsewhere = folder / "elsewhere"
        elsewhere.mkdir()
        command = python.with_name("kvrecall")
        print(run(command, "--version", cwd=elsewhere).strip())
        told = run(command, "demo", "-m", model, "--max-new-tokens", "2", "--method", METHOD, cwd=elsewhere)
        if "Right answers of 3" not in told:
            sys.exit(f"check_wheel: the demo of the wheel said:\n{told}")
    print("installed alone, the wheel runs its demo")


if __name__ == "__main__":
    main()
