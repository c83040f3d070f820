"""Every causal architecture of the installed vLLM that can be made tiny: equal to vLLM's own backends on a CPU, or refused.

`make test-vllm-zoo` runs it and writes docs/design/families.md from what it leaves in build/zoo-vllm/.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm-zoo")
from vllm import ModelRegistry, __version__

from tests.zoo.tiny import SPECIAL_FROM, Family, families, tiny_model

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "build" / "zoo-vllm"
EVERY = [f for f in families() if f.model_class in ModelRegistry.get_supported_archs()]
TIES = {"float32": 1e-3, "bfloat16": 0.15}
"""Log-probabilities of two tokens that may change places; they spread by 1 to 2."""
SETTINGS: dict[str, Any] = {
    "max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 4, "enable_prefix_caching": True,
}  # fmt: skip
OURS: dict[str, Any] = {
    "method": "pariskv-balanced", "top_k": 4096, "sink_tokens": 16, "local_tokens": 64, "full_attention_threshold": 0,
    "host_memory": "512MiB",
}  # fmt: skip


def prompts() -> list[list[int]]:
    """Random tokens; two begin with the same 150 tokens. One is longer than a pass."""
    draw = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, SPECIAL_FROM, (count,), generator=draw).tolist()

    first = ids(150)
    return [first + ids(30), first + ids(140), ids(40), ids(330)]


@dataclass
class Found:
    """What became of a family. dtype: of the model. outcome: `equal`, `refused`, `not made`, or `fault`."""

    name: str
    model_class: str
    version: str
    dtype: str = ""
    outcome: str = "not made"
    message: str = ""


def last_line(text: str) -> str:
    """What an engine that ends says at last; kvrecall's own word, if it has one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("kvrecall: ")]
    errors = [line.rpartition("] ")[2].removeprefix("[rank0]:").strip() for line in lines if re.search(r"[a-z]Error: ", line)]
    return (own or errors or lines or [""])[-1]


def answers(folder: Path, dtype: str, own: dict[str, Any] | None) -> dict[str, Any] | str:
    """What an engine answers to two rounds of the prompts, or what it says at its end."""
    settings = SETTINGS | {"dtype": dtype}
    if own is not None:
        settings |= {"attention_backend": "CUSTOM", "additional_config": {"kvrecall": own}}
    job = {
        "model": str(folder), "settings": settings, "rounds": [prompts()] * 2, "tokens": 12,
        "sampling": {"temperature": 0, "logprobs": 2}, "out": str(folder / "out.json"),
    }  # fmt: skip
    told = folder / "job.json"
    told.write_text(json.dumps(job))
    Path(job["out"]).unlink(missing_ok=True)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(ROOT / "tests" / "backends" / "vllm" / "engine.py"), str(told)]
    try:
        made = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False
        )
    except subprocess.TimeoutExpired:
        return "it had not answered after 280 s"
    return json.loads(Path(job["out"]).read_text()) if made.returncode == 0 else last_line(made.stderr + made.stdout)


def difference(made: dict[str, Any], expected: dict[str, Any], tie: float) -> str:
    """The first answer that parts from the expected one where no two tokens are equally likely; empty if there is none."""
    for number, (one, other) in enumerate(zip(made["rounds"], expected["rounds"], strict=True)):
        for which, (got, wanted) in enumerate(zip(one, other, strict=True)):
            (ids,), (right,), (likely,) = got["tokens"], wanted["tokens"], wanted["logprobs"]
            for place, (token, expected_token) in enumerate(zip(ids, right, strict=True)):
                if token == expected_token:
                    continue
                first, second = [*likely[place].values()][:2]
                if abs(first - second) > tie:
                    return f"prompt {which} of round {number} parts after {place} tokens, by {abs(first - second):.3f}"
                break
    return ""


def compared(family: Family, folder: Path) -> Found:
    found = Found(family.name, family.model_class, __version__)
    try:
        model = tiny_model(family)
        model.save_pretrained(folder)
    except Exception as error:
        found.message = f"{type(error).__name__}: {error}"
        return found
    expected: dict[str, Any] | str = ""
    for found.dtype in TIES:
        expected = answers(folder, found.dtype, None)
        if isinstance(expected, dict) or not re.search("bf16|dtype|bfloat|float", expected, re.IGNORECASE):
            break
    if isinstance(expected, str):
        found.message = f"vLLM's own backends: {expected}"
        return found
    made = answers(folder, found.dtype, OURS)
    if isinstance(made, str):
        refused = made.startswith(("kvrecall: ", "kvrecall.core.errors."))
        found.outcome, found.message = ("refused", made.split(": ", 1)[1]) if refused else ("fault", made)
        return found
    found.message = difference(made, expected, TIES[found.dtype]) or ("" if made["searches"] else "nothing was searched")
    found.outcome = "fault" if found.message else "equal"
    return found


@pytest.mark.zoo
@pytest.mark.parametrize("family", EVERY, ids=lambda f: f.name)
def test_equal_or_refused(family: Family, tmp_path: Path) -> None:
    found = compared(family, tmp_path)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{family.name.replace(' ', '-')}.json").write_text(json.dumps(asdict(found)))
    assert found.outcome != "fault", found.message
