"""The suite: how each sample is made, answered under every condition, and scored."""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import context_limit
from kvrecall.core.errors import ContextLengthError, ParameterError
from kvrecall.engine.prompts import DocumentPrompt, chat_prompt, next_turn
from kvrecall.evaluate import drift
from kvrecall.evaluate.asking import Asker, Conversation, costs
from kvrecall.evaluate.plan import Batch, Condition, Plan, Sample, batches, share
from kvrecall.evaluate.problems import FORMATS, Problem, is_drift, read_problems
from kvrecall.evaluate.runs import Record, RunFolder, key_of
from kvrecall.evaluate.summary import Row
from kvrecall.evaluate.tasks import KNOWN, Room, Task, Turn, generated

Cell = tuple[str, int | None, str]
"""Task, context and label of a condition; one row of a run's summary."""
OnError = Callable[[str, Exception], None]
_LEAST_TOKENS = 64
"""Least tokens of a document."""
_LEAST_OF_DRIFT = 128
"""Least tokens of a prompt of whole sentences."""
_LONGEST_NEEDED = 1 << 16
"""Largest context that is tried, in tokens; the largest argument of any task needs fewer."""


@dataclass
class Suite:
    """A plan for a model under conditions. batch_tokens: see `plan.batches`. stop: ends long generation, see `drift.measure`.

    Raises before anything runs if a context is too long for the model or too short for a task.
    """

    plan: Plan
    asker: Asker
    conditions: list[Condition]
    batch_tokens: int = 0
    stop: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for spec in self.plan.tasks:
            if spec.partition(":")[0] in KNOWN:
                self._check_room(generated(spec))
            elif is_drift(spec):
                self._check_drift(spec)
        limit = context_limit(self.asker.model.config)
        if limit is None:
            return
        for spec in self.plan.tasks:
            if spec in self.problems:
                for number, prompt_tokens in enumerate(self._prompt_tokens[spec], 1):
                    tokens = prompt_tokens + self.plan.max_new_tokens
                    if tokens > limit:
                        raise ContextLengthError(f"{spec}, problem {number}, with --max-new-tokens", limit, tokens)
                continue
            steps = self.plan.steps if is_drift(spec) else 0
            if max(self.plan.contexts) + steps > limit:
                raise ContextLengthError(f"--context for {spec}", limit, max(self.plan.contexts) + steps)

    @cached_property
    def problems(self) -> dict[str, list[Problem]]:
        """Problems of the sets among the tasks."""
        return {spec: read_problems(spec, self.plan.seed) for spec in self.plan.tasks if spec.partition(":")[0] in FORMATS}

    @cached_property
    def _prompt_tokens(self) -> dict[str, list[int]]:
        """Tokens of every problem's prompt, by set."""
        tokenizer = self.asker.tokenizer
        return {spec: [len(chat_prompt(tokenizer, p.prompt)) for p in problems] for spec, problems in self.problems.items()}

    def counted_notes(self, rows: list[Row]) -> list[str]:
        """Notes after a run: conditions that attended to everything although the context is longer than they cover, because
        prompts are shorter than contexts. Once each."""
        most = {c.label: c.covered_tokens for c in self.conditions}
        places: dict[str, list[str]] = {}
        for row in rows:
            if row.context is None or not row.whole:
                continue
            longest = row.context + (self.plan.steps if is_drift(row.task) else 0)
            if longest > most.get(row.condition, longest):
                places.setdefault(row.condition, []).append(f"{row.task} at {row.context:,} tokens")
        return [f"{label}: attended to all of {', '.join(where)}, as full attention does" for label, where in places.items()]

    def notes(self) -> list[str]:
        """Notes before a run: conditions that are full attention at some context, once each. See also `counted_notes`."""
        covers = ((c.label, " and ".join(self._covered(c.covered_tokens))) for c in self.conditions[1:])
        return [f"{label}: covers {parts} whole, so it is full attention there" for label, parts in covers if parts]

    def _covered(self, most: int) -> Iterator[str]:
        """Parts of the plan that a condition attends to completely, if it does so up to `most` tokens."""
        plan = self.plan
        drifts = [spec for spec in plan.tasks if is_drift(spec)]
        contexts = [f"{c:,}" for c in plan.contexts if c <= most]
        if contexts and len(drifts) + len(self.problems) < len(plan.tasks):
            yield f"contexts of {', '.join(contexts)} tokens"
        lasting = [f"{c:,} + {plan.steps:,}" for c in plan.contexts if c + plan.steps <= most]
        if lasting and drifts:
            yield f"drift of {', '.join(lasting)} tokens"
        sets = [spec for spec, counts in self._prompt_tokens.items() if max(counts) <= most]
        if sets:
            longest = max(max(self._prompt_tokens[spec]) for spec in sets) + plan.max_new_tokens
            until = f" (with solutions up to {most:,} tokens in all)" if longest > most else ""
            yield f"the prompts of {', '.join(sets)}{until}"

    def samples(self) -> Iterator[Sample]:
        """Every sample, in the order in which they run."""
        plan = self.plan
        for spec in plan.tasks:
            if spec in self.problems:
                for number in range(len(self.problems[spec])):
                    yield from (Sample(spec, None, number, attempt) for attempt in range(plan.attempts))
            elif is_drift(spec):
                texts = 1 if ":" in spec else plan.samples  # a file is one sample
                yield from (Sample(spec, context, number, 0) for context in plan.contexts for number in range(texts))
            else:
                for context in plan.contexts:
                    yield from self._samples_of(generated(spec), context)

    def _samples_of(self, task: Task, context: int) -> Iterator[Sample]:
        """Samples of a generated task. Depths repeat, so that a run with fewer samples is the beginning of one with more."""
        depths = self.plan.depths if task.depths else (None,)
        numbered = enumerate(depth for _ in range(self.plan.samples) for depth in depths)
        yield from (Sample(task.spec, context, number, 0, depth) for number, depth in numbered)

    def run(self, folder: RunFolder, *callbacks: Any, **named_callbacks: Any) -> None:
        """As `pieces`, to the end."""
        for _ in self.pieces(folder, *callbacks, **named_callbacks):
            pass

    def missing(self, folder: RunFolder) -> Counter[Cell]:
        """Number of missing samples of this process's share, by (task, context, label of the condition)."""
        batches = share(self.batches(), folder.shard)
        samples = ((sample, c) for batch in batches for c in batch.conditions for sample in batch.samples)
        return Counter((sample.task, sample.context, c.label) for sample, c in samples if sample.key(c) not in folder.done)

    def batches(self) -> list[Batch]:
        """All batches, of all processes."""
        return list(batches(self.samples(), self.conditions, self.batch_tokens))

    def pieces(
        self,
        folder: RunFolder,
        on_progress: Callable[[int, int, str], None] | None = None,
        on_error: OnError | None = None,
        on_record: Callable[[Record], None] | None = None,
    ) -> Iterator[float]:
        """Runs the missing samples of this process's share; every finished sample is stored at once. Before each batch
        it yields the share of finished ones, in [0, 1), and may be closed.

        on_progress: called with (samples done, samples in all, what runs now); a sample is one answer under one condition.
        on_error: called with what ran and its error, then the run continues with the next condition; without it the error ends
        the run. on_record: called with each stored record. Raises FolderInUseError while another process writes the same share.
        """
        batches = share(self.batches(), folder.shard)
        with folder.claimed():
            total = sum(len(batch.keys) for batch in batches)
            done = total - sum(len(folder.missing(batch.keys)) for batch in batches)
            report = on_progress or (lambda *_: None)
            for number, batch in enumerate(batches):
                # A batch is answered completely if any sample is missing, because another batch could round differently.
                missing = [c for c in batch.conditions if folder.missing(sample.key(c) for sample in batch.samples)]
                if not missing:
                    continue
                yield number / len(batches)
                sample = batch.samples[0]
                where = sample.task if sample.context is None else f"{sample.task} {sample.context:,}"
                report(done, total, where)
                for record in self.answer(batch.samples, missing, on_error):
                    if key_of(record) not in folder.done:
                        folder.add(record)
                        done += 1
                        report(done, total, where)
                        if on_record is not None:
                            on_record(record)

    def answer(
        self, samples: tuple[Sample, ...], missing: list[Condition], on_error: OnError | None = None
    ) -> Iterator[Record]:
        """Records of samples that are answered together, under the conditions. on_error: see `pieces`."""
        sample = samples[0]

        @contextmanager
        def reported(label: str) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                if on_error is None:
                    raise
                on_error(f"{sample.task} at {sample.context}, sample {sample.number}, {label}", error)

        if is_drift(sample.task):
            with reported("all conditions"):
                yield from self._drift(sample, missing)
            return
        answer = None
        with reported("the prompt"):  # shared work, before the first condition
            problems = self.problems.get(sample.task)
            answer = self._ask(samples, missing) if problems is None else self._solve(sample, problems[sample.number])
        if answer is None:
            return
        for condition in missing:
            with reported(condition.label):
                yield from answer(condition)

    def _draw(self, sample: Sample) -> random.Random:
        return random.Random(f"{self.plan.seed}/{sample.task}/{sample.context}/{sample.number}")

    def _ask(self, samples: tuple[Sample, ...], missing: list[Condition]) -> Callable[[Condition], list[Record]]:
        """Reads the samples of one task and context once; returns a function that answers them under a condition."""
        task, context = generated(samples[0].task), samples[0].context
        assert context is not None
        prompts, turns = self.prompts(samples)
        readings = self.asker.read(prompts, missing, context)

        def answer(condition: Condition) -> list[Record]:
            cache = readings.fork(condition)
            if task.turns > 1:
                answers = [self.asker.converse(readings, cache, turns[0], task.answer_tokens)]
            else:
                answers = self.asker.answer(readings, cache, task.answer_tokens)
            spent = costs(cache)
            return [
                sample.record(condition) | _scored(task, questions, answer) | spent
                for sample, questions, answer in zip(samples, turns, answers, strict=True)
            ]

        return answer

    def prompts(self, samples: Iterable[Sample]) -> tuple[list[list[int]], list[tuple[Turn, ...]]]:
        """Samples of generated tasks: token ids of each prompt, which ends with its first question, and all its questions."""
        prompts: list[list[int]] = []
        turns: list[tuple[Turn, ...]] = []
        for sample in samples:
            task = generated(sample.task)
            assert sample.context is not None
            document, questions = self._sample(task, sample, self._room_tokens(task, sample.context))
            prompt = DocumentPrompt.of(self.asker.tokenizer, document, task.instruction)
            prompts.append(prompt.ask(questions[0].question) + self.asker.ids(questions[0].opening))
            turns.append(questions)
        return prompts, turns

    def _sample(self, task: Task, sample: Sample, room_tokens: int) -> tuple[str, tuple[Turn, ...]]:
        """A sample's document, of at most `room_tokens` tokens, and its questions. Raises ParameterError if they do not fit."""
        return task.make(Room(self.asker.count, room_tokens), self._draw(sample), 0.5 if sample.depth is None else sample.depth)

    def _room_tokens(self, task: Task, context: int) -> int:
        """Tokens for the document: the context minus template, questions and answers."""
        tokenizer = self.asker.tokenizer
        frame = len(DocumentPrompt.of(tokenizer, "", task.instruction).ask(""))
        frame += (task.turns - 1) * len(next_turn(tokenizer, ""))
        return context - frame - task.turns * (task.question_tokens + task.answer_tokens)

    def _check_room(self, task: Task) -> None:
        """Raises ParameterError, with the needed context, if one of the plan's contexts is too short for a task."""
        for context in sorted(self.plan.contexts):
            first = next(self._samples_of(task, context))
            # If half the room is enough for one sample, the whole room is enough for all, here and at longer contexts.
            if self._fits(task, [first], self._room_tokens(task, context) // 2):
                return
            if not self._fits(task, self._samples_of(task, context), self._room_tokens(task, context)):
                remedy = "Documents, questions and answers need room."
                raise ParameterError("--context", f"{self._needed(task, context)} tokens for {task.spec}", context, remedy)

    def _check_drift(self, spec: str) -> None:
        """Raises ParameterError if the prompt, or a given text, is too short."""
        has_text, shortest = ":" in spec, min(self.plan.contexts)
        least = 2 if has_text else _LEAST_OF_DRIFT
        if shortest < least:
            raise ParameterError("--context", f"at least {least} tokens for {spec}", shortest, "The context is the prompt.")
        if has_text:
            drift.prompt_of(spec, self.asker.tokenizer, max(self.plan.contexts), self.plan.steps, random.Random())

    def _fits(self, task: Task, samples: Iterable[Sample], room_tokens: int) -> bool:
        if room_tokens < _LEAST_TOKENS:
            return False
        try:
            for sample in samples:
                self._sample(task, sample, room_tokens)
        except ParameterError:
            return False
        return True

    def _needed(self, task: Task, context: int) -> str:
        """The shortest context in which all samples fit, by search, because names and numbers, and so lengths, depend on the
        context."""

        def fits(tokens: int, samples: int | None = None) -> bool:
            return self._fits(task, islice(self._samples_of(task, tokens), samples), self._room_tokens(task, tokens))

        def least(low: int, high: int, samples: int | None = None) -> int:
            return low + 1 + bisect_left(range(low + 1, high), True, key=lambda tokens: fits(tokens, samples))

        high = context
        while not fits(high, 1):
            if high > _LONGEST_NEEDED:
                return f"more than {high:,}"
            high *= 2
        # First with one sample, because counting the tokens of all takes long.
        high = least(context - 1, high, 1)
        low = high - 1
        while not fits(high):
            low, high = high, high + max(1, high // 64)
        return f"at least {least(low, high):,}"

    def _solve(self, sample: Sample, problem: Problem) -> Callable[[Condition], list[Record]]:
        """Returns a function that solves the problem under a condition."""
        ids = chat_prompt(self.asker.tokenizer, problem.prompt)
        # The same random draws under every condition.
        draw = hashlib.sha256(f"{self.plan.seed}/{sample.task}/{sample.number}/{sample.attempt}".encode())
        seed = int.from_bytes(draw.digest()[:4])

        def solve(condition: Condition) -> list[Record]:
            cache = RetrievalCache(self.asker.model.config, condition.method, host_rows=self.asker.host_rows)
            cache.tokenizer = self.asker.tokenizer
            sampling = {"temperature": self.plan.temperature, "top_p": self.plan.top_p, "seed": seed, "capture": None}
            result = self.asker.generate(self.asker.tensor(ids), cache, self.plan.max_new_tokens, **sampling)
            assert result.texts is not None
            answer = problem.extract(result.texts[0])
            record = {
                "score": float(problem.same(answer)), "answers": result.texts, "given": answer, "expected": [[problem.answer]],
                "prompt_tokens": len(ids), "new_tokens": len(result.new_tokens[0]),
            }  # fmt: skip
            spent = costs(cache) | _seconds(result.prefill_seconds, result.decode_seconds)
            return [sample.record(condition) | record | spent]

        return solve

    def _drift(self, sample: Sample, missing: list[Condition]) -> list[Record]:
        assert sample.context is not None
        plan = self.plan
        prompt, forced = drift.prompt_of(sample.task, self.asker.tokenizer, sample.context, plan.steps, self._draw(sample))
        sizes = {"steps": plan.steps, "window": plan.window}
        measured = drift.measure(self.asker, prompt, missing, **sizes, forced=forced, stop=self.stop)
        drifts = [(condition, measured[condition.label]) for condition in missing]
        return [sample.record(condition) | result.to_dict() for condition, result in drifts if result.windows]


def _scored(task: Task, turns: tuple[Turn, ...], answers: Conversation) -> Record:
    scores = [task.score(text, turn) for text, turn in zip(answers.texts, turns, strict=True)]
    return {
        "score": sum(scores) / len(scores), "scores": scores, "answers": answers.texts,
        "expected": [list(turn.answers) for turn in turns], "prompt_tokens": answers.prompt_tokens,
        "new_tokens": answers.new_tokens,
    } | _seconds(answers.prefill_seconds, answers.decode_seconds)  # fmt: skip


def _seconds(prefill: float, decode: float) -> Record:
    return {"seconds": {"prefill": round(prefill, 4), "decode": round(decode, 4)}}
