"""`kvrecall models list|pull|check|rm`"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvrecall.cli.screen import as_json, note, plain_table, results, size, to_stdout
from kvrecall.cli.verb import Result, verb
from kvrecall.core.errors import KVRecallError, ParameterError

OTHER_MODELS = "`-m` takes any other model, too, as a folder, a .gguf file or a hub repository (OWNER/NAME)."
models = typer.Typer(help=f"The small models that kvrecall knows by name. {OTHER_MODELS}", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="Known names; see `kvrecall models list`.")]


def known_models() -> list[dict[str, Any]]:
    """Every known model and whether its file is here: its size is compared, its hash is not computed."""
    from kvrecall.models import DEFAULT, KNOWN, find
    from kvrecall.models.files import files_of
    from kvrecall.models.unpacked import copies

    rows = []
    for name, model in KNOWN.items():
        path = find(name)
        rows.append({
            "name": name, "default": name == DEFAULT, "path": str(path) if path else None,
            "state": "ready" if path else "damaged" if files_of(model) else "not fetched",
            "unpacked_bytes": _bytes(copies(sha256=model.sha256)),
            "bytes": model.bytes, "description": model.description, "licence": model.licence,
        })  # fmt: skip
    return rows


def _bytes(folders: list[Path]) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*"))


@models.command("list")
@verb
def list_models() -> Result:
    """List the known models, where their files are, and what unpacked copies take."""
    from kvrecall.models.files import hub_cache, models_dir
    from kvrecall.models.unpacked import copies

    folder, cache, unpacked = str(models_dir()), str(hub_cache()), _bytes(copies())
    rows = known_models()
    table = plain_table(None, "name", "state", "size", "unpacked", "licence", "what it is", prose=True)
    for row in rows:
        name, sizes = row["name"] + (" (default)" if row["default"] else ""), (row["bytes"], row["unpacked_bytes"])
        table.add_row(name, row["state"], *map(size, sizes), row["licence"], row["description"])
    results().print(table)
    for line in (f"\nfolders: {folder}, then the model hub's cache {cache}", OTHER_MODELS,
                 f"unpacked copies, of other files too: {size(unpacked)}"):  # fmt: skip
        results().print(Text(line), soft_wrap=True)
    return {"folder": folder, "hub_cache": cache, "models": rows, "unpacked_bytes": unpacked}


@models.command("pull")
@verb
def pull_models(names: Names = None) -> Result:
    """Fetch models from the hub and verify them (the default one if none is named)."""
    from kvrecall.models import DEFAULT, find, pull
    from kvrecall.models.registry import known

    rows = []
    for model in [known(name) for name in names or [DEFAULT]]:
        fetched = find(model.name) is None
        path = pull(model.name, None if as_json() else note)
        rows.append({"name": model.name, "path": str(path), "bytes": model.bytes, "fetched": fetched})
        to_stdout(f"{model.name}: {'fetched and verified' if fetched else 'already there'}, {path}\n")
    return {"models": rows}


@models.command("check")
@verb
def check_models(names: Names = None) -> Result:
    """Compute the hashes of stored models again (all that are here if none is named). Exit code 2 if any is wrong."""
    from kvrecall.models import KNOWN, check
    from kvrecall.models.files import files_of
    from kvrecall.models.registry import known

    targets = [known(name).name for name in names or [name for name, model in KNOWN.items() if files_of(model)]]
    rows, errors = [], []
    for name in targets:
        try:
            rows.append({"name": name, "path": str(check(name)), "ok": True})
        except KVRecallError as error:
            errors.append(error)
    to_stdout("".join(f"{row['name']}: ok, {row['path']}\n" for row in rows))
    if errors:
        raise errors[0]
    if not targets and not as_json():
        note("no models here yet; `kvrecall models pull` fetches the default one")
    return {"models": rows}


@models.command("rm")
@verb
def remove_models(
    names: Names = None,
    only_unpacked: Annotated[
        bool, typer.Option("--unpacked", help="Only unpacked copies (all if none is named); the next load makes them again.")
    ] = False,
) -> Result:
    """Delete models, from the model hub's cache too, and their unpacked copies."""
    from kvrecall.models.files import remove
    from kvrecall.models.registry import known
    from kvrecall.models.unpacked import copies

    if not names and not only_unpacked:
        raise ParameterError("NAMES", "a known name, or --unpacked", "neither", "`kvrecall models list` shows what is here.")
    # All names are right, or nothing is deleted.
    targets = [(name, copies(sha256=known(name).sha256)) for name in names or []] or [(None, copies())]
    rows = []
    for name, folders in targets:
        freed = _bytes(folders)
        for folder in folders:
            shutil.rmtree(folder)
        freed += remove(name) if name and not only_unpacked else 0
        rows.append({"name": name, "bytes": freed})
        to_stdout(f"{name or 'all unpacked copies'}: {size(freed)} freed\n")
    return {"models": rows}
