"""A server of a tiny model in a thread of this process, and its clients."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

import torch

from kvrecall import engine

CHAT = (
    "{% for m in messages %}w3 {{ m['role'] == 'user' and 'w4' or 'w5' }} {{ m['content'] }} w6 {% endfor %}"
    "{% if add_generation_prompt %}w3 w5 {% endif %}"
)


def served_tokenizer() -> Any:
    """320 words, the first three of them special tokens, and a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "<eos>", "<pad>", *(f"w{number}" for number in range(3, 320))]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    return tokenizer


def words(count: int, seed: int) -> str:
    """A text of random words."""
    drawn = torch.randint(10, 320, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in drawn.tolist())


def said(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


class Client:
    """Of the server at a port. Bodies get the model's name, greedy decoding and 12 tokens, unless they say otherwise."""

    def __init__(self, port: int) -> None:
        self.port = port

    def body(self, more: dict[str, Any]) -> bytes:
        return json.dumps({"model": "tiny", "max_tokens": 12, **more}).encode()

    def post(self, path: str, **more: Any) -> tuple[int, Any]:
        """Status and JSON; of a stream, the list of its events."""
        return self.send(path, self.body(more))

    def send(self, path: str, data: bytes | None = None, kind: str = "application/json") -> tuple[int, Any]:
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": kind})
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                text = answer.read().decode()
                if answer.headers["Content-Type"].startswith("text/event-stream"):
                    *events, last, end = text.split("\n\n")
                    assert (last, end) == ("data: [DONE]", "")
                    return answer.status, [json.loads(event.removeprefix("data: ")) for event in events]
                return answer.status, json.loads(text)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def chat(self, text: str | Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        status, answer = self.post("/v1/chat/completions", messages=said(text) if isinstance(text, str) else text, **more)
        assert status == 200, answer
        return answer

    def text(self, text: str | Sequence[dict[str, Any]], **more: Any) -> str:
        return self.chat(text, **more)["choices"][0]["message"]["content"]

    def left(self, when: Callable[[], bool], **more: Any) -> None:
        """A request whose client leaves as soon as `when()` is true."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", "/v1/chat/completions", self.body(more), {"Content-Type": "application/json"})
            until(when)


def until(when: Callable[[], bool], seconds: float = 60, told: Callable[[], str] = lambda: "it never became true") -> None:
    """Waits until `when()` is true. told: what to say if it is not in time."""
    end = time.monotonic() + seconds
    while not when():
        assert time.monotonic() < end, told()
        time.sleep(0.01)


@contextmanager
def serving(service: Any) -> Iterator[Client]:
    """Serves inside; afterwards the server ends within seconds, whatever still runs."""
    from kvrecall.engine.http_server import Server, listening

    server = Server(service)
    with listening("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield Client(bound.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(10)
            assert not thread.is_alive(), "the server does not end"


def alone(model: Any, tokenizer: Any, method: Any, messages: Sequence[dict[str, str]], tokens: int = 12) -> str:
    """The answer of `engine.generate` without a server, to the ids of the chat template."""
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    return engine.generate(model, tokenizer, ids, method, max_new_tokens=tokens).texts[0]  # type: ignore[index]


@contextmanager
def tokens_read(model: Any) -> Iterator[list[int]]:
    """How many tokens each call of the model feeds that is no decode step, one number per call."""
    seen: list[int] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]) if kwargs["input_ids"].shape[1] > 1 else None,
        with_kwargs=True,
    )
    try:
        yield seen
    finally:
        hook.remove()
