"""The interface of every index. An index alone knows the memory layout of its summaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from kvrecall.cache.copies import RowSource
from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError, SessionError
from kvrecall.core.fp8 import host_row_bytes
from kvrecall.core.pieces import Work
from kvrecall.core.structs import Budget, Pool, Selection
from kvrecall.index.statistics import LayerStatistics
from kvrecall.parts import Part
from kvrecall.select.gqa import GQA_MODES, check_mode
from kvrecall.select.queries import ObservedQueries

if TYPE_CHECKING:
    from kvrecall.index.step import IndexStep, SlotSpec


@dataclass(frozen=True)
class LayerShape:
    """Shape of one attention layer's cache: what an index must know to allocate."""

    sequences: int
    query_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    statistics: LayerStatistics | None = field(default=None, compare=False)
    """Rotary embedding and key statistics of the layer; None: unknown, and an index that needs them refuses."""
    zone_start: int = 0
    """Position of the retrieval zone's first token."""
    fp8_rows: bool = False
    """Whether rows in host memory are in eight bits with scales of their own (`core.fp8`)."""
    row_dtype: torch.dtype | None = None
    """In which rows are stored everywhere, if not in `dtype`: that of e4m3, with one scale per layer."""

    @property
    def token_bytes(self) -> int:
        """Key and value of one token in all KV heads, outside host memory."""
        return host_row_bytes(self.head_dim, self.stored_dtype, False) * self.kv_heads

    @property
    def stored_dtype(self) -> torch.dtype:
        """In which rows are stored."""
        return self.dtype if self.row_dtype is None else self.row_dtype

    @property
    def host_row_bytes(self) -> int:
        """Key and value of one token and KV head in host memory."""
        return host_row_bytes(self.head_dim, self.dtype, self.fp8_rows)


def with_statistics(shape: LayerShape, statistics: LayerStatistics | None) -> LayerShape:
    """The shape with these statistics, unless it has some."""
    return shape if statistics is None or shape.statistics is not None else replace(shape, statistics=statistics)


@dataclass(frozen=True)
class Captured:
    """What captured steps of an index support besides the search. static: static sets. page_means: an estimate of the
    tokens that were not found."""

    static: bool = False
    page_means: bool = False


@dataclass(frozen=True)
class IndexConfig(Part, ABC):
    """The hyper-parameters of an index. gqa: how the query heads of a group share its search."""

    role: ClassVar[str] = "index"
    modes: ClassVar[tuple[str, ...]] = GQA_MODES
    """The supported GQA modes."""

    gqa: str = "mean_softmax"

    def __post_init__(self) -> None:
        check_mode(self.gqa)
        if self.gqa not in self.modes:
            raise ParameterError("gqa", f"one of {', '.join(self.modes)} for {self.name}", self.gqa, self.refusal(self.gqa))

    @classmethod
    def refusal(cls, mode: str) -> str:
        """Why a GQA mode is not among `modes`."""
        return ""

    weighs: ClassVar[bool] = False
    """Whether its selections have a bias: each token has a weight of its own."""

    estimates: ClassVar[bool] = False
    """Whether its selections contain rows that stand for groups of tokens that were not found."""

    captured: ClassVar[Captured | None] = None
    """What captured steps support; None: its searches need the host, so they cannot be captured."""

    in_blocks: ClassVar[bool] = False
    """Whether the summaries lie in blocks, so that they take memory for whole blocks."""

    searches_on_host: ClassVar[bool] = False
    """Whether the CPU searches when the method attends on the host."""

    observes_attention: ClassVar[bool] = False
    """Whether the index sees the attention of every query, including the prompt's (`Index.observe_attention`)."""

    static_refusal: ClassVar[str] = ""
    """Why a static set is refused; empty if static sets are supported."""

    pages_refusal: ClassVar[str] = "its summaries have no form in blocks that requests share"
    """Why no engine with pages of its own (vLLM) can use the index; empty if one can (`paged`)."""

    def why_unpaged(self) -> str:
        """`pages_refusal` of an index with these parameters."""
        return self.pages_refusal

    @property
    def observed_queries(self) -> int:
        """How many of a prompt's last queries are passed to `Index.end_of_prompt`."""
        return 0

    @property
    def needs_statistics(self) -> bool:
        """Whether it needs the model's rotary embedding and key statistics (`LayerShape.statistics`)."""
        return False

    @property
    def segment_lengths(self) -> tuple[int, int] | None:
        """Usual and longest segment of generated tokens, in tokens; None: segments do not matter."""
        return None

    @abstractmethod
    def build(self, shape: LayerShape) -> Index:
        """An empty index for one layer."""

    @abstractmethod
    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes of the summaries of one sequence with `tokens` tokens in its retrieval zone."""

    def paged_bytes(self, shape: LayerShape, block_size: int) -> int:
        """Bytes of a layer's summaries in a block of an engine: a multiple of KV heads times tokens."""
        return self.nbytes(shape, block_size)

    def paged(self, shape: LayerShape, block_size: int) -> PagedIndex:
        """The index of a layer over an engine's blocks. Only if `why_unpaged` is empty."""
        raise NotImplementedError(type(self).__name__)

    @property
    def paged_tokens(self) -> int:
        """Tokens that a summary covers: a block and the window hold at least as many."""
        return 1

    def why_unpaged_on_gpu(self) -> str:
        """Why a GPU cannot search an engine's blocks with these parameters; empty if it can (`paged_kernels`)."""
        if type(self).paged_kernels is IndexConfig.paged_kernels:
            return "it has no kernels over blocks"
        return "gqa=per_head searches for each head, and kernels over blocks for a group" if self.gqa == "per_head" else ""

    def paged_kernels(self, shape: LayerShape, sizes: PagedSizes, like: PagedKernels | None = None) -> PagedKernels:
        """The index of a layer over an engine's blocks on a GPU. Only if `why_unpaged_on_gpu` is empty. like: that of another
        layer of this shape, which never runs at the same time; they share scratch."""
        raise NotImplementedError(type(self).__name__)

    def paged_candidates(self, longest: int, top_k: int) -> Tensor:
        """int32 `[longest + 1]`, on the CPU: how many tokens of a zone are reranked, by its length; 0 without a stage II."""
        return torch.zeros(longest + 1, dtype=torch.int32, device="cpu")

    def shared_nbytes(self, shape: LayerShape, layers: int, tokens: int) -> int:
        """Device bytes that all sequences of `layers` layers share, for zones of up to `tokens` tokens."""
        return 0


