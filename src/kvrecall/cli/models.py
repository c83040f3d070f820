"""`kvrecall models list|pull|check|rm`"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvrecall.cli import options
from kvrecall.cli.report import plain_table, size
from kvrecall.cli.screen import results
from kvrecall.cli.session import OnProgress, download_bar
from kvrecall.cli.verb import Result, notes, verb
from kvrecall.core.errors import KVRecallError, ParameterError

OTHER_MODELS = "`-m` takes any other model, too, as a folder, a .gguf file or a hub repository (OWNER/NAME)."
models = typer.Typer(help=f"The small models that kvrecall knows by name. {OTHER_MODELS}", no_args_is_help=True)

Names = Annotated[list[str] | None, typer.Argument(help="Known names; see `kvrecall models list`.")]


def known_models() -> list[dict[str, Any]]:
    """Every known model and whether its file is here: its size is compared, its hash is not computed."""
    from kvrecall.models import DEFAULT, KNOWN, find
    from kvrecall.models.remove import stored_bytes
    from kvrecall.models.store import files_of

    told = []
    for model in KNOWN.values():
        path = find(model.name)
        state = "ready" if path else "damaged" if files_of(model) else "not fetched"
        row = {"name": model.name, "default": model.name == DEFAULT, "state": state, "path": str(path) if path else None}
        row["unpacked_bytes"] = stored_bytes(model.name)[1]
        told.append({**row, "bytes": model.bytes, "description": model.description, "licence": model.licence})
    return told


@models.command("list")
@verb
def list_models(as_json: options.AsJson = False) -> Result:
    """List the known models, where their files are, and what unpacked copies take."""
    from kvrecall.models import models_dir
    from kvrecall.models.hub import cache_dir
    from kvrecall.models.unpack import bytes_of, copies, limit_bytes

    told: Result = {
        "folder": str(models_dir()),
        "hub_cache": str(cache_dir()),
        "models": known_models(),
        "unpacked_bytes": sum(map(bytes_of, copies())),
        "unpacked_limit_bytes": limit_bytes(),
    }
    if not as_json:
        table = plain_table(None, "name", "state", "size", "unpacked", "licence", "what it is", prose=True)
        for row in told["models"]:
            name = row["name"] + (" (default)" if row["default"] else "")
            table.add_row(
                name, row["state"], size(row["bytes"]), size(row["unpacked_bytes"]), row["licence"], row["description"]
            )
        console = results()
        console.print(table)
        console.print(Text(f"\nfolders: {told['folder']}, then the model hub's cache {told['hub_cache']}"), soft_wrap=True)
        taken = f"{size(told['unpacked_bytes'])} of at most {size(told['unpacked_limit_bytes'])}"
        console.print(Text(OTHER_MODELS), soft_wrap=True)
        console.print(Text(f"unpacked copies, of other files too: {taken} (KVRECALL_UNPACK_LIMIT)"), soft_wrap=True)
    return told


@models.command("pull")
@verb
def pull_models(names: Names = None, as_json: options.AsJson = False) -> Result:
    """Fetch models from the hub and verify them (the default one if none is named)."""
    from kvrecall.models import DEFAULT, find, pull
    from kvrecall.models.registry import known

    told = []
    wanted = [known(name) for name in names or [DEFAULT]]
    for model in wanted:
        fetched = find(model.name) is None
        with download_bar(f"fetching {model.name}", quiet=as_json) as on_progress:
            path = pull(model.name, on_progress)
        told.append({"name": model.name, "path": str(path), "bytes": model.bytes, "fetched": fetched})
        if not as_json:
            print(f"{model.name}: {'fetched and verified' if fetched else 'already there'}, {path}")
    return {"models": told}


@models.command("check")
@verb
def check_models(names: Names = None, as_json: options.AsJson = False) -> Result:
    """Compute the hashes of stored models again, unpacked copies included (all that are here if none is named).

    Exit code 2 if any is wrong.
    """
    from kvrecall.models import KNOWN, check
    from kvrecall.models.check import check_folder
    from kvrecall.models.registry import known
    from kvrecall.models.store import files_of, path_of
    from kvrecall.models.unpack import copies

    here = [model for model in KNOWN.values() if files_of(model)]
    wanted = [known(name) for name in names] if names else here
    checks: list[tuple[str, Callable[[OnProgress], Path]]] = [(m.name, functools.partial(check, m.name)) for m in wanted]
    if not names:
        # Copies of files that are not known models, or not here any more.
        mine = {folder for model in wanted for folder in copies(path_of(model).stem)}
        checks += [(f.name, functools.partial(check_folder, f.name, f)) for f in copies() if f not in mine]
    told, first_error = [], None
    for name, run in checks:
        try:
            with download_bar(f"checking {name}", quiet=as_json) as on_progress:
                path = run(on_progress)
        except KVRecallError as error:
            first_error = first_error or error
            continue
        told.append({"name": name, "path": str(path), "ok": True})
        if not as_json:
            print(f"{name}: ok, {path}")
    if first_error:
        raise first_error
    if not checks and not as_json:
        notes().print("no models here yet; `kvrecall models pull` fetches the default one")
    return {"models": told}


@models.command("rm")
@verb
def remove_models(
    names: Names = None,
    only_unpacked: Annotated[
        bool, typer.Option("--unpacked", help="Only unpacked copies (all if none is named); the next load makes them again.")
    ] = False,
    as_json: options.AsJson = False,
) -> Result:
    """Delete models, from the model hub's cache too, and their unpacked copies."""
    from kvrecall.models.registry import known
    from kvrecall.models.remove import remove, remove_unpacked

    if not names and not only_unpacked:
        raise ParameterError("NAMES", "a known name, or --unpacked", "neither", "`kvrecall models list` shows what is here.")
    for name in names or []:
        known(name)  # all names are right, or nothing is deleted
    told: list[dict[str, Any]] = [{"name": name, "bytes": remove(name, only_unpacked)} for name in names or []]
    if not names:
        told = [{"name": None, "bytes": remove_unpacked()}]
    if not as_json:
        for row in told:
            print(f"{row['name'] or 'all unpacked copies'}: {size(row['bytes'])} freed")
    return {"models": told}
