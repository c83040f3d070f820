"""Files that are damaged or meant to harm, made from sound ones of two hundred kilobytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Edit = Callable[[Path], object]

HIDDEN, VOCABULARY = 64, ["<unk>", "<s>", "</s>", *"abcdefghij", "ab"]
MATRICES = {
    "attn_q": (128, HIDDEN),
    "attn_k": (64, HIDDEN),
    "attn_v": (64, HIDDEN),
    "attn_output": (HIDDEN, 128),
    "ffn_gate": (64, HIDDEN),
    "ffn_up": (64, HIDDEN),
    "ffn_down": (HIDDEN, 64),
}


def tiny_gguf(path: Path, more: Callable[[Any], object] = lambda writer: None) -> Path:
    """A Llama of one layer with a tokenizer, as llama.cpp's converter writes it. more: writes further keys and tensors."""
    from gguf import GGUFWriter

    torch.manual_seed(0)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3, 3] + [1] * (len(VOCABULARY) - 3))
    writer.add_token_merges(["a b", "a b"])  # transformers 5.16 takes a single one apart
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_tensor("token_embd.weight", _random(len(VOCABULARY), HIDDEN))
    writer.add_tensor("output_norm.weight", _random(HIDDEN))
    for name, shape in MATRICES.items():
        writer.add_tensor(f"blk.0.{name}.weight", _random(*shape))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", _random(HIDDEN))
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random(*shape: int) -> Any:
    return (torch.randn(*shape) * 0.1).numpy()


def put(data: bytes, at: int, kind: str, value: int) -> bytes:
    """`data` with a number of a struct format at one place."""
    changed = bytearray(data)
    struct.pack_into(kind, changed, at, value)
    return bytes(changed)


def bad_gguf(data: bytes) -> dict[str, bytes]:
    """Name → a file that no reader may take for a sound one; data: the sound one."""
    cases = {
        f"cut to {part}": data[: max(4, int(len(data) * part))] for part in (0, 1e-4, 5e-4, 1e-3, 3e-3, 6e-3, 0.01, 0.3, 0.9999)
    }
    for value in (0, 1, 2, 2**31, 2**63, 2**64 - 1):
        cases[f"{value} tensors"] = put(data, 8, "<Q", value)
        cases[f"{value} keys"] = put(data, 16, "<Q", value)
    for value in (0, 1, 4, 2**31):
        cases[f"version {value}"] = put(data, 4, "<I", value)
    for value in (2**40, 2**63, 2**64 - 1):
        cases[f"key of {value} bytes"] = put(data, 24, "<Q", value)
    array = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 4
    for value in (15, 10**9, 2**40, 2**63):
        cases[f"array of {value}"] = put(data, array + 4, "<Q", value)
        cases[f"text of {value} bytes"] = put(data, array + 12, "<Q", value)
    for value in (0, 9, 10, 99):
        cases[f"array of type {value}"] = put(data, array, "<I", value)
    tensor = data.index(b"blk.0.attn_q.weight") + len("blk.0.attn_q.weight")
    for value in (0, 5, 2**31, 2**32 - 1):
        cases[f"{value} dimensions"] = put(data, tensor, "<I", value)
    for value in (0, 63, 2**40, 2**63):
        cases[f"dimension {value}"] = put(data, tensor + 4, "<Q", value)
    for value in (1, 8, 30, 99):
        cases[f"tensor of type {value}"] = put(data, tensor + 20, "<I", value)
    for value in (0, 1, 2**40, 2**63, 2**64 - 32, len(data) - 10):
        cases[f"offset {value}"] = put(data, tensor + 24, "<Q", value)
    for key, values in {
        "block_count": (0, 2, 10**6, 2**32 - 1),
        "embedding_length": (0, 10**6, 2**31),
        "feed_forward_length": (0, 10**6, 2**31),
        "attention.head_count": (0, 3, 2**31),
        "context_length": (0,),
    }.items():
        at = data.index(b"llama." + key.encode()) + len("llama." + key) + 4
        for value in values:
            cases[f"{key} {value}"] = put(data, at, "<I", value)
    nested = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    cases["arrays in arrays"] = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + nested
    return cases