class PagedIndex(ABC):
    """The index of one layer over the blocks of an engine, driven by the host. A summary depends on a key and its position
    alone, so requests can share blocks.

    The page of a block begins with `IndexConfig.paged_bytes` bytes of summaries. Positions count from the beginning of a
    sequence, sinks included.
    """

    @abstractmethod
    def bind(self, pages: Tensor, rows: Tensor) -> None:
        """Sets the pages, uint8 `[blocks, n]`, and the rows `[blocks, H_kv, block_size, 2, D]`, which are stored before their
        summaries."""

    @abstractmethod
    def store(self, keys: Tensor, first: int, slots: Tensor) -> None:
        """Writes the summaries of keys `[H_kv, n, D]` at positions from `first` on. slots: int64 `[n]`, block * block_size +
        offset."""

    @abstractmethod
    def search(self, queries: Tensor, tables: list[list[int]], ends: list[int], sinks: int, budget: Budget) -> Selection:
        """Finds positions sinks .. ends[b] - 1 for queries `[b, H_q, D]`. tables: the blocks of each sequence."""


@dataclass(frozen=True)
class PagedSizes:
    """Sizes of a search over blocks on a GPU. together: tokens of a pass that are searched at a time. longest: tokens of a
    sequence. sinks: its first tokens, which are never found. row: numbers of a plan's row."""

    together: int
    longest: int
    top_k: int
    sinks: int
    row: int


@dataclass(frozen=True)
class PagedPrompts:
    """The tokens of a pass that belong to prompts, in chunks one behind the other. spans: of each chunk the row of the batch,
    the first position, and its tokens among these. chunks: int32 `[n, 4]`, of each chunk its row, how many tokens came before,
    its first token in the pass, and its tokens. slots: int64 `[n]`, block * block_size + offset of each token, < 0 for none.
    lengths: int32 `[n]`, tokens of its sequence up to it. blocks: int32 `[b, W]`, block tables of the rows."""

    spans: Sequence[tuple[int, int, slice]]
    chunks: Tensor
    slots: Tensor
    lengths: Tensor
    blocks: Tensor


