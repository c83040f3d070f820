"""Page means: an estimate of what a search left out. A page's mean key and value stand for its tokens."""

from kvrecall.index.page_means.config import PageMeans
from kvrecall.index.page_means.index import PageMeansIndex

__all__ = ["PageMeans", "PageMeansIndex"]
