"""`kvrecall serve --engine vllm` over HTTP: one server for all that is asked of it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
from transformers import LlamaForCausalLM

from tests.backends.vllm.test_engine_state import home  # noqa: F401
from tests.tiny import word_tokenizer

CODE = "from kvrecall.cli import main; main()"
PROMPT = torch.randint(3, 512, (300,), generator=torch.Generator().manual_seed(5)).tolist()


class Server:
    """A running server: requests, and what it counts."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def wait(self, seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def complete(self, prompt: list[int], tokens: int, **more: Any) -> list[str]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return [choice["text"] for choice in json.load(answer)["choices"]]

    def hang_up(self, prompt: list[int], tokens: int) -> None:
        """Reads a few events of a stream, and closes the connection."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        events = [answer.readline() for _ in range(6)]
        assert events[0].startswith(b"data: {")
        connection.close()
        answer.close()

    def counts(self) -> dict[str, float]:
        """Of `/metrics`, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    def count(self, name: str, label: str = "") -> float:
        found = [value for key, value in self.counts().items() if key.split("{")[0] == name and label in key]
        assert found, name
        return sum(found)

    def settles(self, name: str, value: float, label: str = "") -> bool:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            if self.count(name, label) == value:
                return True
            time.sleep(0.2)
        return False


SETTINGS = "top_k=4096", "sink_tokens=16", "local_tokens=64", "full_attention_threshold=0"


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:  # noqa: F811
    word_tokenizer(512).save_pretrained(home / "tiny")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ["--engine", "vllm", "--port", port, "--context", "2k", "--dtype", "float32"]
    ours += [text for one in SETTINGS for text in ("--set", one)]
    theirs = ["--enforce-eager", "--max-num-seqs", 8, "--max-num-batched-tokens", 256, "--block-size", 128]
    theirs += ["--served-model-name", "tiny"]
    command = [sys.executable, "-c", CODE, "serve", home / "tiny", *ours, "--", *theirs]
    told = os.environ | {"KVRECALL_MODELS": str(home / "models"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = home / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen([str(text) for text in command], env=told, stdout=out, stderr=out)
    made = Server(process, port, log)
    try:
        made.wait()
        yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def expected(home: Path) -> str:  # noqa: F811
    """What transformers' own model answers."""
    model: Any = LlamaForCausalLM.from_pretrained(home / "tiny", dtype=torch.float32)
    out = model.generate(torch.tensor([PROMPT]), max_new_tokens=32, min_new_tokens=32, do_sample=False)
    return word_tokenizer(512).decode(out[0, len(PROMPT) :])


def test_the_server_is_vllm_s_own_process(server: Server) -> None:
    said = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().split(b"\0")
    assert b"CUSTOM" in said and b"128" in said and b"2048" in said and CODE.encode() not in said


def test_clients_at_once_get_what_one_gets_alone(server: Server, expected: str) -> None:
    """Two answers each, drawn so cold that each is the greedy one; budgets cover everything."""
    alone = server.complete(PROMPT, 32)
    assert alone[0].split() == expected.split()
    others = [PROMPT[: 150 + 20 * n] + [7] for n in range(3)]
    with ThreadPoolExecutor(4) as clients:
        both = list(clients.map(lambda ids: server.complete(ids, 32, n=2, temperature=0.01), [PROMPT, *others]))
    assert both[0] == alone * 2
    assert both[1:] == [server.complete(ids, 32) * 2 for ids in others]


def test_beams_are_transformers_own(server: Server, home: Path) -> None:  # noqa: F811
    """Every step of a beam is a request of its own, which finds the beam's blocks in the cache."""
    model: Any = LlamaForCausalLM.from_pretrained(home / "tiny", dtype=torch.float32)
    made = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=8, min_new_tokens=8, do_sample=False, num_beams=3, num_return_sequences=3
    )
    expected = [word_tokenizer(512).decode(ids[len(PROMPT) :]).split() for ids in made]
    assert [text.split() for text in server.complete(PROMPT, 8, n=3, use_beam_search=True)] == expected


def test_metrics_tell_what_steps_have_searched_and_fetched(server: Server) -> None:
    """31 steps behind a prompt of 300 tokens search in what 16 sinks and 64 recent ones leave; a budget that covers everything
    selects all of it, in 3 layers of 2 heads of 64 numbers, fp32."""
    assert server.settles("vllm:num_requests_running", 0)
    time.sleep(2.5)
    before = {name: server.count(f"kvrecall:{name}_total") for name in ("searches", "searched_tokens", "fetched_bytes")}
    server.complete(PROMPT, 32)
    among = sum(300 + n - 16 - 64 for n in range(1, 32))
    assert server.settles("kvrecall:searches_total", before["searches"] + 31)
    assert server.settles("kvrecall:searched_tokens_total", before["searched_tokens"] + among)
    assert server.settles("kvrecall:fetched_bytes_total", before["fetched_bytes"] + among * 3 * 2 * 2 * 64 * 4)
    assert server.count("kvrecall:fetched_rows_total") == server.count("kvrecall:selected_rows_total") > 0


def test_a_client_that_hangs_up_leaves_nothing(server: Server, expected: str) -> None:
    before = server.count("vllm:generation_tokens_total")
    server.hang_up(PROMPT, 1500)
    assert server.settles("vllm:num_requests_running", 0)
    assert server.count("vllm:generation_tokens_total") - before < 1500
    assert server.complete(PROMPT, 32)[0].split() == expected.split()
    assert server.settles("vllm:kv_cache_usage_perc", 0) and server.count("vllm:num_requests_waiting") == 0