class PagedKernels(ABC):
    """The index of one layer over the blocks of an engine, on a GPU, as `PagedIndex` on the host. Its launches, or torch
    functions of fixed sizes, never wait for the device, so a step can be recorded.

    together: tokens of a pass that it searches at a time. ids: int32 `[together, H_kv, K]`, the last selections, ascending,
    padded with -1. programs: how many programs of a step summarise a new token (`summary`). temporary_bytes: that a search
    allocates for its time.
    """

    together: int
    ids: Tensor
    programs: int = 0
    temporary_bytes: int = 0

    @abstractmethod
    def bind(self, pages: Tensor, pool: Pool) -> None:
        """As `PagedIndex.bind`. Rows of the window may not be there yet."""

    def take_statistics(self, shape: LayerShape) -> None:  # noqa: B027 - optional: few depend on statistics
        """Summaries follow from the statistics of `shape` from now on; none are written yet. Addresses stay."""

    def forget(self) -> None:  # noqa: B027 - optional: few learn from keys
        """Resets what it knows of the keys that it was given."""

    @abstractmethod
    def store(self, keys: Tensor, prompts: PagedPrompts) -> None:
        """Writes the summaries of keys `[n, H_kv, D]` of prompts. Earlier rows are in blocks."""

    def store_recent(self, window: Any, places: Tensor, slots: Tensor, lengths: Tensor) -> bool:
        """Writes the summaries of decoded tokens that the window has, instead of `summary`; returns whether it did: few tokens
        may be quicker by `summary`. window: `cache.paged_rows.Recent`. places: int64 `[n]`, the tokens' slots there. slots: as
        for `store_decoded`. lengths: int32 `[n]`, contiguous or not, tokens of their sequences up to them."""
        return False

    def store_decoded(self, keys: Tensor, slots: Tensor) -> None:  # noqa: B027 - optional: most summarise in the step's kernel
        """Writes the summaries of decoded tokens `[n, H_kv, D]`, unless `summary` does. slots: int64 `[n]`, block *
        block_size + offset, < 0 for none."""

    def summary(self) -> tuple[Any, tuple[Any, ...]]:
        """The function of Triton that summarises a new token, and its arguments (as `cache.paged_rows.summarise_nothing`)."""
        from kvrecall.cache.paged_rows import summarise_nothing

        return summarise_nothing, ()

    @abstractmethod
    def search(self, queries: Tensor, blocks: Tensor, plan: Tensor, fire: Tensor, scaling: float) -> None:
        """Fills ids for queries `[n, H_q, D]`, contiguous. blocks: int32 `[n, W]`. plan: int32 `[n, row]`, first
        `SEARCH_FIELDS` numbers: the end of the zone (its positions are sinks .. end - 1), and how many tokens are reranked.
        Both are 0 where fire int32 `[n]` is 0: such tokens do not search, and their ids are not read."""


SEARCH_FIELDS = 2
"""Numbers of a plan's row for the search (`PagedKernels.search`)."""


def sink_ids(heads: int, sinks: int) -> Tensor | None:
    """Ids of the sinks, int32 `[H_kv, sinks]`, which no search over an engine's blocks may find."""
    return torch.arange(sinks, dtype=torch.int32, device="cpu").expand(heads, -1).contiguous() if sinks else None


