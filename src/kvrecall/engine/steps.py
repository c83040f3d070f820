"""Makes one decode step for all decoding requests: captured, together, or in turn.

1. Requests use captured steps if possible; requests of one method share a step, each in its own slots. A request with prompt
   look-up has captured steps of several tokens while it decodes alone.
2. Requests with retrieval layers only share one call of the model, each with its own rows.
3. All others are called in turn.

The result of a request does not depend on the way, and an error in one request is that request's error.

A captured step may be replayed before the host has read its input tokens, so that the device does not wait for the host. If one
of them ends the request, its cache forgets the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.families import changing_rotary
from kvrecall.backends.transformers.multi_request import JointCache, NotTogetherError
from kvrecall.core.errors import CaptureError, DeviceMemoryError, InterruptedPassError
from kvrecall.engine.decoding import Decoding
from kvrecall.engine.exact import ExactDecoding
from kvrecall.engine.generate_args import GenerateArgs
from kvrecall.engine.lookup import LookupDecoding

_ALONE_STEPS = 4
"""A request that is alone again makes this many uncaptured steps before it is captured again."""

_NO_MEMORY = torch.OutOfMemoryError, DeviceMemoryError
"""Errors of a member in a call for several, alone in which it may have memory."""
_apart: WeakSet[Any] = WeakSet()
"""Models that refused a call with rows of several requests."""

Logits = Tensor | Exception
"""`[B, vocabulary]` of one request, or its error; after an error its cache is as before the step."""


class Member:
    """One decoding request."""

    def __init__(self, args: GenerateArgs, decoding: Decoding) -> None:
        """Raises CaptureError if capture is required and impossible."""
        self.args, self.decoding = args, decoding
        self.captured = _captured_steps(args)
        """Captured steps of its cache (`CapturedSteps`); None if they are refused or impossible."""
        self._uncaptured = 0
        """Steps to make before the next capture."""
        self.ahead: Logits | None = None
        """The result of the next step, if it was launched ahead."""
        self.apart = False
        """Whether its steps are not captured together with others."""
        self._lost: Exception | None = None
        """The error if the cache could not be restored after an interrupted step."""

    def first(self) -> Tensor:
        """Reads the tokens of the prompt that the cache does not hold; logits `[B, vocabulary]`."""
        with self.args.computing(), torch.no_grad():
            return self.decoding.read()

    def replayed(self) -> Tensor | None:
        """A captured step; None if impossible."""
        made, self.ahead = self.ahead, None
        if isinstance(made, Exception):
            raise made
        if made is not None or self.captured is None:
            return made
        if self._uncaptured:
            self._uncaptured -= 1
            return None
        with self.args.computing(), _decoding_modules(self.decoding.model):
            if isinstance(self.decoding, LookupDecoding):
                return self.decoding.captured(self.captured)
            return self.captured.step(self.last_tokens, self.decoding.reserve_tokens)

    def stepped(self) -> Tensor:
        """A step of a request that decodes alone."""
        logits = self.replayed()
        return self.alone() if logits is None else logits

    def alone(self) -> Tensor:
        """A call of the model for this request."""
        with self.args.computing(), torch.no_grad(), _decoding_modules(self.decoding.model):
            return self.decoding.step()

    @property
    def shares(self) -> bool:
        """Whether its steps can be captured together with those of others."""
        if self._lost is not None or self.captured is None or self.apart or not self.args.shares_steps:
            return False
        return self.captured.ready

    @property
    def joins(self) -> bool:
        """Whether it can share a call with others."""
        model = self.decoding.model
        if self._lost is not None or model in _apart or changing_rotary(model.config) is not None:
            return False
        return self.decoding.joinable

    def checked(self) -> Tensor:
        """A check of its drafts, alone. Captured steps go on behind it."""
        self.release()
        self._uncaptured = 0
        with self.args.computing(), torch.no_grad():
            return self.exact_decoding.check()

    @property
    def exact_decoding(self) -> ExactDecoding:
        """Its decoding, whose answer is checked."""
        assert isinstance(self.decoding, ExactDecoding)
        return self.decoding

    def own(self, call: Callable[[], Tensor]) -> Logits:
        """The result or error of a call for this member only."""
        if self._lost is not None:
            return self._lost
        try:
            return call()
        except Exception as error:
            return error

    def release(self) -> None:
        """Ends captured decoding and gives the cache back to the request."""
        if self.captured is not None:
            self._uncaptured = _ALONE_STEPS
            self.captured.close()
        if self.ahead is not None:
            self.ahead = None
            self._cut_back()

    def rewind(self, drafts: bool = False) -> None:
        """Restores the cache after an interrupted step. If that fails, the next step raises the reason. drafts: removes them,
        too."""
        try:
            self.release()
            if drafts:
                self.decoding.take_back()
            self._cut_back()
        except Exception as error:
            self._lost = error

    def _cut_back(self) -> None:
        """Cuts the cache to the accepted tokens without the last one. Raises InterruptedPassError if some are missing."""
        cache = self.decoding.cache
        cache.align()
        more = cache.get_seq_length() - self.decoding.stored
        if more > 0:
            cache.crop(-more)
        elif more < 0:
            raise InterruptedPassError(cache.get_seq_length())

    @property
    def runner(self) -> Any:
        """The graph runner of its captured steps, None without any."""
        return None if self.captured is None or self.captured.refused else self.captured.runner

    def go_on_captured(self, runner: Any = None) -> None:
        """Its next step is captured, by another runner if one is given, which its cache then joins."""
        if runner is not None and self.captured.runner is not runner:
            self.release()
            self.captured.runner = runner
        self._uncaptured = 0

    @property
    def last_tokens(self) -> Tensor:
        """The tokens of the next step, int64 `[B, 1]` on the CPU."""
        return torch.tensor(self.decoding.steps[-1], dtype=torch.int64, device="cpu").unsqueeze(1)


class Stepper:
    """Chooses how each step is made."""

    def __init__(self) -> None:
        self._joint: JointCache | None = None
        self._runners: dict[Any, Any] = {}  # GraphRunner, by the key of its members

    def step(self, members: Sequence[Member], coming: Sequence[GenerateArgs] = ()) -> list[Logits]:
        """Feeds each member's last tokens. One entry per member, in order. coming: requests that will decode soon; a captured
        step has room for them.

        After KeyboardInterrupt and the like no member has made the step, and it can be repeated.
        """
        if not all(member.ahead is not None for member in members):  # a new member has come
            for member in members:
                if member.ahead is not None:
                    member.rewind()
                    member.go_on_captured()
        for member in members:
            if member.runner is not None and not member.args.looks_up:
                kind = _kind(member.args)
                member.runner.coming = sum(args.sequences for args in coming if args.shares_steps and _kind(args) == kind)
        checked = _to_check(members)
        others = [member for member in members if member not in checked]
        try:
            made = self._checked(checked) if checked else {}
            if others:
                found = _in_turn(others, captured=True) if len(others) == 1 else self._several(others)
                made.update(zip(map(id, others), found, strict=True))
            return [made[id(member)] for member in members]
        except BaseException:
            for member in members:
                member.rewind(drafts=True)
            raise

    def go_ahead(self, chosen: Sequence[tuple[Member, Tensor]]) -> None:
        """Replays the next step of all members, for tokens `[B]` of each on the device, if one replay suffices."""
        first, runner = chosen[0][0], chosen[0][0].runner
        if runner is None or not all(member.decoding.goes_on and member.runner is runner for member, _ in chosen):
            return
        found: Sequence[Logits] | None
        try:
            with first.args.computing(), _decoding_modules(first.decoding.model):
                found = runner.ahead(_inputs([(member, tokens.unsqueeze(1)) for member, tokens in chosen]))
        except (CaptureError, torch.OutOfMemoryError):  # every cache was given back; the next step handles it
            found = None
        except Exception as error:
            found = [error] * len(chosen)
        for (member, _), logits in zip(chosen, found or (), strict=False):
            member.ahead = logits

    def _several(self, members: Sequence[Member]) -> list[Logits]:
        groups: dict[Any, list[int]] = {}
        for number, member in enumerate(members):
            model, args = member.decoding.model, member.args
            if member.shares:
                key: Any = ("captured", id(model), *_kind(args))
            else:
                member.release()
                key = (id(model), args.autocast) if member.joins else number
            groups.setdefault(key, []).append(number)
        made: dict[int, Logits] = {}
        for key, numbers in groups.items():
            group = [members[number] for number in numbers]
            if isinstance(key, tuple) and key[0] == "captured":
                found = self._captured(key, group)
            else:
                found = self._together(group) if len(group) > 1 else _in_turn(group)
            made.update(zip(numbers, found, strict=True))
        return [made[number] for number in range(len(members))]

    def _captured(self, key: Any, group: list[Member]) -> list[Logits]:
        """Captured steps of members of one method; uncaptured if impossible."""
        if len(group) == 1 or all(member.ahead is not None for member in group):
            return _in_turn(group, captured=True)
        runner = self._runners.setdefault(key, group[0].runner)
        for member in group:
            member.go_on_captured(runner)
        try:
            with group[0].args.computing(), _decoding_modules(group[0].decoding.model):
                return runner.step(_inputs([(member, member.last_tokens) for member in group]))
        except (CaptureError, torch.OutOfMemoryError):  # every cache was given back
            for member in group:
                member.apart = True
                member.release()
            return self._together(group) if all(member.joins for member in group) else _in_turn(group)

    def _checked(self, members: list[Member]) -> dict[int, Logits]:
        """Checks of drafts, by the member's id: one call for all that can share one. If it fails, one call each."""
        together: dict[Any, list[Member]] = {}
        for member in members:
            member.release()
            together.setdefault(member.args.autocast if member.joins else id(member), []).append(member)
        made: dict[int, Logits] = {}
        for group in together.values():
            found = self._checked_together(group) if len(group) > 1 else [None] * len(group)
            for member, logits in zip(group, found, strict=True):
                made[id(member)] = member.own(member.checked) if logits is None else logits
        return made

    @staticmethod
    def reads_with_others(member: Member) -> bool:
        """Whether the last chunk of its prompt can share a call. A single token searches, as in `model.generate`."""
        return member.joins and (member.decoding.missing > 1 or member.decoding.exact)

    @staticmethod
    def read_together(group: Sequence[Member]) -> list[Logits | None]:
        """The last chunks of several prompts, whose first rows are shared, in one call; None for each for which it fails."""
        found = _attended_whole(group, lambda member: member.decoding.to_read())
        return [each[:, -1] if isinstance(each, Tensor) else each for each in found]

    def _checked_together(self, group: list[Member]) -> list[Logits | None]:
        """One call for all; None for each for which it fails."""

        def chunk(member: Member) -> Tensor:
            member.exact_decoding.begin_check()
            member.go_on_captured()
            return member.exact_decoding.to_check()

        return _attended_whole(group, chunk)

    def forget(self) -> None:
        """Releases all caches."""
        self._joint = None
        self._runners = {}

    def _together(self, group: list[Member]) -> list[Logits]:
        """One call for all. If the call fails, one call each, so that each request gets its own error."""
        caches = [member.decoding.cache for member in group]
        if self._joint is None or [id(x) for x in self._joint.members] != [id(x) for x in caches]:
            self._joint = JointCache(caches)
        joint = self._joint
        try:
            logits = _joint_call(group, joint)
        except Exception as error:
            if isinstance(error, NotTogetherError):
                _apart.add(group[0].decoding.model)
            self._joint = None
            joint.align()
            return _in_turn(group)
        failed = dict(joint.failed)
        joint.failed.clear()  # errors' frames would keep the joint cache alive
        return [failed.get(number, logits[rows]) for number, rows in enumerate(joint.rows)]


