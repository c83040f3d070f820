"""The suite: which samples there are, and how each is made, answered under every condition, and scored."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from kvrecall.engine.prompts import DocumentPrompt, chat_prompt, next_turn
from kvrecall.errors import ContextLengthError, ParameterError, UnknownNameError
from kvrecall.evaluate import drift
from kvrecall.evaluate.asking import Asker, costs
from kvrecall.evaluate.conditions import Condition
from kvrecall.evaluate.problems import FORMATS, Problem, digest, read_problems
from kvrecall.evaluate.runs import Key, Record, RunFolder, key_of
from kvrecall.evaluate.tasks.base import Room, Task
from kvrecall.evaluate.tasks.registry import KNOWN, generated
from kvrecall.integrations.transformers import RetrievalCache

_LEAST_TOKENS = 64
"""Of a document; below this there is no haystack."""


@dataclass(frozen=True)
class Plan:
    """What to run. contexts: tokens of prompt and answers together, for generated tasks; of the prompt, for drift.

    samples: per task and context, and per depth for tasks with depths. depths: shares in [0, 1].
    attempts, temperature, top_p, max_new_tokens: for sets of problems. steps, window: of drift.
    """

    tasks: tuple[str, ...]
    contexts: tuple[int, ...] = (4096,)
    samples: int = 5
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    seed: int = 0
    attempts: int = 1
    temperature: float = 0.6
    top_p: float = 0.95
    max_new_tokens: int = 4096
    steps: int = 1024
    window: int = 256

    def __post_init__(self) -> None:
        for name in ("samples", "attempts", "max_new_tokens", "steps", "window"):
            if getattr(self, name) < 1:
                raise ParameterError(name, "an integer >= 1", getattr(self, name), "It is a count.")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ParameterError("depths", "shares in [0, 1]", depth, "0 is the start of the text, 1 its end.")
        for spec in self.tasks:
            name = spec.partition(":")[0]
            if name not in (*KNOWN, *FORMATS, drift.NAME):
                raise UnknownNameError("task", name, [*KNOWN, *FORMATS, drift.NAME])
            if name in KNOWN:
                generated(spec)
        for what, given in (("tasks", self.tasks), ("contexts", self.contexts), ("depths", self.depths)):
            if not given or len(set(given)) < len(given):
                raise ParameterError(what, "one or more, each once", list(given), "Remove the repetition, or name one.")

    def to_dict(self) -> dict[str, Any]:
        """For a run's configuration: the fields, and the hashes of the files that are read."""
        files = {spec: digest(spec) for spec in self.tasks if spec.partition(":")[2] and spec.partition(":")[0] not in KNOWN}
        return asdict(self) | ({"files": files} if files else {})


@dataclass(frozen=True)
class Job:
    """One sample, for all conditions. Context and depth are None where a task has none."""

    task: str
    context: int | None
    sample: int
    attempt: int
    depth: float | None = None

    def record(self, condition: Condition) -> Record:
        """The start of a sample's record."""
        own = {"task": self.task, "context": self.context, "sample": self.sample, "attempt": self.attempt}
        own |= {} if self.depth is None else {"depth": self.depth}
        return own | {"condition": condition.label, "method": condition.name, "budget": condition.budget}

    def key(self, condition: Condition) -> Key:
        """Tells this sample under a condition from all others."""
        return key_of(self.record(condition))