class Index(ABC):
    """Summaries of the retrieval-zone keys of one layer, for all its sequences, and the search over them.

    Token ids are positions inside a sequence's retrieval zone, in order of arrival.
    """

    lengths: list[int]
    """Tokens indexed per sequence."""

    def take_rows(self, sequence: int, rows: Tensor) -> None:  # noqa: B027 - optional: most indexes need no values
        """Shows rows `[H_kv, n, 2, D]` (any float dtype, on the layer's device) whose keys are appended next. An index must
        copy what it keeps. Keys may come without rows: when an index is rebuilt, and after captured steps."""

    @abstractmethod
    def append(self, sequence: int, keys: Tensor) -> None:
        """Adds keys `[H_kv, n, D]` (any float dtype, on the layer's device) at the end of one sequence."""

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        """As `append`, for one segment of tokens that left the window while decoding."""
        self.append(sequence, keys)

    _sources: Sequence[RowSource] = ()

    def bind(self, sources: Sequence[RowSource]) -> None:
        """Gives access to the rows of the indexed keys, one source per sequence. Called before everything else, and again
        whenever the sequences change. Rows are stored before their keys are appended."""
        self._sources = sources

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:  # noqa: B027 - optional
        """A prompt has been read, decoding begins. observed: the prompt's last queries, None if they were not recorded.
        offset: position of the retrieval zone's first token."""

    def mark_prompt(self, sequence: int, begin: int, end: int) -> None:  # noqa: B027 - optional: few care who wrote a token
        """Decoding begins: tokens begin .. end - 1 came with a prompt. Numbers are ids in the retrieval zone: negative ones
        are in the sink; the last ones may still be in the window and arrive later by `append_generated`."""

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        """Sets the ids, ascending int32 `[H_kv, m]`, that searches must not return because they are attended anyway."""
        raise NotImplementedError(type(self).__name__)

    def restructured(self, ids: Tensor | None, keys: Tensor) -> Work[Any]:
        """Prepares `restructure` in pieces of work and changes nothing. keys: of the first n tokens, `[H_kv, n, D]` on the
        layer's device; they are read until the work is done."""
        return
        yield

    def restructure(self, sequence: int, ids: Tensor | None, structure: Any) -> None:
        """As `exclude`. structure: the result of `restructured` for the same ids; tokens may have been added since."""
        self.exclude(sequence, ids)

    observes_attention: bool = False
    """Whether `observe_attention` must be called."""

    def observe_attention(  # noqa: B027 - optional: few indexes look at past attention
        self, sequence: int, observed: ObservedQueries, resident: list[tuple[Tensor, int]], offset: int, scaling: float,
        attended: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Shows queries after their attention to the resident tokens and to `attended`. All tokens are stored.

        resident: keys `[H_kv, n, D]` outside the retrieval zone, with the position of their first. offset: position of the
        zone's first token. attended: ids int32 `[H_kv, m]` of the zone's tokens that a decode step attended to, -1 for none;
        None: to the whole zone, as a chunk of a prompt does, up to each query.
        """

    def after_attention(self, sequences: list[int]) -> None:  # noqa: B027 - optional: most indexes learn nothing from queries
        """Learns from the last search of these sequences; called after their attention."""

    @abstractmethod
    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of one sequence."""

    def mark(self, sequence: int, prompt: bool) -> Any:
        """The state of the sequence before a decode step, for `rewind`. prompt: the step ends a prompt."""
        return self.lengths[sequence]

    def rewind(self, sequence: int, mark: Any) -> None:
        """Undoes the last decode step of the sequence. mark: from `mark` before the step. By default as `truncate`; an index
        that learns from a step must restore that, too."""
        self.truncate(sequence, mark)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        """Saves or loads the state of every sequence; see `core.archive`. Before loading, the index is empty and bound to
        the sequences' blocks. tokens: of each sequence's zone, all of them indexed.

        Raises SessionError for impossible values. By default raises SessionError: the index cannot be saved."""
        remedy = "Save a fork() under another method, or give the index a method `archive` (docs/design/sessions.md)."
        raise SessionError("index", "one that can be saved", type(self).__name__, remedy)

    @abstractmethod
    def select(self, sequences: list[int]) -> Self:
        """A new index whose sequence i is this one's `sequences[i]`. They share only memory that neither changes. An index
        with summaries in blocks must be bound to the copies' blocks before anything else."""

    def prepare(self, sequences: list[int]) -> None:  # noqa: B027 - optional: most tables are whole at any time
        """Computes what the next search of these sequences needs. After an error the index must be rebuilt."""

    @abstractmethod
    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """Finds the tokens to fetch. Does not influence other searches; the result stays valid after later appends.

        queries: `[len(sequences), H_q, D]`, post-RoPE, any float dtype. Sequences with fewer tokens than the budget get all.
        The result is on the queries' device.
        """

    def start_search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Callable[[], Selection]:
        """Starts a search. The function it returns ends the search and gives the result of `search`, on the device or the CPU.

        An index that searches on the CPU gives the device its part of the work here, so that the caller can give the device
        other work before the CPU waits. By default all of the search is started here."""
        selection = self.search(queries, budget, sequences)
        return lambda: selection

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        """The candidates that the first stage of a search leaves, per sequence int64 `[H_kv, 1 or G, C]`; None if a search
        has one stage. For evaluation only."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held on the device."""

    def reserve(self, tokens: int) -> None:  # noqa: B027 - optional: an index may grow as it likes
        """Announces that each sequence will reach `tokens` tokens, so that growth need not copy."""

    def slot_step(self, spec: SlotSpec) -> IndexStep:
        """This index's part of a device step, for all sequences of indexes of this kind. Only if its config is `captured`."""
        raise NotImplementedError(type(self).__name__)

    def slot_plan(self, sizes: ZoneSizes, top_k: int, slots: int) -> ZonePlan | None:
        """The plan of the zones if the host counts them; None if the device does."""
        return None


def nothing_found(sequences: int, heads: int, device: torch.device) -> Selection:
    """The selection of no tokens."""
    counts = torch.zeros(sequences, heads, dtype=torch.int32, device=device)
    return Selection(counts.new_empty(*counts.shape, 0), counts)


def stack_selections(pairs: list[tuple[Tensor, Tensor]]) -> Selection:
    """Pads the per-sequence results (ids `[H_kv, K_b]`, counts `[H_kv]`) to one Selection."""
    if len(pairs) == 1:
        return Selection(pairs[0][0].unsqueeze(0), pairs[0][1].unsqueeze(0))
    width = max(ids.shape[-1] for ids, _ in pairs)
    padded = [torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1) for ids, _ in pairs]
    return Selection(torch.stack(padded), torch.stack([counts for _, counts in pairs]))