def _kind(args: GenerateArgs) -> tuple[Any, ...]:
    """What requests of one model have in common that can share a captured step."""
    return args.autocast, args.compiled, args.cache.method


def _joint_call(group: list[Member], joint: JointCache) -> Tensor:
    model = group[0].decoding.model
    tokens = [token for member in group for token in member.decoding.steps[-1]]
    positions = [position for member in group for position in member.decoding.positions()]
    rows = torch.tensor([tokens, positions], device=model.device, dtype=torch.int64).unsqueeze(-1)
    with group[0].args.computing(), torch.no_grad(), _decoding_modules(model):
        outputs = model(input_ids=rows[0], position_ids=rows[1], **cache_argument(joint), use_cache=True, return_dict=True)
    return outputs.logits[:, -1]


def _attended_whole(group: Sequence[Member], chunk: Callable[[Member], Tensor]) -> list[Logits | None]:
    """Full attention of a chunk of each member in one call, which reads rows that they share once: logits
    `[B, T, vocabulary]`. None for all if the call fails, and for those that had no memory in it; their caches have not changed.

    chunk: of a member, ids and their positions, int64 `[2, B, T]`.
    """
    model, joint = group[0].decoding.model, None
    try:
        chunks = [chunk(member) for member in group]
        counts = [each.shape[2] for each in chunks]
        joint = JointCache([member.decoding.cache for member in group], counts)
        padded = [torch.nn.functional.pad(each, (0, max(counts) - each.shape[2])) for each in chunks]
        ids, positions = torch.cat(padded, 1).to(model.device)
        with ExitStack() as reading, group[0].args.computing(), torch.no_grad():
            for cache in joint.members:
                reading.enter_context(cache.reading_prompt())
            inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, **cache_argument(joint)}
            logits: Tensor = model(**inputs, use_cache=True, return_dict=True).logits
        failed = {number: None if isinstance(error, _NO_MEMORY) else error for number, error in joint.failed.items()}
        parts = zip(joint.rows, counts, strict=True)
        return [failed.get(number, logits[rows, :count]) for number, (rows, count) in enumerate(parts)]
    except Exception as error:
        if isinstance(error, NotTogetherError):
            _apart.add(model)
        if joint is not None:
            joint.align()
        return [None] * len(group)
    finally:
        if joint is not None:
            joint.failed.clear()  # errors' frames would keep the caches alive


