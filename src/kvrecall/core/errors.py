"""One class per mistake a user can make. Every message says: name, what was expected, what was given, the remedy.

All errors derive from `KVRecallError`; those about a value also derive from `ValueError`, so callers that know nothing of
this package still catch them. They are raised before anything is stored, so a cache stays usable after any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class KVRecallError(Exception):
    """Base class of every error that kvrecall raises on purpose. remedy: the end of its message, or ""."""

    remedy: str = ""

    @property
    def problem(self) -> str:
        """The message without its remedy and full stop, for errors that quote this one and have their own remedy."""
        return str(self).removesuffix(self.remedy).rstrip(" .")

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is: another process gets an error by pickle, and would make it of its message alone."""
        return _same_error, (type(self), self.args, vars(self))


def _same_error(kind: type[KVRecallError], args: tuple[Any, ...], attributes: dict[str, Any]) -> KVRecallError:
    """An error with this message; `kind` itself takes the parts of one."""
    bare: Any = type(kind.__name__, (kind,), {"__init__": KVRecallError.__init__})(*args)
    bare.__class__ = kind
    vars(bare).update(attributes)
    return bare


class ParameterError(KVRecallError, ValueError):
    """A parameter has a value that is not supported."""

    def __init__(self, name: str, expected: str, got: object, remedy: str) -> None:
        super().__init__(f"{name}: expected {expected}, got {got!r}. {remedy}")
        self.name, self.expected, self.got, self.remedy = name, expected, got, remedy


class UnknownNameError(KVRecallError, ValueError):
    """A name (method, model, parameter, …) that is not registered; the message lists the known ones, and `others`."""

    def __init__(self, kind: str, got: str, known: Iterable[str], others: str = "") -> None:
        known = sorted(known)
        similar = get_close_matches(str(got), known, n=1)  # a file may contain any value
        hint = f" Did you mean {similar[0]!r}?" if similar else ""
        super().__init__(f"unknown {kind} {got!r}: expected one of {', '.join(known) or '(none)'}{others}.{hint}")
        self.kind, self.got, self.known, self.remedy = kind, got, known, hint.strip()


class CompositionError(KVRecallError, ValueError):
    """Parts of a method that do not fit together."""

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{what}: expected parts that fit together, but {reason}. {remedy}")
        self.what, self.reason, self.remedy = what, reason, remedy


class ShapeError(KVRecallError, ValueError):
    """A tensor or model has a shape that the cache does not support."""

    def __init__(self, name: str, expected: str, got: object, remedy: str) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}. {remedy}")
        self.remedy = remedy


class NonFiniteError(KVRecallError, ValueError):
    """Keys or values contain NaN or infinity; nothing of this append was stored."""

    def __init__(self, layer: int, sequence: int, what: str = "keys or values") -> None:
        super().__init__(
            f"layer {layer}, sequence {sequence}: expected finite {what}, got NaN or infinity. "
            "Check the model's dtype (float16 overflows where bfloat16 does not) and its weights."
        )
        self.layer, self.sequence = layer, sequence


class CacheModelError(KVRecallError, ValueError):
    """The cache was made for another model than the one that uses it."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(
            f"cache: expected the model it was made for ({expected}), got {got}. "
            "Make a new RetrievalCache from this model's config."
        )


class CacheWriterError(KVRecallError, ValueError):
    """The model computes otherwise than when it filled the cache: an adapter was switched, merged or scaled, or weights were
    changed. Nothing of the call is stored."""

    def __init__(self, expected: str, got: str) -> None:
        self.remedy = "Switch back, or call reset() and read the prompt again; the cache is unchanged."
        super().__init__(f"cache: expected what computed its tokens ({expected}), got {got}. {self.remedy}")


class UnsupportedModelError(KVRecallError, ValueError):
    """A model family, or a way of calling it, is not supported; nothing of the call is stored."""

    def __init__(self, family: str, got: str) -> None:
        remedy = "Use another cache with this model; docs/design/families.md lists the families that were tried."
        super().__init__(
            f"{family}: expected a decoder with full-attention layers whose causal attention goes through transformers' "
            f"attention interface, got {got}. {remedy}"
        )
        self.family, self.got, self.remedy = family, got, remedy


class NotAttachedError(KVRecallError, RuntimeError):
    """A RetrievalCache was used outside a call of an attached model, where it cannot retrieve."""

    def __init__(self) -> None:
        super().__init__(
            "RetrievalCache: expected a call of this model inside `with kvrecall.attach(model):`, got one without it. "
            "Wrap the call to the model in the context manager; the cache is unchanged."
        )


class CacheInUseError(ParameterError):
    """Another thread or request works on the cache; nothing was changed."""

    def __init__(self, name: str, expected: str, got: str, remedy: str = "") -> None:
        remedy = remedy or "Wait until it has returned, or give each thread a fork(); the cache is unchanged."
        super().__init__(name, expected, got, remedy)


class ForkedProcessError(KVRecallError, RuntimeError):
    """This process was forked after kvrecall had computed; its copies of models and caches cannot compute."""

    def __init__(self) -> None:
        self.remedy = (
            "Load the model in each process after the fork (gunicorn: without --preload), or start processes by "
            'multiprocessing.get_context("spawn").'
        )
        super().__init__(
            "process: expected one that was forked before kvrecall's first computation, got one that was forked after it, in "
            f"which threads of torch and numba do not exist. {self.remedy}"
        )


class InterruptedPassError(KVRecallError, RuntimeError):
    """The last forward pass ended in the middle; the cache has been cut back to the tokens that every layer holds."""

    def __init__(self, tokens: int) -> None:
        now = f"It is mended now and holds {tokens:,} tokens per sequence; repeat the call."
        super().__init__(f"cache: expected layers of equal length, got a cache whose last forward pass was interrupted. {now}")
        self.tokens = tokens


class DeviceError(KVRecallError, ValueError):
    """A tensor, cache or model is on another device or has another dtype than expected."""

    def __init__(self, name: str, expected: object, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}. Move or cast the model, or make a new cache.")


class HostMemoryError(KVRecallError, MemoryError):
    """The host has too little memory for this context; raised before any of the new tokens is stored."""

    def __init__(self, need_bytes: int, available_bytes: int, tokens: int) -> None:
        super().__init__(
            f"host memory: {tokens:,} tokens need {need_bytes:,} bytes ({need_bytes / 2**30:.2f} GiB), "
            f"{available_bytes:,} bytes ({available_bytes / 2**30:.2f} GiB) are available. "
            "Shorten the context, lower the batch size, or free memory; nothing was stored."
        )
        self.need_bytes, self.available_bytes, self.tokens = need_bytes, available_bytes, tokens


class DeviceMemoryError(KVRecallError, MemoryError):
    """The GPU has too little memory for a layer (None: all layers); the cache is unchanged."""

    def __init__(self, layer: int | None, need_bytes: int, free_bytes: int, tokens: int, device: object) -> None:
        what = "the cache" if layer is None else f"layer {layer}"
        super().__init__(
            f"device memory: {what} needs {need_bytes:,} bytes ({need_bytes / 2**30:.2f} GiB) for {tokens:,} tokens, besides "
            f"what the model computes with; {free_bytes:,} bytes ({free_bytes / 2**30:.2f} GiB) are free on {device}. "
            "Shorten the context, lower the batch size or chunk_tokens, or free memory; the cache holds what it held before."
        )
        self.layer, self.need_bytes, self.free_bytes, self.tokens = layer, need_bytes, free_bytes, tokens


class ContextLengthError(KVRecallError, ValueError):
    """A prompt is longer than the model's context."""

    def __init__(self, name: str, limit_tokens: int, got_tokens: int) -> None:
        super().__init__(
            f"{name}: expected at most {limit_tokens:,} tokens, got {got_tokens:,}. "
            "Shorten it or choose a model with a longer context."
        )


