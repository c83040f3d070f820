"""What every index offers. An index owns whatever depends on the memory layout of its summaries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from kvrecall.cache.blocks import BlockTable
from kvrecall.cache.prefetch import Zone
from kvrecall.cache.slot_zones import ZonePlan
from kvrecall.cache.zones import ZoneSizes
from kvrecall.core.archive import Archive
from kvrecall.core.errors import ParameterError, SessionError
from kvrecall.core.pieces import Work
from kvrecall.core.structs import Budget, HostTable, Selection
from kvrecall.index.calibration import LayerCalibration
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
    calibration: LayerCalibration | None = field(default=None, compare=False)
    """Rotary embedding and key statistics of the layer; None: an index that needs them gathers those of its first keys."""
    zone_start: int = 0
    """Position of the retrieval zone's first token."""


def calibrated(shape: LayerShape, calibration: LayerCalibration | None) -> LayerShape:
    """The shape with a calibration, unless it has one."""
    return shape if calibration is None or shape.calibration is not None else replace(shape, calibration=calibration)


class RowSource(Zone, Protocol):
    """The retrieval-zone rows of one sequence on the host, also by their ids."""

    @property
    def length(self) -> int:
        """Tokens of the zone."""
        ...

    def gather(self, ids: Tensor) -> Tensor:
        """Rows `[H_kv, n, 2, D]` of ids int `[H_kv, n]`, both on the CPU."""
        ...

    def table(self, device: torch.device) -> HostTable | None:
        """Where the rows lie, for reads by `device`; None where it cannot read them there."""
        ...


@runtime_checkable
class BlockSource(Protocol):
    """The zone of one sequence of one layer, as far as an index needs it that keeps its summaries in the same blocks."""

    @property
    def layer(self) -> int:
        """The layer's number."""
        ...

    @property
    def blocks_of_all_layers(self) -> BlockTable:
        """The block table of the sequence, which has room for a token before the token is appended to the index."""
        ...


@dataclass(frozen=True)
class Captured:
    """What a captured step can do beside the search of an index. static: leave out a static set. page_means: estimate what is
    not found."""

    static: bool = False
    page_means: bool = False