def _to_check(members: Sequence[Member]) -> list[Member]:
    """The members whose drafts are checked now: those that have drafted enough, and those that share rows with one of them. A
    member that draws its tokens has checks of its own, because they take random numbers."""
    exact = [member for member in members if isinstance(member.decoding, ExactDecoding)]
    due = [member for member in exact if member.exact_decoding.checks]
    shared = {first_block(member.args) for member in due} - {None}
    early = [member for member in exact if member.exact_decoding.drafted and not member.decoding.samples]
    return [member for member in exact if member in due or (member in early and first_block(member.args) in shared)]


def first_block(args: GenerateArgs) -> tuple[int, int] | None:
    """What only sequences with the same first rows have; None for a cache of several sequences, or without blocks."""
    tables = args.cache.tables
    return tables[0].beginning if tables and len(tables) == 1 else None


def _in_turn(group: Sequence[Member], captured: bool = False) -> list[Logits]:
    return [member.own(member.stepped if captured else member.alone) for member in group]


def _inputs(tokens: Sequence[tuple[Member, Tensor]]) -> list[Any]:
    """What a graph runner takes, for tokens int64 `[B, 1]` of each member."""
    from kvrecall.backends.transformers.capture.runner import StepInput

    return [StepInput(member.args.cache, own, member.decoding.reserve_tokens) for member, own in tokens]


def _captured_steps(args: GenerateArgs) -> Any:
    if args.capture is False or args.model.device.type != "cuda":
        return None
    from kvrecall.backends.transformers.capture.runner import CapturedSteps

    width = 1 + (args.config.prompt_lookup_num_tokens if args.looks_up else 0)
    return CapturedSteps(args.model, args.cache, bool(args.capture), args.compiled, width)


def _decoding_modules(model: Any) -> AbstractContextManager[Any]:
    """transformers' context for decoding, which replaces experts by ones for single tokens."""
    return getattr(model, "_optimize_model_for_decode", nullcontext)()
