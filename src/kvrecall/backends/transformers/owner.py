"""The owner of a cache: one thread at a time works on it, and one request at a time.

1. A `Claim` is a call that works on a cache: a forward pass, or another public operation. The call ends it in `finally`, by one
assignment, so that a cache is free again after any exception, also one that comes during the `finally`.
2. Claims run one after another, in order. A call that changes the cache does not wait for a forward pass of another thread, but
raises CacheInUseError before it changes anything. A call that only reads (`fork`, `stats`) waits until the pass has ended.
3. A request is several forward passes: `model.generate`, `engine.prefill`, a request of an engine. Until it ends, other threads
may read the cache between its passes, but not change it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvrecall.core.errors import CacheInUseError
from kvrecall.core.extras import check_process

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound="OwnedCache")

_PAUSE = 0.0005
"""Seconds between two looks at whether a claim's turn has come."""
_lock = threading.RLock()
"""Guards the claims and requests of all caches, for microseconds."""


class Request(Protocol):
    """Several forward passes over one cache that belong together."""

    name: str
    ended: bool

    def here(self) -> bool:
        """Whether this thread works for it."""
        ...


class Claim:
    """One call that works on a cache, in the thread that makes the claim."""

    def __init__(self, name: str, *, reads: bool = False, is_pass: bool = False) -> None:
        """reads: it does not change the cache. is_pass: it is a forward pass."""
        self.name, self.reads, self.is_pass = name, reads, is_pass
        self.ended = False
        """Set by its call, once the call is over."""
        self._thread = threading.get_ident()

    def here(self) -> bool:
        """Whether this thread made it."""
        return self._thread == threading.get_ident()


class Owner:
    """The claims and the request on one cache."""

    def __init__(self) -> None:
        self._claims: list[Claim] = []
        """In order; the first one runs, the others wait."""
        self._request: Request | None = None

    def begin(self, claim: Claim) -> None:
        """Waits for the claim's turn; inside another claim of this thread it has come already.

        Raises CacheInUseError instead of waiting for a forward pass or a request of another thread, and ForkedProcessError.
        """
        check_process(computes=True)
        while not self._granted(claim):
            time.sleep(_PAUSE)

    def _granted(self, claim: Claim) -> bool:
        with _lock:
            self._claims = [each for each in self._claims if not each.ended]
            if not claim.reads:
                self._check(claim.name)
            if claim not in self._claims:
                if any(each.here() for each in self._claims):
                    return True
                self._claims.append(claim)
            return self._claims[0] is claim

    def hold(self, request: Request) -> bool:
        """Begins a request; False inside another request of this thread. Raises CacheInUseError as `begin`."""
        check_process()
        with _lock:
            self.check(request.name)
            if self._request is None:
                self._request = request
            return self._request is request

    def release(self, request: Request) -> None:
        """Ends a request. May be called again."""
        with _lock:
            if self._request is request:
                self._request = None

    def check(self, name: str) -> None:
        """Raises CacheInUseError if the cache cannot be changed from this thread now. name: of the change."""
        with _lock:
            self._claims = [each for each in self._claims if not each.ended]
            self._check(name)

    def _check(self, name: str) -> None:
        if self._request is not None and self._request.ended:
            self._request = None
        if self._claims and self._claims[0].is_pass and not self._claims[0].here():
            raise CacheInUseError(name, "one forward pass at a time", "a pass in another thread")
        if self._request is not None and not self._request.here():
            raise CacheInUseError(name, "a cache that no other request uses", f"one that {self._request.name} uses")


class OwnedCache(Protocol):
    """A cache that has an owner."""

    owner: Owner

    def prepare_for(self, what: str, inside: bool, captured: bool, recovers: bool) -> None:
        """Before the operation `what`, once no other thread works on the cache; parameters as in `operation`."""
        ...


def operation(
    name: str, *, reads: bool = False, inside: bool = False, captured: bool = False, recovers: bool = True
) -> Callable[[Callable[Concatenate[_C, _P], _R]], Callable[Concatenate[_C, _P], _R]]:
    """Makes a function of a cache a claim on it. After an interrupted forward pass it first restores the cache.

    reads: it does not change the cache. inside: it may be called inside a forward pass of its own thread. captured: it may be
    called while steps are captured. recovers: False for one that looks after an interrupted pass itself.
    """

    def claiming(work: Callable[Concatenate[_C, _P], _R]) -> Callable[Concatenate[_C, _P], _R]:
        @wraps(work)
        def claimed(cache: _C, *args: _P.args, **kwargs: _P.kwargs) -> _R:
            claim = Claim(name, reads=reads)
            try:
                cache.owner.begin(claim)
                cache.prepare_for(name, inside, captured, recovers)
                return work(cache, *args, **kwargs)
            finally:
                claim.ended = True

        return claimed

    return claiming


@contextmanager
def request(cache: OwnedCache, name: str) -> Iterator[None]:
    """Inside, the caller's function makes a request over the cache. Raises CacheInUseError."""
    own = Claim(name)
    try:
        cache.owner.hold(own)
        yield
    finally:
        own.ended = True


@contextmanager
def step(caches: Sequence[OwnedCache]) -> Iterator[None]:
    """Inside, the caller's function works on caches whose requests it answers: readers wait until it is done."""
    own = Claim("step", reads=True)  # never refused
    try:
        for cache in caches:
            cache.owner.begin(own)
        yield
    finally:
        own.ended = True
