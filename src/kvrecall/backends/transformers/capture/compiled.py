"""Compiles the small tensor operations of a decoder by torch.compile: norms, feed-forward layers, the rotary embedding.

In plain PyTorch a norm is seven kernels and a rotary embedding about ten, each with a few microseconds of work for one token.
Compiled, each piece is one or two kernels. Only these pieces are compiled, each as its own graph; attention and everything else
runs as before. A piece is compiled once per shape and dtype for all layers, because a module's parameters are inputs of its
graph. It stays compiled for the life of the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from inspect import isfunction, signature
from subprocess import SubprocessError
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from transformers import PreTrainedModel

from kvrecall.backends.transformers.capture.projections import gated, gated_group, shared_products, untouched

ROTARY = "apply_rotary_pos_emb"
"""Name of the function that rotates queries and keys in transformers' modeling files."""
_SHAPES = 64
"""Most shapes, dtypes and devices per piece in one process; torch's default of 8 is less than the batch sizes of one server."""


@contextmanager
def compiled_modules(model: PreTrainedModel, backend: str | Callable[..., Any] = "inductor") -> Iterator[None]:
    """Inside, norms, dense feed-forward layers and the rotary embedding of `model` run compiled; everything is restored on
    exit.

    Not compiled are modules with hooks, with a replaced forward, or with linear layers of another class (quantized, adapted),
    and routers and experts. The rotary embedding is a function of the modeling file, so other models of that file run it
    compiled too. Results may differ from the plain model's by rounding, because intermediate values of a piece are not rounded
    to the model's dtype.

    backend: of torch.compile. Raises RuntimeError, from the first call, if a piece cannot be compiled: without a C compiler,
    for operations that are no single graph, after 64 shapes in one process.
    """
    with ExitStack() as undo:
        limit = max(_SHAPES, torch._dynamo.config.recompile_limit)
        undo.enter_context(torch._dynamo.config.patch(recompile_limit=limit))
        for module in pieces(model):
            together = gated_group(module)
            plain = type(module).forward
            if together is None:
                module.forward = partial(_compiled(plain, backend), module)
            else:
                module.forward = partial(_compiled(gated(plain), backend), module, *together)
            undo.callback(delattr, module, "forward")
        shared_products(model, undo)
        for file in _modeling_files(model):
            plain = getattr(file, ROTARY)
            setattr(file, ROTARY, _compiled(plain, backend))
            undo.callback(setattr, file, ROTARY, plain)
        try:
            yield
        except FailOnRecompileLimitHit as error:
            raise RuntimeError(f"torch.compile: more than {limit} shapes in one process") from error
        except BackendCompilerFailed as error:  # its own text begins with the name of the backend
            reason = error.inner_exception
            if isinstance(reason, torch.OutOfMemoryError):
                raise reason from error
            raise RuntimeError(f"torch.compile: {_said(reason)}") from error
        except (SubprocessError, OSError) as error:
            raise RuntimeError(f"torch.compile: {_said(error)}") from error


def pieces(model: nn.Module) -> list[nn.Module]:
    """The modules that `compiled_modules` compiles, in order."""
    experts = {child for module in model.modules() if isinstance(module, nn.ModuleList) for child in module.children()}
    return [x for x in model.modules() if untouched(x) and (_is_norm(x) or (x not in experts and _is_feed_forward(x)))]


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm") and not any(module.children())


def _is_feed_forward(module: nn.Module) -> bool:
    """Whether a module is linear layers and one activation, called with only the hidden states."""
    linear = [child for child in module.children() if type(child) is nn.Linear]
    others = [child for child in module.children() if type(child) is not nn.Linear]
    return (
        len(linear) > 1
        and len(others) == 1
        and not isinstance(others[0], nn.Dropout)
        and not any(True for _ in (*others[0].children(), *others[0].parameters(), *others[0].buffers()))
        and all(map(untouched, module.children()))
        and len(signature(type(module).forward).parameters) == 2
    )


def _modeling_files(model: nn.Module) -> list[ModuleType]:
    """Modeling files of the model's attentions whose rotary function is the original one."""
    names = {type(x).__module__ for x in model.modules() if type(x).__name__.endswith("Attention")}
    files = [sys.modules[name] for name in sorted(names)]
    found = [(file, getattr(file, ROTARY, None)) for file in files]
    return [file for file, rotate in found if isfunction(rotate) and not hasattr(rotate, "_torchdynamo_orig_callable")]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@cache
def _compiled(function: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, cached for later captures."""
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)