def bad_safetensors(data: bytes) -> dict[str, bytes]:
    """Name → a file of weights that is damaged; data: the sound one."""
    length = struct.unpack_from("<Q", data)[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    first, second = [name for name in header if name != "__metadata__"][:2]

    def file(changed: Any, body: bytes = body) -> bytes:
        text = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        return struct.pack("<Q", len(text)) + text + body

    def with_first(**changes: Any) -> bytes:
        return file({**header, first: {**header[first], **changes}})

    cases = {f"cut to {part}": data[: int(len(data) * part)] for part in (0, 1e-4, 0.3, 0.9, 0.999)}
    for value in (0, 1, 2**31, 2**63, 2**64 - 1, len(data)):
        cases[f"header of {value} bytes"] = put(data, 0, "<Q", value)
    begin, end = header[first]["data_offsets"]
    return cases | {
        "negative offset": with_first(data_offsets=[-1, 5]),
        "offsets swapped": with_first(data_offsets=[end, begin]),
        "offset 2^63": with_first(data_offsets=[0, 2**63]),
        "overlap": file({**header, second: {**header[second], "data_offsets": [begin, end]}}),
        "shape 2^80": with_first(shape=[2**40, 2**40]),
        "negative shape": with_first(shape=[-1]),
        "unknown dtype": with_first(dtype="PICKLE"),
        "tensor taken out of the header": file({k: v for k, v in header.items() if k != first}),
        "more bytes than tensors": file(header, body + b"x" * 100),
        "header is a list": file(b"[]"),
        "header is deep": file(b"[" * 1_000_000),
        "metadata is a number": file({**header, "__metadata__": {"format": 5}}),
    }


NOT_OBJECTS = {
    "empty": b"",
    "cut": b'{"a": [1, 2',
    "list": b"[]",
    "number": b"5",
    "null": b"null",
    "text": b'"x"',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "bytes": bytes(range(256)),
    "UTF-16": "{}".encode("utf-16"),
}
"""What a file of settings may hold by accident or intent, and must not."""

ABSURD = {
    "hidden_size": (-1, 0, 10**9, 2**63, 1e300, "x", None, [], {}),
    "num_hidden_layers": (-1, 0, 2, 10**9, 2**63, 1e300, "x", None, [], {}),
    "num_attention_heads": (0, 10**9, 2**63, "x", None),
    "num_key_value_heads": (-1, 0, 10**9, 2**63, "x", []),
    "head_dim": (-1, 0, 10**9, 2**63, "x"),
    "vocab_size": (-1, 0, 10**9, 2**63, "x", None),
    "intermediate_size": (-1, 0, 10**9, 2**63, "x", None),
    "max_position_embeddings": (-1, 0, 1e300, "x", None),
    "model_type": ("x", "../../etc/passwd", 5, [], {}),
    "hidden_act": (0, "x", None),
    "dtype": (1e300, "x", []),
    "rope_parameters": (-1, "x", []),
    "quantization_config": (-1, "x", []),
    "auto_map": (-1, None),
}
"""Config values that no model of these weights can have."""


def config_edits(folder: Path) -> dict[str, Edit]:
    """Name → what damages the config of a copy of `folder`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def setting(**changes: Any) -> Edit:
        text = json.dumps({**config, **changes})
        return lambda copy: (copy / "config.json").write_text(text, encoding="utf-8")

    return {f"{key}={value!r}"[:40]: setting(**{key: value}) for key, values in ABSURD.items() for value in values}


def weight_edits(folder: Path) -> dict[str, Edit]:
    """Name → what damages the weights of a copy of `folder` in a way that the format allows."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    query = "model.layers.0.self_attn.q_proj.weight"

    def saving(changed: dict[str, torch.Tensor]) -> Edit:
        return lambda copy: save_file(changed, copy / "model.safetensors", metadata={"format": "pt"})

    def index(content: Any) -> Edit:
        def edit(copy: Path) -> None:
            (copy / "model.safetensors").unlink()
            (copy / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")

        return edit

    def files(name: object) -> Any:
        return {"metadata": {}, "weight_map": dict.fromkeys(weights, name)}

    return {
        "a weight is missing": saving({k: v for k, v in weights.items() if k != query}),
        "a weight has another shape": saving({**weights, query: torch.zeros(3, 3)}),
        "a layer too many": saving({**weights, query.replace("layers.0", "layers.1"): weights[query].clone()}),
        "no weights": saving({"x": torch.zeros(100_000)}),
        "index names a file of another folder": index(files(f"../{folder.name}/model.safetensors")),
        "index names an absolute path": index(files(str(folder / "model.safetensors"))),
        "index names what is missing": index(files("x.safetensors")),
        "index names numbers": index(files(5)),
        "index is a list": index([]),
        "index has no map": index({}),
        "index has a list": index({"metadata": {}, "weight_map": [1, 2]}),
    }
