"""The server over transformers: answers as without it, what later requests need not read, refusals, clients that leave."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvrecall.core.extras import SERVER

if any(find_spec(name) is None for name in SERVER):
    pytest.skip('the server needs: pip install ".[serve]"', allow_module_level=True)

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import HostMemoryError, NonFiniteError
from kvrecall.engine import Engine
from kvrecall.engine.document import Document
from kvrecall.engine.loop import loop_of
from kvrecall.engine.serving import Service, _TextDecoder
from tests.backends.models import tiny
from tests.engine.served import Client, alone, said, served_tokenizer, serving, tokens_read, until, words
from tests.engine.users import METHODS, idle, in_threads, rows_per_call
from tests.tiny import byte_tokenizer, save_tiny_model

PARIS = METHODS["pariskv"]
DOCUMENT = words(700, 1)


def service(model: Any = None, method: kvrecall.Method = PARIS, **more: Any) -> Service:
    return Service(model or tiny("llama"), served_tokenizer(), "tiny", method, **{"prefix_bytes": 1 << 30, **more})


@pytest.fixture
def made() -> Service:
    return service()


@pytest.fixture
def client(made: Service) -> Iterator[Client]:
    with serving(made) as client:
        yield client
    until(lambda: idle(made.model))


def test_answers_are_those_without_a_server(made: Service, client: Client) -> None:
    messages = [*said(words(90, 2)), {"role": "assistant", "content": words(9, 3)}, *said(words(20, 4))]
    expected = alone(made.model, made.tokenizer, PARIS, messages)
    answer = client.chat(messages)
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": expected}, "logprobs": None, "finish_reason": "length"}
    ]
    usage = {"prompt_tokens": 130, "completion_tokens": 12, "total_tokens": 142, "prompt_tokens_details": {"cached_tokens": 0}}
    assert answer["usage"] == usage and answer["model"] == "tiny" and answer["object"] == "chat.completion"
    events: Any = client.chat(messages, stream=True, stream_options={"include_usage": True})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]) == expected
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == usage and len({event["id"] for event in events}) == 1
    parts = [{"type": "text", "text": messages[0]["content"][:50]}, {"type": "text", "text": messages[0]["content"][50:]}]
    assert (
        client.text([{"role": "user", "content": parts}, *messages[1:]], n=1, logprobs=False, frequency_penalty=0.0) == expected
    )


def test_completions_continue_a_text_or_its_ids(made: Service, client: Client) -> None:
    text = words(60, 5)
    ids = made.tokenizer(text, return_tensors="pt").input_ids
    expected = engine.generate(made.model, made.tokenizer, ids, PARIS, max_new_tokens=16).texts
    for prompt in (text, ids[0].tolist()):
        status, answer = client.post("/v1/completions", prompt=prompt, max_tokens=None)
        assert status == 200 and [each["text"] for each in answer["choices"]] == expected
    _, events = client.post("/v1/completions", prompt=text, max_completion_tokens=16, max_tokens=None, stream=True)
    assert ["".join(event["choices"][0]["text"] for event in events)] == expected


def test_sampled_answers_follow_their_seed(made: Service, client: Client) -> None:
    ask = partial(client.text, words(40, 6), temperature=1.0)
    assert ask(seed=1) == ask(seed=1) != ask(seed=2)
    assert ask(seed=1, top_p=1e-6) == ask(temperature=0)


def test_answers_end_at_a_stop_string_or_token(made: Service, client: Client) -> None:
    question = words(50, 7)
    expected = alone(made.model, made.tokenizer, PARIS, said(question), 12)
    word = next(word for word in expected.split() if word != expected.split()[0])
    begin = expected.index(word)
    for stop in (word, ["nowhere", word], expected[begin - 3 : begin + 2]):
        cut = expected[
            : min(place for each in (stop if isinstance(stop, list) else [stop]) if (place := expected.find(each)) >= 0)
        ]
        answer = client.chat(question, stop=stop)
        assert answer["choices"][0]["message"]["content"] == cut and answer["choices"][0]["finish_reason"] == "stop"
        events: Any = client.chat(question, stop=stop, stream=True)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == cut
    assert client.text(question, stop=f"{expected[-4:]}!") == expected
    made.ends = [made.tokenizer.convert_tokens_to_ids(expected.split()[2])]
    assert client.chat(question, max_tokens=3)["choices"][0]["finish_reason"] == "stop"


def test_requests_are_decoded_together_and_answered_as_alone(made: Service, client: Client) -> None:
    questions = [words(count, count) for count in (20, 400, 90, 300, 33)]
    expected = [alone(made.model, made.tokenizer, PARIS, said(question), 24) for question in questions]
    with rows_per_call(made.model) as rows:
        answers = in_threads([partial(client.text, question, max_tokens=24) for question in questions])
    assert answers == expected and max(rows) > 1


@pytest.mark.parametrize("name", ["pariskv", "ctkvr", "prkv", "snapkv", "h2o"])
def test_the_second_question_about_a_document_does_not_read_it_again(name: str) -> None:
    """Whatever was asked before. Methods that remember a prompt's last queries share it if a new reading remembers the same."""
    made = service(method=METHODS[name] if name in METHODS else kvrecall.methods.get(name))
    questions = [f"{DOCUMENT} {words(count, count)}" for count in (300, 20, 40)]
    random.Random(name).shuffle(questions)
    expected = [alone(made.model, made.tokenizer, made.method, said(question)) for question in questions]
    with serving(made) as client, tokens_read(made.model) as read:
        for number, question in enumerate(questions):
            read.clear()
            answer = client.chat(question)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert answer["choices"][0]["message"]["content"] == expected[number]
            assert sum(read) == answer["usage"]["prompt_tokens"] - cached
            if name == "pariskv":
                assert cached == (702 if number else 0)
        conversation = [*said(questions[-1]), {"role": "assistant", "content": expected[-1]}, *said("w20")]
        answer = client.chat(conversation)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > (700 if name == "pariskv" else -1)
    assert answer["choices"][0]["message"]["content"] == alone(made.model, made.tokenizer, made.method, conversation)


