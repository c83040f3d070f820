"""What a start of vLLM's server would refuse, without weights: makes vLLM's config of its options, with kvrecall's checks.

A process of its own imports vLLM, because that changes the environment and prints. Nothing is fetched: if the model's config is
neither local nor in the cache, only the options are read.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NoReturn

from kvrecall.core.errors import KVRecallError, ParameterError

NO_VLLM = "vLLM is not installed here: its options were not checked"
NO_CONFIG = "the model's config is not on this machine: only the names of options were checked"
NO_WEIGHTS = "memory, and what the model's layers need, are checked at the start"


def rehearsed(options: Sequence[str]) -> str:
    """What was not checked. options: of `vllm serve`, model first. Raises what the start would raise: kvrecall's errors, and
    a ParameterError with the message of vLLM's."""
    if find_spec("vllm") is None:
        return NO_VLLM
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_rehearse, list(options)).result()


def _rehearse(options: list[str]) -> str:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL"}
    os.dup2(2, 1)  # the caller's standard output is the command
    try:
        return _config_made(options)
    except Exception as error:
        if (own := _own(error)) is not None:
            raise own from None
        _refuse(_message(error))


def _config_made(options: list[str]) -> str:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, command = FlexibleArgumentParser(prog="vllm"), cmd_init()[0]
    own = command.subparser_init(parser.add_subparsers(dest="subparser"))
    parser.error = own.error = _refuse
    sys.argv = ["vllm", command.name, *options]
    args = parser.parse_args()
    command.validate(args)
    args.model = args.model_tag or args.model
    if not _has_config(args.model, args.revision):
        return NO_CONFIG
    AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    return NO_WEIGHTS


def _has_config(model: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json", "params.json")
    return Path(model).exists() or any(isinstance(try_to_load_from_cache(model, n, revision=revision), str) for n in names)


def _own(error: BaseException) -> KVRecallError | None:
    """kvrecall's error that became this one; pydantic keeps those of a config among its own."""
    if isinstance(error, KVRecallError):
        return error
    return next((own for each in _entries(error) if isinstance(own := each.get("ctx", {}).get("error"), KVRecallError)), None)


def _message(error: Exception) -> str:
    """What vLLM says is wrong, without pydantic's copy of all arguments."""
    parts = [str(each.get("ctx", {}).get("error") or each["msg"]) for each in _entries(error)]
    said = "; ".join(parts) or str(error) or type(error).__name__
    return " ".join(said.split())


def _entries(error: BaseException) -> list[dict[str, Any]]:
    from pydantic import ValidationError

    return [*error.errors()] if isinstance(error, ValidationError) else []  # pyright: ignore[reportReturnType]


def _refuse(said: str) -> NoReturn:
    raise ParameterError("options of vLLM", "ones that it accepts", said, "See `vllm serve --help`.")