@dataclass(frozen=True)
class IndexConfig(Part, ABC):
    """What an index is made with: its hyper-parameters, and how the query heads of a group share its search (`gqa`)."""

    role: ClassVar[str] = "index"
    modes: ClassVar[tuple[str, ...]] = GQA_MODES
    """The GQA modes it supports."""

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
    """Whether its selections have a bias, so that every token counts."""

    estimates: ClassVar[bool] = False
    """Whether its selections have rows that stand for tokens that were not found."""

    captured: ClassVar[Captured | None] = None
    """What its searches can do in captured steps; None: they ask the host, so they cannot be in one."""

    in_blocks: ClassVar[bool] = False
    """Whether the summaries of a sequence lie in its blocks, so that they take memory for whole ones."""

    searches_on_host: ClassVar[bool] = False
    """Whether the CPU searches where it attends to the selection."""

    watches: ClassVar[bool] = False
    """Whether its indexes look at the attention of every query, of the prompt too (`Index.watch`)."""

    static_refusal: ClassVar[str] = ""
    """Why there can be no static set beside it; empty: there can."""

    @property
    def observed_queries(self) -> int:
        """How many of a prompt's last queries it wants to see at the end of the prompt."""
        return 0

    @property
    def needs_calibration(self) -> bool:
        """Whether it wants to know the model's rotary embedding and the statistics of its keys (`LayerShape.calibration`)."""
        return False

    @property
    def segment_lengths(self) -> tuple[int, int] | None:
        """Usual and longest length in tokens of the segments in which generated tokens are to arrive; None: any will do."""
        return None

    @abstractmethod
    def build(self, shape: LayerShape) -> Index:
        """An empty index for one layer."""

    @abstractmethod
    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes of the summaries of one sequence with `tokens` tokens in its retrieval zone."""

    def shared_nbytes(self, shape: LayerShape, layers: int, tokens: int) -> int:
        """Device bytes that all sequences of `layers` layers share, for zones of up to `tokens` tokens."""
        return 0


class Index(ABC):
    """Summaries of the retrieval-zone keys of one layer, for all its sequences, and the search over them.

    Token ids are positions inside a sequence's retrieval zone, in order of arrival.
    """

    lengths: list[int]
    """Tokens indexed per sequence."""

    def take_rows(self, sequence: int, rows: Tensor) -> None:  # noqa: B027 - optional: most indexes need no values
        """Shows rows `[H_kv, n, 2, D]` (any float dtype, on the layer's device) whose keys are appended next; what is kept of
        them must be a copy. Keys also come without rows: of an index that is made anew, or of steps that were captured."""

    @abstractmethod
    def append(self, sequence: int, keys: Tensor) -> None:
        """Indexes keys `[H_kv, n, D]` (any float dtype, on the layer's device) behind those of one sequence."""

    def append_generated(self, sequence: int, keys: Tensor) -> None:
        """As `append`, for one segment of tokens that left the window while decoding."""
        self.append(sequence, keys)

    def bind(self, sources: Sequence[RowSource]) -> None:  # noqa: B027 - optional: most indexes never look at rows again
        """Gives access to the rows that the indexed keys belong to, one source per sequence; called before anything else and
        again whenever the sequences change. Rows are stored before their keys are appended."""

    def end_of_prompt(self, sequence: int, observed: ObservedQueries | None, offset: int) -> None:  # noqa: B027 - optional
        """A prompt has been read in, decoding begins. observed: its last queries; None if nobody looked at them.
        offset: position of the retrieval zone's first token."""

    def mark_prompt(self, sequence: int, begin: int, end: int) -> None:  # noqa: B027 - optional: few care who wrote a token
        """Decoding begins: the tokens begin .. end - 1 came with a prompt. They are counted as the zone's are: those before 0
        are in the sink, the last ones may be in the window still and will come by `append_generated`."""

    def exclude(self, sequence: int, ids: Tensor | None) -> None:
        """Ascending ids int32 `[H_kv, m]` that searches must not return (they are attended anyway); replaces earlier ones."""
        raise NotImplementedError(type(self).__name__)

    def restructured(self, ids: Tensor | None, keys: Tensor) -> Work[Any]:
        """Makes what `restructure` needs, in pieces worth their tokens, and changes nothing. keys: those of the first n tokens,
        `[H_kv, n, D]` on the layer's device; they are read as long as the work lasts."""
        return
        yield

    def restructure(self, sequence: int, ids: Tensor | None, made: Any) -> None:
        """As `exclude`, with what `restructured` made for the same ids; tokens may have come since then."""
        self.exclude(sequence, ids)

    watches: bool = False
    """Whether it wants to be told by `watch`."""

    def watch(  # noqa: B027 - optional: few indexes look at past attention
        self, sequence: int, observed: ObservedQueries, resident: list[tuple[Tensor, int]], offset: int, scaling: float,
        attended: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Queries have attended, to what is resident and to `attended`; everything is stored by now.

        resident: keys `[H_kv, n, D]` outside the retrieval zone, with the position of their first. offset: position of the
        zone's first token. attended: ids int32 `[H_kv, m]` of the zone's tokens that a decode step attended to, -1 for none;
        None: to the whole zone, as a chunk of a prompt does, up to each query.
        """

    def learn(self, sequences: list[int]) -> None:  # noqa: B027 - optional: most indexes learn nothing from queries
        """Takes over what the last search of these sequences found out; called after their attention."""

    @abstractmethod
    def truncate(self, sequence: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens of one sequence."""

    def mark(self, sequence: int, prompt: bool) -> Any:
        """What is known of the sequence before a decode step, for `rewind`. prompt: the step ends a prompt."""
        return self.lengths[sequence]

    def rewind(self, sequence: int, mark: Any) -> None:
        """Undoes the last decode step of the sequence, before which `mark` gave the mark. By default as `truncate` does; an
        index that concludes more from a step than its tokens brings that back, too."""
        self.truncate(sequence, mark)

    def archive(self, archive: Archive, tokens: list[int]) -> None:
        """Writes down, or takes over, all that is known of every sequence; see `core.archive`. Before it takes over, the index
        is empty and bound to the sequences' blocks. tokens: of each sequence's zone; all of them are indexed.

        Raises SessionError for what it cannot be, and by default, for an index that cannot be saved."""
        remedy = "Save a fork() under another method, or give the index a method `archive` (docs/design/sessions.md)."
        raise SessionError("index", "one that can be saved", type(self).__name__, remedy)

    @abstractmethod
    def select(self, sequences: list[int]) -> Self:
        """A new index whose sequence i is this one's `sequences[i]`; the two share nothing that either may change. One that
        keeps summaries in blocks and is bound must be bound to the copies' blocks before anything else."""

    def prepare(self, sequences: list[int]) -> None:  # noqa: B027 - optional: most tables are whole at any time
        """Makes what a search of these sequences needs and no append has made; after an error the index must be made anew."""

    @abstractmethod
    def search(self, queries: Tensor, budget: Budget, sequences: list[int]) -> Selection:
        """Finds the tokens to fetch. Changes nothing that another search would see; the result stays valid after later appends.

        queries: `[len(sequences), H_q, D]`, post-RoPE, any float dtype. Sequences with fewer tokens than the budget get all.
        """

    def candidates(self, queries: Tensor, budget: Budget, sequences: list[int]) -> list[Tensor] | None:
        """What the first stage of a search leaves for the last one, per sequence int64 `[H_kv, 1 or G, C]`; None where a
        search has one stage. For evaluation only."""
        return None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held on the device."""

    def reserve(self, tokens: int) -> None:  # noqa: B027 - optional: an index may grow as it likes
        """Announces that each sequence will reach `tokens` tokens, so that growth need not copy."""

    def slot_step(self, spec: SlotSpec) -> IndexStep:
        """This index's part of a device step, for sequences of indexes like this one; only where its config is `captured`."""
        raise NotImplementedError(type(self).__name__)

    def slot_plan(self, sizes: ZoneSizes, top_k: int, slots: int) -> ZonePlan | None:
        """The plan of its part's zones where the host counts them; None where the device does."""
        return None


def stack_selections(found: list[tuple[Tensor, Tensor]]) -> Selection:
    """Pads the per-sequence results (ids `[H_kv, K_b]`, counts `[H_kv]`) to one Selection."""
    width = max(ids.shape[-1] for ids, _ in found)
    padded = [torch.nn.functional.pad(ids, (0, width - ids.shape[-1]), value=-1) for ids, _ in found]
    return Selection(torch.stack(padded), torch.stack([counts for _, counts in found]))
