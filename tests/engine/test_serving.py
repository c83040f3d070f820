"""transformers' own server with our cache: what `generate` of a served model does, and one server over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

import kvrecall
from kvrecall.backends.transformers.cache_name import CACHE, cache_argument
from kvrecall.core.errors import ContextLengthError, ParameterError
from kvrecall.core.extras import SERVER
from kvrecall.engine.serving import OneModel, retrieving, run, serve_arguments
from tests.tiny import save_tiny_model, tiny_tokenizer

METHOD = kvrecall.Exact(top_k=4096, sink_tokens=4, local_tokens=8)
"""Covers everything, though most of it lies in the retrieval zone."""
QUESTION = "the red boat . " * 20 + "Question : the harbour"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("served") / "model", max_tokens=256)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def asked(tokens: int, new: int = 12, **more: Any) -> dict[str, Any]:
    ids = torch.randint(5, 14, (1, tokens), generator=torch.Generator().manual_seed(1))
    told = GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0, **more)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "generation_config": told}


@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_rows_of_host_memory(model: Any, form: Any) -> None:
    with retrieving(model, METHOD, host_rows=form):
        made = model.generate(**asked(100, 4, return_dict_in_generate=True))
    assert made[CACHE].host_rows == form


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_of_the_callers_own_counts_under_either_name(model: Any, name: str) -> None:
    own = DynamicCache()
    with retrieving(model, METHOD):
        model.generate(**asked(100), **{name: own})
        told = asked(100, 4, return_dict_in_generate=True)
        made = model.generate(**told, **{name: None})
    assert own.get_seq_length() == 111 and isinstance(made[CACHE], kvrecall.RetrievalCache)


def test_generate_retrieves_inside_and_is_its_own_outside(model: Any) -> None:
    expected = model.generate(**asked(100))
    out = asked(100) | {"generation_config": GenerationConfig(max_new_tokens=12, return_dict_in_generate=True, pad_token_id=0)}
    with retrieving(model, METHOD):
        made = model.generate(**out)
        own = model.generate(**asked(100), **cache_argument(DynamicCache()))
    cache = getattr(made, CACHE)
    assert isinstance(cache, kvrecall.RetrievalCache) and cache.get_seq_length() == 111
    assert torch.equal(made.sequences, expected) and torch.equal(own, expected)
    assert "generate" not in vars(model) and torch.equal(model.generate(**asked(100)), expected)


def test_answers_end_at_the_limit_and_longer_prompts_are_refused(model: Any) -> None:
    for context, limit in ((None, 256), (512, 256), (110, 110)):
        with retrieving(model, METHOD, context):
            told = asked(limit - 4, min_new_tokens=4)
            assert model.generate(**told).shape[1] == limit and told["generation_config"].max_new_tokens == 4
            with pytest.raises(ContextLengthError, match=f"at most {limit - 1} tokens, got {limit}"):
                model.generate(**asked(limit))
    with retrieving(model, METHOD), pytest.raises(ParameterError, match="use_cache"):
        model.generate(**asked(20, use_cache=False))


def test_a_server_has_one_model() -> None:
    seen: list[dict[str, Any]] = []
    made = OneModel("model", "tokenizer", force_model="org/name")  # type: ignore[arg-type]
    assert made.load_model_and_processor("org/name@main", progress_callback=seen.append) == ("model", "tokenizer")
    assert seen == [{"status": "ready", "model": "org/name@main", "cached": True}]
    assert [each["id"] for each in made.get_gen_models()] == ["org/name"]
    with pytest.raises(ParameterError, match="This server has one model"):
        made.load_model_and_processor("org/other@main")


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process, self.address, self.log = process, address, log

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=30) as answer:
            return json.load(answer)

    def post(self, path: str, **body: Any) -> str:
        """Raises urllib's HTTPError for what is refused."""
        data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.address}{path}", data, kind), timeout=30) as answer:
            return answer.read().decode()

    def wait(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                return self.get("/health")
            except OSError:
                time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])


needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in SERVER), reason='transformers\' server needs: pip install ".[serve]"'
)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command: list[Any] = [sys.executable, "-c", "from kvrecall.cli import main; main()", "serve", folder]
    command += ["--engine", "transformers", "--port", port, "--device", "cpu", "--dtype", "float32", "--method", "exact"]
    command += [text for one in ("top_k=4096", "sink_tokens=4", "local_tokens=8") for text in ("--set", one)]
    log = folder.parent / "server.log"
    with log.open("wb") as out:
        told = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*map(str, command), "--", "--enable-cors"], env=told, stdout=out, stderr=out)
    made = Server(process, f"http://127.0.0.1:{port}", log)
    try:
        made.wait()
        yield made
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130) and b"Traceback" not in log.read_bytes()
    finally:
        process.kill()
        process.wait()


@needs_server
def test_the_server_answers_as_the_model_does(server: Server, model: Any, folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": QUESTION}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    expected = tokenizer.decode(out, skip_special_tokens=True)
    asks = {"model": str(folder), "messages": messages, "max_tokens": 24, "temperature": 0}
    answer = json.loads(server.post("/v1/chat/completions", **asks))
    assert expected and answer["choices"][0]["message"]["content"] == expected
    events = [
        line.removeprefix("data: ") for line in server.post("/v1/chat/completions", **asks, stream=True).splitlines() if line
    ]
    parts = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events if event != "[DONE]"]
    assert "".join(parts).split() == expected.split()
    assert [each["id"] for each in server.get("/v1/models")["data"]] == [str(folder)]


@needs_server
def test_what_the_server_refuses_is_answered_with_the_reason(server: Server, folder: Path) -> None:
    for body, said in (
        ({"prompt": "the red " * 200}, "at most 255 tokens, got 400"),
        ({"prompt": "the", "generation_config": '{"use_cache": false, "max_new_tokens": 4}'}, "use_cache"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            server.post("/v1/completions", model=str(folder), **body)
        assert refused.value.code == 400 and said in json.load(refused.value)["error"]["message"]
    assert json.loads(server.post("/v1/completions", model=str(folder), prompt="the red", max_tokens=3))["choices"]


@needs_server
def test_options_that_transformers_does_not_know_are_refused() -> None:
    def load() -> Any:
        raise AssertionError("nothing is loaded")

    with pytest.raises(ParameterError, match="--no-such"):
        run(serve_arguments("model", "127.0.0.1", 1, ["--no-such"]), load, METHOD, None)