@dataclass
class Suite:
    """A plan for a model under conditions. Raises before anything runs if a context is too long for the model or too short
    for a task."""

    plan: Plan
    asker: Asker
    conditions: list[Condition]

    def __post_init__(self) -> None:
        for spec in self.plan.tasks:
            if spec.partition(":")[0] in KNOWN:
                self._room(generated(spec), min(self.plan.contexts))
        limit = self.asker.limit_tokens
        if limit is None:
            return
        for spec in self.plan.tasks:
            if spec in self.problems:
                for number, problem in enumerate(self.problems[spec], 1):
                    tokens = len(chat_prompt(self.asker.tokenizer, problem.prompt)) + self.plan.max_new_tokens
                    if tokens > limit:
                        raise ContextLengthError(f"{spec}, problem {number}, with --max-new-tokens", limit, tokens)
                continue
            steps = self.plan.steps if drift.is_drift(spec) else 0
            if max(self.plan.contexts) + steps > limit:
                raise ContextLengthError(f"--context for {spec}", limit, max(self.plan.contexts) + steps)

    @cached_property
    def problems(self) -> dict[str, list[Problem]]:
        """Problems of the sets among the tasks."""
        return {spec: read_problems(spec, self.plan.seed) for spec in self.plan.tasks if spec.partition(":")[0] in FORMATS}

    def notes(self) -> list[str]:
        """What a reader should know before: conditions that are full attention at some context."""
        found = []
        for condition in self.conditions[1:]:
            covered = [c for c in self.plan.contexts if condition.covers(c)]
            if covered and len(self.problems) < len(self.plan.tasks):
                lengths = ", ".join(f"{c:,}" for c in covered)
                found.append(f"{condition.label}: covers contexts of {lengths} tokens whole, so it is full attention there")
        return found

    def jobs(self) -> Iterator[Job]:
        """Every sample, in the order in which they run."""
        plan = self.plan
        for spec in plan.tasks:
            if spec in self.problems:
                for number in range(len(self.problems[spec])):
                    yield from (Job(spec, None, number, attempt) for attempt in range(plan.attempts))
            elif drift.is_drift(spec):
                texts = 1 if ":" in spec else plan.samples  # a given text is one sample
                yield from (Job(spec, context, number, 0) for context in plan.contexts for number in range(texts))
            else:
                depths = plan.depths if generated(spec).depths else (None,)
                for context in plan.contexts:
                    numbered = enumerate((depth, i) for depth in depths for i in range(plan.samples))
                    yield from (Job(spec, context, number, 0, depth) for number, (depth, _) in numbered)

    def run(self, folder: RunFolder, on_progress: Callable[[int, int, str], None] | None = None) -> None:
        """Runs what the folder does not hold yet; every finished sample is stored at once.

        on_progress: called with (samples done, samples in all, what runs now); a sample is one answer under one condition.
        """
        jobs = list(self.jobs())
        total = len(jobs) * len(self.conditions)
        done = total - len(folder.missing(job.key(c) for job in jobs for c in self.conditions))
        tell = on_progress or (lambda *_: None)
        for job in jobs:
            missing = [c for c in self.conditions if job.key(c) not in folder.done]
            if not missing:
                continue
            where = job.task if job.context is None else f"{job.task} {job.context:,}"
            tell(done, total, where)
            for record in self._answer(job, missing):
                folder.add(record)
                done += 1
                tell(done, total, where)

    def _answer(self, job: Job, missing: list[Condition]) -> Iterator[Record]:
        if job.task in self.problems:
            return self._solve(job, self.problems[job.task][job.sample], missing)
        draw = random.Random(f"{self.plan.seed}/{job.task}/{job.context}/{job.sample}")
        if drift.is_drift(job.task):
            assert job.context is not None
            return self._drift(job, job.context, draw, missing)
        return self._ask(job, generated(job.task), draw, missing)

    def _ask(self, job: Job, task: Task, draw: random.Random, missing: list[Condition]) -> Iterator[Record]:
        assert job.context is not None
        document, turns = task.make(self._room(task, job.context), draw, 0.5 if job.depth is None else job.depth)
        prompt = DocumentPrompt.of(self.asker.tokenizer, document, task.instruction)
        asked = prompt.ask(turns[0].question)
        readings = self.asker.read(prompt.prefix, missing, job.context)
        for condition in missing:
            cache = readings.fork(condition)
            said = self.asker.converse(cache, asked, turns, task.answer_tokens)
            scores = [task.score(text, turn) for text, turn in zip(said.texts, turns, strict=True)]
            yield job.record(condition) | {
                "score": sum(scores) / len(scores),
                "scores": scores,
                "answers": said.texts,
                "expected": [list(turn.answers) for turn in turns],
                "prompt_tokens": said.prompt_tokens,
                "new_tokens": said.new_tokens,
                **costs(cache),
                "seconds": {"prefill": round(said.prefill_seconds, 4), "decode": round(said.decode_seconds, 4)},
            }

    def _room(self, task: Task, context: int) -> Room:
        """The document gets what the context leaves beside the frame, the questions and the answers."""
        tokenizer = self.asker.tokenizer
        frame = len(DocumentPrompt.of(tokenizer, "", task.instruction).ask(""))
        frame += (task.turns - 1) * len(next_turn(tokenizer, ""))
        room = context - frame - task.turns * (task.question_tokens + task.answer_tokens)
        if room < _LEAST_TOKENS:
            expected = f"at least {context - room + _LEAST_TOKENS:,} tokens for {task.spec}"
            raise ParameterError("--context", expected, context, "Questions and answers need room beside the text.")
        return Room(self.asker.count, room)

    def _solve(self, job: Job, problem: Problem, missing: list[Condition]) -> Iterator[Record]:
        from kvrecall import engine

        ids = chat_prompt(self.asker.tokenizer, problem.prompt)
        # The same draws under every condition: what differs is the attention.
        seed = int.from_bytes(hashlib.sha256(f"{self.plan.seed}/{job.task}/{job.sample}/{job.attempt}".encode()).digest()[:4])
        for condition in missing:
            cache = RetrievalCache(self.asker.model.config, condition.method)
            result = engine.generate(
                self.asker.model, self.asker.tokenizer, self.asker.tensor(ids), cache, max_new_tokens=self.plan.max_new_tokens,
                chunk_tokens=self.asker.chunk_tokens, temperature=self.plan.temperature, top_p=self.plan.top_p, seed=seed,
            )  # fmt: skip
            assert result.texts is not None
            text = result.texts[0]
            yield job.record(condition) | {
                "score": float(problem.right(text)),
                "answers": [text],
                "given": problem.extract(text),
                "expected": [[problem.answer]],
                "prompt_tokens": len(ids),
                "new_tokens": len(result.new_tokens[0]),
                **costs(cache),
                "seconds": {"prefill": round(result.prefill_seconds, 4), "decode": round(result.decode_seconds, 4)},
            }

    def _drift(self, job: Job, context: int, draw: random.Random, missing: list[Condition]) -> Iterator[Record]:
        prompt, forced = drift.prompt_of(job.task, self.asker.tokenizer, context, self.plan.steps, draw)
        measured = drift.measure(
            self.asker, prompt, missing, steps=self.plan.steps, window=self.plan.window, forced=forced
        )  # fmt: skip
        for condition in missing:
            yield job.record(condition) | measured[condition.label].to_dict()
