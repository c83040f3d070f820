"""kvrecall: long-context decoding with the KV cache in host memory.

    prefill --K,V--> cache --keys--> index --Selection--> fetch --rows--> attend --Partial--> merge --> out

Compact summaries of the keys stay on the device; each decode step finds the few keys that matter, fetches their rows from
host memory and attends to them together with a small dense window. Nothing is evicted.

    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=100))
    with kvrecall.attach(model):
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=256)

Importing this package changes nothing global.
"""

from kvrecall.integrations.transformers import RetrievalCache, attach
from kvrecall.methods.base import Method
from kvrecall.methods.exact import Exact
from kvrecall.methods.full import Full
from kvrecall.methods.pariskv import ParisKV

__version__ = "0.1.0"
__all__ = ["Exact", "Full", "Method", "ParisKV", "RetrievalCache", "__version__", "attach"]
