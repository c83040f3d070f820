"""The loop of one model: admit requests, read a chunk of a prompt, make one decode step for all, remove finished requests.

The loop has no thread. A thread that waits for a request becomes the driver if there is none. It works piece by piece until its
own request is done; then another waiting thread continues. A request's callbacks (`on_token`, …) are called by the thread that
waits for it, between two pieces of work, while others may drive.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers import attach
from kvrecall.backends.transformers.capture.ranks import ranks_of
from kvrecall.backends.transformers.families import changing_rotary
from kvrecall.backends.transformers.owner import step
from kvrecall.core.cuda import HostCopy
from kvrecall.core.errors import CaptureError, ParameterError, RequestCancelledError
from kvrecall.engine.job import Job
from kvrecall.engine.memory import fits, refuse_too_large
from kvrecall.engine.steps import Stepper

_TOGETHER = 1024
"""Most tokens of a call that reads the ends of several prompts, rows times length: it gives logits of each."""
_lock = threading.Lock()
_loops: WeakKeyDictionary[PreTrainedModel, Loop] = WeakKeyDictionary()


def loop_of(model: PreTrainedModel) -> Loop:
    """The loop of a model, the same for all threads."""
    with _lock:
        loop = _loops.get(model)
        if loop is None:
            loop = _loops[model] = Loop(model)
        return loop


class Loop:
    """Requests in flight on one model. Holds the model only while there are any."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.max_sequences = 16
        self._model = ref(model)
        self._changed = threading.Condition(threading.RLock())
        """Guards the attributes below. The driver works on jobs without it."""
        self._waiting: list[Job] = []
        self._active: list[Job] = []
        self._driver: int | None = None
        """The current driver thread."""
        self._listeners: list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = []
        """Waiting tasks, by event loop."""
        self._served: list[asyncio.AbstractEventLoop] = []
        """Event loops with a worker thread."""
        self._attached = ExitStack()
        self._stepper = Stepper()
        self._step_next = False
        self._stream: Any = None

    def submit(self, job: Job) -> None:
        """Adds a request. Raises ParameterError if it cannot run together with those in flight."""
        args = job.args
        if args.model.device.type == "cuda":  # earlier work of the calling thread comes first
            job.ready = torch.cuda.current_stream(args.model.device).record_event()
        with self._changed:
            others = [*self._waiting, *self._active]
            if any(other.args.cache is args.cache for other in others):
                remedy = "Wait for that one, or give each request a fork()."
                raise ParameterError("cache", "a cache that no other request uses", "one of a request in flight", remedy)
            if others and _of_several_ranks(args.model):
                remedy = "Wait for its result first: ranks cannot agree on the order of several."
                raise ParameterError("model", "one request at a time on a sharded model", "another in flight", remedy)
            self._waiting.append(job)
            self._tell()

    # Waiting and driving.

    def wait(self, job: Job, until: Callable[[], bool]) -> None:
        """Waits until `until()` is true, which work on `job` will make true; drives if nobody does.

        An exception in this thread, from a callback or KeyboardInterrupt, cancels the request, and is raised when the loop has
        released it.
        """
        try:
            while True:
                job.deliver()
                with self._changed:
                    if until():
                        break
                    if self.drives_here():
                        got = "one inside a step of the same model"
                        remedy = "Ask from outside the model's own modules and hooks."
                        raise ParameterError("generate", "a call outside the model's steps", got, remedy)
                    if self._driver is not None:
                        self._changed.wait()
                        continue
                self._drive(job, lambda: until() or bool(job.events))
        except BaseException:
            self.cancel(job)
            self._wait_for_end(job)
            raise
        self._go_behind(job)

    def _go_behind(self, job: Job) -> None:
        """Makes this thread's later GPU work wait for the loop's work."""
        if self._stream is not None:
            torch.cuda.current_stream(job.args.model.device).wait_stream(self._stream)

    def cancel(self, job: Job) -> None:
        """Releases the request: at once if nobody drives, else after the current piece of work."""
        job.cancelled = True
        self._drive(job, lambda: True)

    def abandon(self, job: Job) -> None:
        """As `cancel`, from a finaliser, which may run at any moment, so it takes no lock."""
        job.cancelled = True
        if not job.ended and self._changed.acquire(blocking=False):
            try:
                idle = self._driver is None
            finally:
                self._changed.release()
            if idle:
                self._drive(job, lambda: True)

    def _wait_for_end(self, job: Job) -> None:
        with self._changed:
            while not job.ended and self._driver not in (None, threading.get_ident()):
                self._changed.wait()
        if not job.ended:
            self._drive(job, lambda: True)

    def drives_here(self) -> bool:
        """Whether this thread is the driver."""
        return self._driver == threading.get_ident()

    def _drive(self, own: Job | None, until: Callable[[], bool]) -> None:
        """Releases cancelled requests, and works until `until()` is true, unless another thread drives.

        own: this thread's request.
        """
        began = False
        try:
            with self._changed:
                if self._driver is not None:
                    return
                self._driver, began = threading.get_ident(), True
            with self._computing():
                self._sweep()
            while not until():
                self._work(own)
                with self._changed:
                    self._tell()
        finally:
            if began:
                with deferred_interrupt(), self._changed:
                    self._driver = None
                    self._tell()
        if any(job.cancelled for job in [*self._active, *self._waiting]):  # cancelled while this thread was about to stop
            self._drive(own, lambda: True)

    def _tell(self) -> None:
        """Wakes all waiting threads and tasks."""
        self._changed.notify_all()
        for loop, listener in self._listeners:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(listener)

    # The same for tasks of asyncio.

    async def wait_async(self, job: Job, until: Callable[[], bool]) -> None:
        """As `wait`, for a task: one worker thread per event loop drives while any of its tasks waits."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        listener = (loop, woken.set)
        with self._changed:
            self._listeners.append(listener)
        try:
            while True:
                job.deliver()
                with self._changed:
                    if until():
                        return self._go_behind(job)
                    serve = loop not in self._served
                    if serve:
                        self._served.append(loop)
                if serve:
                    self._start_serving(loop)
                await woken.wait()
                woken.clear()
        except BaseException:
            self.cancel(job)
            raise
        finally:
            with self._changed:
                self._listeners.remove(listener)
                self._tell()

    def _start_serving(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_in_executor(None, self._serve, loop)
        except RuntimeError:  # the event loop shuts down
            with self._changed:
                self._served.remove(loop)
            raise

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drives for the tasks of an event loop until none of them waits."""

        def idle() -> bool:
            return not any(each is loop for each, _ in self._listeners) or not (self._waiting or self._active)

        try:
            while True:
                with self._changed:
                    if idle():
                        return
                    if self._driver is not None:
                        self._changed.wait()
                        continue
                self._drive(None, idle)
        finally:
            with self._changed:
                self._served.remove(loop)
                self._tell()

    # The work, by the driver only.

    def _work(self, own: Job | None) -> None:
        """One piece: admits, then reads one chunk of a prompt or makes one decode step, in turn."""
        try:
            with self._computing():
                with self._signals(own, [*self._active, *self._waiting]):
                    self._sweep()
                    self._admit()
                reading = [job for job in self._active if not job.decodes]
                decoding = [job for job in self._active if job.decodes]
                if decoding and (self._step_next or not reading):
                    self._step_next = False
                    with self._signals(own, decoding), step([job.args.cache for job in decoding]):
                        self._step(decoding)
                elif reading:
                    self._step_next = True
                    reading = _beside(reading)
                    with self._signals(own, reading), step([job.args.cache for job in reading]):
                        self._read(reading)
        except Exception as error:  # an error of the loop itself must end all waiting
            for job in [*self._active, *self._waiting]:
                self._end(job, error)

    @staticmethod
    def _signals(own: Job | None, jobs: Sequence[Job]) -> AbstractContextManager[None]:
        """Defers this thread's signals while it works for other requests."""
        return nullcontext() if all(job is own for job in jobs) else deferred_interrupt()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """Context for work on the model's device, after the last driver's launches."""
        model = self._model()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))  # another thread may continue with these tensors
            stack.enter_context(torch.no_grad())
            if model is not None and model.device.type == "cuda":
                stack.enter_context(torch.cuda.device(model.device))
                stream = torch.cuda.current_stream()
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            yield

    def _sweep(self) -> None:
        for job in [*self._active, *self._waiting]:
            if job.cancelled:
                self._end(job, RequestCancelledError())

    def _admit(self) -> None:
        """Admits requests, first come, first served, while there is room."""
        while self._waiting:
            job = self._waiting[0]
            try:
                if not self._may_enter(job):
                    return
                if not self._active:
                    self._attached.enter_context(attach(job.args.model, capture=False))
                job.admit()
            except Exception as error:
                self._end(job, error)
                continue
            with self._changed:
                self._waiting.remove(job)
                self._active.append(job)

    def _may_enter(self, job: Job) -> bool:
        if job.ready is not None:
            job.ready.wait()
            job.ready = None
        job.prepare()
        if not self._active:
            return True  # a request that does not fit alone raises its own error
        others = [each.args for each in self._active]
        refuse_too_large(job.args, others)
        if sum(each.sequences for each in (job.args, *others)) > self.max_sequences:
            return False
        return not any(map(_alone, (job.args.model, others[0].model))) and fits(job.args, others)

    def _read(self, jobs: list[Job]) -> None:
        """Reads the next chunk of a prompt, or the last ones of several."""
        together = [job for job in jobs if self._joins(job)] if len(jobs) > 1 else []
        if len(together) > 1:
            return self._read_together(together)
        job = jobs[0]
        try:
            logits = job.read()
            if logits is not None:
                self._accept([(job, logits)])
        except Exception as error:
            self._end(job, error)

    def _joins(self, job: Job) -> bool:
        """Whether the end of its prompt can share a call."""
        try:
            job.apart = not self._stepper.reads_with_others(job.begin())
        except Exception:  # it says so when it reads alone
            job.apart = True
        return not job.apart

    def _read_together(self, jobs: list[Job]) -> None:
        """Reads the ends of several prompts by one call; those for which it fails are read alone later."""
        try:
            found = self._stepper.read_together([job.begin() for job in jobs])
        except BaseException:
            for job in jobs:
                job.begin_again()
            raise
        made = list[tuple[Job, Tensor]]()
        for job, logits in zip(jobs, found, strict=True):
            if logits is None:
                job.apart = True
            elif isinstance(logits, Exception):
                self._end(job, logits)
            else:
                job.read_last()
                made.append((job, logits))
        self._accept(made)

    def _step(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if self._same_model(job)]
        if not jobs:
            return
        members = [job.member for job in jobs if job.member is not None]
        made = []
        coming = [job.args for job in self._active if not job.decodes]
        for job, logits in zip(jobs, self._stepper.step(members, coming), strict=True):
            if isinstance(logits, Exception):
                self._end(job, logits)
            else:
                made.append((job, logits))
        self._accept(made)

    def _same_model(self, job: Job) -> bool:
        """Whether the model computes as when it read the prompt, which captured steps would not notice; else ends the job."""
        model = self._model()
        try:
            if model is not None:
                job.args.cache.meet(model)
        except Exception as error:
            self._end(job, error)
            return False
        return True

    def _accept(self, made: list[tuple[Job, Tensor]]) -> None:
        """Chooses the next tokens of each request, waits for the device once, and ends complete requests. If no request is
        waiting, the next step is launched before the tokens are waited for."""
        chosen: list[tuple[Job, Tensor]] = []
        for job, logits in made:
            try:
                assert job.member is not None
                chosen.append((job, job.member.decoding.choose(logits)))
            except Exception as error:
                self._end(job, error)
        if not chosen:
            return
        copy = HostCopy(torch.cat([each.to(chosen[0][1].device) for _, each in chosen]))
        if len(chosen) == len(self._active) and not self._waiting:
            self._stepper.go_ahead([(job.member, each) for job, each in chosen if job.member is not None])
        tokens = copy.wait()[0].tolist()  # later work goes on
        for job, each in chosen:
            own, tokens = tokens[: len(each)], tokens[len(each) :]
            try:
                if job.accept(own):
                    self._end(job, None)
            except Exception as error:
                self._end(job, error)

    def _end(self, job: Job, error: BaseException | None) -> None:
        """Releases a request in any state."""
        with deferred_interrupt():
            self._stepper.forget()
            job.finish(error)
            with self._changed:
                for jobs in (self._active, self._waiting):
                    if job in jobs:
                        jobs.remove(job)
                if not self._active:
                    self._attached.close()
                self._tell()


def _beside(reading: list[Job]) -> list[Job]:
    """The first request whose prompt is read, and those whose last chunk can be read with its own: prompts that begin with the
    same rows, such as questions about one document."""
    first, *others = reading
    jobs, longest = [first], first.missing
    for job in others if others and first.beside(first) else ():
        if job.beside(first) and (len(jobs) + 1) * max(longest, job.missing) <= _TOGETHER:
            jobs.append(job)
            longest = max(longest, job.missing)
    return jobs


def _alone(model: Any) -> bool:
    """Whether a model keeps state from one call to the next, so that requests must run one after another."""
    return changing_rotary(model.config) == "dynamic" or any(hasattr(part, "rope_deltas") for part in model.modules())


def _of_several_ranks(model: PreTrainedModel) -> bool:
    try:
        return ranks_of(model).size > 1
    except CaptureError:  # sharded in an unsupported way
        return True
