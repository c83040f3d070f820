"""Does decoding leak? Resources of one process over thousands of decode steps and hundreds of calls of `engine.generate`.

    PYTHONPATH=src python3 -m benchmarks.leaks [--methods pariskv,quest] [--device cuda] [--out FILE.csv]

Per method, with a random model of two layers:
  steps     5,000 decode steps in one `attach` block; the cache is cut back every 50 steps, so that it does not grow
  generate  500 calls of `engine.generate`, each with a new cache; on a GPU every call captures its decode step
  captured  only on a GPU: 5,000 captured decode steps, 500 per call, with one cache

After each 50th of a run it counts resident memory (free heap given back first), Python objects that were not there before the
first run, file descriptors, threads, signal handlers that changed, registrations of attention, and on a GPU allocated, reserved
and used device memory.

The rule: the first half warms up. Over the second half, memory and objects must not grow: the median slope between all pairs
of samples, times the half's length, must stay below a tolerance (`TOLERANCES`). The others must not grow at all, and
signal handlers must be what they were before the first run. Exit code 1 if anything grows.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

SAMPLES = 50
PROMPT_TOKENS, NEW_TOKENS, KEPT_STEPS, CAPTURED_STEPS = 384, 8, 50, 500
METHODS = "full,exact,pariskv,prkv,ctkvr,louiskv,quest,magicpig,pqcache,retroinfer,shadowkv,h2o,streaming"

TOLERANCES = {
    "resident_bytes": 1 << 20,
    "objects": 100,
    "files": 0,
    "threads": 0,
    "handlers": 0,
    "registrations": 0,
    "device_allocated_bytes": 1 << 16,
    "device_reserved_bytes": 0,
    "device_used_bytes": 1 << 21,
}
"""How much each may grow over the second half of a run. resident_bytes: 400 bytes per step or 4 KB per call show; the heap of a
process that leaks nothing moves by some hundred KB. objects: the samples themselves are 25; some caches of Python grow late.
device_used_bytes: the driver hands out memory in pieces of 2 MiB."""


@dataclass(frozen=True)
class Finding:
    """One resource over one run. grown: over the second half, by the median slope."""

    method: str
    run: str
    repeats: int
    resource: str
    first: int
    halfway: int
    last: int
    grown: float
    tolerance: int

    @property
    def leaks(self) -> bool:
        """Whether it grew by more than it may."""
        return self.grown > self.tolerance


@dataclass
class Counter:
    """What one process holds. device: where the model computes."""

    device: torch.device
    handlers: dict[int, Any] = field(default_factory=lambda: _handlers())

    def __call__(self) -> dict[str, int]:
        """Name of resource -> how much of it is held now."""
        gc.collect()
        _give_back_heap()
        found = {
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
            "objects": len(gc.get_objects()),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": max(threading.active_count(), len(os.listdir("/proc/self/task"))),
            "handlers": sum(now != self.handlers[number] for number, now in _handlers().items()),
            "registrations": _registrations(),
        }
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            found["device_allocated_bytes"] = torch.cuda.memory_allocated()
            found["device_reserved_bytes"] = torch.cuda.memory_reserved()
            found["device_used_bytes"] = total - free
        return found


def measure(method: str, run: str, repeats: int, step: Callable[[int], object], count: Counter) -> list[Finding]:
    """Calls `step(i)` for i in 0 … repeats - 1 and says how each resource went."""
    marks = sorted({max(1, round(repeats * (i + 1) / SAMPLES)) for i in range(SAMPLES)})
    taken: list[tuple[int, dict[str, int]]] = []
    for i in range(repeats):
        step(i)
        if i + 1 in marks:
            taken.append((i + 1, count()))
    half = [(at, values) for at, values in taken if at * 2 >= repeats]
    findings = []
    for name in taken[0][1]:
        grown = slope([(at, values[name]) for at, values in half]) * (half[-1][0] - half[0][0])
        ends = taken[0][1][name], half[0][1][name], half[-1][1][name]
        if name == "handlers":
            grown = float(ends[2])
        elif TOLERANCES[name] == 0:
            # Counted exactly: one more at the end is one that was not given back.
            grown = float(ends[2] - ends[1])
        findings.append(Finding(method, run, repeats, name, *ends, grown, TOLERANCES[name]))
    return findings


def slope(points: list[tuple[int, int]]) -> float:
    """Median of the slopes between all pairs (Theil and Sen): a few outliers do not move it."""
    return (
        median((b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]) if len(points) > 1 else 0.0
    )


def _handlers() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _registrations() -> int:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    return sum(len(list(each().keys())) for each in (AttentionInterface, AttentionMaskInterface))


def _give_back_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def tiny_model(device: torch.device) -> Any:
    """A random Llama: 2 layers, 4 query heads, 2 KV heads of 64; bfloat16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=128,
        vocab_size=320, max_position_embeddings=8192, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    torch.nn.Module.to(model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None
    return model


def chosen_method(name: str) -> Any:
    """A method by name, with zones small enough that the prompt is searched."""
    from kvrecall.methods import registry

    return registry.get(name, **({} if name == "full" else {"sink_tokens": 16, "local_tokens": 64, "update_interval": 128,
                                                            "full_attention_threshold": 0}))  # fmt: skip


def runs(
    model: Any, method: Any, sizes: argparse.Namespace, capture: bool
) -> Iterator[tuple[str, int, Callable[[int], object]]]:
    """(name of the run, repeats, what one repeat does), one after the other; each is done with when the next is asked for."""
    from kvrecall import RetrievalCache, attach
    from kvrecall.backends.transformers.cache_name import cache_argument
    from kvrecall.engine import generate

    prompt = torch.randint(3, 320, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)).to(model.device)
    with attach(model), torch.no_grad():
        cache = RetrievalCache(model.config, method)
        model(prompt, **cache_argument(cache))

        def step(i: int) -> None:
            model(prompt[:, i % PROMPT_TOKENS, None], **cache_argument(cache))
            if i % KEPT_STEPS == KEPT_STEPS - 1:
                cache.crop(-KEPT_STEPS)

        yield "steps", sizes.steps, step

    def answer(ids: Tensor, held: Any, tokens: int, captured: bool | None) -> None:
        generate(model, None, ids, held, max_new_tokens=tokens, capture=captured)

    yield "generate", sizes.calls, lambda i: answer(prompt, method, NEW_TOKENS, capture or None)
    if capture:
        kept = RetrievalCache(model.config, method)
        repeats = max(2, sizes.steps // CAPTURED_STEPS)
        yield "captured", repeats, lambda i: answer(prompt, kept, min(CAPTURED_STEPS, sizes.steps), True)


@contextmanager
def injected(kind: str | None) -> Iterator[Callable[[], None]]:
    """A leak of one resource per call, to see that it is found; what leaked is given back at the end."""
    held: list[Any] = []
    stop = threading.Event()

    def thread() -> None:
        held.append(threading.Thread(target=stop.wait, daemon=True))
        held[-1].start()

    def registration() -> None:
        from transformers import AttentionInterface

        held.append(f"leak-{len(held)}")
        AttentionInterface.register(held[-1], lambda *_: None)

    def handler() -> None:
        signal.signal(signal.SIGRTMIN + len(held) % 20, lambda *_: None)
        held.append(None)

    leaks: dict[str | None, Callable[[], object]] = {
        None: lambda: None,
        "resident_bytes": lambda: held.append(bytearray(os.urandom(1 << 16))),
        "objects": lambda: held.append([[] for _ in range(20)]),
        "files": lambda: held.append(open(os.devnull)),  # noqa: SIM115
        "threads": thread,
        "handlers": handler,
        "registrations": registration,
        "device_allocated_bytes": lambda: held.append(torch.zeros(1 << 14, device="cuda")),
    }
    try:
        yield lambda: (leaks[kind](), None)[1]
    finally:
        stop.set()
        for each in held:
            if kind == "files":
                each.close()
            elif kind == "registrations":
                from transformers import AttentionInterface

                AttentionInterface._global_mapping.pop(each, None)
        if kind == "handlers":
            for number in range(20):
                signal.signal(signal.SIGRTMIN + number, signal.SIG_DFL)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--capture", choices=("auto", "no"), default="auto", help="auto: on a GPU, where the method can")
    parser.add_argument("--inject", help="leak this resource in every repeat, to see that it is found")
    parser.add_argument("--out", type=Path, help="CSV or JSON")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    model, count = tiny_model(device), Counter(device)
    gc.collect()
    gc.freeze()  # what is there now is neither counted nor searched, which takes longer than the steps themselves
    findings: list[Finding] = []
    print(f"{'method':18} {'run':9} {'repeats':>7} {'resource':22} {'first':>13} {'halfway':>13} {'last':>13} {'grown':>11}")
    with injected(args.inject) as leak:
        for name in args.methods.split(","):
            method = chosen_method(name)
            capture = device.type == "cuda" and args.capture == "auto" and _can_capture(model, method)
            for run, repeats, step in runs(model, method, args, capture):
                found = measure(name, run, repeats, lambda i, step=step: (step(i), leak()), count)
                findings += found
                for each in found:
                    numbers = f"{each.first:13,} {each.halfway:13,} {each.last:13,} {each.grown:11,.0f}"
                    print(
                        f"{name:18} {run:9} {repeats:7} {each.resource:22} {numbers}{'  LEAK' if each.leaks else ''}",
                        flush=True,
                    )
            if args.out:
                write(args.out, findings)
    gc.unfreeze()
    leaking = [f"{each.method} {each.run}: {each.resource}" for each in findings if each.leaks]
    print(f"{len(findings)} counted, {len(leaking)} leak" + "".join(f"\n  {line}" for line in leaking))
    return 1 if leaking else 0


def _can_capture(model: Any, method: Any) -> bool:
    from kvrecall.core.errors import CaptureError
    from kvrecall.engine import generate

    prompt = torch.full((1, PROMPT_TOKENS), 5, device=model.device)
    try:
        generate(model, None, prompt, method, max_new_tokens=NEW_TOKENS, capture=True)
    except CaptureError as error:
        print(f"{method.name}: not captured ({error})", file=sys.stderr)
        return False
    return True


def write(path: Path, findings: list[Finding]) -> None:
    """The findings with what they were measured on, by the ending of the name."""
    from benchmarks.rows import environment, write_csv

    if path.suffix == ".json":
        rows = [{**vars(each), "leaks": each.leaks} for each in findings]
        path.write_text(json.dumps({"environment": environment(), "findings": rows}, indent=1) + "\n", encoding="utf-8")
    else:
        write_csv(path, findings)


if __name__ == "__main__":
    sys.exit(main())
