"""Tables and figures of notebook/performance.md, from the rows of the benchmarks."""
