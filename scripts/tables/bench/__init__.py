"""Tables and figures of docs/performance.md, from the rows of the benchmarks."""