class RequestCancelledError(KVRecallError, RuntimeError):
    """The request was cancelled; its cache holds the tokens that were read until then."""

    def __init__(self) -> None:
        self.remedy = "Submit it again; what its cache holds of the prompt is not computed again."
        super().__init__(f"request: expected one that goes on, got one that was cancelled. {self.remedy}")


class InputFileError(KVRecallError, ValueError):
    """A file cannot be read, or has no content."""

    def __init__(self, path: object, problem: str, remedy: str = "Give a readable, non-empty UTF-8 text file.") -> None:
        super().__init__(f"{path}: {problem}. {remedy}")
        self.remedy = remedy


class OutputFileError(KVRecallError, OSError):
    """A file cannot be written; raised before its content is computed, if possible."""

    def __init__(
        self, path: object, problem: str, remedy: str = "Give a name in a folder that exists and may be written to."
    ) -> None:
        super().__init__(f"{path}: {problem}. {remedy}")
        self.remedy = remedy


class FolderInUseError(KVRecallError, RuntimeError):
    """Another process writes to the same folder of results."""

    def __init__(self, folder: object, holder: str) -> None:
        remedy = "Wait for it, give --out another folder, or let several processes share a run with --shard."
        super().__init__(f"{folder}: expected no other run to write here, but {holder} does. {remedy}")
        self.folder = folder


class ModelFilesError(KVRecallError, RuntimeError):
    """Model weights cannot be found, fetched or verified."""

    def __init__(self, name: str, problem: str, remedy: str) -> None:
        super().__init__(f"model {name!r}: {problem}. {remedy}")


class CaptureError(KVRecallError):
    """A decode step cannot be captured as a CUDA graph."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"cannot capture the decode step: {reason}. {remedy}")
        self.reason, self.remedy = reason, remedy


class CaptureMismatchError(CaptureError):
    """A captured step gives another result than the uncaptured one; it is not used."""


class StatisticsError(KVRecallError, ValueError):
    """Key statistics do not describe a model: of too few tokens, of another model, from a damaged file. They are not used."""

    def __init__(self, name: object, expected: str, got: str, remedy: str = "") -> None:
        remedy = remedy or "Make them anew with `kvrecall statistics MODEL`."
        super().__init__(f"{name}: expected {expected}, got {got}. {remedy}")
        self.name, self.expected, self.got, self.remedy = str(name), expected, got, remedy


class SessionError(KVRecallError, ValueError):
    """A saved session is damaged, of another model, of a newer version, or cannot be made; it is not used."""

    def __init__(self, name: object, expected: str, got: object, remedy: str = "") -> None:
        remedy = remedy or "Read the documents again and save the session anew."
        super().__init__(f"session: {name}: expected {expected}, got {got}. {remedy}")
        self.name, self.expected, self.got, self.remedy = str(name), expected, got, remedy


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra. No package index has kvrecall, so it is one for a clone."""
    return f'`pip install ".[{extra}]"` in a clone of kvrecall'


class MissingPackageError(KVRecallError, ModuleNotFoundError):
    """An optional package is not installed, or its version does not work."""

    def __init__(
        self, package: str, extra: str, missing: str | None = None, expected: str = "it to be installed", got: str = "none"
    ) -> None:
        inner = f" (no module {missing!r})" if missing else ""
        remedy = f"Run {install_command(extra)}."
        super().__init__(f"{package}: expected {expected}, got {got}{inner}. {remedy}")
        self.package, self.extra, self.remedy = package, extra, remedy