def test_the_same_question_again_is_not_read_again_and_answered_the_same(made: Service, client: Client) -> None:
    first, second = client.chat(DOCUMENT), client.chat(DOCUMENT)
    assert first["choices"] == second["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == second["usage"]["prompt_tokens"] - 2


def test_questions_at_the_same_time_read_their_document_once(made: Service, client: Client) -> None:
    questions = [f"{DOCUMENT} {words(20, seed)}" for seed in range(4)]
    expected = [alone(made.model, made.tokenizer, PARIS, said(question)) for question in questions]
    with tokens_read(made.model) as read:
        assert in_threads([partial(client.text, question) for question in questions]) == expected
    assert sum(read) < 702 + 4 * 40


def test_models_that_cannot_forget_read_a_changed_prompt_again() -> None:
    made = service(tiny("gemma2"))
    with serving(made) as client:
        for seed in range(2):
            question = f"{DOCUMENT} {words(20, seed)}"
            assert client.text(question) == alone(made.model, made.tokenizer, PARIS, said(question))


def test_a_session_answers_under_its_name(tmp_path: Path) -> None:
    model, tokenizer = tiny("llama"), served_tokenizer()
    document = Document.of(model, tokenizer, DOCUMENT, method=PARIS)
    document.read()
    document.save(tmp_path / "report")
    expected = kvrecall.ask(model, tokenizer, tmp_path / "report", ["w20 w21", "w30"], max_new_tokens=12)
    read = Document.of(model, tokenizer, tmp_path / "report", method=PARIS)
    made = service(model, sessions={"report": read}, prefix_bytes=0)
    with serving(made) as client:
        assert [each["id"] for each in client.send("/v1/models")[1]["data"]] == ["tiny", "report"]
        for _ in range(2):
            for answer in expected:
                told = client.chat(answer.question, model="report")
                assert told["choices"][0]["message"]["content"] == str(answer)
                assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == read.tokens
        ids = [*read.prompt.prefix, 30, 31, 32]
        status, told = client.post("/v1/completions", prompt=ids)  # by content, under the model's name
        assert status == 200 and told["usage"]["prompt_tokens_details"]["cached_tokens"] == read.tokens
        turns = [*said("w20"), {"role": "assistant", "content": "w21"}, *said("w22")]
        prompt = read.prompt.conversation(["w20", "w21", "w22"])
        assert client.text(turns, model="report") == client.post("/v1/completions", prompt=prompt)[1]["choices"][0]["text"]
        for messages in ([{"role": "system", "content": "w3"}, *said("w20")], turns[:2]):
            status, told = client.post("/v1/chat/completions", model="report", messages=messages)
            assert status == 400 and "in turn for a session" in told["error"]["message"]
        status, told = client.post("/v1/completions", model="report", prompt="w20")
        assert status == 400 and "/v1/chat/completions" in told["error"]["message"]


def test_prompts_leave_when_memory_is_short(made: Service, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [words(700, seed) for seed in range(3)]
    cached = lambda text: client.chat(text, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"]  # noqa: E731
    assert [cached(text) for text in texts] == [0, 0, 0]
    made.prefixes.limit_bytes = made.prefixes.nbytes - 1
    assert cached(texts[0]) > 700 and cached(words(300, 9)) == 0  # the second one, least recently used, leaves
    assert [cached(text) > 700 for text in (texts[0], texts[2])] == [True, True]
    reserve, refused = kvrecall.RetrievalCache.reserve, list[int]()

    def short(cache: kvrecall.RetrievalCache, tokens: int, sequences: int = 1) -> None:
        if made.prefixes._kept:
            refused.append(tokens)
            raise HostMemoryError(2, 1, tokens)
        reserve(cache, tokens, sequences)

    monkeypatch.setattr(kvrecall.RetrievalCache, "reserve", short)
    assert cached("w20") == 0 and refused and not made.prefixes._kept  # all of them leave, and the request is answered
    monkeypatch.setattr(kvrecall.RetrievalCache, "reserve", lambda *_: (_ for _ in ()).throw(HostMemoryError(2, 1, 3)))
    status, told = client.post("/v1/chat/completions", messages=said("w20"), stream=True)
    assert status == 503 and "host memory" in told["error"]["message"]


def test_bytes_of_shared_blocks_count_once(made: Service, client: Client) -> None:
    client.chat(DOCUMENT)
    one = made.prefixes.nbytes
    for seed in (2, 3):
        client.chat(f"{DOCUMENT[: len(DOCUMENT) // 2]} {words(300, seed)}")
    assert len(made.prefixes._kept) == 3 and one < made.prefixes.nbytes < 3 * one


IMAGE = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}]
LONG = words(5000, 1)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"model": "other"}, 404, "unknown model 'other': expected one of tiny"),
        ({"model": None}, 400, "model: Input should be a valid string"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1, got 0"),
        ({"max_tokens": -1}, 400, "got -1"),
        ({"max_tokens": "x"}, 400, "max_tokens: Input should be a valid integer, got 'x'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_completion_tokens: expected max_tokens, 3, got 4"),
        ({"max_tokens": 10**12}, 400, "prompt and answer: expected at most 4,096 tokens"),
        ({"messages": said(LONG)}, 400, "prompt: expected at most 4,095 tokens, got 5,005"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": "x"}, 400, "messages: Input should be a valid list"),
        ({"messages": None}, 400, "messages"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, 400, "expected parts of type 'text', got 'image_url'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content: Input should be a valid string"),
        ({"messages": [{"role": "user"}]}, 400, "messages.0.content: Field required"),
        ({"messages": [{"role": "robot", "content": "w9"}]}, 400, "'system', 'user' or 'assistant', got 'robot'"),
        ({"messages": [{"role": "user", "content": "w9", "name": "Ada"}]}, 400, "name: expected no such field, got 'Ada'"),
        ({"messages": said("\ud800")}, 400, "text: expected characters, got 'half of a surrogate pair'"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number, got 'hot'"),
        ({"temperature": float("nan")}, 400, "temperature: Input should be a finite number"),
        ({"top_p": 7}, 400, "top_p"),
        ({"top_p": 0}, 400, "top_p"),
        ({"seed": "x"}, 400, "seed"),
        ({"seed": 1 << 64}, 400, "seed"),
        ({"stop": 5}, 400, "stop: Input should be a valid string, got 5"),
        ({"stop": [""]}, 400, "stop"),
        ({"n": 2}, 400, "n: expected 1, got 2. This server does not support it: leave it out."),
        ({"n": True}, 400, "n: expected 1, got True"),
        ({"logprobs": True}, 400, "logprobs: expected False, got True"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format: expected {'type': 'text'}"),
        ({"tools": [{"type": "function"}]}, 400, "tools: expected []"),
        ({"logit_bias": {"9": 100}}, 400, "logit_bias: expected {}"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: expected 0, got 0.5"),
        ({"generation_config": '{"cache_implementation": "static"}'}, 400, "generation_config: expected no such field"),
        ({"cache_implementation": "static"}, 400, "cache_implementation: expected no such field"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options: expected none without stream"),
        ({"\ud800": 1}, 400, "unable to parse raw data as a unicode string"),
    ],
    ids=lambda value: None if isinstance(value, (int, str)) else json.dumps(value)[:40],
)
def test_what_is_not_supported_is_refused_with_the_reason(
    shared: tuple[Service, Client], body: dict[str, Any], status: int, reason: str
) -> None:
    made, client = shared
    asked = {"messages": said("w9 w10"), **body}
    for stream in (False, True):
        with tokens_read(made.model) as read:
            got, told = client.post("/v1/chat/completions", **asked, **({"stream": True} if stream else {}))
        if stream and "stream_options" in body:
            continue
        assert got == status and reason in told["error"]["message"], told
        assert set(told["error"]) == {"message", "type", "param", "code"} and not read
        assert told["error"]["type"] == "invalid_request_error" and "\n" not in told["error"]["message"]


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Service, Client]]:
    made = service()
    with serving(made) as client:
        yield made, client


def test_bodies_paths_and_prompts_that_are_none(shared: tuple[Service, Client]) -> None:
    _, client = shared
    chat, plain = "/v1/chat/completions", "/v1/completions"
    for path, data, kind, status in (
        (chat, b"[" * 100_000, "application/json", 400), (chat, b"{", "application/json", 400),
        (chat, client.body({"messages": said("w9")}), "text/plain", 400), (chat, None, "", 405),
        ("/v1/responses", b"{}", "application/json", 404), ("/v1/models/other", None, "", 404),
        (plain, client.body({"prompt": ""}), "application/json", 400),
        (plain, client.body({"prompt": []}), "application/json", 400),
        (plain, client.body({"prompt": ["w9", "w10"]}), "application/json", 400),
        (plain, client.body({"prompt": [320]}), "application/json", 400),
        (plain, client.body({"prompt": [-1]}), "application/json", 400),
        (plain, client.body({"prompt": "w9", "echo": True}), "application/json", 400),
        (plain, client.body({"prompt": "w9", "logprobs": 0}), "application/json", 400),
    ):  # fmt: skip
        got, told = client.send(path, data, kind)
        assert got == status and told["error"]["message"] and told["error"]["type"] == "invalid_request_error"
    assert client.send("/health") == (200, {"status": "ok"})
    assert client.send("/v1/models/tiny")[1]["id"] == "tiny"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "expected a model with a chat template"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "messages[0]: expected"),
        ("{{ raise_exception('no system message') }}", "no system message"),
    ],
)
def test_what_the_template_refuses_or_leaves_out_is_refused(
    shared: tuple[Service, Client], template: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, client = shared
    monkeypatch.setattr(made.tokenizer, "chat_template", template)
    status, told = client.post("/v1/chat/completions", messages=[{"role": "system", "content": "w8"}, *said("w9")])
    assert status == 400 and reason in told["error"]["message"]


def test_an_error_inside_ends_only_its_request(
    shared: tuple[Service, Client], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, client = shared
    ask = partial(client.post, "/v1/chat/completions", messages=said("w9"))
    for error, reason in ((RuntimeError("secret"), "its log has the reason"), (NonFiniteError(0, 0), "NaN")):
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "submit", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
            for stream in (False, True):
                status, told = ask(stream=stream)
                assert status == 500 and told["error"]["type"] == "server_error" and reason in told["error"]["message"]
                assert "secret" not in json.dumps(told)
    with monkeypatch.context() as patch:
        patch.setattr(_TextDecoder, "add", lambda *_, **__: 1 / 0)
        status, events = ask(stream=True)  # after the status was sent
        assert status == 200 and events[-1]["error"]["type"] == "server_error"
    assert client.text("w9") == alone(made.model, made.tokenizer, PARIS, said("w9"))


@pytest.mark.parametrize(
    ("state", "stream"),
    [("reading", False), ("reading", True), ("waiting", True), ("decoding", False), ("decoding", True)],
    ids=lambda value: value if isinstance(value, str) else "streamed" if value else "whole",
)
def test_a_client_that_leaves_ends_its_request(made: Service, client: Client, state: str, stream: bool) -> None:
    loop = loop_of(made.model)
    held: dict[str, Callable[[], bool]] = {
        "reading": lambda: any(not job.decodes for job in loop._active),
        "waiting": lambda: bool(loop._waiting),
        "decoding": lambda: any(job.decodes for job in loop._active),
    }
    if state == "waiting":
        Engine.of(made.model).max_sequences = 1
        first = in_background(partial(client.text, words(30, 2), max_tokens=30))
        until(held["decoding"])
    more = {"messages": said(words(3000 if state == "reading" else 30, 8)), "max_tokens": 900, "stream": stream}
    client.left(held[state], **more)
    if state == "waiting":
        until(lambda: not loop._waiting)
        assert first() == alone(made.model, made.tokenizer, PARIS, said(words(30, 2)), 30)
    until(lambda: not loop._active and not loop._waiting, 10)
    assert client.text("w9") == alone(made.model, made.tokenizer, PARIS, said("w9"))


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts a call in a thread; the result waits for what it returns."""
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(1)
    future = executor.submit(call)
    executor.shutdown(wait=False)
    return lambda: future.result(60)


def test_a_server_that_stops_says_so_to_running_requests(made: Service) -> None:
    with serving(made) as client:
        whole = in_background(partial(client.post, "/v1/chat/completions", messages=said("w9"), max_tokens=3000))
        streamed = in_background(
            partial(client.post, "/v1/chat/completions", messages=said("w9"), max_tokens=3000, stream=True)
        )
        until(lambda: sum(job.decodes for job in loop_of(made.model)._active) == 2)
    assert whole() == (
        503,
        {"error": {"message": "The server is stopping.", "type": "server_error", "param": None, "code": None}},
    )
    assert streamed()[1][-1]["error"]["message"] == "The server is stopping."


def test_texts_are_whole_characters_and_blanks() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve 🛶, 一 boat"
    ids = tokenizer(text).input_ids
    for count in range(1, len(ids) + 1):
        decoder = _TextDecoder(tokenizer)
        pieces = [decoder.add(token, last=number == count) for number, token in enumerate(ids[:count], 1)]
        assert "".join(pieces) == tokenizer.decode(ids[:count]) and not any("\ufffd" in piece for piece in pieces[:-1])


def test_ctrl_c_ends_the_command_while_requests_run(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from kvrecall.cli import main; main()", "serve", str(folder), "--engine", "transformers"]
    command += ["--port", str(port), "--device", "cpu", "--dtype", "float32", "--method", "exact"]
    log, client = tmp_path / "log", Client(port)
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return client.send("/health")[0] == 200
        except OSError:
            return False

    try:
        until(answers, 400, log.read_text)
        assert "take up to" in log.read_text().replace("\n", " ")
        more = {"model": str(folder), "messages": said("the red boat"), "max_tokens": 16_000, "stream": True}
        ask = partial(client.post, "/v1/chat/completions", **more)
        running = in_background(ask)
        until(lambda: client.send("/health")[0] == 200)
        client.left(lambda: True, model=str(folder), messages=said("the red boat"))
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (130, -signal.SIGINT)  # by itself, or while a step still runs
        assert b"Traceback" not in log.read_bytes(), log.read_text()
        assert running()[0] in (200, 503)  # an error event if the stream had begun
    finally:
        process.kill()
        process.wait()
